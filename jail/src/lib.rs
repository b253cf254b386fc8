//! The kernel work of the native backend: creates, checks and supervises jails.
//!
//! ```text
//! server ──lifeline──► guardian          monitor outside the jail; watches the server and,
//!    │                    │              as root, makes id-mapped mounts
//!    │                    └─ warden      jail supervisor: pid 1 of its own namespaces, in a user
//!    └────commands────────►  │           namespace without host root
//!                            ├─ zygote   warm Python; forks, and never executes user code
//!                            └─ family…  user namespace around one session and its forks; contains
//!                                │       all their processes
//!                                └─ init…  pid 1 of each sandbox; the forked interpreters enter
//!                                          beside it
//! ```
//!
//! The server starts the guardian as a fresh process of the same binary (`guardian::main`), because
//! this work needs a single thread. If the server dies, the guardian kills the warden. When the
//! first process of a pid namespace dies, the kernel kills everything in the namespace.
//!
//! `netns_listeners` serves sandboxes that are created elsewhere: it opens egress listeners in the
//! network namespace of a container. `netns_helper` does the same from a helper container where
//! this server has no access to that namespace.
//!
//! All unsafe code of Cellblock is in `sys`. There is no async code here: the server wraps the
//! sockets of `wire` itself.
//!
//! This crate never runs user code, connects to a network or stores a secret.

pub mod cgroup;
mod etc;
mod family;
pub mod guardian;
pub mod identity;
pub mod idmap;
mod init;
mod landlock;
mod mask;
pub mod memory;
mod netlink;
pub mod netns_helper;
pub mod netns_listeners;
pub mod network;
mod nftables;
pub mod posture;
pub mod probe;
mod program;
mod registers;
pub mod root;
pub mod seccomp;
mod side_process;
mod sys;
pub mod sysfs;
pub mod test_switches;
pub mod twin;
mod warden;
pub mod wire;
mod zygote;
