//! Metrics in the Prometheus text format.
//!
//! Every label has a small, fixed set of values: they are `&'static str` or numbers of ours, so a
//! caller cannot create new ones, and none can be a principal or a session.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use super::health::Health;
use super::process::ProcessStats;

/// The content type of `render`.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Upper bounds in seconds: from a cell that only prints to one that uses its whole timeout.
const SECONDS: [f64; 15] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0, 3600.0,
];

/// All metrics. Clones share them.
#[derive(Clone)]
pub struct Metrics(Arc<Figures>);

struct Figures {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    connections: Gauge,
    authentications: Family<Labels<1>, Counter>,
    tool_calls: Family<Labels<2>, Counter>,
    tool_seconds: Family<Labels<1>, Histogram, fn() -> Histogram>,
    executions: Family<Labels<1>, Counter>,
    execution_seconds: Histogram,
    sessions: Gauge,
    sessions_created: Counter,
    sessions_ended: Family<Labels<1>, Counter>,
    queue: Gauge,
    quota_refusals: Family<Labels<1>, Counter>,
    approvals: Family<Labels<1>, Counter>,
    file_bytes: Family<Labels<1>, Counter<u64, AtomicU64>>,
}

type Labels<const N: usize> = [(&'static str, &'static str); N];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    route: &'static str,
    status: u16,
}

/// The direction of a file transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Into,
    OutOf,
}

impl Metrics {
    /// Creates metrics that all start at zero. `health` is queried when they are rendered.
    pub fn new(health: &Health) -> Metrics {
        let seconds = || Histogram::new(SECONDS);
        let figures = Figures {
            registry: Registry::default(),
            requests: Family::default(),
            connections: Gauge::default(),
            authentications: Family::default(),
            tool_calls: Family::default(),
            tool_seconds: Family::new_with_constructor(seconds),
            executions: Family::default(),
            execution_seconds: seconds(),
            sessions: Gauge::default(),
            sessions_created: Counter::default(),
            sessions_ended: Family::default(),
            queue: Gauge::default(),
            quota_refusals: Family::default(),
            approvals: Family::default(),
            file_bytes: Family::default(),
        };
        Metrics(Arc::new(figures.registered(health)))
    }

    /// Counts an answered request. `route` is its pattern, never its path.
    pub fn request(&self, route: &'static str, status: u16) {
        self.0
            .requests
            .get_or_create(&RequestLabels { route, status })
            .inc();
    }

    /// Counts a connection. It counts as open until the returned value is dropped.
    #[must_use = "the connection counts as closed when this is dropped"]
    pub fn connection(&self) -> CountedConnection {
        self.0.connections.inc();
        CountedConnection(self.clone())
    }

    /// Counts an authentication: `accepted`, or the reason of the rejection in a word.
    pub fn authenticated(&self, outcome: &'static str) {
        self.0
            .authentications
            .get_or_create(&[("outcome", outcome)])
            .inc();
    }

    /// Counts a tool call. `tool` is a name from the list of tools, not one that a caller made up.
    pub fn tool_called(&self, tool: &'static str, outcome: &'static str, elapsed: Duration) {
        self.0
            .tool_calls
            .get_or_create(&[("tool", tool), ("outcome", outcome)])
            .inc();
        self.0
            .tool_seconds
            .get_or_create(&[("tool", tool)])
            .observe(elapsed.as_secs_f64());
    }

    /// Counts an execution that ended.
    pub fn executed(&self, status: &'static str, elapsed: Duration) {
        self.0.executions.get_or_create(&[("status", status)]).inc();
        self.0.execution_seconds.observe(elapsed.as_secs_f64());
    }

    /// Sets the number of live sessions.
    pub fn sessions_live(&self, count: usize) {
        self.0.sessions.set(count as i64);
    }

    pub fn session_created(&self) {
        self.0.sessions_created.inc();
    }

    pub fn session_ended(&self, reason: &'static str) {
        self.0
            .sessions_ended
            .get_or_create(&[("reason", reason)])
            .inc();
    }

    /// Sets the number of queued executions.
    pub fn queue_length(&self, count: usize) {
        self.0.queue.set(count as i64);
    }

    pub fn quota_refused(&self, quota: &'static str) {
        self.0
            .quota_refusals
            .get_or_create(&[("quota", quota)])
            .inc();
    }

    /// Counts a decision on an approval: `granted`, `refused` or `expired`.
    pub fn approved(&self, answer: &'static str) {
        self.0.approvals.get_or_create(&[("answer", answer)]).inc();
    }

    pub fn file_moved(&self, direction: Direction, bytes: u64) {
        let direction = match direction {
            Direction::Into => "into",
            Direction::OutOf => "out_of",
        };
        self.0
            .file_bytes
            .get_or_create(&[("direction", direction)])
            .inc_by(bytes);
    }

    /// Renders all metrics as text.
    pub fn render(&self) -> String {
        let mut text = String::with_capacity(16 << 10);
        encode(&mut text, &self.0.registry).expect("a string takes every text");
        text
    }
}

impl Figures {
    fn registered(mut self, health: &Health) -> Figures {
        let mut whole = Registry::default();
        // These have the standard names that dashboards expect of every program.
        whole.register_collector(Box::new(ProcessStats));
        let registry = whole.sub_registry_with_prefix("cellblock");
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        registry.register("build", "The version that runs", Info::new(version));
        registry.register("http_requests", "Requests answered", self.requests.clone());
        registry.register(
            "http_connections",
            "Connections open",
            self.connections.clone(),
        );
        registry.register(
            "authentications",
            "Callers known or refused",
            self.authentications.clone(),
        );
        registry.register("tool_calls", "Calls of tools", self.tool_calls.clone());
        registry.register(
            "tool_call_seconds",
            "Time that calls of tools took",
            self.tool_seconds.clone(),
        );
        registry.register(
            "executions",
            "Executions that ended",
            self.executions.clone(),
        );
        registry.register(
            "execution_seconds",
            "Time that executions took",
            self.execution_seconds.clone(),
        );
        registry.register("sessions", "Sessions that exist", self.sessions.clone());
        registry.register(
            "sessions_created",
            "Sessions that began",
            self.sessions_created.clone(),
        );
        registry.register(
            "sessions_ended",
            "Sessions that ended",
            self.sessions_ended.clone(),
        );
        registry.register("queue_length", "Executions that wait", self.queue.clone());
        registry.register(
            "approvals",
            "Decisions about what code may do",
            self.approvals.clone(),
        );
        registry.register(
            "quota_refusals",
            "Calls refused by a quota",
            self.quota_refusals.clone(),
        );
        registry.register(
            "file_bytes",
            "Bytes of files moved into and out of sessions",
            self.file_bytes.clone(),
        );
        registry.register_collector(Box::new(Ready(health.clone())));
        self.registry = whole;
        self
    }
}

/// An open connection, counted until it is dropped.
pub struct CountedConnection(Metrics);

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.0.0.connections.dec();
    }
}

#[derive(Debug)]
struct Ready(Health);

impl Collector for Ready {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let ready = ConstGauge::new(i64::from(self.0.ready().is_ok()));
        ready.encode(encoder.encode_descriptor(
            "ready",
            "Whether the server can take work",
            None,
            ready.metric_type(),
        )?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::health::HealthPart;
    use super::*;

    #[track_caller]
    fn assert_has(text: &str, line: &str) {
        assert!(
            text.lines().any(|known| known == line),
            "{line} is not in\n{text}"
        );
    }

    #[test]
    fn everything_that_happens_is_counted() {
        let metrics = Metrics::new(&Health::new());
        metrics.request("/mcp", 200);
        metrics.clone().request("/mcp", 200);
        metrics.authenticated("expired");
        metrics.tool_called(
            "execute_ipython_cell",
            "succeeded",
            Duration::from_millis(2),
        );
        metrics.executed("ok", Duration::from_millis(20));
        metrics.sessions_live(3);
        metrics.session_created();
        metrics.session_ended("idle");
        metrics.queue_length(2);
        metrics.quota_refused("sessions");
        metrics.approved("granted");
        metrics.file_moved(Direction::Into, 1_000);
        metrics.file_moved(Direction::OutOf, 5);
        let text = metrics.render();
        for line in [
            "cellblock_http_requests_total{route=\"/mcp\",status=\"200\"} 2",
            "cellblock_authentications_total{outcome=\"expired\"} 1",
            "cellblock_tool_calls_total{tool=\"execute_ipython_cell\",outcome=\"succeeded\"} 1",
            "cellblock_tool_call_seconds_bucket{le=\"0.0025\",tool=\"execute_ipython_cell\"} 1",
            "cellblock_tool_call_seconds_bucket{le=\"0.001\",tool=\"execute_ipython_cell\"} 0",
            "cellblock_executions_total{status=\"ok\"} 1",
            "cellblock_execution_seconds_count 1",
            "cellblock_sessions 3",
            "cellblock_sessions_created_total 1",
            "cellblock_sessions_ended_total{reason=\"idle\"} 1",
            "cellblock_queue_length 2",
            "cellblock_approvals_total{answer=\"granted\"} 1",
            "cellblock_quota_refusals_total{quota=\"sessions\"} 1",
            "cellblock_file_bytes_total{direction=\"into\"} 1000",
            "cellblock_file_bytes_total{direction=\"out_of\"} 5",
            "cellblock_ready 1",
            "# EOF",
        ] {
            assert_has(&text, line);
        }
        assert!(text.contains("cellblock_build_info{version="), "{text}");
        for name in [
            "process_resident_memory_bytes ",
            "process_open_fds ",
            "process_max_fds ",
            "process_cpu_seconds_total ",
        ] {
            let line = text
                .lines()
                .find(|line| line.starts_with(name))
                .unwrap_or_else(|| panic!("{name}\n{text}"));
            assert!(line[name.len()..].parse::<f64>().is_ok(), "{line}");
        }
    }

    #[test]
    fn a_connection_counts_until_it_is_dropped() {
        let metrics = Metrics::new(&Health::new());
        let (first, second) = (metrics.connection(), metrics.connection());
        assert_has(&metrics.render(), "cellblock_http_connections 2");
        drop(first);
        assert_has(&metrics.render(), "cellblock_http_connections 1");
        drop(second);
        assert_has(&metrics.render(), "cellblock_http_connections 0");
    }

    #[test]
    fn readiness_is_asked_for_at_every_rendering() {
        let health = Health::new();
        let metrics = Metrics::new(&health);
        assert_has(&metrics.render(), "cellblock_ready 1");
        health.not_ready(HealthPart::Audit, "no space left");
        assert_has(&metrics.render(), "cellblock_ready 0");
    }
}
