//! What a fork and an undo do with the things that a session holds, one case for each kind.
//!
//! What cannot be right in a copy is named in the answer, in the words that are checked here.

use cellblock::session::FilesCarried;
use serde_json::{Value, json};

use crate::support::native::{self, Session, run};

/// A session with its fork, and what the fork lacks.
async fn forked(prepare: &str) -> (Session, Session, Vec<String>) {
    let source = native::shared().session();
    source.ok(prepare).await;
    let (mut forks, report) = source.forks(1).await;
    assert_eq!(report.files, FilesCarried::Copied);
    (source, forks.remove(0), report.lost)
}

/// A session that was prepared, changed, and taken back; and what it lacks since.
async fn undone(prepare: &str, change: &str) -> (Session, Vec<String>) {
    let session = native::shared().session();
    session.ok(prepare).await;
    session.ok(change).await;
    let report = session.undo(1).await;
    assert_eq!(report.files, FilesCarried::Restored);
    (session, report.lost)
}

const NOTHING: [&str; 0] = [];

/// Tries something and names the error instead.
const TRY: &str = "
def tried(work):
    try: return work()
    except Exception as error: return type(error).__name__
";

#[test]
fn threads_that_wait_go_on_and_busy_ones_are_told() {
    let prepare = "
import threading
over, done = threading.Event(), []
def work(number):
    over.wait(); done.append(number)
threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(2)]
for thread in threads: thread.start()";
    let alive = "print(sum(thread.is_alive() for thread in threads), threading.active_count())";
    let finish = "over.set()\nfor thread in threads: thread.join()\nprint(sorted(done))";
    run(async {
        let (source, fork, lost) = forked(prepare).await;
        assert_eq!(lost, NOTHING);
        let again = fork.fork().await;
        for session in [&fork, &again, &source] {
            assert_eq!(session.ok(alive).await, "2 3\n");
            assert_eq!(session.ok(finish).await, "[0, 1]\n");
            session.assert_locked_down().await;
        }
        // A fork starts its own.
        fork.ok("thread = threading.Thread(target=lambda: None); thread.start(); thread.join()")
            .await;
        let (session, lost) = undone(prepare, "over.set()").await;
        assert_eq!(lost, NOTHING);
        assert_eq!(session.ok(alive).await, "2 3\n");
        assert_eq!(session.ok(finish).await, "[0, 1]\n");

        let busy = "
import threading
over = False
def spin():
    while not over: pass
threads = [threading.Thread(target=spin, daemon=True)]
threads[0].start()";
        let (source, fork, lost) = forked(busy).await;
        assert_eq!(lost, ["1 thread"]);
        assert_eq!(fork.ok(alive).await, "0 1\n");
        assert_eq!(source.ok(alive).await, "1 2\n");
        source.ok("over = True").await;
    });
}

#[test]
fn code_with_openmp_runs_in_every_copy() {
    let prepare = "
import ctypes, os, subprocess
open('total.c', 'w').write('\\n'.join((
    'int total(int most) {', 'int sum = 0;', '#pragma omp parallel for reduction(+:sum) \
    num_threads(3)',
    'for (int each = 0; each < most; each++) sum += each % 7;', 'return sum; }')))
subprocess.run('cc -O1 -fopenmp -shared -fPIC -o /work/total.so total.c', shell=True, check=True)
total = ctypes.CDLL('/work/total.so').total
first = total(100000)";
    let same = "print(total(100000) == first, len(os.listdir('/proc/self/task')))";
    run(async {
        let (source, fork, lost) = forked(prepare).await;
        assert_eq!(lost, NOTHING);
        let again = fork.fork().await;
        for session in [&fork, &again, &source] {
            assert_eq!(session.ok(same).await, "True 3\n");
        }
        let (session, lost) = undone(prepare, "total(7)").await;
        assert_eq!(lost, NOTHING);
        assert_eq!(session.ok(same).await, "True 3\n");
    });
}

#[test]
fn linear_algebra_works_with_its_threads() {
    let prepare = "import numpy; a = numpy.ones((600, 600)); b = a @ a";
    let multiply = "print(int((a @ a).sum()) == 600 ** 3, int((numpy.linalg.inv(a + numpy.eye(600) \
                    * 600) @ (a + numpy.eye(600) * 600)).sum().round()))";
    run(async {
        let (source, fork, lost) = forked(prepare).await;
        assert_eq!(lost, NOTHING);
        assert_eq!(fork.ok(multiply).await, "True 600\n");
        assert_eq!(source.ok(multiply).await, "True 600\n");
        assert_eq!(fork.fork().await.ok(multiply).await, "True 600\n");
        let (session, lost) = undone(prepare, "a[0] = 7; b = a @ a").await;
        assert_eq!(lost, NOTHING);
        assert_eq!(session.ok(multiply).await, "True 600\n");
    });
}

#[test]
fn open_files_are_open_at_the_same_place_on_the_copys_own_files() {
    let prepare = "
import os, tempfile
open('text', 'w').write('0123456789')
reading = open('text'); reading.read(4)
appending = open('log', 'a'); appending.write('one,'); appending.flush()
deleted = open('deleted', 'w+'); deleted.write('no name'); deleted.flush(); os.unlink('deleted')
temporary = tempfile.TemporaryFile('w+'); temporary.write('temporary'); temporary.flush()
scratch = open('/tmp/scratch', 'w+'); scratch.write('scratch'); scratch.flush()";
    let use_them = "
appending.write('two,'); appending.flush()
scratch.write('!'); scratch.flush()
deleted.write('!'); deleted.flush(); deleted.seek(0); temporary.seek(0)
print(reading.read(2), open('log').read(), deleted.read(), temporary.read(), \
open('/tmp/scratch').read())";
    run(async {
        let (source, fork, lost) = forked(prepare).await;
        assert_eq!(lost, NOTHING);
        let used = "45 one,two, no name! temporary scratch!\n";
        assert_eq!(fork.ok(use_them).await, used);
        // The source's are where they were, and have what they had.
        let look = "print(open('log').read(), open('/tmp/scratch').read(), deleted.tell(), \
                    reading.tell())";
        assert_eq!(source.ok(look).await, "one, scratch 7 4\n");
        assert_eq!(source.ok(use_them).await, used);

        let (session, lost) = undone(
            prepare,
            "reading.read(); appending.write('x'); appending.flush(); deleted.write('x')",
        )
        .await;
        assert_eq!(lost, NOTHING);
        assert_eq!(session.ok(use_them).await, used);
    });
}

#[test]
fn sqlite_in_memory_is_state_like_any_other() {
    let prepare = "
import sqlite3
base = sqlite3.connect(':memory:'); base.execute('create table t (x)'); base.execute('insert into \
t values (1)'); base.commit()";
    let count = "print(base.execute('select count(*) from t').fetchone()[0])";
    run(async {
        let (source, fork, lost) = forked(prepare).await;
        assert_eq!(lost, NOTHING);
        fork.ok("base.execute('insert into t values (2)'); base.commit()")
            .await;
        assert_eq!(
            (fork.ok(count).await, source.ok(count).await),
            ("2\n".to_owned(), "1\n".to_owned())
        );
        let (session, lost) = undone(prepare, "base.execute('delete from t'); base.commit()").await;
        assert_eq!(lost, NOTHING);
        assert_eq!(session.ok(count).await, "1\n");
    });
}

#[test]
fn sqlite_in_a_file_is_undone_and_read_only_in_a_fork_until_it_connects_again() {
    let prepare = "
import sqlite3
base = sqlite3.connect('base.db'); base.execute('create table t (x)'); base.execute('insert into t \
values (1)'); base.commit()";
    let count = "print(base.execute('select count(*) from t').fetchone()[0])";
    let insert = "base.execute('insert into t values (2)'); base.commit()";
    run(async {
        let (source, fork, lost) = forked(prepare).await;
        assert_eq!(lost, ["writing to 1 sqlite connection"]);
        // It fails because sqlite notices that the file is another one, unless both happen to have
        // the same number.
        let told = fork
            .ok(&format!(
                "{TRY}\ndef insert(): {insert}\nprint(tried(insert))"
            ))
            .await;
        assert!(
            ["OperationalError\n", "None\n"].contains(&told.as_str()),
            "{told}"
        );
        fork.ok(&format!(
            "base = sqlite3.connect('base.db'); base.execute('delete from t')\n{insert}\n{insert}"
        ))
        .await;
        assert_eq!(
            (fork.ok(count).await, source.ok(count).await),
            ("2\n".to_owned(), "1\n".to_owned())
        );
        source.ok(insert).await;

        let (session, lost) = undone(prepare, insert).await;
        assert_eq!(lost, NOTHING);
        assert_eq!(session.ok(count).await, "1\n");
        session.ok(insert).await;
        assert_eq!(session.ok(count).await, "2\n");
    });
}

#[test]
fn subprocesses_stay_with_the_source_of_a_fork_and_end_with_an_undo() {
    let prepare = "import subprocess; child = subprocess.Popen(['sleep', '1000'])";
    let alive = "import os; print(child.poll(), os.path.exists(f'/proc/{child.pid}'))";
    run(async {
        let (source, fork, lost) = forked(prepare).await;
        assert_eq!(lost, ["1 subprocess"]);
        assert_eq!(source.ok(alive).await, "None True\n");
        assert_eq!(
            fork.ok("import os; print(os.path.exists(f'/proc/{child.pid}'))")
                .await,
            "False\n"
        );
        assert_eq!(
            fork.ok(
                "print(subprocess.run(['echo', 'own'], capture_output=True, \
                     text=True).stdout.strip())"
            )
            .await,
            "own\n"
        );
        let (session, lost) = undone(prepare, "x = 1").await;
        assert_eq!(lost, ["1 subprocess"]);
        assert_eq!(
            session
                .ok("import os; print(os.path.exists(f'/proc/{child.pid}'))")
                .await,
            "False\n"
        );
    });
}

#[test]
fn generators_go_on_where_they_stood() {
    let prepare = "
def counting():
    for number in range(100): yield number
numbers = counting(); next(numbers); text = iter('abc'); next(text)";
    run(async {
        let (source, fork, lost) = forked(prepare).await;
        assert_eq!(lost, NOTHING);
        for session in [&fork, &source] {
            assert_eq!(
                session
                    .ok("print(next(numbers), next(text), next(numbers))")
                    .await,
                "1 b 2\n"
            );
        }
        let (session, lost) = undone(prepare, "list(numbers)").await;
        assert_eq!(lost, NOTHING);
        assert_eq!(session.ok("print(next(numbers))").await, "1\n");
    });
}

#[test]
fn top_level_await_goes_on_in_a_copy() {
    let prepare = "
import asyncio
async def answer():
    await asyncio.sleep(0.01)
    return 42
first = await answer()
later = asyncio.ensure_future(answer())";
    let wait = "print(await answer(), await later, await asyncio.gather(answer(), answer()))";
    run(async {
        let (source, fork, lost) = forked(prepare).await;
        assert_eq!(lost, NOTHING);
        for session in [&fork, &source] {
            assert_eq!(session.ok(wait).await, "42 42 [42, 42]\n");
        }
        let (session, lost) = undone(prepare, "x = await answer()").await;
        assert_eq!(lost, NOTHING);
        assert_eq!(session.ok(wait).await, "42 42 [42, 42]\n");
        // A loop of the user's own goes on too.
        let (_, fork, lost) = forked("import asyncio; own = asyncio.new_event_loop()").await;
        assert_eq!(lost, NOTHING);
        assert_eq!(
            fork.ok("print(await asyncio.sleep(0, 'works'))").await,
            "works\n"
        );
        assert_eq!(
            fork.ok("print(own.run_until_complete(asyncio.sleep(0.001, 'too')))")
                .await,
            "too\n"
        );
    });
}

#[test]
fn figures_are_as_they_were() {
    let prepare = "
import io, matplotlib.pyplot as pyplot
figure, axes = pyplot.subplots(); axes.plot([1, 2, 3]); axes.set_title('before')
def lines(): return len(axes.lines), axes.get_title(), len(figure_bytes()) > 1000
def figure_bytes():
    buffer = io.BytesIO(); figure.savefig(buffer, format='png'); return buffer.getvalue()
pyplot.close('all')";
    run(async {
        let (source, fork, lost) = forked(prepare).await;
        assert_eq!(lost, NOTHING);
        fork.ok("axes.plot([3, 2, 1]); axes.set_title('fork')")
            .await;
        assert_eq!(fork.ok("print(lines())").await, "(2, 'fork', True)\n");
        assert_eq!(source.ok("print(lines())").await, "(1, 'before', True)\n");
        let (session, lost) = undone(prepare, "axes.clear()").await;
        assert_eq!(lost, NOTHING);
        assert_eq!(session.ok("print(lines())").await, "(1, 'before', True)\n");
    });
}

#[test]
fn pipes_with_both_ends_inside_are_made_anew() {
    let prepare = "import os; reader, writer = os.pipe(); os.write(writer, b'in it')";
    let use_it = "os.write(writer, b' and more'); print(os.read(reader, 99))";
    run(async {
        let (source, fork, lost) = forked(prepare).await;
        assert_eq!(lost, NOTHING);
        for session in [&fork, &source] {
            assert_eq!(session.ok(use_it).await, "b'in it and more'\n");
        }
        let (session, lost) = undone(prepare, "os.read(reader, 99)").await;
        assert_eq!(lost, NOTHING);
        assert_eq!(session.ok(use_it).await, "b'in it and more'\n");
    });
}

#[test]
fn sockets_and_pipes_are_told_and_dead() {
    let prepare = "
import os, socket
server = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(server.getsockname())
accepted, _ = server.accept()
reader, gone = os.pipe(); os.close(gone)
gone, writer = os.pipe(); os.close(gone)";
    let use_them = format!(
        "{TRY}
import json
print(json.dumps([tried(lambda: client.send(b'x')), tried(lambda: accepted.recv(1).decode()), \
tried(lambda: server.getsockname()[0]),
    tried(lambda: os.write(writer, b'x')), tried(lambda: os.read(reader, 1).decode())]))"
    );
    let lacks = ["1 listening socket", "2 connections", "2 pipes"];
    run(async {
        let (source, fork, lost) = forked(prepare).await;
        assert_eq!(lost, lacks);
        assert_eq!(fork.json(&use_them).await, json!(vec!["OSError"; 5]));
        assert_eq!(
            source.json(&use_them).await,
            json!([1, "x", "127.0.0.1", "BrokenPipeError", ""])
        ); // control
        // The fork's own network is free: the same port can be listened on, and what it opens gets
        // no old number.
        let port = "print(server.getsockname()[1])";
        let port = source.ok(port).await;
        let again = format!(
            "other = socket.create_server(('127.0.0.1', {})); print(other.fileno() not in \
             [client.fileno(), accepted.fileno(), server.fileno()])",
            port.trim()
        );
        assert_eq!(fork.ok(&again).await, "True\n");
        let (session, lost) = undone(prepare, "client.send(b'x')").await;
        assert_eq!(lost, lacks);
        assert_eq!(session.json(&use_them).await, json!(vec!["OSError"; 5]));
    });
}

#[test]
fn shared_memory_is_no_longer_shared() {
    let prepare = "
import mmap, os
from multiprocessing import shared_memory
anonymous = mmap.mmap(-1, 4096); anonymous[:6] = b'before'
named = shared_memory.SharedMemory(create=True, size=4096); named.buf[:6] = b'before'
open('mapped', 'wb').write(b'before' + bytes(4090)); file = open('mapped', 'r+b'); mapped = \
mmap.mmap(file.fileno(), 4096)";
    let write =
        |what: &str| format!("for area in (anonymous, named.buf, mapped): area[:6] = b'{what:6}'");
    let read =
        "print(*[bytes(area[:6]).decode().strip() for area in (anonymous, named.buf, mapped)])";
    run(async {
        let (source, fork, lost) = forked(prepare).await;
        assert_eq!(lost, NOTHING);
        assert_eq!(fork.ok(read).await, "before before before\n");
        fork.ok(&write("fork")).await;
        assert_eq!(source.ok(read).await, "before before before\n");
        source.ok(&write("source")).await;
        assert_eq!(fork.ok(read).await, "fork fork fork\n");
        assert_eq!(source.ok(read).await, "source source source\n");
        let (session, lost) = undone(prepare, &write("after")).await;
        assert_eq!(lost, NOTHING);
        assert_eq!(session.ok(read).await, "before before before\n");
        session.ok("named.close(); named.unlink()").await;
        for session in [source, fork] {
            session.ok("named.close(); named.unlink()").await;
        }
    });
}

#[test]
fn randomness_names_and_numbers_differ_between_copies() {
    let draw = "
import json, os, random, secrets, ssl, tempfile, uuid, numpy
print(json.dumps([random.random(), secrets.token_hex(8), str(uuid.uuid4()), \
ssl.RAND_bytes(8).hex(), float(numpy.random.random()),
    float(numpy.random.default_rng().random()), os.path.basename(tempfile.mktemp()), \
    os.urandom(8).hex(), os.getpid()]))";
    run(async {
        // Every source has been used before, so that it has a state that a copy could share.
        let source = native::shared().session();
        source.ok(draw).await;
        let (forks, report) = source.forks(3).await;
        assert_eq!(report.lost, NOTHING);
        let mut drawn: Vec<Value> = vec![source.json(draw).await];
        for fork in &forks {
            drawn.push(fork.json(draw).await);
        }
        // An undo draws anew too: only the number of the process may come again.
        source.undo(1).await;
        drawn.push(source.json(draw).await);
        for kind in 0..9 {
            let mut values: Vec<String> = drawn.iter().map(|each| each[kind].to_string()).collect();
            let count = values.len();
            values.sort();
            values.dedup();
            assert_eq!(values.len(), count, "{kind}: {drawn:?}");
        }
        // Control: what the user seeded is state like any other.
        source.ok("own = random.Random(7)").await;
        let (forks, _) = source.forks(2).await;
        let draw = "print(own.random())";
        assert_eq!(forks[0].ok(draw).await, forks[1].ok(draw).await);
    });
}

#[test]
fn surroundings_stay() {
    let prepare = "
import os, signal
os.makedirs('folder'); os.chdir('folder'); os.umask(0o077); os.environ['WORD'] = 'kept'
caught = []
_ = signal.signal(signal.SIGUSR1, lambda *_: caught.append(1))";
    let look = "os.kill(os.getpid(), signal.SIGUSR1); mask = os.umask(0); os.umask(mask); \
                print(os.getcwd(), oct(mask), os.environ['WORD'], caught)";
    run(async {
        let (source, fork, lost) = forked(prepare).await;
        assert_eq!(lost, NOTHING);
        for session in [&source, &fork] {
            assert_eq!(session.ok(look).await, "/work/folder 0o77 kept [1]\n");
        }
        let (session, lost) = undone(
            prepare,
            "os.chdir('/'); os.umask(0); del os.environ['WORD']",
        )
        .await;
        assert_eq!(lost, NOTHING);
        assert_eq!(session.ok(look).await, "/work/folder 0o77 kept [1]\n");
        let (_, lost) = undone(
            "import os, tempfile; gone = tempfile.mkdtemp(); os.chdir(gone)",
            "os.chdir('/work'); os.rmdir(gone)",
        )
        .await;
        assert_eq!(lost, ["the current folder, which is /work now"]);
    });
}
