//! Reaction timeouts that tolerate a busy machine.
//!
//! Such a timeout means "it does not react", not "the machine is slow". Time in which a process was
//! runnable but waited for a CPU is therefore not counted. The kernel reports that time per thread
//! in `/proc/PID/task/TID/schedstat`, and for the whole machine in `/proc/pressure/cpu`. Where
//! these files are not available, wall time counts.
//!
//! A sandbox cannot extend its timeout with processes that wait for each other: the CPU time it has
//! used always counts. No timeout is extended to more than ten times its length.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use tokio::time::Instant;

/// Maximum factor by which a busy machine extends a timeout. At a load of ten per CPU a process
/// still gets its time.
const MAX_STRETCHED: u32 = 10;

/// Run-queue wait of each thread since it started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuWaits(BTreeMap<u32, Duration>);

impl CpuWaits {
    /// Reads the waits of all threads of these processes, given by host pid.
    pub fn of_processes(processes: impl IntoIterator<Item = u32>) -> CpuWaits {
        let tasks = processes
            .into_iter()
            .filter_map(|process| fs::read_dir(format!("/proc/{process}/task")).ok());
        let waits = tasks.flatten().flatten().filter_map(|task| {
            let thread = task.file_name().to_str()?.parse().ok()?;
            Some((
                thread,
                run_queue_wait(&fs::read_to_string(task.path().join("schedstat")).ok()?)?,
            ))
        });
        CpuWaits(waits.collect())
    }

    /// Reads how long any task of this machine has waited, for work shared by many processes.
    pub fn of_machine() -> CpuWaits {
        let pressure = fs::read_to_string("/proc/pressure/cpu").ok();
        CpuWaits(
            pressure
                .and_then(|text| pressure_total(&text))
                .map(|total| (0, total))
                .into_iter()
                .collect(),
        )
    }

    /// Returns the waits of a single thread.
    pub fn of_one(wait: Duration) -> CpuWaits {
        CpuWaits([(0, wait)].into())
    }

    /// Returns the longest wait of a single thread since `before`.
    pub fn since(&self, before: &CpuWaits) -> Duration {
        let waits = self.0.iter().map(|(thread, wait)| {
            let before = before.0.get(thread).copied().unwrap_or_default();
            wait.saturating_sub(before)
        });
        waits.max().unwrap_or_default()
    }
}

/// Parses three numbers: nanoseconds on a CPU, nanoseconds runnable without one, and time slices.
fn run_queue_wait(schedstat: &str) -> Option<Duration> {
    schedstat
        .split_whitespace()
        .nth(1)?
        .parse()
        .ok()
        .map(Duration::from_nanos)
}

/// Parses `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`, in microseconds.
fn pressure_total(pressure: &str) -> Option<Duration> {
    let some = pressure
        .lines()
        .find_map(|line| line.strip_prefix("some "))?;
    let total = some
        .split_whitespace()
        .find_map(|field| field.strip_prefix("total="))?;
    total.parse().ok().map(Duration::from_micros)
}

/// CPU time that a sandbox used, and time that it waited for a CPU.
#[derive(Debug, Clone, Default)]
pub struct CpuAccount {
    pub waits: CpuWaits,
    /// CPU time used by the whole sandbox.
    pub used: Duration,
}

/// A running reaction timeout.
#[derive(Debug, Clone)]
pub struct ReactionLimit {
    limit: Duration,
    begun: Instant,
    before: CpuAccount,
}

impl ReactionLimit {
    pub fn begin(limit: Duration, now: CpuAccount) -> ReactionLimit {
        ReactionLimit {
            limit,
            begun: Instant::now(),
            before: now,
        }
    }

    /// Returns a lower bound of the remaining time, or `None` after the timeout.
    pub fn left(&self, now: &CpuAccount) -> Option<Duration> {
        let elapsed = self.begun.elapsed();
        let awake = elapsed.saturating_sub(now.waits.since(&self.before.waits));
        let used = now.used.saturating_sub(self.before.used).min(elapsed);
        let counted = awake.max(used);
        let left = self.limit.saturating_sub(counted);
        let left = left.min((self.limit * MAX_STRETCHED).saturating_sub(elapsed));
        (!left.is_zero()).then_some(left)
    }
}

/// Waits for work shared by processes of the server, within a limit.
pub async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    within_measured(
        limit,
        || CpuAccount {
            waits: CpuWaits::of_machine(),
            used: Duration::ZERO,
        },
        work,
    )
    .await
}

/// Waits for work shared by a sandbox and processes of the server. The CPU time that the sandbox
/// has `used` counts.
pub async fn within_with<T>(
    limit: Duration,
    used: impl Fn() -> Duration,
    work: impl Future<Output = T>,
) -> Option<T> {
    let account = || CpuAccount {
        waits: CpuWaits::of_machine(),
        used: used(),
    };
    within_measured(limit, account, work).await
}

async fn within_measured<T>(
    limit: Duration,
    account: impl Fn() -> CpuAccount,
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = std::pin::pin!(work);
    // Most work is done by then, and reading the kernel's counters takes as long as one step of a
    // launch.
    let soon = limit / 10;
    if let Ok(result) = tokio::time::timeout(soon, &mut work).await {
        return Some(result);
    }
    let mut left = limit - soon;
    let reaction = ReactionLimit::begin(left, account());
    loop {
        match tokio::time::timeout(left, &mut work).await {
            Ok(result) => return Some(result),
            Err(_) => left = reaction.left(&account())?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Waits on a machine where each process gets one part in `parts`.
    fn crowded(parts: u32) -> impl Fn() -> CpuAccount {
        let begun = Instant::now();
        let waits = move || CpuWaits::of_one(begun.elapsed() * (parts - 1) / parts);
        move || CpuAccount {
            waits: waits(),
            used: Duration::ZERO,
        }
    }

    async fn took<T>(future: impl Future<Output = T>) -> (T, Duration) {
        let begun = Instant::now();
        let result = future.await;
        (result, begun.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn only_time_with_a_processor_counts() {
        for parts in [1, 4] {
            // The first tenth always counts.
            let time = SECOND / 10 + SECOND * 9 / 10 * parts;
            let (result, elapsed) = took(within_measured(
                SECOND,
                crowded(parts),
                std::future::pending::<()>(),
            ))
            .await;
            assert_eq!(result, None);
            // The timer is coarse, and each reading of the waits costs one tick.
            assert!(
                elapsed >= time && elapsed < time + SECOND / 10,
                "{elapsed:?} with {parts}"
            );
        }
        let slow = tokio::time::sleep(3 * SECOND);
        assert_eq!(
            within_measured(SECOND, crowded(4), slow).await,
            Some(()),
            "control"
        );
        let slow = tokio::time::sleep(3 * SECOND);
        assert_eq!(within_measured(SECOND, crowded(1), slow).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn processes_that_wait_for_each_other_gain_nothing() {
        let begun = Instant::now();
        let crowded = crowded(100);
        // A hundred processes together use one whole CPU.
        let bomb = || CpuAccount {
            used: begun.elapsed(),
            ..crowded()
        };
        let (result, elapsed) =
            took(within_measured(SECOND, bomb, std::future::pending::<()>())).await;
        assert_eq!(result, None);
        assert!(elapsed < SECOND + SECOND / 10, "{elapsed:?}");
        // Two CPUs do not make time run faster.
        let two = || CpuAccount {
            used: begun.elapsed() * 2,
            ..CpuAccount::default()
        };
        let (_, elapsed) = took(within_measured(SECOND, two, std::future::pending::<()>())).await;
        assert!(elapsed >= SECOND, "{elapsed:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_gets_more_than_ten_times_its_limit() {
        let (result, elapsed) = took(within_measured(
            SECOND,
            crowded(1000),
            std::future::pending::<()>(),
        ))
        .await;
        assert_eq!(result, None);
        assert!(
            elapsed >= 9 * SECOND && elapsed < 10 * SECOND,
            "{elapsed:?}"
        );
    }

    #[test]
    fn the_thread_that_waited_most_counts_and_what_it_waited_before_does_not() {
        let waits = |waits: &[(u32, u64)]| {
            CpuWaits(
                waits
                    .iter()
                    .map(|(thread, seconds)| (*thread, Duration::from_secs(*seconds)))
                    .collect(),
            )
        };
        let before = waits(&[(1, 100), (2, 0), (3, 5)]);
        assert_eq!(
            waits(&[(1, 101), (2, 4), (4, 3)]).since(&before),
            4 * SECOND
        );
        assert_eq!(CpuWaits::default().since(&before), Duration::ZERO);
        assert_eq!(before.since(&CpuWaits::default()), 100 * SECOND);
    }

    #[test]
    fn the_files_of_the_kernel_are_read() {
        assert_eq!(
            run_queue_wait("121567 5504199 2\n"),
            Some(Duration::from_nanos(5_504_199))
        );
        assert_eq!(run_queue_wait(""), None);
        let pressure =
            "some avg10=82.42 avg60=62.08 avg300=46.66 total=324559963\nfull avg10=0.00 total=7\n";
        assert_eq!(
            pressure_total(pressure),
            Some(Duration::from_micros(324_559_963))
        );
        assert_eq!(pressure_total("full total=7"), None);
        let own = CpuWaits::of_processes([std::process::id()]);
        let tasks = fs::read_dir("/proc/self/task").unwrap().count();
        assert!(
            !own.0.is_empty() && own.0.len() <= tasks + 1,
            "{own:?} of {tasks}"
        );
        assert_eq!(CpuWaits::of_processes([u32::MAX]), CpuWaits::default());
    }
}
