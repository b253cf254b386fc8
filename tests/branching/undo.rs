//! What an undo brings back: variables and files, after cells that ended well and after those that
//! ended the interpreter.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::time::Duration;

use cellblock::session::{FilesCarried, Refused, StateAfter, Status, UndoPolicy, WorkFolder};
use cellblock_jail::wire::OperatorMount;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::tight;
use crate::support::has_control_groups;
use crate::support::native::{self, Builder, Session, run};

/// Everything about the files of the working folder but when they were changed.
const LISTING: &str = "
import json, os, stat
def listing(folder='/work'):
    found = {}
    for place, folders, files in os.walk(folder):
        for name in folders + files:
            path = os.path.join(place, name)
            mode = os.lstat(path).st_mode
            what = os.readlink(path) if stat.S_ISLNK(mode) else open(path).read() if \
            stat.S_ISREG(mode) else None
            found[os.path.relpath(path, folder)] = [oct(mode), what]
    return found
print(json.dumps(listing()))";

const FILES: &str = "
import os
os.makedirs('folder/inner')
open('changed', 'w').write('before'); open('deleted', 'w').write('before'); open('renamed', \
'w').write('before')
open('folder/inner/deep', 'w').write('before'); open('mode', 'w').write('before'); open('shorter', \
'w').write('before' * 1000)
os.symlink('changed', 'link'); os.chmod('folder', 0o750)";

const CHANGES: &str = "
open('created', 'w').write('after'); open('changed', 'w').write('after!'); os.unlink('deleted')
os.rename('renamed', 'elsewhere'); os.unlink('link'); os.symlink('nowhere', 'link'); \
os.chmod('mode', 0o400)
open('shorter', 'w').write('x'); os.makedirs('new/folder'); open('new/folder/file', \
'w').write('after')
import shutil; shutil.rmtree('folder/inner'); os.chmod('folder', 0o700)
open('folder/inner', 'w').write('a file in the place of a folder')";

#[test]
fn undo_brings_back_variables_and_files() {
    run(async {
        let session = native::shared().session();
        session.ok(FILES).await;
        session.ok("x, gone = [1], 'here'").await;
        let before = session.json(LISTING).await;
        session
            .ok(&format!("{CHANGES}\nx.append(2); del gone; new = 1"))
            .await;
        assert_ne!(session.json(LISTING).await, before); // control
        let report = session.undo(2).await;
        assert_eq!(
            (report.undone, report.revived, &report.files),
            (2, false, &FilesCarried::Restored)
        );
        assert_eq!(report.lost, Vec::<String>::new());
        assert_eq!(session.json(LISTING).await, before);
        assert_eq!(
            session.ok("print(x, gone, 'new' in globals())").await,
            "[1] here False\n"
        );
    });
}

#[test]
fn undoing_three_cells_is_three_times_undoing_one() {
    run(async {
        let (at_once, one_by_one) = (native::shared().session(), native::shared().session());
        for session in [&at_once, &one_by_one] {
            session.ok("x = 0; file = open('log', 'a')").await;
            for number in 1..=4 {
                session
                    .ok(&format!(
                        "x = {number}; print({number}, file=file, flush=True)"
                    ))
                    .await;
            }
        }
        at_once.undo(3).await;
        for left in [3, 2, 1] {
            assert_eq!(one_by_one.undo(1).await.left.len(), left + 1);
        }
        let look = "print(x, open('log').read().split())";
        assert_eq!(at_once.ok(look).await, "1 ['1']\n");
        assert_eq!(one_by_one.ok(look).await, "1 ['1']\n");
        // What was undone cannot be undone again, and what is left can.
        let refused = at_once.try_undo(9).await.unwrap_err();
        assert!(
            matches!(refused, Refused::NothingToUndo { .. }),
            "{refused:?}"
        );
        at_once.undo(3).await;
        assert_eq!(at_once.ok("print('x' in globals())").await, "False\n");
    });
}

#[test]
fn the_first_cell_of_a_session_can_be_undone() {
    run(async {
        let files = "import os; print(sorted(os.listdir()), 'x' in globals())";
        let session = native::shared().session();
        session
            .ok(
                "x = 1; import os; os.makedirs('folder/inner'); open('folder/file', \
                    'w').write('text')",
            )
            .await;
        let report = session.undo(1).await;
        assert_eq!(
            (report.undone, &report.files, &report.lost[..]),
            (1, &FilesCarried::Restored, &[][..])
        );
        assert_eq!(session.ok(files).await, "[] False\n");
        session.assert_locked_down().await;

        // What is uploaded before the first cell belongs to the state before it.
        let with_upload = native::shared().session();
        with_upload.upload("given", b"text").await.unwrap();
        with_upload
            .ok("x = 1; open('given', 'w').write('changed')")
            .await;
        with_upload.undo(1).await;
        assert_eq!(
            with_upload
                .ok("print(open('given').read(), 'x' in globals())")
                .await,
            "text False\n"
        );

        // And so does what a reset has left.
        let reset = native::shared().session();
        reset.ok("open('left', 'w').write('text')").await;
        reset.reset().await;
        reset.ok("x = 1; open('new', 'w').write('text')").await;
        reset.undo(1).await;
        assert_eq!(reset.ok(files).await, "['left'] False\n");
    });
}

#[test]
fn the_first_cell_of_a_fork_can_be_undone() {
    run(async {
        let source = native::shared().session();
        source
            .ok("import threading; x = [1]; open('file', 'w').write('before')")
            .await;
        source
            .ok(
                "thread = threading.Thread(target=threading.Event().wait, daemon=True); \
                   thread.start()",
            )
            .await;
        let (forks, report) = source.forks(2).await;
        assert_eq!(report.lost, [""; 0]);
        for fork in &forks {
            fork.ok(
                "x.append(2); open('file', 'w').write('after'); open('new', 'w').write('after')",
            )
            .await;
            let undone = fork.undo(1).await;
            assert_eq!(
                (&undone.files, &undone.lost[..]),
                (&FilesCarried::Restored, &[][..])
            );
            let look = "import os; print(x, open('file').read(), os.listdir())";
            assert_eq!(fork.ok(look).await, "[1] before ['file']\n");
            fork.assert_locked_down().await;
        }
        // Also when the source is gone, and again.
        source.close().await;
        forks[0].ok("x.append(3)").await;
        forks[0].undo(2).await;
        assert_eq!(forks[0].ok("print(x)").await, "[1]\n");
    });
}

/// Ends the session's interpreter in some way and brings it back.
async fn revived(session: &Session) {
    let refused = session.execute("x").await.unwrap_err();
    assert!(
        matches!(refused, Refused::Ended { undo: true, .. }),
        "{refused:?}"
    );
    let report = session.undo(1).await;
    assert!(report.revived);
    assert_eq!(report.files, FilesCarried::Restored);
    assert_eq!(
        session.ok("print(x, open('file').read())").await,
        "1 kept\n"
    );
}

#[test]
fn a_session_that_ended_itself_comes_back() {
    run(async {
        let session = native::shared().session();
        session.ok("x = 1; open('file', 'w').write('kept')").await;
        for code in [
            "import os; os._exit(0)",
            "import os, signal; os.kill(os.getpid(), 9)",
            "import ctypes; ctypes.string_at(0)",
        ] {
            let code =
                format!("x = 2; open('file', 'w').write('changed'); open('new', 'w'); {code}");
            let outcome = session.execute(&code).await.unwrap();
            assert!(
                matches!(outcome.status, Status::Died { .. }),
                "{:?}",
                outcome.status
            );
            revived(&session).await;
            assert_eq!(
                session.ok("import os; print(os.listdir('.'))").await,
                "['file']\n"
            );
        }
    });
}

#[test]
fn a_session_that_was_killed_for_its_time_comes_back() {
    run(async {
        let session = native::shared().session();
        session.ok("x = 1; open('file', 'w').write('kept')").await;
        let code = "
x = 2
open('file', 'w').write('changed')
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
while True: pass";
        let limit = Duration::from_secs(2);
        let outcome = session
            .execute_with(code, limit, CancellationToken::new())
            .await
            .unwrap();
        assert_eq!(
            outcome.status,
            Status::TimedOut {
                limit,
                state: StateAfter::Lost
            }
        );
        revived(&session).await;
    });
}

#[test]
fn a_session_that_ran_out_of_memory_comes_back() {
    if !has_control_groups() {
        return;
    }
    run(async {
        let session = tight().session();
        session
            .ok("x = 1; open('file', 'w').write('kept'); large = bytearray(20 << 20)")
            .await;
        for _ in 0..3 {
            let code = "x = 2; open('file', 'w').write('changed'); more = bytearray(500 << 20)";
            let outcome = session.execute(code).await.unwrap();
            assert_eq!(
                outcome.status.name(),
                "out_of_memory",
                "{:?}",
                outcome.status
            );
            revived(&session).await;
            assert_eq!(session.ok("print(len(large) >> 20)").await, "20\n");
        }
    });
}

#[test]
fn a_reset_is_not_undone() {
    run(async {
        let session = native::shared().session();
        session.ok("x = 1").await;
        session.ok("x = 2").await;
        session.reset().await;
        assert!(session.checkpoints().is_empty());
        let refused = session.try_undo(1).await.unwrap_err();
        assert!(
            matches!(refused, Refused::NothingToUndo { .. }),
            "{refused:?}"
        );
        // Control: what comes after it is.
        session.ok("x = 3").await;
        session.undo(1).await;
        assert_eq!(session.ok("print('x' in globals())").await, "False\n");
    });
}

#[test]
fn the_oldest_states_go_first() {
    run(async {
        let session = native::shared().session();
        session.ok("x = 0").await;
        for number in 1..=14 {
            session.ok(&format!("x = {number}")).await;
        }
        let known = session.checkpoints();
        assert_eq!(known.len(), 10, "{known:?}");
        assert_eq!(
            known
                .iter()
                .map(|entry| entry.cells_back)
                .collect::<Vec<_>>(),
            (1..=10).collect::<Vec<_>>()
        );
        assert_eq!(
            (known[0].before.as_str(), known[9].before.as_str()),
            ("x = 14", "x = 5")
        );
        let refused = session.try_undo(11).await.unwrap_err();
        assert!(
            matches!(refused, Refused::NothingToUndo { .. }),
            "{refused:?}"
        );
        session.undo(10).await;
        assert_eq!(session.ok("print(x)").await, "4\n");
    });
}

#[test]
fn a_cell_that_changes_nothing_counts_and_needs_no_state_of_its_own() {
    run(async {
        let session = native::shared().session();
        session.ok("x = 1").await;
        session.ok("x = 2").await;
        session.settle().await;
        let groups = native::control_groups(session.host_pid().await);
        session.settle().await;
        let twins = native::twins_of(&groups).len();
        for code in ["x", "print(x)", "pass", "1, 'text'"] {
            session.ok(code).await;
        }
        session.execute("this does not compile").await.unwrap();
        assert_eq!(native::twins_of(&groups).len(), twins);
        // Seven since, and the one that looked for the process.
        session.undo(9).await;
        assert_eq!(session.ok("print(x)").await, "1\n");
    });
}

#[test]
fn a_folder_that_holds_too_much_is_left_alone_and_the_answer_says_so() {
    run(async {
        let undo = UndoPolicy::On {
            checkpoints: 10,
            files: 1 << 20,
        };
        let backend = Builder::new("minimal")
            .sessions(|settings| settings.undo = undo)
            .start();
        let session = backend.session();
        session
            .ok("x = 1; open('small', 'w').write('before')")
            .await;
        session.ok("x = 2; open('small', 'w').write('after')").await;
        // Control: within the budget it is brought back.
        assert_eq!(session.undo(1).await.files, FilesCarried::Restored);
        assert_eq!(
            session.ok("print(x, open('small').read())").await,
            "1 before\n"
        );
        session
            .ok("open('large', 'wb').write(bytes(2 << 20))")
            .await;
        session.ok("x = 3; open('small', 'w').write('after')").await;
        let report = session.undo(1).await;
        let FilesCarried::LeftAlone { why } = report.files else {
            panic!("{report:?}")
        };
        assert!(why.contains("2.0 MiB") && why.contains("1.0 MiB"), "{why}");
        assert_eq!(
            session.ok("print(x, open('small').read())").await,
            "1 after\n"
        );
        backend.end().await;
    });
}

#[test]
fn files_of_a_workspace_are_undone_within_the_budget() {
    run(async {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        fs::write(folder.path().join("of the host"), "host").unwrap();
        symlink("/etc/passwd", folder.path().join("link")).unwrap();
        let mount = OperatorMount {
            host: folder.path().to_owned(),
            inside: PathBuf::from("/work"),
            writable: true,
        };
        let undo = UndoPolicy::On {
            checkpoints: 10,
            files: 1 << 20,
        };
        let builder = Builder::new("minimal").mount(mount);
        let backend = builder
            .sessions(|settings| {
                settings.work_folder = WorkFolder::Shared;
                settings.undo = undo;
            })
            .start();
        let session = backend.session();
        session.ok("x = 1; open('mine', 'w').write('before')").await;
        session
            .ok(
                "import os; open('mine', 'w').write('after'); os.unlink('of the host'); \
                 open('new', 'w'); x = 2",
            )
            .await;
        assert!(!folder.path().join("of the host").exists()); // control
        let report = session.undo(1).await;
        assert_eq!(report.files, FilesCarried::Restored);
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!(
            (read("mine").as_str(), read("of the host").as_str()),
            ("before", "host")
        );
        assert!(!folder.path().join("new").exists());
        assert_eq!(
            fs::read_link(folder.path().join("link")).unwrap(),
            PathBuf::from("/etc/passwd")
        );

        // A fork shares it.
        let (forks, report) = session.forks(1).await;
        assert_eq!(report.files, FilesCarried::Shared);
        forks[0]
            .ok("open('mine', 'a').write(' and the fork')")
            .await;
        assert_eq!(
            session.ok("print(open('mine').read())").await,
            "before and the fork\n"
        );

        session
            .ok("open('large', 'wb').write(bytes(2 << 20))")
            .await;
        session.ok("open('mine', 'w').write('too late')").await;
        assert!(matches!(
            session.undo(1).await.files,
            FilesCarried::LeftAlone { .. }
        ));
        assert_eq!(read("mine"), "too late");
        backend.end().await;
    });
}

#[test]
fn without_undo_nothing_is_kept_and_forks_work() {
    run(async {
        let backend = Builder::new("minimal")
            .sessions(|settings| settings.undo = UndoPolicy::Off)
            .start();
        let session = backend.session();
        session.ok("x = 1").await;
        session.ok("x = 2").await;
        assert!(matches!(
            session.try_undo(1).await,
            Err(Refused::UndoOff { .. })
        ));
        if crate::support::is_root() {
            let twins = session.twins().await;
            assert_eq!(
                twins.len(),
                1,
                "the twin of the interpreter, and no checkpoint: {twins:?}"
            );
        }
        assert_eq!(session.fork().await.ok("print(x)").await, "2\n");
        backend.end().await;
    });
}

#[test]
fn a_fork_has_its_own_past() {
    run(async {
        let session = native::shared().session();
        session.ok("x = 1").await;
        session.ok("x = 2").await;
        let fork = session.fork().await;
        let refused = fork.try_undo(1).await.unwrap_err();
        assert!(
            matches!(refused, Refused::NothingToUndo { .. }),
            "{refused:?}"
        );
        fork.ok("x = 3; open('file', 'w').write('x')").await;
        session.undo(1).await;
        fork.undo(1).await;
        assert_eq!(
            fork.json("import json, os; print(json.dumps([x, os.listdir('.')]))")
                .await,
            json!([2, []])
        );
        assert_eq!(session.ok("print(x)").await, "1\n");
    });
}
