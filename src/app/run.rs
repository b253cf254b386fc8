//! `cellblock run`: runs code once in a fresh sandbox, prints its output, and saves its images.
//!
//! Exit status: 0 on success, 1 when the code raised, 124 on timeout, 125 when its interpreter
//! died, 130 when it was interrupted, 2 when nothing could be run.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::asked_to_end;
use super::cli::{CodeSource, RunArguments};
use super::output::{INTERRUPTED, Interrupted, say, standard_error, standard_output};
use super::{StartMode, backend, progress, sessions};
use crate::config::{Mount, Settings};
use crate::sandbox::Exit;
use crate::session::{
    Approver, ExecuteRequest, FileNote, Image, InsidePath, Outcome, Part, Principal, Refused,
    SessionId, Sessions, StateAfter, Status, Stream,
};

/// A terminal shows everything; this only keeps a runaway loop from filling memory.
const MAX_CHARS: usize = 50_000_000;
/// The largest file copied out of the sandbox.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// Executes the command.
pub(super) async fn execute(
    arguments: &RunArguments,
    settings: Settings,
) -> anyhow::Result<ExitCode> {
    let (name, code) = read_code(&arguments.source())?;
    let backend = backend(&settings, StartMode::OneShot, None)?;
    let shown = tokio::spawn(progress::show(backend.preparation()));
    let sessions = sessions(&settings, StartMode::OneShot, backend, None, None)?;
    let ran = carry_out(arguments, &settings, &sessions, (name, code), shown).await;
    // Also when the reader of the output is gone: the sandbox and its files must be removed.
    sessions.shut_down().await;
    ran
}

async fn carry_out(
    arguments: &RunArguments,
    settings: &Settings,
    sessions: &Sessions,
    (name, code): (String, String),
    shown: JoinHandle<()>,
) -> anyhow::Result<ExitCode> {
    let cancel = CancellationToken::new();
    let interrupted = cancel.clone();
    tokio::spawn(async move {
        asked_to_end().await;
        interrupted.cancel();
    });
    let request = ExecuteRequest {
        code,
        timeout: settings.timeout,
        max_output_chars: MAX_CHARS,
        asking: Approver::Nobody,
        rules: None,
        recorder: Default::default(),
    };
    let (owner, session) = (Principal::local(), SessionId::default_session());
    let ran = sessions.execute(&owner, &session, request, cancel).await;
    shown.abort();
    let outcome = match ran {
        Ok(outcome) => outcome,
        // The code had not started: Python was still being prepared.
        Err(Refused::CancelledWhileWaiting) => return Err(Interrupted.into()),
        Err(refused) => return Err(refused.into()),
    };
    let folder = arguments
        .output_dir
        .clone()
        .unwrap_or_else(|| PathBuf::from("."));
    print(&outcome, &folder, &name)?;
    if settings.workspace.is_none() {
        let made = files_made(&outcome, &settings.mounts);
        let folder = arguments.output_dir.as_deref();
        keep_files(sessions, &owner, &session, &made, folder).await?;
    }
    Ok(exit_status(&outcome.status))
}

/// Returns the code and a base name for the files it creates.
fn read_code(source: &CodeSource) -> anyhow::Result<(String, String)> {
    match source {
        CodeSource::Text(code) => Ok(("image".to_owned(), code.clone())),
        CodeSource::StandardInput => {
            let mut code = String::new();
            std::io::stdin()
                .read_to_string(&mut code)
                .context("could not read the code from standard input")?;
            Ok(("image".to_owned(), code))
        }
        CodeSource::File(path) => {
            let code = fs::read_to_string(path)
                .with_context(|| format!("could not read {}", path.display()))?;
            let name = path.file_stem().map_or_else(
                || "image".to_owned(),
                |stem| stem.to_string_lossy().into_owned(),
            );
            Ok((name, code))
        }
    }
}

fn print(outcome: &Outcome, folder: &Path, name: &str) -> anyhow::Result<()> {
    let (mut out, mut err) = (standard_output(), standard_error());
    let mut images = 0;
    for part in &outcome.output.parts {
        match part {
            Part::Text {
                stream: Stream::Stderr,
                text,
            } => err.write_all(text.as_bytes())?,
            Part::Text {
                stream: Stream::Traceback,
                text,
            } => writeln!(err, "{}", text.trim_end())?,
            Part::Text {
                stream: Stream::Stdout,
                text,
            } => out.write_all(text.as_bytes())?,
            Part::Text {
                stream: Stream::Value | Stream::Display,
                text,
            } => writeln!(out, "{}", text.trim_end())?,
            Part::Cut { chars, .. } => writeln!(err, "[… {chars} characters left out …]")?,
            Part::Image(image) => {
                images += 1;
                let path = save_image(image, folder, name, images)?;
                writeln!(err, "[image saved as {}]", path.display())?;
            }
        }
    }
    out.flush()?;
    // The notes are for callers that return to a session; this session ends.
    if let Some(sentence) = ending(&outcome.status) {
        writeln!(err, "cellblock: {sentence}")?;
    }
    for blocked in &outcome.blocked {
        writeln!(err, "cellblock: {blocked}")?;
    }
    Ok(())
}

fn save_image(image: &Image, folder: &Path, name: &str, number: u32) -> anyhow::Result<PathBuf> {
    let extension = image.kind.extension();
    let path = folder.join(format!("{name}-{number}.{extension}"));
    fs::create_dir_all(folder).with_context(|| format!("could not make {}", folder.display()))?;
    fs::write(&path, &image.bytes).with_context(|| format!("could not save {}", path.display()))?;
    Ok(path)
}

/// Returns the files that would be lost with the sandbox: files in mounted folders are on the host
/// already.
fn files_made<'a>(outcome: &'a Outcome, mounts: &[Mount]) -> Vec<&'a FileNote> {
    let is_mounted = |file: &FileNote| {
        mounts
            .iter()
            .any(|mount| Path::new(&file.path).starts_with(&mount.inside))
    };
    let created = outcome.files.iter().flat_map(|files| &files.created);
    created.filter(|file| !is_mounted(file)).collect()
}

/// Copies files out of the private folder of a session, or warns that they will be lost.
async fn keep_files(
    sessions: &Sessions,
    owner: &Principal,
    session: &SessionId,
    made: &[&FileNote],
    folder: Option<&Path>,
) -> anyhow::Result<()> {
    if made.is_empty() {
        return Ok(());
    }
    let Some(folder) = folder else {
        let names: Vec<&str> = made.iter().map(|file| file.path.as_str()).collect();
        say(format_args!(
            "cellblock: files left in the sandbox are gone: {} (keep them with --output-dir DIR or \
             --workspace DIR)",
            names.join(", ")
        ));
        return Ok(());
    };
    for file in made {
        // The name is a claim of the sandbox. It must be a valid relative path before it is used as
        // one.
        let Ok(path) = file.path.parse::<InsidePath>() else {
            continue;
        };
        let target = folder.join(path.as_str());
        if target.exists() {
            say(format_args!(
                "cellblock: {} exists and was not replaced",
                target.display()
            ));
            continue;
        }
        fs::create_dir_all(target.parent().unwrap_or(folder))?;
        let mut sink = tokio::fs::File::create_new(&target)
            .await
            .with_context(|| format!("could not save {}", target.display()))?;
        match sessions
            .read_file(owner, session, &path, MAX_FILE_BYTES, &mut sink)
            .await
        {
            Ok(_) => say(format_args!("[file saved as {}]", target.display())),
            Err(refused) => say(format_args!("cellblock: {refused}")),
        }
    }
    Ok(())
}

/// Returns a message about the end of the run, beyond its output.
fn ending(status: &Status) -> Option<String> {
    match status {
        Status::Completed | Status::Raised(_) => None,
        Status::TimedOut { limit, state } => Some(format!(
            "stopped after {} s{}",
            limit.as_secs_f64(),
            if *state == StateAfter::Lost {
                "; the code ignored the interrupt and was killed"
            } else {
                ""
            }
        )),
        Status::Cancelled { .. } => Some("interrupted".to_owned()),
        Status::Died {
            exit: Exit::Code(code),
        } => Some(format!("Python left with exit code {code}")),
        Status::Died {
            exit: Exit::Signal(signal),
        } => Some(format!("Python was ended by signal {signal}")),
        Status::Died {
            exit: Exit::OutOfMemory { limit, .. },
        } => Some(format!(
            "the code needed more than its {} MiB of memory (see --memory)",
            limit >> 20
        )),
        Status::Died {
            exit: Exit::OutOfMemoryOutside { whose, .. },
        } => Some(format!("Python was killed because {whose}")),
        Status::Died {
            exit: Exit::SandboxGone { .. },
        } => Some(
            "the sandbox was ended from outside, or the jail or the container engine went away"
                .to_owned(),
        ),
        other => Some(format!("Python ended: {}", other.name().replace('_', " "))),
    }
}

fn exit_status(status: &Status) -> ExitCode {
    match status {
        Status::Completed => ExitCode::SUCCESS,
        Status::Raised(_) => ExitCode::from(1),
        Status::TimedOut { .. } => ExitCode::from(124),
        Status::Cancelled { .. } => ExitCode::from(INTERRUPTED),
        _ => ExitCode::from(125),
    }
}
