//! Modules of MCP servers: the contents of `mcptools`, and when they are sent.
//!
//! A new interpreter receives all modules before its first request. The contents of the folder are
//! not known after a reset, an undo or a fork, and the runner skips files that are there. Later
//! only a change of the registrations is sent: at once to an idle session, otherwise before its
//! next request.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cellblock_typed::{GeneratedFile, Package};
use tokio::sync::watch;
use tracing::{debug, warn};

use super::host_calls::HostCalls;
use crate::runner_client::{Claim, ModuleFile, Request};
use crate::session::WorkFolder;
use crate::session::output::bounded_text;
use crate::session::state::RequestId;
use crate::session::tools::{Grants, Tools};

/// Bytes of files in one frame, not counting the last file.
const CHUNK: usize = 1024 * 1024;
/// Limit in bytes for one file. The largest known modules have a hundredth of this.
const MAX_FILE_BYTES: usize = 16 * 1024 * 1024;
/// Limit in bytes for all packages of one session. Packages beyond the limit are not sent.
const MAX_DELIVERY_BYTES: usize = 64 * 1024 * 1024;

/// The packages sent to a session, and the notification of changes.
pub(super) struct Deliveries {
    changes: Option<watch::Receiver<u64>>,
    /// The version of the registrations that was sent. `None` when the contents of the folder are
    /// not known.
    version: Option<u64>,
    given: Vec<Given>,
    /// Whether packages have been sent to this session or to the one it was copied from.
    any: bool,
    /// The delivery that is not answered yet.
    awaited: Option<RequestId>,
    /// Tools that the session may use.
    pub(super) grants: Grants,
}

/// A package that was sent.
struct Given {
    /// As held by the broker.
    whole: Arc<Package>,
    /// Reduced to the tools that the session was granted.
    sent: Arc<Package>,
}

impl Deliveries {
    pub(super) fn new(tools: &Tools) -> Deliveries {
        let changes = tools.0.as_ref().map(|broker| broker.changes());
        Deliveries {
            changes,
            version: None,
            given: Vec::new(),
            any: false,
            awaited: None,
            grants: Grants::default(),
        }
    }

    /// Waits until the registrations have changed since the last delivery. Pending forever if they
    /// cannot change.
    pub(super) async fn changed(&mut self) {
        if let Some(changes) = &mut self.changes {
            if changes.changed().await.is_ok() {
                return;
            }
            // The broker has ended, and the server with it.
            self.changes = None;
        }
        std::future::pending().await
    }

    /// Records that the interpreter was replaced, and possibly the folder too.
    pub(super) fn forget(&mut self) {
        self.version = None;
        self.awaited = None;
    }

    pub(super) fn has_any(&self) -> bool {
        self.any
    }

    /// Takes over the state that a copy inherits from its source.
    pub(super) fn inherit(&mut self, grants: Option<Grants>, any: bool) {
        if let Some(grants) = grants {
            self.grants = grants;
        }
        self.any |= any;
    }
}

impl Given {
    fn all(package: Arc<Package>) -> Given {
        Given {
            sent: package.clone(),
            whole: package,
        }
    }

    /// Returns `None` if no tool of the package is granted.
    fn only(package: Arc<Package>, grants: &Grants) -> Option<Given> {
        let server = package.server.as_str();
        if grants.allow_all_of(server) {
            return Some(Given::all(package));
        }
        let sent = Arc::new(package.only(|tool| grants.allow(server, tool))?);
        Some(Given {
            sent,
            whole: package,
        })
    }
}

/// Frames to send in order, and notes for the next outcome.
#[derive(Default)]
pub(super) struct Delivery {
    pub(super) frames: Vec<(Request, Vec<u8>)>,
    pub(super) notes: Vec<String>,
}

impl HostCalls {
    /// Returns the packages that the session may use and does not have yet. Must be called between
    /// two requests.
    pub(super) fn deliver(&mut self, work_folder: WorkFolder) -> Delivery {
        let mut delivery = Delivery::default();
        let (Some(broker), Some(owner), Some(version)) =
            (&self.tools.0, &self.owner, self.deliveries.news())
        else {
            return delivery;
        };
        let is_known = self.deliveries.version.replace(version).is_some();
        let shared = work_folder == WorkFolder::Shared;
        let packages = broker.packages(owner).into_iter();
        // Sessions that share a folder all write the same files. Which tools they may call is
        // decided elsewhere.
        let mut wanted: Vec<Given> = match shared {
            true => packages.map(Given::all).collect(),
            false => packages
                .filter_map(|package| Given::only(package, &self.deliveries.grants))
                .collect(),
        };
        for server in drop_excess(&mut wanted) {
            warn!(
                session = self.id.as_str(),
                server, "the package of a server is left out, because there is too much"
            );
            delivery.notes.push(format!(
                "The modules of the MCP server `{server}` are left out: all servers together have \
                 too many."
            ));
        }
        let is_same = wanted.len() == self.deliveries.given.len()
            && wanted
                .iter()
                .zip(&self.deliveries.given)
                .all(|(one, other)| Arc::ptr_eq(&one.whole, &other.whole));
        if (is_known && is_same) || (wanted.is_empty() && !self.deliveries.any) {
            return delivery;
        }
        debug!(
            session = self.id.as_str(),
            servers = wanted.len(),
            "packages of MCP servers are sent"
        );
        let id = self.numbers.fetch_add(1, Ordering::Relaxed);
        delivery.frames = self.deliveries.send(id, wanted, shared);
        delivery
    }
}

impl Deliveries {
    /// Returns the version of the registrations, if it is not the one that was sent.
    fn news(&mut self) -> Option<u64> {
        let version = *self.changes.as_mut()?.borrow_and_update();
        (self.version != Some(version)).then_some(version)
    }

    fn send(&mut self, id: RequestId, wanted: Vec<Given>, shared: bool) -> Vec<(Request, Vec<u8>)> {
        let mut frames = Vec::new();
        for given in &wanted {
            add_package(&mut frames, id, &given.sent);
        }
        let before = self.given.iter().map(|given| &given.whole.server);
        let gone =
            before.filter(|server| wanted.iter().all(|other| other.whole.server != **server));
        frames.extend(gone.map(|server| {
            let request = Request::Tools {
                id,
                server: server.python().to_owned(),
                modules: Vec::new(),
                last: true,
            };
            (request, Vec::new())
        }));
        let packages: Vec<&Package> = wanted.iter().map(|given| given.sent.as_ref()).collect();
        let index = if packages.is_empty() {
            String::new()
        } else {
            cellblock_typed::index(&packages).text
        };
        let names = packages.iter().map(|package| package.server.python());
        let servers = (!shared).then(|| names.map(str::to_owned).collect());
        frames.push((Request::ToolsIndex { id, servers }, index.into_bytes()));
        self.awaited = Some(id);
        self.given = wanted;
        self.any = true;
        frames
    }

    /// Takes the runner's answer to a delivery. Returns whether the claim was one, and a note for
    /// the next outcome.
    pub(super) fn delivered(&mut self, claim: &Claim) -> (bool, Option<String>) {
        if self.awaited.is_none() || claim.request() != self.awaited {
            return (false, None);
        }
        let note = match claim {
            Claim::ToolsWritten { .. } => None,
            Claim::Failed { message, .. } => Some(format!(
                "The modules of MCP servers could not be put into the working folder: {}.",
                bounded_text(message, 300)
            )),
            _ => return (false, None),
        };
        self.awaited = None;
        (true, note)
    }
}

/// Adds the frames of one package.
fn add_package(frames: &mut Vec<(Request, Vec<u8>)>, id: RequestId, package: &Package) {
    let files: Vec<&GeneratedFile> = package
        .files
        .iter()
        .filter(|file| file.text.len() <= MAX_FILE_BYTES)
        .collect();
    let mut rest = files.as_slice();
    loop {
        let mut size = 0;
        let fits = |file: &&&GeneratedFile| {
            let before = size;
            size += file.text.len();
            before < CHUNK
        };
        let (some, later) = rest.split_at(rest.iter().take_while(fits).count());
        let modules = some.iter().map(|file| ModuleFile {
            name: file_name(file).to_owned(),
            size: file.text.len(),
        });
        let last = later.is_empty();
        let request = Request::Tools {
            id,
            server: package.server.python().to_owned(),
            modules: modules.collect(),
            last,
        };
        let payload = some.iter().flat_map(|file| file.text.bytes()).collect();
        frames.push((request, payload));
        if last {
            return;
        }
        rest = later;
    }
}

/// Removes packages beyond the session's limit. Returns the names of their servers.
fn drop_excess(packages: &mut Vec<Given>) -> Vec<String> {
    let mut left = MAX_DELIVERY_BYTES;
    let excess = packages.extract_if(.., |Given { sent, .. }| {
        let size = sent.files.iter().map(|file| file.text.len()).sum::<usize>();
        let fits = size <= left;
        left -= if fits { size } else { 0 };
        !fits
    });
    excess
        .map(|given| given.sent.server.as_str().to_owned())
        .collect()
}

fn file_name(file: &GeneratedFile) -> &str {
    file.path.rsplit('/').next().unwrap_or_default()
}
