//! An example of each operation and its reply, in files that another implementation can read.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Op, OpSubject, Reply, TransferDirection};

#[derive(Serialize, Deserialize)]
struct Example {
    op: Op,
    reply: Reply,
}

fn texts() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops/golden");
    let mut texts: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, fs::read_to_string(path).unwrap())
        })
        .collect();
    texts.sort();
    texts
}

/// Every operation with a reply to it.
pub(crate) fn examples() -> Vec<(Op, Reply)> {
    let read = |(name, text): (String, String)| {
        let Example { op, reply } =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        (op, reply)
    };
    texts().into_iter().map(read).collect()
}

#[test]
fn every_operation_has_an_example_of_its_name_and_no_example_is_left_over() {
    let mut names = Op::NAMES.to_vec();
    names.sort();
    let files: Vec<String> = texts().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, files);
    for (op, name) in examples().iter().zip(&files) {
        assert_eq!(op.0.name(), name);
        let reply = serde_json::to_value(&op.1).unwrap();
        assert_eq!(
            reply.as_object().unwrap().keys().collect::<Vec<_>>(),
            [name]
        );
    }
}

#[test]
fn examples_are_written_as_they_were_read() {
    for (name, text) in texts() {
        let wanted: Value = serde_json::from_str(&text).unwrap();
        let example: Example = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_value(&example).unwrap(), wanted, "{name}");
        let packed = rmp_serde::to_vec_named(&example).unwrap();
        let back: Example = rmp_serde::from_slice(&packed).unwrap();
        assert_eq!(serde_json::to_value(&back).unwrap(), wanted, "{name}");
    }
}

#[test]
fn operations_that_move_files_name_the_file_and_its_session() {
    for (op, _) in examples() {
        let value = serde_json::to_value(&op).unwrap();
        let fields = &value[op.name()];
        match op.transfer() {
            Some(TransferDirection::Into | TransferDirection::OutOf) => {
                assert!(matches!(op.subject(), OpSubject::Session(_)), "{op:?}");
                assert!(fields["path"].is_string(), "{op:?}");
            }
            None => assert!(
                fields.get("path").is_none() || op.name() == "upload_size",
                "{op:?}"
            ),
        }
    }
}
