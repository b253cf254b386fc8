//! The egress gateway of one session: all parts together.
//!
//! ```text
//!   sockets created in the session's namespace
//!   ┌ Names     ── DNS queries ──────▶ dns ─▶ names
//!   ├ Port 443  ┐
//!   ├ Port 80   ├─ connections ──────▶ connection ─▶ dial
//!   └ AnyPort   ┘
//!
//!   this file    opens the listeners, holds the rules, counts connections, records refusals
//!   connection   one connection: decide, dial, copy
//!   inside       the end of a connection that leads into the sandbox
//!   meter        bandwidth limit
//!   blocked      refusals, reported to the user
//! ```
//!
//! There is one gateway per session, with its own names, rules and limits. Sessions share only the
//! resolver. New rules apply to new connections at once and cut off connections that they do not
//! allow. If an approver is set ([`Asker`]), a connection to a name that no rule lists is held
//! until it is decided, and an approval applies to that one connection. Dropping the gateway ends
//! its listeners and connections.

mod blocked;
mod connection;
mod inside;
mod meter;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{
    IpAddr, SocketAddr, TcpListener as StandardTcpListener, UdpSocket as StandardUdpSocket,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::authority::Authority;
use crate::dial::Dialer;
use crate::dns::{Listed, NameServer};
use crate::name::HostName;
use crate::names::Names;
use crate::resolve::{BoxFuture, Resolver};
use crate::rules::Rules;
use crate::secrets::Vault;

use blocked::NoteSink;
use inside::{Fate, Inside};
use meter::Meter;

pub use crate::dial::Objection;
pub use blocked::{Blocked, Reason};

/// A socket (`Door`) that was created in the session's namespace, where every address is local. All
/// of them are dual-stack.
#[derive(Debug)]
pub enum Door {
    /// UDP port 53.
    Names(StandardUdpSocket),
    /// A listener on this TCP port. The local address of an accepted connection is its destination.
    Port(u16, StandardTcpListener),
    /// A listener to which the kernel redirects every TCP port. The kernel keeps the address that
    /// the client connected to.
    AnyPort(StandardTcpListener),
}

/// Approves or denies connections to names that no rule lists, while the connection waits.
pub trait Asker: Send + Sync {
    /// Returns whether this name could be approved, so that DNS resolves it inside. Does not start
    /// an approval request.
    fn may_allow(&self, name: &HostName) -> bool;

    /// Asks whether this one connection, which comes from the address `from` inside, may be made.
    /// Dropping the future withdraws the request.
    fn ask(&self, name: &HostName, port: u16, from: SocketAddr) -> BoxFuture<'static, bool>;
}

/// Limit of connections per session that wait for an approval. Further ones are refused as if there
/// were no approver.
const MAX_HELD: usize = 32;

/// Resource limits of one session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of concurrent connections.
    pub connections: usize,
    /// Bytes per second over all connections, in both directions together. Zero means no limit.
    pub bytes_per_second: u64,
    /// DNS queries per second.
    pub questions_per_second: u32,
}

impl Default for Limits {
    /// More than programs need, and far less than would harm the host.
    fn default() -> Limits {
        Limits {
            connections: 256,
            bytes_per_second: 0,
            questions_per_second: 100,
        }
    }
}

/// The egress gateway of one session. Dropping it ends its listeners and connections.
pub struct Gateway {
    shared: Arc<Shared>,
    /// One task per socket (`Door`). Each owns the connections that it accepted.
    _tasks: JoinSet<()>,
}

impl Gateway {
    /// Starts the gateway on these sockets. Must be called within a Tokio runtime, which then runs
    /// its tasks.
    pub fn open(
        doors: Vec<Door>,
        rules: Rules,
        vault: Arc<Vault>,
        authority: Option<Arc<Authority>>,
        limits: Limits,
        resolver: Arc<dyn Resolver>,
    ) -> io::Result<Gateway> {
        let doors = doors.into_iter().map(Opening::of).collect();
        Gateway::open_over(
            doors,
            rules,
            vault,
            authority,
            limits,
            Dialer::new(resolver),
        )
    }

    fn open_over(
        openings: Vec<Opening>,
        rules: Rules,
        vault: Arc<Vault>,
        authority: Option<Arc<Authority>>,
        limits: Limits,
        dialer: Dialer,
    ) -> io::Result<Gateway> {
        let shared = Arc::new(Shared {
            rules: watch::Sender::new(rules),
            names: Arc::default(),
            vault,
            authority,
            dialer,
            meter: Meter::new(limits.bytes_per_second),
            notes: NoteSink::default(),
            asker: Mutex::default(),
            held: Semaphore::new(MAX_HELD),
            places: Arc::new(Semaphore::new(
                limits.connections.min(Semaphore::MAX_PERMITS),
            )),
            limits,
        });
        let mut tasks = JoinSet::new();
        for opening in openings {
            let shared = Arc::clone(&shared);
            match opening {
                Opening::Names(socket) => {
                    let server = NameServer::new(socket, limits.questions_per_second)?;
                    tasks.spawn(server.serve(Arc::clone(&shared.names), shared));
                }
                Opening::Connections(listener, target) => {
                    listener.set_nonblocking(true)?;
                    tasks.spawn(accept(TcpListener::from_std(listener)?, target, shared));
                }
            }
        }
        Ok(Gateway {
            shared,
            _tasks: tasks,
        })
    }

    /// Returns the current rules.
    pub fn rules(&self) -> Rules {
        self.shared.rules()
    }

    /// Replaces the rules. They apply at once to new connections and DNS queries. Connections that
    /// are no longer allowed are cut off.
    ///
    /// Rules for ports without a listener have no effect.
    pub fn set_rules(&self, rules: Rules) {
        self.shared.rules.send_replace(rules);
    }

    /// Sets the approver for names that no rule lists. Without one, such names do not resolve.
    pub fn set_asker(&self, asker: Option<Arc<dyn Asker>>) {
        *self.shared.asker_now() = asker;
    }

    /// Returns the refusals since the last call.
    pub fn take_blocked(&self) -> Vec<Blocked> {
        self.shared.notes.take()
    }
}

/// State that all parts of one gateway share.
pub(crate) struct Shared {
    rules: watch::Sender<Rules>,
    names: Arc<Names>,
    vault: Arc<Vault>,
    authority: Option<Arc<Authority>>,
    dialer: Dialer,
    meter: Meter,
    notes: NoteSink,
    asker: Mutex<Option<Arc<dyn Asker>>>,
    held: Semaphore,
    places: Arc<Semaphore>,
    limits: Limits,
}

impl Shared {
    fn rules(&self) -> Rules {
        self.rules.borrow().clone()
    }

    fn asker_now(&self) -> MutexGuard<'_, Option<Arc<dyn Asker>>> {
        self.asker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn asker(&self) -> Option<Arc<dyn Asker>> {
        self.asker_now().clone()
    }
}

impl Listed for Shared {
    fn lists(&self, name: &HostName) -> bool {
        if self.rules.borrow().lists_name(name) {
            return true;
        }
        // A name that a rule denies is never submitted for approval.
        let is_denied = || {
            !self
                .rules()
                .with_name(name, connection::HTTPS)
                .lists_name(name)
        };
        self.asker().is_some_and(|asker| asker.may_allow(name)) && !is_denied()
    }

    fn refused(&self, name: &HostName, attempt: bool) {
        let note = if attempt {
            NoteSink::add
        } else {
            NoteSink::mention
        };
        note(&self.notes, name.to_string(), Reason::NotListed);
    }
}

/// Returns the address and port that the client of an accepted connection connected to.
type TargetOf = Box<dyn Fn(&TcpStream) -> io::Result<SocketAddr> + Send + Sync>;

/// A socket, and for a listener the function that returns a connection's destination.
enum Opening {
    Names(StandardUdpSocket),
    Connections(StandardTcpListener, TargetOf),
}

impl Opening {
    fn of(door: Door) -> Opening {
        match door {
            Door::Names(socket) => Opening::Names(socket),
            Door::Port(port, listener) => {
                let target =
                    move |stream: &TcpStream| Ok(SocketAddr::new(stream.local_addr()?.ip(), port));
                Opening::Connections(listener, Box::new(target))
            }
            Door::AnyPort(listener) => {
                Opening::Connections(listener, Box::new(original_destination))
            }
        }
    }
}

/// Returns the destination that a connection had before the kernel redirected it.
fn original_destination(stream: &TcpStream) -> io::Result<SocketAddr> {
    // IPv4 and IPv6 connections arrive at the same socket, but each family has its own table of
    // original destinations.
    match stream.local_addr()?.ip().to_canonical() {
        IpAddr::V4(_) => Ok(SocketAddr::V4(rustix::net::sockopt::ip_original_dst(
            stream,
        )?)),
        IpAddr::V6(_) => Ok(SocketAddr::V6(rustix::net::sockopt::ipv6_original_dst(
            stream,
        )?)),
    }
}

/// Delay before the next accept after a failed one. The cause is nearly always a lack of file
/// descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// Accepts connections until it is dropped, which also ends the connections.
async fn accept(listener: TcpListener, target: TargetOf, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        match accepted.and_then(|(stream, _)| Ok((target(&stream)?, stream))) {
            Ok((target, stream)) => admit(&mut connections, &shared, stream, target),
            Err(error) => {
                tracing::debug!(%error, "a connection from inside could not be accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Starts to serve a connection, or resets it if the limit is reached.
fn admit(
    connections: &mut JoinSet<()>,
    shared: &Arc<Shared>,
    stream: TcpStream,
    target: SocketAddr,
) {
    let Ok(place) = Arc::clone(&shared.places).try_acquire_owned() else {
        let target = SocketAddr::new(target.ip().to_canonical(), target.port());
        let name = shared.names.name_at(target.ip());
        let text = name.map_or(target.to_string(), |name| {
            format!("{}:{}", name.name(), target.port())
        });
        shared
            .notes
            .add(text, Reason::TooManyConnections(shared.limits.connections));
        drop(Inside::new(stream, shared.meter.clone(), Fate::default()));
        return;
    };
    let shared = Arc::clone(shared);
    connections.spawn(async move {
        // Data is forwarded as it arrives. A failure only adds latency.
        let _ = stream.set_nodelay(true);
        connection::serve(shared, stream, target).await;
        drop(place);
    });
}
