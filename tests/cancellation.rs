//! What interrupts a cell, and what does not, with the built program, with and without a daemon.
//!
//! A cancelled request interrupts its cell, on every transport. A connection that ends is a
//! cancellation where the protocol says so: over stdio, and over HTTP since 2026-07-28. For older
//! clients over HTTP it is not: the cell goes on, and its result can be collected.

use serde_json::{Value, json};

use crate::http::client::{Raw, begin_legacy, initialize, legacy};
use crate::stdio::control::Flag;
use crate::support::server::{Era, MINIMAL, Server};
use crate::support::service::{SESSIONS_INSIDE, SESSIONS_KEPT, Service, SessionDaemon};

const CALLERS: &[(&str, &[&str])] = &[("alice", &["python:execute"])];

/// A folder that sessions share, and the flags of a server that uses it.
struct Workspace {
    folder: tempfile::TempDir,
    begun: Flag,
    go: Flag,
}

impl Workspace {
    fn new() -> Workspace {
        let folder = tempfile::tempdir().unwrap();
        let (begun, go) = ["begun", "go"]
            .map(|name| Flag::new(folder.path(), name))
            .into();
        Workspace { folder, begun, go }
    }

    fn flags<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        let place = self.folder.path().to_str().unwrap();
        [&["--workspace", place], more].concat()
    }

    /// A cell that says that it has begun, and ends when it is let go.
    fn cell(&self) -> Value {
        let code = format!(
            "x = 'begun'\n{}\n{}\nx = 'survived'\nx",
            self.begun.raise(),
            self.go.await_inside()
        );
        json!({"code": code, "session_id": "a"})
    }
}

fn stdio_server(workspace: &Workspace, daemon: &SessionDaemon, era: Era, flags: &[&str]) -> Server {
    let flags = [MINIMAL, &["--daemon-name", daemon.name()], flags].concat();
    Server::start_in(era, &workspace.flags(&flags))
}

fn check_cancelled_over_stdio(flags: &[&str]) {
    for era in Era::BOTH {
        let (daemon, workspace) = (SessionDaemon::new(), Workspace::new());
        let server = stdio_server(&workspace, &daemon, era, flags);
        let running = server.begin("execute_ipython_cell", workspace.cell());
        workspace.begun.wait();
        running.cancel();
        // The next cell is served only when the cancelled one has ended.
        let next = server.call(
            "execute_ipython_cell",
            json!({"code": "x", "session_id": "a"}),
        );
        assert_eq!(next.text(), "'begun'");
        assert!(!running.is_answered(), "a cancelled request has no answer");
    }
}

#[test]
fn a_request_that_is_cancelled_over_stdio_is_interrupted() {
    check_cancelled_over_stdio(SESSIONS_INSIDE);
}

#[test]
fn a_request_that_is_cancelled_over_stdio_is_interrupted_with_a_daemon() {
    check_cancelled_over_stdio(SESSIONS_KEPT);
}

/// Without a daemon the session ends with the server, see `leaks`.
#[test]
fn a_client_that_leaves_over_stdio_has_its_cell_interrupted_and_its_session_stays() {
    let (daemon, workspace) = (SessionDaemon::new(), Workspace::new());
    let start = || stdio_server(&workspace, &daemon, Era::Initialize, SESSIONS_KEPT);
    let server = start();
    drop(server.begin("execute_ipython_cell", workspace.cell()));
    workspace.begun.wait();
    server.close_input();
    assert!(server.ended().success());
    let next = start();
    let told = next.call("check_execution", json!({"session_id": "a", "wait": 30}));
    assert_eq!(told.status(), "cancelled", "{}", told.text());
    let after = next.call(
        "execute_ipython_cell",
        json!({"code": "x", "session_id": "a"}),
    );
    assert_eq!(after.text(), "'begun'");
}

/// A service, its only caller, and what its sessions share.
struct Scene {
    service: Service,
    workspace: Workspace,
    // Its configuration is there until it has ended.
    _folder: tempfile::TempDir,
}

impl Scene {
    fn new(flags: &[&str]) -> Scene {
        let (folder, workspace) = (tempfile::tempdir().unwrap(), Workspace::new());
        let service = Service::with_keys(folder.path(), CALLERS, &workspace.flags(flags));
        Scene {
            service,
            workspace,
            _folder: folder,
        }
    }

    async fn result(&self, tool: &str, arguments: Value) -> Value {
        let mut alice = Raw::with_key(&self.service, "alice").await;
        alice.result(tool, arguments).await
    }

    /// How the cell that was begun last goes on.
    async fn check(&self, wait: u32) -> Value {
        let arguments = json!({"session_id": "a", "wait": wait});
        self.result("check_execution", arguments).await["structuredContent"].take()
    }

    /// The value of a variable, once the session is free.
    async fn value(&self, name: &str) -> Value {
        let cell = json!({"code": name, "session_id": "a"});
        self.result("execute_ipython_cell", cell).await["structuredContent"]["text"].take()
    }

    /// Opens a connection as older clients do, and returns the lines by which requests name it.
    async fn older_connection(&self) -> String {
        let (status, said) = legacy(&self.service, "alice", "POST", "", &initialize()).await;
        assert_eq!(status, 200, "{said}");
        let id = said
            .lines()
            .find_map(|line| line.strip_prefix("mcp-session-id: "))
            .expect("it has a name");
        let lines = format!("mcp-session-id: {id}\r\nmcp-protocol-version: 2025-11-25\r\n");
        let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        self.tell(&lines, ready).await;
        lines
    }

    /// Sends a notification of an older client.
    async fn tell(&self, connection: &str, message: Value) {
        let body = message.to_string();
        let (status, said) =
            legacy(&self.service, "alice", "POST", connection, body.as_bytes()).await;
        assert_eq!(status, 202, "{said}");
    }

    /// Begins the cell as an older client does, and returns when it runs.
    async fn begin_older(&self, connection: &str, id: u32) -> Raw {
        let params = json!({"name": "execute_ipython_cell", "arguments": self.workspace.cell()});
        let body = json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params});
        let body = body.to_string();
        let call = begin_legacy(&self.service, "alice", "POST", connection, body.as_bytes()).await;
        self.workspace.begun.wait();
        call
    }
}

async fn check_dropped_by_older_clients(flags: &[&str]) {
    let scene = Scene::new(flags);
    let connection = scene.older_connection().await;
    let call = scene.begin_older(&connection, 7).await;
    call.vanish().await;
    let told = scene.check(1).await;
    assert_eq!(told["status"], "running", "{told}");
    scene.workspace.go.raise_outside();
    let told = scene.check(30).await;
    assert_eq!(told["status"], "ok", "{told}");
    assert!(told["text"].to_string().contains("survived"), "{told}");
}

#[tokio::test]
async fn a_broken_connection_of_an_older_client_leaves_its_cell_running() {
    check_dropped_by_older_clients(&[]).await;
}

#[tokio::test]
async fn a_broken_connection_of_an_older_client_leaves_its_cell_running_without_a_daemon() {
    check_dropped_by_older_clients(SESSIONS_INSIDE).await;
}

async fn check_cancelled_by_older_clients(flags: &[&str]) {
    let scene = Scene::new(flags);
    let connection = scene.older_connection().await;
    let _call = scene.begin_older(&connection, 7).await;
    let params = json!({"requestId": 7, "reason": "a test"});
    let cancel = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params});
    scene.tell(&connection, cancel).await;
    assert_eq!(scene.value("x").await, "'begun'");
}

#[tokio::test]
async fn a_cancelled_request_of_an_older_client_is_interrupted() {
    check_cancelled_by_older_clients(&[]).await;
}

#[tokio::test]
async fn a_cancelled_request_of_an_older_client_is_interrupted_without_a_daemon() {
    check_cancelled_by_older_clients(SESSIONS_INSIDE).await;
}

async fn check_dropped_by_newer_clients(flags: &[&str]) {
    let scene = Scene::new(flags);
    let mut alice = Raw::with_key(&scene.service, "alice").await;
    alice
        .call("execute_ipython_cell", scene.workspace.cell())
        .await;
    scene.workspace.begun.wait();
    alice.vanish().await;
    assert_eq!(scene.value("x").await, "'begun'");
}

#[tokio::test]
async fn a_closed_stream_of_a_newer_client_cancels_its_cell() {
    check_dropped_by_newer_clients(&[]).await;
}

#[tokio::test]
async fn a_closed_stream_of_a_newer_client_cancels_its_cell_without_a_daemon() {
    check_dropped_by_newer_clients(SESSIONS_INSIDE).await;
}
