//! Secrets: a value that arrives at its host and is nowhere inside.
//!
//! The hosts are HTTPS servers on the loopback interface, with an authority of the test. The canary
//! is looked for from outside, with the rights of the host: the code of a cell must not spell it,
//! or it would be inside by that.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, Write};
use std::net::TcpListener;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cellblock::sandbox::SandboxNetwork;
use cellblock::sandbox::container::ContainerBind;
use cellblock_egress::authority::{Authority, TrustRoots};
use cellblock_egress::gateway::Limits;
use cellblock_egress::secrets::{Secret, Vault};
use cellblock_jail::wire::Bind;
use tempfile::{NamedTempFile, TempDir};

use crate::network::https::{Heard, Https, Signer};
use crate::network::{HERE, Names, Web, blocked, listed};
use crate::support::containers::docker;
use crate::support::native::{
    Builder, Native, Session, control_groups, everything, processes, run,
};
use crate::support::server::{Era, MINIMAL, Server, program};
use crate::support::{is_root, skipped};

/// What must not get inside. In two parts, so that this program has it only where it was put
/// together.
fn canary() -> String {
    ["sk-canary", "0123456789", "abcdef"].join("-")
}

/// Where the inside finds the authorities that it may trust.
const BUNDLE: &str = "/etc/ssl/cellblock.pem";

/// Hosts with and without a secret, and sessions that know the placeholder.
struct Place {
    /// `api.test`, to which the secret belongs.
    api: Https,
    /// `other.test`, which has none.
    other: Https,
    /// `api.test` without TLS.
    plain: Web,
    native: Native,
    placeholder: String,
    /// What the inside sees of the host's files; it marks the processes of this backend.
    _folder: TempDir,
}

impl Place {
    /// `secret` is the end of what the operator writes, behind the host.
    fn new(secret: &str) -> Place {
        let signer = Signer::new();
        Place::trusting(&signer, &signer, secret)
    }

    /// A place whose server is certified by one authority while another one is trusted.
    fn trusting(trusted: &Signer, signer: &Signer, secret: &str) -> Place {
        let Parts {
            api,
            other,
            plain,
            network,
            variables,
            placeholder,
            folder,
            bind,
        } = Parts::new(trusted, signer, secret);
        let native = Builder::new("minimal")
            .variables(variables)
            .bind(bind)
            .network(network)
            .start();
        Place {
            api,
            other,
            plain,
            native,
            placeholder,
            _folder: folder,
        }
    }

    async fn session(&self) -> Session {
        let session = self.native.session();
        session.ok(ASK).await;
        session
    }

    /// A call of `ask` to the host with the secret.
    fn to_api(&self, rest: &str) -> String {
        format!("print(ask('https://api.test:{}/path{rest}", self.api.port())
    }
}

/// What a backend of any kind is made of.
struct Parts {
    api: Https,
    other: Https,
    plain: Web,
    network: SandboxNetwork,
    variables: Vec<(String, String)>,
    placeholder: String,
    folder: TempDir,
    bind: Bind,
}

impl Parts {
    fn new(trusted: &Signer, signer: &Signer, secret: &str) -> Parts {
        let listener = || TcpListener::bind((HERE, 0)).unwrap();
        let echo = |request: &Heard| format!("{}{}", request.head, request.body);
        let api = Https::serve(listener(), signer, &["api.test"], echo);
        let other = Https::serve(listener(), signer, &["other.test"], echo);
        let plain = Web::start();

        let secret = Secret::parse(&format!("TOKEN=env:KEY@api.test{secret}"), |_| {
            Some(canary())
        })
        .unwrap();
        let vault = Vault::new(vec![secret]).unwrap();
        let trust = TrustRoots::system_and(trusted.pem().as_bytes()).unwrap();
        let authority = Authority::new(&vault, trust).unwrap();
        let placeholder = vault.variables()[0].1.clone();
        let variables = [
            vault.variables(),
            vec![("SSL_CERT_FILE".to_owned(), BUNDLE.to_owned())],
        ]
        .concat();
        let (folder, bind) = bundle(&[&authority.certificate_pem(), &trusted.pem()]);
        let rules = listed(&[
            format!("api.test:{},{}", api.port(), plain.port()),
            format!("other.test:{}", other.port()),
            format!("{HERE}:*"),
        ]);
        let network = SandboxNetwork {
            rules,
            ports: BTreeSet::new(),
            vault: Arc::new(vault),
            authority: Some(Arc::new(authority)),
            limits: Limits::default(),
            resolver: Arc::new(Names::default())
                .and("api.test", &[&[HERE]])
                .and("other.test", &[&[HERE]]),
        };
        Parts {
            api,
            other,
            plain,
            network,
            variables,
            placeholder,
            folder,
            bind,
        }
    }
}

/// A file with certificates that is shown inside.
fn bundle(certificates: &[&str]) -> (TempDir, Bind) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bundle.pem");
    fs::write(&file, certificates.join("\n")).unwrap();
    for path in [folder.path(), &file] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let bind = Bind {
        host: file,
        inside: PathBuf::from(BUNDLE),
    };
    (folder, bind)
}

/// Sends a request with the variable in a header, and returns the answer.
const ASK: &str = "
import os, urllib.error, urllib.request
def ask(url, data=None, **headers):
    headers = headers or {'Authorization': 'Bearer ' + os.environ['TOKEN']}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=20)
    except urllib.error.HTTPError as error:
        answer = error
    except OSError as error:
        return f'{type(error).__name__}: {error}'
    return f'{answer.status} {answer.read().decode()}'
";

/// Looks for bytes in all memory of a process that can be read, and tells whether they are there.
fn memory_holds(pid: u32, bytes: &[u8]) -> bool {
    let read = || {
        Some((
            fs::read_to_string(format!("/proc/{pid}/maps")).ok()?,
            File::open(format!("/proc/{pid}/mem")).ok()?,
        ))
    };
    let Some((maps, memory)) = read() else {
        // A process may end while we look; then it holds nothing.
        assert!(
            !Path::new(&format!("/proc/{pid}/root")).exists(),
            "process {pid} can be read"
        );
        return false;
    };
    let region = |line: &str| {
        let mut words = line.split_whitespace();
        let (begin, end) = words.next()?.split_once('-')?;
        let is_readable = words.next()?.starts_with('r');
        let number = |text| u64::from_str_radix(text, 16).ok();
        is_readable.then_some((number(begin)?, number(end)?))
    };
    maps.lines()
        .filter_map(region)
        .any(|(begin, end)| region_holds(&memory, begin, end, bytes))
}

fn region_holds(memory: &File, begin: u64, end: u64, bytes: &[u8]) -> bool {
    const PIECE: usize = 1 << 20;
    let mut piece = vec![0; PIECE + bytes.len()];
    let mut at = begin;
    while at < end {
        // Pieces overlap, so that nothing is cut in two. Some regions belong to the kernel and
        // cannot be read.
        let wanted = piece.len().min((end - at) as usize);
        let Ok(length @ 1..) = memory.read_at(&mut piece[..wanted], at) else {
            return false;
        };
        if holds(&piece[..length], bytes) {
            return true;
        }
        at += length.min(PIECE) as u64;
    }
    false
}

/// By leaps from one hyphen to the next, of which memory has few: both the value and its
/// placeholder have some.
fn holds(text: &[u8], bytes: &[u8]) -> bool {
    let before = bytes
        .iter()
        .position(|byte| *byte == b'-')
        .expect("what is looked for has a hyphen");
    let mut at = 0;
    while at < text.len() {
        at += (&text[at..])
            .skip_until(b'-')
            .expect("reading from memory does not fail");
        if at > before && text[at - 1 - before..].starts_with(bytes) {
            return true;
        }
    }
    false
}

/// The processes below these that hold the bytes in their memory, by name.
fn holders(pids: &[u32], bytes: &str) -> Vec<String> {
    let name = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm"))
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    pids.iter()
        .filter(|pid| memory_holds(**pid, bytes.as_bytes()))
        .map(name)
        .collect()
}

/// The files inside that hold the bytes, as the interpreter `pid` sees them.
fn files_with(pid: u32, bytes: &str) -> Vec<PathBuf> {
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = [
        "etc",
        "tmp",
        "work",
        "dev/shm",
        "opt/cellblock/runner",
        "var",
        "run",
        "home",
    ]
    .map(|name| root.join(name))
    .to_vec();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(path),
                Ok(kind)
                    if kind.is_file()
                        && fs::read(&path).is_ok_and(|text| holds(&text, bytes.as_bytes())) =>
                {
                    found.push(path.strip_prefix(&root).unwrap().to_owned());
                }
                _ => {}
            }
        }
    }
    found
}

/// Every process in the control groups of a session: what runs in it, its first process, and the
/// copies that are kept of it.
fn members(interpreter: u32) -> Vec<u32> {
    let groups = control_groups(interpreter);
    // Copies are in a group beside that of the session, below the same family.
    let families = groups.iter().filter_map(|group| group.parent());
    let below = families.flat_map(|family| {
        fs::read_dir(family)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
    });
    let folders: BTreeSet<PathBuf> = groups.iter().cloned().chain(below).collect();
    let lists = folders
        .iter()
        .filter_map(|folder| fs::read_to_string(folder.join("cgroup.procs")).ok());
    let numbers: BTreeSet<u32> = lists
        .flat_map(|list| {
            list.lines()
                .filter_map(|line| line.parse().ok())
                .collect::<Vec<u32>>()
        })
        .collect();
    numbers.into_iter().collect()
}

#[test]
fn the_value_arrives_in_the_header_and_its_echo_is_masked() {
    run(async {
        let place = Place::new("");
        let session = place.session().await;
        let outcome = session.execute(&place.to_api("'))")).await.unwrap();
        assert_eq!(
            place.api.last().header("authorization"),
            Some(format!("Bearer {}", canary()).as_str())
        );
        // The server said all that it had heard.
        let text = everything(&outcome);
        assert!(
            text.starts_with("200 GET /path") && text.contains(&place.placeholder),
            "{text}"
        );
        assert!(!text.contains(&canary()), "{text}");
        assert!(blocked(&outcome).is_empty());
        place.native.end().await;
    });
}

#[test]
fn the_value_arrives_from_a_container_that_has_never_seen_it() {
    run(async {
        let signer = Signer::new();
        let Some(engine) = docker() else { return };
        let parts = Parts::new(&signer, &signer, "");
        let file = ContainerBind {
            host: parts.bind.host,
            inside: parts.bind.inside,
            writable: false,
        };
        let backend = engine
            .build()
            .variables(parts.variables)
            .network(parts.network, &[file])
            .start();
        let session = backend.session();
        session.ok(ASK).await;
        let answer = session
            .ok(&format!(
                "print(ask('https://api.test:{}/path'))",
                parts.api.port()
            ))
            .await;
        assert_eq!(
            parts.api.last().header("authorization"),
            Some(format!("Bearer {}", canary()).as_str()),
            "{answer}"
        );
        assert!(
            answer.starts_with("200 ")
                && answer.contains(&parts.placeholder)
                && !answer.contains(&canary()),
            "{answer}"
        );
        // Nor to a host that has no secret.
        session
            .ok(&format!(
                "print(ask('https://other.test:{}/path'))",
                parts.other.port()
            ))
            .await;
        assert_eq!(
            parts.other.last().header("authorization"),
            Some(format!("Bearer {}", parts.placeholder).as_str())
        );
        let seen = session
            .ok("print(os.environ, open(os.environ['SSL_CERT_FILE']).read())")
            .await;
        assert!(
            seen.contains("BEGIN CERTIFICATE")
                && !seen.contains(&canary())
                && !seen.contains("PRIVATE"),
            "{seen}"
        );
        backend.end().await;
    });
}

#[test]
fn the_value_arrives_wherever_a_program_may_put_it() {
    run(async {
        let place = Place::new("");
        let session = place.session().await;
        session
            .ok("import base64\ntoken = os.environ['TOKEN']\nbasic = \
                    base64.b64encode(f'user:{token}'.encode()).decode()")
            .await;
        let form =
            "data=f'key={token}'.encode(), **{'Content-Type': 'application/x-www-form-urlencoded'}";
        let ways = [
            ("query", place.to_api("?key=' + token, **{'X': 'y'}))")),
            ("header", place.to_api("', **{'X-Api-Key': token}))")),
            ("form", place.to_api(&format!("', {form}))"))),
        ];
        for (way, code) in &ways {
            let answer = session.ok(code).await;
            let heard = place.api.last();
            let whole = format!("{}{}", heard.head, heard.body);
            assert!(
                whole.contains(&canary()) && !whole.contains(&place.placeholder),
                "{way}: {whole}"
            );
            assert!(
                answer.contains(&place.placeholder) && !answer.contains(&canary()),
                "{way}: {answer}"
            );
        }
        // As programs spell a password.
        let answer = session
            .ok(&place.to_api("', Authorization='Basic ' + basic))"))
            .await;
        let heard = place.api.last();
        let spelled = heard
            .header("authorization")
            .unwrap()
            .trim_start_matches("Basic ");
        assert_eq!(base64_of(&format!("user:{}", canary())), spelled);
        assert!(!answer.contains(spelled), "{answer}");
        place.native.end().await;
    });
}

fn base64_of(text: &str) -> String {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.encode(text)
}

#[test]
fn a_secret_for_one_header_is_put_into_no_other() {
    run(async {
        let place = Place::new(":Authorization");
        let session = place.session().await;
        session.ok(&place.to_api("'))")).await;
        assert_eq!(
            place.api.last().header("authorization"),
            Some(format!("Bearer {}", canary()).as_str())
        ); // control
        session
            .execute(
                &place
                    .to_api("?key=' + os.environ['TOKEN'], **{'X-Api-Key': os.environ['TOKEN']}))"),
            )
            .await
            .unwrap();
        let heard = place.api.last();
        assert_eq!(heard.header("x-api-key"), Some(place.placeholder.as_str()));
        assert!(!heard.head.contains(&canary()), "{}", heard.head);
        place.native.end().await;
    });
}

#[test]
fn other_hosts_and_plain_http_get_the_placeholder_only() {
    run(async {
        let place = Place::new("");
        let session = place.session().await;
        session.ok(&place.to_api("'))")).await;
        assert_eq!(
            place.api.last().header("authorization"),
            Some(format!("Bearer {}", canary()).as_str())
        ); // control
        let bearer = format!("Bearer {}", place.placeholder);
        let other = session
            .ok(&format!(
                "print(ask('https://other.test:{}/'))",
                place.other.port()
            ))
            .await;
        assert!(other.starts_with("200 "), "{other}");
        assert_eq!(
            place.other.last().header("authorization"),
            Some(bearer.as_str())
        );
        let plain = session
            .ok(&format!(
                "print(ask('http://api.test:{}/'))",
                place.plain.port()
            ))
            .await;
        assert_eq!(plain, "200 hello\n");
        let heard = place.plain.heard().join("\n");
        assert!(
            heard.contains(&bearer) && !heard.contains(&canary()),
            "{heard}"
        );
        place.native.end().await;
    });
}

#[test]
fn a_request_for_another_host_on_the_connection_of_a_secret_does_not_pass() {
    run(async {
        let place = Place::new("");
        let session = place.session().await;
        let token = "**{'Authorization': os.environ['TOKEN'], 'Host': ";
        let right = format!("'api.test:{}'}}))", place.api.port());
        assert!(
            session
                .ok(&place.to_api(&format!("', {token}{right}")))
                .await
                .starts_with("200 ")
        ); // control
        let count = place.api.heard().len();
        let answer = session
            .ok(&place.to_api(&format!("', {token}'other.test'}}))")))
            .await;
        assert!(answer.starts_with("403 "), "{answer}");
        assert_eq!(place.api.heard().len(), count);
        place.native.end().await;
    });
}

#[test]
fn a_host_that_cannot_prove_its_name_never_hears_the_value() {
    run(async {
        let (trusted, stranger) = (Signer::new(), Signer::new());
        for (signer, start, requests) in [(&trusted, "200 ", 1), (&stranger, "502 ", 0)] {
            let place = Place::trusting(&trusted, signer, "");
            let session = place.session().await;
            let answer = session.ok(&place.to_api("'))")).await;
            assert!(answer.starts_with(start), "{answer}");
            assert_eq!(place.api.heard().len(), requests);
            place.native.end().await;
        }
    });
}

#[test]
fn the_value_is_nowhere_inside_and_the_placeholder_is() {
    run(async {
        if !is_root() {
            return skipped("root (the memory of all processes of a session)");
        }
        let place = Place::new("");
        let session = place.session().await;
        // Everything that could bring it in: requests, echoes, a copy of the session, a child that
        // lives on.
        session.ok(&place.to_api("'))")).await;
        session
            .ok("import subprocess, sys\nopen('/tmp/kept', \
                    'w').write(os.environ['TOKEN'])\nchild = subprocess.Popen([sys.executable, \
                    '-c', 'import os; os.environ[\"TOKEN\"]; input()'], \
                    stdin=subprocess.PIPE)")
            .await;
        let fork = session.fork().await;
        fork.ok(&place.to_api("'))")).await;
        let answer = session
            .ok("import json; print(json.dumps(dict(os.environ)), \
                        open('/proc/self/environ').read())")
            .await;
        assert!(answer.contains(&place.placeholder) && !answer.contains(&canary()));
        assert_eq!(
            place
                .api
                .heard()
                .iter()
                .filter(|heard| heard.head.contains(&canary()))
                .count(),
            2
        ); // control

        for session in [&session, &fork] {
            let interpreter = session.host_pid().await;
            session.settle().await;
            let all = members(interpreter);
            let with_placeholder = holders(&all, &place.placeholder);
            assert!(
                with_placeholder
                    .iter()
                    .any(|name| name.starts_with("python")),
                "{with_placeholder:?}"
            ); // control
            assert!(
                with_placeholder.iter().any(|name| name == "cb-twin"),
                "{with_placeholder:?}"
            ); // control
            assert_eq!(holders(&all, &canary()), Vec::<String>::new());
            let files = files_with(interpreter, &place.placeholder);
            assert!(files.contains(&PathBuf::from("tmp/kept")), "{files:?}"); // control
            assert_eq!(files_with(interpreter, &canary()), Vec::<PathBuf>::new());
        }
        place.native.end().await;
    });
}

#[test]
fn forks_undone_and_reset_sessions_keep_their_secret() {
    run(async {
        let place = Place::new("");
        let session = place.session().await;
        let ask = place.to_api("'))");
        let arrives = async |session: &Session| {
            let before = place.api.heard().len();
            let answer = session.ok(&ask).await;
            let heard = &place.api.heard()[before..];
            heard.len() == 1
                && heard[0].head.contains(&canary())
                && answer.contains(&place.placeholder)
        };
        assert!(arrives(&session).await); // control
        let fork = session.fork().await;
        assert!(arrives(&fork).await);
        fork.ok("os.environ['TOKEN'] = 'nonsense'").await;
        assert!(!arrives(&fork).await); // control
        fork.undo(2).await;
        assert!(arrives(&fork).await);
        session.reset().await;
        session.ok(ASK).await;
        assert!(arrives(&session).await);
        place.native.end().await;
    });
}

/// All processes that descend from one.
fn descendants(ancestor: u32) -> Vec<u32> {
    let parent = |pid: u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        status
            .lines()
            .find_map(|line| line.strip_prefix("PPid:"))?
            .trim()
            .parse::<u32>()
            .ok()
    };
    let is_below = |pid: u32| {
        std::iter::successors(parent(pid), |above| parent(*above)).any(|above| above == ancestor)
    };
    processes()
        .into_iter()
        .map(|process| process.pid)
        .filter(|pid| is_below(*pid))
        .collect()
}

#[test]
fn the_built_program_keeps_a_secret_from_its_sandboxes_and_from_its_log() {
    let signer = Signer::new();
    let echo = |request: &Heard| request.head.clone();
    let api = Https::serve(
        TcpListener::bind((HERE, 0)).unwrap(),
        &signer,
        &["api.localhost"],
        echo,
    );
    let mut authorities = NamedTempFile::new().unwrap();
    authorities.write_all(signer.pem().as_bytes()).unwrap();
    let port = api.port();
    let mut command = program();
    command.arg("mcp").args(MINIMAL).args([
        "--secret",
        "TOKEN=env:KEY_OF_THE_OPERATOR@api.localhost",
        "--log-level",
        "trace",
    ]);
    for rule in [
        format!("api.localhost:{port}"),
        format!("127.0.0.1:{port}"),
        format!("[::1]:{port}"),
    ] {
        command.args(["--allowed-domain", &rule]);
    }
    // The authorities of the system, as far as the server is concerned.
    command
        .env("KEY_OF_THE_OPERATOR", canary())
        .env("SSL_CERT_FILE", authorities.path());
    let server = Server::spawn(&mut command, Era::Initialize);
    server.greet();
    let session = server.session();
    session.text(ASK);

    let answer = session.text(&format!("print(ask('https://api.localhost:{port}/'))"));
    assert_eq!(
        api.last().header("authorization"),
        Some(format!("Bearer {}", canary()).as_str())
    );
    let placeholder = session
        .text("os.environ['TOKEN']")
        .trim_matches('\'')
        .to_owned();
    assert!(placeholder.starts_with("cellblock-TOKEN-"), "{placeholder}");
    assert!(
        answer.contains(&placeholder) && !answer.contains(&canary()),
        "{answer}"
    );
    let seen = session.text("print(sorted(os.environ.items()), open('/proc/self/environ').read())");
    assert!(!seen.contains("KEY_OF_THE_OPERATOR"), "{seen}");
    if is_root() {
        let below = descendants(server.process_id());
        let with_placeholder = holders(&below, &placeholder);
        assert!(
            with_placeholder
                .iter()
                .any(|name| name.starts_with("python")),
            "{with_placeholder:?}"
        ); // control
        // Control: the search finds it where it is.
        assert!(memory_holds(server.process_id(), canary().as_bytes()));
        assert_eq!(holders(&below, &canary()), Vec::<String>::new());
    } else {
        skipped("root (the memory of all processes of a session)");
    }
    drop(session);
    let log = server.finish();
    assert!(log.lines().count() > 10, "control: there is a log: {log}");
    assert!(!log.contains(&canary()), "{log}");
}

/// The control of every search above.
#[test]
fn the_search_finds_what_is_there() {
    let text = canary();
    assert!(memory_holds(std::process::id(), text.as_bytes()));
    for (text, found) in [
        ("a-b", true),
        ("--aa-b-", true),
        ("a-ca-b", true),
        ("a-", false),
        ("-b", false),
        ("", false),
    ] {
        assert_eq!(holds(text.as_bytes(), b"a-b"), found, "{text}");
    }
}
