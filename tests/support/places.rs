//! The places in which a session can be: natively, and in containers of each engine.
//!
//! `cases!` makes a test of every case in every place. A case that cannot run in a place here says
//! so and is skipped, aloud.

use std::path::PathBuf;
use std::sync::OnceLock;

use cellblock::sandbox::SandboxLimits;
use cellblock::sandbox::container::ContainerBind;
use cellblock::session::Sessions;
use cellblock_jail::wire::OperatorMount;

use super::containers::{self, TestEngine};
use super::native::{self, LockDown, Session};

/// Where sessions are made.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    Native,
    Containers(&'static TestEngine),
}

impl Place {
    /// Containers of Docker, if it is here.
    pub(crate) fn docker() -> Option<Place> {
        containers::docker().map(Place::Containers)
    }

    /// Containers of Podman, if it is here.
    pub(crate) fn podman() -> Option<Place> {
        containers::podman().map(Place::Containers)
    }

    pub(crate) fn is_native(self) -> bool {
        matches!(self, Place::Native)
    }

    pub(crate) fn is_podman(self) -> bool {
        matches!(self, Place::Containers(engine) if engine.is_podman())
    }

    /// Those of the backend that most tests share.
    pub(crate) fn sessions(self) -> &'static Sessions {
        match self {
            Place::Native => &native::shared().sessions,
            Place::Containers(engine) => &engine.shared().sessions,
        }
    }

    /// A new session of that backend.
    pub(crate) fn session(self) -> Session {
        Session::new(self.sessions())
    }

    /// A backend of its own, with these limits.
    pub(crate) fn limited(self, limits: SandboxLimits) -> Ground {
        let sessions = match self {
            Place::Native => {
                native::Builder::new("minimal")
                    .limits(limits)
                    .start()
                    .sessions
            }
            Place::Containers(engine) => engine.build().limits(limits).start().sessions,
        };
        Ground { sessions }
    }

    /// A backend of its own, whose sessions see these folders of the operator.
    pub(crate) fn showing(self, mounts: &[OperatorMount]) -> Ground {
        let sessions = match self {
            Place::Native => {
                let start = native::Builder::new("minimal");
                mounts
                    .iter()
                    .cloned()
                    .fold(start, native::Builder::mount)
                    .start()
                    .sessions
            }
            Place::Containers(engine) => {
                let bind = |mount: &OperatorMount| ContainerBind {
                    host: mount.host.clone(),
                    inside: mount.inside.clone(),
                    writable: mount.writable,
                };
                mounts
                    .iter()
                    .map(bind)
                    .fold(engine.build(), containers::Builder::bind)
                    .start()
                    .sessions
            }
        };
        Ground { sessions }
    }

    /// Notes what exists on the host because of a session; the answer tells how much of it is left.
    pub(crate) async fn traces(self, session: &Session) -> Box<dyn Fn() -> usize> {
        match self {
            Place::Native => {
                let paths = native::traces_of(session.host_pid().await);
                Box::new(move || paths.iter().filter(|path| path.exists()).count())
            }
            Place::Containers(engine) => {
                let container = engine.container_of(session).await;
                Box::new(move || {
                    engine
                        .containers()
                        .iter()
                        .filter(|id| **id == container)
                        .count()
                })
            }
        }
    }

    /// Checks that every process of a session's sandbox has given up everything, as the host sees
    /// it.
    pub(crate) async fn assert_locked_down(self, session: &Session) {
        match self {
            Place::Native => session.assert_locked_down().await,
            Place::Containers(engine) => {
                let expected = if engine.is_podman() {
                    &OF_PODMAN
                } else {
                    &OF_DOCKER
                };
                native::assert_locked_down(session.host_pid().await, expected);
            }
        }
    }

    /// The folders of the control groups that limit a session.
    pub(crate) async fn control_groups(self, session: &Session) -> Vec<PathBuf> {
        let process = session.host_pid().await;
        match self {
            Place::Native => native::control_groups(process),
            Place::Containers(engine) => {
                native::control_groups_of(process, &engine.container_of(session).await)
            }
        }
    }
}

/// What all have in a container: the engine's one filter, and no user namespace, because another
/// user is in each.
const OF_DOCKER: LockDown = LockDown {
    namespaces: &["cgroup", "ipc", "mnt", "net", "pid", "uts"],
    filters: 1,
};
/// Podman passes over the wish for a namespace of control groups where these are of the first
/// version: their names can be read, and nothing else.
const OF_PODMAN: LockDown = LockDown {
    namespaces: &["ipc", "mnt", "net", "pid", "uts"],
    filters: 1,
};

/// A backend of one test. Its sessions hold it.
pub(crate) struct Ground {
    pub(crate) sessions: Sessions,
}

impl Ground {
    pub(crate) fn session(&self) -> Session {
        Session::new(&self.sessions)
    }

    /// Ends the backend and everything it made.
    pub(crate) async fn end(&self) {
        self.sessions.shut_down().await;
    }
}

/// Something that is made once in each place.
pub(crate) struct PerPlace<T>([OnceLock<T>; 3]);

impl<T> PerPlace<T> {
    pub(crate) const fn new() -> PerPlace<T> {
        PerPlace([const { OnceLock::new() }; 3])
    }

    pub(crate) fn get(&self, place: Place, make: impl FnOnce() -> T) -> &T {
        let [native, docker, podman] = &self.0;
        let of_place = match place {
            Place::Native => native,
            Place::Containers(engine) if engine.is_podman() => podman,
            Place::Containers(_) => docker,
        };
        of_place.get_or_init(make)
    }
}

/// Makes a test of every case in every place. A place is a module for its tests and an expression
/// that finds it, if it is to be found.
macro_rules! cases {
    ($kind:ty, [$($module:ident: $found:expr),* $(,)?], $cases:tt) => {
        $crate::support::places::cases! { @define $kind, $cases }
        $(mod $module {
            $crate::support::places::cases! { @test $found, $cases }
        })*
    };
    (@define $kind:ty, {
        $($(#[$note:meta])* async fn $name:ident($place:ident) $body:block)*
    }) => {
        $($(#[$note])* async fn $name($place: $kind) $body)*
    };
    (@test $found:expr, {
        $($(#[$note:meta])* async fn $name:ident($place:ident) $body:block)*
    }) => {
        $(#[test]
        fn $name() {
            if let Some(place) = $found {
                $crate::support::native::run(super::$name(place));
            }
        })*
    };
}
pub(crate) use cases;

/// Makes a test of every case natively and in containers.
macro_rules! in_every_place {
    ($($cases:tt)*) => {
        $crate::support::places::cases! {
            $crate::support::places::Place,
            [
                natively: Some($crate::support::places::Place::Native),
                in_docker: $crate::support::places::Place::docker(),
                in_podman: $crate::support::places::Place::podman(),
            ],
            { $($cases)* }
        }
    };
}
pub(crate) use in_every_place;
