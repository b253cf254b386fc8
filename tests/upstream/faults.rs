//! Servers that do not behave, as code in a cell meets them: what it is told, what the result says,
//! and that the session goes on.
//!
//! What a connection makes of each fault is tested in `upstream/`; here is what crosses into
//! sessions.

use std::fs;

use serde_json::json;

use super::elsewhere::{Elsewhere, answer, mcp, method_of};
use super::{Notes, raised, register};
use crate::http::client::Raw;
use crate::network::https::Signer;
use crate::support::server::{Era, MINIMAL, Server, Session, program};
use crate::support::service::Service;

/// Calls tools by name and tells the class and the reason of what is raised.
const CALL: &str = "
import mcptools
def call(tool, arguments={}, server='notes'):
    try:
        return str(mcptools.call(server, tool, arguments))[:60]
    except mcptools.ToolCallError as error:
        return f'{type(error).__name__} {error.reason}'
";

/// A session of a server with `notes` in its worst edition, in which `call` is defined.
fn with_call(server: &Server) -> Session<'_> {
    let session = server.session();
    session.text(CALL);
    session
}

fn hostile(notes: &Notes) -> Server {
    let server = Server::start(MINIMAL);
    register(&server, "notes", notes.params_of("hostile"));
    server
}

#[test]
fn an_answer_that_is_too_large_or_cut_off_or_never_comes_fails_alone() {
    let notes = Notes::new();
    let server = hostile(&notes);
    let mut slow = notes.params();
    slow["call_timeout"] = json!(1);
    register(&server, "slow", slow);
    let session = with_call(&server);
    let code = "print(call('huge', {'bytes': 17_000_000}), call('echo', {'text': 'x'}))\n\
                print(call('huge', {'bytes': 16_000_000}) == 'x' * 60)\n\
                print(call('wait', {}, 'slow'), call('echo', {'text': 'y'}))\n\
                print(call('half'), call('echo', {'text': 'z'}))";
    let said = "ToolCallError too_large hostile: x\nTrue\nToolCallTimeout timeout hostile: \
                y\nToolCallError unavailable hostile: z\n\
                [3 of 7 calls of MCP tools failed: notes.huge (too_large), slow.wait (timeout), \
                notes.half (unavailable)]";
    assert_eq!(session.text(code), said);
    assert_eq!(
        notes.count("call half"),
        1,
        "it may have been carried out, so it is not repeated"
    );
}

#[test]
fn a_tool_that_changes_is_not_called_until_its_server_is_registered_again() {
    let notes = Notes::new();
    let server = hostile(&notes);
    let session = with_call(&server);
    assert_eq!(session.text("call('echo', {'text': 'x'})"), "'hostile: x'"); // control
    assert_eq!(session.text("call('change')"), "'changed'");
    let refused = raised(
        &session,
        "mcptools.call('notes', 'echo', {'text': 'x'})",
        "ToolCallError",
    );
    assert!(
        refused.contains("has changed since it was registered"),
        "{refused}"
    );
    assert_eq!(
        session.text("call('variable', {'name': 'PATH'})[:1]"),
        "'/'",
        "the others are as they were"
    );
    let listed = server.call("list_mcp_servers", json!({}));
    assert!(
        listed.text().contains("register the server again"),
        "{}",
        listed.text()
    );
    register(&server, "notes", notes.params());
    assert_eq!(session.text("call('echo', {'text': 'x'})"), "'first: x'");
}

#[test]
fn arguments_that_are_nested_too_deeply_are_an_error_of_the_call_on_both_sides() {
    let notes = Notes::new();
    let server = hostile(&notes);
    let session = with_call(&server);
    let code = "def nested(levels):\n    value = 1\n    for _ in range(levels): value = \
                [value]\n    return {'value': value}\n\
                call('nested', nested(98))";
    assert_eq!(session.text(code), "'208 characters'"); // control
    for levels in [100, 129, 300, 100_000] {
        let code = format!("mcptools.call('notes', 'nested', nested({levels}))");
        let error = raised(&session, &code, "ValueError");
        assert!(
            error.contains("nested more than 100 levels deep"),
            "{error}"
        );
    }
    // Around what the module checks, and around Python's own limit.
    let around = "from cellblock_runner import host_calls\n\
                  def attempt(levels):\n    answer = host_calls.ask('call_tool', server='notes', \
                  tool='nested', arguments=nested(levels))\n    \
                  return answer['ok'], answer.get('text')\n";
    session.text(around);
    assert_eq!(session.text("attempt(110)[0]"), "True"); // control
    let said = session.text("print(*attempt(200))");
    assert!(
        said.starts_with("False ") && said.contains("nested more than 100 levels deep"),
        "{said}"
    );
    assert_eq!(
        session.text("call('echo', {'text': 'still here'})"),
        "'hostile: still here'"
    );
    assert_eq!(notes.count("call nested"), 2);
}

#[test]
fn results_say_which_calls_failed_also_when_code_keeps_it_to_itself() {
    let notes = Notes::new();
    let server = hostile(&notes);
    let session = with_call(&server);
    let code = "from mcptools.notes import fail\nfor _ in range(3):\n    try: fail.run()\n    \
                except mcptools.ToolError: pass\n\
                call('echo', {'text': 1}); call('absent'); call('echo', {'text': 'x'}); \
                call('echo', {}, 'nobody'); None";
    let result = session.run(code);
    let line = "[6 of 7 calls of MCP tools failed: notes.fail (tool_error) 3 times, notes.echo \
                (invalid), notes.absent (unknown), nobody.echo (unknown)]";
    assert_eq!(result.text(), line);
    assert_eq!(
        result.structured()["tool_calls"],
        json!({"total": 7, "failed": 6})
    );
    // Only the first hundred are known by their names.
    let late = "for n in range(120): call('echo', {'text': str(n)})\ncall('absent'); None";
    assert_eq!(
        session.text(late),
        "[1 of 121 calls of MCP tools failed: …]"
    );
}

#[test]
fn a_server_that_sends_us_elsewhere_or_breaks_off_is_not_followed() {
    let other = Elsewhere::with_echo(None);
    let target = other.url("http");
    let moved = move |_: &_| {
        format!("HTTP/1.1 307 Moved\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n")
    };
    let moved = Elsewhere::serve(None, moved);
    // Calls are sent away and broken off; everything else is as it should be.
    let target = other.url("http");
    let later = Elsewhere::serve(None, move |request| match method_of(request) {
        (message, method) if method == "tools/call" => {
            match message["params"]["arguments"]["text"].as_str() {
                Some("away") => {
                    format!("HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n")
                }
                Some("half") => {
                    let whole = mcp(request);
                    whole[..whole.len() - 10].to_owned()
                }
                Some("page") => answer("200 OK", "<html>").replace("application/json", "text/html"),
                _ => mcp(request),
            }
        }
        _ => mcp(request),
    });
    let server = Server::start(MINIMAL);
    let params = json!({"url": moved.url("http"), "headers": {"authorization": "Bearer canary"}});
    let refused = server.call(
        "register_mcp_server",
        json!({"server_name": "moved", "server_params": params}),
    );
    refused.assert_refused(&["it wants to be asked elsewhere (status 307)"]);
    register(
        &server,
        "later",
        json!({"url": later.url("http"), "headers": {"authorization": "Bearer canary"}}),
    );
    let session = with_call(&server);
    let code = "print([call('echo', {'text': text}, 'later') for text in ('x', 'away', 'half', \
                'page', 'y')])";
    let said = session.text(code);
    let expected = "['elsewhere: x', 'ToolCallError protocol', 'ToolCallError unavailable', \
                    'ToolCallError protocol', 'elsewhere: y']";
    assert!(said.starts_with(expected), "{said}");
    assert_eq!(other.heard().len(), 0, "nothing follows");
    let sent = later.heard();
    assert!(
        sent.iter()
            .all(|request| request.header("authorization") == Some("Bearer canary")),
        "the control"
    );
    // The control: the other one can be used when it is registered.
    register(&server, "other", json!({"url": other.url("http")}));
    assert_eq!(
        session.text("call('echo', {'text': 'x'}, 'other')"),
        "'elsewhere: x'"
    );
}

#[test]
fn a_server_with_tls_is_used_when_its_authority_is_trusted() {
    let signer = Signer::new();
    let elsewhere = Elsewhere::with_echo(Some(signer.server(&["localhost"])));
    let folder = tempfile::tempdir().unwrap();
    let authority = folder.path().join("authority.pem");
    fs::write(&authority, signer.pem()).unwrap();
    let start = |trusted: bool| {
        let mut command = program();
        command
            .arg("mcp")
            .args(MINIMAL)
            .env_remove("SSL_CERT_FILE")
            .env_remove("SSL_CERT_DIR");
        if trusted {
            command.env("SSL_CERT_FILE", &authority);
        }
        let server = Server::spawn(&mut command, Era::Initialize);
        server.greet();
        server
    };
    let params =
        json!({"server_name": "elsewhere", "server_params": {"url": elsewhere.url("https")}});
    let refused = start(false).call("register_mcp_server", params.clone());
    refused.assert_refused(&["no connection could be made", "certificate"]);
    assert_eq!(elsewhere.heard().len(), 0);
    let server = start(true);
    let registered = server.call("register_mcp_server", params);
    assert!(!registered.is_error(), "{}", registered.text());
    assert_eq!(
        with_call(&server).text("call('echo', {'text': 'x'}, 'elsewhere')"),
        "'elsewhere: x'"
    );
    // Not under a name that is not its own.
    let url = format!("https://127.0.0.1:{}/mcp", elsewhere.address.port());
    let refused = server.call(
        "register_mcp_server",
        json!({"server_name": "ip", "server_params": {"url": url}}),
    );
    refused.assert_refused(&["no connection could be made"]);
}

#[tokio::test]
async fn callers_over_http_may_name_private_hosts_that_the_operator_lists() {
    let elsewhere = Elsewhere::with_echo(None);
    let folder = tempfile::tempdir().unwrap();
    let attempt = async |setting: &str| {
        let file = folder.path().join("config.yaml");
        fs::write(&file, setting).unwrap();
        let mut flags = MINIMAL.to_vec();
        flags.extend(["--config", file.to_str().unwrap()]);
        let service = Service::without_tokens(&flags);
        let mut client = Raw::connect(service.address).await;
        let params =
            json!({"server_name": "mine", "server_params": {"url": elsewhere.url("http")}});
        let registered = client.result("register_mcp_server", params).await;
        let code = "from cellblock_runner import mcptools\nprint(mcptools.call('mine', 'echo', \
                    {'text': 'x'}))";
        let called = client
            .result(
                "execute_ipython_cell",
                json!({"code": code, "session_id": "a"}),
            )
            .await;
        [registered, called].map(|result| {
            result["content"][0]["text"]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        })
    };
    for setting in ["", "mcp_allowed_hosts: [tools.internal]\n"] {
        let [registered, called] = attempt(setting).await;
        assert!(
            registered.contains("only public addresses may be used"),
            "{registered}"
        );
        assert!(
            called.contains("there is no MCP server \"mine\""),
            "{called}"
        );
        assert_eq!(elsewhere.heard().len(), 0);
    }
    let [registered, called] = attempt("mcp_allowed_hosts: [localhost]\n").await;
    assert!(
        registered.contains("is registered: 1 tool in mcptools.mine"),
        "{registered}"
    );
    assert_eq!(called, "elsewhere: x");
    assert_eq!(elsewhere.count("tools/call"), 1);
}
