//! Other runtimes than the usual one.

use std::time::Duration;

use cellblock::session::{StateAfter, Status};

use super::on_docker;
use crate::support::skipped;

#[test]
fn sessions_live_are_interrupted_undone_and_reset_under_gvisor() {
    on_docker(async |engine| {
        if !engine.runtimes().contains("runsc") {
            return skipped("gVisor (runsc)");
        }
        let containers = engine.build().runtime("runsc").start();
        let session = containers.session();
        let first = session
            .execute("x = [1]; open('a', 'w').write('one')")
            .await;
        if first
            .as_ref()
            .is_err_and(|refused| refused.to_string().contains("adopt orphans"))
        {
            return skipped(
                "a gVisor that lets processes adopt orphans, such as that of Debian 13",
            );
        }
        assert_eq!(first.unwrap().status, Status::Completed);
        // The kernel that gVisor says it is.
        assert_eq!(
            session
                .ok("import platform; print(platform.release())")
                .await,
            "4.4.0\n"
        );
        let limit = Duration::from_secs(2);
        let sleep = "print('begun'); import time; time.sleep(600)";
        let outcome = session
            .execute_with(sleep, limit, Default::default())
            .await
            .unwrap();
        assert_eq!(
            outcome.status,
            Status::TimedOut {
                limit,
                state: StateAfter::Kept
            }
        );
        session.ok("x.append(2); open('a', 'w').write('two')").await;
        session.undo(1).await;
        assert_eq!(session.ok("print(x, open('a').read())").await, "[1] one\n");
        session.reset().await;
        assert_eq!(
            session
                .ok("print('x' in globals(), open('a').read())")
                .await,
            "False one\n"
        );
        assert!(containers.isolation().await.contains("runsc"));
        containers.end().await;
    });
}
