//! The kernel work of the native backend: everything that makes and checks a jail.
//!
//! ```text
//! server ──lifeline──► guardian          outside; watches the server, makes id-mapped mounts when it is root
//!    │                    └─ warden      pid 1 of its own namespaces, in a user namespace without host root
//!    └────commands────────►  ├─ zygote   warm Python; forks, and never runs a user's byte
//!                            └─ family…  a user namespace around one session and its forks; all their processes are in it
//!                                └─ init…  pid 1 of each sandbox; the forked interpreters enter beside it
//! ```
//!
//! The server starts the guardian as a fresh process of the same binary (`guardian::main`), because this work needs a single thread.
//! If the server dies, the guardian kills the warden, and with a pid namespace's first process the kernel ends everything in it.
//!
//! `doors` is for sandboxes that others make: it opens ways out of the network of a container. `porter` is how it comes there where this server may not go.
//!
//! All unsafe code of Cellblock is in `sys`. There is no async code here: the server wraps the sockets of `wire` itself.
//!
//! What this crate never does: run a user's code, talk to a network, keep a secret.

pub mod cgroup;
pub mod doors;
mod errand;
mod etc;
mod family;
pub mod guardian;
pub mod identity;
mod idmap;
mod init;
mod landlock;
mod mask;
pub mod memory;
mod netlink;
pub mod network;
mod nftables;
pub mod porter;
pub mod posture;
pub mod probe;
mod program;
mod registers;
pub mod root;
pub mod seccomp;
mod sys;
pub mod sysfs;
pub mod twin;
mod warden;
pub mod wire;
mod zygote;
