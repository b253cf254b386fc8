//! The task that keeps a server connected.
//!
//! Only this task connects, so all callers that wait for a connection wait for the same one. After
//! every connection, and whenever the server reports a change, it compares the server's tools with
//! the registered ones.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use cellblock_typed::ToolSchema;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::connection::UpstreamConnection;
use crate::greeting::{self, ConnectError, Era, told};
use crate::params::ServerParams;
use crate::tools::{self, PinnedTools};
use crate::upstream::ConnectSettings;

/// Initial backoff after a failure; it doubles with each further failure.
const MIN_WAIT: Duration = Duration::from_millis(500);
const MAX_WAIT: Duration = Duration::from_secs(30);

/// Reply channel of a caller that needs a connection.
pub(crate) type ConnectionReply = oneshot::Sender<Result<Arc<UpstreamConnection>, String>>;

/// The current connection, and properties of the last one.
pub(crate) struct ConnectionLink {
    current: RwLock<Option<Arc<UpstreamConnection>>>,
    facts: RwLock<(Era, Option<String>)>,
}

impl ConnectionLink {
    pub(crate) fn new(connection: UpstreamConnection) -> ConnectionLink {
        let facts = (connection.era, connection.server.clone());
        ConnectionLink {
            current: RwLock::new(Some(Arc::new(connection))),
            facts: RwLock::new(facts),
        }
    }

    /// Returns the era of the last connection, and the server's own name.
    pub(crate) fn facts(&self) -> (Era, Option<String>) {
        self.facts
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(crate) fn usable(&self) -> Option<Arc<UpstreamConnection>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current
            .as_ref()
            .filter(|connection| connection.is_usable())
            .cloned()
    }

    fn set(&self, connection: Arc<UpstreamConnection>) {
        *self.facts.write().unwrap_or_else(PoisonError::into_inner) =
            (connection.era, connection.server.clone());
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(connection);
    }

    fn take(&self) -> Option<Arc<UpstreamConnection>> {
        self.current
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}

/// The task and its state.
pub(crate) struct Driver {
    pub(crate) params: ServerParams,
    pub(crate) settings: ConnectSettings,
    pub(crate) pinned: Arc<PinnedTools>,
    pub(crate) link: Arc<ConnectionLink>,
    pub(crate) wanted: mpsc::Receiver<ConnectionReply>,
    pub(crate) closing: CancellationToken,
    /// On drop, signals that the connection is closed.
    pub(crate) ended: DropGuard,
}

/// Recent failures.
#[derive(Default)]
struct Failures {
    count: u32,
    not_before: Option<(Instant, String)>,
}

impl Driver {
    pub(crate) async fn run(mut self) {
        let closing = self.closing.clone();
        tokio::select! {
            () = closing.cancelled() => {}
            () = self.drive() => {}
        }
        if let Some(connection) = self.link.take() {
            connection.close().await;
        }
        drop(self.ended);
    }

    /// Runs until the last handle of the server is dropped.
    async fn drive(&mut self) {
        let mut failures = Failures::default();
        loop {
            let connection = self.link.usable();
            let changed = async {
                match &connection {
                    Some(connection) => connection.changed().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                wanted = self.wanted.recv() => match wanted {
                    None => return,
                    Some(answer) => {
                        let live = self.live(&mut failures).await.map_err(|error| told(&error));
                        // The caller may have been cancelled.
                        let _ = answer.send(live);
                    }
                },
                () = changed => {
                    if let Some(connection) = self.link.usable() {
                        self.compare(&connection).await;
                    }
                }
            }
        }
    }

    async fn live(&self, failures: &mut Failures) -> Result<Arc<UpstreamConnection>, ConnectError> {
        if let Some(connection) = self.link.usable()
            && (!connection.is_stale() || self.compare(&connection).await)
        {
            return Ok(connection);
        }
        if let Some((time, why)) = &failures.not_before
            && let Some(wait) = time
                .checked_duration_since(Instant::now())
                .filter(|wait| !wait.is_zero())
        {
            return Err(ConnectError::Waiting {
                wait,
                why: why.clone(),
            });
        }
        match self.open_again().await {
            Ok(opened) => {
                *failures = Failures::default();
                self.lost(self.pinned.compare(&opened.tools));
                let connection = Arc::new(opened.connection);
                self.link.set(Arc::clone(&connection));
                Ok(connection)
            }
            Err(error) => {
                let wait = MIN_WAIT
                    .saturating_mul(1 << failures.count.min(16))
                    .min(MAX_WAIT);
                failures.count += 1;
                failures.not_before = Some((Instant::now() + wait, told(&error)));
                Err(error)
            }
        }
    }

    /// Connects with the last era. If the server rejects that, negotiates again: the server may
    /// have been upgraded.
    async fn open_again(&self) -> Result<Opened, ConnectError> {
        match open(&self.params, &self.settings, Some(self.link.facts().0)).await {
            Err(ConnectError::Greeting { .. }) => open(&self.params, &self.settings, None).await,
            opened => opened,
        }
    }

    /// Compares the server's current tools with the registered ones. If they cannot be listed, the
    /// connection is no longer used.
    async fn compare(&self, connection: &Arc<UpstreamConnection>) -> bool {
        let look = connection.look();
        match connection.list(&self.settings.limits).await {
            Ok(listed) => {
                self.lost(self.pinned.compare(&tools::read(listed).tools));
                connection.seen(look);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "an MCP server said that its tools changed, and then did \
                                        not tell them");
                connection.close().await;
                false
            }
        }
    }

    fn lost(&self, tools: Vec<String>) {
        if !tools.is_empty() {
            tracing::warn!(
                ?tools,
                "tools of an MCP server are not what they were when they were registered, and are \
                 not called any more"
            );
        }
    }
}

/// A connection, and the server's tools.
pub(crate) struct Opened {
    pub(crate) connection: UpstreamConnection,
    pub(crate) tools: Vec<ToolSchema>,
    pub(crate) notes: Vec<String>,
}

/// Connects and lists the tools. A known era is not negotiated.
pub(crate) async fn open(
    params: &ServerParams,
    settings: &ConnectSettings,
    known: Option<Era>,
) -> Result<Opened, ConnectError> {
    let filled = params.fill(&settings.variables)?;
    let connection = greeting::open(&filled, settings, known).await?;
    let look = connection.look();
    let listed = connection.list(&settings.limits).await?;
    // This connection is used only after its tools are pinned, or compared with the pinned ones.
    connection.seen(look);
    let tools::Readable { tools, notes } = tools::read(listed);
    Ok(Opened {
        connection,
        tools,
        notes,
    })
}
