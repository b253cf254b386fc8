//! Images of our own, and other runtimes.

use std::sync::Mutex;

use cellblock::sandbox::container::build::{Recipe, build};

use super::on_docker;
use crate::support::containers::IMAGE;
use crate::support::skipped;

#[test]
fn an_image_is_built_with_progress_and_sessions_run_in_it() {
    on_docker(async |engine| {
        let recipe = Recipe {
            tag: "cellblock-test:built".to_owned(),
            base: IMAGE.to_owned(),
            // What the index has is not the matter here.
            requirements: Vec::new(),
            uid: 1234,
            gid: 1235,
            network: Some("none".to_owned()),
        };
        let lines = Mutex::new(Vec::new());
        let tell = |line: &str| lines.lock().unwrap().push(line.to_owned());
        build(engine.kind, &engine.address, &recipe, &tell).await.unwrap();
        assert!(lines.lock().unwrap().iter().any(|line| line.contains("USER 1234:1235")), "{lines:?}");
        let containers = engine.build().image("cellblock-test:built").start();
        let session = containers.session();
        assert_eq!(session.ok("import sys; print(sys.prefix)").await, "/opt/venv\n");
        containers.end().await;
        let broken = Recipe { base: "cellblock-test:absent".to_owned(), ..recipe };
        assert!(build(engine.kind, &engine.address, &broken, &|_| ()).await.is_err());
    });
}

#[test]
fn sessions_run_under_gvisor() {
    on_docker(async |engine| {
        if !engine.runtimes().contains("runsc") {
            return skipped("gVisor (runsc)");
        }
        let containers = engine.build().runtime("runsc").start();
        let session = containers.session();
        session.ok("x = [1]; open('a', 'w').write('one')").await;
        assert_eq!(session.ok("import platform; print(platform.release())").await, "4.4.0\n");
        let outcome = session
            .execute_with(
                "print('begun'); import time; time.sleep(600)",
                std::time::Duration::from_secs(2),
                Default::default(),
            )
            .await
            .unwrap();
        assert!(format!("{:?}", outcome.status).contains("Kept"), "{outcome:?}");
        session.ok("x.append(2); open('a', 'w').write('two')").await;
        session.undo(1).await;
        assert_eq!(session.ok("print(x, open('a').read())").await, "[1] one\n");
        session.reset().await;
        assert_eq!(session.ok("print('x' in globals(), open('a').read())").await, "False one\n");
        assert!(containers.isolation().await.contains("runsc"));
        containers.end().await;
    });
}
