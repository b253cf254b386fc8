//! The table of open connections: their limit, and which one is closed for a new one.
//!
//! When the table is full, a new connection replaces an old one, in this order: one that waits for
//! a request and has never authenticated, one that waits for a request, one whose request has not
//! authenticated; the longest-waiting first. A connection with an open authenticated request is
//! never closed for another. So a peer without a token cannot keep callers out, and a caller loses
//! at most a connection that its client opens again.
//!
//! One address holds at most three quarters of the table; at its share it competes only with
//! itself. This machine's own addresses have no such limit: a local proxy carries the connections
//! of all callers.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long a connection may wait for its next request.
const IDLE_TIME: Duration = Duration::from_secs(600);
/// The same before its first authenticated request. Clients send their request as soon as they have
/// connected; health checks return more often or open a new connection.
const IDLE_TIME_UNAUTHENTICATED: Duration = Duration::from_secs(30);

pub(super) struct ConnectionTable {
    most: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    connections: HashMap<u64, Connection>,
}

struct Connection {
    peer: PeerNetwork,
    requests: usize,
    authenticated: bool,
    /// When its last request started or ended, or when it was opened.
    changed: Instant,
    closed: CancellationToken,
}

/// An address, or the network of one customer: providers assign each an IPv6 /64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PeerNetwork(IpAddr);

impl PeerNetwork {
    fn of(address: IpAddr) -> PeerNetwork {
        PeerNetwork(match address.to_canonical() {
            IpAddr::V6(address) if !address.is_loopback() => {
                IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)))
            }
            address => address,
        })
    }

    fn share(self, most: usize) -> usize {
        if self.0.is_loopback() {
            most
        } else {
            (most.saturating_mul(3) / 4).max(1)
        }
    }
}

impl ConnectionTable {
    pub(super) fn new(most: usize) -> Arc<ConnectionTable> {
        Arc::new(ConnectionTable {
            most,
            state: Mutex::default(),
        })
    }

    /// Adds a connection, in the place of another one if needed. Returns `None` when every
    /// connection that it competes with has an open authenticated request.
    pub(super) fn admit(self: &Arc<ConnectionTable>, peer: IpAddr) -> Option<TableSlot> {
        let peer = PeerNetwork::of(peer);
        let mut state = self.lock();
        let held = state
            .connections
            .values()
            .filter(|connection| connection.peer == peer)
            .count();
        if held >= peer.share(self.most) {
            state.close_one(|connection| connection.peer == peer)?;
        } else if state.connections.len() >= self.most {
            state.close_one(|_| true)?;
        }
        let (id, closed) = (state.next, CancellationToken::new());
        state.next += 1;
        let connection = Connection {
            peer,
            requests: 0,
            authenticated: false,
            changed: Instant::now(),
            closed: closed.clone(),
        };
        state.connections.insert(id, connection);
        Some(TableSlot(OpenConnection {
            table: Arc::clone(self),
            id,
            closed,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn close_one(&mut self, competes: impl Fn(&Connection) -> bool) -> Option<()> {
        let closable = self.connections.iter().filter(|(_, connection)| {
            competes(connection) && (connection.requests == 0 || !connection.authenticated)
        });
        let first = closable.min_by_key(|(_, connection)| {
            (
                connection.requests > 0,
                connection.authenticated,
                connection.changed,
            )
        });
        let id = first.map(|(id, _)| *id)?;
        self.connections.remove(&id)?.closed.cancel();
        tracing::warn!("an idle connection was closed because too many are open");
        Some(())
    }
}

/// Keeps a connection in the table until it is dropped.
pub(super) struct TableSlot(pub(super) OpenConnection);

impl Drop for TableSlot {
    fn drop(&mut self) {
        let TableSlot(connection) = self;
        connection.table.lock().connections.remove(&connection.id);
    }
}

/// A connection that is in the table, or was.
#[derive(Clone)]
pub(super) struct OpenConnection {
    table: Arc<ConnectionTable>,
    id: u64,
    closed: CancellationToken,
}

impl OpenConnection {
    /// Registers the start of a request, which is open until the guard is dropped. Returns `None`
    /// when the connection was closed for another one, so that no request starts that cannot be
    /// answered.
    pub(super) fn begin_request(&self) -> Option<RequestGuard> {
        self.change(|connection| connection.requests += 1)?;
        Some(RequestGuard(self.clone()))
    }

    /// Registers that a request of this connection has authenticated.
    pub(super) fn authenticated(&self) {
        if let Some(connection) = self.table.lock().connections.get_mut(&self.id) {
            connection.authenticated = true;
        }
    }

    /// Waits until the connection is closed for another one, or has been idle for too long.
    pub(super) async fn over(&self) {
        while let Some(until) = self.idle_until() {
            if until <= Instant::now() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep_until(until) => {}
                () = self.closed.cancelled() => return,
            }
        }
    }

    /// Returns the earliest time at which the idle timeout can expire.
    fn idle_until(&self) -> Option<Instant> {
        let state = self.table.lock();
        let connection = state.connections.get(&self.id)?;
        let time = if connection.authenticated {
            IDLE_TIME
        } else {
            IDLE_TIME_UNAUTHENTICATED
        };
        Some(if connection.requests == 0 {
            connection.changed + time
        } else {
            Instant::now() + time
        })
    }

    fn change(&self, change: impl FnOnce(&mut Connection)) -> Option<()> {
        let mut state = self.table.lock();
        let connection = state.connections.get_mut(&self.id)?;
        change(connection);
        connection.changed = Instant::now();
        Some(())
    }
}

/// An open request.
pub(super) struct RequestGuard(OpenConnection);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.change(|connection| connection.requests -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAR: &str = "192.0.2.1";
    const OTHER: &str = "192.0.2.2";

    fn admit(table: &Arc<ConnectionTable>, peer: &str) -> Option<TableSlot> {
        table.admit(peer.parse().unwrap())
    }

    async fn second() {
        tokio::time::advance(Duration::from_secs(1)).await;
    }

    fn is_closed(TableSlot(connection): &TableSlot) -> bool {
        connection.closed.is_cancelled()
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_connection_takes_the_place_of_the_longest_idle_one() {
        let table = ConnectionTable::new(3);
        let mut open = Vec::new();
        for _ in 0..3 {
            open.push(admit(&table, "127.0.0.1").unwrap());
            second().await;
        }
        assert!(
            open.iter().all(|connection| !is_closed(connection)),
            "control"
        );
        // The first is used again, so that the second has been idle the longest.
        drop(open[0].0.begin_request().unwrap());
        second().await;
        let _new = admit(&table, "127.0.0.1").unwrap();
        assert_eq!(
            open.iter().map(is_closed).collect::<Vec<_>>(),
            [false, true, false]
        );
        assert!(
            open[1].0.begin_request().is_none(),
            "nothing begins on a closed connection"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn connections_without_a_token_go_before_those_with_one() {
        let table = ConnectionTable::new(3);
        let known = admit(&table, FAR).unwrap();
        known.0.authenticated();
        second().await;
        let unknown_at_work = admit(&table, "127.0.0.1").unwrap();
        let _request = unknown_at_work.0.begin_request().unwrap();
        second().await;
        let unknown = admit(&table, "127.0.0.1").unwrap();
        let closed = || [&unknown, &known, &unknown_at_work].map(is_closed);
        let mut working = Vec::new();
        for expected in [
            [true, false, false],
            [true, true, false],
            [true, true, true],
        ] {
            let new = admit(&table, "127.0.0.1").unwrap();
            new.0.authenticated();
            working.push((new.0.begin_request().unwrap(), new));
            assert_eq!(closed(), expected);
        }
        assert!(admit(&table, "127.0.0.1").is_none(), "callers at work stay");
        let (request, _connection) = working.pop().unwrap();
        drop(request);
        assert!(admit(&table, "127.0.0.1").is_some(), "control");
    }

    #[tokio::test(start_paused = true)]
    async fn one_address_cannot_take_everything() {
        let table = ConnectionTable::new(4);
        let mut kept = Vec::new();
        for _ in 0..3 {
            let connection = admit(&table, FAR).unwrap();
            connection.0.authenticated();
            kept.push((connection.0.begin_request().unwrap(), connection));
        }
        assert!(admit(&table, FAR).is_none(), "it has its share");
        let other = admit(&table, OTHER).expect("the rest is for others");
        // Its own idle connection is replaced by a new one; those of others are not.
        let (request, _connection) = kept.pop().unwrap();
        drop(request);
        let _new = admit(&table, FAR).unwrap();
        assert!(!is_closed(&other));
    }

    #[tokio::test(start_paused = true)]
    async fn connections_of_one_ipv6_network_are_counted_together() {
        let table = ConnectionTable::new(4);
        let addresses = [
            "2001:db8::1",
            "2001:db8::2",
            "2001:db8::ffff:3",
            "2001:db8::4",
        ];
        let mut open = Vec::new();
        for address in addresses {
            open.push(admit(&table, address).unwrap());
            second().await;
        }
        assert_eq!(
            open.iter().map(is_closed).collect::<Vec<_>>(),
            [true, false, false, false]
        );
        let other = admit(&table, "2001:db8:0:1::1").unwrap();
        assert!(!is_closed(&other) && !is_closed(&open[1]), "control");
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_for_a_request_ends_sooner_without_a_token() {
        let table = ConnectionTable::new(4);
        let unknown = admit(&table, FAR).unwrap();
        let known = admit(&table, FAR).unwrap();
        known.0.authenticated();
        let working = admit(&table, FAR).unwrap();
        let request = working.0.begin_request().unwrap();
        let start = Instant::now();
        unknown.0.over().await;
        assert_eq!(start.elapsed(), Duration::from_secs(30));
        known.0.over().await;
        assert_eq!(start.elapsed(), Duration::from_secs(600));
        // A connection with an open request is not idle; its timeout starts when the request ends.
        assert!(
            tokio::time::timeout(IDLE_TIME, working.0.over())
                .await
                .is_err()
        );
        drop(request);
        let start = Instant::now();
        working.0.over().await;
        assert_eq!(start.elapsed(), Duration::from_secs(30));
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_ends_leaves_its_place() {
        let table = ConnectionTable::new(1);
        let first = admit(&table, FAR).unwrap();
        first.0.authenticated();
        let request = first.0.begin_request().unwrap();
        assert!(admit(&table, OTHER).is_none(), "control");
        drop((request, first));
        assert!(admit(&table, OTHER).is_some());
    }
}
