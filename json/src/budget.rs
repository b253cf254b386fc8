//! The budget: nesting depth and memory of a text, computed from its bytes.
//!
//! The scan only distinguishes strings from structure. It accepts texts that are not valid JSON.
//! The decoder rejects those later, and up to the error it has seen the same tokens as the scan.

use memchr::memchr2;

/// The deepest nesting that `serde_json` decodes.
pub const MAX_DEPTH: usize = 127;

/// Memory of an object: one B-tree node with room for eleven members.
const OBJECT: usize = 640;
/// Memory of each further member. Nodes may be half empty.
const MEMBER: usize = 128;
/// Memory of a list: room for its first four elements.
const LIST: usize = 160;
/// Memory of each further element. Lists grow by doubling.
const ELEMENT: usize = 64;
/// Memory of a string besides its bytes.
const STRING: usize = 32;

/// Limits for a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Nesting depth of objects and lists, at most `MAX_DEPTH`.
    pub depth: usize,
    /// Bytes of memory for objects, lists, members and elements. The bytes of strings come on top:
    /// they never exceed the length of the text.
    pub memory: usize,
}

/// The limit that a text exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Excess {
    #[error("it is nested deeper than {0} levels")]
    Depth(usize),
    #[error("its objects and lists would take more than {} KiB of memory", .0 / 1024)]
    Memory(usize),
}

impl Budget {
    /// Returns the memory that the structure of `text` takes once decoded, or the limit that it
    /// exceeds.
    pub fn check(&self, text: &[u8]) -> Result<usize, Excess> {
        let (mut depth, mut memory) = (0_usize, 0_usize);
        let mut at = 0;
        while let Some(byte) = text.get(at) {
            at += 1;
            memory += match byte {
                b'"' => {
                    at = end_of_string(text, at);
                    STRING
                }
                b'{' | b'[' => {
                    depth += 1;
                    if depth > self.depth {
                        return Err(Excess::Depth(self.depth));
                    }
                    if *byte == b'{' { OBJECT } else { LIST }
                }
                b'}' | b']' => {
                    depth = depth.saturating_sub(1);
                    continue;
                }
                b':' => MEMBER,
                b',' => ELEMENT,
                _ => continue,
            };
            if memory > self.memory {
                return Err(Excess::Memory(self.memory));
            }
        }
        Ok(memory)
    }
}

/// Returns the position after the string whose first character is at `from`.
fn end_of_string(text: &[u8], mut from: usize) -> usize {
    while let Some(offset) = text.get(from..).and_then(|rest| memchr2(b'"', b'\\', rest)) {
        if text[from + offset] == b'"' {
            return from + offset + 1;
        }
        from += offset + 2;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    const AMPLE: Budget = Budget {
        depth: MAX_DEPTH,
        memory: usize::MAX,
    };

    /// Memory of a value without the bytes of its strings, from the sizes of its types.
    fn memory(value: &Value) -> usize {
        let node = 11 * (size_of::<String>() + size_of::<Value>()) + 16;
        match value {
            Value::Array(items) => {
                items.capacity() * size_of::<Value>() + items.iter().map(memory).sum::<usize>()
            }
            Value::Object(members) => {
                // Each node but the root is at least 5/11 full, and inner nodes hold 12 more
                // pointers.
                let nodes = members.len().div_ceil(5);
                nodes * node
                    + nodes / 6 * 12 * size_of::<usize>()
                    + members.values().map(memory).sum::<usize>()
            }
            _ => 0,
        }
    }

    #[test]
    fn a_small_text_that_takes_much_memory_is_refused() {
        let objects = |count: usize| format!("[{}0]", r#"{"":0},"#.repeat(count));
        let budget = Budget {
            depth: 10,
            memory: 1 << 20,
        };
        assert_eq!(
            budget.check(objects(10_000).as_bytes()),
            Err(Excess::Memory(1 << 20))
        );
        assert!(
            budget.check(objects(1000).as_bytes()).is_ok(),
            "the control"
        );
        // The same holds for elements and members without objects.
        assert!(
            budget
                .check(format!("[{}0]", "0,".repeat(20_000)).as_bytes())
                .is_err()
        );
        assert!(
            budget
                .check(format!("[{}0]", "[],".repeat(20_000)).as_bytes())
                .is_err()
        );
        assert!(
            budget
                .check(format!("{{{}\"\":0}}", "\"\":0,".repeat(20_000)).as_bytes())
                .is_err()
        );
        assert!(
            budget
                .check(format!("[{}0]", "0,".repeat(10_000)).as_bytes())
                .is_ok(),
            "the control"
        );
    }

    #[test]
    fn the_bytes_of_a_string_cost_nothing_whatever_they_look_like() {
        let text = serde_json::to_string(&r#"{[,:"\"#.repeat(100_000)).unwrap();
        assert_eq!(AMPLE.check(text.as_bytes()), Ok(STRING));
    }

    #[test]
    fn depth_is_that_of_the_parser() {
        let nested =
            |levels: usize| format!(r#"{}"]\"[{{"{}"#, "[".repeat(levels), "]".repeat(levels));
        for (levels, fits) in [
            (1, true),
            (MAX_DEPTH, true),
            (MAX_DEPTH + 1, false),
            (100_000, false),
        ] {
            let text = nested(levels);
            assert_eq!(AMPLE.check(text.as_bytes()).is_ok(), fits, "{levels}");
            assert_eq!(
                serde_json::from_str::<Value>(&text).is_ok(),
                fits,
                "{levels}"
            );
        }
    }

    #[test]
    fn texts_that_break_off_are_scanned_to_their_end() {
        for text in ["", "\"", "\"\\", "\"a\\\"", "{\"a\":\"", "}}]]", "\\\"[[["] {
            assert!(AMPLE.check(text.as_bytes()).is_ok(), "{text}");
        }
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i64>().prop_map(Value::from),
            ".{0,6}".prop_map(Value::from)
        ];
        leaf.prop_recursive(5, 200, 20, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..20).prop_map(Value::from),
                prop::collection::btree_map(".{0,3}", inner, 0..20)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_counted_is_never_less_than_what_is_taken(value in any_value()) {
            let text = value.to_string();
            let decoded: Value = serde_json::from_str(&text).unwrap();
            let counted = AMPLE.check(text.as_bytes()).unwrap();
            prop_assert!(counted >= memory(&decoded), "{counted} for {}", memory(&decoded));
        }

        #[test]
        fn any_bytes_can_be_scanned(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = AMPLE.check(&bytes);
        }
    }
}
