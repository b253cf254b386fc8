//! The connection handshake: selects the transport and the protocol era.
//!
//! The newer era is tried first (`server/discover`). If a program responds with an error, the older
//! handshake follows on the same pipes. If it does not respond, or exits, it is started again for
//! the older handshake.

use std::time::Duration;

use rmcp::RoleClient;
use rmcp::model::{ClientCapabilities, ProtocolVersion, RequestMetaObject};
use rmcp::service::{ClientInitializeError, ClientLifecycleMode, serve_client_with_lifecycle};
use rmcp::transport::Transport;
use rmcp::transport::streamable_http_client::{
    StreamableHttpClientTransport, StreamableHttpClientTransportConfig, StreamableHttpError,
};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::addresses::AddressError;
use crate::child::{self, LastWords, Program, StartError};
use crate::connection::{UpstreamConnection, said};
use crate::handler::{RejectingHandler, ourselves};
use crate::lines::PipeLines;
use crate::params::{self, BadParams, HttpTransport, Target};
use crate::sse::SseTransport;
use crate::upstream::ConnectSettings;
use crate::variables::{Filled, MissingVariables, SecretMask};
use crate::watched::{Watch, Watched};
use crate::web::{ClientError, Web, WebError};

/// Generation of the protocol that a server supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Era {
    /// 2025-11-25 and older: `initialize`, and a session.
    Legacy,
    /// 2026-07-28 and newer: requests are stateless.
    Modern,
}

/// Error while connecting. It contains no value of a variable, header or environment.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    Missing(#[from] MissingVariables),
    #[error(transparent)]
    Params(#[from] BadParams),
    #[error("the program cannot be started")]
    Start(#[from] StartError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("the server may not be used")]
    Address(#[from] AddressError),
    #[error("the server cannot be used")]
    Web(#[from] WebError),
    #[error(
        "the server did not answer within {} s; a larger \"connect_timeout\" among its parameters \
         gives it more time{}",
        .limit.as_secs_f64(), last(.last_words)
    )]
    Timeout {
        limit: Duration,
        last_words: Option<String>,
    },
    #[error("the server ended or closed the connection before it could be \
             used{}", last(.last_words))]
    Ended { last_words: Option<String> },
    #[error("the server did not greet as MCP servers do: {why}")]
    Greeting { why: String },
    #[error("the server answered the request for its tools with an error: {why}")]
    ListRefused { why: String },
    #[error("the server's list of tools {why}")]
    List { why: &'static str },
    #[error("the tools cannot be used")]
    Generate(#[from] cellblock_typed::GenerateError),
    #[error("the server failed a moment ago and is not tried again before {} s have passed: \
             {why}", .wait.as_secs_f64().ceil())]
    Waiting { wait: Duration, why: String },
    #[error("the server has been unregistered")]
    Closed,
}

/// Returns the message of an error and of its causes.
pub(crate) fn told(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn last(words: &Option<String>) -> String {
    words
        .as_ref()
        .map(|words| format!("; the last that it said: {words}"))
        .unwrap_or_default()
}

/// Connects within the connect timeout. A known era is not negotiated.
pub(crate) async fn open(
    filled: &Filled<Target<String>>,
    settings: &ConnectSettings,
    known: Option<Era>,
) -> Result<UpstreamConnection, ConnectError> {
    let limit = settings.limits.connect;
    let opening = Opening {
        mask: filled.mask.clone(),
        settings,
        limit,
        deadline: Instant::now() + limit,
    };
    match &filled.value {
        Target::Command {
            command,
            arguments,
            environment,
            folder,
        } => {
            let program = || Program {
                command,
                arguments,
                environment,
                folder: folder.as_deref(),
            };
            opening.program(program, known).await
        }
        Target::Url {
            url,
            headers,
            transport,
        } => {
            let url = params::parse_url(url)?;
            settings.addresses.check(&url)?;
            let web = Web::new(
                headers.clone(),
                &settings.addresses,
                &settings.resolver,
                settings.limits.largest_message,
            )?;
            match transport.unwrap_or_else(|| params::transport_of(&url)) {
                HttpTransport::Streamable => opening.streamable(web, url.as_str(), known).await,
                HttpTransport::Sse => opening.sse(web, &url).await,
            }
        }
    }
}

/// A connection that is being opened.
struct Opening<'a> {
    mask: SecretMask,
    settings: &'a ConnectSettings,
    limit: Duration,
    deadline: Instant,
}

impl Opening<'_> {
    async fn program<'p>(
        &self,
        program: impl Fn() -> Program<'p>,
        known: Option<Era>,
    ) -> Result<UpstreamConnection, ConnectError> {
        let installs = child::installs_first(program().command);
        let era = match known {
            Some(era) => era,
            None => {
                let (mut lines, words, watch) = self.start(program()).await?;
                // The rest of the time is for a second start. Programs that install packages first
                // are slow and are started only once.
                let patience = if installs {
                    self.deadline
                } else {
                    self.deadline - self.limit * 2 / 5
                };
                match timeout_at(patience, lines.probe(&question())).await {
                    Ok(Some(true)) => return self.greet(lines, modern(), Some(words), watch).await,
                    Ok(Some(false)) => {
                        return self
                            .greet(lines, ClientLifecycleMode::Initialize, Some(words), watch)
                            .await;
                    }
                    Err(_) if installs => {
                        let last_words = words.last().await;
                        tokio::spawn(lines.let_finish());
                        return Err(ConnectError::Timeout {
                            limit: self.limit,
                            last_words,
                        });
                    }
                    // The program exited, or ignored the unknown request. It is dropped, and so
                    // killed, before the second start.
                    Ok(None) | Err(_) => Era::Legacy,
                }
            }
        };
        let (lines, words, watch) = self.start(program()).await?;
        self.greet(lines, lifecycle(era), Some(words), watch).await
    }

    async fn start(
        &self,
        program: Program<'_>,
    ) -> Result<(ChildLines, LastWords, Watch), ConnectError> {
        let started = child::start(
            program,
            &self.settings.variables,
            self.settings.wrapper.as_ref(),
            self.mask.clone(),
        )
        .await?;
        let lines = PipeLines::new(
            started.output,
            started.input,
            self.settings.limits.largest_message,
        )
        .with_child(started.child);
        Ok((lines, started.last_words, Watch::new(&self.mask)))
    }

    async fn streamable(
        &self,
        web: Web,
        url: &str,
        known: Option<Era>,
    ) -> Result<UpstreamConnection, ConnectError> {
        let first = known.map_or_else(either, lifecycle);
        let opened = self
            .greet(
                streamable_transport(web.clone(), url),
                first,
                None,
                Watch::new(&self.mask),
            )
            .await;
        match opened {
            // The reply to the first request was late or missing. The remaining time is for the
            // older era.
            Err(ConnectError::Greeting { .. } | ConnectError::Ended { .. }) if known.is_none() => {
                let legacy = ClientLifecycleMode::Initialize;
                self.greet(
                    streamable_transport(web, url),
                    legacy,
                    None,
                    Watch::new(&self.mask),
                )
                .await
            }
            opened => opened,
        }
    }

    async fn sse(&self, web: Web, url: &reqwest::Url) -> Result<UpstreamConnection, ConnectError> {
        let opened = timeout_at(self.deadline, SseTransport::open(web, url)).await;
        let transport = opened.map_err(|_| ConnectError::Timeout {
            limit: self.limit,
            last_words: None,
        })??;
        // This transport is older than the newer era, so it supports only the older one.
        self.greet(
            transport,
            ClientLifecycleMode::Initialize,
            None,
            Watch::new(&self.mask),
        )
        .await
    }

    async fn greet<T: Transport<RoleClient> + 'static>(
        &self,
        transport: T,
        lifecycle: ClientLifecycleMode,
        last_words: Option<LastWords>,
        watch: Watch,
    ) -> Result<UpstreamConnection, ConnectError> {
        let watched = Watched::new(transport, &watch);
        let greeted = timeout_at(
            self.deadline,
            serve_client_with_lifecycle(RejectingHandler, watched, lifecycle),
        )
        .await;
        let words = async || match &last_words {
            Some(words) => words.last().await,
            None => None,
        };
        let service = match greeted {
            Ok(Ok(service)) => service,
            Ok(Err(error)) => return Err(self.ungreeted(error, words().await)),
            Err(_) => {
                return Err(ConnectError::Timeout {
                    limit: self.limit,
                    last_words: words().await,
                });
            }
        };
        let info = service.peer().peer_info();
        let is_modern = info
            .as_ref()
            .is_some_and(|info| info.protocol_version >= ProtocolVersion::V_2026_07_28);
        let server = info.and_then(|info| info.server_info.clone());
        let server =
            server.map(|server| said(&format!("{} {}", server.name, server.version), &self.mask));
        let era = if is_modern { Era::Modern } else { Era::Legacy };
        Ok(UpstreamConnection::new(
            service,
            era,
            server,
            self.mask.clone(),
            last_words,
            watch,
        ))
    }

    fn ungreeted(&self, error: ClientInitializeError, last_words: Option<String>) -> ConnectError {
        match error {
            ClientInitializeError::ConnectionClosed(_) => ConnectError::Ended { last_words },
            ClientInitializeError::TransportError { error, .. } => {
                match error.error.downcast::<StreamableHttpError<WebError>>() {
                    Ok(error) => match *error {
                        StreamableHttpError::Client(error) => ConnectError::Web(error),
                        _ => ConnectError::Greeting {
                            why: "its answer is no message".to_owned(),
                        },
                    },
                    Err(error) => match error.downcast::<WebError>() {
                        Ok(error) => ConnectError::Web(*error),
                        Err(_) => ConnectError::Ended { last_words },
                    },
                }
            }
            ClientInitializeError::LegacyFallbackFailed { fallback, .. } => {
                self.ungreeted(*fallback, last_words)
            }
            ClientInitializeError::JsonRpcError(error) => ConnectError::Greeting {
                why: said(&error.message, &self.mask),
            },
            ClientInitializeError::NoCompatibleProtocolVersion { .. } => ConnectError::Greeting {
                why: "it speaks no version of the protocol that is known here".to_owned(),
            },
            // The messages of other errors contain whole protocol messages.
            _ => ConnectError::Greeting {
                why: "its answer is not the one to the greeting".to_owned(),
            },
        }
    }
}

/// Limit on concurrent requests. A server that responds with plain JSON holds the request until the
/// tool has finished, so this also limits its concurrent calls.
const MAX_POSTS: usize = 256;

type ChildLines = PipeLines<tokio::process::ChildStdout, tokio::process::ChildStdin>;

fn streamable_transport(web: Web, url: &str) -> StreamableHttpClientTransport<Web> {
    // An expired session is treated as a lost connection: after reconnecting, the tools are
    // compared with the registered ones.
    let config = StreamableHttpClientTransportConfig::with_uri(url)
        .reinit_on_expired_session(false)
        .max_concurrent_requests(MAX_POSTS);
    StreamableHttpClientTransport::with_client(web.clone(), config.max_sse_event_size(web.largest))
}

fn modern() -> ClientLifecycleMode {
    ClientLifecycleMode::Discover {
        preferred_versions: vec![ProtocolVersion::V_2026_07_28],
    }
}

fn either() -> ClientLifecycleMode {
    ClientLifecycleMode::Auto {
        preferred_versions: vec![ProtocolVersion::V_2026_07_28],
        legacy_version: Some(ProtocolVersion::V_2025_11_25),
    }
}

fn lifecycle(era: Era) -> ClientLifecycleMode {
    match era {
        Era::Modern => modern(),
        Era::Legacy => ClientLifecycleMode::Initialize,
    }
}

/// Returns the metadata of every request in the newer era.
fn question() -> Value {
    let meta = RequestMetaObject::with_client_context(
        ProtocolVersion::V_2026_07_28,
        ourselves(),
        ClientCapabilities::default(),
    );
    serde_json::to_value(meta).unwrap_or_default()
}
