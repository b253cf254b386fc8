//! What `doctor` tells about engines and images.

use serde_json::Value;

use crate::support::containers::{self, IMAGE, TestEngine};
use crate::support::data_folder;
use crate::support::server::{finished, program_below};

fn doctor(address: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = program_below(&data_folder());
    command
        .args(["doctor", "--backend", "docker"])
        .args(arguments)
        .env("DOCKER_HOST", address);
    let (status, output, errors) = finished(&mut command);
    assert!(!output.is_empty(), "{errors}");
    (status, output)
}

#[track_caller]
fn finds(engine: &TestEngine, arguments: &[&str], words: &[&str]) {
    let (status, output) = doctor(&engine.address.to_string(), arguments);
    assert_eq!(status, Some(1), "{output}");
    for word in [
        "MISSING",
        "because",
        "cure:",
        "No container was made.",
        "cannot be started",
    ]
    .iter()
    .chain(words)
    {
        assert!(output.contains(word), "{word:?} is not in {output}");
    }
}

#[test]
fn doctor_tells_about_the_engine_the_image_and_a_container() {
    let Some(engine) = containers::docker() else {
        return;
    };
    let address = engine.address.to_string();
    let (status, output) = doctor(&address, &["--container-tag", IMAGE]);
    assert_eq!(status, Some(0), "{output}");
    let words = [
        "engine        fine      Docker ",
        &address,
        "runc",
        "seccomp",
        "control groups",
        "Python 3.",
    ];
    let layers = [
        "Isolation of a session in a container:",
        "namespaces    enforced",
        "Sessions can be started.",
    ];
    for word in words.iter().chain(&layers) {
        assert!(output.contains(word), "{word:?} is not in {output}");
    }
    let (status, output) = doctor(&address, &["--container-tag", IMAGE, "--json"]);
    let report: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(
        (status, &report["usable"]),
        (Some(0), &Value::Bool(true)),
        "{output}"
    );
    let names: Vec<&str> = report["engine"]
        .as_array()
        .unwrap()
        .iter()
        .map(|line| line["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "engine",
            "runtime",
            "system-calls",
            "identity",
            "resources",
            "image"
        ]
    );
    assert!(
        report["layers"]
            .as_object()
            .is_some_and(|layers| layers.len() >= 5),
        "{output}"
    );
}

#[test]
fn doctor_has_a_cure_for_what_is_missing() {
    let Some(engine) = containers::docker() else {
        return;
    };
    finds(
        engine,
        &["--container-tag", "cellblock-test:nowhere"],
        &["the engine has no cellblock-test:nowhere"],
    );
    let empty = "cellblock-test:nothing-at-all";
    engine.import(empty);
    finds(
        engine,
        &["--container-tag", empty],
        &["it has no Python that could be started", "--container-tag"],
    );
    let unknown = ["--container-tag", IMAGE, "--runtime", "no-such-runtime"];
    finds(
        engine,
        &unknown,
        &[
            "does not know the runtime no-such-runtime",
            "name one that it knows",
        ],
    );
    let (status, output) = doctor("unix:///nowhere.sock", &[]);
    assert_eq!(status, Some(1), "{output}");
    let words = [
        "engine        MISSING",
        "Docker cannot be reached at unix:///nowhere.sock",
        "cure: start it",
    ];
    assert!(words.iter().all(|word| output.contains(word)), "{output}");
}
