//! A session that takes as much as it can gets only its own share.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cellblock::sandbox::{Exit, SandboxLimits};
use cellblock::session::{Refused, StateAfter, Status};
use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::support::native::{self, Session};
use crate::support::places::{Ground, PerPlace, Place, in_every_place};
use crate::support::{has_control_groups, skipped};

/// Enough for the processes of a container beside its session, and too little for eight greedy
/// children.
const TIGHT: SandboxLimits = SandboxLimits {
    memory: 160 << 20,
    family_memory: 320 << 20,
    cpus: 1.0,
    processes: 24,
    disk: 8 << 20,
    files: 200,
};

/// A backend with small limits.
fn tight(place: Place) -> &'static Ground {
    static GROUNDS: PerPlace<Ground> = PerPlace::new();
    GROUNDS.get(place, || place.limited(TIGHT))
}

/// The same with folders that are larger than the memory limit.
fn wide(place: Place) -> &'static Ground {
    static GROUNDS: PerPlace<Ground> = PerPlace::new();
    GROUNDS.get(place, || {
        place.limited(SandboxLimits {
            disk: 512 << 20,
            ..TIGHT
        })
    })
}

/// The kernel killed the interpreter and nothing else.
const OUT_OF_MEMORY: Status = Status::Died {
    exit: Exit::OutOfMemory {
        limit: TIGHT.memory,
        files_kept: true,
    },
};

/// The maximum number of processes of a session. In a container some of our own are beside it, for
/// which the limit is raised; the engine reports by how much.
async fn most_processes(place: Place, session: &Session) -> u64 {
    match place {
        Place::Native => u64::from(TIGHT.processes),
        Place::Containers(engine) => {
            let container = engine.container_of(session).await;
            let limit = engine.command(&[
                "inspect",
                "--format",
                "{{.HostConfig.PidsLimit}}",
                &container,
            ]);
            limit.trim().parse().expect("a number")
        }
    }
}

/// Fills something until it is full; prints the error and whether the interpreter still works.
const FILLERS: &str = "
import errno, json, os
def until_full(work):
    try:
        for number in range(100000): work(number)
    except OSError as error:
        return errno.errorcode[error.errno]
    return 'never full'
def bytes_in(folder):
    with open(folder + '/large', 'wb', buffering=0) as file:
        answer = until_full(lambda _: file.write(bytes(1 << 20)) == 1 << 20 or file.write(b'x'))
    size = os.path.getsize(folder + '/large')
    os.unlink(folder + '/large')
    return [answer, size <= 8 << 20]
def names_in(folder):
    os.mkdir(folder + '/many')
    answer = until_full(lambda number: open(f'{folder}/many/{number}', 'w').close())
    count = len(os.listdir(folder + '/many'))
    __import__('shutil').rmtree(folder + '/many')
    return [answer, count <= 200]
def depth_in(folder):
    here = os.getcwd()
    os.chdir(folder)
    def deeper(_):
        os.mkdir('d'); os.chdir('d')
    answer = until_full(deeper)
    os.chdir(here)
    return answer
sizes = lambda: [bytes_in('/work'), bytes_in('/tmp')]
names = lambda: [names_in('/work'), names_in('/tmp'), depth_in('/tmp/home')]
";

/// Three processes that compute as long as they can. Prints the CPU time that they used, and the
/// time that passed.
const COMPUTE: &str = "
import os, time
def used():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
began, before = time.monotonic(), used()
children = []
for _ in range(2):
    children.append(os.fork())
    if children[-1] == 0: break
while time.monotonic() < began + 3: pass
if 0 in children: os._exit(0)
for child in children: os.waitpid(child, 0)
print(used() - before, time.monotonic() - began)";

/// The CPUs that the kernel grants control groups, in either version.
fn cores(groups: &[PathBuf]) -> f64 {
    let read = |name: &str| {
        groups
            .iter()
            .find_map(|group| fs::read_to_string(group.join(name)).ok())
    };
    let written = read("cpu.max")
        .or_else(|| Some(read("cpu.cfs_quota_us")? + &read("cpu.cfs_period_us")?))
        .expect("there is a limit of processor time");
    let (quota, period) = written.trim().split_once([' ', '\n']).expect("two numbers");
    quota.parse::<f64>().expect("a number") / period.parse::<f64>().expect("a number")
}

/// The number of periods in which processes of control groups were throttled.
fn throttled_periods(groups: &[PathBuf]) -> u64 {
    let of_group = |group: &PathBuf| -> Option<u64> {
        let text = fs::read_to_string(group.join("cpu.stat")).ok()?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("nr_throttled "))?;
        line.trim().parse().ok()
    };
    groups
        .iter()
        .find_map(of_group)
        .expect("the kernel counts them")
}

in_every_place! {
    async fn a_session_over_its_memory_ends_and_the_reply_names_the_limit(place) {
        if !has_control_groups() {
            return;
        }
        let (greedy, neighbour) = (tight(place).session(), tight(place).session());
        neighbour.ok("x = 'alive'").await;
        greedy.ok("open('kept', 'w').write('file')").await;
        // Control: an allocation within the limit succeeds.
        greedy.ok("x = bytearray(20 << 20); del x").await;
        let outcome = greedy.execute("print('begun'); x = bytearray(400 << 20)").await.unwrap();
        assert_eq!(outcome.status, OUT_OF_MEMORY);
        assert_eq!(native::printed(&outcome), "begun\n");
        let refused = greedy.execute("1").await.unwrap_err();
        assert!(
            matches!(&refused, Refused::Ended { why, .. } if why.contains("160 MiB")),
            "{refused}"
        );
        assert_eq!(neighbour.ok("print(x)").await, "alive\n");
        greedy.reset().await;
        assert_eq!(greedy.ok("print(open('kept').read())").await, "file\n");
        // The source of new sessions lives, too.
        assert_eq!(tight(place).session().ok("print(1)").await, "1\n");
    }

    async fn processes_of_a_session_share_one_limit_of_memory(place) {
        if !has_control_groups() {
            return;
        }
        let (greedy, neighbour) = (tight(place).session(), tight(place).session());
        neighbour.ok("x = 'alive'").await;
        let groups = place.control_groups(&greedy).await;
        let code = "
import json, os
reader, writer = os.pipe()
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        # A session is chosen by the kernel; let it be a child, so that the interpreter can tell. \
        (In a container landlock closes this, and it may be the interpreter.)
        try: open('/proc/self/oom_score_adj', 'w').write('1000')
        except OSError: pass
        kept = bytearray(40 << 20)
        os.write(writer, b'x')
        os.pause() if hasattr(os, 'pause') else __import__('signal').pause()
    children.append(child)
ended = [os.waitpid(child, 0)[1] for child in children[:1]]
import signal
for child in children[1:]:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print(json.dumps(ended))";
        let limit = Duration::from_secs(5);
        let outcome = greedy.execute_with(code, limit, CancellationToken::new()).await.unwrap();
        let most: Vec<u64> = groups
            .iter()
            .flat_map(|group| {
                ["memory.max_usage_in_bytes", "memory.peak"].map(|name| group.join(name))
            })
            .filter_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok())
            .collect();
        assert!(!most.is_empty() && most.iter().all(|peak| *peak <= TIGHT.memory), "{most:?}");
        let kills: u64 = groups
            .iter()
            .flat_map(|group| ["memory.oom_control", "memory.events"].map(|name| group.join(name)))
            .filter_map(|path| fs::read_to_string(path).ok())
            .filter_map(|text| {
                text.lines()
                    .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok())
            })
            .sum();
        assert!(kills > 0, "8 times 40 MiB do not fit in 160 MiB: {:?}", outcome.status);
        assert_eq!(neighbour.ok("print(x)").await, "alive\n");
    }

    async fn files_in_memory_count_as_memory(place) {
        if !has_control_groups() {
            return;
        }
        for path in ["/tmp/large", "/work/large"] {
            let session = wide(place).session();
            let code = format!(
                "
with open({path:?}, 'wb') as file:
    for _ in range(300):
        file.write(bytes(1 << 20))"
            );
            assert_eq!(session.execute(&code).await.unwrap().status, OUT_OF_MEMORY, "{path}");
        }
        // /dev/shm is at most half of the memory, so it fills up before.
        let code = "
import errno
try:
    with open('/dev/shm/large', 'wb') as file:
        for _ in range(300): file.write(bytes(1 << 20))
except OSError as error:
    print(errno.errorcode[error.errno])";
        assert_eq!(wide(place).session().ok(code).await, "ENOSPC\n");
    }

    async fn a_session_whose_files_fill_its_memory_can_be_reset_and_emptied(place) {
        if !has_control_groups() {
            return;
        }
        let session = wide(place).session();
        let fill = "
with open('/work/large', 'wb') as file:
    for _ in range(300):
        file.write(bytes(1 << 20))";
        assert_eq!(session.execute(fill).await.unwrap().status, OUT_OF_MEMORY);
        session.reset().await;
        let empty = "import os; print(os.path.getsize('/work/large') > 40 << 20); \
                     os.unlink('/work/large')";
        assert_eq!(session.ok(empty).await, "True\n");
        session.ok("x = bytearray(50 << 20)").await;
    }

    async fn a_full_disk_is_an_error_inside_and_the_session_goes_on(place) {
        let session = tight(place).session();
        session.ok("x = 'alive'").await;
        let full = json!(["ENOSPC", true]);
        session.ok(FILLERS).await;
        assert_eq!(session.json("print(json.dumps(sizes()))").await, json!([full, full]));
        // Podman has no option that counts files; there only memory limits them.
        if !place.is_podman() {
            let told = session.json("print(json.dumps(names()))").await;
            assert_eq!(told, json!([full, full, "ENOSPC"]));
        }
        // Control: without the files there is space again, also for an upload.
        assert_eq!(session.ok("print(open('small', 'w').write(x))").await, "5\n");
        session.upload("from outside", &[7; 1000]).await.unwrap();
        // An upload that does not fit is refused and leaves no partial file.
        let refused = session.upload("too large", &vec![7; 9 << 20]).await.unwrap_err();
        assert!(matches!(refused, Refused::File { .. }), "{refused}");
        assert_eq!(
            session.json("import os, json; print(json.dumps(sorted(os.listdir('/work'))))").await,
            json!(["from outside", "small"])
        );
    }

    async fn a_sparse_file_cannot_be_larger_than_the_disk(place) {
        let session = tight(place).session();
        let code = "
import errno, json, os
def grow(size):
    try:
        with open('/work/sparse', 'wb') as file: file.truncate(size)
    except OSError as error:
        return errno.errorcode[error.errno]
    return os.path.getsize('/work/sparse')
print(json.dumps([grow(1 << 50), grow((8 << 20) + 2), grow(8 << 20)]))";
        assert_eq!(session.json(code).await, json!(["EFBIG", "EFBIG", 8 << 20]));
        assert!(session.download("sparse", 1 << 20).await.is_err(), "more than was asked for");
        assert_eq!(session.download("sparse", 8 << 20).await.unwrap().len(), 8 << 20);
    }

    async fn only_regular_files_are_downloaded_and_nothing_blocks(place) {
        let session = tight(place).session();
        session
            .ok("
import os, socket
os.mkfifo('pipe'); os.mkdir('folder'); os.symlink('/etc/passwd', 'link'); os.symlink('/etc', \
'up'); os.symlink('nothing', 'broken')
server = socket.socket(socket.AF_UNIX); server.bind('socket')
open('regular', 'w').write('fine')")
            .await;
        for name in ["pipe", "folder", "link", "up/passwd", "broken", "socket", "absent"] {
            let begun = Instant::now();
            let refused = session.download(name, 1 << 20).await.expect_err(name);
            assert!(matches!(refused, Refused::File { .. }), "{name}: {refused}");
            assert!(begun.elapsed() < Duration::from_secs(2), "{name}");
        }
        // Uploads follow no links either, and get only the mode bits of a plain file.
        assert!(session.upload("up/planted", b"x").await.is_err());
        session.upload("plain", b"x").await.unwrap();
        assert_eq!(session.ok("print(oct(os.stat('plain').st_mode))").await, "0o100644\n");
        // Control.
        assert_eq!(session.download("regular", 100).await.unwrap(), b"fine");
    }

    async fn descriptors_run_out_for_the_session_alone(place) {
        let session = tight(place).session();
        let code = "
import errno, json, os
opened = []
try:
    while True: opened.append(os.open('/dev/null', os.O_RDONLY))
except OSError as error:
    why = errno.errorcode[error.errno]
count = len(opened)
for each in opened: os.close(each)
print(json.dumps([why, 3000 < count < 4096]))";
        assert_eq!(session.json(code).await, json!(["EMFILE", true]));
        assert_eq!(session.ok("print(open('/proc/self/comm').read() != '')").await, "True\n");
    }

    async fn limits_cannot_be_raised(place) {
        let code = "
import json, resource
answers = []
for name in ('RLIMIT_NOFILE', 'RLIMIT_NPROC', 'RLIMIT_FSIZE', 'RLIMIT_CORE'):
    which = getattr(resource, name)
    soft, hard = resource.getrlimit(which)
    try:
        resource.setrlimit(which, (hard + 1, hard + 1))
    except (OSError, ValueError):
        pass  # For core files nothing is done, and that is told as success.
    answers.append('raised' if resource.getrlimit(which) != (soft, hard) else 'as it was')
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
print(json.dumps([answers, resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard - 1]))";
        // The last is a control: a limit can be lowered.
        assert_eq!(tight(place).session().json(code).await, json!([vec!["as it was"; 4], true]));
    }

    async fn a_fork_bomb_stops_at_the_limit_and_leaves_nothing(place) {
        let (bomb, neighbour) = (tight(place).session(), tight(place).session());
        neighbour.ok("x = 'alive'").await;
        let most = most_processes(place, &bomb).await;
        let code = "
import ctypes, errno, json, os, signal
count = 0
named, naming = os.pipe()
try:
    while True:
        child = os.fork()
        if child == 0:
            # Out of the group, out of the session, an orphan: the limits hold all the same.
            os.setsid()
            ctypes.CDLL(None).prctl(15, b'bomb', 0, 0, 0)
            os.write(naming, b'x')
            while True: signal.pause()
        count += 1
except OSError as error:
    for _ in range(count): os.read(named, 1)
    print(json.dumps([errno.errorcode[error.errno], count]))";
        let answer = bomb.json(code).await;
        assert_eq!(answer[0], json!("EAGAIN"));
        let count = answer[1].as_u64().unwrap();
        assert!((most / 3..=most).contains(&count), "{count} of {most}");
        assert_eq!(neighbour.ok("print(x)").await, "alive\n");
        // A reset ends all of them.
        let left = "
import json, os
def name(process):
    try: return open(f'/proc/{process}/comm').read().strip()
    except OSError: return ''
print(sum(name(process) == 'bomb' for process in os.listdir('/proc') if process.isdigit()))";
        assert_eq!(bomb.json(left).await, json!(count)); // control
        bomb.reset().await;
        assert_eq!(bomb.json(left).await, json!(0));
    }

    async fn a_bomb_that_never_rests_is_ended_by_its_time_limit(place) {
        let (bomb, neighbour) = (tight(place).session(), tight(place).session());
        neighbour.ok("x = 'alive'").await;
        let left = place.traces(&bomb).await;
        assert!(left() > 0); // control
        let code = "
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
first = os.getpid()
while True:
    try:
        # Parents end, children go on: nobody stays long enough to be found.
        if os.fork() and os.getpid() != first: os._exit(0)
    except OSError:
        pass";
        let limit = Duration::from_millis(500);
        let begun = Instant::now();
        let outcome = bomb.execute_with(code, limit, CancellationToken::new()).await.unwrap();
        assert!(
            matches!(outcome.status, Status::TimedOut { state: StateAfter::Lost, .. }),
            "{:?}",
            outcome.status
        );
        // Five seconds on an idle machine; a container that cannot end it is ended as a whole.
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        assert_eq!(neighbour.ok("print(x)").await, "alive\n");
        bomb.reset().await;
        assert_eq!(bomb.ok("print(1)").await, "1\n");
        bomb.close().await;
        assert_eq!(left(), 0);
    }

    async fn loops_that_cannot_be_interrupted_end_soon_after_their_limit(place) {
        let loops = [
            // A loop in C that never checks for signals.
            "import collections, itertools; collections.deque(itertools.repeat(0), maxlen=0)",
            "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
            "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: \
             pass",
        ];
        join_all(loops.map(async |code| {
            // Long enough for the code to have blocked signals when it is interrupted.
            let limit = Duration::from_secs(2);
            let outcome = place
                .session()
                .execute_with(code, limit, CancellationToken::new())
                .await
                .unwrap();
            let expected = Status::TimedOut { limit, state: StateAfter::Lost };
            assert_eq!(outcome.status, expected, "{code}");
            // Two seconds on an idle machine, where waiting for a CPU does not count; at most 15 s
            // in any case. Counted from the start of the code: a new session may take longer to
            // start.
            assert!(
                outcome.duration < limit + Duration::from_secs(20),
                "{code}: {:?}",
                outcome.duration
            );
        }))
        .await;
    }

    async fn a_limit_of_cores_is_a_limit_of_processor_time(place) {
        if !has_control_groups() {
            return;
        }
        let fifth = place.limited(SandboxLimits { cpus: 0.2, ..TIGHT });
        let (session, whole) = (fifth.session(), tight(place).session());
        let groups = place.control_groups(&session).await;
        assert_eq!(cores(&groups), 0.2);
        assert_eq!(cores(&place.control_groups(&whole).await), TIGHT.cpus); // control
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let before = throttled_periods(&groups);
            let told = session.ok(COMPUTE).await;
            let figures: Vec<f64> =
                told.split_whitespace().map(|figure| figure.parse().unwrap()).collect();
            let (used, passed) = (figures[0], figures[1]);
            // The kernel grants a fifth of each tenth of a second to all processes together. A busy
            // machine gives them less, never more.
            assert!(used <= 0.2 * (passed + 0.2) * 1.05, "{used} s of {passed} s");
            // Control: they could have used more, and the limit prevented it.
            if throttled_periods(&groups) > before {
                break;
            }
            assert!(
                Instant::now() < deadline,
                "they never reached the limit: {used} s of {passed} s"
            );
        }
    }

    async fn a_session_that_gets_little_processor_time_has_longer_to_stop(place) {
        if !has_control_groups() {
            return;
        }
        // A tenth of a CPU: 0.3 s of it are three seconds, twice the grace period.
        let slow = place.limited(SandboxLimits { cpus: 0.1, ..TIGHT });
        // Long enough for the code to have started.
        let limit = Duration::from_secs(10);
        let session = slow.session();
        session.ok("x = 'kept'").await;
        let code = "
import time
try:
    print('begun', flush=True)
    while True: pass
except KeyboardInterrupt:
    end = time.process_time() + 0.3
    while time.process_time() < end: pass
    raise";
        let outcome = session.execute_with(code, limit, CancellationToken::new()).await.unwrap();
        assert_eq!(native::printed(&outcome), "begun\n");
        assert_eq!(outcome.status, Status::TimedOut { limit, state: StateAfter::Kept });
        assert!(
            outcome.duration > limit + Duration::from_secs(2),
            "it took {:?} to stop",
            outcome.duration
        );
        assert_eq!(session.ok("print(x)").await, "kept\n");
        // Control: code that does not stop is killed there too.
        let stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: \
                        pass";
        let outcome =
            session.execute_with(stubborn, limit, CancellationToken::new()).await.unwrap();
        assert_eq!(outcome.status, Status::TimedOut { limit, state: StateAfter::Lost });
    }

    async fn a_crash_leaves_no_core_and_reaches_no_handler_of_the_host(place) {
        let crash = "
import json, os, resource, tempfile
os.chdir(tempfile.mkdtemp())
soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
child = os.fork()
if child == 0:
    try: resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    except (OSError, ValueError): pass
    os.abort()
status = os.waitpid(child, 0)[1]
print(json.dumps([os.WTERMSIG(status), os.WCOREDUMP(status), len(os.listdir('.')), hard != 0]))";
        let inside = place.session().json(crash).await;
        assert_eq!((&inside[0], &inside[1], &inside[2]), (&json!(6), &json!(false), &json!(0)));
        let outside: Value = serde_json::from_str(&native::outside(crash)).unwrap();
        if outside[3] == json!(true) && outside[1] == json!(true) {
            return;
        }
        skipped("a host that writes cores (the control)");
    }

    async fn a_session_that_dies_by_a_signal_says_which(place) {
        let session = place.session();
        let outcome = session.execute("import os; os.kill(os.getpid(), 11)").await.unwrap();
        assert_eq!(outcome.status, Status::Died { exit: Exit::Signal(11) });
        let outcome = place.session().execute("import os; os.kill(os.getpid(), 9)").await.unwrap();
        assert_eq!(
            outcome.status,
            Status::Died { exit: Exit::Signal(9) },
            "a kill by hand is not taken for a lack of memory"
        );
    }
}
