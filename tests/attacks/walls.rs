//! Files, processes, kernel settings and networks of the host: what a session must not see or change.

use std::io::Read;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use cellblock::sandbox::Layer;
use cellblock::session::Outcome;
use cellblock_jail::wire::{Bind, LeftOut, OperatorMount};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::native::{self, Builder, run};
use crate::support::{is_root, skipped};

/// A folder of the host that anybody may write to, shown inside like the environment: read-only.
fn open_folder() -> (TempDir, Bind) {
    let folder = tempfile::Builder::new().prefix("cellblock-open-").tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let bind = Bind { host: folder.path().to_owned(), inside: PathBuf::from("/opt/open") };
    (folder, bind)
}

/// Tries to write into the folder of the host and to a kernel setting; tells the errors.
const WRITE: &str = "
import errno, json, os
def attempt(path, flags):
    try:
        os.close(os.open(path, flags, 0o644))
    except OSError as error:
        return errno.errorcode[error.errno]
    return 'done'
print(json.dumps([attempt('/opt/open/file', os.O_CREAT | os.O_WRONLY), attempt('/proc/sys/kernel/core_pattern', os.O_WRONLY),
                  attempt('/work/file', os.O_CREAT | os.O_WRONLY)]))";

#[test]
fn read_only_mounts_and_landlock_each_hold_alone() {
    run(async {
        let cases: [(&[LeftOut], [&str; 3]); 4] = [
            (&[], ["EROFS", "ENOENT", "done"]),
            // Landlock alone. Without the mounts' protection the kernel's settings are visible, and still closed.
            (&[LeftOut::ReadOnlyMounts], ["EACCES", "EACCES", "done"]),
            // Mounts alone.
            (&[LeftOut::Landlock], ["EROFS", "ENOENT", "done"]),
            // Control: with neither, the folder is open. The settings are closed all the same, because no session is the host's root.
            (&[LeftOut::ReadOnlyMounts, LeftOut::Landlock], ["done", "EACCES", "done"]),
        ];
        for (left_out, expected) in cases {
            let (folder, bind) = open_folder();
            let backend = Builder::new("minimal").leave_out(left_out).bind(bind).start();
            assert_eq!(backend.session().json(WRITE).await, json!(expected), "without {left_out:?}");
            assert_eq!(folder.path().join("file").exists(), expected[0] == "done");
            backend.end().await;
        }
        if is_root() {
            // Control: the host's root may open the setting.
            let opened = "import os; os.close(os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)); print('done')";
            assert_eq!(native::outside(opened).trim(), "done");
        } else {
            skipped("root (the control that kernel settings can be opened)");
        }
    });
}

#[test]
fn a_layer_that_is_left_out_is_told_as_missing() {
    run(async {
        let backend = Builder::new("minimal").leave_out(&[LeftOut::Landlock]).start();
        let outcome = backend.session().execute("1").await.unwrap();
        assert_eq!(missing_layers(&outcome), ["landlock"]);
        backend.end().await;
        // Control: with everything in place nothing is missing.
        let outcome = native::shared().session().execute("1").await.unwrap();
        assert!(missing_layers(&outcome).is_empty());
    });
}

fn missing_layers(outcome: &Outcome) -> Vec<&'static str> {
    let layers = outcome.isolation.layers.iter();
    layers.filter(|(_, layer)| matches!(layer, Layer::Missing { .. })).map(|(kind, _)| kind.name()).collect()
}

#[test]
fn only_the_working_and_temporary_folders_can_be_written_to() {
    run(async {
        let code = "
import json, os
writable = []
for folder, folders, files in os.walk('/', onerror=None):
    if folder.startswith(('/proc/', '/usr/', '/opt/cellblock/env/', '/opt/cellblock/python/')):
        folders.clear()
    try:
        path = os.path.join(folder, 'written-by-a-test')
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        os.unlink(path)
        writable.append(folder)
    except OSError:
        pass
print(json.dumps(sorted(writable)))";
        let writable = native::shared().session().json(code).await;
        assert_eq!(writable, json!(["/dev/shm", "/tmp", "/tmp/home", "/work"]));
    });
}

#[test]
fn an_operator_mount_is_writable_only_when_it_was_given_so() {
    run(async {
        let (open, closed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(closed.path().join("data"), "read me").unwrap();
        let mount = |folder: &TempDir, inside: &str, writable| OperatorMount {
            host: folder.path().to_owned(),
            inside: PathBuf::from(inside),
            writable,
        };
        let backend = Builder::new("minimal")
            .mount(mount(&open, "/work/open", true))
            .mount(mount(&closed, "/work/closed", false))
            .start();
        let code = "
import json
def write(path):
    try:
        open(path, 'w').write('x')
    except OSError as error:
        return error.errno
    return 0
print(json.dumps([write('open/file'), write('closed/file'), write('closed/data'), open('closed/data').read()]))";
        assert_eq!(backend.session().json(code).await, json!([0, 30, 30, "read me"]));
        assert_eq!(std::fs::read_to_string(open.path().join("file")).unwrap(), "x");
        assert_eq!(std::fs::read_dir(closed.path()).unwrap().count(), 1);
        backend.end().await;
    });
}

#[test]
fn files_processes_and_names_of_the_host_cannot_be_seen() {
    run(async {
        let secret = tempfile::Builder::new().prefix("cellblock-secret-").tempdir().unwrap();
        let file = secret.path().join("token");
        std::fs::write(&file, "canary").unwrap();
        let own = std::process::id();
        let host_name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let code = format!(
            "
import json, os, socket
paths = [{file:?}, {manifest:?}, '/sys/kernel', '/boot', '/root', '/home', '/run', '/etc/shadow', '/etc/machine-id', '/dev/kmsg', '/dev/mem', '/dev/tty', '/dev/ptmx', '/proc/{own}/status']
try:
    os.kill({own}, 0)
    killed = 'done'
except OSError as error:
    killed = error.errno
print(json.dumps([[path for path in paths if os.path.lexists(path)], killed, socket.gethostname(), os.uname().nodename]))",
            file = file.display().to_string(),
            manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"),
        );
        assert_eq!(native::shared().session().json(&code).await, json!([[], 3, "cellblock", "cellblock"]));
        // Control: outside they are there.
        let outside: Value = serde_json::from_str(&native::outside(&code)).unwrap();
        assert!(outside[0].as_array().unwrap().len() >= 6, "{outside}");
        assert_eq!((&outside[1], &outside[2]), (&json!("done"), &json!(host_name)));
    });
}

#[test]
fn nothing_readable_in_proc_holds_the_hosts_environment() {
    run(async {
        // A variable of this very process; the program that started the tests has set it.
        let canary = std::env::var("CARGO_PKG_DESCRIPTION").expect("cargo sets it");
        let code = format!(
            "
import json, os
canary = {canary:?}[4:].encode()
seen, read = [], 0
for folder, folders, files in os.walk('/proc'):
    folders[:] = [name for name in folders if name not in ('task', 'map_files', 'fd', 'fdinfo', 'cwd', 'root')]
    for name in files:
        try:
            with open(os.path.join(folder, name), 'rb') as file:
                text = file.read(1 << 20)
        except OSError:
            continue
        read += bool(text)
        if canary in text: seen.append(os.path.join(folder, name))
seen += [name for name, value in os.environ.items() if canary.decode() in value]
print(json.dumps([seen, read > 20]))"
        );
        assert_eq!(native::shared().session().json(&code).await, json!([[], true]));
        // Control: the test process itself has it there.
        let environment = std::fs::read("/proc/self/environ").unwrap();
        assert!(String::from_utf8_lossy(&environment).contains(&canary[4..]));
    });
}

#[test]
fn only_listed_parts_of_proc_say_anything() {
    run(async {
        let code = "
import json, os
def says(path):
    try:
        if os.path.isdir(path): return bool(os.listdir(path))
        return bool(open(path, 'rb').read(1))
    except OSError:
        return False
hidden = ['keys', 'key-users', 'timer_list', 'config.gz', 'kallsyms', 'kcore', 'kmsg', 'sysrq-trigger', 'sys', 'fs', 'irq', 'bus',
          'modules', 'interrupts', 'iomem', 'ioports', 'slabinfo', 'sched_debug', 'cmdline', 'partitions', 'diskstats', 'locks', 'scsi', 'acpi', 'sysvipc']
print(json.dumps([name for name in hidden if says(f'/proc/{name}')]))";
        assert_eq!(native::shared().session().json(code).await, json!([]));
        let outside: Value = serde_json::from_str(&native::outside(code)).unwrap();
        assert!(outside.as_array().unwrap().len() > 8, "{outside}");
    });
}

#[test]
fn the_first_process_can_be_neither_read_nor_ended() {
    run(async {
        let session = native::shared().session();
        let code = "
import json, os, signal
closed = []
for name in ('mem', 'maps', 'environ', 'auxv', 'stack', 'syscall'):
    try:
        closed.append(bool(open(f'/proc/1/{name}', 'rb').read(1)))
    except OSError:
        closed.append(False)
for name in ('root', 'cwd', 'exe', 'fd', 'ns/net'):
    try:
        closed.append(bool(os.listdir(f'/proc/1/{name}') if name == 'fd' else os.readlink(f'/proc/1/{name}')))
    except OSError:
        closed.append(False)
for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGINT, signal.SIGSEGV):
    try:
        os.kill(1, number)
    except OSError:
        pass
print(json.dumps([any(closed), bool(open('/proc/self/maps').read(1)), bool(os.readlink('/proc/self/ns/net'))]))";
        // The last two are controls: one's own process can be read.
        assert_eq!(session.json(code).await, json!([false, true, true]));
        assert_eq!(session.ok("print(open('/proc/1/comm').read(), end='')").await, "cb-init\n");
        // Control: signals work on one's own children.
        let child = "import subprocess; child = subprocess.Popen(['sleep', '60']); child.kill(); print(child.wait())";
        assert_eq!(session.ok(child).await, "-9\n");
    });
}

#[test]
fn there_is_no_network() {
    run(async {
        let four = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let six = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).ok();
        let datagrams = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let name = format!("cellblock-test-{}", std::process::id());
        let address =
            <std::os::unix::net::SocketAddr as std::os::linux::net::SocketAddrExt>::from_abstract_name(&name).unwrap();
        let abstract_socket = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
        let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
        let code = format!(
            r"
import errno, json, socket
def attempt(family, kind, address, protocol=0):
    try:
        with socket.socket(family, kind, protocol) as each:
            each.settimeout(2)
            each.connect(address)
            if kind == socket.SOCK_DGRAM: each.send(b'canary')
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
    return 'made'
TCP, UDP = socket.SOCK_STREAM, socket.SOCK_DGRAM
def name():
    try:
        socket.getaddrinfo('example.com', 443)
    except OSError:
        return 'unknown'
    return 'known'
print(json.dumps({{
    'loopback': attempt(socket.AF_INET, TCP, ('127.0.0.1', {four})),
    'loopback6': attempt(socket.AF_INET6, TCP, ('::1', {six})),
    'abstract': attempt(socket.AF_UNIX, TCP, '\0{name}'),
    'away': attempt(socket.AF_INET, TCP, ('192.0.2.1', 80)),
    'metadata': attempt(socket.AF_INET, TCP, ('169.254.169.254', 80)),
    'away6': attempt(socket.AF_INET6, TCP, ('2001:db8::1', 80)),
    'datagram': attempt(socket.AF_INET, UDP, ('192.0.2.1', 53)),
    'multicast': attempt(socket.AF_INET, UDP, ('224.0.0.1', 5353)),
    'echo': attempt(socket.AF_INET, UDP, ('192.0.2.1', 0), socket.IPPROTO_ICMP),
    'raw': attempt(socket.AF_INET, socket.SOCK_RAW, ('192.0.2.1', 0), socket.IPPROTO_ICMP),
    'local datagram': attempt(socket.AF_INET, UDP, ('127.0.0.1', {udp})),
    'name': name(),
}}))",
            four = port(&four),
            six = six.as_ref().map_or(1, port),
            udp = datagrams.local_addr().unwrap().port(),
        );
        let inside = native::shared().session().json(&code).await;
        for (what, expected) in [
            ("loopback", &["ECONNREFUSED"][..]),
            ("loopback6", &["ECONNREFUSED"]),
            ("abstract", &["ECONNREFUSED", "EPERM"]),
            ("away", &["ENETUNREACH"]),
            ("metadata", &["ENETUNREACH"]),
            ("away6", &["ENETUNREACH"]),
            ("datagram", &["ENETUNREACH"]),
            ("multicast", &["ENETUNREACH"]),
            ("echo", &["EACCES", "EPERM"]),
            ("raw", &["EPERM"]),
            ("name", &["unknown"]),
        ] {
            let answer = inside[what].as_str().unwrap();
            assert!(expected.contains(&answer), "{what}: {answer}");
        }
        for listener in [Some(&four), six.as_ref()].into_iter().flatten() {
            listener.set_nonblocking(true).unwrap();
            assert!(listener.accept().is_err(), "nobody came");
        }
        datagrams.set_nonblocking(true).unwrap();
        assert!(datagrams.recv(&mut [0; 16]).is_err(), "nothing came");
        // Control: from outside, the same code reaches all of them.
        let outside: Value = serde_json::from_str(&native::outside(&code)).unwrap();
        assert_eq!((&outside["loopback"], &outside["abstract"]), (&json!("made"), &json!("made")));
        four.set_nonblocking(false).unwrap();
        let (mut stream, _) = four.accept().unwrap();
        assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
        let mut datagram = [0; 16];
        assert_eq!(datagrams.recv(&mut datagram).unwrap(), 6);
        drop(abstract_socket);
    });
}
