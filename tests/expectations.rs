//! What programs expect of a Linux system, and find in a session.
//!
//! Each case is the least that some well-known program or library needs. What must not come with it
//! is in `attacks`.

use serde_json::json;

use crate::support::native;
use crate::support::places::{Place, in_every_place};
use crate::support::skipped;

const EPERM: i64 = 1;
const EBADF: i64 = 9;
const EOPNOTSUPP: i64 = 95;

/// Whether the programs are where the session finds them: natively those of the host.
fn has(place: Place, programs: &[&str]) -> bool {
    let missing = |name: &&&str| !std::path::Path::new("/usr/bin").join(name).exists();
    if !place.is_native() {
        skipped("an image with more programs");
        return false;
    }
    if let Some(name) = programs.iter().find(missing) {
        skipped(&format!("the program {name}"));
        return false;
    }
    true
}

/// Runs a shell script in the working folder; tells its status and what it said.
fn shell(script: &str) -> String {
    format!(
        "
import json, subprocess
done = subprocess.run(['/bin/sh', '-c', {script:?}], capture_output=True, text=True)
print(json.dumps([done.returncode, done.stdout, done.stderr]))"
    )
}

async fn check_shell(place: Place, script: &str, expected: &str) {
    let answer = place.session().json(&shell(script)).await;
    assert_eq!(
        (&answer[0], &answer[1]),
        (&json!(0), &json!(expected)),
        "{answer}"
    );
}

in_every_place! {
    async fn children_can_be_started_with_ones_own_ids(place) {
        // GNU make starts its children so.
        let code = "
import json, os, subprocess
child = os.posix_spawn('/bin/true', ['true'], {}, resetids=True)
_, status = os.waitpid(child, 0)
user, group = os.getuid(), os.getgid()
done = subprocess.run(['/bin/true'], user=user, group=group)
print(json.dumps([status, done.returncode]))";
        assert_eq!(place.session().json(code).await, json!([0, 0]));
    }

    async fn make_runs_its_recipes(place) {
        if !has(place, &["make"]) {
            return;
        }
        check_shell(place, "printf 'all:\\n\\t@echo made\\n' > Makefile; make", "made\n").await;
    }

    async fn interfaces_can_be_listed(place) {
        // ZeroMQ ends the process where this fails in an unknown way.
        let code = "
import ctypes, json, socket
libc = ctypes.CDLL(None, use_errno=True)
first = ctypes.c_void_p()
print(json.dumps([libc.getifaddrs(ctypes.byref(first)), bool(first.value), [name for _, name in \
socket.if_nameindex()][:1]]))";
        assert_eq!(place.session().json(code).await, json!([0, true, ["lo"]]));
    }

    async fn questions_about_a_network_card_say_that_there_is_none(place) {
        let code = "
import fcntl, json, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    try:
        fcntl.ioctl(any_socket, 0x8946, struct.pack('16sP', b'lo', 0) + bytes(16))
        told = 0
    except OSError as error:
        told = error.errno
print(json.dumps(told))";
        assert_eq!(place.session().json(code).await, json!(EOPNOTSUPP));
    }

    async fn refusals_are_the_ones_that_programs_handle(place) {
        let code = "
import json, os, socket, time
def refusal(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return error.errno
    return 0
os.makedirs('folder', exist_ok=True)
print(json.dumps([refusal(os.chmod, 'folder', 0o2775), refusal(os.setxattr, 'folder', 'user.a', \
b'1'),
                  refusal(os.removexattr, 'folder', 'user.a'), refusal(time.clock_settime, \
                  time.CLOCK_REALTIME, 0),
                  refusal(socket.sethostname, 'other'), refusal(os.mknod, 'device', 0o20666, 0x103),
                  refusal(os.chmod, 'folder', 0o775), refusal(os.tcsetpgrp, 9999, os.getpgrp())]))";
        let expected = json!([EPERM, EOPNOTSUPP, EOPNOTSUPP, EPERM, EPERM, EPERM, 0, EBADF]);
        assert_eq!(place.session().json(code).await, expected);
    }

    async fn a_program_that_wants_no_core_file_is_told_that_there_is_none(place) {
        // timeout(1) dies of its child's signal only if it could switch core files off first.
        let script = "timeout 60 sh -c 'kill -SEGV $$'; echo $?";
        let answer = place.session().json(&shell(script)).await;
        assert_eq!((&answer[1], &answer[2]), (&json!("139\n"), &json!("Segmentation fault\n")));
        let direct = "import json, subprocess\n\
                      print(json.dumps(subprocess.run(['timeout', '60', 'sh', '-c', \
                      'kill -SEGV $$']).returncode))";
        assert_eq!(place.session().json(direct).await, json!(-11));
    }

    async fn ports_and_protocols_have_names(place) {
        if !place.is_native() || !std::path::Path::new("/etc/services").exists() {
            skipped("/etc/services (in the image, or on this machine)");
            return;
        }
        let code = "
import json, socket
print(json.dumps([socket.getservbyname('http'), socket.getprotobyname('tcp'), \
socket.getservbyport(53),
                  socket.getaddrinfo('127.0.0.1', 'https', type=socket.SOCK_STREAM)[0][4][1]]))";
        assert_eq!(place.session().json(code).await, json!([80, 6, "domain", 443]));
    }

    async fn openssl_and_java_find_their_settings(place) {
        if !has(place, &["openssl", "java"]) {
            return;
        }
        let request = "openssl req -x509 -newkey rsa:2048 -nodes -keyout k -out c -subj /CN=x \
                       2>/dev/null && openssl x509 -in c -noout -subject";
        check_shell(place, request, "subject=CN = x\n").await;
        let java = place.session().json(&shell("java -version")).await;
        assert_eq!(java[0], 0, "{java}");
        if place.is_native() {
            // By itself it would take a quarter of the machine's memory.
            let heap = "java -XX:+PrintFlagsFinal -version 2>&1 | \
                        awk '$2 == \"MaxHeapSize\" {print $4}'";
            check_shell(place, heap, &format!("{}\n", native::ROOMY.memory / 4)).await;
        }
        let release = place.session().ok("print(open('/etc/os-release').read())").await;
        assert!(release.contains("NAME="));
    }

    async fn processors_and_limits_can_be_read(place) {
        if !place.is_native() {
            skipped("a /sys of ours (engines show that of the kernel)");
            return;
        }
        let code = "
import json, os, subprocess
def read(path): return open(path).read().strip()
def count(text): return sum(int(last or first) - int(first) + 1 for first, _, last in \
(part.partition('-') for part in text.split(',')))
cpus = os.sched_getaffinity(0)
folder = '/sys/devices/system/cpu'
groups = '/sys/fs/cgroup'
print(json.dumps({
    'processors': count(read(f'{folder}/online')) == len(cpus) == os.sysconf('SC_NPROCESSORS_ONLN'),
    'cores': all(os.path.exists(f'{folder}/cpu{cpu}/topology/core_id') for cpu in cpus),
    'memory': int(read(f'{groups}/memory.max')), 'cpu': read(f'{groups}/cpu.max'),
    'free': {line.split()[1] for line in open('/proc/meminfo') if line.startswith('Mem')} == \
    {str(int(read(f'{groups}/memory.max')) // 1024)},
    'live': os.path.exists(f'{groups}/memory.current'),
    'others': sorted(os.listdir('/sys')), 'in devices': os.listdir('/sys/devices'), 'in system': \
    os.listdir('/sys/devices/system'),
}))";
        let session = place.session();
        let mut answer = session.json(code).await;
        let quota = answer["cpu"].take();
        assert_eq!(
            answer,
            json!({
                "processors": true, "cores": true, "memory": native::ROOMY.memory, "cpu": null,
                "free": true, "live": false, "others": ["devices", "fs"],
                "in devices": ["system"], "in system": ["cpu"],
            })
        );
        // Where there are no control groups nothing limits it.
        assert!(quota == "200000 100000" || quota == "max 100000", "{quota}");
        if has(place, &["lscpu"]) {
            let listed = session.json(&shell("lscpu --parse=core | grep -vc '#'")).await;
            let own = session.ok("import os; print(len(os.sched_getaffinity(0)))").await;
            assert_eq!((&listed[0], &listed[1]), (&json!(0), &json!(own)), "{listed}");
        }
    }

    async fn programs_can_be_run_in_a_pseudo_terminal(place) {
        let code = "
import json, os, pty, tty
child, terminal = pty.fork()
if child == 0:
    os.execv('/bin/sh', ['sh', '-c', 'test -t 0 && test -t 1 && stty size 2>&1; read line; \
    echo \"<$line>\"; exec 3</dev/tty && echo own'])
import fcntl, struct, termios
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack('HHHH', 31, 97, 0, 0))
os.write(terminal, b'typed\\n')
text = b''
while True:
    try:
        part = os.read(terminal, 1000)
    except OSError:
        break
    if not part: break
    text += part
_, status = os.waitpid(child, 0)
words = text.decode().split()
print(json.dumps([status, '<typed>' in words, 'own' in words]))";
        assert_eq!(place.session().json(code).await, json!([0, true, true]));
    }
}
