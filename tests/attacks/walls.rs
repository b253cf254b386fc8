//! Files, processes, kernel settings and networks of the host that a session must not see or
//! change.

use std::io::Read;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use cellblock::sandbox::LayerState;
use cellblock::session::Outcome;
use cellblock_jail::wire::{Bind, OmittedLayer, OperatorMount};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::system_calls::CALLER;
use crate::support::native::{self, Builder, run};
use crate::support::places::{Place, in_every_place};
use crate::support::{is_root, skipped};

/// Parts of the host that are absent, beside its files and processes.
fn hidden(place: Place) -> Vec<String> {
    let everywhere = ["/dev/kmsg", "/dev/mem"];
    let of_place = match place {
        // These belong to the host, or are absent.
        Place::Native => vec![
            "/sys/kernel",
            "/boot",
            "/root",
            "/home",
            "/run",
            "/etc/shadow",
            "/etc/machine-id",
            "/dev/console",
            "/dev/pts/0",
        ],
        // Those belong to the image, and `/sys` is the kernel's, which cannot be written to. The
        // engine must be absent.
        Place::Containers(_) => vec![
            "/var/run/docker.sock",
            "/run/docker.sock",
            "/run/podman/podman.sock",
        ],
    };
    let engine = match place {
        Place::Native => None,
        Place::Containers(engine) => Some(engine.address.to_string().replace("unix://", "")),
    };
    everywhere
        .into_iter()
        .chain(of_place)
        .map(str::to_owned)
        .chain(engine)
        .collect()
}

/// Parts of `/proc` that are not about the own processes.
const PARTS_OF_PROC: [&str; 25] = [
    "keys",
    "key-users",
    "timer_list",
    "config.gz",
    "kallsyms",
    "kcore",
    "kmsg",
    "sysrq-trigger",
    "sys",
    "fs",
    "irq",
    "bus",
    "modules",
    "interrupts",
    "iomem",
    "ioports",
    "slabinfo",
    "sched_debug",
    "cmdline",
    "partitions",
    "diskstats",
    "locks",
    "scsi",
    "acpi",
    "sysvipc",
];

/// Those of them that engines show: facts about the machine, none of which can be written to.
/// (`kallsyms`, `iomem` and `ioports` show zeros for addresses unless the reader is root.)
const SHOWN_BY_ENGINES: [&str; 17] = [
    "key-users",
    "config.gz",
    "kallsyms",
    "sys",
    "fs",
    "irq",
    "bus",
    "modules",
    "interrupts",
    "iomem",
    "ioports",
    "cmdline",
    "partitions",
    "diskstats",
    "locks",
    "sched_debug",
    "sysvipc",
];

in_every_place! {
    async fn only_the_working_and_temporary_folders_can_be_written_to(place) {
        let code = "
import json, os
writable = []
for folder, folders, files in os.walk('/', onerror=None):
    if folder.startswith(('/proc/', '/sys/', '/usr/', '/opt/cellblock/')):
        folders.clear()
    try:
        path = os.path.join(folder, 'written-by-a-test')
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        os.unlink(path)
        writable.append(folder)
    except OSError:
        pass
def opened(path):
    try: os.close(os.open(path, os.O_WRONLY))
    except OSError: return False
    return True
files = ['/etc/passwd', '/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/dev/null']
print(json.dumps([sorted(writable), [path for path in files if opened(path)]]))";
        let answer = place.session().json(code).await;
        // Forks of a session in a container have their folders in `/forks`.
        let forks = (!place.is_native()).then_some("/forks");
        let folders: Vec<&str> =
            ["/dev/shm"].into_iter().chain(forks).chain(["/tmp", "/tmp/home", "/work"]).collect();
        // The device is a control: whether a file can be opened for writing does not vary.
        assert_eq!(answer, json!([folders, ["/dev/null"]]));
    }

    async fn an_operator_mount_is_writable_only_when_it_was_given_so(place) {
        let (open, closed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(closed.path().join("data"), "read me").unwrap();
        if is_root() {
            // A session in a container owns its folders.
            for folder in [&open, &closed] {
                std::os::unix::fs::chown(folder.path(), Some(12_345), Some(12_345)).unwrap();
            }
        }
        let mount = |folder: &TempDir, inside: &str, writable| OperatorMount {
            host: folder.path().to_owned(),
            inside: PathBuf::from(inside),
            writable,
        };
        let mounts = [mount(&open, "/work/open", true), mount(&closed, "/work/closed", false)];
        let ground = place.showing(&mounts);
        let code = "
import json
def write(path):
    try:
        open(path, 'w').write('x')
    except OSError as error:
        return error.errno
    return 0
print(json.dumps([write('open/file'), write('closed/file'), write('closed/data'), \
open('closed/data').read()]))";
        assert_eq!(ground.session().json(code).await, json!([0, 30, 30, "read me"]));
        assert_eq!(std::fs::read_to_string(open.path().join("file")).unwrap(), "x");
        assert_eq!(std::fs::read_dir(closed.path()).unwrap().count(), 1);
        ground.end().await;
    }

    async fn files_processes_and_names_of_the_host_cannot_be_seen(place) {
        let secret = tempfile::Builder::new().prefix("cellblock-secret-").tempdir().unwrap();
        let file = secret.path().join("token");
        std::fs::write(&file, "canary").unwrap();
        let own = std::process::id();
        let host_name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml").to_owned();
        let seen = [file.display().to_string(), manifest, format!("/proc/{own}/status")];
        let code = |paths: &[String]| {
            format!(
                "
import json, os, socket
try:
    os.kill({own}, 0)
    killed = 'done'
except OSError as error:
    killed = error.errno
print(json.dumps([[path for path in {paths:?} if os.path.lexists(path)], killed, \
socket.gethostname(), os.uname().nodename]))"
            )
        };
        let all = [&seen[..], &hidden(place)].concat();
        let expected = json!([[], 3, "cellblock", "cellblock"]);
        assert_eq!(place.session().json(&code(&all)).await, expected);
        // Control: outside they exist.
        let outside: Value = serde_json::from_str(&native::outside(&code(&all))).unwrap();
        let there: Vec<String> = serde_json::from_value(outside[0].clone()).unwrap();
        assert!(
            seen.iter().all(|path| there.contains(path)) && there.len() > seen.len(),
            "{outside}"
        );
        assert_eq!((&outside[1], &outside[2]), (&json!("done"), &json!(host_name)));
    }

    async fn nothing_readable_in_proc_holds_the_hosts_environment(place) {
        // A variable of this process, set by the program that started the tests.
        let canary = std::env::var("CARGO_PKG_DESCRIPTION").expect("cargo sets it");
        let code = format!(
            "
import json, os
canary = {canary:?}[4:].encode()
seen, read = [], 0
for folder, folders, files in os.walk('/proc'):
    folders[:] = [name for name in folders if name not in ('task', 'map_files', 'fd', 'fdinfo', \
    'cwd', 'root')]
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
        assert_eq!(place.session().json(&code).await, json!([[], true]));
        // Control: the test process itself has it.
        let environment = std::fs::read("/proc/self/environ").unwrap();
        assert!(String::from_utf8_lossy(&environment).contains(&canary[4..]));
    }

    async fn only_listed_parts_of_proc_say_anything(place) {
        let code = format!(
            "
import json, os
def says(path):
    try:
        if os.path.isdir(path): return bool(os.listdir(path))
        return bool(open(path, 'rb').read(1))
    except OSError:
        return False
print(json.dumps([name for name in {PARTS_OF_PROC:?} if says(f'/proc/{{name}}')]))"
        );
        let told: Vec<String> = serde_json::from_value(place.session().json(&code).await).unwrap();
        let shown: &[&str] = if place.is_native() { &[] } else { &SHOWN_BY_ENGINES };
        assert!(told.iter().all(|name| shown.contains(&name.as_str())), "{told:?}");
        // Control: outside there is more.
        let outside: Vec<String> = serde_json::from_str(&native::outside(&code)).unwrap();
        assert!(outside.len() > 8 && outside.len() > told.len(), "{outside:?}");
    }

    async fn terminals_are_those_of_the_sandbox_and_take_no_typing_from_others(place) {
        // A terminal of the host: opening this creates one.
        let _terminal = std::fs::File::open("/dev/ptmx").unwrap();
        let (first, second) = (place.session(), place.session());
        let code = format!(
            "{CALLER}{TERMINALS}
def seen():
    return sorted(name for name in os.listdir('/dev/pts') if name != 'ptmx')
before = seen()
kept = os.openpty()
print(json.dumps({{'before': before, 'after': seen(), 'controlling': opened('/dev/tty'), \
**in_child(attack)}}))"
        );
        for session in [&first, &second] {
            let answer = session.json(&code).await;
            // The terminal of the host is absent, and so is that of the other session.
            assert_eq!(
                (&answer["before"], &answer["after"]),
                (&json!([]), &json!(["0"])),
                "{answer}"
            );
            assert_eq!(answer["controlling"], "ENXIO");
            assert_eq!(answer["typed"], json!(["EPERM", "EPERM", "EPERM", "EPERM"]));
            assert_eq!(answer["own"], "/dev/pts/1", "control: a process has a controlling terminal \
                 if it makes one");
            assert_eq!(answer["read"], "sent\r\n");
        }
        // Control: without a filter, line disciplines can be set.
        let outside: Value = serde_json::from_str(&native::outside(&code)).unwrap();
        assert_eq!(outside["typed"][3], json!(""), "{outside}");
        // The number of the test's own terminal is among those of the host.
        assert!(!outside["before"].as_array().unwrap().is_empty());
    }

    async fn the_number_of_terminals_is_limited(place) {
        if !place.is_native() {
            skipped("a limit of an engine (pseudo-terminals have none there but the kernel's)");
            return;
        }
        let code = "
import json, os
kept = []
try:
    while len(kept) < 200: kept.append(os.openpty())
except OSError as error:
    refused = error.errno
count = len(kept)
for pair in kept:
    for end in pair: os.close(end)
again = os.openpty()
print(json.dumps([count, refused]))";
        assert_eq!(place.session().json(code).await, json!([64, 28]));
    }

    async fn the_first_process_can_be_neither_read_nor_ended(place) {
        let session = place.session();
        // Natively no signal reaches init. A supervisor handles some, so landlock must keep them
        // from it, which it can since Linux 6.12.
        let is_apart = place.is_native() || session.isolation().await.contains("signals");
        let signals = if is_apart { "SIGKILL, SIGTERM, SIGSTOP, SIGINT, \
                                     SIGSEGV" } else { "SIGKILL, SIGSTOP, SIGINT, SIGSEGV" };
        let code = format!(
            "
import json, os
from signal import *
closed = []
for name in ('mem', 'maps', 'environ', 'auxv', 'stack', 'syscall'):
    try:
        closed.append(bool(open(f'/proc/1/{{name}}', 'rb').read(1)))
    except OSError:
        closed.append(False)
for name in ('root', 'cwd', 'exe', 'fd', 'ns/net'):
    try:
        closed.append(bool(os.listdir(f'/proc/1/{{name}}') if name == 'fd' else \
        os.readlink(f'/proc/1/{{name}}')))
    except OSError:
        closed.append(False)
for number in ({signals}):
    try:
        os.kill(1, number)
    except OSError:
        pass
print(json.dumps([any(closed), bool(open('/proc/self/maps').read(1)), \
bool(os.readlink('/proc/self/ns/net'))]))"
        );
        // The last two are controls: the own process can be read.
        assert_eq!(session.json(&code).await, json!([false, true, true]));
        let name = session.ok("print(open('/proc/1/comm').read(), end='')").await;
        assert!(
            if place.is_native() { name == "cb-init\n" } else { name.starts_with("python") },
            "{name}"
        );
        // Control: signals to own children work.
        let child = "import subprocess; child = subprocess.Popen(['sleep', '60']); child.kill(); \
                     print(child.wait())";
        assert_eq!(session.ok(child).await, "-9\n");
    }

    async fn there_is_no_network(place) {
        let four = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let six = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).ok();
        let datagrams = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
        // One for each backend: they are tried concurrently.
        let name = format!("cellblock-test-{}", port(&four));
        let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
        let abstract_socket = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
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
        let inside = place.session().json(&code).await;
        for (what, expected) in [
            ("loopback", &["ECONNREFUSED"][..]),
            // Docker's containers have no IPv6 at all, so there is no address to connect from.
            (
                "loopback6",
                if place.is_native() {
                    &["ECONNREFUSED"]
                } else {
                    &["ECONNREFUSED", "EADDRNOTAVAIL"]
                },
            ),
            ("abstract", &["ECONNREFUSED", "EPERM"]),
            ("away", &["ENETUNREACH"]),
            ("metadata", &["ENETUNREACH"]),
            (
                "away6",
                if place.is_native() {
                    &["ENETUNREACH"]
                } else {
                    &["ENETUNREACH", "EADDRNOTAVAIL"]
                },
            ),
            ("datagram", &["ENETUNREACH"]),
            ("multicast", &["ENETUNREACH"]),
            // Docker lets every group in a container ask for echoes; they go nowhere.
            (
                "echo",
                if place.is_native() {
                    &["EACCES", "EPERM"]
                } else {
                    &["EACCES", "EPERM", "ENETUNREACH"]
                },
            ),
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
    }
}

/// Operations of a process on a terminal: make it the controlling one, use it, and try to inject
/// input and to change its discipline.
const TERMINALS: &str = "
import errno, fcntl, json, os, signal, termios, tty
def opened(path):
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NOCTTY))
    except OSError as error:
        return errno.errorcode[error.errno]
    return 'opened'
def request(end, number, value):
    try:
        fcntl.ioctl(end, number, value)
    except OSError as error:
        return errno.errorcode[error.errno]
    return ''
def attack():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.setsid()
    outer, inner = os.openpty()
    fcntl.ioctl(inner, termios.TIOCSCTTY, 0)
    own = os.ttyname(inner)
    assert opened('/dev/tty') == 'opened'
    os.write(inner, b'sent\\n')
    # The kernel hands over what was written in parts: the text, then the end of its line.
    read = b''
    while not read.endswith(b'\\n'): read += os.read(outer, 100)
    read = read.decode()
    TIOCLINUX, TIOCCONS = 0x541C, 0x541D
    typed = [request(inner, termios.TIOCSTI, b'x'), request(inner, TIOCLINUX, b'\\2'), \
    request(inner, TIOCCONS, 0),
             request(inner, termios.TIOCSETD, (0).to_bytes(4, 'little'))]
    return {'typed': typed, 'own': own, 'read': read}
";

/// A world-writable folder of the host, mounted inside like the environment: read-only.
fn open_folder() -> (TempDir, Bind) {
    let folder = tempfile::Builder::new()
        .prefix("cellblock-open-")
        .tempdir()
        .unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let bind = Bind {
        host: folder.path().to_owned(),
        inside: PathBuf::from("/opt/open"),
    };
    (folder, bind)
}

/// Tries to write into the folder of the host and to a kernel setting; prints the errors.
const WRITE: &str = "
import errno, json, os
def attempt(path, flags):
    try:
        os.close(os.open(path, flags, 0o644))
    except OSError as error:
        return errno.errorcode[error.errno]
    return 'done'
print(json.dumps([attempt('/opt/open/file', os.O_CREAT | os.O_WRONLY), \
attempt('/proc/sys/kernel/core_pattern', os.O_WRONLY),
                  attempt('/work/file', os.O_CREAT | os.O_WRONLY)]))";

/// Natively only: engines show the mount table, and with it the locations of their own folders.
#[test]
fn no_process_shows_from_where_on_the_host_folders_were_mounted() {
    run(async {
        let folder = tempfile::Builder::new()
            .prefix("cellblock-canary-")
            .tempdir()
            .unwrap();
        let name = folder
            .path()
            .file_name()
            .unwrap()
            .to_string_lossy()
            .into_owned();
        let mount = OperatorMount {
            host: folder.path().to_owned(),
            inside: PathBuf::from("/work/shown"),
            writable: false,
        };
        let code = "
import glob, json, subprocess
def told(path):
    try:
        return open(path).read()
    except OSError:
        return ''
child = subprocess.Popen(['sleep', '60'])
places = [path for what in ('mountinfo', 'mounts', 'mountstats') for path in \
glob.glob(f'/proc/[0-9]*/{what}') + glob.glob(f'/proc/[0-9]*/task/*/{what}')]
text = ''.join(told(path) for path in places) + told('/proc/mounts') + told('/proc/self/mountinfo')
child.kill(); child.wait()
import os
print(json.dumps([len(places) >= 12, text, os.path.isdir('/work/shown')]))";
        let backend = Builder::new("minimal").mount(mount.clone()).start();
        let session = backend.session();
        assert_eq!(session.json(code).await, json!([true, "", true]));
        assert_eq!(
            session.fork().await.json(code).await,
            json!([true, "", true]),
            "in a fork"
        );
        session.undo(1).await;
        assert_eq!(
            session.json(code).await,
            json!([true, "", true]),
            "after undo"
        );
        session.reset().await;
        assert_eq!(
            session.json(code).await,
            json!([true, "", true]),
            "after a reset"
        );
        backend.end().await;
        // Control: in the copy of its mount namespace, an interpreter sees the table.
        let backend = Builder::new("minimal")
            .mount(mount)
            .skip_step("chroot")
            .start();
        let told = backend.session().json(code).await;
        assert!(told[1].as_str().unwrap().contains(&name), "{told}");
        backend.end().await;
    });
}

/// Natively only: an engine makes no container without one of its layers for us.
#[test]
fn read_only_mounts_and_landlock_each_hold_alone() {
    run(async {
        // Whether mounts are writable, and which layers are left out.
        let cases: [(bool, &[OmittedLayer], [&str; 3]); 4] = [
            (false, &[], ["EROFS", "ENOENT", "done"]),
            // Landlock alone. Without the mounts' protection the kernel's settings are visible, and
            // still closed.
            (true, &[], ["EACCES", "EACCES", "done"]),
            // Mounts alone.
            (
                false,
                &[OmittedLayer::Landlock],
                ["EROFS", "ENOENT", "done"],
            ),
            // Control: with neither, the folder is open. The settings are closed all the same,
            // because no session is the host's root.
            (true, &[OmittedLayer::Landlock], ["done", "EACCES", "done"]),
        ];
        for (writable, left_out, expected) in cases {
            let (folder, bind) = open_folder();
            let backend = Builder::new("minimal")
                .mounts_writable(writable)
                .leave_out(left_out)
                .bind(bind)
                .start();
            assert_eq!(
                backend.session().json(WRITE).await,
                json!(expected),
                "mounts writable: {writable}, without {left_out:?}"
            );
            assert_eq!(folder.path().join("file").exists(), expected[0] == "done");
            backend.end().await;
        }
        if is_root() {
            // Control: the host's root may open the setting.
            let opened = "import os; os.close(os.open('/proc/sys/kernel/core_pattern', \
                          os.O_WRONLY)); print('done')";
            assert_eq!(native::outside(opened).trim(), "done");
        } else {
            skipped("root (the control that kernel settings can be opened)");
        }
    });
}

#[test]
fn a_layer_that_is_left_out_is_told_as_missing() {
    run(async {
        let backend = Builder::new("minimal")
            .leave_out(&[OmittedLayer::Landlock])
            .start();
        let outcome = backend.session().execute("1").await.unwrap();
        assert_eq!(missing_layers(&outcome), ["landlock"]);
        backend.end().await;
        // Control: with every layer in place nothing is missing.
        let outcome = native::shared().session().execute("1").await.unwrap();
        assert!(missing_layers(&outcome).is_empty());
    });
}

fn missing_layers(outcome: &Outcome) -> Vec<&'static str> {
    let layers = outcome.isolation.layers.iter();
    layers
        .filter(|(_, layer)| matches!(layer, LayerState::Missing { .. }))
        .map(|(kind, _)| kind.name())
        .collect()
}
