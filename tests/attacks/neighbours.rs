//! Two sessions share nothing: no randomness, no identity, no object by any name.

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::support::native::{self, Session, run};
use crate::support::{data_folder, is_root, skipped};

/// Makes sessions at the same time and runs the same code in each.
async fn in_many(count: usize, code: &'static str) -> (Vec<Session>, Vec<Value>) {
    let sessions: Vec<Session> = (0..count).map(|_| native::shared().session()).collect();
    let mut running = JoinSet::new();
    for session in sessions.clone() {
        running.spawn(async move { session.json(code).await });
    }
    let answers = running.join_all().await;
    (sessions, answers)
}

#[test]
fn fifty_sessions_draw_fifty_different_values_from_every_source_of_randomness() {
    let draw = "
import json, os, random, secrets, ssl, tempfile, uuid
import numpy
from multiprocessing import current_process
print(json.dumps({
    'random': random.random(),
    'secrets': secrets.token_hex(16),
    'uuid4': uuid.uuid4().hex,
    'uuid1': uuid.uuid1().hex,
    'ssl': ssl.RAND_bytes(16).hex(),
    'numpy': numpy.random.random(),
    'numpy default_rng': numpy.random.default_rng().random(),
    'tempfile': tempfile.mktemp(),
    'authkey': bytes(current_process().authkey).hex(),
    'urandom': os.urandom(16).hex(),
}))";
    run(async {
        let (_sessions, drawn) = in_many(50, draw).await;
        for source in drawn[0].as_object().unwrap().keys() {
            let values: BTreeSet<String> = drawn.iter().map(|values| values[source].to_string()).collect();
            assert_eq!(values.len(), 50, "{source} repeats itself");
        }
        // Control: the sessions come from one interpreter, whose seed for the hashes of text they share.
        let (_sessions, hashes) = in_many(2, "print(hash('cellblock'))").await;
        assert_eq!(hashes[0], hashes[1]);
    });
}

#[test]
fn a_reset_draws_anew() {
    run(async {
        let session = native::shared().session();
        let draw = "import json, random, ssl, numpy; print(json.dumps([random.random(), ssl.RAND_bytes(8).hex(), numpy.random.random()]))";
        let first = session.json(draw).await;
        session.reset().await;
        let second = session.json(draw).await;
        for source in 0..3 {
            assert_ne!(first[source], second[source]);
        }
    });
}

#[test]
fn twenty_sessions_are_twenty_users_of_the_host_and_none_is_root() {
    run(async {
        let (sessions, _) = in_many(20, "print(1)").await;
        let mut users = BTreeSet::new();
        for session in &sessions {
            let pid = session.host_pid().await;
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let ids: BTreeSet<&str> = status
                .lines()
                .filter(|line| line.starts_with("Uid:") || line.starts_with("Gid:"))
                .flat_map(|line| line.split_whitespace().skip(1))
                .collect();
            assert!(!ids.contains("0"), "{ids:?}");
            users.extend(ids.into_iter().map(str::to_owned));
        }
        if is_root() {
            assert_eq!(users.len(), 20);
        } else {
            skipped("root (a user of its own for each session)");
        }
    });
}

/// Leaves something in every place that has names.
const LEAVE: &str = "
import ctypes, json, os, socket, fcntl, multiprocessing
libc = ctypes.CDLL(None, use_errno=True)
for folder in ('/work', '/tmp', '/dev/shm', '/var/tmp', '/tmp/home'):
    open(f'{folder}/left', 'w').write('here')
listening = socket.socket(socket.AF_UNIX); listening.bind('\\0left'); listening.listen()
port = socket.create_server(('127.0.0.1', 47111))
memory = libc.shmget(0x51, 4096, 0o1600)
semaphores = libc.semget(0x52, 1, 0o1600)
print(json.dumps([memory >= 0, semaphores >= 0]))";

/// Looks for all of it, from a process of its own.
const LOOK: &str = "
import json, subprocess, sys
program = '''
import ctypes, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
found = [folder for folder in ('/work', '/tmp', '/dev/shm', '/var/tmp', '/tmp/home') if os.path.exists(folder + '/left')]
for name, family, address in (('abstract', socket.AF_UNIX, chr(0) + 'left'), ('port', socket.AF_INET, ('127.0.0.1', 47111))):
    try:
        socket.socket(family).connect(address)
        found.append(name)
    except OSError:
        pass
if libc.shmget(0x51, 0, 0) >= 0: found.append('shared memory')
if libc.semget(0x52, 0, 0) >= 0: found.append('semaphores')
print(json.dumps(found))
'''
print(subprocess.run([sys.executable, '-I', '-c', program], capture_output=True, text=True, check=True).stdout)";

#[test]
fn two_sessions_meet_in_no_file_socket_memory_or_semaphore() {
    run(async {
        let (one, other) = (native::shared().session(), native::shared().session());
        assert_eq!(one.json(LEAVE).await, json!([true, true]));
        assert_eq!(other.json(LOOK).await, json!([]));
        // Control: the session itself finds everything.
        let everything =
            ["/work", "/tmp", "/dev/shm", "/var/tmp", "/tmp/home", "abstract", "port", "shared memory", "semaphores"];
        assert_eq!(one.json(LOOK).await, json!(everything));
    });
}

#[test]
fn a_session_cannot_signal_or_see_another() {
    run(async {
        let (one, other) = (native::shared().session(), native::shared().session());
        let pid = one.host_pid().await;
        let code = format!(
            "
import json, os
def attempt(pid):
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno
    return 0
print(json.dumps([attempt({pid}), attempt(os.getpid()), sorted(int(name) for name in os.listdir('/proc') if name.isdigit())]))"
        );
        let answer = other.json(&code).await;
        assert_eq!((&answer[0], &answer[1]), (&json!(3), &json!(0)));
        assert_eq!(answer[2].as_array().unwrap().len(), 2, "init and the interpreter: {answer}");
        // Everyone it may reach is itself.
        let sweep = "
import os, signal
signal.signal(signal.SIGTERM, lambda *_: None)
try: os.kill(-1, signal.SIGTERM)
except OSError: pass
print('alive')";
        assert_eq!(other.ok(sweep).await, "alive\n");
        assert_eq!(one.ok("print('alive')").await, "alive\n");
    });
}

#[test]
fn no_lock_that_the_host_relies_on_is_within_reach() {
    run(async {
        // Read-only files are the same for all sessions, and a lock on one can be seen by another. So none of the host's may be among them.
        let code = "
import json, os
print(json.dumps([os.path.join(folder, name) for folder, _, names in os.walk('/opt') for name in names if name == 'in-use.lock']))";
        assert_eq!(native::shared().session().json(code).await, json!([]));
        // Control: the environment has one, beside what is shown.
        let environments = fs::read_dir(data_folder().join("environments")).unwrap().flatten();
        assert!(environments.into_iter().any(|entry| entry.path().join("in-use.lock").exists()));
    });
}

#[test]
fn a_signal_to_ones_own_process_group_reaches_only_ones_own() {
    run(async {
        let (liar, neighbour) = (native::shared().session(), native::shared().session());
        neighbour.ok("x = 1").await;
        // Control: a child in the group is reached, so the group exists and can be signalled.
        let reached = "
import os, signal, subprocess
signal.signal(signal.SIGTERM, lambda *_: None)
child = subprocess.Popen(['sleep', '100'])
os.kill(0, signal.SIGTERM)
print(child.wait())";
        assert_eq!(liar.ok(reached).await, "-15\n");
        // The same with a signal that cannot be ignored ends the session itself, and nobody else.
        let ended = liar.execute("os.kill(0, signal.SIGKILL)").await.unwrap();
        assert!(matches!(ended.status, cellblock::session::Status::Died { .. }), "{:?}", ended.status);
        assert_eq!(neighbour.ok("print(x)").await, "1\n");
        assert_eq!(native::shared().session().ok("print(2)").await, "2\n");
    });
}
