//! A session that takes all it can get takes only its own share.

use std::fs;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use cellblock::sandbox::{Exit, SandboxLimits};
use cellblock::session::{Refused, StateAfter, Status};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::support::native::{self, Builder, Native, run};
use crate::support::{has_control_groups, skipped};

const TIGHT: SandboxLimits =
    SandboxLimits { memory: 96 << 20, family_memory: 192 << 20, cpus: 1.0, processes: 24, disk: 8 << 20, files: 200 };

/// A backend with small limits.
fn tight() -> &'static Native {
    static BACKEND: OnceLock<Native> = OnceLock::new();
    BACKEND.get_or_init(|| Builder::new("minimal").limits(TIGHT).start())
}

const OUT_OF_MEMORY: Status = Status::Died { exit: Exit::OutOfMemory { limit: TIGHT.memory, files_kept: true } };

#[test]
fn a_session_over_its_memory_ends_and_the_reply_names_the_limit() {
    if !has_control_groups() {
        return;
    }
    run(async {
        let (greedy, neighbour) = (tight().session(), tight().session());
        neighbour.ok("x = 'alive'").await;
        greedy.ok("open('kept', 'w').write('file')").await;
        // Control: what fits is given.
        greedy.ok("x = bytearray(20 << 20); del x").await;
        let outcome = greedy.execute("print('begun'); x = bytearray(400 << 20)").await.unwrap();
        assert_eq!(outcome.status, OUT_OF_MEMORY);
        assert_eq!(native::printed(&outcome), "begun\n");
        let refused = greedy.execute("1").await.unwrap_err();
        assert!(matches!(&refused, Refused::Ended { why, .. } if why.contains("96 MiB")), "{refused}");
        assert_eq!(neighbour.ok("print(x)").await, "alive\n");
        greedy.reset().await;
        assert_eq!(greedy.ok("print(open('kept').read())").await, "file\n");
        // The warm interpreter lives: a new session starts at once.
        assert_eq!(tight().session().ok("print(1)").await, "1\n");
    });
}

#[test]
fn processes_of_a_session_share_one_limit_of_memory() {
    if !has_control_groups() {
        return;
    }
    run(async {
        let (greedy, neighbour) = (tight().session(), tight().session());
        neighbour.ok("x = 'alive'").await;
        let groups = native::control_groups(greedy.host_pid().await);
        let code = "
import json, os
reader, writer = os.pipe()
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        # A session is chosen by the kernel; let it be a child, so that the interpreter can tell.
        open('/proc/self/oom_score_adj', 'w').write('1000')
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
        let outcome = greedy.execute_with(code, Duration::from_secs(5), CancellationToken::new()).await.unwrap();
        let most: Vec<u64> = groups
            .iter()
            .flat_map(|group| ["memory.max_usage_in_bytes", "memory.peak"].map(|name| group.join(name)))
            .filter_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok())
            .collect();
        assert!(most.iter().all(|peak| *peak <= TIGHT.memory), "{most:?}");
        let kills: u64 = groups
            .iter()
            .flat_map(|group| ["memory.oom_control", "memory.events"].map(|name| group.join(name)))
            .filter_map(|path| fs::read_to_string(path).ok())
            .filter_map(|text| text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok()))
            .sum();
        assert!(kills > 0, "8 times 40 MiB do not fit in 96 MiB: {:?}", outcome.status);
        assert_eq!(neighbour.ok("print(x)").await, "alive\n");
    });
}

#[test]
fn files_in_memory_count_as_memory() {
    if !has_control_groups() {
        return;
    }
    run(async {
        // Here the folders alone are larger than the memory.
        let backend = Builder::new("minimal").limits(SandboxLimits { disk: 512 << 20, ..TIGHT }).start();
        for path in ["/tmp/large", "/work/large"] {
            let session = backend.session();
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
        assert_eq!(backend.session().ok(code).await, "ENOSPC\n");
        backend.end().await;
    });
}

#[test]
fn a_session_whose_files_fill_its_memory_can_be_reset_and_emptied() {
    if !has_control_groups() {
        return;
    }
    run(async {
        let backend = Builder::new("minimal").limits(SandboxLimits { disk: 512 << 20, ..TIGHT }).start();
        let session = backend.session();
        let fill = "
with open('/work/large', 'wb') as file:
    for _ in range(300):
        file.write(bytes(1 << 20))";
        assert_eq!(session.execute(fill).await.unwrap().status, OUT_OF_MEMORY);
        session.reset().await;
        let empty = "import os; print(os.path.getsize('/work/large') > 40 << 20); os.unlink('/work/large')";
        assert_eq!(session.ok(empty).await, "True\n");
        session.ok("x = bytearray(50 << 20)").await;
        backend.end().await;
    });
}

/// Fills something until it is full; tells the error and whether the interpreter is still well.
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
print(json.dumps([bytes_in('/work'), bytes_in('/tmp'), names_in('/work'), names_in('/tmp'), depth_in('/tmp/home')]))";

#[test]
fn a_full_disk_is_an_error_inside_and_the_session_goes_on() {
    run(async {
        let session = tight().session();
        session.ok("x = 'alive'").await;
        let full = json!(["ENOSPC", true]);
        assert_eq!(session.json(FILLERS).await, json!([full, full, full, full, "ENOSPC"]));
        // Control: with the files gone there is room again, also for an upload.
        assert_eq!(session.ok("print(open('small', 'w').write(x))").await, "5\n");
        session.upload("from outside", &[7; 1000]).await.unwrap();
        // An upload that does not fit is refused and leaves no half.
        let refused = session.upload("too large", &vec![7; 9 << 20]).await.unwrap_err();
        assert!(matches!(refused, Refused::File { .. }), "{refused}");
        assert_eq!(
            session.json("import os, json; print(json.dumps(sorted(os.listdir('/work'))))").await,
            json!(["from outside", "small"])
        );
    });
}

#[test]
fn a_sparse_file_cannot_be_larger_than_the_disk() {
    run(async {
        let session = tight().session();
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
    });
}

#[test]
fn only_regular_files_are_downloaded_and_nothing_blocks() {
    run(async {
        let session = tight().session();
        session
            .ok("
import os, socket
os.mkfifo('pipe'); os.mkdir('folder'); os.symlink('/etc/passwd', 'link'); os.symlink('/etc', 'up'); os.symlink('nothing', 'broken')
server = socket.socket(socket.AF_UNIX); server.bind('socket')
open('regular', 'w').write('fine')")
            .await;
        for name in ["pipe", "folder", "link", "up/passwd", "broken", "socket", "absent"] {
            let begun = Instant::now();
            let refused = session.download(name, 1 << 20).await.expect_err(name);
            assert!(matches!(refused, Refused::File { .. }), "{name}: {refused}");
            assert!(begun.elapsed() < Duration::from_secs(2), "{name}");
        }
        // Uploads follow no link either, and get no bits but those of a plain file.
        assert!(session.upload("up/planted", b"x").await.is_err());
        session.upload("plain", b"x").await.unwrap();
        assert_eq!(session.ok("print(oct(os.stat('plain').st_mode))").await, "0o100644\n");
        // Control.
        assert_eq!(session.download("regular", 100).await.unwrap(), b"fine");
    });
}

#[test]
fn descriptors_run_out_for_the_session_alone() {
    run(async {
        let session = tight().session();
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
    });
}

#[test]
fn limits_cannot_be_raised() {
    run(async {
        let code = "
import json, resource
answers = []
for name in ('RLIMIT_NOFILE', 'RLIMIT_NPROC', 'RLIMIT_FSIZE', 'RLIMIT_CORE'):
    which = getattr(resource, name)
    soft, hard = resource.getrlimit(which)
    try:
        resource.setrlimit(which, (hard + 1, hard + 1))
        answers.append('raised')
    except (OSError, ValueError):
        answers.append('refused')
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
print(json.dumps([answers, resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard - 1]))";
        // The last is a control: a limit can be lowered.
        assert_eq!(tight().session().json(code).await, json!([vec!["refused"; 4], true]));
    });
}

#[test]
fn a_fork_bomb_stops_at_the_limit_and_leaves_nothing() {
    run(async {
        let (bomb, neighbour) = (tight().session(), tight().session());
        neighbour.ok("x = 'alive'").await;
        let code = "
import errno, json, os, signal
count = 0
try:
    while True:
        child = os.fork()
        if child == 0:
            # Out of the group, out of the session, an orphan: the limits hold all the same.
            os.setsid()
            while True: signal.pause()
        count += 1
except OSError as error:
    print(json.dumps([errno.errorcode[error.errno], count]))";
        let answer = bomb.json(code).await;
        assert_eq!(answer[0], json!("EAGAIN"));
        let count = answer[1].as_u64().unwrap();
        assert!((8..=24).contains(&count), "{count}");
        assert_eq!(neighbour.ok("print(x)").await, "alive\n");
        assert_eq!(tight().session().ok("print(1)").await, "1\n");
        // A reset ends all of them.
        bomb.reset().await;
        let left = bomb
            .json("import json, os; print(json.dumps([name for name in os.listdir('/proc') if name.isdigit()]))")
            .await;
        assert_eq!(left.as_array().unwrap().len(), 2, "{left}");
    });
}

#[test]
fn a_bomb_that_never_rests_is_ended_by_its_time_limit() {
    run(async {
        let (bomb, neighbour) = (tight().session(), tight().session());
        neighbour.ok("x = 'alive'").await;
        let traces = native::traces_of(bomb.host_pid().await);
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
        assert!(matches!(outcome.status, Status::TimedOut { state: StateAfter::Lost, .. }), "{:?}", outcome.status);
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert_eq!(neighbour.ok("print(x)").await, "alive\n");
        bomb.reset().await;
        assert_eq!(bomb.ok("print(1)").await, "1\n");
        bomb.close().await;
        assert!(traces.iter().all(|trace| !trace.exists()), "{traces:?}");
    });
}

#[test]
fn loops_that_cannot_be_interrupted_end_soon_after_their_limit() {
    run(async {
        for code in [
            // A loop in C that never looks for signals.
            "import collections, itertools; collections.deque(itertools.repeat(0), maxlen=0)",
            "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
            "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        ] {
            let session = native::shared().session();
            // Long enough for the code to have refused signals when it is interrupted.
            let limit = Duration::from_secs(2);
            let outcome = session.execute_with(code, limit, CancellationToken::new()).await.unwrap();
            assert_eq!(outcome.status, Status::TimedOut { limit, state: StateAfter::Lost }, "{code}");
            // Two seconds on a machine that is not busy with other things. Counted from the start of the code: a new session may take its time.
            assert!(outcome.duration < limit + Duration::from_secs(10), "{code}: {:?}", outcome.duration);
        }
    });
}

#[test]
fn a_crash_leaves_no_core_and_reaches_no_handler_of_the_host() {
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
    run(async {
        let inside = native::shared().session().json(crash).await;
        assert_eq!((&inside[0], &inside[1], &inside[2]), (&json!(6), &json!(false), &json!(0)));
        let outside: Value = serde_json::from_str(&native::outside(crash)).unwrap();
        if outside[3] == json!(true) && outside[1] == json!(true) {
            return;
        }
        skipped("a host that writes cores (the control)");
    });
}

#[test]
fn a_session_that_dies_by_a_signal_says_which() {
    run(async {
        let session = native::shared().session();
        let outcome = session.execute("import os; os.kill(os.getpid(), 11)").await.unwrap();
        assert_eq!(outcome.status, Status::Died { exit: Exit::Signal(11) });
        let outcome = native::shared().session().execute("import os; os.kill(os.getpid(), 9)").await.unwrap();
        assert_eq!(
            outcome.status,
            Status::Died { exit: Exit::Signal(9) },
            "a kill by hand is not taken for a lack of memory"
        );
    });
}
