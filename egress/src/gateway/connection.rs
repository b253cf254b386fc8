//! One connection from inside: find its destination, check it, then transfer its bytes.
//!
//! ```text
//!  destination address ─▶ a name, or only an address ─▶ allowed at this port? ─▶ kind of traffic?
//!
//!    only an address            copied: the address itself is listed
//!    a name, port 443           TLS; the ClientHello must name this host, unencrypted
//!    a name, port 80            HTTP; every request must be for this name
//!    a name, another port       copied: the name is sufficient
//!    a name that has a secret   as above, but TLS is terminated here
//!    no restrictions at all     copied, except TLS to a name that has a secret
//! ```
//!
//! Only then is the host dialled, after a check of all its addresses. No byte of a refused
//! connection leaves the host.
//!
//! When the rules change, every connection is checked again and cut off if it is no longer allowed.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, copy_bidirectional_with_sizes};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Shared;
use super::blocked::Reason;
use super::inside::{Fate, Inside};
use crate::hello::{self, ClientHello, Hello, MAX_HELLO_BYTES};
use crate::name::{HostName, UrlHost};
use crate::names::NameInUse;
use crate::resolve::BoxFuture;
use crate::rules::Rules;
use crate::secrets::RequestNote;
use crate::{http, terminate};

/// Serves a connection that was made to `target`, until it ends.
pub(crate) async fn serve(shared: Arc<Shared>, stream: TcpStream, target: SocketAddr) {
    let peer = Arc::new(Peer::of(shared, target, stream.peer_addr().ok()));
    let fate = Fate::default();
    // Subscribes before the first decision, so that no change is missed.
    let cut_off = pin!(peer.cut_off());
    let work = pin!(carry(
        &peer,
        Inside::new(stream, peer.shared.meter.clone(), fate.clone())
    ));
    // If this whole future is dropped, this is dropped before `work`: the connection was cut off
    // and did not end by itself.
    let unfinished = ResetOnDrop(Some(fate));
    tokio::select! {
        _ = work => unfinished.defuse(),
        () = cut_off => peer.note(Reason::NoLongerListed),
    }
}

/// A connection was refused. The refusal was recorded before the program inside can notice it.
struct Refused;

/// Timeout for a ClientHello. Clients send it at once; this allows for slow ones on a busy machine.
const MAX_HELLO_TIME: Duration = Duration::from_secs(10);

/// Timeout for the first bytes where TLS is possible but not required. A client that sends later is
/// copied unchanged, so its placeholder stays a placeholder.
const MAX_GUESS_TIME: Duration = Duration::from_secs(1);

/// Buffer size for copying. Larger buffers are not faster, and every connection has two.
const BUFFER: usize = 64 * 1024;

const HTTP: u16 = 80;
pub(super) const HTTPS: u16 = 443;

/// The destination of a connection and its state.
struct Peer {
    shared: Arc<Shared>,
    host: UrlHost,
    port: u16,
    /// The address inside that it comes from. Unknown if the client has already disconnected.
    from: Option<SocketAddr>,
    /// Whether its bytes are copied unchecked only because there were no restrictions when it
    /// started.
    is_unseen: bool,
    /// Whether it was approved although no rule allows it.
    is_granted: AtomicBool,
    /// The addresses dialled so far.
    dialled: Mutex<HashSet<IpAddr>>,
    /// Reserves the address that stands for the name while a connection uses it.
    _name: Option<NameInUse>,
}

impl Peer {
    fn of(shared: Arc<Shared>, target: SocketAddr, from: Option<SocketAddr>) -> Peer {
        let address = target.ip().to_canonical();
        let name = shared.names.name_at(address);
        let host = name.as_ref().map_or(UrlHost::Address(address), |name| {
            UrlHost::Name(name.name().clone())
        });
        let is_unseen = matches!((target.port(), &name), (HTTP | HTTPS, Some(_)))
            && shared.rules().is_everything();
        let (is_granted, dialled) = (AtomicBool::new(false), Mutex::default());
        Peer {
            shared,
            host,
            port: target.port(),
            from,
            is_unseen,
            is_granted,
            dialled,
            _name: name,
        }
    }

    /// Returns the current rules, plus the approval for this connection.
    fn rules(&self) -> Rules {
        let rules = self.shared.rules();
        match &self.host {
            UrlHost::Name(name) if self.is_granted.load(Ordering::Relaxed) => {
                rules.with_name(name, self.port)
            }
            _ => rules,
        }
    }

    /// Holds the connection until it is approved or denied, if there is an approver.
    async fn is_granted(&self) -> bool {
        let (UrlHost::Name(name), Some(asker)) = (&self.host, self.shared.asker()) else {
            return false;
        };
        let Some(from) = self.from else { return false };
        let could_be = self
            .shared
            .rules()
            .with_name(name, self.port)
            .allows_name(name, self.port);
        let Ok(_held) = self.shared.held.try_acquire() else {
            return false;
        };
        if !could_be || !asker.may_allow(name) || !asker.ask(name, self.port, from).await {
            return false;
        }
        self.is_granted.store(true, Ordering::Relaxed);
        self.is_allowed()
    }

    fn note(&self, reason: Reason) {
        self.shared
            .notes
            .add(format!("{}:{}", self.host, self.port), reason);
    }

    fn refuse(&self, reason: Reason) -> Refused {
        self.note(reason);
        Refused
    }

    /// Returns whether the current rules allow everything about this connection.
    fn is_allowed(&self) -> bool {
        let dialled = self
            .dialled
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let rules = self.rules();
        (!self.is_unseen || rules.is_everything())
            && self
                .shared
                .dialer
                .allows(&self.host, self.port, &dialled, &rules)
    }

    /// Waits until the rules no longer allow this connection.
    fn cut_off(&self) -> impl Future<Output = ()> {
        let mut changes = self.shared.rules.subscribe();
        async move {
            while changes.changed().await.is_ok() {
                if !self.is_allowed() {
                    return;
                }
            }
        }
    }

    async fn dial(&self) -> Result<TcpStream, Refused> {
        self.try_dial().await.map_err(|reason| self.refuse(reason))
    }

    /// Opens a connection to the host under the current rules.
    async fn try_dial(&self) -> Result<TcpStream, Reason> {
        let rules = self.rules();
        let (stream, address) = self
            .shared
            .dialer
            .dial(&self.host, self.port, &rules)
            .await?;
        self.dialled
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(address);
        // The rules may have changed since they were read. Later changes are covered by `cut_off`,
        // which sees this address.
        if self.rules() == rules || self.is_allowed() {
            Ok(stream)
        } else {
            Err(Reason::NoLongerListed)
        }
    }

    /// Opens a connection for `terminate`, which does not record refusals itself.
    async fn dial_and_note(self: Arc<Self>) -> io::Result<TcpStream> {
        self.try_dial().await.map_err(|reason| {
            self.note(reason.clone());
            io::Error::other(reason)
        })
    }
}

/// The kind of traffic on a connection, which decides what is checked.
enum Traffic<'a> {
    Copied,
    Http(&'a HostName),
    Tls(&'a HostName),
    /// TLS if the first bytes look like it.
    Perhaps(&'a HostName),
}

fn traffic(peer: &Peer) -> Traffic<'_> {
    let UrlHost::Name(name) = &peer.host else {
        return Traffic::Copied;
    };
    match peer.port {
        HTTP if !peer.is_unseen => Traffic::Http(name),
        HTTPS if !peer.is_unseen => Traffic::Tls(name),
        _ if peer.shared.vault.has(name) => Traffic::Perhaps(name),
        _ => Traffic::Copied,
    }
}

/// Decides about a connection and transfers its bytes.
async fn carry(peer: &Arc<Peer>, mut inside: Inside) -> Result<(), Refused> {
    if !peer.is_allowed() && !peer.is_granted().await {
        return Err(peer.refuse(Reason::NotListed));
    }
    match traffic(peer) {
        Traffic::Copied => copy(inside, peer.dial().await?).await,
        Traffic::Http(name) => {
            let upstream = peer.dial().await?;
            inside.fate().let_through();
            let refused =
                |mismatch: http::Mismatch| peer.note(Reason::Request(mismatch.to_string()));
            if let Err(error) = http::serve(inside, upstream, name, peer.port, &refused).await {
                tracing::debug!(error, "a connection for HTTP ended early");
            }
        }
        Traffic::Tls(name) => {
            let Some(hello) = read_hello(&mut inside, MAX_HELLO_TIME).await else {
                return Ok(());
            };
            check_hello(&hello, name).map_err(|reason| peer.refuse(reason))?;
            carry_tls(peer, inside, name).await?;
        }
        Traffic::Perhaps(name) => match read_hello(&mut inside, MAX_GUESS_TIME).await {
            Some(hello) if check_hello(&hello, name).is_ok() => {
                carry_tls(peer, inside, name).await?
            }
            _ => copy(inside, peer.dial().await?).await,
        },
    }
    Ok(())
}

/// Reads the first bytes until they clearly are a ClientHello or clearly are not, and puts them
/// back. Returns `None` if the client closes without sending anything.
async fn read_hello(inside: &mut Inside, patience: Duration) -> Option<Hello> {
    let mut bytes = Vec::with_capacity(MAX_HELLO_BYTES);
    let read = async {
        loop {
            match inside.read_buf(&mut bytes).await {
                Ok(0) | Err(_) => return Hello::NotTls,
                Ok(_) => {}
            }
            match hello::read(&bytes) {
                Hello::Incomplete => {}
                hello => return hello,
            }
        }
    };
    let hello = timeout(patience, read).await;
    if bytes.is_empty() && hello.is_ok() {
        return None;
    }
    inside.unread(bytes);
    Some(hello.unwrap_or(Hello::NotTls))
}

fn check_hello(hello: &Hello, name: &HostName) -> Result<(), Reason> {
    let Hello::Client(ClientHello {
        server_name,
        has_encrypted_hello,
    }) = hello
    else {
        return Err(Reason::NotTls);
    };
    if *has_encrypted_hello {
        return Err(Reason::EncryptedHello);
    }
    let said = server_name.as_ref().ok_or(Reason::NoServerName)?;
    match HostName::parse(said) {
        Ok(said) if said == *name => Ok(()),
        Ok(said) => Err(Reason::OtherServerName(said)),
        Err(_) => Err(Reason::UnreadableServerName),
    }
}

/// Forwards TLS for the right name: terminates it if the name has a secret, otherwise copies it
/// unchanged.
async fn carry_tls(peer: &Arc<Peer>, inside: Inside, name: &HostName) -> Result<(), Refused> {
    let shared = &peer.shared;
    let Some(authority) = shared.authority.as_ref().filter(|_| shared.vault.has(name)) else {
        copy(inside, peer.dial().await?).await;
        return Ok(());
    };
    inside.fate().let_through();
    let dialling = Arc::clone(peer);
    let dial = move || -> BoxFuture<'static, _> { Box::pin(Arc::clone(&dialling).dial_and_note()) };
    let noting = Arc::clone(peer);
    let notes = move |note: RequestNote| noting.note(Reason::Request(note.to_string()));
    let served = terminate::serve(
        inside,
        name,
        peer.port,
        &shared.vault,
        authority,
        Arc::new(dial),
        Arc::new(notes),
    )
    .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a connection for HTTPS ended early");
    }
    Ok(())
}

/// Copies in both directions until both are finished. One direction may end before the other. If
/// one side fails, the other is reset.
async fn copy(mut inside: Inside, mut upstream: TcpStream) {
    inside.fate().let_through();
    if copy_bidirectional_with_sizes(&mut inside, &mut upstream, BUFFER, BUFFER)
        .await
        .is_err()
    {
        inside.fate().reset();
        let _ = upstream.set_zero_linger();
    }
}

/// Resets the connection unless it ended by itself.
struct ResetOnDrop(Option<Fate>);

impl ResetOnDrop {
    fn defuse(mut self) {
        self.0 = None;
    }
}

impl Drop for ResetOnDrop {
    fn drop(&mut self) {
        self.0.iter().for_each(Fate::reset);
    }
}
