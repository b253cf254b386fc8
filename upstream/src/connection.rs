//! One live connection to a server: listing tools, and calls.
//!
//! Every failed request has one of a few outcomes (`CallFailure`). The outcome determines whether
//! the server may have executed the request.

use std::collections::HashSet;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use rmcp::RoleClient;
use rmcp::model::{
    CallToolRequest, CallToolRequestParams, CancelledNotificationParam, ClientRequest, JsonObject,
    ListToolsRequest, PaginatedRequestParams, RequestId, ServerResult, SubscriptionFilter,
};
use rmcp::service::{Peer, PeerRequestOptions, RunningService, ServiceError};
use rmcp::transport::streamable_http_client::StreamableHttpError;
use serde_json::Value;
use tokio::time::{Instant, sleep_until, timeout};

use crate::call::{CallOptions, CallProgress, ProgressSink};
use crate::child::LastWords;
use crate::greeting::{ConnectError, Era};
use crate::handler::RejectingHandler;
use crate::upstream::ServerLimits;
use crate::variables::SecretMask;
use crate::watched::{Sent, Watch};
use crate::web::WebError;
use crate::wire;

/// Maximum length of texts from a server about itself.
const MAX_TEXT_LENGTH: usize = 500;
/// Maximum length of a cursor, which is a short token. A larger one would only make us carry data.
const MAX_CURSOR_LENGTH: usize = 4096;

/// A live connection. Dropping it closes it gracefully.
pub(crate) struct UpstreamConnection {
    service: RunningService<RoleClient, RejectingHandler>,
    pub(crate) era: Era,
    /// The server's own name.
    pub(crate) server: Option<String>,
    mask: SecretMask,
    last_words: Option<LastWords>,
    watch: Watch,
}

/// Reason why a call has no result.
#[derive(Debug)]
pub(crate) enum CallFailure {
    /// Nothing reached the server.
    NotSent {
        why: String,
    },
    /// The connection was lost after the request may have been sent.
    Lost,
    /// The server returned an error instead of a result.
    Refused {
        code: i32,
        message: String,
    },
    NotAResult(&'static str),
    TooLarge,
    TooManyValues,
    Timeout(Duration),
    Cancelled,
}

impl UpstreamConnection {
    pub(crate) fn new(
        service: RunningService<RoleClient, RejectingHandler>,
        era: Era,
        server: Option<String>,
        mask: SecretMask,
        last_words: Option<LastWords>,
        watch: Watch,
    ) -> UpstreamConnection {
        let connection = UpstreamConnection {
            service,
            era,
            server,
            mask,
            last_words,
            watch,
        };
        connection.listen();
        connection
    }

    /// Returns whether a call can be sent.
    pub(crate) fn is_usable(&self) -> bool {
        !self.watch.broken.is_cancelled()
    }

    /// Returns whether the server has reported changed tools that are not compared yet.
    pub(crate) fn is_stale(&self) -> bool {
        self.watch.changed.is_stale()
    }

    pub(crate) fn look(&self) -> u64 {
        self.watch.changed.look()
    }

    /// Records that the tools listed after [`Connection::look`] have been compared.
    pub(crate) fn seen(&self, look: u64) {
        self.watch.changed.seen(look);
    }

    /// Waits until the server reports changed tools, or the connection is lost.
    pub(crate) async fn changed(&self) {
        tokio::select! {
            () = self.watch.changed.told() => {}
            () = self.watch.broken.cancelled() => {}
        }
    }

    /// Closes the connection and waits until the other side is gone.
    pub(crate) async fn close(&self) {
        self.watch.broken.cancel();
        self.service.cancellation_token().cancel();
        self.watch.ended.cancelled().await;
    }

    /// Marks the connection as unusable, because the server no longer accepts it.
    fn give_up(&self) {
        self.watch.broken.cancel();
        self.service.cancellation_token().cancel();
    }

    /// Returns the last output of the program, if the server is one.
    pub(crate) async fn last_words(&self) -> Option<String> {
        match &self.last_words {
            Some(words) => words.last().await,
            None => None,
        }
    }

    /// Subscribes to changes, if the protocol requires it.
    fn listen(&self) {
        let lists_changes = self.service.peer().peer_info().is_some_and(|info| {
            info.capabilities
                .tools
                .as_ref()
                .is_some_and(|tools| tools.list_changed.unwrap_or(false))
        });
        if self.era == Era::Modern && lists_changes {
            let (peer, broken) = (self.service.peer().clone(), self.watch.broken.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = keep_listening(&peer) => {}
                    () = broken.cancelled() => {}
                }
            });
        }
    }

    /// Returns all tools, as the server defines them.
    pub(crate) async fn list(&self, limits: &ServerLimits) -> Result<Vec<Value>, ConnectError> {
        let listed = timeout(limits.connect, self.pages(limits)).await;
        match listed {
            Ok(listed) => listed,
            Err(_) => Err(ConnectError::Timeout {
                limit: limits.connect,
                last_words: self.last_words().await,
            }),
        }
    }

    async fn pages(&self, limits: &ServerLimits) -> Result<Vec<Value>, ConnectError> {
        let mut tools = Vec::new();
        let mut cursors = HashSet::new();
        let mut cursor = None;
        let mut bytes = 0;
        for _ in 0..limits.most_pages {
            let Some((listed, next)) = self.page(cursor).await? else {
                return Ok(tools);
            };
            bytes += listed
                .iter()
                .map(|tool| tool.to_string().len())
                .sum::<usize>();
            tools.extend(listed);
            if bytes > limits.largest_list || tools.len() > limits.most_tools {
                return Err(ConnectError::List { why: "is too long" });
            }
            let Some(next) = next else { return Ok(tools) };
            if next.len() > MAX_CURSOR_LENGTH || !cursors.insert(next.clone()) {
                return Err(ConnectError::List {
                    why: "never ends: it leads to a page that has been read",
                });
            }
            cursor = Some(next);
        }
        Err(ConnectError::List {
            why: "has too many pages",
        })
    }

    /// Returns one page and the cursor of the next, or `None` if the server does not support tools.
    async fn page(
        &self,
        cursor: Option<String>,
    ) -> Result<Option<(Vec<Value>, Option<String>)>, ConnectError> {
        let params = PaginatedRequestParams::default().with_cursor(cursor);
        let request = ClientRequest::ListToolsRequest(ListToolsRequest {
            method: Default::default(),
            params: Some(params),
            extensions: Default::default(),
        });
        let no_list = || ConnectError::List { why: "is none" };
        match self.ask(request, &CallOptions::default(), None).await {
            Ok(Value::Object(mut page)) => {
                let Some(Value::Array(mut tools)) = page.remove("tools") else {
                    return Err(no_list());
                };
                // Sessions see descriptions as they see results, so they are masked likewise.
                tools
                    .iter_mut()
                    .for_each(|tool| self.mask.hide_within(tool));
                let next = page.remove("nextCursor").filter(|next| !next.is_null());
                let next = next
                    .map(|next| next.as_str().map(str::to_owned).ok_or_else(no_list))
                    .transpose()?;
                Ok(Some((tools, next)))
            }
            Ok(_) => Err(no_list()),
            // Servers without tools need not implement this method.
            Err(CallFailure::Refused { code: -32601, .. }) => Ok(None),
            Err(CallFailure::Refused { message, .. }) => {
                Err(ConnectError::ListRefused { why: message })
            }
            Err(CallFailure::TooLarge | CallFailure::TooManyValues) => {
                Err(ConnectError::List { why: "is too long" })
            }
            Err(CallFailure::NotSent { why }) => Err(ConnectError::Greeting { why }),
            Err(_) => Err(ConnectError::Ended {
                last_words: self.last_words().await,
            }),
        }
    }

    /// Calls a tool. `time` is the idle timeout: each progress notification restarts it, up to
    /// `most` in total.
    pub(crate) async fn call(
        &self,
        tool: &str,
        arguments: JsonObject,
        options: &CallOptions,
        time: (Duration, Duration),
    ) -> Result<Value, CallFailure> {
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        let request = CallToolRequest::new(params);
        let mut result = self
            .ask(ClientRequest::CallToolRequest(request), options, Some(time))
            .await?;
        self.mask.hide_within(&mut result);
        Ok(result)
    }

    async fn ask(
        &self,
        request: ClientRequest,
        options: &CallOptions,
        time: Option<(Duration, Duration)>,
    ) -> Result<Value, CallFailure> {
        let peer = self.service.peer();
        let not_sent = || CallFailure::NotSent {
            why: "the connection is closed".to_owned(),
        };
        let handle = peer
            .send_request_with_option(request, PeerRequestOptions::no_options())
            .await
            .map_err(|_| not_sent())?;
        // The server is notified if the call ends before there is a response, also if this future
        // is dropped.
        let mut told = Abandoned {
            peer: Some(peer.clone()),
            request: handle.id.clone(),
            sent: Arc::clone(&self.watch.sent),
        };
        let mut progress = self.watch.progress.follow(&handle.progress_token);
        let mut answer = handle.rx;
        let begun = Instant::now();
        let (mut deadline, latest) = match time {
            Some((silence, most)) => (Some(begun + silence.min(most)), Some(begun + most)),
            None => (None, None),
        };
        let mut further = Further {
            furthest: f64::NEG_INFINITY,
            sink: options.progress.as_ref(),
        };
        loop {
            tokio::select! {
                biased;
                answered = &mut answer => {
                    told.peer = None;
                    while let Ok(step) = progress.receiver.try_recv() {
                        further.tell(step);
                    }
                    return match answered {
                        Ok(Err(ServiceError::TransportClosed)) | Err(_) => {
                            Err(self.lost(&told.request).await)
                        }
                        Ok(answered) => self.understand(answered),
                    };
                }
                () = self.watch.broken.cancelled() => {
                    told.peer = None;
                    return Err(self.lost(&told.request).await);
                }
                () = options.cancel.cancelled() => return Err(CallFailure::Cancelled),
                Some(step) = progress.receiver.recv() => {
                    if let (Some((silence, _)), Some(latest)) = (time, latest) {
                        deadline = Some((Instant::now() + silence).min(latest));
                    }
                    further.tell(step);
                }
                () = sleep_until(deadline.unwrap_or(begun)), if deadline.is_some() => {
                    return Err(CallFailure::Timeout(begun.elapsed()));
                }
            }
        }
    }

    /// Returns the failure of a request whose connection was lost before the response.
    async fn lost(&self, request: &RequestId) -> CallFailure {
        match self.watch.sent.may_have_arrived(request).await {
            true => CallFailure::Lost,
            false => CallFailure::NotSent {
                why: "the connection is closed".to_owned(),
            },
        }
    }

    fn understand(
        &self,
        answered: Result<ServerResult, ServiceError>,
    ) -> Result<Value, CallFailure> {
        match answered {
            Ok(ServerResult::CustomResult(result)) => Ok(result.0),
            Ok(result) => serde_json::to_value(result)
                .map_err(|_| CallFailure::NotAResult("it cannot be read")),
            Err(ServiceError::McpError(error)) if wire::is_too_large(&error) => {
                Err(CallFailure::TooLarge)
            }
            Err(ServiceError::McpError(error)) if wire::has_too_many_values(&error) => {
                Err(CallFailure::TooManyValues)
            }
            Err(ServiceError::McpError(error)) if wire::is_unreadable(&error) => Err(
                CallFailure::NotAResult("it is no JSON, or nested too deeply"),
            ),
            Err(ServiceError::McpError(error)) => Err(CallFailure::Refused {
                code: error.code.0,
                message: said(&error.message, &self.mask),
            }),
            Err(ServiceError::TransportSend(error)) => Err(self.not_sent(error.error.as_ref())),
            Err(ServiceError::Cancelled { .. }) => Err(CallFailure::Cancelled),
            Err(_) => Err(CallFailure::NotAResult("it is not what was asked for")),
        }
    }

    /// Distinguishes requests that cannot have reached the server from those that may have.
    fn not_sent(&self, error: &(dyn Error + 'static)) -> CallFailure {
        // A partly written line is not a message.
        if error.is::<std::io::Error>() {
            self.give_up();
            return CallFailure::NotSent {
                why: "it ended".to_owned(),
            };
        }
        if let Some(StreamableHttpError::SessionExpired) =
            error.downcast_ref::<StreamableHttpError<WebError>>()
        {
            self.give_up();
            return CallFailure::NotSent {
                why: "it has ended the session".to_owned(),
            };
        }
        match web_error(error) {
            Some(error) if error.is_before_the_server() => CallFailure::NotSent {
                why: said(&error.to_string(), &self.mask),
            },
            Some(WebError::TooLarge(_)) => CallFailure::TooLarge,
            Some(WebError::ContentType) => {
                CallFailure::NotAResult("its answer is of a type that is not known")
            }
            Some(
                error @ (WebError::Status(status)
                | WebError::Moved(status)
                | WebError::Refused(status)),
            ) => CallFailure::Refused {
                code: i32::from(*status),
                message: error.to_string(),
            },
            Some(_) => CallFailure::Lost,
            None => match error.downcast_ref::<StreamableHttpError<WebError>>() {
                Some(
                    StreamableHttpError::UnexpectedServerResponse(_)
                    | StreamableHttpError::Deserialize(_),
                ) => CallFailure::NotAResult("it is no message"),
                _ => CallFailure::Lost,
            },
        }
    }
}

/// Returns a text from a server, limited in length, on one line and with secrets masked.
pub(crate) fn said(text: &str, mask: &SecretMask) -> String {
    let text = mask.hide(text);
    text.chars()
        .map(|character| {
            if character.is_control() {
                ' '
            } else {
                character
            }
        })
        .take(MAX_TEXT_LENGTH)
        .collect()
}

fn web_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a WebError> {
    match error.downcast_ref::<StreamableHttpError<WebError>>() {
        Some(StreamableHttpError::Client(error)) => Some(error),
        _ => error.downcast_ref(),
    }
}

/// Forwards progress only if it increases.
struct Further<'a> {
    furthest: f64,
    sink: Option<&'a ProgressSink>,
}

impl Further<'_> {
    fn tell(&mut self, step: CallProgress) {
        if step.progress > self.furthest {
            self.furthest = step.progress;
            if let Some(sink) = self.sink {
                sink(step);
            }
        }
    }
}

/// On drop, notifies the server that the request was cancelled.
struct Abandoned {
    peer: Option<Peer<RoleClient>>,
    request: RequestId,
    sent: Arc<Sent>,
}

impl Drop for Abandoned {
    fn drop(&mut self) {
        self.sent.forget(&self.request);
        let (Some(peer), Ok(runtime)) = (self.peer.take(), tokio::runtime::Handle::try_current())
        else {
            return;
        };
        let params = CancelledNotificationParam::new(
            Some(self.request.clone()),
            Some("nobody waits for the answer".to_owned()),
        );
        runtime.spawn(async move {
            // The server may already be gone.
            let _ = peer.notify_cancelled(params).await;
        });
    }
}

/// Keeps the stream of changes open. Its notifications are handled where all notifications are
/// handled (`watched`).
async fn keep_listening(peer: &Peer<RoleClient>) {
    if let Ok(mut subscription) = peer
        .listen(SubscriptionFilter::builder().tools_list_changed().build())
        .await
    {
        while let Ok(Some(_)) = subscription.next().await {}
    }
}
