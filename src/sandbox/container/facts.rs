//! Facts about a container: its resource use, whether memory ran out, how it ended. They come from
//! the kernel where the container is a process of this machine, and from the engine elsewhere;
//! never from inside.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cellblock_jail::cgroup::{Group, OutOfMemory};
use cellblock_jail::posture::Posture;
use futures_util::StreamExt;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::engine::Engine;
use super::spec::User;
use crate::reaction::CpuWaits;
use crate::sandbox::{Gauge, MemoryUse};

/// The state of a container, according to the engine's events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ContainerFate {
    /// How often memory has run out in it.
    pub(super) out_of_memory: u64,
    pub(super) died: bool,
}

/// Reads the resource use of a container.
pub(super) struct ContainerMeter {
    source: Source,
    fate: watch::Receiver<ContainerFate>,
    gone: AtomicBool,
    /// The last CPU time that was read; it must never decrease.
    spent: Mutex<Duration>,
}

enum Source {
    /// Its control group on this machine.
    Kernel(Group),
    /// The last report of the engine.
    Engine {
        latest: Arc<Latest>,
        follower: JoinHandle<()>,
    },
}

#[derive(Default)]
struct Latest {
    memory: AtomicU64,
    peak: AtomicU64,
    stored: AtomicU64,
    nanoseconds: AtomicU64,
}

/// A baseline for later comparison.
#[derive(Debug, Clone, Copy)]
pub(super) struct OutOfMemoryMark {
    kernel: Option<OutOfMemory>,
    events: u64,
}

impl ContainerMeter {
    /// Starts to follow a container. `process` is its first process, if that is one of this
    /// machine.
    pub(super) fn new(
        engine: &Engine,
        id: &str,
        process: Option<u32>,
        fate: watch::Receiver<ContainerFate>,
    ) -> ContainerMeter {
        let source = match process.and_then(|process| Group::of_process(process).ok()) {
            Some(group) => Source::Kernel(group),
            None => {
                let latest = Arc::new(Latest::default());
                let (mut usage, written) = (engine.usage(id), latest.clone());
                let follower = tokio::spawn(async move {
                    while let Some((memory, stored, time)) = usage.next().await {
                        written.memory.store(memory, Ordering::Relaxed);
                        written.peak.fetch_max(memory, Ordering::Relaxed);
                        written.stored.store(stored, Ordering::Relaxed);
                        written.nanoseconds.store(time, Ordering::Relaxed);
                    }
                });
                Source::Engine { latest, follower }
            }
        };
        ContainerMeter {
            source,
            fate,
            gone: AtomicBool::new(false),
            spent: Mutex::default(),
        }
    }

    pub(super) fn use_of_memory(&self) -> MemoryUse {
        match &self.source {
            Source::Kernel(group) => {
                let (now, peak) = group.memory();
                MemoryUse { now, peak }
            }
            Source::Engine { latest, .. } => MemoryUse {
                now: latest.memory.load(Ordering::Relaxed),
                peak: latest.peak.load(Ordering::Relaxed),
            },
        }
    }

    pub(super) fn forget_peak(&self) {
        match &self.source {
            Source::Kernel(group) => group.forget_peak(),
            Source::Engine { latest, .. } => {
                latest
                    .peak
                    .store(latest.memory.load(Ordering::Relaxed), Ordering::Relaxed);
            }
        }
    }

    /// Records how often memory has run out until now.
    pub(super) fn mark(&self) -> OutOfMemoryMark {
        let kernel = match &self.source {
            Source::Kernel(group) => Some(group.out_of_memory()),
            Source::Engine { .. } => None,
        };
        OutOfMemoryMark {
            kernel,
            events: self.fate.borrow().out_of_memory,
        }
    }

    /// Returns whether memory has run out since then. Waits briefly for an event of the engine,
    /// where the kernel has not reported it.
    pub(super) async fn ran_out_since(&self, mark: OutOfMemoryMark) -> bool {
        if let (Source::Kernel(group), Some(before)) = (&self.source, mark.kernel)
            && group.out_of_memory().happened_since(before)
        {
            return true;
        }
        let mut fate = self.fate.clone();
        let news = fate.wait_for(|fate| fate.out_of_memory > mark.events);
        tokio::time::timeout(ENGINE_PATIENCE, news)
            .await
            .is_ok_and(|news| news.is_ok())
    }

    /// Reports zero use from now on.
    pub(super) fn close(&self) {
        self.gone.store(true, Ordering::Relaxed);
        if let Source::Engine { follower, .. } = &self.source {
            follower.abort();
        }
    }
}

/// Timeout for the engine to report that memory ran out; the kernel notifies it at once.
const ENGINE_PATIENCE: Duration = Duration::from_millis(300);

impl Gauge for ContainerMeter {
    fn processor_time(&self) -> Duration {
        if self.gone.load(Ordering::Relaxed) {
            return Duration::ZERO;
        }
        let now = match &self.source {
            Source::Kernel(group) => group.processor_time().unwrap_or_default(),
            Source::Engine { latest, .. } => {
                Duration::from_nanos(latest.nanoseconds.load(Ordering::Relaxed))
            }
        };
        let mut spent = self
            .spent
            .lock()
            .expect("nothing panics while it holds the time");
        *spent = now.max(*spent);
        *spent
    }

    fn memory(&self) -> u64 {
        if self.gone.load(Ordering::Relaxed) {
            0
        } else {
            self.use_of_memory().now
        }
    }

    fn stored(&self) -> u64 {
        match &self.source {
            _ if self.gone.load(Ordering::Relaxed) => 0,
            Source::Kernel(group) => group.files_in_memory(),
            Source::Engine { latest, .. } => latest.stored.load(Ordering::Relaxed),
        }
    }

    /// Covers all its processes: the engine does not report which is the interpreter.
    fn cpu_waits(&self) -> CpuWaits {
        match &self.source {
            Source::Kernel(group) => CpuWaits::of_processes(group.processes().unwrap_or_default()),
            Source::Engine { .. } => CpuWaits::default(),
        }
    }
}

/// Returns the first process of a container if it is one of this machine: then the kernel names the
/// container in its control group.
pub(super) fn local_process(id: &str, process: Option<i64>) -> Option<u32> {
    let process = u32::try_from(process?)
        .ok()
        .filter(|process| *process > 1)?;
    let membership = std::fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
    membership.contains(id).then_some(process)
}

/// Returns the first property of a process of this machine that differs from the required one. Also
/// returns `None` where the kernel does not allow the check; then only the engine's own statement
/// is available.
pub(super) fn fault_of(process: u32, user: User, has_user_namespace: bool) -> Option<&'static str> {
    let (posture, host) = (
        Posture::read(process).ok()?,
        Posture::read(std::process::id()).ok()?,
    );
    let is_user = |id: &u32| *id != 0 && (has_user_namespace || *id == user.uid);
    let facts = [
        (posture.uids.iter().all(is_user), "it runs as another user"),
        (
            posture.gids.iter().all(|id| *id != 0),
            "it is in the group of root",
        ),
        (posture.capabilities == [0; 5], "it has capabilities"),
        (posture.no_new_privs, "it could gain privileges"),
        (posture.seccomp == 2, "it has no filter of system calls"),
    ];
    let fault = facts
        .into_iter()
        .find(|(holds, _)| !holds)
        .map(|(_, what)| what);
    let apart = ["ipc", "mnt", "net", "pid", "uts"].into_iter();
    fault.or_else(|| {
        apart
            .into_iter()
            .any(|name| posture.namespaces.get(name) == host.namespaces.get(name))
            .then_some("it shares a namespace with the host")
    })
}
