//! Engines that are reached over TCP, TLS and SSH, and by contexts, with the built program and the
//! engine's own listener or the system's own `sshd`.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};

use super::engine::socket;
use crate::support::containers::{self, IMAGE};
use crate::support::daemon::{Daemon, free_port};
use crate::support::server::{finished, program_below};
use crate::support::{data_folder, skipped};

/// Runs a cell with these variables and none of whoever runs the tests.
fn run(variables: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let mut command = program_below(&data_folder());
    for name in [
        "DOCKER_HOST",
        "DOCKER_CONTEXT",
        "DOCKER_CONFIG",
        "DOCKER_TLS_VERIFY",
        "DOCKER_CERT_PATH",
    ] {
        command.env_remove(name);
    }
    command.args([
        "run",
        "-c",
        "print(6 * 7)",
        "--backend",
        "docker",
        "--container-tag",
        IMAGE,
    ]);
    finished(command.envs(variables.iter().copied()))
}

#[track_caller]
fn runs(variables: &[(&str, &str)]) {
    let (status, output, errors) = run(variables);
    assert_eq!((status, output.as_str()), (Some(0), "42\n"), "{errors}");
}

#[track_caller]
fn is_refused(variables: &[(&str, &str)], words: &[&str]) {
    let (status, output, errors) = run(variables);
    assert_ne!(status, Some(0), "{output}");
    for word in words {
        assert!(errors.contains(word), "{word:?} is not in {errors}");
    }
}

/// Passes connections on to the engine's socket, as an engine that listens on TCP does.
fn forwarded(socket: &Path) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let socket = socket.to_owned();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let engine = UnixStream::connect(&socket).unwrap();
            let (mut from_client, mut to_engine) =
                (client.try_clone().unwrap(), engine.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from_client, &mut to_engine);
                let _ = to_engine.shutdown(std::net::Shutdown::Write);
            });
            let (mut from_engine, mut to_client) = (engine, client);
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from_engine, &mut to_client);
                let _ = to_client.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    address
}

#[test]
fn an_engine_is_used_over_tcp_and_found_by_its_context() {
    let Some(engine) = containers::docker() else {
        return;
    };
    let address = forwarded(socket(engine));
    runs(&[("DOCKER_HOST", &address)]);
    let nobody = format!("tcp://127.0.0.1:{}", free_port());
    is_refused(
        &[("DOCKER_HOST", &nobody)],
        &["Docker cannot be reached at", &nobody, "DOCKER_HOST"],
    );

    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().to_string_lossy().into_owned();
    let docker = |arguments: &[&str]| {
        let mut command = Command::new("docker");
        let done = command
            .args(arguments)
            .env("DOCKER_CONFIG", &config)
            .env_remove("DOCKER_HOST")
            .output()
            .unwrap();
        assert!(
            done.status.success(),
            "{}",
            String::from_utf8_lossy(&done.stderr)
        );
    };
    docker(&[
        "context",
        "create",
        "there",
        "--docker",
        &format!("host={}", engine.address),
    ]);
    docker(&[
        "context",
        "create",
        "nowhere",
        "--docker",
        "host=unix:///nowhere.sock",
    ]);
    docker(&["context", "use", "there"]);
    runs(&[("DOCKER_CONFIG", &config)]);
    is_refused(
        &[("DOCKER_CONFIG", &config), ("DOCKER_CONTEXT", "nowhere")],
        &["unix:///nowhere.sock"],
    );
    is_refused(
        &[("DOCKER_CONFIG", &config), ("DOCKER_CONTEXT", "unknown")],
        &["no context \"unknown\""],
    );
}

/// Writes `ca.pem`, and a pair of certificate and key that it has signed.
fn write_certificates(
    folder: &Path,
    issuer: &CertifiedIssuer<'static, KeyPair>,
    usage: ExtendedKeyUsagePurpose,
) {
    fs::create_dir_all(folder).unwrap();
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    let certificate = params.signed_by(&key, issuer).unwrap();
    fs::write(folder.join("ca.pem"), issuer.pem()).unwrap();
    fs::write(folder.join("cert.pem"), certificate.pem()).unwrap();
    fs::write(folder.join("key.pem"), key.serialize_pem()).unwrap();
}

fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

#[test]
fn an_engine_is_used_over_tls_if_both_sides_know_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, other) = (
        authority("the authority of an engine"),
        authority("another authority"),
    );
    let below = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    write_certificates(
        &folder.path().join("server"),
        &ours,
        ExtendedKeyUsagePurpose::ServerAuth,
    );
    write_certificates(
        &folder.path().join("client"),
        &ours,
        ExtendedKeyUsagePurpose::ClientAuth,
    );
    write_certificates(
        &folder.path().join("stranger"),
        &other,
        ExtendedKeyUsagePurpose::ClientAuth,
    );
    let host = format!("tcp://127.0.0.1:{}", free_port());
    let (ca, cert, key) = (
        below("server/ca.pem"),
        below("server/cert.pem"),
        below("server/key.pem"),
    );
    let tls = [
        "-H",
        &host,
        "--tlsverify",
        "--tlscacert",
        &ca,
        "--tlscert",
        &cert,
        "--tlskey",
        &key,
    ];
    let Some(_daemon) = Daemon::docker(&tls) else {
        return;
    };

    let with = |certificates: &str| [host.clone(), "1".to_owned(), below(certificates)];
    let names = ["DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"];
    let variables = |values: &[String; 3]| -> Vec<(&str, String)> {
        names.into_iter().zip(values.clone()).collect()
    };
    let check = |certificates: &str, words: Option<&[&str]>| {
        let mut values = variables(&with(certificates));
        // What this system trusts is of no interest: not everybody who has a certificate of such an
        // authority is the engine.
        values.extend(words.map(|_| ("SSL_CERT_FILE", below("client/ca.pem"))));
        let values: Vec<(&str, &str)> = values
            .iter()
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        match words {
            None => runs(&values),
            Some(words) => is_refused(&values, words),
        }
    };
    check("client", None);
    check(
        "stranger",
        Some(&[
            "Docker cannot be reached at",
            "certificate",
            "UnknownIssuer",
        ]),
    );
    check("nowhere", Some(&["Docker cannot be reached at", "nowhere"]));
    // The engine does not take those of a stranger, although we know the engine.
    fs::copy(below("client/ca.pem"), below("stranger/ca.pem")).unwrap();
    check("stranger", Some(&["Docker cannot be reached at"]));

    let config = below("config");
    let endpoint = format!(
        "host={host},ca={},cert={},key={}",
        below("client/ca.pem"),
        below("client/cert.pem"),
        below("client/key.pem")
    );
    let mut command = Command::new("docker");
    command
        .args(["context", "create", "safe", "--docker", &endpoint])
        .env("DOCKER_CONFIG", &config);
    assert!(
        command
            .env_remove("DOCKER_HOST")
            .output()
            .unwrap()
            .status
            .success()
    );
    runs(&[("DOCKER_CONFIG", &config), ("DOCKER_CONTEXT", "safe")]);
}

/// An `sshd` of one test, and an `ssh` that knows it.
struct Sshd {
    port: u16,
    process: Child,
    folder: tempfile::TempDir,
}

impl Sshd {
    fn start() -> Option<Sshd> {
        let program = ["/usr/sbin/sshd", "/usr/local/sbin/sshd"]
            .into_iter()
            .find(|path| Path::new(path).exists())?;
        // Where it sends its unprivileged half, on every system.
        fs::create_dir_all("/run/sshd").ok()?;
        let folder = tempfile::tempdir().unwrap();
        let below = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
        for key in ["host", "client"] {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f", &below(key)])
                .status();
            assert!(made.ok()?.success());
        }
        let port = free_port();
        let public = |key: &str| fs::read_to_string(below(&format!("{key}.pub"))).unwrap();
        fs::write(below("authorized"), public("client")).unwrap();
        let host_key: String = public("host")
            .split(' ')
            .take(2)
            .collect::<Vec<_>>()
            .join(" ");
        fs::write(below("known"), format!("[127.0.0.1]:{port} {host_key}\n")).unwrap();
        fs::write(below("unknown"), "").unwrap();
        let path = std::env::var("PATH").unwrap();
        let settings = format!(
            "ListenAddress 127.0.0.1\nPort {port}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile \
             none\nUsePAM no\nStrictModes no\n\
             PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin \
             yes\nSetEnv PATH={path}\n",
            below("host"),
            below("authorized")
        );
        fs::write(below("sshd_config"), settings).unwrap();
        let log = fs::File::create(below("log")).unwrap();
        let mut command = Command::new("setpriv");
        command.args([
            "--pdeathsig",
            "TERM",
            "--",
            program,
            "-D",
            "-e",
            "-f",
            &below("sshd_config"),
        ]);
        let process = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(
                Instant::now() < deadline,
                "{}",
                fs::read_to_string(below("log")).unwrap_or_default()
            );
            std::thread::yield_now();
        }
        Some(Sshd {
            port,
            process,
            folder,
        })
    }

    /// Returns a PATH whose `ssh` has the settings of this test, and knows these hosts.
    fn path(&self, known: &str) -> String {
        let below = |name: &str| self.folder.path().join(name).to_string_lossy().into_owned();
        let settings = format!(
            "Host *\n  IdentityFile {}\n  IdentitiesOnly yes\n  UserKnownHostsFile {}\n  \
             GlobalKnownHostsFile none\n",
            below("client"),
            below(known)
        );
        let (programs, file) = (
            below(&format!("bin-{known}")),
            below(&format!("ssh_config-{known}")),
        );
        fs::write(&file, settings).unwrap();
        fs::create_dir_all(&programs).unwrap();
        let script = format!("{programs}/ssh");
        fs::write(
            &script,
            format!("#!/bin/sh\nexec /usr/bin/ssh -F {file} \"$@\"\n"),
        )
        .unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        format!("{programs}:{}", std::env::var("PATH").unwrap())
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn an_engine_is_used_over_ssh_and_what_ssh_says_is_told() {
    let Some(engine) = containers::docker() else {
        return;
    };
    let Some(sshd) = Sshd::start() else {
        return skipped("sshd (package openssh-server)");
    };
    let address = format!("ssh://127.0.0.1:{}{}", sshd.port, socket(engine).display());
    let path = sshd.path("known");
    runs(&[("DOCKER_HOST", &address), ("PATH", &path)]);

    let stranger = sshd.path("unknown");
    let words = [
        "Docker cannot be reached at",
        "ssh says: Host key verification failed.",
    ];
    is_refused(&[("DOCKER_HOST", &address), ("PATH", &stranger)], &words);
    let elsewhere = format!("ssh://127.0.0.1:{}/nowhere.sock", sshd.port);
    is_refused(
        &[("DOCKER_HOST", &elsewhere), ("PATH", &path)],
        &["ssh says: ", "nowhere.sock"],
    );
    is_refused(
        &[("DOCKER_HOST", "ssh://-oProxyCommand=x"), ("PATH", &path)],
        &["it is not of the form ssh://"],
    );
}
