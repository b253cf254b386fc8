//! Running the suite, and reading what it wrote down.
//!
//! Its own exit status forgives warnings and whatever it does not score. We forgive nothing: a
//! scenario passes when none of its checks failed or warned, and at least one succeeded.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::npm::node;
use crate::support::server::finished;

/// A revision of the protocol, as the suite names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Revision {
    /// Every request stands alone.
    Stateless,
    /// A connection begins with `initialize`.
    Initialize,
}

impl Revision {
    fn name(self) -> &'static str {
        match self {
            Revision::Stateless => "2026-07-28",
            Revision::Initialize => "2025-11-25",
        }
    }

    /// Scenarios in which the suite itself has nothing to check yet.
    fn hollow(self) -> &'static [&'static str] {
        match self {
            // The suite waits for a rewrite of its own: these notifications go by another stream
            // now.
            Revision::Stateless => &["tasks-status-notifications"],
            Revision::Initialize => &[],
        }
    }
}

/// Runs all server scenarios of a revision, scored or not, and panics with every check that did not
/// succeed.
pub(super) fn check_all(folder: &Path, url: &str, revision: Revision) {
    let wanted = scenarios(folder, revision);
    assert!(
        wanted.len() > 25,
        "the suite lists its scenarios: {wanted:?}"
    ); // control
    let results = tempfile::tempdir().unwrap();
    let mut command = conformance(folder);
    command
        .args([
            "server",
            "--url",
            url,
            "--requirements",
            revision.name(),
            "-o",
        ])
        .arg(results.path());
    let (status, output, errors) = finished(&mut command);
    let (seen, complaints) = read(results.path(), &wanted, revision);
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    assert_eq!(seen, wanted, "{output}{errors}");
    assert_eq!(status, Some(0), "{output}{errors}");
}

/// Runs one server scenario, and panics with every check that did not succeed.
pub(super) fn check_one(folder: &Path, url: &str, revision: Revision, scenario: &str) {
    let results = tempfile::tempdir().unwrap();
    let mut command = conformance(folder);
    command.args([
        "server",
        "--url",
        url,
        "--spec-version",
        revision.name(),
        "--scenario",
        scenario,
        "-o",
    ]);
    let (status, output, errors) = finished(command.arg(results.path()));
    let wanted = BTreeSet::from([scenario.to_owned()]);
    let (seen, complaints) = read(results.path(), &wanted, revision);
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    assert_eq!((seen, status), (wanted, Some(0)), "{output}{errors}");
}

fn conformance(folder: &Path) -> std::process::Command {
    let mut command = node(folder);
    command.arg("node_modules/@modelcontextprotocol/conformance/dist/index.js");
    command
}

/// The server scenarios that the suite names for a revision.
fn scenarios(folder: &Path, revision: Revision) -> BTreeSet<String> {
    let (status, output, errors) =
        finished(conformance(folder).args(["list", "--requirements", revision.name()]));
    assert_eq!(status, Some(0), "{errors}");
    let mut found = BTreeSet::new();
    let mut about_servers = false;
    for line in output.lines() {
        match line.trim().strip_prefix("- ") {
            None => {
                about_servers = line.starts_with("Server scenarios")
                    || (about_servers && line.trim().is_empty())
            }
            Some(name) if about_servers => drop(found.insert(name.to_owned())),
            Some(name) => drop(
                name.strip_suffix(" [server]")
                    .map(|name| found.insert(name.to_owned())),
            ),
        }
    }
    found
}

/// Reads the results: which scenarios ran, and each check that a reader must know of.
fn read(
    results: &Path,
    wanted: &BTreeSet<String>,
    revision: Revision,
) -> (BTreeSet<String>, Vec<String>) {
    let (mut seen, mut complaints) = (BTreeSet::new(), Vec::new());
    for entry in fs::read_dir(results).unwrap() {
        let entry = entry.unwrap();
        let Ok(text) = fs::read_to_string(entry.path().join("checks.json")) else {
            continue;
        };
        let checks: Vec<Value> = serde_json::from_str(&text).unwrap();
        let scenario = scenario_of(&entry.file_name().into_string().unwrap(), wanted);
        let mut succeeded = revision.hollow().contains(&scenario.as_str());
        for check in &checks {
            match check["status"].as_str() {
                Some("SUCCESS") => succeeded = true,
                Some("INFO" | "SKIPPED") => {}
                _ => complaints.push(format!(
                    "{scenario}, {}: {}",
                    check["id"], check["errorMessage"]
                )),
            }
        }
        if !succeeded {
            complaints.push(format!("{scenario}: nothing succeeded in {text}"));
        }
        seen.insert(scenario);
    }
    (seen, complaints)
}

/// A folder of results is named after the kind, the scenario and the time. One scenario's name can
/// begin with another's.
fn scenario_of(folder: &str, wanted: &BTreeSet<String>) -> String {
    let name = folder.strip_prefix("server-").unwrap_or(folder);
    let known = wanted.iter().filter(|scenario| {
        name.strip_prefix(scenario.as_str())
            .is_some_and(|rest| rest.starts_with("-20"))
    });
    known
        .max_by_key(|scenario| scenario.len())
        .map_or(name, String::as_str)
        .to_owned()
}
