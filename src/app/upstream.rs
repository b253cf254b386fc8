//! The bridge between sessions and other MCP servers: `session::tools::Broker` on one side,
//! `cellblock_upstream` on the other.
//!
//! It decides what a caller may register. The local user who started the server may name programs
//! and use its environment variables. Callers over HTTP may name public addresses only. The
//! operator's variables are not available to them, because they could have them sent anywhere. The
//! operator's servers are connected in the background, and reconnected on use if they were
//! unreachable.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use cellblock_typed::Package;
use cellblock_upstream::{
    AddressPolicy, CallError, CallErrorCode, CallOptions, CallProgress, CallReply, Owner, Registry,
    ServerKind, ServerName, ServerParams, ToolState, Upstream, Variables, WrapperCommand,
};
use serde_json::Value;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::approval::{Fingerprint, Policy, registration};
use crate::config;
use crate::session::servers::{
    Registrar, ServerReport, ServerRequest, ServerSetup, ServerState, ServerTool, Trust,
};
use crate::session::tools::{Broker, ToolReason, ToolRefused, ToolReply, UpstreamToolCall};
use crate::session::{Principal, SessionId};

/// The argument under which this program starts a third-party server.
pub const WRAPPER_ARGUMENT: &str = "--as-mcp-server";

/// Minimum interval between attempts to reconnect an unreachable server of the operator. It is
/// retried on use.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// All servers, the operator's and the callers'. Clones share state.
#[derive(Clone)]
pub(super) struct UpstreamBroker(Arc<Shared>);

struct Shared {
    registry: Registry,
    wrapper: Option<WrapperCommand>,
    state: Mutex<State>,
}

struct State {
    allowed_hosts: Vec<String>,
    variables: Variables,
    /// The servers of the operator, by name.
    configured: BTreeMap<String, Arc<Configured>>,
    /// The callers' policies for servers that they registered, by owner and name.
    policies: BTreeMap<(String, String), Arc<Policy>>,
}

/// A server of the operator.
struct Configured {
    name: ServerName,
    params: ServerParams,
    /// The policy for calls of its tools.
    policy: Option<Arc<Policy>>,
    /// The identity of the server: its configuration, and the values of the variables in it.
    written: (Value, BTreeMap<String, String>),
    variables: Variables,
    state: Mutex<(ServerState, Instant)>,
    /// Serializes attempts, also with earlier servers of this name: the last one must win.
    attempt: Arc<tokio::sync::Mutex<()>>,
}

impl UpstreamBroker {
    /// Starts without servers; `set_up` adds those of the operator.
    pub(super) fn new(settings: &config::UpstreamSettings) -> UpstreamBroker {
        let wrapper = std::env::current_exe().ok().map(|program| WrapperCommand {
            program,
            arguments: vec![OsString::from(WRAPPER_ARGUMENT)],
        });
        let state = State {
            allowed_hosts: settings.allowed_hosts.clone(),
            variables: Variables::new(settings.variables.clone()),
            configured: BTreeMap::new(),
            policies: BTreeMap::new(),
        };
        UpstreamBroker(Arc::new(Shared {
            registry: Registry::new(),
            wrapper,
            state: Mutex::new(state),
        }))
    }

    /// Closes all connections and stops the programs behind them.
    pub(super) async fn shut_down(&self) {
        self.state().configured.clear();
        self.0.registry.close().await;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0
            .state
            .lock()
            .expect("nothing panics while it holds the servers")
    }

    /// Returns the settings for a server that a caller registers.
    fn surroundings(&self, trust: Trust) -> cellblock_upstream::ConnectSettings {
        let state = self.state();
        let (variables, addresses) = match trust {
            Trust::Local => (state.variables.clone(), AddressPolicy::Any),
            Trust::Remote => (
                Variables::default(),
                AddressPolicy::PublicOnly {
                    allowed: state.allowed_hosts.clone(),
                },
            ),
        };
        self.with_wrapper(variables, addresses)
    }

    fn with_wrapper(
        &self,
        variables: Variables,
        addresses: AddressPolicy,
    ) -> cellblock_upstream::ConnectSettings {
        let wrapper = self.0.wrapper.clone();
        cellblock_upstream::ConnectSettings {
            addresses,
            wrapper,
            ..cellblock_upstream::ConnectSettings::new(variables)
        }
    }

    /// Connects to a server of the operator, unless it is connected or an attempt has just ended.
    async fn connect(&self, server: Arc<Configured>) {
        let asked = Instant::now();
        let _attempt = server.attempt.lock().await;
        let (is_there, tried) = {
            let state = server.state();
            (state.0 == ServerState::Connected, state.1)
        };
        // Another attempt ended while this one waited for the lock, or the configuration has
        // changed.
        if is_there || tried > asked || !self.is_wanted(&server) {
            return;
        }
        let settings = self.with_wrapper(server.variables.clone(), AddressPolicy::Any);
        let registered = self
            .0
            .registry
            .register(&Owner::Everyone, &server.name, &server.params, &settings)
            .await;
        let name = server.name.as_str();
        let state = match registered {
            Ok(upstream) => {
                info!(
                    server = name,
                    tools = upstream.package().tools.len(),
                    "an MCP server is registered"
                );
                ServerState::Connected
            }
            Err(error) => {
                let why = format!("{:#}", anyhow::Error::new(error));
                warn!(
                    server = name,
                    error = why,
                    "an MCP server of the configuration cannot be used"
                );
                // A registration left over from the previous configuration is no longer valid.
                self.0.registry.unregister(&Owner::Everyone, name);
                ServerState::Failed { why }
            }
        };
        *server.state() = (state, Instant::now());
        // The configuration may have changed meanwhile. Another server of this name is registered
        // after this.
        if !self.is_wanted(&server) {
            self.0.registry.unregister(&Owner::Everyone, name);
        }
    }

    /// Returns whether a server is still the configured one of its name.
    fn is_wanted(&self, server: &Arc<Configured>) -> bool {
        self.state()
            .configured
            .get(server.name.as_str())
            .is_some_and(|current| Arc::ptr_eq(current, server))
    }

    /// Returns the server that an owner means, after trying to reconnect an unreachable server of
    /// the operator.
    async fn find(&self, owner: &Principal, name: &str) -> Result<Upstream, ToolRefused> {
        if let Some(upstream) = self.0.registry.find(&owner.0, name) {
            return Ok(upstream);
        }
        let configured = self.state().configured.get(name).cloned();
        let Some(server) = configured else {
            return Err(ToolRefused::no_server(name));
        };
        self.connect(server.clone()).await;
        self.0.registry.find(&owner.0, name).ok_or_else(|| {
            let why = match &server.state().0 {
                ServerState::Failed { why } => why.clone(),
                _ => "it has not answered yet".to_owned(),
            };
            ToolRefused::new(
                ToolReason::Unavailable,
                format!("the MCP server {name} cannot be used: {why}"),
            )
        })
    }

    fn report(&self, upstream: &Upstream) -> ServerReport {
        let info = upstream.info();
        let is_operators = self.state().configured.contains_key(info.name.as_str());
        let tool = |tool: cellblock_upstream::ToolInfo| ServerTool {
            disabled: match tool.state {
                ToolState::Ready => None,
                ToolState::Changed => {
                    Some("the server changed it; register the server again to use it".to_owned())
                }
                ToolState::Gone => Some("the server does not have it any more".to_owned()),
            },
            name: tool.name,
            module: tool.python,
            summary: tool.summary,
        };
        ServerReport {
            name: info.name.as_str().to_owned(),
            package: info.name.python().to_owned(),
            transport: transport(upstream.params().kind()),
            registrar: if is_operators {
                Registrar::Operator
            } else {
                Registrar::Owner
            },
            state: if info.is_alive {
                ServerState::Connected
            } else {
                ServerState::Disconnected
            },
            tools: info.tools.into_iter().map(tool).collect(),
            notes: info.notes,
        }
    }
}

impl Configured {
    fn state(&self) -> MutexGuard<'_, (ServerState, Instant)> {
        self.state
            .lock()
            .expect("nothing panics while it holds the state of a server")
    }

    fn report(&self) -> ServerReport {
        ServerReport {
            name: self.name.as_str().to_owned(),
            package: self.name.python().to_owned(),
            transport: transport(self.params.kind()),
            registrar: Registrar::Operator,
            state: self.state().0.clone(),
            tools: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn is_worth_another_attempt(&self) -> bool {
        let state = self.state();
        matches!(state.0, ServerState::Failed { .. }) && state.1.elapsed() > RETRY_AFTER
    }
}

#[async_trait]
impl Broker for UpstreamBroker {
    async fn call(
        &self,
        owner: &Principal,
        _session: &SessionId,
        call: UpstreamToolCall,
        tell: &(dyn Fn(String) + Send + Sync),
    ) -> Result<ToolReply, ToolRefused> {
        let UpstreamToolCall {
            server,
            tool,
            arguments,
            fingerprint,
        } = call;
        let upstream = self.find(owner, &server).await?;
        // The server called must be the one that was inspected, and perhaps approved, although
        // another server of this name may have been registered meanwhile.
        let is_what_it_was = fingerprint.is_none_or(|looked_at| {
            looked_at == of_params(upstream.params())
                || of_tool(&upstream, &tool).is_ok_and(|now| now == looked_at)
        });
        if !is_what_it_was {
            return Err(ToolRefused::another_tool(&server));
        }
        let (progress, mut told) = watch::channel(None);
        let sink = move |news: CallProgress| drop(progress.send_replace(Some(news)));
        let options = CallOptions {
            progress: Some(Arc::new(sink)),
            ..CallOptions::default()
        };
        let mut calling = std::pin::pin!(upstream.call(&tool, arguments, options));
        loop {
            tokio::select! {
                result = &mut calling => return result.map(reply).map_err(|error| refusal(&error)),
                Ok(()) = told.changed() => {
                    let news = told.borrow_and_update().clone();
                    if let Some(news) = news {
                        tell(progress_text(&server, &tool, &news));
                    }
                }
            }
        }
    }

    fn fingerprint(
        &self,
        owner: &Principal,
        server: &str,
        tool: &str,
    ) -> Result<Option<Fingerprint>, ToolRefused> {
        if let Some(upstream) = self.0.registry.find(&owner.0, server) {
            return of_tool(&upstream, tool)
                .map(Some)
                .map_err(|error| refusal(&error));
        }
        // A server of the operator that was not reached yet. The call connects to exactly this
        // server.
        let configured = self.state().configured.get(server).cloned();
        let params = configured.ok_or_else(|| ToolRefused::no_server(server))?;
        Ok(Some(of_params(&params.params)))
    }

    fn policy(&self, owner: &Principal, server: &str) -> Option<Arc<Policy>> {
        let state = self.state();
        let own = state
            .policies
            .get(&(owner.0.clone(), server.to_owned()))
            .cloned();
        own.or_else(|| {
            state
                .configured
                .get(server)
                .and_then(|server| server.policy.clone())
        })
    }

    fn packages(&self, owner: &Principal) -> Vec<Arc<Package>> {
        self.0.registry.packages_of(&owner.0)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.0.registry.changes()
    }

    async fn register(
        &self,
        owner: &Principal,
        request: ServerRequest,
    ) -> Result<ServerReport, String> {
        let ServerRequest {
            name,
            params,
            trust,
        } = request;
        let name = ServerName::new(&name)
            .map_err(|error| format!("the name of the server cannot be used: {error}"))?;
        let not_registered =
            |error: &dyn std::fmt::Display| format!("the server is not registered: {error}");
        let (params, policy) =
            registration(name.as_str(), &params).map_err(|bad| not_registered(&bad))?;
        let params = ServerParams::parse(&params).map_err(|error| not_registered(&error))?;
        if trust == Trust::Remote && params.kind() == ServerKind::Command {
            return Err(
                "the server is not registered: only the operator's configuration may name \
                        commands; give the \
                        `url` of a server"
                    .to_owned(),
            );
        }
        let is_operators = self
            .state()
            .configured
            .values()
            .any(|other| other.name.python() == name.python());
        if is_operators {
            return Err(format!(
                "there is a server `{name}` of the operator, which cannot be replaced; choose \
                 another name"
            ));
        }
        let settings = self.surroundings(trust);
        let registered = self
            .0
            .registry
            .register(&Owner::One(owner.0.clone()), &name, &params, &settings)
            .await;
        match registered {
            Ok(upstream) => {
                let key = (owner.0.clone(), name.as_str().to_owned());
                match policy {
                    Some(policy) => drop(self.state().policies.insert(key, Arc::new(policy))),
                    None => drop(self.state().policies.remove(&key)),
                }
                Ok(self.report(&upstream))
            }
            Err(error) => Err(format!(
                "the server is not registered: {:#}",
                anyhow::Error::new(error)
            )),
        }
    }

    async fn unregister(&self, owner: &Principal, name: &str) -> Result<(), String> {
        if self
            .0
            .registry
            .unregister(&Owner::One(owner.0.clone()), name)
        {
            self.state()
                .policies
                .remove(&(owner.0.clone(), name.to_owned()));
            return Ok(());
        }
        if self.state().configured.contains_key(name) {
            return Err(format!(
                "the server `{name}` is the operator's, and only the configuration can take it away"
            ));
        }
        Err(format!(
            "there is no server {name:?}; `list_mcp_servers` names those that are registered"
        ))
    }

    fn servers(&self, owner: &Principal) -> Vec<ServerReport> {
        let configured: Vec<Arc<Configured>> = self.state().configured.values().cloned().collect();
        let names: Vec<String> = self
            .0
            .registry
            .list(&owner.0)
            .into_iter()
            .map(|info| info.name.as_str().to_owned())
            .collect();
        let found = names
            .iter()
            .filter_map(|name| self.0.registry.find(&owner.0, name));
        let mut reports: Vec<ServerReport> = found.map(|upstream| self.report(&upstream)).collect();
        for server in configured
            .into_iter()
            .filter(|server| !names.iter().any(|name| name == server.name.as_str()))
        {
            reports.push(server.report());
            if server.is_worth_another_attempt() {
                let all = self.clone();
                tokio::spawn(async move { all.connect(server).await });
            }
        }
        reports.sort_by(|one, other| one.name.cmp(&other.name));
        reports
    }

    fn set_up(&self, setup: ServerSetup) {
        let ServerSetup {
            servers,
            allowed_hosts,
            variables,
        } = setup;
        let all = Variables::new(variables.clone());
        let mut before = {
            let mut state = self.state();
            state.allowed_hosts = allowed_hosts;
            state.variables = all.clone();
            std::mem::take(&mut state.configured)
        };
        let mut fresh = Vec::new();
        for (name, params) in servers {
            let filled = filled_in(&params, &variables);
            let written = (params, filled);
            let old = before.remove(&name);
            let attempt = old
                .as_ref()
                .map(|old| Arc::clone(&old.attempt))
                .unwrap_or_default();
            let known = old.filter(|known| known.written == written);
            let server = match (known, configured(&name, written, all.clone(), attempt)) {
                (Some(known), _) => known,
                (None, Some(server)) => {
                    fresh.push(server.clone());
                    server
                }
                (None, None) => continue,
            };
            self.state().configured.insert(name, server);
        }
        for gone in before.into_keys() {
            info!(
                server = gone,
                "an MCP server is not in the configuration any more"
            );
            self.0.registry.unregister(&Owner::Everyone, &gone);
        }
        for server in fresh {
            let all = self.clone();
            tokio::spawn(async move { all.connect(server).await });
        }
    }
}

/// Creates an entry from a value that `config` has checked. Another version of this program may
/// have checked it differently.
fn configured(
    name: &str,
    written: (Value, BTreeMap<String, String>),
    variables: Variables,
    attempt: Arc<tokio::sync::Mutex<()>>,
) -> Option<Arc<Configured>> {
    let found = registration(name, &written.0).ok();
    let parsed =
        found.and_then(|(params, policy)| Some((ServerParams::parse(&params).ok()?, policy)));
    let (Ok(server), Some((params, policy))) = (ServerName::new(name), parsed) else {
        warn!(
            server = name,
            "an MCP server of the configuration makes no sense here"
        );
        return None;
    };
    Some(Arc::new(Configured {
        name: server,
        params,
        policy: policy.map(Arc::new),
        written,
        variables,
        state: Mutex::new((ServerState::Connecting, Instant::now())),
        attempt,
    }))
}

/// The identity of a tool: its definition when its server was registered, and how that server is
/// reached.
fn of_tool(upstream: &Upstream, tool: &str) -> Result<Fingerprint, CallError> {
    Ok(Fingerprint::of(&[
        &upstream.params().digest(),
        &upstream.tool_digest(tool)?,
    ]))
}

/// The identity of the tools of a server that was not reached yet. A grant bound to it becomes
/// invalid once the server is reached.
fn of_params(params: &ServerParams) -> Fingerprint {
    Fingerprint::of(&[&params.digest()])
}

/// Returns the variables named in the parameters, with their values.
fn filled_in(params: &Value, variables: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let text = params.to_string();
    let named = text
        .split("${")
        .skip(1)
        .filter_map(|rest| rest.split_once('}'));
    named
        .filter_map(|(name, _)| variables.get_key_value(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

fn transport(kind: ServerKind) -> String {
    match kind {
        ServerKind::Command => "stdio",
        ServerKind::Url => "http",
    }
    .to_owned()
}

fn reply(reply: CallReply) -> ToolReply {
    ToolReply {
        content: reply.content,
        structured: reply.structured,
        is_error: reply.is_error,
    }
}

fn refusal(error: &CallError) -> ToolRefused {
    let reason = match error.reason() {
        CallErrorCode::Timeout => ToolReason::Timeout,
        CallErrorCode::Unknown => ToolReason::Unknown,
        CallErrorCode::Invalid => ToolReason::Invalid,
        CallErrorCode::Unavailable => ToolReason::Unavailable,
        CallErrorCode::Protocol => ToolReason::Protocol,
        CallErrorCode::TooLarge => ToolReason::TooLarge,
        CallErrorCode::Cancelled => ToolReason::Cancelled,
    };
    ToolRefused::new(reason, error.to_string())
}

fn progress_text(server: &str, tool: &str, news: &CallProgress) -> String {
    let far = match news.total {
        Some(total) => format!("{} of {total}", news.progress),
        None => news.progress.to_string(),
    };
    match &news.message {
        Some(message) => format!("{server}.{tool}: {message} ({far})"),
        None => format!("{server}.{tool}: {far}"),
    }
}
