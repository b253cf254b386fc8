//! Sessions in containers: what only they have. What every backend promises is in `contract`.
//!
//! `walls` looks at a container from inside and out, `family` at forks and undo, `engine` at
//! engines that are not there, end, or lack something, `registry` at images that are fetched,
//! `remote` at engines that are reached in other ways than by a socket, `restart` at those that go
//! away and come back, `pool` at what waits, `volumes` at what stays on an engine, `keeping` at
//! servers that die, `ordinary` at those of users who may not enter containers, `doctor` at what it
//! tells, `packages` at what is installed into live sessions, `programs` at commands that need an
//! approval, `import_cache` at what they need not import from files, `runtimes` at gVisor.

mod doctor;
mod engine;
mod family;
mod import_cache;
mod keeping;
mod ordinary;
mod packages;
mod pool;
mod programs;
mod registry;
mod remote;
mod restart;
mod runtimes;
mod volumes;
mod walls;

use std::future::Future;

use crate::support::containers::{self, TestEngine};
use crate::support::native;

/// Runs a test with Docker, or says that it is skipped.
fn on_docker<F: Future<Output = ()>>(test: impl FnOnce(&'static TestEngine) -> F) {
    if let Some(engine) = containers::docker() {
        native::run(test(engine));
    }
}

/// Runs a test with Podman, or says that it is skipped.
fn on_podman<F: Future<Output = ()>>(test: impl FnOnce(&'static TestEngine) -> F) {
    if let Some(engine) = containers::podman() {
        native::run(test(engine));
    }
}

/// Runs a test with every engine that is here.
fn on_every_engine<F: Future<Output = ()>>(test: impl Fn(&'static TestEngine) -> F) {
    on_docker(&test);
    on_podman(&test);
}
