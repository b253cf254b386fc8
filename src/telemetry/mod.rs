//! The log: lines on standard error, and only there, because standard output may be the MCP connection.
//!
//! A filter is a level (`debug`) or a list as `RUST_LOG` takes it (`warn,cellblock::session=debug`). Lines are
//! plain text, on a terminal too: most are read in a client's log file.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// However much an operator asks to see.
const QUIET_LIBRARY: &str = "rmcp=warn";

/// Why there is no log.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    #[error("\"{filter}\" is not a log filter; write a level such as info, or a list such as warn,cellblock=debug")]
    Filter {
        filter: String,
        #[source]
        cause: tracing_subscriber::filter::ParseError,
    },
    #[error("the log was started twice")]
    StartedTwice,
}

/// Starts the log for the whole process. `filter` is what the operator asked for; `fallback` is the level that suits the command.
pub fn start(filter: Option<&str>, fallback: &str) -> Result<(), TelemetryError> {
    let filter = parse_filter(filter.unwrap_or(fallback))?;
    let subscriber = subscriber(filter, std::io::stderr);
    tracing::subscriber::set_global_default(subscriber).map_err(|_| TelemetryError::StartedTwice)
}

fn parse_filter(filter: &str) -> Result<EnvFilter, TelemetryError> {
    let parsed =
        EnvFilter::try_new(filter).map_err(|cause| TelemetryError::Filter { filter: filter.to_owned(), cause })?;
    // The MCP library logs whole requests, and with them users' code, from level info on.
    Ok(parsed.add_directive(QUIET_LIBRARY.parse().expect("a constant directive parses")))
}

fn subscriber<W>(filter: EnvFilter, writer: W) -> impl tracing::Subscriber + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(writer).finish()
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(filter: &str) -> String {
        let kept = Kept::default();
        let writer = kept.clone();
        let subscriber = subscriber(parse_filter(filter).unwrap(), move || writer.clone());
        tracing::subscriber::with_default(subscriber, || {
            tracing::debug!("a step");
            tracing::warn!(count = 3, "a warning");
        });
        String::from_utf8(kept.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn the_filter_decides_what_is_written() {
        let quiet = written("warn");
        assert!(quiet.contains("a warning count=3") && !quiet.contains("a step"), "{quiet}");
        assert!(!quiet.contains('\u{1b}'), "there are no colour codes");
        assert!(written("debug").contains("a step"));
        assert_eq!(written("off"), "");
    }

    #[test]
    fn a_filter_that_is_none_is_refused() {
        assert!(parse_filter("cellblock=loud").unwrap_err().to_string().contains("cellblock=loud"));
    }
}
