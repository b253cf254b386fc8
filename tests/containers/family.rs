//! Undo and forks in a container.

use std::time::Duration;

use cellblock::session::{ExploreRequest, Keep, Status, Variant};

use super::on_docker;

#[test]
fn undo_brings_variables_and_files_back() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        session.ok("x = [1]; open('a', 'w').write('one')").await;
        session
            .ok("x.append(2); open('a', 'w').write('two'); open('b', 'w').write('new')")
            .await;
        session.undo(1).await;
        let state = "import os; print(x, open('a').read(), sorted(os.listdir()))";
        assert_eq!(session.ok(state).await, "[1] one ['a']\n");
        session.undo(2).await;
        assert_eq!(session.ok("print('x' in globals())").await, "False\n");
    });
}

#[test]
fn undo_brings_a_session_back_that_has_died() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        session.ok("x = 'kept'").await;
        let died = session.execute("import os; os._exit(3)").await.unwrap();
        assert!(matches!(died.status, Status::Died { .. }), "{died:?}");
        session.undo(1).await;
        assert_eq!(session.ok("print(x)").await, "kept\n");
    });
}

#[test]
fn a_fork_has_everything_and_changes_nothing_of_its_source() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        session
            .ok("x = [1]; open('a', 'w').write('one'); file = open('a')")
            .await;
        let (forks, report) = session.forks(2).await;
        assert!(
            report.lost.iter().any(|text| text.contains("work folder")),
            "{report:?}"
        );
        for fork in &forks {
            assert_eq!(
                fork.ok("print(x, open('a').read(), file.read())").await,
                "[1] one one\n"
            );
            fork.ok("x.append(2); open('a', 'w').write('other')").await;
        }
        assert_eq!(session.ok("print(x, open('a').read())").await, "[1] one\n");
        assert_eq!(forks[0].ok("print(open('a').read())").await, "other\n"); // control
        assert_eq!(
            engine.container_of(&session).await,
            engine.container_of(&forks[0]).await
        );
    });
}

#[test]
fn a_fork_can_neither_write_to_its_source_nor_end_it() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        let source = session.ok("import os; print(os.getpid())").await;
        let fork = session.fork().await;
        let attempt = format!(
            "
import os, signal
def may(act):
    try:
        act()
        return True
    except OSError:
        return False
print(may(lambda: open('mine', 'w')), may(lambda: open('/work/theirs', 'w')), may(lambda: \
os.kill({}, signal.SIGKILL)))",
            source.trim()
        );
        let told = engine.shared().isolation().await;
        let expected = match (
            told.contains("landlock for files"),
            told.contains("signals"),
        ) {
            (true, true) => "True False False\n",
            (true, false) => "True False True\n",
            _ => "True True True\n",
        };
        assert_eq!(fork.ok(&attempt).await, expected);
    });
}

#[test]
fn forks_live_on_without_their_source_and_the_container_goes_with_the_last() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        session
            .ok("x = 'kept'; import subprocess; p = subprocess.Popen(['sleep', '600'])")
            .await;
        let fork = session.fork().await;
        let container = engine.container_of(&session).await;
        session.close().await;
        assert_eq!(fork.ok("print(x)").await, "kept\n");
        let left = fork
            .ok(
                "import os; print([open(f'/proc/{n}/comm').read().strip() for n in \
                            os.listdir('/proc') if n.isdigit()].count('sleep'))",
            )
            .await;
        assert_eq!(left, "0\n");
        assert!(engine.containers().contains(&container)); // control
        fork.close().await;
        assert!(!engine.containers().contains(&container));
    });
}

#[test]
fn variants_are_explored_and_the_best_takes_the_place_of_its_source() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        session.ok("data = list(range(10))").await;
        let variant = |name: &str, code: &str| Variant {
            name: name.to_owned(),
            code: code.to_owned(),
        };
        let request = ExploreRequest {
            variants: vec![
                variant("sum", "score = sum(data)"),
                variant("largest", "score = max(data)"),
            ],
            timeout: Duration::from_secs(20),
            max_output_chars: 1000,
            keep: Keep::Best {
                by: "score".to_owned(),
            },
            replace: true,
            recorder: Default::default(),
        };
        session.explore(request).await.unwrap();
        assert_eq!(
            session.ok("print(score, data == list(range(10)))").await,
            "45 True\n"
        );
    });
}
