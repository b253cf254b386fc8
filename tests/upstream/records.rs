//! What operators see and change: calls in the audit log, and a configuration that is read again.

use std::fs;

use serde_json::{Value, json};

use super::{Notes, register, wait_for_the_end_of};
use crate::http::client::Raw;
use crate::support::server::{MINIMAL, Server, TEST_TIMEOUT, finished, program};
use crate::support::service::Service;

#[test]
fn every_call_is_in_the_audit_log_with_what_became_of_it() {
    let notes = Notes::new();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("audit.jsonl");
    let server = Server::start(&[MINIMAL, &["--audit-file", log.to_str().unwrap()]].concat());
    let mut params = notes.params();
    params["approval"] = json!([{"deny": {"tool": "picture"}}]);
    register(&server, "notes", params);
    let session = server.session();
    let code = "import mcptools\nfor tool, arguments in [('echo', {'text': 'canary'}), ('fail', \
                {}), ('picture', {}), ('absent', {}), ('echo', {'text': 'other'}), ('echo', \
                {'text': 'canary'})]:\n    \
                try: mcptools.call('notes', tool, arguments)\n    except (mcptools.ToolError, \
                mcptools.ToolCallError) as error: print(tool, type(error).__name__)";
    let said = session.text(code);
    assert!(
        said.starts_with("fail ToolError\npicture ToolCallDenied\nabsent ToolCallError\n"),
        "{said}"
    );
    assert_eq!(notes.count("call picture"), 0);
    drop(session);
    server.finish();
    let text = fs::read_to_string(&log).unwrap();
    let records: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let calls: Vec<&Value> = records
        .iter()
        .filter(|record| record["kind"] == "upstream_call")
        .collect();
    let told = |record: &&Value| {
        let word = |name: &str| {
            record["details"][name]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        (word("server"), word("tool"), word("outcome"))
    };
    let expected = [
        ("echo", "succeeded"),
        ("fail", "failed"),
        ("picture", "refused"),
        ("absent", "refused"),
        ("echo", "succeeded"),
        ("echo", "succeeded"),
    ];
    let expected =
        expected.map(|(tool, outcome)| ("notes".to_owned(), tool.to_owned(), outcome.to_owned()));
    assert_eq!(
        calls.iter().map(told).collect::<Vec<_>>(),
        expected,
        "{text}"
    );
    assert!(
        calls.iter().all(|record| record["session"].is_string()),
        "{text}"
    );
    // Arguments can be compared and not read.
    let arguments: Vec<&Value> = calls
        .iter()
        .map(|record| &record["details"]["arguments"])
        .collect();
    assert!(
        arguments[0].is_string() && arguments[0] == arguments[5] && arguments[0] != arguments[4],
        "{text}"
    );
    assert!(!text.contains("canary"), "{text}");
    let verify = || finished(program().args(["audit", "verify"]).arg(&log));
    let (status, output, errors) = verify();
    assert_eq!(status, Some(0), "{output}{errors}");
    // The control: a call that is taken for a better one is noticed.
    fs::write(&log, text.replacen("\"refused\"", "\"succeeded\"", 1)).unwrap();
    assert_eq!(verify().0, Some(1));
}

#[tokio::test]
async fn servers_of_a_configuration_that_is_read_again_are_taken_over() {
    let (changed, kept, gone, added) = (Notes::new(), Notes::new(), Notes::new(), Notes::new());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("servers.json");
    let write =
        |servers: Value| fs::write(&file, json!({"mcpServers": servers}).to_string()).unwrap();
    write(json!({"changed": changed.params(), "kept": kept.params(), "gone": gone.params()}));
    let service = Service::without_tokens(
        &[MINIMAL, &["--mcp-servers-file", file.to_str().unwrap()]].concat(),
    );
    let mut client = Raw::connect(service.address).await;
    let said = async |client: &mut Raw, server: &str| {
        let code = format!(
            "from cellblock_runner import host_calls\nanswer = host_calls.ask('call_tool', \
             server='{server}', tool='echo', arguments={{'text': 'x'}})\n\
             print(answer['content'][0]['text'] if answer['ok'] else answer['reason'])"
        );
        let result = client
            .result("execute_ipython_cell", json!({"code": code}))
            .await;
        result["content"][0]["text"]
            .as_str()
            .unwrap()
            .lines()
            .next()
            .unwrap()
            .to_owned()
    };
    for (server, expected) in [
        ("changed", "first: x"),
        ("kept", "first: x"),
        ("gone", "first: x"),
        ("added", "unknown"),
    ] {
        assert_eq!(said(&mut client, server).await, expected, "{server}");
    }
    let process = gone.process();
    write(json!({
        "changed": changed.params_of("second"), "kept": kept.params(), "added": added.params(),
    }));
    assert!(
        service
            .read_again()
            .contains("the settings were read again")
    );
    assert_eq!(said(&mut client, "gone").await, "unknown");
    assert_eq!(said(&mut client, "added").await, "first: x");
    assert_eq!(said(&mut client, "kept").await, "first: x");
    // What was there before answers until its successor does, or fails.
    let until = async |client: &mut Raw, expected: &str| {
        let replaced = async { while said(client, "changed").await != expected {} };
        tokio::time::timeout(TEST_TIMEOUT, replaced)
            .await
            .expect("the changed server is tried");
    };
    until(&mut client, "second: x").await;
    tokio::task::spawn_blocking(move || wait_for_the_end_of(&process))
        .await
        .unwrap();
    let starts = |notes: &Notes| {
        notes
            .lines()
            .iter()
            .filter(|line| line.starts_with("started"))
            .count()
    };
    assert_eq!([&changed, &kept, &gone, &added].map(starts), [2, 1, 1, 1]);
    write(json!({
        "changed": {"command": "/nowhere/at-all"}, "kept": kept.params(), "added": added.params(),
    }));
    assert!(
        service
            .read_again()
            .contains("the settings were read again")
    );
    until(&mut client, "unavailable").await;
    // A file that cannot be used changes nothing.
    fs::write(&file, "{").unwrap();
    assert!(
        service
            .read_again()
            .contains("the settings were not read again")
    );
    assert_eq!(said(&mut client, "kept").await, "first: x");
}
