//! The task that keeps a server connected.
//!
//! It is the only one that connects, so that whoever waits for a connection waits for the same one. It compares what the server has with what was
//! registered, after every connection and whenever the server says that something changed.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use cellblock_typed::ToolSchema;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::connection::Connection;
use crate::greeting::{self, ConnectError, Era, told};
use crate::params::ServerParams;
use crate::tools::{self, PinnedTools};
use crate::upstream::Settings;

/// The first wait after a failure; each further one doubles it.
const SHORTEST_WAIT: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Somebody who needs a connection.
pub(crate) type Wanted = oneshot::Sender<Result<Arc<Connection>, String>>;

/// The connection of the moment, and what the last one was like.
pub(crate) struct Link {
    current: RwLock<Option<Arc<Connection>>>,
    facts: RwLock<(Era, Option<String>)>,
}

impl Link {
    pub(crate) fn new(connection: Connection) -> Link {
        let facts = (connection.era, connection.server.clone());
        Link {
            current: RwLock::new(Some(Arc::new(connection))),
            facts: RwLock::new(facts),
        }
    }

    /// Returns the era of the last connection, and what the server called itself.
    pub(crate) fn facts(&self) -> (Era, Option<String>) {
        self.facts
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(crate) fn usable(&self) -> Option<Arc<Connection>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current
            .as_ref()
            .filter(|connection| connection.is_usable())
            .cloned()
    }

    fn set(&self, connection: Arc<Connection>) {
        *self.facts.write().unwrap_or_else(PoisonError::into_inner) =
            (connection.era, connection.server.clone());
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(connection);
    }

    fn take(&self) -> Option<Arc<Connection>> {
        self.current
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}

/// The task, and all that it needs.
pub(crate) struct Driver {
    pub(crate) params: ServerParams,
    pub(crate) settings: Settings,
    pub(crate) pinned: Arc<PinnedTools>,
    pub(crate) link: Arc<Link>,
    pub(crate) wanted: mpsc::Receiver<Wanted>,
    pub(crate) closing: CancellationToken,
    /// Tells, when it is dropped, that the connection is closed.
    pub(crate) ended: DropGuard,
}

/// Failures of late.
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

    /// Serves until nobody holds the server any more.
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
                        // Whoever asked may have been cancelled.
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

    async fn live(&self, failures: &mut Failures) -> Result<Arc<Connection>, ConnectError> {
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
                let wait = SHORTEST_WAIT
                    .saturating_mul(1 << failures.count.min(16))
                    .min(LONGEST_WAIT);
                failures.count += 1;
                failures.not_before = Some((Instant::now() + wait, told(&error)));
                Err(error)
            }
        }
    }

    /// Connects as the last time and, if the server does not take that any more, as for the first time: it may be a newer one.
    async fn open_again(&self) -> Result<Opened, ConnectError> {
        match open(&self.params, &self.settings, Some(self.link.facts().0)).await {
            Err(ConnectError::Greeting { .. }) => open(&self.params, &self.settings, None).await,
            opened => opened,
        }
    }

    /// Compares what the server has now with what was registered. A connection on which that is not known is not used any more.
    async fn compare(&self, connection: &Arc<Connection>) -> bool {
        let look = connection.look();
        match connection.list(&self.settings.limits).await {
            Ok(listed) => {
                self.lost(self.pinned.compare(&tools::read(listed).tools));
                connection.seen(look);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "an MCP server said that its tools changed, and then did not tell them");
                connection.close().await;
                false
            }
        }
    }

    fn lost(&self, tools: Vec<String>) {
        if !tools.is_empty() {
            tracing::warn!(
                ?tools,
                "tools of an MCP server are not what they were when they were registered, and are not called any more"
            );
        }
    }
}

/// A connection, and what the server has.
pub(crate) struct Opened {
    pub(crate) connection: Connection,
    pub(crate) tools: Vec<ToolSchema>,
    pub(crate) notes: Vec<String>,
}

/// Connects and lists. An era that is known is not asked for.
pub(crate) async fn open(
    params: &ServerParams,
    settings: &Settings,
    known: Option<Era>,
) -> Result<Opened, ConnectError> {
    let filled = params.fill(&settings.variables)?;
    let connection = greeting::open(&filled, settings, known).await?;
    let look = connection.look();
    let listed = connection.list(&settings.limits).await?;
    // Nobody uses this connection before its tools are pinned, or compared with those that are.
    connection.seen(look);
    let tools::Readable { tools, notes } = tools::read(listed);
    Ok(Opened {
        connection,
        tools,
        notes,
    })
}
