//! A package from a repository: the real git, over HTTPS, from the installer's sandbox.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::json;

use super::index::{Index, Manner, Tls, packages};
use crate::support::native::host_python;
use crate::support::server::{Era, MINIMAL, Server, program};
use crate::support::skipped;

/// Has `git http-backend` answer, as a web server with a repository does.
const SERVE: &str = r#"
import http.server, os, ssl, subprocess
class Repository(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        said = {
            "GIT_PROJECT_ROOT": os.getcwd(), "GIT_HTTP_EXPORT_ALL": "1",
            "PATH": os.environ["PATH"], "REMOTE_ADDR": "127.0.0.1",
            "REQUEST_METHOD": self.command, "PATH_INFO": path, "QUERY_STRING": query,
            "CONTENT_LENGTH": str(len(body)),
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
        }
        answer = subprocess.run(
            ["git", "http-backend"], input=body, stdout=subprocess.PIPE, env=said
        ).stdout
        head, _, content = answer.partition(b"\r\n\r\n")
        lines = [line.split(": ", 1) for line in head.decode().split("\r\n")]
        status = next((int(value.split()[0]) for name, value in lines if name == "Status"), 200)
        self.send_response(status)
        for name, value in lines:
            if name != "Status":
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    do_POST = do_GET
    def log_message(self, *arguments): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Repository)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("certificate.pem", "key.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_address[1], flush=True)
server.serve_forever()
"#;

fn has_http_backend() -> bool {
    let place = Command::new("git")
        .arg("--exec-path")
        .output()
        .map(|told| String::from_utf8_lossy(&told.stdout).into_owned());
    place.is_ok_and(|place| Path::new(place.trim()).join("git-http-backend").is_file())
}

/// A folder with the repository `project.git`, whose tag `v1.0` is a package without a wheel.
fn repository(python: &Path) -> tempfile::TempDir {
    let (folder, sources) = (tempfile::tempdir().unwrap(), packages(python));
    let script = "tar -xzf \"$1\" && mv from_source-1.0 project && cd project && git init --quiet \
                  && git add . \
                  && git -c user.name=test -c user.email=test@example.com -c commit.gpgsign=false \
                  commit --quiet -m one && git tag v1.0 \
                  && cd .. && git clone --quiet --bare project project.git && rm -r project";
    let archive = sources.path().join("from-source/from_source-1.0.tar.gz");
    let mut command = Command::new("sh");
    command
        .args(["-c", script, "sh"])
        .arg(archive)
        .current_dir(folder.path())
        .stdin(Stdio::null());
    assert!(
        command.status().unwrap().success(),
        "the repository was made"
    );
    folder
}

#[test]
fn a_package_comes_from_a_repository_on_a_host_that_sessions_may_reach() {
    if !has_http_backend() {
        return skipped("git with its http-backend");
    }
    let python = host_python("minimal");
    let Some(host) = Tls::serve(&python, repository(&python), SERVE) else {
        return skipped("openssl (a certificate)");
    };
    let index = Index::start(&python, Manner::Open);
    let request = json!({"package_name": format!("git+{}@v1.0", host.url("project.git"))});
    for is_allowed in [true, false] {
        let mut command = program();
        command
            .arg("mcp")
            .args(MINIMAL)
            .env_remove("PIP_FIND_LINKS");
        command
            .env("UV_DEFAULT_INDEX", index.url_without_password())
            .env("SSL_CERT_FILE", host.certificate());
        if is_allowed {
            command.args(["--allowed-domain", &host.place()]);
        }
        let server = Server::spawn(&mut command, Era::Initialize);
        server.greet();
        let session = server.session();
        let installed = session.call("install_package", request.clone());
        if is_allowed {
            assert_eq!(installed.text(), "Successfully installed from-source-1.0");
            assert_eq!(
                session.text("import from_source; print(from_source.value)"),
                "7"
            );
        } else {
            assert!(
                installed.is_error() && installed.text().contains("not in the allowed list"),
                "{}",
                installed.text()
            );
        }
    }
}
