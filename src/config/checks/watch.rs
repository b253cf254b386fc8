//! Settings for observability: the log format, the destination of traces, and the audit log.

use std::collections::BTreeMap;

use super::{Check, has_default};
use crate::audit::{AuditSettings, OnFailure, Sync};
use crate::config::table::Key;
use crate::config::{AuditLog, ConfigError};
use crate::telemetry::LogFormat;

/// The path for spans below a collector's address.
const TRACES_PATH: &str = "/v1/traces";

const URL_ALLOWED: &str = "an address such as http://127.0.0.1:4318 or \
                           https://collector.example.com, without a user name";

impl Check<'_> {
    pub(super) fn log_format(&self) -> Result<LogFormat, ConfigError> {
        let format = self.value(Key::LogFormat, |text| {
            LogFormat::from_name(text.trim()).ok_or(None)
        });
        format.map(has_default)
    }

    /// Reads the destination of spans: from our own setting, or from the standard OpenTelemetry
    /// variables.
    pub(super) fn traces(
        &self,
        surroundings: &BTreeMap<String, String>,
    ) -> Result<Option<String>, ConfigError> {
        let parse = |text: &str| {
            if is_collector(text) {
                Ok(text.to_owned())
            } else {
                Err(None)
            }
        };
        if let Some(endpoint) = self.read(Key::OtlpEndpoint, URL_ALLOWED, parse)? {
            return Ok(Some(with_path(&endpoint)));
        }
        let variable = |name: &str| {
            surroundings
                .get(name)
                .map(|value| value.trim())
                .filter(|value| !value.is_empty())
        };
        let is_off = variable("OTEL_SDK_DISABLED")
            .is_some_and(|value| value.eq_ignore_ascii_case("true"))
            || variable("OTEL_TRACES_EXPORTER") == Some("none");
        if is_off {
            return Ok(None);
        }
        let exact = variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").map(str::to_owned);
        Ok(exact.or_else(|| variable("OTEL_EXPORTER_OTLP_ENDPOINT").map(with_path)))
    }

    pub(super) fn audit(&self) -> Result<Option<AuditLog>, ConfigError> {
        let sync = self.value(Key::AuditSync, |text| match text.trim() {
            "always" => Ok(Sync::Always),
            "interval" => Ok(Sync::Interval),
            _ => Err(None),
        })?;
        let failure = self.value(Key::AuditFailure, |text| match text.trim() {
            "refuse" => Ok(OnFailure::Refuse),
            "continue" => Ok(OnFailure::Continue),
            _ => Err(None),
        })?;
        let settings = AuditSettings {
            sync: has_default(sync),
            failure: has_default(failure),
            turn_over_at: self.size(Key::AuditFileSize)?,
            records_per_hour: self.number(Key::AuditRecords)?,
        };
        Ok(self
            .path(Key::AuditFile)?
            .map(|file| AuditLog { file, settings }))
    }
}

/// Returns whether `text` is a valid collector URL. A URL with a password would appear in messages.
fn is_collector(text: &str) -> bool {
    let host = text
        .strip_prefix("http://")
        .or_else(|| text.strip_prefix("https://"))
        .unwrap_or_default();
    let authority = host.split(['/', '?', '#']).next().unwrap_or_default();
    let is_plain = text.bytes().all(|byte| byte.is_ascii_graphic());
    is_plain
        && !authority.is_empty()
        && !authority.starts_with(':')
        && !authority.contains('@')
        && !text.contains(['?', '#'])
}

fn with_path(endpoint: &str) -> String {
    let endpoint = endpoint.trim_end_matches('/');
    if endpoint.ends_with(TRACES_PATH) {
        endpoint.to_owned()
    } else {
        format!("{endpoint}{TRACES_PATH}")
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::case;
    use super::*;

    #[test]
    fn nothing_is_traced_or_recorded_unless_somebody_says_so() {
        let settings = case().settings();
        assert_eq!(
            (settings.log_format, settings.traces, settings.audit),
            (LogFormat::Text, None, None)
        );
    }

    #[test]
    fn the_log_is_text_or_json() {
        assert_eq!(
            case().yaml("log_format: json").settings().log_format,
            LogFormat::Json
        );
        assert!(
            case()
                .yaml("log_format: xml")
                .refusal()
                .contains("text or json")
        );
    }

    #[test]
    fn spans_go_where_our_setting_says_or_else_where_the_shared_variables_say() {
        let shared = || case().variable("OTEL_EXPORTER_OTLP_ENDPOINT", "http://shared:4318/");
        assert_eq!(
            shared().settings().traces.as_deref(),
            Some("http://shared:4318/v1/traces")
        );
        let exact = shared().variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://exact:1/take");
        assert_eq!(
            exact.settings().traces.as_deref(),
            Some("http://exact:1/take")
        );
        let ours = shared().flag(Key::OtlpEndpoint, "https://ours.example.com");
        assert_eq!(
            ours.settings().traces.as_deref(),
            Some("https://ours.example.com/v1/traces")
        );
        assert_eq!(
            shared()
                .variable("OTEL_SDK_DISABLED", "true")
                .settings()
                .traces,
            None
        );
        assert_eq!(
            shared()
                .variable("OTEL_TRACES_EXPORTER", "none")
                .settings()
                .traces,
            None
        );
    }

    #[test]
    fn an_address_that_is_none_or_holds_a_password_is_refused() {
        for wrong in [
            "collector:4318",
            "ftp://a",
            "http://",
            "http://:1",
            "http://me:secret@a",
            "http://a?b=c",
            "http://a b",
        ] {
            assert!(
                case()
                    .flag(Key::OtlpEndpoint, wrong)
                    .refusal()
                    .contains("an address such as"),
                "{wrong}"
            );
        }
        case()
            .flag(Key::OtlpEndpoint, "http://[::1]:4318")
            .settings(); // control
    }

    #[test]
    fn an_audit_log_is_kept_as_the_operator_says() {
        let yaml = "audit_file: logs/audit.jsonl\naudit_sync: always\naudit_failure: \
                    continue\naudit_file_size: 1G\naudit_records: 500";
        let audit = case().yaml(yaml).settings().audit.unwrap();
        assert_eq!(
            audit.file,
            std::path::Path::new("/etc/cellblock/logs/audit.jsonl")
        );
        let expected = AuditSettings {
            sync: Sync::Always,
            failure: OnFailure::Continue,
            turn_over_at: 1 << 30,
            records_per_hour: 500,
        };
        assert_eq!(audit.settings, expected);
        let usual = case().flag(Key::AuditFile, "/a").settings().audit.unwrap();
        assert_eq!(usual.settings, AuditSettings::default());
        assert!(
            case()
                .yaml("audit_sync: never")
                .refusal()
                .contains("interval or always")
        );
        assert!(
            case()
                .yaml("audit_failure: ignore")
                .refusal()
                .contains("refuse or continue")
        );
        assert!(
            case()
                .yaml("audit_file_size: 1")
                .refusal()
                .contains("from 1 MiB")
        );
        assert!(
            case()
                .yaml("audit_records: 1")
                .refusal()
                .contains("from 100")
        );
    }
}
