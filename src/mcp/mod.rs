//! MCP: how clients reach sessions.
//!
//! ```text
//! transport (stdio, http) → handler → toolbox: the tools of a profile
//!      wire: strict reading              │ tools: the default profile, a file for each tool
//!                                        │ profiles: the tools of other servers
//!                                        │   arguments: what a client wrote, checked
//!                                        │   calls: what calls of all tools share
//!                                        │   tasks, jobs: what takes longer than a caller waits
//!                                        │   asking, resuming: what a person must allow first
//!                                        │   render: outcomes as text, images and fields
//!                                        │   resources, progress, host_files
//!                                        └→ sessions, through ops::Host
//! ```
//!
//! A transport carries messages, `handler` decides what each one means, `tools` and `profiles`
//! carry tool calls out; the other files are pure. Both protocol eras are served: 2026-07-28, where
//! every request stands alone, and the older ones that begin with `initialize`.
//!
//! Two kinds of failure are kept apart. A request that makes no sense as a request (unknown method,
//! unknown tool, parameters of the wrong shape) is a protocol error. Everything a model could do
//! better next time (a bad argument, code that raised, a session that ended) is a tool result with
//! `isError` and a sentence that says what happened and what to do.
//!
//! The library's types (rmcp) never leave this room.

mod arguments;
pub(crate) mod arrivals;
mod asking;
mod bodies;
mod calls;
mod connections;
mod duration;
mod handler;
mod host_files;
pub mod http;
mod jobs;
mod missing_modules;
mod place;
mod profiles;
mod progress;
mod refusals;
mod render;
mod resources;
mod resuming;
mod stdio;
mod tasks;
mod toolbox;
mod tools;
mod turns;
mod wire;

use std::borrow::Cow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{
    ClientRequest, CustomRequest, ErrorCode, ErrorData, Implementation, ReadResourceResult,
    Resource,
};
use rmcp::service::RequestContext;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::auth::Caller;
use crate::ops::{self, Host, HostExt, Io};
use crate::sandbox::{Rule, Rules};
use crate::session::servers::Trust;
use crate::session::{InsidePath, Principal, Refused, SessionId, SessionState, WorkFolder};
use asking::Seals;
pub use asking::StateKey;
use calls::MAX_CALLS;
pub use host_files::{HostFiles, RootError};
use jobs::{CallSlots, Jobs};
pub use profiles::{Modules, Profile};
pub(crate) use resources::percent_decoded;
use resources::{Address, CutOutputs, MAX_INLINE_BYTES};
pub use stdio::{ServeError, serve_stdio};
use toolbox::Toolbox;

/// The methods this server answers. Their parameters have a shape; a request that misses it must
/// not look like an unknown method.
const ANSWERED_METHODS: [&str; 12] = [
    "initialize",
    "ping",
    "prompts/list",
    "resources/list",
    "resources/read",
    "resources/templates/list",
    "server/discover",
    "tasks/cancel",
    "tasks/get",
    "tasks/update",
    "tools/call",
    "tools/list",
];

/// Files that are listed as resources. More would bury the rest.
const MAX_FILES_LISTED: usize = 1000;

/// Rules that a client is told one by one; of more only the number.
const MAX_RULES_TOLD: usize = 8;
/// Names of packages in a tool's description; every client pays for each.
const MAX_PACKAGES_TOLD: usize = 30;

/// What an operator can choose about the tools.
#[derive(Debug, Clone)]
pub struct McpSettings {
    pub front: Front,
    pub profile: Profile,
    /// How long a call waits for code; then its caller hears how to go on.
    pub max_wait: Duration,
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
    /// Whether other hosts can be reached with a person's permission. Only told to clients here.
    pub other_hosts: OtherHosts,
    /// Whether packages can be installed. Only told to clients here.
    pub can_install: bool,
    /// Packages that every session has, as far as that is known before there is one. Only told to
    /// clients here.
    pub packages: Vec<String>,
    /// What states are sealed with that go to clients and come back.
    pub state_key: StateKey,
    /// Whether sessions go on when the server ends.
    pub sessions_outlive_server: bool,
}

impl McpSettings {
    /// Says what sessions can reach, as the end of a sentence.
    fn reach(&self) -> String {
        let (denied, allowed): (Vec<_>, Vec<_>) =
            self.network.iter().partition(|rule| rule.is_denial());
        let texts = |rules: &[&Rule]| {
            rules
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        };
        let others = match self.other_hosts {
            OtherHosts::Closed => "",
            OtherHosts::AskedAbout => " (other hosts need a permission)",
        };
        let reached = match (allowed.len(), self.other_hosts) {
            (0, OtherHosts::Closed) => return "without network".to_owned(),
            (0, OtherHosts::AskedAbout) => {
                "whose network needs a permission for every host".to_owned()
            }
            _ if allowed.iter().any(|rule| rule.is_everything()) => "with network".to_owned(),
            (few, _) if few <= MAX_RULES_TOLD => {
                format!("whose network reaches only {}{others}", texts(&allowed))
            }
            (more, _) => format!("whose network reaches only {more} listed places{others}"),
        };
        match denied.len() {
            0 => reached,
            few if few <= MAX_RULES_TOLD => {
                format!("{reached}, but not {}", texts(&denied).replace('!', ""))
            }
            more => format!("{reached}, but not {more} others"),
        }
    }

    /// Says which packages sessions have, as a sentence with a space before it, or nothing.
    fn packages_told(&self) -> String {
        let told = self
            .packages
            .iter()
            .take(MAX_PACKAGES_TOLD)
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join(", ");
        let more = match self.packages.len().saturating_sub(MAX_PACKAGES_TOLD) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let others = if self.can_install {
            "; install_package adds others"
        } else {
            ""
        };
        if told.is_empty() {
            String::new()
        } else {
            format!(" Installed: {told}{more}{others}.")
        }
    }
}

impl Default for McpSettings {
    fn default() -> McpSettings {
        McpSettings {
            front: Front::Stdio,
            profile: Profile::Default,
            max_wait: Duration::from_secs(50),
            default_timeout: Duration::from_secs(120),
            max_timeout: Duration::from_secs(3600),
            default_max_output_chars: 5000,
            idle_timeout: Duration::from_secs(3600),
            work_folder: WorkFolder::Private,
            can_undo: true,
            network: Rules::none(),
            other_hosts: OtherHosts::Closed,
            can_install: true,
            packages: Vec::new(),
            state_key: StateKey::random(),
            sessions_outlive_server: false,
        }
    }
}

/// The MCP server. Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct Server {
    shared: Arc<Shared>,
}

struct Shared {
    sessions: Arc<dyn Host>,
    files: HostFiles,
    toolbox: Arc<dyn Toolbox>,
    work_folder: WorkFolder,
    can_undo: bool,
    can_install: bool,
    /// What sessions can reach, as the end of a sentence.
    reach: String,
    /// What all variants of one `explore` may tell together.
    most_compared_chars: usize,
    /// What tells who is calling.
    front: Front,
    max_wait: Duration,
    cut_outputs: Mutex<CutOutputs>,
    calls: CallSlots,
    jobs: Jobs,
    seals: Seals,
    /// Cancelled when the server is about to end, so that callers who wait for code are answered.
    draining: CancellationToken,
    sessions_outlive_server: bool,
}

/// What becomes of a connection to a host that no rule lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OtherHosts {
    Closed,
    /// A person may allow it.
    AskedAbout,
}

/// How callers are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Front {
    /// Whoever has the pipe started this program.
    Stdio,
    /// The HTTP stack has put a [`Caller`] into every request that it let through.
    Http,
}

impl Front {
    /// What whoever comes this way may do on this machine.
    fn trust(self) -> Trust {
        match self {
            Front::Stdio => Trust::Local,
            Front::Http => Trust::Remote,
        }
    }
}

impl Server {
    /// Makes the server. `files` are used by callers on stdio only.
    pub fn new(sessions: Arc<dyn Host>, files: HostFiles, settings: McpSettings) -> Server {
        Server {
            shared: Arc::new(Shared {
                sessions,
                files,
                toolbox: profiles::toolbox(&settings),
                work_folder: settings.work_folder,
                can_undo: settings.can_undo,
                can_install: settings.can_install,
                reach: settings.reach(),
                most_compared_chars: settings.default_max_output_chars,
                front: settings.front,
                max_wait: settings.max_wait,
                cut_outputs: Mutex::default(),
                calls: CallSlots::new(MAX_CALLS),
                jobs: Jobs::default(),
                seals: Seals::new(&settings.state_key),
                draining: CancellationToken::new(),
                sessions_outlive_server: settings.sessions_outlive_server,
            }),
        }
    }

    /// Answers everybody who waits for code: it goes on, and the next server knows of it; or it
    /// ends with this server.
    pub fn drain(&self) {
        self.shared.draining.cancel();
    }

    /// Refuses to promise what a server that is ending cannot keep.
    fn may_promise(&self) -> Result<(), Refused> {
        if self.shared.sessions_outlive_server {
            return Ok(());
        }
        Err(Refused::EndsWithServer {
            files_kept: self.shared.work_folder == WorkFolder::Shared,
        })
    }

    /// Tells who sent a request.
    fn caller(&self, context: &RequestContext<RoleServer>) -> Result<Caller, ErrorData> {
        match self.shared.front {
            Front::Stdio => Ok(Caller::local()),
            Front::Http => {
                let request = context.extensions.get::<axum::http::request::Parts>();
                let caller = request.and_then(|request| request.extensions.get::<Caller>());
                caller.cloned().ok_or_else(|| {
                    ErrorData::internal_error("it is not known who is calling", None)
                })
            }
        }
    }

    async fn read_output(
        &self,
        owner: &Principal,
        uri: &str,
    ) -> Result<ReadResourceResult, ErrorData> {
        let sessions = &self.shared.sessions;
        let not_found = |text: String| ErrorData::invalid_params(text, Some(json!({"uri": uri})));
        let address: Address = uri
            .parse()
            .map_err(|bad: resources::BadAddress| not_found(bad.to_string()))?;
        let length = address.limit + resources::CHARACTER_MARGIN;
        let read = sessions
            .run(
                owner,
                ops::ReadOutput {
                    session: address.session.clone(),
                    output: address.output,
                    offset: address.offset,
                    length,
                },
            )
            .await;
        match read {
            Ok(Some(slice)) => Ok(ReadResourceResult::new(vec![resources::contents(
                uri, &address, &slice,
            )])),
            Err(error) => {
                tracing::warn!(%error, "the output of an execution could not be read");
                Err(ErrorData::internal_error(
                    "the output could not be read",
                    None,
                ))
            }
            Ok(None) => Err(not_found(
                "the output of this execution is not kept, or not any more: the oldest give way \
                 when there are too many or they are too large"
                    .to_owned(),
            )),
        }
    }

    /// Lists the files of an owner's sessions that have folders of their own and nothing to do.
    async fn files_of(&self, owner: &Principal) -> Vec<Resource> {
        let sessions = &self.shared.sessions;
        let mut listed = Vec::new();
        if self.shared.work_folder == WorkFolder::Shared {
            return listed;
        }
        // A list of resources has no place for a refusal.
        let all = sessions
            .run(owner, ops::ListSessions {})
            .await
            .unwrap_or_default();
        for session in all
            .into_iter()
            .filter(|session| session.state == SessionState::Idle)
        {
            // One that has begun something meanwhile is left out.
            let Ok(list) = sessions
                .run(
                    owner,
                    ops::ListFiles {
                        session: session.id.clone(),
                    },
                )
                .await
            else {
                continue;
            };
            let files = list
                .files
                .iter()
                .filter_map(|file| Some((file.path.parse().ok()?, file.size)));
            listed
                .extend(files.map(|(path, size)| resources::listed_file(&session.id, &path, size)));
            if listed.len() >= MAX_FILES_LISTED {
                listed.truncate(MAX_FILES_LISTED);
                break;
            }
        }
        listed
    }

    async fn read_session_file(
        &self,
        owner: &Principal,
        uri: &str,
        session: &SessionId,
        path: &InsidePath,
    ) -> Result<ReadResourceResult, ErrorData> {
        let mut bytes = Vec::new();
        let read = self
            .shared
            .sessions
            .run_with(
                owner,
                ops::ReadFile {
                    session: session.clone(),
                    path: path.clone(),
                    limit: MAX_INLINE_BYTES,
                },
                Io::sink(&mut bytes),
            )
            .await;
        read.map_err(|refused| {
            ErrorData::invalid_params(refusals::error_text(&refused), Some(json!({"uri": uri})))
        })?;
        Ok(ReadResourceResult::new(vec![resources::file_contents(
            uri, &bytes,
        )]))
    }

    fn implementation(&self) -> Implementation {
        let name = self
            .shared
            .toolbox
            .introduction()
            .map_or("cellblock", |introduction| introduction.name);
        Implementation::new(name, env!("CARGO_PKG_VERSION"))
            .with_title("Cellblock")
            .with_description("Runs Python in private Linux sandboxes")
    }
}

/// Tells whether a request has parameters of the wrong shape. The library takes such requests for
/// methods it does not know.
fn has_wrong_params(request: &ClientRequest) -> Option<ErrorData> {
    match request {
        ClientRequest::CustomRequest(custom)
            if ANSWERED_METHODS.contains(&custom.method.as_str()) =>
        {
            Some(custom_request_error(custom))
        }
        _ => None,
    }
}

fn custom_request_error(request: &CustomRequest) -> ErrorData {
    if ANSWERED_METHODS.contains(&request.method.as_str()) {
        let text = format!(
            "the params of {} are missing or of the wrong type",
            request.method
        );
        ErrorData::invalid_params(text, None)
    } else {
        ErrorData::new(
            ErrorCode::METHOD_NOT_FOUND,
            Cow::Owned(request.method.clone()),
            None,
        )
    }
}

#[cfg(test)]
mod tests;
