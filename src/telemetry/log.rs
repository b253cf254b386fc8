//! The log: lines on standard error, and only there, because standard output may be the MCP
//! connection.
//!
//! A filter is a level (`debug`) or a list in the syntax of `RUST_LOG`
//! (`warn,cellblock::session=debug`). Lines are plain text, on a terminal too: most are read in a
//! client's log file. With `json` each is an object, with the fields of the spans around it.

use tracing_subscriber::fmt::{self, MakeWriter};
use tracing_subscriber::{EnvFilter, Layer, Registry};

use super::TelemetryError;

/// Applies whatever the operator's filter is.
const QUIET_LIBRARY: &str = "rmcp=warn";

/// The format of lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogFormat {
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl LogFormat {
    pub const ALL: [LogFormat; 2] = [LogFormat::Text, LogFormat::Json];

    /// The name of the format in settings.
    pub fn name(self) -> &'static str {
        match self {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        }
    }

    pub fn from_name(name: &str) -> Option<LogFormat> {
        LogFormat::ALL
            .into_iter()
            .find(|format| format.name() == name)
    }
}

pub(super) fn parse_filter(filter: &str) -> Result<EnvFilter, TelemetryError> {
    let parsed = EnvFilter::try_new(filter).map_err(|cause| TelemetryError::Filter {
        filter: filter.to_owned(),
        cause,
    })?;
    // The MCP library logs whole requests, and with them users' code, from level info on.
    Ok(parsed.add_directive(QUIET_LIBRARY.parse().expect("a constant directive parses")))
}

/// Creates the layer that writes lines.
pub(super) fn layer<W>(format: LogFormat, writer: W) -> Box<dyn Layer<Registry> + Send + Sync>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let layer = fmt::layer().with_ansi(false).with_writer(writer);
    match format {
        LogFormat::Text => layer.boxed(),
        LogFormat::Json => layer
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(true)
            .boxed(),
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use serde_json::Value;
    use tracing_subscriber::layer::SubscriberExt;

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

    fn written(filter: &str, format: LogFormat, tell: impl FnOnce()) -> String {
        let kept = Kept::default();
        let writer = kept.clone();
        let lines = layer(format, move || writer.clone());
        let subscriber = Registry::default()
            .with(lines)
            .with(parse_filter(filter).unwrap());
        tracing::subscriber::with_default(subscriber, tell);
        String::from_utf8(kept.0.lock().unwrap().clone()).unwrap()
    }

    fn a_step_and_a_warning() {
        tracing::debug!("a step");
        tracing::warn!(count = 3, "a warning");
    }

    #[test]
    fn the_filter_decides_what_is_written() {
        let quiet = written("warn", LogFormat::Text, a_step_and_a_warning);
        assert!(
            quiet.contains("a warning count=3") && !quiet.contains("a step"),
            "{quiet}"
        );
        assert!(!quiet.contains('\u{1b}'), "there are no colour codes");
        assert!(written("debug", LogFormat::Text, a_step_and_a_warning).contains("a step"));
        assert_eq!(written("off", LogFormat::Text, a_step_and_a_warning), "");
    }

    #[test]
    fn a_filter_that_is_none_is_refused() {
        assert!(
            parse_filter("cellblock=loud")
                .unwrap_err()
                .to_string()
                .contains("cellblock=loud")
        );
    }

    #[test]
    fn a_line_of_json_has_the_fields_of_the_event_and_of_the_spans_around_it() {
        let lines = written("info", LogFormat::Json, || {
            let span =
                tracing::info_span!("request", method = "POST", status = tracing::field::Empty);
            let _entered = span.enter();
            span.record("status", 200);
            tracing::info!(hostile = "two\nlines \"quoted\"", count = 3, "done");
        });
        assert_eq!(lines.lines().count(), 1, "{lines}");
        let line: Value = serde_json::from_str(&lines).unwrap();
        assert_eq!(
            (&line["level"], &line["message"], &line["count"]),
            (&"INFO".into(), &"done".into(), &3.into())
        );
        assert_eq!(line["hostile"], "two\nlines \"quoted\"");
        let span = &line["spans"][0];
        assert_eq!(
            (&span["name"], &span["method"], &span["status"]),
            (&"request".into(), &"POST".into(), &200.into())
        );
    }

    #[test]
    fn a_line_of_text_stays_one_line() {
        let lines = written("info", LogFormat::Text, || {
            tracing::info!(hostile = "two\nlines\u{1b}[2J", "done");
        });
        assert_eq!(lines.lines().count(), 1, "{lines:?}");
        assert!(!lines.contains('\u{1b}'), "{lines:?}");
    }
}
