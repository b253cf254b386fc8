//! A transport that is watched: what has been sent, what is told beside answers, and when it ends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rmcp::RoleClient;
use rmcp::model::{JsonRpcMessage, RequestId, ServerNotification};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::handler::{Changed, ProgressTokens};

/// How long it may take until it is clear whether a request was sent on a connection that is lost.
const LONGEST_DOUBT: Duration = Duration::from_secs(1);
/// Questions that a server may ask in a while; pings, mostly.
const MOST_QUESTIONS: usize = 100;
const COUNTED_TIME: Duration = Duration::from_secs(10);

/// What is known of a transport that rmcp holds.
#[derive(Clone, Default)]
pub(crate) struct Watch {
    pub(crate) sent: Arc<Sent>,
    pub(crate) progress: Arc<ProgressTokens>,
    pub(crate) changed: Arc<Changed>,
    /// Nothing more comes.
    pub(crate) broken: CancellationToken,
    /// It has been closed, and whatever was behind it is gone.
    pub(crate) ended: CancellationToken,
}

/// Which requests have been sent. A connection that is lost leaves open whether rmcp had come to send a request, and so whether it may be repeated.
#[derive(Default)]
pub(crate) struct Sent {
    requests: Mutex<HashMap<RequestId, Sending>>,
    changed: Notify,
}

#[derive(Clone, Copy, PartialEq)]
enum Sending {
    Begun,
    Done,
    Failed,
}

impl Sent {
    fn set(&self, request: &RequestId, sending: Sending) {
        self.lock().insert(request.clone(), sending);
        self.changed.notify_waiters();
    }

    /// Tells, about a request on a connection that is lost, whether the server may have seen it.
    pub(crate) async fn may_have_arrived(&self, request: &RequestId) -> bool {
        let decided = async {
            loop {
                let changed = self.changed.notified();
                match self.lock().get(request) {
                    None | Some(Sending::Failed) => return false,
                    Some(Sending::Done) => return true,
                    Some(Sending::Begun) => {}
                }
                changed.await;
            }
        };
        // Writing to a server that is gone fails at once. Whatever still waits is not known.
        timeout(LONGEST_DOUBT, decided).await.unwrap_or(true)
    }

    pub(crate) fn forget(&self, request: &RequestId) {
        self.lock().remove(request);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RequestId, Sending>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A transport whose end is seen at once. rmcp tells of it only after it has closed everything, which can take seconds.
pub(crate) struct Watched<T> {
    inner: T,
    watch: Watch,
    /// Since when requests of the server have been counted, and how many there were.
    asked: (Instant, usize),
    _ended: DropGuard,
}

impl<T> Watched<T> {
    pub(crate) fn new(inner: T, watch: &Watch) -> Watched<T> {
        Watched { inner, watch: watch.clone(), asked: (Instant::now(), 0), _ended: watch.ended.clone().drop_guard() }
    }

    /// Returns what rmcp has a use for. The rest is told to whoever waits for it, here and in order: rmcp would start a task for each, and an
    /// answer would overtake the progress before it.
    fn pass(&mut self, message: RxJsonRpcMessage<RoleClient>) -> Option<RxJsonRpcMessage<RoleClient>> {
        match message {
            JsonRpcMessage::Notification(notification) => match notification.notification {
                ServerNotification::ProgressNotification(progress) => {
                    self.watch.progress.hear(progress.params);
                    None
                }
                ServerNotification::ToolListChangedNotification(_) => {
                    self.watch.changed.tell();
                    None
                }
                other => Some(JsonRpcMessage::notification(other)),
            },
            JsonRpcMessage::Request(_) if !self.may_ask() => None,
            other => Some(other),
        }
    }

    /// Each question of a server costs an answer, which somebody who asks and never reads could have us keep without end.
    fn may_ask(&mut self) -> bool {
        let now = Instant::now();
        if now.duration_since(self.asked.0) > COUNTED_TIME {
            self.asked = (now, 0);
        }
        self.asked.1 += 1;
        self.asked.1 <= MOST_QUESTIONS
    }
}

impl<T: Transport<RoleClient>> Transport<RoleClient> for Watched<T> {
    type Error = T::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), T::Error>> + Send + 'static {
        let request = match &message {
            JsonRpcMessage::Request(request) => Some(request.id.clone()),
            _ => None,
        };
        let sent = Arc::clone(&self.watch.sent);
        if let Some(request) = &request {
            sent.set(request, Sending::Begun);
        }
        let sending = self.inner.send(message);
        async move {
            let result = sending.await;
            if let Some(request) = &request {
                sent.set(request, if result.is_ok() { Sending::Done } else { Sending::Failed });
            }
            result
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        loop {
            let Some(message) = self.inner.receive().await else {
                self.watch.broken.cancel();
                return None;
            };
            if let Some(message) = self.pass(message) {
                return Some(message);
            }
        }
    }

    async fn close(&mut self) -> Result<(), T::Error> {
        self.watch.broken.cancel();
        self.inner.close().await
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::wire;

    /// Says the same thing for ever.
    struct Parrot(&'static str);

    impl Transport<RoleClient> for Parrot {
        type Error = Infallible;

        fn send(
            &mut self,
            _message: TxJsonRpcMessage<RoleClient>,
        ) -> impl Future<Output = Result<(), Infallible>> + Send + 'static {
            std::future::ready(Ok(()))
        }

        async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
            tokio::task::yield_now().await;
            wire::read(self.0.as_bytes())
        }

        async fn close(&mut self) -> Result<(), Infallible> {
            Ok(())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_only_asks_is_answered_now_and_then() {
        let mut watched = Watched::new(Parrot(r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#), &Watch::default());
        for _ in 0..MOST_QUESTIONS {
            assert!(watched.receive().await.is_some());
        }
        let more: Vec<_> =
            (0..1000).filter_map(|_| watched.pass(wire::read(watched.inner.0.as_bytes()).unwrap())).collect();
        assert!(more.is_empty());
        // The control: later it may ask again.
        tokio::time::advance(COUNTED_TIME + Duration::from_secs(1)).await;
        assert!(watched.receive().await.is_some());
    }

    #[tokio::test]
    async fn what_was_not_sent_is_known() {
        let sent = Sent::default();
        let id = RequestId::Number(1);
        assert!(!sent.may_have_arrived(&id).await);
        sent.set(&id, Sending::Failed);
        assert!(!sent.may_have_arrived(&id).await);
        sent.set(&id, Sending::Done);
        assert!(sent.may_have_arrived(&id).await);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_not_known_counts_as_sent() {
        let sent = Sent::default();
        let id = RequestId::Number(1);
        sent.set(&id, Sending::Begun);
        assert!(sent.may_have_arrived(&id).await);
    }
}
