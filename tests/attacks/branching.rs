//! Sessions that lie, race or interfere while they are copied gain nothing: the result is a proper
//! copy or a refusal.
//!
//! Whatever a session does to itself, the same must hold afterwards (`Scene::assert_unharmed`): its
//! neighbours live and can be copied, every process of its family is locked down, and no twin runs,
//! which has more rights than a session.
//!
//! Natively the warden makes copies, from outside. In a container the session makes them itself,
//! and its changes to itself are in them: such a copy is under the session's control, in its own
//! container, with no more rights. Its messages to the supervisor are tested in `introductions`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cellblock::session::{ForkReport, Refused, Status};
use cellblock_jail::wire::OmittedLayer;
use serde_json::json;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

use crate::support::native::{self, Builder, ROOMY, Session, Twin, run};
use crate::support::places::{Ground, PerPlace, Place, in_every_place};
use crate::support::{is_root, skipped};

/// A backend for hostile sessions.
fn attacked(place: Place) -> &'static Ground {
    static GROUNDS: PerPlace<Ground> = PerPlace::new();
    GROUNDS.get(place, || place.limited(ROOMY))
}

/// A hostile session and a peaceful one.
struct Scene {
    place: Place,
    hostile: Session,
    /// Several scenes may share it; each checks it alone.
    neighbour: Arc<Mutex<Session>>,
    /// Of the hostile session; empty where the owner of a twin cannot be determined, or there are
    /// none.
    groups: Vec<PathBuf>,
}

impl Scene {
    async fn new(place: Place) -> Scene {
        Scene::beside(place, peaceful(place).await).await
    }

    async fn beside(place: Place, neighbour: Arc<Mutex<Session>>) -> Scene {
        let hostile = attacked(place).session();
        hostile.ok("x = 'carried'").await;
        let groups = if place.is_native() {
            native::control_groups(hostile.host_pid().await)
        } else {
            Vec::new()
        };
        Scene {
            place,
            hostile,
            neighbour,
            groups,
        }
    }

    /// Runs the attack and requests a fork. The result is a fork that works, or a refusal.
    async fn forked_after(&self, attack: &str) -> Result<(Session, ForkReport), Refused> {
        self.hostile.ok(attack).await;
        self.forked().await
    }

    async fn forked(&self) -> Result<(Session, ForkReport), Refused> {
        let (mut forks, report) = self.hostile.try_forks(1).await?;
        let fork = forks.remove(0);
        self.place.assert_locked_down(&fork).await;
        assert_eq!(fork.ok("print(x)").await, "carried\n");
        Ok((fork, report))
    }

    /// Checks the conditions that must hold after every attack.
    async fn assert_unharmed(&self) {
        self.assert_twins_stopped();
        let neighbour = self.neighbour.lock().await;
        assert_eq!(neighbour.ok("print(x)").await, "alive\n");
        // Control: the peaceful session can be copied.
        let copy = neighbour.fork().await;
        assert_eq!(copy.ok("print(x)").await, "alive\n");
        copy.close().await;
        if self.place.is_native() {
            // The source of new sessions still lives. In containers it is not shared.
            assert_eq!(attacked(self.place).session().ok("print(1)").await, "1\n");
        }
    }

    /// A twin runs while it makes a system call for the warden. One that still runs a little later
    /// does not run for the warden.
    fn assert_twins_stopped(&self) {
        let deadline = Instant::now() + Duration::from_secs(2);
        for twin in native::twins_of(&self.groups) {
            let mut now = Some(twin);
            while let Some(twin) = now
                .as_ref()
                .filter(|twin| !twin.is_stopped() && twin.state != 'Z')
            {
                assert!(Instant::now() < deadline, "a twin runs: {twin:?}");
                std::thread::yield_now();
                now = Twin::read(twin.pid);
            }
        }
    }

    /// The hostile session either continues, locked down, or has ended and reports that.
    async fn assert_alive_or_ended(&self) -> bool {
        let limit = Duration::from_secs(1);
        match self
            .hostile
            .execute_with("print(x)", limit, CancellationToken::new())
            .await
        {
            Ok(outcome) if outcome.status == Status::Completed => {
                assert_eq!(native::printed(&outcome), "carried\n");
                true
            }
            Ok(outcome) => {
                assert!(
                    !matches!(outcome.status, Status::Raised(_)),
                    "{}",
                    native::everything(&outcome)
                );
                false
            }
            Err(Refused::Ended { .. }) => false,
            Err(other) => panic!("{other}"),
        }
    }
}

/// Permitted results of a request for a fork. The later checks are the same.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expected {
    Fork,
    Refusal,
    /// Both are correct.
    Either,
}

/// A session that does nothing wrong.
async fn peaceful(place: Place) -> Arc<Mutex<Session>> {
    let session = attacked(place).session();
    session.ok("x = 'alive'").await;
    Arc::new(Mutex::new(session))
}

/// Runs cases concurrently, because most of them wait for a timeout.
async fn side_by_side(
    place: Place,
    expected: Expected,
    cases: &'static [(&'static str, &'static str)],
) {
    let neighbour = peaceful(place).await;
    let run = |(name, attack)| {
        tokio::spawn(forks_as_expected(
            place,
            neighbour.clone(),
            expected,
            name,
            attack,
        ))
    };
    let tasks: Vec<_> = cases.iter().map(|case| (case.0, run(*case))).collect();
    for (name, task) in tasks {
        task.await.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

async fn forks_as_expected(
    place: Place,
    neighbour: Arc<Mutex<Session>>,
    expected: Expected,
    name: &'static str,
    attack: &'static str,
) {
    let scene = Scene::beside(place, neighbour).await;
    match scene.forked_after(attack).await {
        Ok((fork, _)) => {
            assert!(expected != Expected::Refusal, "{name}: there is a fork");
            fork.close().await;
        }
        Err(refused) => {
            assert!(expected != Expected::Fork, "{name}: {refused}");
            assert!(
                matches!(refused, Refused::CannotCopy { .. } | Refused::Ended { .. }),
                "{name}: {refused:?}"
            );
        }
    }
    let goes_on = scene.assert_alive_or_ended().await;
    if expected == Expected::Fork {
        assert!(goes_on, "{name}: the source goes on");
        place.assert_locked_down(&scene.hostile).await;
    }
    scene.assert_unharmed().await;
    scene.hostile.close().await;
    assert!(
        native::twins_of(&scene.groups).is_empty(),
        "{name}: nothing is left"
    );
}

in_every_place! {
    async fn names_that_a_session_replaces_are_not_the_ones_that_copies_are_made_with(place) {
        side_by_side(
            place,
            Expected::Fork,
            &[
                ("the fork of os", "import os, posix; os.fork = posix.fork = lambda: 0; assert \
                                    os.fork() == 0"),
                ("the kill of os", "import os, posix; os.kill = posix.kill = lambda *_: 1/0"),
                ("the number of the process", "import os, posix; os.getpid = posix.getpid = \
                                               lambda: 1"),
                ("the names of all modules", "import sys; sys.modules.pop('os'); \
                                              sys.modules.pop('posix')"),
            ],
        )
        .await;
    }

    async fn a_runner_whose_functions_are_replaced_gets_a_proper_copy_or_none(place) {
        side_by_side(
            place,
            Expected::Refusal,
            &[
                (
                    "it says it is a copy",
                    "import sys; sys.modules['cellblock_runner.branch'].suspend_for_copy = \
                     lambda: True",
                ),
                (
                    "it says it was copied",
                    "import sys; sys.modules['cellblock_runner.branch'].suspend_for_copy = \
                     lambda: False",
                ),
                (
                    "it gives the sign and does not fork",
                    "import sys, os\nsys.modules['cellblock_runner.branch'].suspend_for_copy = \
                     lambda: os.kill(os.getpid(), 18)",
                ),
                (
                    "it saves nothing",
                    "import sys; sys.modules['cellblock_runner.fork_state'].save = \
                     lambda *_: None",
                ),
                (
                    "it never answers",
                    "import sys; sys.modules['cellblock_runner.serve'].Session._branch = \
                     lambda *_: None",
                ),
                (
                    "it ends",
                    "import sys, os; sys.modules['cellblock_runner.serve'].Session._branch = \
                     lambda *_: os._exit(0)",
                ),
                (
                    "it kills itself",
                    "import sys, os\nsys.modules['cellblock_runner.branch'].suspend_for_copy = \
                     lambda: os.kill(os.getpid(), 9)",
                ),
            ],
        )
        .await;
    }

    async fn a_runner_that_answers_twice_or_stops_twice_is_copied_once(place) {
        side_by_side(
            place,
            Expected::Either,
            &[
                (
                    "it answers twice",
                    "
import sys
session = sys.modules['cellblock_runner.serve'].Session
true_branch = session._branch
def branch(self, number, header):
    true_branch(self, number, header)
    self._channel.send({'type': 'branched', 'id': number, 'lost': ['everything']})
    self._channel.send({'type': 'branched', 'id': number + 1, 'lost': []})
session._branch = branch",
                ),
                ("it stops twice", "import os; os.register_at_fork(before=lambda: \
                                    os.kill(os.getpid(), 19))"),
                ("it goes on twice", "import os; os.register_at_fork(before=lambda: \
                                      os.kill(os.getpid(), 18))"),
                (
                    "its tables of descriptors part",
                    "import ctypes\nassert ctypes.CDLL(None).syscall(436, 900, 900, 2) == 0",
                ),
                (
                    "its handlers raise",
                    "import os; os.register_at_fork(before=lambda: 1/0, after_in_child=lambda: \
                     1/0, after_in_parent=lambda: 1/0)",
                ),
                ("it is a child of nobody", "import os\ntry: os.setsid()\nexcept OSError: pass"),
                ("it cannot be read", "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"),
            ],
        )
        .await;
    }

    async fn fork_handlers_that_never_return_or_end_the_process_hold_nobody_up(place) {
        side_by_side(
            place,
            Expected::Refusal,
            &[
                ("before, it waits", "import os, threading; os.register_at_fork(before=lambda: \
                                      threading.Event().wait())"),
                ("before, it ends", "import os; os.register_at_fork(before=lambda: os._exit(5))"),
                ("before, it is killed", "import os; os.register_at_fork(before=lambda: \
                                          os.kill(os.getpid(), 9))"),
                (
                    "before, it calls and calls",
                    "import os\ndef call():\n    while True: \
                     os.getppid()\nos.register_at_fork(before=call)",
                ),
                ("in the copy, it ends", "import os; os.register_at_fork(after_in_child=lambda: \
                                          os._exit(5))"),
            ],
        )
        .await;
        side_by_side(
            place,
            Expected::Either,
            &[("afterwards, it ends", "import os; os.register_at_fork(after_in_parent=lambda: \
                                       os._exit(5))")],
        )
        .await;
    }

    async fn a_copy_that_never_greets_ends_with_its_source(place) {
        let scene = Scene::new(place).await;
        scene
            .hostile
            .ok("import os, threading; os.register_at_fork(after_in_child=lambda: \
                 threading.Event().wait())")
            .await;
        let source = scene.hostile.clone();
        let forking = tokio::spawn(async move { source.try_forks(1).await.map(|_| ()) });
        scene.assert_unharmed().await;
        scene.hostile.close().await;
        let refused = forking.await.unwrap().unwrap_err();
        assert!(
            matches!(
                refused,
                Refused::ClosedWhileWaiting | Refused::Unknown { .. } | Refused::CannotCopy { .. }
            ),
            "{refused:?}"
        );
        scene.assert_unharmed().await;
    }

    async fn thousands_of_descriptors_are_no_hindrance(place) {
        let scene = Scene::new(place).await;
        let many = "
import os
held = [os.open('/dev/null', os.O_RDONLY) for _ in range(1500)]
pipes = [end for _ in range(700) for end in os.pipe()]";
        let (fork, report) = scene.forked_after(many).await.unwrap();
        // A fork in a container has a folder with another name, which is reported.
        assert!(!report.lost.iter().any(|lost| lost.contains("pipe")), "{:?}", report.lost);
        let use_them =
            "for reader, writer in zip(pipes[::2], pipes[1::2]): os.write(writer, b'x'); assert \
             os.read(reader, 9) == b'x'";
        fork.ok(use_them).await;
        // It may create its own, up to the limit.
        fork.ok(
            "for each in held + pipes: os.close(each)\nmore = [os.open('/dev/null', os.O_RDONLY) \
             for _ in range(3000)]",
        )
        .await;
        // All of them: no descriptor is left for the copy itself.
        let all = "
try:
    while True: held.append(os.open('/dev/null', os.O_RDONLY))
except OSError: held.pop()";
        scene.hostile.execute(all).await.unwrap();
        match scene.forked().await {
            Ok((fork, _)) => fork.close().await,
            Err(refused) => assert!(matches!(refused, Refused::CannotCopy { .. }), "{refused:?}"),
        }
        scene.hostile.execute("for each in held: os.close(each)").await.unwrap();
        assert!(scene.forked().await.is_ok(), "with descriptors to spare it works again");
        scene.assert_unharmed().await;
    }
}

// The following tests are about the warden's way of making copies: twins, the instructions that
// they use, and timeouts.

#[test]
fn a_session_that_comes_to_its_branch_point_too_late_goes_on() {
    run(async {
        let scene = Scene::new(Place::Native).await;
        // Longer than any timeout, once. Only the state after this cell cannot be kept.
        let slow = "
import sys, time
fork_state = sys.modules['cellblock_runner.fork_state']
true_save, delays = fork_state.save, [5]
def save(*arguments):
    if delays: time.sleep(delays.pop())
    return true_save(*arguments)
fork_state.save = save";
        scene.hostile.ok(slow).await;
        assert_eq!(
            scene.hostile.ok("print(x)").await,
            "carried\n",
            "it does not stand still with nobody looking"
        );
        let (fork, _) = scene
            .forked()
            .await
            .unwrap_or_else(|refused| panic!("{refused}"));
        assert_eq!(fork.ok("print(delays)").await, "[]\n");
        scene.assert_unharmed().await;
    });
}

/// Makes the session call `clone` from its own code; the address of the C library's `clone` is
/// known too.
///
/// `overwrite` replaces an instruction that enters the kernel with two bytes.
const OWN_CLONE: &str = "
import ctypes, mmap, os, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, \
ctypes.c_long)
def page(shared):
    return libc.mmap(None, 4096, 7, 0x20 | (1 if shared else 2), -1, 0)
def function(address, *arguments):
    return ctypes.CFUNCTYPE(ctypes.c_long, *arguments)(address)
def overwrite(address, code):
    start = address & ~4095
    assert libc.mprotect(ctypes.c_void_p(start), 8192, 7) == 0
    ctypes.memmove(address, code, len(code))
def fork_of_libc():
    # mov eax, 56; syscall: somewhere in the text of the C library.
    for line in open('/proc/self/maps'):
        words = line.split()
        if 'x' in words[1] and words[-1].rsplit('/', 1)[-1].startswith('libc.so'):
            first, last = (int(part, 16) for part in words[0].split('-'))
            text = ctypes.string_at(first, last - first)
            at = text.index(b'\\xb8\\x38\\x00\\x00\\x00\\x0f\\x05')
            found = []
            while at >= 0:
                found.append(first + at + 5)
                at = text.find(b'\\xb8\\x38\\x00\\x00\\x00\\x0f\\x05', at + 1)
            return found
# Called with an address and two bytes: makes a process, then writes the bytes to the address, \
unless it is zero, in the one that made it.
CODE = bytes.fromhex(
    '4989f8'      # mov r8, rdi
    '4989f1'      # mov r9, rsi
    '4150'        # push r8
    '4151'        # push r9
    'bf11000000'  # mov edi, SIGCHLD
    '31f6' '31d2' '4d31d2' '4d31c0'
    'b838000000'  # mov eax, clone
    '0f05'        # syscall
    '4159'        # pop r9
    '4158'        # pop r8
    '4885c0'      # test rax, rax
    '7409'        # jz over the write
    '4d85c0'      # test r8, r8
    '7404'        # jz over the write
    '664589 08'.replace(' ', '') +  # mov [r8], r9w
    'c3')
ENTER = CODE.index(b'\\x0f\\x05')
def own_clone(shared, target=0, word=0):
    place = page(shared)
    ctypes.memmove(place, CODE, len(CODE))
    clone = function(place, ctypes.c_uint64, ctypes.c_uint64)
    if target == 'itself': target = place + ENTER
    def suspend_for_copy(with_threads):
        os.kill(os.getpid(), 18)
        return clone(target, word) == 0
    sys.modules['cellblock_runner.branch'].suspend_for_copy = suspend_for_copy
    return place + ENTER
";

/// Two bytes instead of `syscall`, as numbers: a twin would execute them.
const TRAPS: &[(&str, u16)] = &[
    ("a loop", 0xfeeb),
    ("the gate of 32-bit calls", 0x80cd),
    ("a break point and nothing", 0x90cc),
    ("no instruction", 0x0b0f),
    ("nothing: on to whatever follows", 0x9090),
];

fn has_own_clone() -> bool {
    if !cfg!(target_arch = "x86_64") {
        skipped("x86-64 (the attack is written in its instructions)");
    }
    cfg!(target_arch = "x86_64")
}

#[test]
fn instructions_that_a_session_writes_over_make_no_twin_run() {
    if !has_own_clone() {
        return;
    }
    run(async {
        // Control: with its own instructions a session is copied like any other, from private and
        // from shared memory.
        for shared in ["False", "True"] {
            let scene = Scene::new(Place::Native).await;
            let attack = format!("{OWN_CLONE}\nwhere = own_clone({shared})");
            let (fork, _) = scene
                .forked_after(&attack)
                .await
                .unwrap_or_else(|refused| panic!("{shared}: {refused}"));
            let again = fork.fork().await;
            assert_eq!(again.ok("print(x)").await, "carried\n");
            assert!(scene.assert_alive_or_ended().await);
        }
        for (name, word) in TRAPS {
            // The instruction that the session's twin uses: the one at which the warm interpreter
            // was parked.
            let scene = Scene::new(Place::Native).await;
            let code = word.to_le_bytes();
            let attack = format!(
                "{OWN_CLONE}\nwhere = own_clone(False)\nfor place in fork_of_libc(): \
                 overwrite(place, bytes({code:?}))"
            );
            scene.hostile.ok(&attack).await;
            scene.refused(name).await;
            // The one that copies of its next checkpoint use. It is in a shared mapping and changes
            // when the checkpoint is made.
            let scene = Scene::new(Place::Native).await;
            scene
                .hostile
                .ok(&format!(
                    "{OWN_CLONE}\nwhere = own_clone(True, 'itself', {word})"
                ))
                .await;
            scene.refused(name).await;
        }
    });
}

impl Scene {
    /// Requests forks until they are refused, which must be soon, and checks the remaining state.
    async fn refused(&self, name: &str) {
        let mut refusals = 0;
        for _ in 0..3 {
            match self.hostile.try_forks(1).await {
                Ok((forks, _)) => forks[0].close().await,
                Err(refused) => {
                    refusals += 1;
                    assert!(
                        matches!(refused, Refused::CannotCopy { .. } | Refused::Ended { .. }),
                        "{name}: {refused:?}"
                    );
                }
            }
            self.assert_twins_stopped();
        }
        assert!(refusals >= 2, "{name}: {refusals}");
        if self.assert_alive_or_ended().await {
            // An undo uses the same memory; its result is locked down in any case.
            if self.hostile.try_undo(1).await.is_ok() {
                self.hostile.assert_locked_down().await;
            }
        }
        self.assert_unharmed().await;
        self.hostile.close().await;
        assert!(
            native::twins_of(&self.groups).is_empty(),
            "{name}: nothing is left"
        );
    }
}

#[test]
fn a_thread_that_races_with_the_copying_wins_nothing() {
    if !has_own_clone() {
        return;
    }
    run(async {
        for (name, word) in TRAPS {
            let scene = Scene::new(Place::Native).await;
            // A thread without the GIL alternates between the bad bytes and the good ones.
            let attack = format!(
                "{OWN_CLONE}
RACE = bytes.fromhex('668937' 'f390' '668917' 'f390' '803900' '74f1' 'c3')
place = page(False)
ctypes.memmove(place, RACE, len(RACE))
race = function(place, *[ctypes.c_uint64] * 4)
stop = ctypes.c_uint8(0)
where = fork_of_libc()
for each in where: overwrite(each, b'\\x0f\\x05')
racers = [threading.Thread(target=race, args=(each, {word}, 0x050f, ctypes.addressof(stop)), \
daemon=True) for each in where[:1]]
for racer in racers: racer.start()"
            );
            scene.hostile.ok(&attack).await;
            for _ in 0..5 {
                match scene.hostile.try_forks(1).await {
                    Ok((forks, _)) => {
                        forks[0]
                            .execute("stop.value = 1")
                            .await
                            .map(drop)
                            .unwrap_or_default();
                        forks[0].close().await;
                    }
                    Err(refused) => assert!(
                        matches!(refused, Refused::CannotCopy { .. } | Refused::Ended { .. }),
                        "{name}: {refused:?}"
                    ),
                }
                scene.assert_twins_stopped();
            }
            // The session may have run into its own trap; a copy of it has no thread that races.
            let _ = scene.hostile.execute("stop.value = 1").await;
            if scene.assert_alive_or_ended().await {
                scene.hostile.assert_locked_down().await;
            }
            scene.assert_unharmed().await;
            scene.hostile.close().await;
            assert!(
                native::twins_of(&scene.groups).is_empty(),
                "{name}: nothing is left"
            );
        }
    });
}

/// A thread that makes forbidden calls all the time and records every result.
const CALLER: &str = "
import ctypes, threading
libc = ctypes.CDLL(None, use_errno=True)
room = ctypes.create_string_buffer(64)
answers, stop = set(), False
# Number, arguments: setns, unshare, pidfd_getfd, ptrace (seize), process_vm_readv.
CALLS = [(308, -1, 0), (272, 0), (438, -1, 0, 0), (101, 0x4206, 1, 0, 0), (310, 1, room, 0, room, \
0, 0)]
def keep_calling():
    while not stop:
        for number, *arguments in CALLS:
            ctypes.set_errno(0)
            result = libc.syscall(ctypes.c_long(number), *[a if a is room else ctypes.c_long(a) \
            for a in arguments])
            answers.add((number, 0 if result >= 0 else ctypes.get_errno()))
caller = threading.Thread(target=keep_calling, daemon=True)
caller.start()
while len(answers) < len(CALLS): pass";

const ANSWERS: &str = "
import json
stop = True
if caller.is_alive(): caller.join()
print(json.dumps(sorted(answers)))";

#[test]
fn calls_that_copies_are_made_with_are_refused_to_sessions_at_all_times() {
    if !has_own_clone() {
        return;
    }
    run(async {
        let scene = Scene::new(Place::Native).await;
        scene.hostile.ok(CALLER).await;
        for _ in 0..10 {
            let (fork, report) = scene.forked().await.unwrap();
            assert_eq!(report.lost, ["1 thread"]);
            fork.close().await;
        }
        scene.hostile.ok("y = 1").await;
        scene.hostile.undo(1).await;
        let fork = scene.hostile.fork().await;
        const ENOSYS: i64 = 38;
        const EPERM: i64 = 1;
        let refused = json!([
            [101, ENOSYS],
            [272, ENOSYS],
            [308, EPERM],
            [310, ENOSYS],
            [438, EPERM]
        ]);
        for session in [&scene.hostile, &fork] {
            assert_eq!(session.json(ANSWERS).await, refused);
            // And in the copies themselves.
            session.ok(CALLER).await;
            assert_eq!(session.json(ANSWERS).await, refused);
        }
        scene.assert_unharmed().await;

        // Control: without the filter the kernel has other answers.
        let backend = Builder::new("minimal")
            .leave_out(&[OmittedLayer::Seccomp])
            .start();
        let open = backend.session();
        open.ok(CALLER).await;
        let answers = open.json(ANSWERS).await;
        let same = answers
            .as_array()
            .unwrap()
            .iter()
            .filter(|answer| refused.as_array().unwrap().contains(answer))
            .count();
        assert_eq!(
            (same, answers.as_array().unwrap().len()),
            (0, 5),
            "{answers}"
        );
        backend.end().await;
    });
}

#[test]
fn a_fork_holds_nothing_of_its_source_and_the_source_nothing_of_the_fork() {
    run(async {
        let scene = Scene::new(Place::Native).await;
        let hold = "
import os, socket
open('mine', 'w').write('source')
held = os.open('/work', os.O_RDONLY | os.O_DIRECTORY)
root = os.open('/', os.O_RDONLY | os.O_DIRECTORY)
file = os.open('mine', os.O_RDWR)
server = socket.create_server(('127.0.0.1', 0))
left = socket.create_connection(server.getsockname())
right = server.accept()[0]
server.close()
one, other = socket.socketpair()
reader, writer = os.pipe()
os.write(writer, b'from the source')
inode = os.fstat(held).st_ino, os.fstat(held).st_dev";
        let (fork, report) = scene.forked_after(hold).await.unwrap();
        assert_eq!(report.lost, ["2 connections"]);
        // Whatever these descriptors refer to now, it belongs to the fork.
        let write = |who: &str| {
            format!(
                "
import os
assert (os.fstat(held).st_ino, os.fstat(held).st_dev) == (os.stat('/work').st_ino, \
os.stat('/work').st_dev)
os.pwrite(file, b'{who:6}', 0)
os.close(os.open('new of {who}', os.O_CREAT | os.O_WRONLY, dir_fd=held))
os.close(os.open('work/through the root of {who}', os.O_CREAT | os.O_WRONLY, dir_fd=root))"
            )
        };
        fork.ok(&write("fork")).await;
        assert_eq!(
            fork.ok("print(os.stat('/work').st_dev == inode[1])").await,
            "False\n"
        );
        let look =
            "import json; print(json.dumps([open('mine').read(), sorted(os.listdir('/work'))]))";
        assert_eq!(scene.hostile.json(look).await, json!(["source", ["mine"]]));
        scene.hostile.ok(&write("source")).await;
        assert_eq!(
            fork.json(look).await,
            json!([
                "fork  ",
                ["mine", "new of fork", "through the root of fork"]
            ])
        );
        let dead = "
import errno, json
def tried(work):
    try: return work()
    except OSError as error: return errno.errorcode[error.errno]
print(json.dumps(tried(lambda: left.send(b'x'))))";
        let answer = fork.json(dead).await;
        assert!(answer.is_string(), "{answer}");
        // The fork has a pipe and a pair of sockets of its own.
        let through = "os.write(writer, b', of the fork'); print(os.read(reader, 99), \
                       one.send(b'of the fork'))";
        assert_eq!(
            fork.ok(through).await,
            "b'from the source, of the fork' 11\n"
        );
        // Control: in the source they live, and nothing has come from the fork.
        let control =
            "print(os.read(reader, 99), left.send(b'x'), one.send(b'own'), other.recv(99))";
        assert_eq!(
            scene.hostile.ok(control).await,
            "b'from the source' 1 3 b'own'\n"
        );
        let sockets = "
import json, os
def leads_to(name):
    try: return os.readlink(f'/proc/self/fd/{name}')
    except OSError: return ''
found = {int(name) for name in os.listdir('/proc/self/fd') if leads_to(name).startswith('socket')}
print(json.dumps(sorted(found - {one.fileno(), other.fileno()})))";
        assert_eq!(
            fork.json(sockets).await,
            json!([1000]),
            "a fork has its channel, its own pair, and no other socket"
        );
        scene.assert_unharmed().await;
    });
}

#[test]
fn twins_stand_still_are_not_seen_from_inside_and_get_no_signal_from_there() {
    if !is_root() {
        // The owner of a twin is known by its control group.
        skipped("root (control groups)");
        return;
    }
    run(async {
        let session = native::shared().session();
        session.ok("x = 1").await;
        session.ok("x = 2").await;
        let before = session.twins().await;
        assert!(
            before.len() >= 3,
            "the twin of the interpreter and a checkpoint for each cell: {before:?}"
        );
        assert!(before.iter().all(Twin::is_stopped), "{before:?}");
        let look = "
import json, os
numbers = [name for name in os.listdir('/proc') if name.isdigit()]
print(json.dumps(sorted(open(f'/proc/{name}/comm').read().strip() for name in numbers)))";
        assert_eq!(session.json(look).await, json!(["cb-init", "python"]));
        // They cannot be found by pid either. Control: the session itself can.
        let reach = format!(
            "
import json, os
def reached(number):
    try: os.kill(number, 0)
    except OSError: return False
    return True
print(json.dumps([[reached(number) for number in {:?}], reached(os.getpid())]))",
            before.iter().map(|twin| twin.pid).collect::<Vec<_>>()
        );
        let answer = session.json(&reach).await;
        assert_eq!(answer, json!([vec![false; before.len()], true]));
        // A signal to all processes from a child ends the session and reaches no twin.
        let outcome = session
            .execute("import os\nif os.fork() == 0: os.kill(-1, 9)\nos.wait()")
            .await
            .unwrap();
        assert!(
            matches!(outcome.status, Status::Died { .. }),
            "{:?}",
            outcome.status
        );
        let report = session.undo(1).await;
        assert!(report.revived);
        assert_eq!(session.ok("print(x)").await, "2\n");
        // From the session itself, with signals that cannot be caught.
        for signal in [9, 19] {
            let code = format!(
                "import os, subprocess\nx = 3\nchild = subprocess.Popen(['sleep', \
                 '1000'])\nos.kill(-1, {signal})\nos.kill(os.getpid(), 9)"
            );
            let outcome = session.execute(&code).await.unwrap();
            assert!(
                matches!(outcome.status, Status::Died { .. }),
                "{:?}",
                outcome.status
            );
            assert!(session.undo(1).await.revived);
            assert_eq!(session.ok("print(x)").await, "2\n");
        }
        let after = session.twins().await;
        assert!(after.iter().all(Twin::is_stopped), "{after:?}");
        session.close().await;
        assert!(
            after
                .iter()
                .chain(&before)
                .all(|twin| Twin::read(twin.pid).is_none()),
            "twins end with their session"
        );
    });
}
