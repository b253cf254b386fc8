//! A package index on loopback, with packages that `make_index.py` makes.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use base64::Engine;
use cellblock::packages::{IndexSettings, IndexUrl, Proxies};
use sha2::{Digest, Sha256};

/// What an index with a password asks for.
pub(crate) const PASSWORD: &str = "hunter-2-and-more";
const USER: &str = "someone";

/// Whether an index lets everybody in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    Open,
    Password,
}

/// An index that is served until the test ends.
pub(crate) struct Index {
    port: u16,
    manner: Manner,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Index {
    pub(crate) fn start(python: &Path, manner: Manner) -> Index {
        let folder = packages(python);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        // The threads end with the test process; each connection carries one request.
        std::thread::spawn(move || {
            let folder = Arc::new(folder);
            for connection in listener.incoming().flatten() {
                let (folder, seen) = (Arc::clone(&folder), Arc::clone(&seen));
                std::thread::spawn(move || serve(connection, folder.path(), manner, &seen));
            }
        });
        Index {
            port,
            manner,
            requests,
        }
    }

    pub(crate) fn settings(&self) -> IndexSettings {
        let url = match self.manner {
            Manner::Open => self.url_without_password(),
            Manner::Password => format!("http://{USER}:{PASSWORD}@127.0.0.1:{}/simple", self.port),
        };
        IndexSettings {
            index_url: IndexUrl::parse(&url).unwrap(),
            extra_index_urls: Vec::new(),
            file_hosts: Vec::new(),
            trusted_hosts: Vec::new(),
            ca_file: None,
            proxies: Proxies::default(),
        }
    }

    /// Address and port.
    pub(crate) fn place(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) fn url_without_password(&self) -> String {
        format!("http://127.0.0.1:{}/simple", self.port)
    }

    /// Paths that were asked for, in order.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }

    pub(crate) fn forget_requests(&self) {
        self.requests.lock().unwrap().clear();
    }
}

/// Makes the packages.
pub(super) fn packages(python: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/packages/make_index.py");
    let made = Command::new(python)
        .args(["-I", script])
        .arg(folder.path())
        .status()
        .unwrap();
    assert!(made.success(), "the packages were made");
    folder
}

fn serve(mut connection: TcpStream, folder: &Path, manner: Manner, seen: &Mutex<Vec<String>>) {
    let mut lines = BufReader::new(connection.try_clone().unwrap())
        .lines()
        .map_while(Result::ok);
    let Some(path) = lines
        .next()
        .and_then(|line| Some(line.split(' ').nth(1)?.to_owned()))
    else {
        return;
    };
    let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    seen.lock().unwrap().push(path.clone());
    let pass = base64::engine::general_purpose::STANDARD.encode(format!("{USER}:{PASSWORD}"));
    let knows = headers
        .iter()
        .any(|line| line.to_lowercase().starts_with("authorization:") && line.ends_with(&pass));
    let (status, kind, body) = match answer(folder, &path) {
        _ if manner == Manner::Password && !knows => ("401 Unauthorized", "text/plain", Vec::new()),
        Some((kind, body)) => ("200 OK", kind, body),
        None => ("404 Not Found", "text/plain", Vec::new()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nWWW-Authenticate: \
         Basic realm=\"x\"\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    let _ = connection
        .write_all(head.as_bytes())
        .and_then(|()| connection.write_all(&body));
}

/// A project's page, or a file.
fn answer(folder: &Path, path: &str) -> Option<(&'static str, Vec<u8>)> {
    let path = path.strip_prefix("/simple/")?;
    let place = folder.join(path.trim_end_matches('/'));
    if place.is_file() {
        return Some(("application/octet-stream", fs::read(place).ok()?));
    }
    let mut page = String::new();
    for entry in fs::read_dir(place).ok()?.flatten() {
        let name = entry.file_name().into_string().ok()?;
        let content = if name.starts_with("exchanged") {
            b"another file".to_vec()
        } else {
            fs::read(entry.path()).ok()?
        };
        let hash: String = Sha256::digest(content)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        page.push_str(&format!(
            "<a href=\"/simple/{path}{name}#sha256={hash}\">{name}</a>\n"
        ));
    }
    Some(("text/html", page.into_bytes()))
}

/// A web server behind TLS, with a certificate that only this test knows.
pub(crate) struct Tls {
    server: Child,
    folder: tempfile::TempDir,
    port: u16,
}

const SERVE: &str = r#"
import http.server, ssl, sys
class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("certificate.pem", "key.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_address[1], flush=True)
server.serve_forever()
"#;

impl Tls {
    /// Serves the packages as plain files. Returns `None` where no certificate can be made.
    pub(crate) fn start(python: &Path) -> Option<Tls> {
        Tls::serve(python, packages(python), SERVE)
    }

    /// Serves a folder by a program that prints its port, with `certificate.pem` and `key.pem` in
    /// there.
    pub(crate) fn serve(python: &Path, folder: tempfile::TempDir, program: &str) -> Option<Tls> {
        let options = [
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ];
        let names = [
            "-subj",
            "/CN=test",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
        ];
        let files = ["-keyout", "key.pem", "-out", "certificate.pem"];
        let made = Command::new("openssl")
            .args(options)
            .args(names)
            .args(files)
            .current_dir(folder.path())
            .stderr(Stdio::null())
            .status();
        if !made.is_ok_and(|status| status.success()) {
            return None;
        }
        let mut server = Command::new(python)
            .args(["-I", "-c", program])
            .current_dir(folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.take().unwrap().take(20))
            .read_line(&mut line)
            .unwrap();
        Some(Tls {
            server,
            folder,
            port: line.trim().parse().expect("the server names its port"),
        })
    }

    /// Address and port.
    pub(crate) fn place(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("https://127.0.0.1:{}/{path}", self.port)
    }

    pub(crate) fn certificate(&self) -> PathBuf {
        self.folder.path().join("certificate.pem")
    }
}

impl Drop for Tls {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
