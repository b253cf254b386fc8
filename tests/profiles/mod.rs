//! Profiles: each is taken through the calls that the documents of its server show, with the built
//! program.
//!
//! A case is a call and what must come back. The tables are read from top to bottom: later cases
//! rely on earlier ones. `beside` lets the Python client of the protocol call the server that a
//! profile stands in for, and ours, and compares. `in_containers` goes through the same tables on
//! Docker and on Podman; `promises` looks at the edges, `env_file` at what code must not see in its
//! workspace.

mod beside;
mod code_executer;
mod env_file;
mod in_containers;
mod ipybox;
mod promises;
mod pyexec;
mod python_docker;

use std::process::Command;

use serde_json::{Value, json};

use crate::packages::index::{Index, Manner};
use crate::support::native::host_python;
use crate::support::server::{Era, Server, program};

/// What must come back.
enum Says {
    /// Success, with exactly these texts; pictures are `<image>`.
    Exactly(Vec<String>),
    /// Success, with a first text that holds all these.
    Words(&'static [&'static str]),
    /// An error, with a first text that holds all these.
    Fails(&'static [&'static str]),
}

struct Case {
    tool: &'static str,
    arguments: Value,
    says: Says,
}

fn exactly(tool: &'static str, arguments: Value, texts: &[&str]) -> Case {
    Case {
        tool,
        arguments,
        says: Says::Exactly(texts.iter().map(|text| (*text).to_owned()).collect()),
    }
}

fn words(tool: &'static str, arguments: Value, words: &'static [&'static str]) -> Case {
    Case {
        tool,
        arguments,
        says: Says::Words(words),
    }
}

fn fails(tool: &'static str, arguments: Value, words: &'static [&'static str]) -> Case {
    Case {
        tool,
        arguments,
        says: Says::Fails(words),
    }
}

/// Starts a server with a profile, in the environment of the caller's choice.
fn start(profile: &str, arguments: &[&str]) -> Server {
    Server::start(&[&["--profile", profile], arguments].concat())
}

/// Starts a server with a profile whose packages come from an index on this machine.
fn start_with_index(profile: &str, index: &Index, change: impl FnOnce(&mut Command)) -> Server {
    let mut command = program();
    command.args(["mcp", "--profile", profile, "--environment", "minimal"]);
    command
        .env("CELLBLOCK_PACKAGE_INDEX", index.url_without_password())
        .env_remove("PIP_FIND_LINKS");
    change(&mut command);
    let server = Server::spawn(&mut command, Era::Initialize);
    server.greet();
    server
}

fn local_index() -> Index {
    Index::start(&host_python("minimal"), Manner::Open)
}

/// Calls a tool and returns the blocks of its result, and whether it is an error.
#[track_caller]
fn call(server: &Server, tool: &str, arguments: Value) -> (Vec<String>, bool) {
    let result = server.call(tool, arguments);
    let blocks = result.0["content"]
        .as_array()
        .expect("a result has content")
        .clone();
    let text = |block: &Value| {
        block["text"].as_str().map_or(
            format!("<{}>", block["type"].as_str().unwrap()),
            str::to_owned,
        )
    };
    (blocks.iter().map(text).collect(), result.is_error())
}

/// Calls a tool that must succeed and returns its first text.
#[track_caller]
fn text(server: &Server, tool: &str, arguments: Value) -> String {
    let (blocks, failed) = call(server, tool, arguments);
    assert!(!failed, "{blocks:?}");
    blocks.into_iter().next().unwrap_or_default()
}

fn go_through(server: &Server, cases: Vec<Case>) {
    for Case {
        tool,
        arguments,
        says,
    } in cases
    {
        let (blocks, failed) = call(server, tool, arguments.clone());
        let shown = format!("{tool} {arguments}: {blocks:?}");
        let first = blocks.first().map_or("", String::as_str);
        match says {
            Says::Exactly(texts) => {
                assert!(!failed && blocks == texts, "{shown} instead of {texts:?}")
            }
            Says::Words(words) => {
                assert!(
                    !failed && words.iter().all(|word| first.contains(word)),
                    "{shown} without {words:?}"
                );
            }
            Says::Fails(words) => {
                assert!(
                    failed && words.iter().all(|word| first.contains(word)),
                    "{shown} without {words:?}"
                );
            }
        }
    }
}

/// Names of the tools that a server lists, and the arguments of each with those that it needs.
fn listed(server: &Server) -> Value {
    let tools = server.request("tools/list", json!({}))["result"]["tools"].clone();
    let row = |tool: &Value| {
        let schema = &tool["inputSchema"];
        let mut names: Vec<&String> = schema["properties"].as_object().unwrap().keys().collect();
        names.sort();
        json!([
            tool["name"],
            names,
            schema.get("required").cloned().unwrap_or(json!([]))
        ])
    };
    tools.as_array().unwrap().iter().map(row).collect()
}

#[test]
fn a_server_of_a_profile_has_the_name_of_the_server_it_stands_in_for_and_its_own_version() {
    for (profile, name) in [
        ("ipybox", "ipybox"),
        ("python-docker-mcp", "python-docker-mcp"),
        ("code-executer", "Code Execution Service"),
        ("pyexec", "ipython-executor"),
    ] {
        for era in Era::BOTH {
            let arguments = ["mcp", "--profile", profile, "--environment", "minimal"];
            let server = Server::spawn(program().args(arguments), era);
            let greeting = server.greet();
            let prompts = greeting["result"]["capabilities"].get("prompts").is_some();
            assert_eq!(prompts, profile == "code-executer", "{greeting}");
            let info = match era {
                Era::Initialize => greeting["result"]["serverInfo"].clone(),
                Era::Stateless => {
                    greeting["result"]["_meta"]["io.modelcontextprotocol/serverInfo"].clone()
                }
            };
            assert_eq!(
                (&info["name"], &info["version"]),
                (&json!(name), &json!(env!("CARGO_PKG_VERSION"))),
                "{greeting}"
            );
        }
    }
}

#[test]
fn flags_of_other_servers_are_taken_and_those_without_effect_are_told() {
    let arguments = [
        "--tool-server-port",
        "8900",
        "--kernel-gateway-host",
        "localhost",
        "--sandbox",
        "--log-level",
        "WARNING",
    ];
    let server = start(
        "ipybox",
        &[&arguments[..], &["--environment", "minimal"]].concat(),
    );
    assert_eq!(
        text(&server, "execute_ipython_cell", json!({"code": "1"})),
        "1"
    );
    let log = server.finish();
    for flag in ["--tool-server-port", "--kernel-gateway-host"] {
        assert!(log.contains(&format!("{flag} has no effect here")), "{log}");
    }
}

#[test]
fn the_default_profile_has_no_prompts() {
    let answer = Server::shared().request("prompts/list", json!({}));
    assert_eq!(answer["result"]["prompts"], json!([]), "{answer}");
}
