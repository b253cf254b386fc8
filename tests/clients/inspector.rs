//! The Inspector, as a program on the command line: one connection for each call.
//!
//! It also judges schemas: with `--strict` a tool that some client could not use is an error. It
//! has no way to cancel but to be ended itself, which closes its connection.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::http::client::Raw;
use crate::support::npm::{folder, node};
use crate::support::server::{MINIMAL, data_dir, finished, folders};
use crate::support::service::Service;
use crate::support::{PROGRAM, skipped};

const ERAS: [&str; 2] = ["legacy", "modern"];
const EXECUTE: [&str; 5] = [
    "--method",
    "tools/call",
    "--tool-name",
    "execute_ipython_cell",
    "--tool-arg",
];

#[test]
fn the_inspector_finds_no_fault_with_the_tools() {
    for_each_way(|way, era| {
        let listed = way.inspect(era, &["--method", "tools/list", "--strict"]);
        let tools = listed["tools"].as_array().expect("tools are listed");
        assert!(
            tools
                .iter()
                .any(|tool| tool["name"] == "execute_ipython_cell"),
            "{listed}"
        );
    });
}

#[test]
fn the_inspector_runs_cells_and_gets_a_plot() {
    for_each_way(|way, era| {
        let session = format!("session_id=inspector-{era}");
        let result = way.inspect(
            era,
            &[&EXECUTE[..], &["code=print(6 * 7)", &session]].concat(),
        );
        assert_eq!(result["content"][0]["text"], "42", "{result}");
        let code = "code=import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()";
        let result = way.inspect(era, &[&EXECUTE[..], &[code, &session]].concat());
        let blocks = result["content"].as_array().expect("a result has content");
        assert!(
            blocks.iter().any(|block| block["type"] == "image"),
            "{result}"
        );
    });
}

#[test]
fn the_inspector_lists_and_calls_the_tools_of_every_profile() {
    let Some(folder) = folder() else {
        return skipped("npm");
    };
    let calls = [
        ("python-docker-mcp", "execute-transient"),
        ("ipybox", "execute_ipython_cell"),
        ("code-executer", "start_code_executer"),
        ("pyexec", "execute_python"),
    ];
    for (profile, tool) in calls {
        let way = Way {
            folder,
            service: None,
            flags: &["--profile", profile],
        };
        let listed = way.inspect("legacy", &["--method", "tools/list"]);
        assert!(
            listed["tools"]
                .as_array()
                .unwrap()
                .iter()
                .any(|each| each["name"] == tool),
            "{listed}"
        );
        let call = ["--method", "tools/call", "--tool-name", tool];
        let arguments: &[&str] = if tool.starts_with("start") {
            &[]
        } else {
            &["--tool-arg", "code=print(6 * 7)"]
        };
        let result = way.inspect("legacy", &[&call[..], arguments].concat());
        let wanted = if arguments.is_empty() {
            "started"
        } else {
            "42"
        };
        assert!(
            result["content"][0]["text"]
                .as_str()
                .unwrap()
                .contains(wanted),
            "{profile}: {result}"
        );
    }
}

#[tokio::test]
async fn an_inspector_that_is_ended_cancels_its_cell() {
    let Some(folder) = folder() else {
        return skipped("npm");
    };
    let service = Service::start(MINIMAL);
    let way = Way {
        folder,
        service: Some(&service),
        flags: &[],
    };
    let code = "code=print('begun', flush=True)\nwhile True: pass";
    let mut inspector = way.command("modern", &[&EXECUTE[..], &[code, "session_id=a"]].concat());
    let mut inspector = inspector
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut other = Raw::with_token(&service).await;
    let mut heard = String::new();
    while !heard.contains(r"begun\n") {
        other
            .call("check_execution", json!({"session_id": "a", "wait": 1}))
            .await;
        heard = other.answer().await.body;
    }
    inspector.kill().unwrap();
    inspector.wait().unwrap();
    // Its time-out would free the session too, but later than a call waits.
    other
        .call(
            "execute_ipython_cell",
            json!({"code": "print(6 * 7)", "session_id": "a"}),
        )
        .await;
    let answer = other.answer().await;
    assert!(answer.body.contains("42"), "{answer:?}");
}

/// How the Inspector reaches a server.
struct Way<'a> {
    folder: &'a Path,
    /// Over HTTP, or else over the pipes of a server that it starts.
    service: Option<&'a Service>,
    /// Of the server that it starts.
    flags: &'a [&'a str],
}

/// Lets the Inspector work over each transport and in each era.
fn for_each_way(work: impl Fn(&Way, &str)) {
    let Some(folder) = folder() else {
        return skipped("npm");
    };
    let service = Service::start(&[]);
    for service in [None, Some(&service)] {
        ERAS.into_iter().for_each(|era| {
            work(
                &Way {
                    folder,
                    service,
                    flags: &[],
                },
                era,
            )
        });
    }
}

impl Way<'_> {
    /// Runs the Inspector and returns what it printed.
    #[track_caller]
    fn inspect(&self, era: &str, arguments: &[&str]) -> Value {
        let (status, output, errors) = finished(&mut self.command(era, arguments));
        assert_eq!(status, Some(0), "{era}: {output}{errors}");
        serde_json::from_str(&output).unwrap_or_else(|error| panic!("{error}: {output}"))
    }

    fn command(&self, era: &str, arguments: &[&str]) -> Command {
        let mut command = node(self.folder);
        command
            .arg("node_modules/@modelcontextprotocol/inspector/clients/launcher/build/index.js")
            .arg("--cli");
        command
            .args(["--protocol-era", era, "--connect-timeout", "60000"])
            .args(arguments);
        match self.service {
            None => {
                for (name, folder) in folders(data_dir()) {
                    command
                        .arg("-e")
                        .arg(format!("{name}={}", folder.display()));
                }
                command.args(["--", PROGRAM, "mcp"]).args(self.flags)
            }
            Some(service) => {
                let header = format!("Authorization: Bearer {}", service.token);
                command.args([
                    "--transport",
                    "http",
                    "--server-url",
                    &service.url(),
                    "--header",
                    &header,
                ])
            }
        };
        command
    }
}
