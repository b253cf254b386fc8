//! Messages about exits of interpreters and claims of the runner.

use std::str::FromStr;

use crate::runner_client::{Changes, ClaimedError, ClaimedFile, ClaimedVariable, FileFailure};
use crate::sandbox::Exit;
use crate::session::output::bounded_text;
use crate::session::{
    FileChanges, FileList, FileNote, InsidePath, PythonError, Refused, Variable, VariableChanges,
};

/// Returns the files that can be requested. A name that is not a valid path is counted as omitted.
pub(super) fn file_list(claimed: Vec<ClaimedFile>, omitted: u64) -> FileList {
    let all = claimed.len();
    let files = claimed
        .into_iter()
        .filter(|file| InsidePath::from_str(&file.path).is_ok());
    let mut files = files
        .map(|file| FileNote {
            path: file.path,
            size: file.size,
        })
        .collect::<Vec<_>>();
    files.sort_by(|one, other| one.path.cmp(&other.path));
    FileList {
        omitted: omitted.saturating_add((all - files.len()) as u64),
        files,
    }
}

pub(super) fn file_failed(path: &InsidePath, reason: FileFailure, message: String) -> Refused {
    Refused::File {
        path: path.clone(),
        reason,
        detail: bounded_text(&message, 500),
    }
}

/// Describes how an interpreter ended and what is left, as the end of "this session ended because
/// …".
pub(super) fn ended_by(exit: Exit) -> String {
    let left = match exit.files_kept() {
        true => "variables are gone, files in the working folder are kept",
        false => "variables and files are gone",
    };
    format!("{}; {left}", describe(exit))
}

/// Describes how an interpreter ended.
fn describe(exit: Exit) -> String {
    match exit {
        Exit::Code(code) => format!("its Python process ended with exit code {code}"),
        Exit::Signal(9) => "its Python process was killed (signal 9)".to_owned(),
        Exit::Signal(11) => {
            "its Python process crashed (signal 11, a fault in native code)".to_owned()
        }
        Exit::Signal(signal) => format!("its Python process was ended by signal {signal}"),
        Exit::OutOfMemory { limit, .. } => format!(
            "it used more than its {} MiB of memory",
            limit / (1024 * 1024)
        ),
        Exit::OutOfMemoryOutside { whose, .. } => {
            format!("its Python process was killed because {whose}")
        }
        Exit::SandboxGone { .. } => {
            "its sandbox was ended from outside, or the jail or the container engine went away"
                .to_owned()
        }
        Exit::Unknown => "its Python process ended".to_owned(),
    }
}

pub(super) fn python_error(error: &ClaimedError, max_chars: usize) -> PythonError {
    PythonError {
        name: bounded_text(&error.name, 200),
        message: bounded_text(&error.message, max_chars),
        traceback: bounded_text(&error.traceback, max_chars),
        line: error.line,
    }
}

pub(super) fn variable_changes(claimed: Changes<ClaimedVariable>) -> VariableChanges {
    let variable = |claimed: ClaimedVariable| Variable {
        name: claimed.name,
        kind: claimed.kind,
        shape: claimed.shape,
        size: claimed.size,
    };
    VariableChanges {
        created: claimed.created.into_iter().map(variable).collect(),
        changed: claimed.changed.into_iter().map(variable).collect(),
        deleted: claimed.deleted,
        omitted: claimed.omitted,
    }
}

pub(super) fn file_changes(claimed: Changes<ClaimedFile>) -> FileChanges {
    let note = |claimed: ClaimedFile| FileNote {
        path: claimed.path,
        size: claimed.size,
    };
    FileChanges {
        created: claimed.created.into_iter().map(note).collect(),
        changed: claimed.changed.into_iter().map(note).collect(),
        deleted: claimed.deleted,
        omitted: claimed.omitted,
    }
}
