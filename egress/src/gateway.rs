//! One session's way out: all of it together.
//!
//! ```text
//!   sockets made in the session's namespace                          this file
//!   ┌ Names     ── questions ─────────▶ dns ─▶ names                 opens the doors, holds the rules, counts, keeps notes
//!   ├ Port 443  ┐                                                    connection   one connection: decide, dial, copy
//!   ├ Port 80   ├─ connections ──────▶ connection ─▶ dial            inside       the end that leads inside
//!   └ AnyPort   ┘                                                    meter        bytes per second
//!                                                                    blocked      what was refused, for the user
//! ```
//!
//! There is one gateway per session, with its own names, rules and limits; nothing is shared with another session but the resolver. New rules hold for
//! new connections at once and end those that they do not allow. Where somebody can be asked ([`Asker`]), a connection to a name that no rule lists is held
//! until they have decided, and what they allow holds for that one connection. Dropping the gateway ends everything.

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

use blocked::Notes;
use inside::{Fate, Inside};
use meter::Meter;

pub use crate::dial::Objection;
pub use blocked::{Blocked, Reason};

/// A socket that was made in the session's namespace, where every address is local. All of them are dual-stack.
#[derive(Debug)]
pub enum Door {
    /// UDP port 53.
    Names(StandardUdpSocket),
    /// A listener on this TCP port: the address a connection was made to is its local one.
    Port(u16, StandardTcpListener),
    /// A listener to which the kernel redirects every TCP port: it remembers the address a connection was made to.
    AnyPort(StandardTcpListener),
}

/// Whoever decides about names that no rule lists, while the connection waits.
pub trait Asker: Send + Sync {
    /// Tells whether somebody could allow this name, so that it is worth being known inside. Nobody is asked yet.
    fn may_allow(&self, name: &HostName) -> bool;

    /// Asks whether this one connection may be made, which comes from the address `from` inside. Dropping the future withdraws the question.
    fn ask(&self, name: &HostName, port: u16, from: SocketAddr) -> BoxFuture<'static, bool>;
}

/// Connections of one session that may wait for a decision. Others are refused as if nobody could be asked.
const MOST_HELD: usize = 32;

/// What one session may use up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections at a time.
    pub connections: usize,
    /// Bytes per second over all connections, in both directions together. Zero means no limit.
    pub bytes_per_second: u64,
    /// Questions for names per second.
    pub questions_per_second: u32,
}

impl Default for Limits {
    /// More than programs need, and far less than would harm the machine.
    fn default() -> Limits {
        Limits {
            connections: 256,
            bytes_per_second: 0,
            questions_per_second: 100,
        }
    }
}

/// The way out of one session. Dropping it ends its listeners and connections.
pub struct Gateway {
    shared: Arc<Shared>,
    /// One task per door; each has the connections that came through it.
    _tasks: JoinSet<()>,
}

impl Gateway {
    /// Opens the way out through these doors. Must be called within a Tokio runtime, in which it then lives.
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
            notes: Notes::default(),
            asker: Mutex::default(),
            held: Semaphore::new(MOST_HELD),
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

    /// Returns the rules of this moment.
    pub fn rules(&self) -> Rules {
        self.shared.rules()
    }

    /// Changes the rules: at once for new connections and questions. Connections that are not allowed any more are cut off.
    ///
    /// Rules for ports that have no door change nothing.
    pub fn set_rules(&self, rules: Rules) {
        self.shared.rules.send_replace(rules);
    }

    /// Says who decides about names that no rule lists. Without anybody, such names do not exist.
    pub fn set_asker(&self, asker: Option<Arc<dyn Asker>>) {
        *self.shared.asker_now() = asker;
    }

    /// Returns what was refused since the last call.
    pub fn take_blocked(&self) -> Vec<Blocked> {
        self.shared.notes.take()
    }
}

/// What all parts of one gateway use.
pub(crate) struct Shared {
    rules: watch::Sender<Rules>,
    names: Arc<Names>,
    vault: Arc<Vault>,
    authority: Option<Arc<Authority>>,
    dialer: Dialer,
    meter: Meter,
    notes: Notes,
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
        // What a rule denies, nobody is asked about.
        let is_denied = || {
            !self
                .rules()
                .with_name(name, connection::HTTPS)
                .lists_name(name)
        };
        self.asker().is_some_and(|asker| asker.may_allow(name)) && !is_denied()
    }

    fn refused(&self, name: &HostName, attempt: bool) {
        let note = if attempt { Notes::add } else { Notes::mention };
        note(&self.notes, name.to_string(), Reason::NotListed);
    }
}

/// Tells which address and port an accepted connection was made to.
type TargetOf = Box<dyn Fn(&TcpStream) -> io::Result<SocketAddr> + Send + Sync>;

/// A door, and how to know what those who come through it want.
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

/// Asks the kernel where a connection went before it was redirected.
fn original_destination(stream: &TcpStream) -> io::Result<SocketAddr> {
    // Both kinds arrive at one socket, but each is remembered by the tables of its own family.
    match stream.local_addr()?.ip().to_canonical() {
        IpAddr::V4(_) => Ok(SocketAddr::V4(rustix::net::sockopt::ip_original_dst(
            stream,
        )?)),
        IpAddr::V6(_) => Ok(SocketAddr::V6(rustix::net::sockopt::ipv6_original_dst(
            stream,
        )?)),
    }
}

/// How long nothing is accepted after a failure, which is nearly always that there are no descriptors left.
const PAUSE: Duration = Duration::from_millis(50);

/// Accepts connections for ever. They end with this future.
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

/// Starts to serve a connection, or resets it if there are too many.
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
        // Data is passed on as it comes; a failure would only make it slower.
        let _ = stream.set_nodelay(true);
        connection::serve(shared, stream, target).await;
        drop(place);
    });
}
