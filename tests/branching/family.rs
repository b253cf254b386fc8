//! Sessions that come from one another: who outlives whom, what they share, and that nothing of
//! them stays.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cellblock::sandbox::SandboxLimits;
use cellblock::session::{Refused, StateAfter, Status};
use cellblock_jail::wire::Bind;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::TIGHT;
use crate::support::has_control_groups;
use crate::support::native::{self, Builder, Session, run};
use crate::support::server::{Era, MINIMAL, Server, TEST_TIMEOUT, program};

async fn x_of(session: &Session) -> String {
    session.ok("print(x)").await.trim().to_owned()
}

#[test]
fn any_member_of_a_family_can_end_and_the_others_live() {
    run(async {
        let ends: [(&str, Option<&str>); 4] = [
            ("it is closed", None),
            ("it ends by itself", Some("import os; os._exit(3)")),
            ("it is killed", Some("import os; os.kill(os.getpid(), 9)")),
            ("it crashes", Some("import ctypes; ctypes.string_at(0)")),
        ];
        for (how, code) in ends {
            for ends in 0..3 {
                let source = native::shared().session();
                source.ok("x = 1").await;
                let child = source.fork().await;
                child.ok("x += 1").await;
                let grandchild = child.fork().await;
                grandchild.ok("x += 1").await;
                let family = [source, child, grandchild];
                match code {
                    None => family[ends].close().await,
                    Some(code) => {
                        let outcome = family[ends].execute(code).await.unwrap();
                        assert!(
                            matches!(outcome.status, Status::Died { .. }),
                            "{how}: {:?}",
                            outcome.status
                        );
                    }
                }
                for (place, member) in family
                    .iter()
                    .enumerate()
                    .filter(|(place, _)| *place != ends)
                {
                    assert_eq!(x_of(member).await, (place + 1).to_string(), "{how}: {ends}");
                    // It can still be copied and taken back.
                    let copy = member.fork().await;
                    member.ok("x = 'changed'").await;
                    assert_eq!(x_of(&copy).await, (place + 1).to_string(), "{how}: {ends}");
                    member.undo(1).await;
                    assert_eq!(x_of(member).await, (place + 1).to_string(), "{how}: {ends}");
                    copy.close().await;
                }
                for member in &family {
                    member.close().await;
                }
            }
        }
    });
}

#[test]
fn a_fork_goes_on_with_its_cell_while_its_source_ends() {
    run(async {
        let source = native::shared().session();
        source.ok("x = 1").await;
        let fork = source.fork().await;
        let busy = fork.clone();
        let stop = CancellationToken::new();
        let token = stop.clone();
        let cell = tokio::spawn(async move {
            busy.execute_with("while True: pass", TEST_TIMEOUT, token)
                .await
        });
        fork.runs().await;
        source.close().await;
        stop.cancel();
        let outcome = cell.await.unwrap().unwrap();
        assert_eq!(
            outcome.status,
            Status::Cancelled {
                state: StateAfter::Kept
            }
        );
        assert_eq!(x_of(&fork).await, "1");
    });
}

#[test]
fn a_fork_that_is_killed_in_the_middle_of_a_cell_leaves_its_source_alone() {
    run(async {
        let source = native::shared().session();
        source.ok("x = 1").await;
        let fork = source.fork().await;
        let busy = fork.clone();
        let cell = tokio::spawn(async move { busy.execute("while True: pass").await });
        fork.runs().await;
        // While a cell runs in the fork the source is copied, and takes cells.
        assert_eq!(x_of(&source.fork().await).await, "1");
        fork.close().await;
        assert_eq!(cell.await.unwrap().unwrap().status, Status::Closed);
        assert_eq!(x_of(&source).await, "1");
    });
}

#[test]
fn a_session_that_runs_a_cell_is_not_copied() {
    run(async {
        let session = native::shared().session();
        session.ok("x = 1").await;
        let busy = session.clone();
        let stop = CancellationToken::new();
        let token = stop.clone();
        let cell = tokio::spawn(async move {
            busy.execute_with("while True: pass", TEST_TIMEOUT, token)
                .await
        });
        session.runs().await;
        let refused = session.try_forks(1).await.map(|_| ()).unwrap_err();
        assert!(
            matches!(refused, Refused::CellRunning { .. }),
            "{refused:?}"
        );
        assert!(matches!(
            session.try_undo(1).await,
            Err(Refused::CellRunning { .. })
        ));
        stop.cancel();
        cell.await.unwrap().unwrap();
        // Control: afterwards it is.
        assert_eq!(x_of(&session.fork().await).await, "1");
    });
}

/// The control group of a whole family, where there is one.
fn family_group(groups: &[PathBuf]) -> PathBuf {
    let parents = groups.iter().filter_map(|group| group.parent());
    let is_family = |path: &&Path| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("family-"))
    };
    parents
        .into_iter()
        .find(is_family)
        .expect("a family has a group")
        .to_owned()
}

fn number_in(group: &Path, names: [&str; 2]) -> u64 {
    let text = names
        .iter()
        .find_map(|name| fs::read_to_string(group.join(name)).ok())
        .expect("the kernel counts");
    text.trim().parse().expect("a number")
}

#[test]
fn a_family_has_one_limit_of_memory() {
    if !has_control_groups() {
        return;
    }
    run(async {
        for (family_memory, fits) in [
            (TIGHT.family_memory, false),
            (TIGHT.family_memory * 4, true),
        ] {
            let backend = Builder::new("minimal")
                .limits(SandboxLimits {
                    family_memory,
                    ..TIGHT
                })
                .start();
            let (source, neighbour) = (backend.session(), backend.session());
            neighbour.ok("x = 'alive'").await;
            source.ok("x = 1").await;
            let group = family_group(&native::control_groups(source.host_pid().await));
            let (forks, _) = source.forks(3).await;
            let mut died = 0;
            for fork in &forks {
                // Each fits into its own limit.
                match fork.execute("kept = bytearray(90 << 20)").await {
                    Ok(outcome) if outcome.status == Status::Completed => {}
                    Ok(outcome) => {
                        assert!(
                            matches!(outcome.status, Status::Died { .. }),
                            "{:?}",
                            outcome.status
                        );
                        died += 1;
                    }
                    Err(refused) => panic!("{refused}"),
                }
            }
            // The kernel chooses whom it ends; somebody of this family.
            for member in forks.iter().chain([&source]) {
                died += usize::from(matches!(
                    member.execute("pass").await,
                    Err(Refused::Ended { .. })
                ));
            }
            assert_eq!(died == 0, fits, "{died} with {family_memory}");
            let peak = number_in(&group, ["memory.max_usage_in_bytes", "memory.peak"]);
            // The kernel lets a page or two pass that it cannot refuse.
            assert!(peak <= family_memory + (1 << 20), "{peak}");
            assert_eq!(x_of(&neighbour).await, "alive");
            assert_eq!(x_of(&neighbour.fork().await).await, "alive");
            backend.end().await;
        }
    });
}

#[test]
fn what_a_source_leaves_to_its_forks_still_counts_when_it_is_gone() {
    if !has_control_groups() {
        return;
    }
    run(async {
        for (family_memory, fits) in [(160 << 20, false), (400 << 20, true)] {
            let limits = SandboxLimits {
                family_memory,
                ..TIGHT
            };
            let backend = Builder::new("minimal").limits(limits).start();
            let source = backend.session();
            source.ok("kept = bytearray(80 << 20)").await;
            let group = family_group(&native::control_groups(source.host_pid().await));
            let fork = source.fork().await;
            source.close().await;
            // The fork has not written to it: it holds what the source has made.
            assert_eq!(fork.ok("print(len(kept) >> 20)").await, "80\n");
            let held = number_in(&group, ["memory.usage_in_bytes", "memory.current"]);
            assert!(held >= 80 << 20, "{held}");
            let outcome = fork.execute("more = bytearray(100 << 20)").await.unwrap();
            assert_eq!(
                outcome.status == Status::Completed,
                fits,
                "{:?}",
                outcome.status
            );
            backend.end().await;
            assert!(!group.exists());
        }
    });
}

#[test]
fn forks_count_as_sessions_and_come_all_or_none() {
    run(async {
        let backend = Builder::new("minimal")
            .sessions(|settings| settings.max_sessions = 3)
            .start();
        let source = backend.session();
        source.ok("x = 1").await;
        let refused = source.try_forks(3).await.map(|_| ()).unwrap_err();
        assert!(
            matches!(refused, Refused::TooManySessions { limit: 3, .. }),
            "{refused:?}"
        );
        // Control: two are room for.
        let (forks, _) = source.forks(2).await;
        assert!(matches!(
            source.try_forks(1).await.map(|_| ()),
            Err(Refused::TooManySessions { .. })
        ));
        forks[0].close().await;
        assert_eq!(x_of(&source.fork().await).await, "1");
        for count in [0, 17] {
            assert!(
                matches!(
                    source.try_forks(count).await.map(|_| ()),
                    Err(Refused::ForkCount { .. })
                ),
                "{count}"
            );
        }
        backend.end().await;
    });
}

#[test]
fn nothing_stays_of_a_family_when_everything_is_closed() {
    run(async {
        let mark = tempfile::Builder::new()
            .prefix("cellblock-mark-")
            .tempdir()
            .unwrap();
        let bind = Bind {
            host: mark.path().to_owned(),
            inside: PathBuf::from("/opt/mark"),
        };
        let backend = Builder::new("minimal").bind(bind).start();
        let source = backend.session();
        source.ok("x = 1").await;
        let quiet = native::marked_processes(mark.path()).len();
        let fork = source.fork().await;
        let grandchild = fork.fork().await;
        let family = [source, fork, grandchild];
        let mut groups = BTreeSet::new();
        for member in &family {
            // A process that belongs to nobody, a thread, files, and states that can be undone.
            let code = "import subprocess; subprocess.Popen('setsid sleep 100000 & exit', \
                        shell=True).wait(); open('file', 'w').write('x')";
            member.ok(code).await;
            member.ok("x += 1").await;
            member.undo(1).await;
            let own = native::control_groups(member.host_pid().await);
            groups.extend(
                own.iter()
                    .filter_map(|group| group.parent().map(Path::to_owned))
                    .filter(|parent| {
                        parent
                            .file_name()
                            .is_some_and(|name| name.to_string_lossy().starts_with("family-"))
                    }),
            );
            groups.extend(own);
        }
        assert!(
            native::marked_processes(mark.path()).len() > quiet + 6,
            "there is something to be left"
        );
        for member in &family {
            member.close().await;
        }
        let left: Vec<_> = native::marked_processes(mark.path())
            .into_iter()
            .filter(|process| process.depth > native::own_depth() + 2 || process.name == "cb-twin")
            .collect();
        assert!(left.is_empty(), "{left:?}");
        assert!(groups.iter().all(|group| !group.exists()), "{groups:?}");
        backend.end().await;
        assert!(native::marked_processes(mark.path()).is_empty());
    });
}

/// What a server holds on the machine.
#[derive(Debug, PartialEq, Eq)]
struct Holdings {
    processes: usize,
    descriptors: usize,
    groups: usize,
    mounts: usize,
}

impl Holdings {
    fn of(server: u32) -> Holdings {
        let family = descendants(server);
        let descriptors = family
            .iter()
            .chain([&server])
            .map(|pid| entries(&format!("/proc/{pid}/fd")).len());
        // Mounts of the machine come and go with other tests.
        let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
        let apart = family
            .iter()
            .filter(|pid| namespace(&pid.to_string()) != namespace("self"));
        let mounts = apart
            .map(|pid| fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default());
        Holdings {
            processes: family.len(),
            descriptors: descriptors.sum(),
            groups: entries("/sys/fs/cgroup")
                .iter()
                .map(|place| groups_below(place, server))
                .sum(),
            mounts: mounts.map(|text| text.lines().count()).sum(),
        }
    }

    /// Looks until the server holds the same many times in a row: nothing is being made for its
    /// pool any more.
    fn at_rest(server: u32) -> Holdings {
        let mut last = Holdings::of(server);
        let mut same = 0;
        while same < 50 {
            let now = Holdings::of(server);
            same = if now == last { same + 1 } else { 0 };
            last = now;
        }
        last
    }

    /// Looks until the server holds what it held, or is out of patience.
    fn assert_return_to(before: &Holdings, server: u32) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let now = Holdings::of(server);
            if now == *before {
                return;
            }
            assert!(Instant::now() < deadline, "before {before:?}, now {now:?}");
            std::thread::yield_now();
        }
    }
}

fn entries(folder: &str) -> Vec<PathBuf> {
    fs::read_dir(folder)
        .map(|all| all.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default()
}

/// The groups of a server, below the place where it made its own.
fn groups_below(place: &Path, server: u32) -> usize {
    let mut count = 0;
    for folder in entries(&place.to_string_lossy())
        .into_iter()
        .filter(|path| path.is_dir())
    {
        if folder.file_name().is_some_and(|name| {
            name.to_string_lossy()
                .starts_with(&format!("cellblock-{server}-"))
        }) {
            count += folders_below(&folder);
        }
    }
    count
}

fn folders_below(folder: &Path) -> usize {
    let below = entries(&folder.to_string_lossy())
        .into_iter()
        .filter(|path| path.is_dir());
    below.map(|each| 1 + folders_below(&each)).sum()
}

fn descendants(of: u32) -> BTreeSet<u32> {
    let parent = |pid: u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        status
            .rsplit_once(')')?
            .1
            .split_whitespace()
            .nth(1)?
            .parse::<u32>()
            .ok()
    };
    let pairs: Vec<(u32, u32)> = native::processes()
        .iter()
        .filter_map(|process| Some((process.pid, parent(process.pid)?)))
        .collect();
    let mut family = BTreeSet::new();
    loop {
        let size = family.len();
        family.extend(
            pairs
                .iter()
                .filter(|(_, parent)| *parent == of || family.contains(parent))
                .map(|(pid, _)| *pid)
                .collect::<Vec<_>>(),
        );
        if family.len() == size {
            return family;
        }
    }
}

#[test]
fn hundreds_of_forks_and_of_cells_that_can_be_undone_leak_nothing() {
    // Sandboxes that wait for their first session would be counted while they come and go.
    let server = Server::spawn(
        program()
            .env("CELLBLOCK_POOL", "0")
            .arg("mcp")
            .args(MINIMAL),
        Era::Initialize,
    );
    server.greet();
    let session = server.session();
    session.text("x = bytearray(1 << 20)");
    let fork = |name: &str| {
        let forked = session.call("fork_session", json!({"names": [name]}));
        assert!(!forked.is_error(), "{}", forked.text());
        let ran = server.call(
            "execute_ipython_cell",
            json!({"session_id": name, "code": "x[0] = 1; len(x)"}),
        );
        assert_eq!(ran.text().lines().next(), Some("1048576"));
        server.call("close_session", json!({"session_id": name}));
    };
    let cells = |count: usize| {
        for number in 0..count {
            session.text(&format!("y = {number}"));
        }
        session.text("pass");
    };
    cells(15);
    for number in 0..5 {
        fork(&format!("warm-{number}"));
    }
    session.text("pass");
    let server_id = server.process_id();
    let before = Holdings::at_rest(server_id);
    let memory = server.resident_bytes();
    for number in 0..200 {
        fork(&format!("fork-{number}"));
    }
    session.text("pass");
    Holdings::assert_return_to(&before, server_id);
    cells(300);
    Holdings::assert_return_to(&before, server_id);
    let grown = server.resident_bytes().saturating_sub(memory);
    assert!(grown < 16 << 20, "the server holds {grown} bytes more");
    drop(session);
    server.finish();
}
