//! A registered server: calls, monitoring, and reconnects.
//!
//!     call → does the tool exist? → are the arguments valid? → a live connection (`driver`)
//!          → is the tool unchanged? → send
//!
//! A call that cannot have reached the server is retried once over a new connection. A call that
//! may have reached it is never repeated: it fails with that information. A server that keeps
//! failing is retried with an increasing backoff.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cellblock_egress::resolve::{Resolver, SystemResolver};
use cellblock_typed::{Package, ServerName, ToolSchema};
use serde_json::{Map, Value};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::addresses::AddressPolicy;
use crate::call::{CallError, CallOptions, CallReply};
use crate::child::WrapperCommand;
use crate::connection::{CallFailure, UpstreamConnection};
use crate::driver::{self, ConnectionLink, ConnectionReply, Driver};
use crate::greeting::{ConnectError, Era};
use crate::params::ServerParams;
use crate::tools::PinnedTools;
use crate::variables::Variables;

pub use crate::tools::ToolState;

/// Arguments with more values than this are checked on a separate thread.
const QUICKLY_CHECKED: usize = 1000;
/// Maximum number of notes about one server.
const MAX_NOTES: usize = 100;

/// Limits on a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerLimits {
    /// Timeout for a connection, from the start of a program to the end of the handshake, and again
    /// for the list of tools.
    pub connect: Duration,
    /// Idle timeout: how long a server may send nothing during a call.
    pub call: Duration,
    /// Maximum duration of a call, regardless of progress.
    pub longest_call: Duration,
    /// Maximum size of a message, and so of a result.
    pub largest_message: usize,
    /// Maximum total size of all tool definitions.
    pub largest_list: usize,
    pub most_tools: usize,
    pub most_pages: usize,
}

impl Default for ServerLimits {
    fn default() -> ServerLimits {
        ServerLimits {
            connect: Duration::from_secs(30),
            call: Duration::from_secs(60),
            longest_call: Duration::from_secs(600),
            largest_message: 16 * 1024 * 1024,
            largest_list: 16 * 1024 * 1024,
            most_tools: 1000,
            most_pages: 100,
        }
    }
}

/// Settings for connecting to servers.
#[derive(Clone)]
pub struct ConnectSettings {
    /// Source of `${VAR}`, and of the few variables that programs inherit.
    pub variables: Variables,
    pub limits: ServerLimits,
    pub addresses: AddressPolicy,
    /// Resolves names if the policy checks addresses.
    pub resolver: Arc<dyn Resolver>,
    /// Command through which programs are started. Without it they may outlive this process if it
    /// is killed.
    pub wrapper: Option<WrapperCommand>,
}

impl ConnectSettings {
    /// Returns settings with default limits and no restriction of addresses.
    pub fn new(variables: Variables) -> ConnectSettings {
        ConnectSettings {
            variables,
            limits: ServerLimits::default(),
            addresses: AddressPolicy::Any,
            resolver: Arc::new(SystemResolver::new()),
            wrapper: None,
        }
    }
}

/// A registered server. Clones share the same server; the connection is closed when the last clone
/// is dropped.
#[derive(Clone)]
pub struct Upstream(Arc<Shared>);

struct Shared {
    name: ServerName,
    params: ServerParams,
    limits: ServerLimits,
    package: Arc<Package>,
    pinned: Arc<PinnedTools>,
    notes: Vec<String>,
    link: Arc<ConnectionLink>,
    driver: mpsc::Sender<ConnectionReply>,
    running: watch::Sender<usize>,
    closing: CancellationToken,
    ended: CancellationToken,
}

/// Information about a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpstreamInfo {
    pub name: ServerName,
    /// The program, or the host, without anything that could be secret.
    pub transport: String,
    pub era: Option<Era>,
    /// The server's own name.
    pub server: Option<String>,
    pub tools: Vec<ToolInfo>,
    /// Deviations from the server's definitions, with reasons.
    pub notes: Vec<String>,
    /// Whether it is connected. If not, the next call connects.
    pub is_alive: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolInfo {
    /// The tool's name on the server.
    pub name: String,
    /// The name of its Python module.
    pub python: String,
    pub summary: String,
    pub state: ToolState,
}

impl Upstream {
    /// Connects to a server and registers its current tools.
    pub async fn connect(
        name: &ServerName,
        params: &ServerParams,
        settings: &ConnectSettings,
    ) -> Result<Upstream, ConnectError> {
        let mut settings = settings.clone();
        let limits = &mut settings.limits;
        limits.connect = params.connect_timeout.unwrap_or(limits.connect);
        limits.call = params.call_timeout.unwrap_or(limits.call);
        limits.longest_call = limits.longest_call.max(limits.call);
        let limits = limits.clone();
        let opened = driver::open(params, &settings, None).await?;
        let registered = register(name.clone(), opened.tools).await?;
        let (driver, wanted) = mpsc::channel(64);
        let link = Arc::new(ConnectionLink::new(opened.connection));
        let (closing, ended) = (CancellationToken::new(), CancellationToken::new());
        let task = Driver {
            params: params.clone(),
            settings,
            pinned: Arc::clone(&registered.pinned),
            link: Arc::clone(&link),
            wanted,
            closing: closing.clone(),
            ended: ended.clone().drop_guard(),
        };
        tokio::spawn(task.run());
        let mut notes = opened.notes;
        notes.extend(registered.notes);
        notes.truncate(MAX_NOTES);
        let Registered {
            package, pinned, ..
        } = registered;
        let (name, params, running) = (name.clone(), params.clone(), watch::Sender::new(0));
        Ok(Upstream(Arc::new(Shared {
            name,
            params,
            limits,
            package,
            pinned,
            notes,
            link,
            driver,
            running,
            closing,
            ended,
        })))
    }

    pub fn name(&self) -> &ServerName {
        &self.0.name
    }

    pub fn params(&self) -> &ServerParams {
        &self.0.params
    }

    /// Returns the generated Python package of the server's tools.
    pub fn package(&self) -> &Arc<Package> {
        &self.0.package
    }

    pub fn info(&self) -> UpstreamInfo {
        let tools = self.0.package.tools.iter().map(|tool| ToolInfo {
            name: tool.original.clone(),
            python: tool.python.clone(),
            summary: tool.summary.clone(),
            state: self
                .0
                .pinned
                .state(&tool.original)
                .unwrap_or(ToolState::Gone),
        });
        let (era, server) = self.0.link.facts();
        UpstreamInfo {
            name: self.0.name.clone(),
            transport: self.0.params.summary(),
            era: Some(era),
            server,
            tools: tools.collect(),
            notes: self.0.notes.clone(),
            is_alive: self.0.link.usable().is_some(),
        }
    }

    /// Returns the digest of a tool's registered definition, or an error if the tool does not
    /// exist.
    pub fn tool_digest(&self, tool: &str) -> Result<[u8; 32], CallError> {
        self.0.pinned.digest(tool).ok_or_else(|| self.unknown(tool))
    }

    /// Calls a tool. Any number of calls may run concurrently.
    ///
    /// Dropping the future cancels the call, as `options.cancel` does.
    pub async fn call(
        &self,
        tool: &str,
        arguments: Map<String, Value>,
        options: CallOptions,
    ) -> Result<CallReply, CallError> {
        let _running = Running::new(&self.0.running);
        let arguments = self.checked(tool, arguments).await?;
        // One retry, for a call that cannot have reached a server whose connection was lost
        // unnoticed.
        let mut attempts = 0;
        loop {
            attempts += 1;
            let connection = tokio::select! {
                () = options.cancel.cancelled() => return Err(CallError::Cancelled),
                connection = self.connection() => connection?,
            };
            self.is_what_it_was(tool)?;
            let time = (
                options.time.unwrap_or(self.0.limits.call),
                self.0.limits.longest_call,
            );
            match connection
                .call(tool, arguments.clone(), &options, time)
                .await
            {
                Ok(result) => {
                    let server = self.0.name.to_string();
                    return CallReply::read(result)
                        .map_err(|why| CallError::Protocol { server, why });
                }
                Err(CallFailure::NotSent { .. }) if attempts == 1 => {}
                Err(failure) => return Err(self.failed(failure, &connection).await),
            }
        }
    }

    /// Closes the connection and waits until its program has exited. Running calls fail.
    pub async fn close(&self) {
        self.0.closing.cancel();
        self.0.ended.cancelled().await;
    }

    /// Closes the connection after the running calls have ended, or after `patience`.
    pub(crate) async fn retire(&self, patience: Duration) {
        let mut running = self.0.running.subscribe();
        // The connection is closed in both cases.
        let _ = timeout(patience, running.wait_for(|count| *count == 0)).await;
        self.close().await;
    }

    async fn checked(
        &self,
        tool: &str,
        arguments: Map<String, Value>,
    ) -> Result<Map<String, Value>, CallError> {
        if !self.0.pinned.has(tool) {
            return Err(self.unknown(tool));
        }
        self.is_what_it_was(tool)?;
        let arguments = Value::Object(arguments);
        let is_small = is_small(&arguments, &mut QUICKLY_CHECKED.clone());
        let (pinned, name) = (Arc::clone(&self.0.pinned), tool.to_owned());
        let check = move || (pinned.objection(&name, &arguments), arguments);
        let (objection, arguments) = if is_small {
            check()
        } else {
            tokio::task::spawn_blocking(check)
                .await
                .expect("checking arguments does not panic")
        };
        match (objection, arguments) {
            (None, Value::Object(arguments)) => Ok(arguments),
            (why, _) => Err(CallError::Invalid {
                tool: tool.to_owned(),
                why: why.unwrap_or_default(),
            }),
        }
    }

    fn unknown(&self, tool: &str) -> CallError {
        let likeness = |name: &&str| strsim::jaro_winkler(tool, name);
        let nearest = self
            .0
            .pinned
            .names()
            .max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
        let nearest = nearest
            .filter(|name| likeness(name) > 0.75)
            .map(str::to_owned);
        CallError::Unknown {
            server: self.0.name.to_string(),
            tool: tool.chars().take(128).collect(),
            nearest,
        }
    }

    fn is_what_it_was(&self, tool: &str) -> Result<(), CallError> {
        let how = match self.0.pinned.state(tool) {
            Some(ToolState::Ready) => return Ok(()),
            Some(ToolState::Changed) => "has changed",
            Some(ToolState::Gone) | None => "is gone",
        };
        Err(CallError::ToolChanged {
            server: self.0.name.to_string(),
            tool: tool.to_owned(),
            how,
        })
    }

    /// Returns a connection on which the server's current tools are known.
    async fn connection(&self) -> Result<Arc<UpstreamConnection>, CallError> {
        if let Some(connection) = self
            .0
            .link
            .usable()
            .filter(|connection| !connection.is_stale())
        {
            return Ok(connection);
        }
        let unavailable = |why: String| CallError::Unavailable {
            server: self.0.name.to_string(),
            why,
        };
        let closed = || unavailable(ConnectError::Closed.to_string());
        let (answer, connection) = oneshot::channel();
        self.0.driver.send(answer).await.map_err(|_| closed())?;
        connection.await.map_err(|_| closed())?.map_err(unavailable)
    }

    async fn failed(&self, failure: CallFailure, connection: &UpstreamConnection) -> CallError {
        let server = self.0.name.to_string();
        match failure {
            CallFailure::NotSent { why } => CallError::Unavailable { server, why },
            CallFailure::Lost => CallError::Interrupted {
                server,
                last_words: connection.last_words().await,
            },
            CallFailure::Refused { code, message } => CallError::Refused {
                server,
                code,
                message,
            },
            CallFailure::NotAResult(why) => CallError::Protocol { server, why },
            CallFailure::TooLarge => CallError::TooLarge {
                server,
                largest: self.0.limits.largest_message,
            },
            CallFailure::TooManyValues => CallError::TooManyValues { server },
            CallFailure::Timeout(time) => CallError::Timeout { server, time },
            CallFailure::Cancelled => CallError::Cancelled,
        }
    }
}

impl fmt::Debug for Upstream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Upstream")
            .field("name", &self.0.name)
            .field("params", &self.0.params)
            .finish_non_exhaustive()
    }
}

/// Returns whether a value has few parts, and no long text that is slow to match against a pattern.
fn is_small(value: &Value, left: &mut usize) -> bool {
    let weight = 1 + value.as_str().map_or(0, |text| text.len() / 64);
    *left = left.saturating_sub(weight);
    *left > 0
        && match value {
            Value::Array(items) => items.iter().all(|item| is_small(item, left)),
            Value::Object(members) => members.values().all(|member| is_small(member, left)),
            _ => true,
        }
}

/// Counts a call while it runs.
struct Running(watch::Sender<usize>);

impl Running {
    fn new(count: &watch::Sender<usize>) -> Running {
        count.send_modify(|count| *count += 1);
        Running(count.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

struct Registered {
    package: Arc<Package>,
    pinned: Arc<PinnedTools>,
    notes: Vec<String>,
}

/// Generates the Python code of the tools and pins them. This uses CPU time for a while, so it does
/// not run on a worker thread of the runtime.
async fn register(name: ServerName, tools: Vec<ToolSchema>) -> Result<Registered, ConnectError> {
    let work = move || {
        let mut notes = Vec::new();
        // Tools that cannot be checked get no module.
        let pinned = PinnedTools::new(&tools, &mut notes);
        let usable: Vec<ToolSchema> = tools
            .into_iter()
            .filter(|tool| pinned.has(&tool.name))
            .collect();
        let package = cellblock_typed::generate(&name, &usable)?;
        // Tools without a module are not called.
        let made = usable
            .iter()
            .filter(|tool| package.tools.iter().any(|made| made.original == tool.name));
        let pinned = if package.tools.len() == usable.len() {
            pinned
        } else {
            PinnedTools::new(made, &mut Vec::new())
        };
        notes.extend(package.notes.iter().map(ToString::to_string));
        Ok(Registered {
            package: Arc::new(package),
            pinned: Arc::new(pinned),
            notes,
        })
    };
    tokio::task::spawn_blocking(work)
        .await
        .expect("making Python of schemas does not panic")
}
