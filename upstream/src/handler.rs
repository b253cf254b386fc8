//! Notifications from a server: progress of a call, and changes of its tools.
//!
//! All requests of a server (elicitation, sampling, roots) are declined, and none of these
//! capabilities is declared.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rmcp::ClientHandler;
use rmcp::model::{
    ClientCapabilities, ClientConfig, Implementation, ProgressNotificationParam, ProgressToken,
    ProtocolVersion,
};
use tokio::sync::{Notify, mpsc};

use crate::call::CallProgress;
use crate::connection::said;
use crate::variables::SecretMask;

/// Maximum number of queued progress notifications with an unknown token: those of a call that was
/// sent but not yet returned to its caller.
const MAX_EARLY: usize = 64;

/// rmcp's handler for requests of a server. Its defaults reject or ignore them.
pub(crate) struct RejectingHandler;

impl ClientHandler for RejectingHandler {
    fn get_info(&self) -> ClientConfig {
        ClientConfig::new(ClientCapabilities::default(), ourselves())
            .with_protocol_version(ProtocolVersion::V_2025_11_25)
    }
}

/// Counts the server's change notifications, and how many of them have been handled.
#[derive(Default)]
pub(crate) struct Changed {
    told: AtomicU64,
    seen: AtomicU64,
    notify: Notify,
}

impl Changed {
    pub(crate) fn is_stale(&self) -> bool {
        self.told.load(Ordering::Acquire) != self.seen.load(Ordering::Acquire)
    }

    /// Returns the value for [`Changed::seen`]. Call it before listing, and `seen` after the list
    /// has been compared. Until then the change is pending.
    pub(crate) fn look(&self) -> u64 {
        self.told.load(Ordering::Acquire)
    }

    pub(crate) fn seen(&self, look: u64) {
        self.seen.store(look, Ordering::Release);
    }

    pub(crate) async fn told(&self) {
        self.notify.notified().await;
    }

    pub(crate) fn tell(&self) {
        self.told.fetch_add(1, Ordering::AcqRel);
        self.notify.notify_one();
    }
}

/// Receivers of progress notifications, by token.
#[derive(Default)]
pub(crate) struct ProgressTokens {
    mask: SecretMask,
    followed: Mutex<Followed>,
}

#[derive(Default)]
struct Followed {
    calls: HashMap<ProgressToken, mpsc::Sender<CallProgress>>,
    early: VecDeque<(ProgressToken, CallProgress)>,
}

/// Progress of one call. Dropping it unsubscribes.
pub(crate) struct Follower {
    tokens: Arc<ProgressTokens>,
    token: ProgressToken,
    pub(crate) receiver: mpsc::Receiver<CallProgress>,
}

impl ProgressTokens {
    pub(crate) fn new(mask: SecretMask) -> ProgressTokens {
        ProgressTokens {
            mask,
            ..ProgressTokens::default()
        }
    }

    pub(crate) fn follow(self: &Arc<Self>, token: &ProgressToken) -> Follower {
        let (sender, receiver) = mpsc::channel(MAX_EARLY);
        let mut followed = self.lock();
        followed.early.retain(|(early, progress)| {
            let is_ours = early == token;
            if is_ours {
                let _ = sender.try_send(progress.clone());
            }
            !is_ours
        });
        followed.calls.insert(token.clone(), sender);
        Follower {
            tokens: Arc::clone(self),
            token: token.clone(),
            receiver,
        }
    }

    pub(crate) fn hear(&self, params: ProgressNotificationParam) {
        let message = params.message.map(|message| said(&message, &self.mask));
        let (token, progress) = (
            params.progress_token,
            CallProgress {
                progress: params.progress,
                total: params.total,
                message,
            },
        );
        let mut followed = self.lock();
        if let Some(sender) = followed.calls.get(&token) {
            // A slow receiver misses some notifications.
            let _ = sender.try_send(progress);
            return;
        }
        if followed.early.len() == MAX_EARLY {
            followed.early.pop_front();
        }
        followed.early.push_back((token, progress));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Followed> {
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.tokens.lock().calls.remove(&self.token);
    }
}

/// Returns our client name and version.
pub(crate) fn ourselves() -> Implementation {
    Implementation::new("cellblock", env!("CARGO_PKG_VERSION"))
}
