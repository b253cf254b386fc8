//! The Inspector, as a program on the command line: one connection for each call.
//!
//! It also judges schemas: with `--strict` a tool that some client could not use is an error.

use std::path::Path;

use serde_json::Value;

use crate::support::npm::{folder, node};
use crate::support::server::{data_dir, finished};
use crate::support::{PROGRAM, skipped};

#[test]
fn the_inspector_finds_no_fault_with_the_tools_in_either_era() {
    let Some(folder) = folder() else { return skipped("npm") };
    for era in ["legacy", "modern"] {
        let listed = inspect(folder, era, &["--method", "tools/list", "--strict"]);
        let tools = listed["tools"].as_array().expect("tools are listed");
        assert!(tools.iter().any(|tool| tool["name"] == "execute_ipython_cell"), "{listed}");
    }
}

#[test]
fn the_inspector_runs_cells_and_gets_a_plot_in_either_era() {
    let Some(folder) = folder() else { return skipped("npm") };
    let run = ["--method", "tools/call", "--tool-name", "execute_ipython_cell", "--tool-arg"];
    for era in ["legacy", "modern"] {
        let result = inspect(folder, era, &[&run[..], &["code=print(6 * 7)"]].concat());
        assert_eq!(result["content"][0]["text"], "42", "{result}");
        let code = "code=import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()";
        let result = inspect(folder, era, &[&run[..], &[code]].concat());
        let blocks = result["content"].as_array().expect("a result has content");
        assert!(blocks.iter().any(|block| block["type"] == "image"), "{result}");
    }
}

/// Runs the Inspector against a server of its own and returns what it printed.
#[track_caller]
fn inspect(folder: &Path, era: &str, arguments: &[&str]) -> Value {
    let mut command = node(folder);
    command.arg("node_modules/@modelcontextprotocol/inspector/clients/launcher/build/index.js").arg("--cli");
    command.args(["--protocol-era", era, "--connect-timeout", "60000"]).args(arguments);
    let setting = format!("CELLBLOCK_DATA_DIR={}", data_dir().display());
    command.args(["-e", &setting, "--", PROGRAM, "mcp"]);
    let (status, output, errors) = finished(&mut command);
    assert_eq!(status, Some(0), "{era}: {output}{errors}");
    serde_json::from_str(&output).unwrap_or_else(|error| panic!("{error}: {output}"))
}
