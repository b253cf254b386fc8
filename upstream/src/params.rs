//! Client configuration of a server.
//!
//!     {"command": "uvx", "args": ["mcp-server-time"], "env": {"TZ": "UTC"}, "cwd": "/srv"}
//!     {"url": "https://example.com/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"},
//!      "type": "streamable_http"}
//!
//! The format is that of other clients, but stricter: an unknown key is rejected, with the nearest
//! known one as a suggestion. Any text may contain `${VAR}`. It stays unexpanded here and is
//! expanded when a connection is made (`variables`).

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use reqwest::Url;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::tools::hash_value;
use crate::variables::{self, Filled, MissingVariables, Variables};

/// Maximum total size of the parameters. Those of real servers have some hundred bytes.
const MAX_PARAMS_BYTES: usize = 256 * 1024;
/// Maximum timeout in seconds. A longer one would be no limit in practice.
const MAX_TIMEOUT: f64 = 3600.0;

const COMMAND_KEYS: [&str; 7] = [
    "command",
    "args",
    "env",
    "cwd",
    "type",
    "connect_timeout",
    "call_timeout",
];
const URL_KEYS: [&str; 7] = [
    "url",
    "headers",
    "type",
    "timeout",
    "sse_read_timeout",
    "connect_timeout",
    "call_timeout",
];

/// Headers that are reserved for the connection or the protocol.
const OWN_HEADERS: [&str; 12] = [
    "accept",
    "connection",
    "content-length",
    "content-type",
    "host",
    "last-event-id",
    "mcp-method",
    "mcp-name",
    "mcp-protocol-version",
    "mcp-session-id",
    "transfer-encoding",
    "upgrade",
];

/// How a server is reached, as written, with unexpanded `${VAR}`.
#[derive(Clone, PartialEq)]
pub struct ServerParams {
    pub(crate) target: Target<String>,
    pub(crate) connect_timeout: Option<Duration>,
    pub(crate) call_timeout: Option<Duration>,
}

/// Whether a server is a program that is started here or a URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerKind {
    Command,
    Url,
}

#[derive(Clone, PartialEq)]
pub(crate) enum Target<Text> {
    Command {
        command: Text,
        arguments: Vec<Text>,
        environment: BTreeMap<String, Text>,
        folder: Option<Text>,
    },
    Url {
        url: Text,
        headers: BTreeMap<String, Text>,
        transport: Option<HttpTransport>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HttpTransport {
    Streamable,
    /// The older transport: an event stream, and messages posted to a URL that it names.
    Sse,
}

/// Error of rejected parameters. It names keys, never values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadParams {
    #[error("the parameters of a server are an object with `command` or `url`")]
    NoObject,
    #[error("the parameters of a server have `command` or `url`, and this has neither")]
    NoTarget,
    #[error("the parameters of a server have `command` or `url`, and this has both")]
    TwoTargets,
    #[error("the parameters of a server have {bytes} bytes, and may have {MAX_PARAMS_BYTES}")]
    TooLarge { bytes: usize },
    #[error("the parameter {key:?} is not known{}", suggestion(.nearest))]
    UnknownKey {
        key: String,
        nearest: Option<String>,
    },
    #[error("the parameter `{key}` is {expected}")]
    Form { key: String, expected: &'static str },
    #[error("the header {name:?} cannot be given, because the connection sets it")]
    OwnHeader { name: String },
    #[error("the URL cannot be used: {why}")]
    Url { why: &'static str },
}

fn suggestion(nearest: &Option<String>) -> String {
    nearest
        .as_ref()
        .map(|nearest| format!("; did you mean `{nearest}`?"))
        .unwrap_or_default()
}

impl ServerParams {
    /// Parses the JSON form.
    pub fn parse(value: &Value) -> Result<ServerParams, BadParams> {
        let object = value.as_object().ok_or(BadParams::NoObject)?;
        let bytes = value.to_string().len();
        if bytes > MAX_PARAMS_BYTES {
            return Err(BadParams::TooLarge { bytes });
        }
        match (object.contains_key("command"), object.contains_key("url")) {
            (true, true) => Err(BadParams::TwoTargets),
            (true, false) => command(object),
            (false, true) => url(object),
            (false, false) => Err(neither(object)),
        }
    }

    /// Returns the kind of server. Starting a program requires more trust than connecting to a URL.
    pub fn kind(&self) -> ServerKind {
        match self.target {
            Target::Command { .. } => ServerKind::Command,
            Target::Url { .. } => ServerKind::Url,
        }
    }

    /// Returns the digest of the parameters as written, with unexpanded `${VAR}`. Servers that are
    /// reached differently have different digests. Timeouts are not included.
    pub fn digest(&self) -> [u8; 32] {
        let written = match &self.target {
            Target::Command {
                command,
                arguments,
                environment,
                folder,
            } => {
                serde_json::json!(["command", command, arguments, environment, folder])
            }
            Target::Url {
                url,
                headers,
                transport,
            } => {
                let transport = transport.map(|transport| match transport {
                    HttpTransport::Streamable => "streamable_http",
                    HttpTransport::Sse => "sse",
                });
                serde_json::json!(["url", url, headers, transport])
            }
        };
        let mut hash = Sha256::new();
        hash_value(&written, &mut hash);
        hash.finalize().into()
    }

    /// Describes how the server is reached, without anything that could be secret: the program as
    /// written, or the host.
    pub fn summary(&self) -> String {
        match &self.target {
            Target::Command { command, .. } => format!("command {command}"),
            Target::Url { url, .. } => match Url::parse(url) {
                Ok(url) => format!("url {}", url.origin().ascii_serialization()),
                // A variable is in place of the host, so nothing more can be shown.
                Err(_) => "url".to_owned(),
            },
        }
    }

    /// Expands all `${VAR}`.
    pub(crate) fn fill(
        &self,
        host: &Variables,
    ) -> Result<Filled<Target<String>>, MissingVariables> {
        variables::fill(host, |fill| match &self.target {
            Target::Command {
                command,
                arguments,
                environment,
                folder,
            } => Target::Command {
                command: fill.text(command),
                arguments: arguments
                    .iter()
                    .map(|argument| fill.text(argument))
                    .collect(),
                environment: environment
                    .iter()
                    .map(|(name, text)| (name.clone(), fill.secret(text)))
                    .collect(),
                folder: folder.as_ref().map(|folder| fill.text(folder)),
            },
            Target::Url {
                url,
                headers,
                transport,
            } => Target::Url {
                url: fill.text(url),
                headers: headers
                    .iter()
                    .map(|(name, text)| (name.clone(), fill.secret(text)))
                    .collect(),
                transport: *transport,
            },
        })
    }
}

impl fmt::Debug for ServerParams {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut form = formatter.debug_struct("ServerParams");
        match &self.target {
            Target::Command {
                arguments,
                environment,
                ..
            } => form
                .field("target", &self.summary())
                .field("arguments", &arguments.len())
                .field("environment", &environment.keys().collect::<Vec<_>>()),
            Target::Url {
                headers, transport, ..
            } => form
                .field("target", &self.summary())
                .field("headers", &headers.keys().collect::<Vec<_>>())
                .field("transport", transport),
        };
        form.finish_non_exhaustive()
    }
}

/// Parses and checks a URL after expansion.
pub(crate) fn parse_url(text: &str) -> Result<Url, BadParams> {
    let url = Url::parse(text).map_err(|_| BadParams::Url {
        why: "it is not a whole URL, such as https://example.com/mcp",
    })?;
    match () {
        () if !matches!(url.scheme(), "http" | "https") => Err(BadParams::Url {
            why: "it must begin with https:// or http://",
        }),
        () if url.host().is_none() => Err(BadParams::Url {
            why: "it names no host",
        }),
        () if !url.username().is_empty() || url.password().is_some() => Err(BadParams::Url {
            why: "it holds a user name or a password; use `headers`",
        }),
        () => Ok(url),
    }
}

/// Returns the transport for a URL without `type`.
pub(crate) fn transport_of(url: &Url) -> HttpTransport {
    let has_sse = url
        .path_segments()
        .is_some_and(|mut segments| segments.any(|segment| segment == "sse"));
    if has_sse {
        HttpTransport::Sse
    } else {
        HttpTransport::Streamable
    }
}

fn neither(object: &Map<String, Value>) -> BadParams {
    let all: Vec<&str> = COMMAND_KEYS.into_iter().chain(URL_KEYS).collect();
    known_keys(object, &all)
        .err()
        .unwrap_or(BadParams::NoTarget)
}

fn command(object: &Map<String, Value>) -> Result<ServerParams, BadParams> {
    known_keys(object, &COMMAND_KEYS)?;
    if object.get("type").is_some_and(|kind| kind != "stdio") {
        return Err(form("type", "`stdio` for a command"));
    }
    let command = text(object, "command")?.filter(|command| !command.is_empty());
    let environment = texts(object, "env")?;
    if environment
        .keys()
        .any(|name| name.is_empty() || name.contains(['=', '\0']))
    {
        return Err(form("env", "an object from names of variables to texts"));
    }
    Ok(ServerParams {
        target: Target::Command {
            command: command.ok_or(form("command", "the name or path of a program"))?,
            arguments: list(object, "args")?,
            environment,
            folder: text(object, "cwd")?,
        },
        connect_timeout: seconds(object, &["connect_timeout"])?,
        call_timeout: seconds(object, &["call_timeout"])?,
    })
}

fn url(object: &Map<String, Value>) -> Result<ServerParams, BadParams> {
    known_keys(object, &URL_KEYS)?;
    let transport = match object.get("type").map(Value::as_str) {
        None => None,
        Some(Some("streamable_http" | "streamable-http" | "streamableHttp" | "http")) => {
            Some(HttpTransport::Streamable)
        }
        Some(Some("sse")) => Some(HttpTransport::Sse),
        Some(_) => return Err(form("type", "`streamable_http` or `sse` for a URL")),
    };
    let url = text(object, "url")?.ok_or(form("url", "a text"))?;
    if !variables::has_variables(&url) {
        parse_url(&url)?;
    }
    let headers = texts(object, "headers")?;
    for name in headers.keys() {
        if http::HeaderName::from_bytes(name.as_bytes()).is_err() {
            return Err(form("headers", "an object from names of headers to texts"));
        }
        let lower = name.to_ascii_lowercase();
        if OWN_HEADERS.contains(&lower.as_str()) || lower.starts_with("mcp-param-") {
            return Err(BadParams::OwnHeader { name: name.clone() });
        }
    }
    Ok(ServerParams {
        target: Target::Url {
            url,
            headers,
            transport,
        },
        // The second name of each is that of the Python client.
        connect_timeout: seconds(object, &["connect_timeout", "timeout"])?,
        call_timeout: seconds(object, &["call_timeout", "sse_read_timeout"])?,
    })
}

fn known_keys(object: &Map<String, Value>, known: &[&str]) -> Result<(), BadParams> {
    let Some(unknown) = object.keys().find(|key| !known.contains(&key.as_str())) else {
        return Ok(());
    };
    let likeness = |name: &&&str| strsim::jaro_winkler(&unknown.to_lowercase(), name);
    let nearest = known
        .iter()
        .max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
    let nearest = nearest
        .filter(|name| likeness(name) > 0.75)
        .map(|name| (*name).to_owned());
    let key: String = unknown.chars().take(64).collect();
    Err(BadParams::UnknownKey { key, nearest })
}

fn form(key: &str, expected: &'static str) -> BadParams {
    BadParams::Form {
        key: key.to_owned(),
        expected,
    }
}

fn text(object: &Map<String, Value>, key: &str) -> Result<Option<String>, BadParams> {
    match object.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if !text.contains('\0') => Ok(Some(text.clone())),
        Some(_) => Err(form(key, "a text")),
    }
}

fn list(object: &Map<String, Value>, key: &str) -> Result<Vec<String>, BadParams> {
    let wrong = || form(key, "a list of texts");
    let values = match object.get(key) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(value) => value.as_array().ok_or_else(wrong)?,
    };
    let text = |value: &Value| {
        value
            .as_str()
            .filter(|text| !text.contains('\0'))
            .map(str::to_owned)
            .ok_or_else(wrong)
    };
    values.iter().map(text).collect()
}

fn texts(object: &Map<String, Value>, key: &str) -> Result<BTreeMap<String, String>, BadParams> {
    let wrong = || form(key, "an object from names to texts");
    let values = match object.get(key) {
        None | Some(Value::Null) => return Ok(BTreeMap::new()),
        Some(value) => value.as_object().ok_or_else(wrong)?,
    };
    let pair = |(name, value): (&String, &Value)| {
        let text = value
            .as_str()
            .filter(|text| !text.contains('\0'))
            .ok_or_else(wrong)?;
        Ok((name.clone(), text.to_owned()))
    };
    values.iter().map(pair).collect()
}

fn seconds(object: &Map<String, Value>, keys: &[&str]) -> Result<Option<Duration>, BadParams> {
    let Some((key, value)) = keys
        .iter()
        .find_map(|key| object.get(*key).map(|value| (*key, value)))
    else {
        return Ok(None);
    };
    match value.as_f64() {
        Some(seconds) if seconds > 0.0 && seconds <= MAX_TIMEOUT => {
            Ok(Some(Duration::from_secs_f64(seconds)))
        }
        _ => Err(form(
            key,
            "a number of seconds, more than 0 and at most 3600",
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(value: Value) -> Result<ServerParams, BadParams> {
        ServerParams::parse(&value)
    }

    #[test]
    fn a_command_is_read_whole() {
        let params = parse(json!({
            "command": "uvx", "args": ["a", "b"], "env": {"K": "v"}, "cwd": "/srv",
            "type": "stdio",
        }));
        let params = params.unwrap();
        assert_eq!(params.kind(), ServerKind::Command);
        let Target::Command {
            command,
            arguments,
            environment,
            folder,
        } = params.target
        else {
            panic!("a URL")
        };
        assert_eq!((command.as_str(), folder.as_deref()), ("uvx", Some("/srv")));
        assert_eq!(arguments, ["a", "b"]);
        assert_eq!(environment["K"], "v");
    }

    #[test]
    fn servers_that_are_reached_differently_have_digests_that_differ() {
        let digest = |value: Value| parse(value).unwrap().digest();
        let one = digest(json!({"command": "uvx", "args": ["a", "b"], "env": {"K": "${T}"}}));
        for other in [
            json!({"command": "uv", "args": ["a", "b"], "env": {"K": "${T}"}}),
            json!({"command": "uvx", "args": ["a b"], "env": {"K": "${T}"}}),
            json!({"command": "uvx", "args": ["a", "b"], "env": {"K": "${U}"}}),
            json!({"command": "uvx", "args": ["a", "b"], "env": {"K": "${T}"}, "cwd": "/"}),
            json!({"url": "https://a.example/mcp"}),
            json!({"url": "https://b.example/mcp"}),
            json!({"url": "https://b.example/mcp", "headers": {"X": "y"}}),
            json!({"url": "https://b.example/mcp", "type": "sse"}),
        ] {
            assert_ne!(digest(other.clone()), one, "{other}");
        }
        let patient =
            json!({"command": "uvx", "args": ["a", "b"], "env": {"K": "${T}"}, "call_timeout": 5});
        assert_eq!(digest(patient), one);
    }

    #[test]
    fn the_transport_is_what_the_type_says_and_otherwise_follows_from_the_path() {
        for (value, expected) in [
            (json!({"url": "https://a.example/mcp"}), None),
            (
                json!({"url": "https://a.example/x", "type": "sse"}),
                Some(HttpTransport::Sse),
            ),
            (
                json!({"url": "https://a.example/sse", "type": "http"}),
                Some(HttpTransport::Streamable),
            ),
            (
                json!({"url": "https://a.example/x", "type": "streamable_http"}),
                Some(HttpTransport::Streamable),
            ),
            (
                json!({"url": "https://a.example/x", "type": "streamable-http"}),
                Some(HttpTransport::Streamable),
            ),
        ] {
            let Target::Url { transport, .. } = parse(value).unwrap().target else {
                panic!("a command")
            };
            assert_eq!(transport, expected);
        }
        for (url, expected) in [
            ("https://a.example/mcp", HttpTransport::Streamable),
            ("https://a.example/", HttpTransport::Streamable),
            ("https://a.example/sse", HttpTransport::Sse),
            ("https://a.example/v1/sse/", HttpTransport::Sse),
            ("https://a.example/assess", HttpTransport::Streamable),
            ("https://sse.example/mcp?x=/sse", HttpTransport::Streamable),
        ] {
            assert_eq!(transport_of(&parse_url(url).unwrap()), expected, "{url}");
        }
    }

    #[test]
    fn an_unknown_key_is_refused_with_the_nearest() {
        for (value, key, nearest) in [
            (json!({"command": "x", "arg": []}), "arg", Some("args")),
            (
                json!({"command": "x", "environment": {}}),
                "environment",
                Some("env"),
            ),
            (
                json!({"url": "https://a.example", "header": {}}),
                "header",
                Some("headers"),
            ),
            (json!({"comand": "x"}), "comand", Some("command")),
            (json!({"command": "x", "zzz": 1}), "zzz", None),
        ] {
            let error = parse(value).unwrap_err();
            let BadParams::UnknownKey {
                key: found,
                nearest: suggested,
            } = error
            else {
                panic!("{error}")
            };
            assert_eq!((found.as_str(), suggested.as_deref()), (key, nearest));
        }
    }

    #[test]
    fn what_has_another_form_is_refused() {
        for value in [
            json!([]),
            json!({}),
            json!({"command": "x", "url": "https://a.example"}),
            json!({"command": ""}),
            json!({"command": "a\u{0}b"}),
            json!({"command": "x", "args": "a"}),
            json!({"command": "x", "args": [1]}),
            json!({"command": "x", "env": {"A=B": "c"}}),
            json!({"command": "x", "env": {"A": 1}}),
            json!({"command": "x", "type": "http"}),
            json!({"command": "x", "call_timeout": 0}),
            json!({"url": "a.example/mcp"}),
            json!({"url": "file:///etc/passwd"}),
            json!({"url": "https://user:word@a.example/mcp"}),
            json!({"url": "https://a.example", "type": "stdio"}),
            json!({"url": "https://a.example", "headers": {"a b": "c"}}),
            json!({"url": "https://a.example", "headers": {"Mcp-Session-Id": "c"}}),
            json!({"url": "https://a.example", "headers": {"Host": "b.example"}}),
            json!({"url": "https://a.example", "timeout": "soon"}),
            json!({"command": "x", "args": ["a".repeat(MAX_PARAMS_BYTES)]}),
        ] {
            assert!(parse(value.clone()).is_err(), "{value}");
        }
    }

    #[test]
    fn times_have_our_names_and_those_of_the_python_client() {
        let params =
            parse(json!({"url": "https://a.example", "timeout": 2.5, "sse_read_timeout": 9}))
                .unwrap();
        assert_eq!(params.connect_timeout, Some(Duration::from_millis(2500)));
        assert_eq!(params.call_timeout, Some(Duration::from_secs(9)));
    }

    #[test]
    fn nothing_that_could_be_a_secret_is_printed() {
        let secret = "s3cr3t";
        for value in [
            json!({"command": "x", "args": [secret], "env": {"KEY": secret}}),
            json!({
                "url": format!("https://a.example/{secret}?key={secret}"),
                "headers": {"Authorization": secret},
            }),
            json!({"url": format!("{secret}${{HOST}}"), "headers": {}}),
        ] {
            let params = parse(value).unwrap();
            let printed = format!("{params:?} {}", params.summary());
            assert!(!printed.contains(secret), "{printed}");
        }
        // Control: names are printed.
        let params = parse(json!({"command": "x", "env": {"KEY": secret}})).unwrap();
        assert!(format!("{params:?}").contains("KEY"));
    }
}
