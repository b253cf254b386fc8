//! Forks, undo and exploration of real sessions.
//!
//! `carried` shows what a copy has of its source, one case for each kind of thing; `undo` what an
//! undo brings back; `family` what sessions that come from one another share, and that nothing of
//! them stays; `explore` compares variants. What hostile sessions try is in `attacks/branching.rs`,
//! and what the kernel says about copies in `posture.rs`.

mod carried;
mod explore;
mod family;
mod undo;

use std::sync::OnceLock;

use cellblock::sandbox::SandboxLimits;

use crate::support::native::{Builder, Native};

/// Limits that are soon reached, and a family that may hold no more than two sessions at their
/// limit.
const TIGHT: SandboxLimits = SandboxLimits {
    memory: 128 << 20,
    family_memory: 224 << 20,
    cpus: 2.0,
    processes: 64,
    disk: 32 << 20,
    files: 4_000,
};

/// A backend with these limits.
fn tight() -> &'static Native {
    static BACKEND: OnceLock<Native> = OnceLock::new();
    BACKEND.get_or_init(|| Builder::new("minimal").limits(TIGHT).start())
}
