//! Traces: where the time of a request went, as part of the caller's own trace.
//!
//! A caller passes its trace context in the header `traceparent`, or in `_meta.traceparent` of an
//! MCP message. `parent_from` parses it strictly, [`Parent::adopt`] makes a span part of that
//! trace, and `traceparent_of` returns it for outgoing calls. Spans are collected by a thread of
//! the OpenTelemetry library and sent in batches; when the collector is slow or unreachable, spans
//! are dropped and requests continue.
//!
//! Only spans of our own crates are sent. Libraries would put whole requests into theirs.

use std::str::FromStr;

use opentelemetry::trace::{
    SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::level_filters::LevelFilter;
use tracing::{Span, Subscriber};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::registry::LookupSpan;

use super::TelemetryError;
use super::collector::{CollectorClient, MAX_EXPORT_TIME};

/// The trace and the span of a caller.
#[derive(Debug, Clone, PartialEq)]
pub struct Parent(SpanContext);

/// Characters of a caller's `tracestate` that are propagated: the minimum that the specification
/// requires.
const MAX_STATE_LENGTH: usize = 512;

/// Parses a caller's trace context. A value that does not exactly follow W3C Trace Context counts
/// as absent; an invalid `tracestate` is omitted.
pub fn parent_from(traceparent: &str, tracestate: &str) -> Option<Parent> {
    let mut parts = traceparent.trim().split('-');
    let (version, trace, span, flags) =
        (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let version = lower_hex(version, 2)?;
    // Later versions may add fields; version 0 has no more, and version 0xff is forbidden.
    if version == 0xff || (version == 0 && parts.next().is_some()) {
        return None;
    }
    let trace = TraceId::from(lower_hex(trace, 32)?);
    let span = SpanId::from(lower_hex(span, 16)? as u64);
    let flags = TraceFlags::new(lower_hex(flags, 2)? as u8) & TraceFlags::SAMPLED;
    let state = if tracestate.len() <= MAX_STATE_LENGTH {
        TraceState::from_str(tracestate).ok()
    } else {
        None
    };
    let context = SpanContext::new(trace, span, flags, true, state.unwrap_or_default());
    context.is_valid().then_some(Parent(context))
}

fn lower_hex(text: &str, digits: usize) -> Option<u128> {
    let is_lower = text
        .bytes()
        .all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    (text.len() == digits && is_lower)
        .then(|| u128::from_str_radix(text, 16).ok())
        .flatten()
}

impl Parent {
    /// Makes `span` a part of the caller's trace. It must not have been entered yet. Without a
    /// collector this does nothing.
    pub fn adopt(&self, span: &Span) {
        // There is no collector, or the span was entered too early; the request continues without
        // it.
        if let Err(error) = span.set_parent(Context::new().with_remote_span_context(self.0.clone()))
        {
            tracing::trace!(%error, "a span is not part of its caller's trace");
        }
    }

    /// The caller's trace id as 32 hexadecimal digits: it links our records to theirs even without
    /// a collector.
    pub fn trace_id(&self) -> String {
        self.0.trace_id().to_string()
    }
}

/// Returns the trace id of `span` as 32 hexadecimal digits, if tracing is on.
pub fn trace_id_of(span: &Span) -> Option<String> {
    valid_context(span).map(|context| context.trace_id().to_string())
}

/// Returns the `traceparent` for calls made within `span`, so that the callee's spans become part
/// of the trace.
pub fn traceparent_of(span: &Span) -> Option<String> {
    let context = valid_context(span)?;
    let flags = context.trace_flags().to_u8();
    Some(format!(
        "00-{}-{}-{flags:02x}",
        context.trace_id(),
        context.span_id()
    ))
}

fn valid_context(span: &Span) -> Option<SpanContext> {
    let context = span.context().span().span_context().clone();
    context.is_valid().then_some(context)
}

/// Creates the provider that collects spans and sends them to `endpoint`.
pub(super) fn provider(endpoint: &str) -> Result<SdkTracerProvider, TelemetryError> {
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(CollectorClient::new())
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(endpoint)
        .with_timeout(MAX_EXPORT_TIME)
        .build()
        .map_err(|cause| TelemetryError::Traces { cause })?;
    // Set first, so that OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES can override it.
    let ours = [
        KeyValue::new("service.name", "cellblock"),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
    ];
    let resource = Resource::builder_empty()
        .with_attributes(ours)
        .with_detector(Box::new(
            opentelemetry_sdk::resource::EnvResourceDetector::new(),
        ))
        .build();
    Ok(SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(resource)
        .build())
}

/// Creates the layer that turns our spans into spans of a trace.
pub(super) fn layer<S>(provider: &SdkTracerProvider) -> impl Layer<S> + Send + Sync + use<S>
where
    S: Subscriber + for<'span> LookupSpan<'span> + Send + Sync,
{
    tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("cellblock"))
        .with_location(false)
        .with_threads(false)
        .with_tracked_inactivity(false)
        .with_filter(Targets::new().with_target("cellblock", LevelFilter::INFO))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::sync::mpsc::{Receiver, sync_channel};
    use std::time::Duration;

    use tracing_subscriber::Registry;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_well_formed_parent_is_understood_and_nothing_else() {
        let parent = parent_from(PARENT, "vendor=value").unwrap();
        assert_eq!(parent.trace_id(), TRACE);
        assert!(parent.0.is_remote() && parent.0.is_sampled());
        assert_eq!(parent.0.trace_state().get("vendor"), Some("value"));
        assert!(
            !parent_from(&PARENT.replace("-01", "-00"), "")
                .unwrap()
                .0
                .is_sampled()
        );
        assert!(
            parent_from(&PARENT.replacen("00-", "42-", 1), "").is_some(),
            "a later version"
        );
        assert!(parent_from(&format!("{}-more", PARENT.replacen("00-", "42-", 1)), "").is_some());
        for wrong in [
            String::new(),
            "nonsense".to_owned(),
            format!("{PARENT}-more"),
            PARENT.replacen("00-", "ff-", 1),
            PARENT.replacen("4b", "4B", 1),
            PARENT.replacen("4b", "", 1),
            PARENT.replacen("4b", "+b", 1),
            PARENT.replace(TRACE, &"0".repeat(32)),
            PARENT.replace("00f067aa0ba902b7", &"0".repeat(16)),
            PARENT.replace("-01", "-1"),
        ] {
            assert_eq!(parent_from(&wrong, ""), None, "{wrong}");
        }
    }

    #[test]
    fn a_state_that_is_wrong_or_too_long_is_left_out() {
        for state in [
            "no equals sign",
            &format!("a={}", "x".repeat(MAX_STATE_LENGTH)),
        ] {
            let parent = parent_from(PARENT, state).unwrap();
            assert_eq!(parent.0.trace_state(), &TraceState::default(), "{state}");
        }
    }

    #[test]
    fn without_a_collector_a_parent_does_nothing() {
        tracing::subscriber::with_default(Registry::default(), || {
            let span = tracing::info_span!("request");
            parent_from(PARENT, "").unwrap().adopt(&span);
            assert_eq!((trace_id_of(&span), traceparent_of(&span)), (None, None));
        });
    }

    /// A collector that answers one batch of spans after another and forwards them to the test.
    fn collector(status: &'static str) -> (String, Receiver<(String, Vec<u8>)>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}/v1/traces", listener.local_addr().unwrap());
        let (sender, receiver) = sync_channel(8);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut reader = BufReader::new(stream.unwrap());
                let (mut head, mut line) = (String::new(), String::new());
                while reader.read_line(&mut line).unwrap() > 2 {
                    head.push_str(&std::mem::take(&mut line));
                }
                let length = head.lines().find_map(|line| {
                    line.to_ascii_lowercase()
                        .strip_prefix("content-length: ")?
                        .parse()
                        .ok()
                });
                let mut body = vec![0; length.unwrap_or(0)];
                reader.read_exact(&mut body).unwrap();
                write!(
                    reader.get_mut(),
                    "HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n"
                )
                .unwrap();
                if sender.send((head, body)).is_err() {
                    return;
                }
            }
        });
        (endpoint, receiver)
    }

    fn contains(body: &[u8], wanted: &[u8]) -> bool {
        body.windows(wanted.len()).any(|part| part == wanted)
    }

    #[test]
    fn spans_reach_the_collector_as_part_of_the_callers_trace() {
        let (endpoint, received) = collector("200 OK");
        let provider = provider(&endpoint).unwrap();
        tracing::subscriber::with_default(Registry::default().with(layer(&provider)), || {
            let span = tracing::info_span!("the_request", tool = "execute");
            parent_from(PARENT, "").unwrap().adopt(&span);
            let _entered = span.enter();
            assert_eq!(trace_id_of(&span).as_deref(), Some(TRACE));
            let handed_on = traceparent_of(&span).unwrap();
            assert!(
                handed_on.starts_with(&format!("00-{TRACE}-")) && handed_on.ends_with("-01"),
                "{handed_on}"
            );
            assert_ne!(handed_on, PARENT, "the span is our own");
            tracing::info_span!("a_part_of_it").in_scope(|| ());
            tracing::info_span!(target: "some_library", "whole_request").in_scope(|| ());
        });
        provider
            .shutdown_with_timeout(Duration::from_secs(10))
            .unwrap();
        let (head, body) = received.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(head.starts_with("POST /v1/traces HTTP/1.1"), "{head}");
        assert!(
            head.to_ascii_lowercase()
                .contains("content-type: application/x-protobuf"),
            "{head}"
        );
        let trace = u128::from_str_radix(TRACE, 16).unwrap().to_be_bytes();
        let caller = 0x00f0_67aa_0ba9_02b7_u64.to_be_bytes();
        for wanted in [
            trace.as_slice(),
            &caller,
            b"the_request",
            b"a_part_of_it",
            b"service.name",
            b"cellblock",
        ] {
            assert!(contains(&body, wanted), "{wanted:?}");
        }
        assert!(
            !contains(&body, b"whole_request"),
            "a span of a library was sent"
        );
    }

    #[test]
    fn a_span_that_its_caller_does_not_sample_is_not_sent() {
        let (endpoint, received) = collector("200 OK");
        let provider = provider(&endpoint).unwrap();
        tracing::subscriber::with_default(Registry::default().with(layer(&provider)), || {
            for (name, flags) in [("unsampled", "-00"), ("sampled", "-01")] {
                let span = tracing::info_span!("request", otel.name = name);
                parent_from(&PARENT.replace("-01", flags), "")
                    .unwrap()
                    .adopt(&span);
                span.in_scope(|| ());
            }
        });
        provider
            .shutdown_with_timeout(Duration::from_secs(10))
            .unwrap();
        let (_, body) = received.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(contains(&body, b"sampled") && !contains(&body, b"unsampled"));
    }

    #[test]
    fn a_collector_that_is_away_costs_nobody_more_than_the_limit() {
        let gone = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}/v1/traces", gone.local_addr().unwrap());
        drop(gone);
        let provider = provider(&endpoint).unwrap();
        tracing::subscriber::with_default(Registry::default().with(layer(&provider)), || {
            tracing::info_span!("request").in_scope(|| ());
        });
        let began = std::time::Instant::now();
        let _ = provider.shutdown_with_timeout(Duration::from_millis(500));
        assert!(
            began.elapsed() < Duration::from_secs(5),
            "{:?}",
            began.elapsed()
        );
    }
}
