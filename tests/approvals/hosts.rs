//! Questions about hosts: a connection is held until somebody has decided, and nothing goes out
//! before.
//!
//! The names end in `localhost`, which every resolver knows to be this machine; its address is
//! listed, the names are not.

use std::process::Command;

use serde_json::json;

use super::{Scene, started};
use crate::network::Web;
use crate::support::server::{MINIMAL, Session};

const FETCH: &str = "
import urllib.request
def fetch(target):
    try:
        return urllib.request.urlopen(f'http://{target}/', timeout=50).read().decode()
    except OSError as error:
        return type(getattr(error, 'reason', error)).__name__
";

fn command(scene: &Scene, web: &Web) -> Command {
    let mut command = scene.program();
    command
        .arg("mcp")
        .args(MINIMAL)
        .args(["--approve-domains", "ask"]);
    command.args(
        ["127.0.0.1", "[::1]"].map(|address| format!("--allowed-domain={address}:{}", web.port())),
    );
    command
}

fn fetch(name: &str, web: &Web) -> String {
    format!("{FETCH}print(fetch('{name}.localhost:{}'))", web.port())
}

/// Runs a cell whose connection is asked about, and answers.
#[track_caller]
fn answered(
    session: &Session<'_>,
    web: &Web,
    name: &str,
    decision: &str,
) -> (String, serde_json::Value) {
    let before = web.asked();
    let pending = session.begin(&fetch(name, web), json!({}));
    let form = session.server.form();
    let words = format!("connect to {name}.localhost at port {}", web.port());
    assert!(form.text().contains(&words), "{}", form.text());
    assert!(
        web.asked() == before && !pending.is_answered(),
        "it is held"
    );
    form.decide(decision);
    let result = pending.result();
    (
        result.text().lines().next().unwrap_or_default().to_owned(),
        result.structured()["blocked"].clone(),
    )
}

#[test]
fn a_connection_is_held_until_somebody_has_decided() {
    let (scene, web) = (Scene::new(), Web::start());
    let server = started(&mut command(&scene, &web));
    let tools = server.request("tools/list", json!({}));
    let words = tools["result"]["tools"][0]["description"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(words.contains("other hosts need a permission"), "{words}");
    let session = server.session();
    assert_eq!(
        answered(&session, &web, "one", "once"),
        ("hello".to_owned(), json!([]))
    );
    assert_eq!(web.asked(), 1);
    // Once is once; a no is a reset, and is told.
    let (page, blocked) = answered(&session, &web, "one", "deny");
    assert_eq!((page.as_str(), web.asked()), ("ConnectionResetError", 1));
    let told = blocked[0].as_str().unwrap_or_default();
    assert!(
        told.starts_with(&format!("blocked: one.localhost:{}", web.port())),
        "{blocked}"
    );
    // For the session: later connections to this name are not asked about, those to others are.
    assert_eq!(answered(&session, &web, "two", "session").0, "hello");
    assert_eq!(session.text(&fetch("two", &web)), "hello");
    assert_eq!((web.asked(), server.forms()), (3, 0));
    assert_eq!(
        answered(&session, &web, "three", "deny").0,
        "ConnectionResetError"
    );
    // Nor does the permission of one session count in another.
    assert_eq!(
        answered(&server.session(), &web, "two", "deny").0,
        "ConnectionResetError"
    );
    assert_eq!(web.asked(), 3);
}

#[test]
fn a_connection_about_which_nobody_decides_is_refused() {
    let (scene, web) = (Scene::new(), Web::start());
    let server = started(command(&scene, &web).env("CELLBLOCK_APPROVAL_TIMEOUT", "5s"));
    let session = server.session();
    let pending = session.begin(&fetch("one", &web), json!({}));
    let _unanswered = server.form();
    let result = pending.result();
    assert!(
        result.text().starts_with("ConnectionResetError"),
        "{}",
        result.text()
    );
    assert_eq!(
        result.structured()["blocked"].as_array().map(Vec::len),
        Some(1)
    );
    assert_eq!(web.asked(), 0);
    assert_eq!(
        answered(&session, &web, "one", "once").0,
        "hello",
        "the control: the next cell is asked about"
    );
}

#[test]
fn a_host_that_is_always_allowed_is_so_after_a_restart() {
    let (scene, web) = (Scene::new(), Web::start());
    let server = started(command(&scene, &web).args(["--remember-approvals", "on"]));
    let session = server.session();
    assert_eq!(answered(&session, &web, "one", "always").0, "hello");
    drop(session);
    server.finish();
    assert!(scene.book().contains("one.localhost"), "{}", scene.book());
    let server = started(command(&scene, &web).args(["--remember-approvals", "on"]));
    let session = server.session();
    assert_eq!(session.text(&fetch("one", &web)), "hello");
    assert_eq!((web.asked(), server.forms()), (2, 0));
    assert_eq!(
        answered(&session, &web, "two", "deny").0,
        "ConnectionResetError",
        "the control"
    );
}
