//! The driver's part in packages of MCP servers: what lies in `mcptools`, and when it is sent.
//!
//! All of it is sent to a new interpreter before its first request, whatever the folder holds: after a reset, an undo or a fork that is not known, and the runner
//! leaves alone what is there already. Later only a change of the registrations is sent: at once to a session at rest, otherwise in front of its next request.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cellblock_typed::{GeneratedFile, Package};
use serde_json::json;
use tokio::sync::watch;
use tracing::{debug, warn};

use super::{Driver, RequestId};
use crate::session::WorkFolder;
use crate::session::output::bounded_text;
use crate::session::tools::{Grants, Tools};

/// Bytes of files that travel in one frame, beside the last of them.
const CHUNK: usize = 1024 * 1024;
/// Bytes of one file. The largest modules that are known have a hundredth of it.
const LARGEST_FILE: usize = 16 * 1024 * 1024;
/// Bytes of all packages of one session. Those behind the limit are not sent.
const LARGEST_DELIVERY: usize = 64 * 1024 * 1024;

/// What a session was sent, and how it learns that there is something else.
pub(super) struct Deliveries {
    changes: Option<watch::Receiver<u64>>,
    /// The state of the registrations that was sent. `None` when what the folder holds is not known.
    version: Option<u64>,
    given: Vec<Given>,
    /// Something has been sent to this session or to the one it is a copy of.
    any: bool,
    /// The delivery that was not answered yet.
    awaited: Option<RequestId>,
    /// Tools that the session may use.
    pub(super) grants: Grants,
}

/// A package that was sent.
struct Given {
    /// As the broker has it.
    whole: Arc<Package>,
    /// With the tools that the session was granted.
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

    /// Waits until the registrations have changed since something was sent; for ever when they cannot.
    pub(super) async fn changed(&mut self) {
        if let Some(changes) = &mut self.changes {
            if changes.changed().await.is_ok() {
                return;
            }
            // The broker has ended, and with it the server.
            self.changes = None;
        }
        std::future::pending().await
    }

    /// Notes that the interpreter is another one, and the folder perhaps too.
    pub(super) fn forget(&mut self) {
        self.version = None;
        self.awaited = None;
    }

    pub(super) fn has_any(&self) -> bool {
        self.any
    }

    /// Takes over what a copy has from its source.
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

    /// `None` when nothing of it is granted.
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

impl Driver {
    /// Sends the packages that the session may use, unless it has them. Only between two requests.
    pub(super) fn give_tools(&mut self) {
        let (Some(broker), Some(customer)) = (self.settings.tools.0.clone(), &self.customer) else {
            return;
        };
        let Some(changes) = &mut self.deliveries.changes else {
            return;
        };
        let version = *changes.borrow_and_update();
        if self.deliveries.version == Some(version) {
            return;
        }
        let is_known = self.deliveries.version.replace(version).is_some();
        let shared = self.settings.work_folder == WorkFolder::Shared;
        let packages = broker.packages(&customer.owner).into_iter();
        // Where sessions share a folder, all of them write the same; what they may call is decided elsewhere.
        let mut wanted: Vec<Given> = match shared {
            true => packages.map(Given::all).collect(),
            false => packages
                .filter_map(|package| Given::only(package, &self.deliveries.grants))
                .collect(),
        };
        self.leave_out_what_is_too_much(&mut wanted);
        let is_same = wanted.len() == self.deliveries.given.len()
            && wanted
                .iter()
                .zip(&self.deliveries.given)
                .all(|(one, other)| Arc::ptr_eq(&one.whole, &other.whole));
        if (is_known && is_same) || (wanted.is_empty() && !self.deliveries.any) {
            return;
        }
        self.deliver(wanted, shared);
    }

    fn deliver(&mut self, wanted: Vec<Given>, shared: bool) {
        debug!(
            session = self.id.as_str(),
            servers = wanted.len(),
            "packages of MCP servers are sent"
        );
        let id = self.numbers.fetch_add(1, Ordering::Relaxed);
        for given in &wanted {
            self.send_package(id, &given.sent);
        }
        let before = self
            .deliveries
            .given
            .iter()
            .map(|given| &given.whole.server);
        let gone =
            before.filter(|server| wanted.iter().all(|other| other.whole.server != **server));
        let gone: Vec<String> = gone.map(|server| server.python().to_owned()).collect();
        for server in gone {
            self.send(
                &json!({"type": "tools", "id": id, "server": server, "modules": [], "last": true}),
                b"",
            );
        }
        let packages: Vec<&Package> = wanted.iter().map(|given| given.sent.as_ref()).collect();
        let index = if packages.is_empty() {
            String::new()
        } else {
            cellblock_typed::index(&packages).text
        };
        let mut header = json!({"type": "tools", "id": id});
        if !shared {
            header["servers"] = packages
                .iter()
                .map(|package| package.server.python())
                .collect();
        }
        self.send(&header, index.as_bytes());
        self.deliveries.awaited = Some(id);
        self.deliveries.given = wanted;
        self.deliveries.any = true;
    }

    fn send_package(&mut self, id: RequestId, package: &Package) {
        let server = package.server.python();
        let files: Vec<&GeneratedFile> = package
            .files
            .iter()
            .filter(|file| file.text.len() <= LARGEST_FILE)
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
            let listed: Vec<_> = some
                .iter()
                .map(|file| json!({"name": file_name(file), "size": file.text.len()}))
                .collect();
            let payload: Vec<u8> = some.iter().flat_map(|file| file.text.bytes()).collect();
            let last = later.is_empty();
            self.send(&json!({"type": "tools", "id": id, "server": server, "modules": listed, "last": last}), &payload);
            if last {
                return;
            }
            rest = later;
        }
    }

    fn leave_out_what_is_too_much(&mut self, packages: &mut Vec<Given>) {
        let mut left = LARGEST_DELIVERY;
        packages.retain(|Given { sent: package, .. }| {
            let size = package.files.iter().map(|file| file.text.len()).sum::<usize>();
            let fits = size <= left;
            left -= if fits { size } else { 0 };
            if !fits {
                let server = package.server.as_str();
                warn!(
                    session = self.id.as_str(),
                    server, "the package of a server is left out, because there is too much"
                );
                self.notes.push(format!(
                    "The modules of the MCP server `{server}` are left out: all servers together have too many."
                ));
            }
            fits
        });
    }

    /// Takes the runner's answer to a delivery. Tells whether it was one.
    pub(super) fn delivered(&mut self, id: RequestId, failed: Option<&str>) -> bool {
        if self.deliveries.awaited != Some(id) {
            return false;
        }
        self.deliveries.awaited = None;
        if let Some(why) = failed {
            let why = bounded_text(why, 300);
            self.notes.push(format!(
                "The modules of MCP servers could not be put into the working folder: {why}."
            ));
        }
        true
    }
}

fn file_name(file: &GeneratedFile) -> &str {
    file.path.rsplit('/').next().unwrap_or_default()
}
