//! MCP: how clients reach sessions.
//!
//! ```text
//! transport (stdio) → Server (this file) → tools    names and schemas; arguments: what was written, checked
//!                          │             → render   outcomes as text, images and structured content; compare: many of them
//!                          │             → resources, progress, host_files
//!                          └→ sessions, through session::SessionAccess
//! ```
//!
//! A transport carries messages, `Server` decides what each one means and carries it out, the other files are pure.
//! Both protocol eras are served: 2026-07-28, where every request stands alone, and the older ones that begin with
//! `initialize`.
//!
//! Two kinds of failure are kept apart. A request that makes no sense as a request (unknown method, unknown tool,
//! parameters of the wrong shape) is a protocol error. Everything a model could do better next time (a bad argument,
//! code that raised, a session that ended) is a tool result with `isError` and a sentence that says what happened and
//! what to do.
//!
//! The library's types (rmcp) never leave this room.

mod arguments;
mod compare;
mod host_files;
pub mod http;
mod progress;
mod render;
mod resources;
mod stdio;
mod tools;
mod turns;
mod wire;

use std::borrow::Cow;
use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rmcp::model::{
    CacheScope, CallToolRequestParams, CallToolResponse, CallToolResult, ClientRequest, CompleteRequestMethod,
    CompleteRequestParams, CompleteResult, CustomRequest, CustomResult, DiscoverResult, ErrorCode, ErrorData,
    Implementation, JsonObject, ListPromptsRequestMethod, ListPromptsResult, ListResourceTemplatesResult,
    ListResourcesResult, ListToolsResult, MetaObject, PaginatedRequestParams, ProgressNotificationParam,
    ProtocolVersion, ReadResourceRequestParams, ReadResourceResponse, ReadResourceResult, ServerCapabilities,
    ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::{RoleServer, ServerHandler};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::sync::Semaphore;

use crate::auth::Caller;
use crate::sandbox::{Rule, Rules};
use crate::session::{
    ExecuteRequest, Executed, ExploreRequest, InsidePath, News, Principal, SessionAccess, SessionId, WorkFolder,
};
use arguments::Call;
use host_files::{Capped, HostFileError, Overwrite};
pub use host_files::{HostFiles, RootError};
use progress::Reporter;
use resources::{Address, CutOutputs};
pub use stdio::{ServeError, serve_stdio};
use tools::{Catalogue, ToolName};
use turns::Turn;

/// Tool calls carried out at once. Each may hold an output in memory; a client with more than this under way has lost
/// count.
const MOST_CALLS: usize = 64;

/// How long clients may keep what cannot change while the server runs. Short enough that a new version is soon seen.
const FIXED_FOR: Duration = Duration::from_secs(300);

/// The methods this server answers. Their parameters have a shape; a request that misses it must not look like an
/// unknown method.
const ANSWERED_METHODS: [&str; 8] = [
    "initialize",
    "ping",
    "resources/list",
    "resources/read",
    "resources/templates/list",
    "server/discover",
    "tools/call",
    "tools/list",
];

/// How long an installation takes at most, as far as its progress is told.
const INSTALL_TIME: Duration = Duration::from_secs(300);

/// Rules that a client is told one by one; of more only the number.
const MOST_RULES_TOLD: usize = 8;

/// What an operator can choose about the tools.
#[derive(Debug, Clone)]
pub struct McpSettings {
    /// For executions whose caller names none.
    pub default_timeout: Duration,
    /// The most a caller may ask for.
    pub max_timeout: Duration,
    /// For executions whose caller names none.
    pub default_max_output_chars: usize,
    /// After how long an unused session ends. Only told to clients here; sessions enforce it.
    pub idle_timeout: Duration,
    pub work_folder: WorkFolder,
    /// Whether sessions keep what is needed to undo cells. Only told to clients here.
    pub can_undo: bool,
    /// What sessions can reach. Only told to clients here.
    pub network: Rules,
    /// Whether packages can be installed. Only told to clients here.
    pub can_install: bool,
}

impl McpSettings {
    /// Says what sessions can reach, as the end of a sentence.
    fn reach(&self) -> String {
        let (denied, allowed): (Vec<_>, Vec<_>) = self.network.iter().partition(|rule| rule.is_denial());
        let texts = |rules: &[&Rule]| rules.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let reached = match allowed.len() {
            0 => return "without network".to_owned(),
            _ if allowed.iter().any(|rule| rule.is_everything()) => "with network".to_owned(),
            few if few <= MOST_RULES_TOLD => format!("whose network reaches only {}", texts(&allowed)),
            more => format!("whose network reaches only {more} listed places"),
        };
        match denied.len() {
            0 => reached,
            few if few <= MOST_RULES_TOLD => format!("{reached}, but not {}", texts(&denied).replace('!', "")),
            more => format!("{reached}, but not {more} others"),
        }
    }
}

impl Default for McpSettings {
    fn default() -> McpSettings {
        McpSettings {
            default_timeout: Duration::from_secs(120),
            max_timeout: Duration::from_secs(3600),
            default_max_output_chars: 5000,
            idle_timeout: Duration::from_secs(3600),
            work_folder: WorkFolder::Private,
            can_undo: true,
            network: Rules::none(),
            can_install: true,
        }
    }
}

/// The MCP server. Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct Server {
    shared: Arc<Shared>,
}

struct Shared {
    sessions: Arc<dyn SessionAccess>,
    files: HostFiles,
    catalogue: Catalogue,
    work_folder: WorkFolder,
    can_undo: bool,
    /// What sessions can reach, as the end of a sentence.
    reach: String,
    /// What all variants of one `explore` may tell together.
    most_compared_chars: usize,
    /// What tells who is calling.
    front: Front,
    cut_outputs: Mutex<CutOutputs>,
    calls: Semaphore,
}

/// How callers are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Front {
    /// Whoever has the pipe started this program.
    Stdio,
    /// The HTTP stack has put a [`Caller`] into every request that it let through.
    Http,
}

/// Why a call was given up by this room.
#[derive(Debug, thiserror::Error)]
enum GivenUp {
    #[error(
        "the server is busy with {MOST_CALLS} calls. Nothing was executed. Try again when one of them has been answered"
    )]
    Busy,
    #[error("the call was cancelled; what it had begun may have taken effect")]
    Cancelled,
}

/// A copy between host and sandbox that failed outside the session.
#[derive(Debug, thiserror::Error)]
#[error("the file could not be written completely, and what was written has been removed")]
struct WriteFailed(#[source] std::io::Error);

impl Server {
    /// Makes the server of one local caller.
    pub fn local(sessions: Arc<dyn SessionAccess>, files: HostFiles, settings: McpSettings) -> Server {
        Server::over(Front::Stdio, sessions, files, settings)
    }

    fn over(front: Front, sessions: Arc<dyn SessionAccess>, files: HostFiles, settings: McpSettings) -> Server {
        Server {
            shared: Arc::new(Shared {
                sessions,
                files,
                catalogue: Catalogue::new(&settings),
                work_folder: settings.work_folder,
                can_undo: settings.can_undo,
                reach: settings.reach(),
                most_compared_chars: settings.default_max_output_chars,
                front,
                cut_outputs: Mutex::default(),
                calls: Semaphore::new(MOST_CALLS),
            }),
        }
    }

    /// Tells who sent a request.
    fn caller(&self, context: &RequestContext<RoleServer>) -> Result<Caller, ErrorData> {
        match self.shared.front {
            Front::Stdio => Ok(Caller::local()),
            Front::Http => {
                let request = context.extensions.get::<axum::http::request::Parts>();
                let caller = request.and_then(|request| request.extensions.get::<Caller>());
                caller.cloned().ok_or_else(|| ErrorData::internal_error("it is not known who is calling", None))
            }
        }
    }

    async fn carry_out(
        &self,
        owner: &Principal,
        tool: ToolName,
        arguments: JsonObject,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResult {
        let call = match self.shared.catalogue.parse(tool, arguments) {
            Ok(call) => call,
            Err(bad) => return render::refused(&bad),
        };
        let Ok(_place) = self.shared.calls.try_acquire() else { return render::refused(&GivenUp::Busy) };
        let sessions = &self.shared.sessions;
        match call {
            // Execution listens for cancellation itself, because it has an outcome to tell.
            Call::Execute { session, code, timeout, max_output_chars } => {
                self.execute(owner, &session, ExecuteRequest { code, timeout, max_output_chars }, context).await
            }
            Call::Install { session, requirements } => {
                let news = News::default();
                let reporter = Reporter::new(sessions.preparation(), INSTALL_TIME, &news);
                let installation = sessions.install(owner, &session, requirements, context.ct.clone(), news);
                match with_progress(installation, reporter, context).await {
                    Ok(report) => render::installed(&session, &report),
                    Err(refused) => render::refused(&refused),
                }
            }
            Call::Reset { session } => {
                let done = or_cancelled(context, sessions.reset(owner, &session)).await;
                answer(done, |report| render::reset(&session, &report))
            }
            Call::Undo { session, cells } => {
                let done = or_cancelled(context, sessions.undo(owner, &session, cells)).await;
                answer(done, |report| render::undone(&session, &report))
            }
            Call::Checkpoints { session } => match sessions.checkpoints(owner, &session).await {
                Ok(checkpoints) => render::checkpoints(&session, &checkpoints),
                Err(refused) => render::refused(&refused),
            },
            Call::Fork { session, names } => {
                let done = or_cancelled(context, sessions.fork(owner, &session, names)).await;
                answer(done, |report| render::forked(&session, &report))
            }
            Call::Explore { session, variants, timeout, keep, replace } => {
                let max_output_chars = self.shared.most_compared_chars;
                let request = ExploreRequest { variants, timeout, max_output_chars, keep, replace };
                self.explore(owner, &session, request, context).await
            }
            Call::Upload { session, relpath, local_path, overwrite } => {
                let done = or_cancelled(context, self.upload(owner, &session, &relpath, local_path, overwrite)).await;
                answer(done, |bytes| render::transfer(&session, relpath.as_str(), bytes, render::Direction::In))
            }
            Call::Download { session, relpath, local_path, overwrite } => {
                let overwrite = if overwrite { Overwrite::Allowed } else { Overwrite::Refused };
                let done =
                    or_cancelled(context, self.download(owner, &session, &relpath, local_path.clone(), overwrite))
                        .await;
                let direction = render::Direction::Out { local_path: &local_path };
                answer(done, |bytes| render::transfer(&session, relpath.as_str(), bytes, direction))
            }
            Call::List => render::sessions(&sessions.list(owner).await),
            Call::Close { session } => {
                let done = or_cancelled(context, sessions.close(owner, &session)).await;
                answer(done, |()| render::closed(&session, self.shared.work_folder))
            }
        }
    }

    async fn execute(
        &self,
        owner: &Principal,
        session: &SessionId,
        request: ExecuteRequest,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResult {
        let Shared { sessions, cut_outputs, .. } = &*self.shared;
        let news = News::default();
        let reporter = Reporter::new(sessions.preparation(), request.timeout, &news);
        let execution = sessions.execute(owner, session, request, None, context.ct.clone(), news);
        match with_progress(execution, reporter, context).await {
            Ok(Executed::Underway(_)) => unreachable!("it was waited for without end"),
            Ok(Executed::Finished(outcome)) => {
                if outcome.output.cut_chars > 0 {
                    let mut outputs = cut_outputs.lock().unwrap_or_else(PoisonError::into_inner);
                    outputs.remember(owner, session, outcome.execution);
                }
                // A session that was closed meanwhile has nothing to undo.
                let can_undo = sessions.checkpoints(owner, session).await.map_or(0, |left| render::most_undone(&left));
                render::execution(session, &outcome, can_undo)
            }
            Err(refused) => render::refused(&refused),
        }
    }

    async fn explore(
        &self,
        owner: &Principal,
        session: &SessionId,
        request: ExploreRequest,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResult {
        let Shared { sessions, most_compared_chars, .. } = &*self.shared;
        let news = News::default();
        let reporter = Reporter::new(sessions.preparation(), request.timeout, &news);
        let exploration = sessions.explore(owner, session, request, context.ct.clone(), news);
        match with_progress(exploration, reporter, context).await {
            Ok(report) => compare::comparison(session, &report, *most_compared_chars),
            Err(refused) => render::refused(&refused),
        }
    }

    async fn upload(
        &self,
        owner: &Principal,
        session: &SessionId,
        relpath: &InsidePath,
        local_path: String,
        overwrite: bool,
    ) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let Shared { sessions, files, .. } = &*self.shared;
        let file = on_a_thread(files, move |files| files.open(&local_path)).await?;
        let mut source = Capped::new(tokio::fs::File::from_std(file), files.largest());
        Ok(sessions.write_file(owner, session, relpath, &mut source, overwrite).await?)
    }

    /// Copies to the host. Whatever goes wrong on the way, dropping the destination removes what was written.
    async fn download(
        &self,
        owner: &Principal,
        session: &SessionId,
        relpath: &InsidePath,
        local_path: String,
        overwrite: Overwrite,
    ) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let Shared { sessions, files, .. } = &*self.shared;
        let mut destination = on_a_thread(files, move |files| files.create(&local_path, overwrite)).await?;
        let mut sink = tokio::fs::File::from_std(destination.take_file());
        let bytes = sessions.read_file(owner, session, relpath, files.largest(), &mut sink).await?;
        // The file's writes happen on another thread; only the flush tells whether they all succeeded.
        sink.flush().await.map_err(WriteFailed)?;
        drop(sink);
        on_a_thread(files, move |_| destination.keep()).await?;
        Ok(bytes)
    }

    async fn read_output(&self, owner: &Principal, uri: &str) -> Result<ReadResourceResult, ErrorData> {
        let sessions = &self.shared.sessions;
        let not_found = |text: String| ErrorData::invalid_params(text, Some(json!({"uri": uri})));
        let address: Address = uri.parse().map_err(|bad: resources::BadAddress| not_found(bad.to_string()))?;
        let length = address.limit + resources::CHARACTER_MARGIN;
        let read = sessions.read_output(owner, &address.session, address.execution, address.offset, length).await;
        match read {
            Some(Ok(slice)) => Ok(ReadResourceResult::new(vec![resources::contents(uri, &address, &slice)])),
            Some(Err(error)) => {
                tracing::warn!(%error, "the output of an execution could not be read");
                Err(ErrorData::internal_error("the output could not be read", None))
            }
            None => Err(not_found("the output of this execution is not kept (any more)".to_owned())),
        }
    }

    fn implementation() -> Implementation {
        Implementation::new("cellblock", env!("CARGO_PKG_VERSION"))
            .with_title("Cellblock")
            .with_description("Runs Python in private Linux sandboxes")
    }
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let undo = if self.shared.can_undo { "undo brings the state before the last cell back, " } else { "" };
        ServerConfig::new(ServerCapabilities::builder().enable_tools().enable_resources().build())
            .with_server_info(Server::implementation())
            .with_instructions(format!(
                "Runs Python in private Linux sandboxes {reach}. execute_ipython_cell keeps variables and \
                 files between calls with the same session_id. The first call may wait while Python is prepared. \
                 When Python died or a session ended, the result says what is lost; {undo}reset starts anew. \
                 fork_session copies a live session; explore runs variants of code in copies and compares them.",
                reach = self.shared.reach,
            ))
    }

    async fn discover(&self, _context: RequestContext<RoleServer>) -> Result<DiscoverResult, ErrorData> {
        let versions = self.supported_protocol_versions().into_owned();
        Ok(DiscoverResult::from_server_info(versions, self.get_info())
            .with_ttl_ms(FIXED_FOR.as_millis() as u64)
            .with_cache_scope(CacheScope::Private))
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        refuse_cursor(request)?;
        let mut result = ListToolsResult::with_all_items(self.shared.catalogue.all().to_vec());
        if let Some(meta) = modern_meta(&context) {
            result = result.with_ttl_ms(FIXED_FOR.as_millis() as u64).with_cache_scope(CacheScope::Private);
            result.meta = Some(meta);
        }
        Ok(result)
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        ToolName::from_name(name).map(|tool| self.shared.catalogue.get(tool).clone())
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let Some(tool) = ToolName::from_name(&request.name) else {
            return Err(unknown_tool(&request.name, &self.shared.catalogue));
        };
        let started = Instant::now();
        let owner = &Principal(self.caller(&context)?.principal);
        let call = self.carry_out(owner, tool, request.arguments.unwrap_or_default(), &context);
        let result = match context.extensions.get::<Turn>() {
            Some(turn) => turn.run(tool.extent(), call).await,
            None => call.await,
        };
        let failed = result.is_error == Some(true);
        tracing::info!(tool = tool.as_str(), failed, elapsed_ms = started.elapsed().as_millis(), "tool call answered");
        Ok(result.with_meta(modern_meta(&context)).into())
    }

    async fn list_resources(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        refuse_cursor(request)?;
        let owner = &Principal(self.caller(&context)?.principal);
        let Shared { sessions, cut_outputs, .. } = &*self.shared;
        let cut = cut_outputs.lock().unwrap_or_else(PoisonError::into_inner).of(owner);
        let mut listed = Vec::new();
        for (session, execution) in cut {
            if let Some(size) = sessions.output_size(owner, &session, execution).await {
                listed.push(resources::listed(&session, execution, size));
            }
        }
        let mut result = ListResourcesResult::with_all_items(listed);
        if let Some(meta) = modern_meta(&context) {
            // Every execution may change this list.
            result = result.with_ttl_ms(0).with_cache_scope(CacheScope::Private);
            result.meta = Some(meta);
        }
        Ok(result)
    }

    async fn list_resource_templates(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        refuse_cursor(request)?;
        let mut result = ListResourceTemplatesResult::with_all_items(resources::templates());
        if let Some(meta) = modern_meta(&context) {
            result = result.with_ttl_ms(FIXED_FOR.as_millis() as u64).with_cache_scope(CacheScope::Private);
            result.meta = Some(meta);
        }
        Ok(result)
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let owner = &Principal(self.caller(&context)?.principal);
        let mut result = self.read_output(owner, &request.uri).await?;
        if let Some(meta) = modern_meta(&context) {
            // The output of a finished execution never changes, but it can go.
            result = result.with_ttl_ms(FIXED_FOR.as_millis() as u64).with_cache_scope(CacheScope::Private);
            result.meta = Some(meta);
        }
        Ok(result.into())
    }

    // The library answers these with empty lists; what is not declared must not answer.

    async fn list_prompts(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        Err(ErrorData::method_not_found::<ListPromptsRequestMethod>())
    }

    async fn complete(
        &self,
        _request: CompleteRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        Err(ErrorData::method_not_found::<CompleteRequestMethod>())
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        Err(custom_request_error(&request))
    }
}

/// Tells whether a request has parameters of the wrong shape. The library takes such requests for methods it does not
/// know.
fn has_wrong_params(request: &ClientRequest) -> Option<ErrorData> {
    match request {
        ClientRequest::CustomRequest(custom) if ANSWERED_METHODS.contains(&custom.method.as_str()) => {
            Some(custom_request_error(custom))
        }
        _ => None,
    }
}

fn custom_request_error(request: &CustomRequest) -> ErrorData {
    if ANSWERED_METHODS.contains(&request.method.as_str()) {
        let text = format!("the params of {} are missing or of the wrong type", request.method);
        ErrorData::invalid_params(text, None)
    } else {
        ErrorData::new(ErrorCode::METHOD_NOT_FOUND, Cow::Owned(request.method.clone()), None)
    }
}

fn unknown_tool(name: &str, catalogue: &Catalogue) -> ErrorData {
    let shown: String = name.chars().take(128).collect();
    let text = match catalogue.nearest(name) {
        Some(nearest) => format!("there is no tool \"{shown}\"; did you mean \"{nearest}\"?"),
        None => format!("there is no tool \"{shown}\""),
    };
    ErrorData::invalid_params(text, None)
}

/// All lists fit on one page, so no cursor of ours exists.
fn refuse_cursor(request: Option<PaginatedRequestParams>) -> Result<(), ErrorData> {
    match request.and_then(|request| request.cursor) {
        Some(_) => Err(ErrorData::invalid_params("there is no such page: every list here has one page", None)),
        None => Ok(()),
    }
}

/// Returns the metadata every result of the 2026-07-28 protocol should carry, and nothing for older ones.
fn modern_meta(context: &RequestContext<RoleServer>) -> Option<MetaObject> {
    let version = context.protocol_version()?;
    (version.as_str() >= ProtocolVersion::V_2026_07_28.as_str()).then(|| {
        let mut meta = MetaObject::new();
        meta.insert("io.modelcontextprotocol/serverInfo".to_owned(), json!(Server::implementation()));
        meta
    })
}

/// Carries a call out and tells its caller how far it has come, if the caller wants to know.
async fn with_progress<T>(
    mut call: Pin<Box<dyn Future<Output = T> + Send + '_>>,
    mut reporter: Reporter,
    context: &RequestContext<RoleServer>,
) -> T {
    let Some(token) = context.meta.get_progress_token() else { return call.await };
    loop {
        let report = tokio::select! {
            biased;
            done = &mut call => return done,
            report = reporter.next() => report,
        };
        let parameters = ProgressNotificationParam::new(token.clone(), report.progress).with_message(report.message);
        // A report is sent to its end before the call is looked at again, so that none can follow the answer.
        tokio::select! {
            sent = context.peer.notify_progress(parameters) => {
                if let Err(error) = sent {
                    tracing::debug!(%error, "a progress notification was not sent");
                }
            }
            () = context.ct.cancelled() => return call.await,
        }
    }
}

/// Waits for `work` unless the caller gives up first. Work that is dropped cleans up after itself.
async fn or_cancelled<T, E>(
    context: &RequestContext<RoleServer>,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, Box<dyn Error + Send + Sync>>
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    tokio::select! {
        done = work => done.map_err(Into::into),
        () = context.ct.cancelled() => Err(GivenUp::Cancelled.into()),
    }
}

fn answer<T>(
    done: Result<T, Box<dyn Error + Send + Sync>>,
    render: impl FnOnce(T) -> CallToolResult,
) -> CallToolResult {
    match done {
        Ok(value) => render(value),
        Err(error) => render::refused(&*error),
    }
}

/// Runs file work where it may wait: a path can lie on a slow or absent network disk.
async fn on_a_thread<T: Send + 'static>(
    files: &HostFiles,
    work: impl FnOnce(HostFiles) -> Result<T, HostFileError> + Send + 'static,
) -> Result<T, HostFileError> {
    let files = files.clone();
    match tokio::task::spawn_blocking(move || work(files)).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is ending and took the work away; nobody waits for an answer any more.
            Err(_) => std::future::pending().await,
        },
    }
}

#[cfg(test)]
mod tests;
