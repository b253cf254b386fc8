//! Memory of this process that its allocator holds but does not use.

/// Returns unused memory to the kernel. The allocator itself returns only the end of its heaps, and
/// buffers of many sizes leave gaps everywhere else.
pub fn trim_heap() {
    crate::sys::trim_heap();
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    const BLOCK: usize = 2_000;
    const BLOCKS: usize = 20_000;

    fn resident() -> usize {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let value = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"))
            .unwrap();
        value
            .trim()
            .trim_end_matches("kB")
            .trim()
            .parse::<usize>()
            .unwrap()
            * 1024
    }

    #[test]
    fn unused_memory_between_used_blocks_is_returned() {
        let mut blocks: Vec<Option<Vec<u8>>> = (0..BLOCKS).map(|_| Some(vec![1; BLOCK])).collect();
        // Blocks that stay in use prevent the heap from shrinking.
        for (number, block) in blocks.iter_mut().enumerate() {
            if number % 20 != 0 {
                *block = None;
            }
        }
        let before = resident();
        trim_heap();
        let given = before.saturating_sub(resident());
        assert!(given > BLOCK * BLOCKS / 2, "{given} bytes");
    }
}
