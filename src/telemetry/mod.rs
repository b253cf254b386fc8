//! Observability of a running server: log, metrics, traces and health.
//!
//! `log` writes lines to standard error. `traces` sends spans to a collector, if one is configured;
//! otherwise it adds no layer, and a span costs only its part in the log. `metrics` counts, and
//! `health` reports whether the server can accept work.
//!
//! This is a leaf module: other modules report events to it. It never holds code, output, tokens or
//! whole requests, and no metric names a principal or a session.

mod collector;
mod health;
mod log;
mod metrics;
mod process;
mod traces;

use std::time::Duration;

use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{Layer, Registry};

pub use health::{Health, HealthPart};
pub use log::LogFormat;
pub use metrics::{CONTENT_TYPE, CountedConnection, Direction, Metrics};
pub use traces::{Parent, parent_from, trace_id_of, traceparent_of};

/// Settings of the log and the traces of the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TelemetrySettings {
    /// The operator's log filter: a level, or a list in the syntax of `RUST_LOG`.
    pub filter: Option<String>,
    /// The default level of the command.
    pub fallback: &'static str,
    pub format: LogFormat,
    /// The URL that spans are sent to, with its path.
    pub traces: Option<String>,
}

/// Why there is no log.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    #[error(
        "\"{filter}\" is not a log filter; write a level such as info, or a list such as \
         warn,cellblock=debug"
    )]
    Filter {
        filter: String,
        #[source]
        cause: tracing_subscriber::filter::ParseError,
    },
    #[error("spans cannot be sent to the collector")]
    Traces {
        #[source]
        cause: opentelemetry_otlp::ExporterBuildError,
    },
    #[error("the log was started twice")]
    StartedTwice,
}

/// The state to shut down in order, so that the last spans arrive.
#[must_use = "spans that are not flushed are lost"]
pub struct Telemetry {
    traces: Option<SdkTracerProvider>,
}

impl Telemetry {
    /// Flushes the remaining spans to the collector, and gives up after `limit`.
    pub fn shut_down(self, limit: Duration) {
        if let Some(provider) = self.traces
            && let Err(error) = provider.shutdown_with_timeout(limit)
        {
            tracing::warn!(%error, "the last spans did not reach the collector");
        }
    }
}

/// Starts the log, and traces if there is a collector, for the whole process.
pub fn start(settings: &TelemetrySettings) -> Result<Telemetry, TelemetryError> {
    let filter = log::parse_filter(settings.filter.as_deref().unwrap_or(settings.fallback))?;
    let lines = log::layer(settings.format, std::io::stderr);
    let provider = settings
        .traces
        .as_deref()
        .map(traces::provider)
        .transpose()?;
    let set = match &provider {
        None => {
            tracing::subscriber::set_global_default(Registry::default().with(lines).with(filter))
        }
        Some(provider) => {
            let layers = Registry::default()
                .with(lines.with_filter(filter))
                .with(traces::layer(provider));
            tracing::subscriber::set_global_default(layers)
        }
    };
    set.map_err(|_| TelemetryError::StartedTwice)?;
    Ok(Telemetry { traces: provider })
}
