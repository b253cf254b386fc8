//! Output of commands, and the exit status of a command that failed.
//!
//! A command that prints exits quietly when its reader is gone, as in
//! `cellblock env show … | head`, with the status that a shell reports for a program killed by
//! SIGPIPE. The signal itself stays ignored: a write to a jail or an engine that is gone must be an
//! error, not the end of this process (docs/decisions/0034).
//!
//! Nothing here panics. `eprintln!` and `println!` panic when the other end is closed.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

/// Shell status of a program killed by SIGPIPE.
const BROKEN_PIPE: u8 = 128 + 13;
/// Shell status of a program killed by SIGINT.
pub(super) const INTERRUPTED: u8 = 128 + 2;
/// Status of a command that could not be executed.
pub(super) const FAILED: u8 = 2;

/// The reader of standard output or standard error is gone.
#[derive(Debug, thiserror::Error)]
#[error("nobody reads the output any more")]
struct ReaderGone;

/// A signal stopped the command before it was done.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(super) struct Interrupted;

/// A stream of this process whose reader may be gone.
pub(super) struct Printed<W>(W);

impl<W: Write> Write for Printed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(reader_gone)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(reader_gone)
    }
}

fn reader_gone(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => io::Error::new(io::ErrorKind::BrokenPipe, ReaderGone),
        _ => error,
    }
}

/// Standard output. It is line-buffered and must be flushed where the last line may be incomplete.
pub(super) fn standard_output() -> Printed<io::Stdout> {
    Printed(io::stdout())
}

pub(super) fn standard_error() -> Printed<io::Stderr> {
    Printed(io::stderr())
}

/// Prints to standard output.
pub(super) fn print(text: &str) -> io::Result<()> {
    let mut output = standard_output();
    output.write_all(text.as_bytes())?;
    output.flush()
}

/// Writes a line to standard error, ignoring errors.
pub(super) fn say(line: impl fmt::Display) {
    // A single write, so that lines of several processes do not interleave.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Reports why a command failed, and returns its exit status.
pub(super) fn failure(error: &anyhow::Error) -> ExitCode {
    if is_reader_gone(error) {
        return ExitCode::from(BROKEN_PIPE);
    }
    say(format_args!("cellblock: {error:#}"));
    ExitCode::from(if error.is::<Interrupted>() {
        INTERRUPTED
    } else {
        FAILED
    })
}

fn is_reader_gone(error: &anyhow::Error) -> bool {
    let inner = |cause: &(dyn std::error::Error + 'static)| {
        let inner = cause
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        inner.is_some_and(|inner| inner.is::<ReaderGone>())
    };
    error.chain().any(inner)
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    /// A pipe without a reader.
    struct Closed;

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn only_a_reader_of_our_own_output_that_is_gone_ends_a_command_quietly() {
        let printed = Printed(Closed)
            .write_all(b"x")
            .context("while printing")
            .unwrap_err();
        assert!(is_reader_gone(&printed));
        let elsewhere: io::Error = io::ErrorKind::BrokenPipe.into();
        assert!(!is_reader_gone(
            &anyhow::Error::new(elsewhere).context("while asking the engine")
        ));
    }
}
