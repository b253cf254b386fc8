//! What operators see of a running server: its log, its figures, its traces, its health.
//!
//! `log` writes lines to standard error. `traces` sends spans to a collector, if one was named; otherwise there is no layer for them at
//! all, and a span costs what it costs for the log. `metrics` counts, and `health` says whether the server can take work.
//!
//! A leaf: others tell it what happened. Nothing here holds code, output, tokens or whole requests, and no figure names a principal or a
//! session.

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

pub use health::{Health, Part};
pub use log::LogFormat;
pub use metrics::{CONTENT_TYPE, Direction, Metrics, OpenConnection};
pub use traces::{Parent, parent_from, trace_id_of, traceparent_of};

/// How the process tells what it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TelemetrySettings {
    /// What the operator asked to see: a level, or a list as `RUST_LOG` takes it.
    pub filter: Option<String>,
    /// The level that suits the command.
    pub fallback: &'static str,
    pub format: LogFormat,
    /// The address that spans are sent to, with its path.
    pub traces: Option<String>,
}

/// Why there is no log.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    #[error(
        "\"{filter}\" is not a log filter; write a level such as info, or a list such as warn,cellblock=debug"
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

/// What must be ended in order, so that the last spans arrive.
#[must_use = "spans that are not flushed are lost"]
pub struct Telemetry {
    traces: Option<SdkTracerProvider>,
}

impl Telemetry {
    /// Sends what is left to the collector, and gives up after `limit`.
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
