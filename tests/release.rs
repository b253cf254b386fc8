//! Release builds have no switches of tests: no feature turns them on, and a release build with the
//! feature has none either.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::PROGRAM;

/// A field of the switches. Its name travels between processes, so a program that has it contains
/// it as text.
const SWITCH: &str = "skipped_steps";
/// A name that builds with and without switches have.
const IN_EVERY_BUILD: &str = "layers_left_out";

fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(["--offline", "--locked"])
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo {arguments:?}: {errors}");
    String::from_utf8(output.stdout).expect("cargo prints UTF-8")
}

fn contains(file: &Path, text: &str) -> bool {
    let bytes = fs::read(file).unwrap();
    bytes
        .windows(text.len())
        .any(|part| part == text.as_bytes())
}

#[test]
fn only_tests_turn_on_test_support() {
    let features = |edges| {
        let tree = cargo(&["tree", "--workspace", "--edges", edges]);
        assert!(
            tree.contains("cellblock-jail feature \"default\""),
            "{tree}"
        );
        tree.matches("feature \"test-support\"").count()
    };
    assert_eq!(features("features,normal,build"), 0);
    // Control: this package and its jail, for the tests.
    assert_eq!(features("features,normal,build,dev"), 2);
}

#[test]
fn a_release_build_with_test_support_has_no_switches() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("release");
    let messages = cargo(&[
        "check",
        "--release",
        "--package",
        "cellblock-jail",
        "--features",
        "test-support",
        "--message-format",
        "json",
        "--target-dir",
        folder.to_str().unwrap(),
    ]);
    let jail = messages
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .find(|message| message["target"]["name"] == "cellblock_jail")
        .expect("cargo checked the jail");
    let features = jail["features"].as_array().unwrap();
    assert!(features.contains(&"test-support".into()), "{jail}");
    let metadata = Path::new(jail["filenames"][0].as_str().unwrap());
    assert!(!contains(metadata, SWITCH));
    // Controls: names of fields and functions can be found there, and this one in a program that
    // has switches.
    assert!(contains(metadata, IN_EVERY_BUILD));
    assert!(contains(Path::new(PROGRAM), SWITCH));
}
