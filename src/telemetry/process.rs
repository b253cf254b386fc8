//! Resource usage of the process, read from the kernel on demand.

use std::fmt;
use std::fs;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use rustix::process::{Resource, getrlimit};

/// Clock ticks of `/proc` per second: the same on every supported Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// Reads `/proc/self`. Values that cannot be read are omitted.
#[derive(Debug)]
pub(super) struct ProcessStats;

impl Collector for ProcessStats {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        // One of them is the descriptor of the folder being read.
        let descriptors =
            fs::read_dir("/proc/self/fd").map(|open| open.count().saturating_sub(1) as u64);
        let gauges = [
            (
                "process_resident_memory_bytes",
                "Memory in use",
                number(&status, "VmRSS:").map(|kib| kib * 1024),
            ),
            ("process_threads", "Threads", number(&status, "Threads:")),
            (
                "process_open_fds",
                "Open file descriptors",
                descriptors.ok(),
            ),
            (
                "process_max_fds",
                "File descriptors that may be open at once",
                getrlimit(Resource::Nofile).current,
            ),
        ];
        for (name, help, value) in gauges {
            if let Some(value) = value {
                write(&mut encoder, name, help, &ConstGauge::new(value as i64))?;
            }
        }
        if let Some(seconds) = processor_seconds(&stat) {
            write(
                &mut encoder,
                "process_cpu_seconds",
                "Processor time used",
                &ConstCounter::new(seconds),
            )?;
        }
        Ok(())
    }
}

fn write(
    encoder: &mut DescriptorEncoder,
    name: &str,
    help: &str,
    metric: &impl EncodeMetric,
) -> fmt::Result {
    metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)
}

/// Returns the number after a name in `/proc/self/status`.
fn number(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns the processor time of `/proc/self/stat`, in user and in kernel mode.
fn processor_seconds(stat: &str) -> Option<f64> {
    // The name of the program is in parentheses and may contain anything, including spaces.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(11);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    Some((ticks()? + ticks()?) / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_in_what_the_kernel_writes() {
        let status = "Name:\tcellblock\nVmPeak:\t   99 kB\nVmRSS:\t   5124 kB\nThreads:\t7\n";
        assert_eq!(
            (number(status, "VmRSS:"), number(status, "Threads:")),
            (Some(5124), Some(7))
        );
        assert_eq!(number(status, "VmSwap:"), None);
        let stat = "42 (a ) b) S 1 42 42 0 -1 4194304 500 0 0 0 150 50 0 0 20 0 9 0 1234 1000 200";
        assert_eq!(processor_seconds(stat), Some(2.0));
        assert_eq!(processor_seconds(""), None);
    }
}
