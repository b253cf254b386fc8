//! Two sessions share nothing: no randomness, no identity, no named object.

use std::collections::BTreeSet;
use std::fs;

use cellblock::session::Status;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::support::native::{self, Session, run};
use crate::support::places::{Place, in_every_place};
use crate::support::{data_folder, is_root, skipped};

/// Creates sessions concurrently and runs the same code in each.
async fn in_many(place: Place, count: usize, code: String) -> (Vec<Session>, Vec<Value>) {
    let sessions: Vec<Session> = (0..count).map(|_| place.session()).collect();
    let mut running = JoinSet::new();
    for session in sessions.clone() {
        let code = code.clone();
        running.spawn(async move { session.json(&code).await });
    }
    let answers = running.join_all().await;
    (sessions, answers)
}

/// Number of sessions that is enough. Natively all are copies of one interpreter; containers share
/// none, and each costs a second.
fn crowd(place: Place, natively: usize) -> usize {
    if place.is_native() { natively } else { 3 }
}

/// Draws from every source of randomness that a session has.
fn draw(place: Place) -> String {
    // The image of the containers has no numpy.
    let more = if place.is_native() {
        "
import numpy
drawn['numpy'] = numpy.random.random()
drawn['numpy default_rng'] = numpy.random.default_rng().random()"
    } else {
        ""
    };
    format!(
        "
import json, os, random, secrets, ssl, tempfile, uuid
from multiprocessing import current_process
drawn = {{
    'random': random.random(),
    'secrets': secrets.token_hex(16),
    'uuid4': uuid.uuid4().hex,
    'uuid1': uuid.uuid1().hex,
    'ssl': ssl.RAND_bytes(16).hex(),
    'tempfile': tempfile.mktemp(),
    'authkey': bytes(current_process().authkey).hex(),
    'urandom': os.urandom(16).hex(),
}}{more}
print(json.dumps(drawn))"
    )
}

/// Prints a number that all copies of one interpreter share.
const SEED: &str = "print(hash('cellblock'))";

#[track_caller]
fn assert_all_differ(drawn: &[Value]) {
    for source in drawn[0].as_object().unwrap().keys() {
        let values: BTreeSet<String> = drawn
            .iter()
            .map(|values| values[source].to_string())
            .collect();
        assert_eq!(values.len(), drawn.len(), "{source} repeats itself");
    }
}

/// Folders in which a session may leave files. `/var/tmp` of a container is part of the image and
/// cannot be written to.
fn folders(place: Place) -> Vec<&'static str> {
    let everywhere = ["/work", "/tmp", "/dev/shm", "/tmp/home"];
    let native = place.is_native().then_some("/var/tmp");
    everywhere.into_iter().chain(native).collect()
}

/// Creates an object in every namespace of names.
const LEAVE: &str = "
import ctypes, json, os, socket, fcntl, multiprocessing
libc = ctypes.CDLL(None, use_errno=True)
for folder in FOLDERS:
    open(f'{folder}/left', 'w').write('here')
listening = socket.socket(socket.AF_UNIX); listening.bind('\\0left'); listening.listen()
port = socket.create_server(('127.0.0.1', 47111))
memory = libc.shmget(0x51, 4096, 0o1600)
semaphores = libc.semget(0x52, 1, 0o1600)
print(json.dumps([memory >= 0, semaphores >= 0]))";

/// Looks for all of them, from a separate process.
const LOOK: &str = "
import json, subprocess, sys
program = '''
import ctypes, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
found = [folder for folder in sys.argv[1:] if os.path.exists(folder + '/left')]
for name, family, address in (('abstract', socket.AF_UNIX, chr(0) + 'left'), ('port', \
socket.AF_INET, ('127.0.0.1', 47111))):
    try:
        socket.socket(family).connect(address)
        found.append(name)
    except OSError:
        pass
if libc.shmget(0x51, 0, 0) >= 0: found.append('shared memory')
if libc.semget(0x52, 0, 0) >= 0: found.append('semaphores')
print(json.dumps(found))
'''
print(subprocess.run([sys.executable, '-I', '-c', program, *FOLDERS], capture_output=True, \
text=True, check=True).stdout)";

in_every_place! {
    async fn many_sessions_draw_different_values_from_every_source_of_randomness(place) {
        let (sessions, drawn) = in_many(place, crowd(place, 50), draw(place)).await;
        assert_all_differ(&drawn);
        if place.is_native() {
            // Control: the sessions come from one interpreter, whose seed for the hashes of text
            // they share. (Two containers are two interpreters.)
            assert_eq!(sessions[0].json(SEED).await, sessions[1].json(SEED).await);
        }
    }

    async fn a_reset_draws_anew(place) {
        let session = place.session();
        let (first, seed) = (session.json(&draw(place)).await, session.json(SEED).await);
        session.reset().await;
        assert_all_differ(&[first, session.json(&draw(place)).await]);
        // Control: both are copies of one interpreter.
        assert_eq!(session.json(SEED).await, seed);
    }

    async fn each_session_is_another_user_of_the_host_and_none_is_root(place) {
        let (sessions, _) = in_many(place, crowd(place, 20), "print(1)".to_owned()).await;
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
            assert_eq!(users.len(), sessions.len());
        } else {
            skipped("root (a user of its own for each session)");
        }
    }

    async fn two_sessions_meet_in_no_file_socket_memory_or_semaphore(place) {
        let (one, other) = (place.session(), place.session());
        let folders = folders(place);
        let within = |code: &str| format!("FOLDERS = {folders:?}\n{code}");
        assert_eq!(one.json(&within(LEAVE)).await, json!([true, true]));
        assert_eq!(other.json(&within(LOOK)).await, json!([]));
        // Control: the session itself finds everything.
        let others = ["abstract", "port", "shared memory", "semaphores"];
        let everything: Vec<&str> = folders.iter().copied().chain(others).collect();
        assert_eq!(one.json(&within(LOOK)).await, json!(everything));
    }

    async fn a_session_cannot_signal_or_see_another(place) {
        let (one, other) = (place.session(), place.session());
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
print(json.dumps([attempt({pid}), attempt(os.getpid()), sorted(int(name) for name in \
os.listdir('/proc') if name.isdigit())]))"
        );
        let answer = other.json(&code).await;
        assert_eq!((&answer[0], &answer[1]), (&json!(3), &json!(0)));
        let seen = answer[2].as_array().unwrap();
        assert!(!seen.contains(&json!(pid)), "{answer}");
        // Natively init and the interpreter. In a container also its supervisor, the warm process,
        // its steward, a checkpoint or two.
        assert!(
            if place.is_native() { seen.len() == 2 } else { (4..10).contains(&seen.len()) },
            "{answer}"
        );
        // Every process that it can reach is itself.
        let sweep = "
import os, signal
signal.signal(signal.SIGTERM, lambda *_: None)
try: os.kill(-1, signal.SIGTERM)
except OSError: pass
print('alive')";
        assert_eq!(other.ok(sweep).await, "alive\n");
        assert_eq!(one.ok("print('alive')").await, "alive\n");
    }

    async fn a_signal_to_ones_own_process_group_reaches_only_ones_own(place) {
        let (liar, neighbour) = (place.session(), place.session());
        neighbour.ok("x = 1").await;
        // Control: a child in the group is reached, so the group exists and can be signalled.
        let reached = "
import os, signal, subprocess
signal.signal(signal.SIGTERM, lambda *_: None)
child = subprocess.Popen(['sleep', '100'])
os.kill(0, signal.SIGTERM)
print(child.wait())";
        assert_eq!(liar.ok(reached).await, "-15\n");
        // The same with a signal that cannot be ignored ends the session itself, and no other.
        let ended = liar.execute("os.kill(0, signal.SIGKILL)").await.unwrap();
        assert!(matches!(ended.status, Status::Died { .. }), "{:?}", ended.status);
        assert_eq!(neighbour.ok("print(x)").await, "1\n");
        liar.reset().await;
        assert_eq!(liar.ok("print(2)").await, "2\n");
    }
}

/// Natively only: the host files in containers are a volume of the engine, on which the host holds
/// no locks.
#[test]
fn no_lock_that_the_host_relies_on_is_within_reach() {
    run(async {
        // Read-only files are the same for all sessions, and a lock on one can be seen by another.
        // So none of the host's may be among them.
        let code = "
import json, os
print(json.dumps([os.path.join(folder, name) for folder, _, names in os.walk('/opt') for name in \
names if name == 'in-use.lock']))";
        assert_eq!(native::shared().session().json(code).await, json!([]));
        // Control: the environment has one, beside what is shown.
        let environments = fs::read_dir(data_folder().join("environments"))
            .unwrap()
            .flatten();
        assert!(
            environments
                .into_iter()
                .any(|entry| entry.path().join("in-use.lock").exists())
        );
    });
}
