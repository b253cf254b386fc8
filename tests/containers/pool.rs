//! Containers that wait to be used.

use std::time::{Duration, Instant};

use cellblock::sandbox::SandboxLimits;

use super::on_docker;
use crate::support::containers::{Containers, TestEngine};
use crate::support::native::ROOMY;

/// Longer than any test.
const LONG: Duration = Duration::from_secs(600);

/// A backend with one container that waits. Its containers are known by how much memory they may
/// use.
fn pool_of_one(engine: &TestEngine, memory: u64, max_age: Duration) -> Containers {
    let limits = SandboxLimits {
        memory,
        family_memory: memory,
        ..ROOMY
    };
    engine.build().limits(limits).pool(1, max_age).start()
}

/// Waits until a container waits.
async fn is_full(containers: &Containers) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while containers.backend.waiting() == 0 {
        assert!(Instant::now() < deadline, "the pool stays empty");
        tokio::task::yield_now().await;
    }
}

/// The containers with so much memory that run, once there are so many.
async fn running(engine: &TestEngine, memory: u64, count: usize) -> Vec<String> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let now = engine.containers_with_memory(memory);
        if now.len() == count {
            return now;
        }
        assert!(Instant::now() < deadline, "{now:?}");
        tokio::task::yield_now().await;
    }
}

async fn end(containers: &Containers, engine: &TestEngine, known: &[String]) {
    containers.end().await;
    let left = engine.containers();
    assert!(known.iter().all(|id| !left.contains(id)), "{left:?}");
}

#[test]
fn a_session_from_the_pool_starts_at_once_and_is_never_used_again() {
    on_docker(async |engine| {
        let memory = 201 << 20;
        let containers = pool_of_one(engine, memory, LONG);
        is_full(&containers).await;
        let first = running(engine, memory, 1).await;
        let session = containers.session();
        session.ok("x = 1").await;
        assert_eq!(engine.container_of(&session).await, first[0]);
        let both = running(engine, memory, 2).await;
        session.close().await;
        assert!(!engine.containers().contains(&first[0]));
        let another = containers.session();
        assert_eq!(another.ok("print('x' in globals())").await, "False\n");
        assert_ne!(engine.container_of(&another).await, first[0]);
        end(&containers, engine, &both).await;
    });
}

#[test]
fn a_member_that_died_or_is_too_old_is_never_handed_out() {
    on_docker(async |engine| {
        let memory = 202 << 20;
        let containers = pool_of_one(engine, memory, LONG);
        is_full(&containers).await;
        let dead = running(engine, memory, 1).await;
        engine.command(&["kill", &dead[0]]);
        let session = containers.session();
        assert_eq!(session.ok("print('alive')").await, "alive\n");
        assert_ne!(engine.container_of(&session).await, dead[0]);
        end(&containers, engine, &dead).await;

        let containers = pool_of_one(engine, memory, Duration::from_secs(1));
        let old = running(engine, memory, 1).await;
        let deadline = Instant::now() + Duration::from_secs(30);
        while engine.containers().contains(&old[0]) {
            assert!(Instant::now() < deadline, "a member that is too old waits");
            tokio::task::yield_now().await;
        }
        // The first call after a long wait.
        let session = containers.session();
        assert_eq!(session.ok("print('alive')").await, "alive\n");
        assert_ne!(engine.container_of(&session).await, old[0]);
        end(&containers, engine, &old).await;
    });
}
