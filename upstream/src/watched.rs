//! A transport wrapper that tracks sent requests, notifications, and the end of the connection.

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
use crate::variables::SecretMask;

/// Timeout for determining whether a request was sent on a lost connection.
const MAX_DOUBT_TIME: Duration = Duration::from_secs(1);
/// Maximum number of requests from a server within `COUNTED_TIME`. Most of them are pings.
const MAX_QUESTIONS: usize = 100;
const COUNTED_TIME: Duration = Duration::from_secs(10);

/// State of a transport that rmcp owns.
#[derive(Clone, Default)]
pub(crate) struct Watch {
    pub(crate) sent: Arc<Sent>,
    pub(crate) progress: Arc<ProgressTokens>,
    pub(crate) changed: Arc<Changed>,
    /// No more messages will arrive.
    pub(crate) broken: CancellationToken,
    /// The transport was closed, and the program or connection behind it is gone.
    pub(crate) ended: CancellationToken,
}

impl Watch {
    /// Creates the state for a transport. `mask` hides secrets in the server's output.
    pub(crate) fn new(mask: &SecretMask) -> Watch {
        Watch {
            progress: Arc::new(ProgressTokens::new(mask.clone())),
            ..Watch::default()
        }
    }
}

/// Tracks which requests have been sent. When a connection is lost, this determines whether a
/// request may be repeated, because rmcp does not report whether it had sent it.
#[derive(Default)]
pub(crate) struct Sent {
    requests: Mutex<HashMap<RequestId, Sending>>,
    changed: Notify,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Sending {
    /// Not sent yet.
    Waiting,
    /// Possibly sent in part.
    Begun,
    Done,
    Failed,
    /// The caller is gone, and rmcp has not started to send the request.
    Forgotten,
}

/// A request that is being sent. When the connection is lost, rmcp drops it in whatever state it
/// is.
struct OnItsWay {
    sent: Arc<Sent>,
    request: RequestId,
    state: Sending,
}

impl OnItsWay {
    fn new(sent: &Arc<Sent>, request: RequestId) -> OnItsWay {
        sent.set(&request, Sending::Waiting);
        OnItsWay {
            sent: Arc::clone(sent),
            request,
            state: Sending::Waiting,
        }
    }

    fn begin(&mut self) {
        self.change(Sending::Begun);
    }

    fn end(&mut self, is_sent: bool) {
        self.change(if is_sent {
            Sending::Done
        } else {
            Sending::Failed
        });
    }

    fn change(&mut self, state: Sending) {
        self.state = state;
        self.sent.set(&self.request, state);
    }
}

impl Drop for OnItsWay {
    fn drop(&mut self) {
        match self.state {
            Sending::Waiting => self.change(Sending::Failed),
            Sending::Begun => self.change(Sending::Done),
            Sending::Done | Sending::Failed | Sending::Forgotten => {}
        }
    }
}

impl Sent {
    /// Updates the state of a request, unless it was forgotten.
    fn set(&self, request: &RequestId, sending: Sending) {
        let mut requests = self.lock();
        match (requests.get(request), sending) {
            (Some(Sending::Forgotten), _) => {
                requests.remove(request);
            }
            (None, Sending::Waiting) | (Some(_), _) => {
                requests.insert(request.clone(), sending);
            }
            (None, _) => {}
        }
        drop(requests);
        self.changed.notify_waiters();
    }

    /// Returns whether the server may have received a request on a lost connection.
    pub(crate) async fn may_have_arrived(&self, request: &RequestId) -> bool {
        let decided = async {
            loop {
                let changed = self.changed.notified();
                match self.lock().get(request) {
                    None | Some(Sending::Failed | Sending::Forgotten) => return false,
                    Some(Sending::Done) => return true,
                    Some(Sending::Waiting | Sending::Begun) => {}
                }
                changed.await;
            }
        };
        // Writing to a server that is gone fails at once. If the request is still pending, the
        // outcome is unknown.
        timeout(MAX_DOUBT_TIME, decided).await.unwrap_or(true)
    }

    /// Stops tracking a request.
    pub(crate) fn forget(&self, request: &RequestId) {
        let mut requests = self.lock();
        if requests.remove(request).is_none() {
            requests.insert(request.clone(), Sending::Forgotten);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RequestId, Sending>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A transport whose end is detected at once. rmcp reports it only after closing everything, which
/// can take seconds.
pub(crate) struct Watched<T> {
    inner: T,
    watch: Watch,
    /// Start of the current counting period, and the number of server requests in it.
    asked: (Instant, usize),
    _ended: DropGuard,
}

impl<T> Watched<T> {
    pub(crate) fn new(inner: T, watch: &Watch) -> Watched<T> {
        Watched {
            inner,
            watch: watch.clone(),
            asked: (Instant::now(), 0),
            _ended: watch.ended.clone().drop_guard(),
        }
    }

    /// Returns messages for rmcp. Progress and change notifications are delivered here, in order:
    /// rmcp would start a task for each, and a response could overtake the progress before it.
    fn pass(
        &mut self,
        message: RxJsonRpcMessage<RoleClient>,
    ) -> Option<RxJsonRpcMessage<RoleClient>> {
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

    /// Rate-limits requests of the server. Each costs a response, and a server that never reads
    /// could make us queue responses without bound.
    fn may_ask(&mut self) -> bool {
        let now = Instant::now();
        if now.duration_since(self.asked.0) > COUNTED_TIME {
            self.asked = (now, 0);
        }
        self.asked.1 += 1;
        self.asked.1 <= MAX_QUESTIONS
    }
}

impl<T: Transport<RoleClient>> Transport<RoleClient> for Watched<T> {
    type Error = T::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), T::Error>> + Send + 'static {
        let request = match &message {
            JsonRpcMessage::Request(request) => {
                Some(OnItsWay::new(&self.watch.sent, request.id.clone()))
            }
            _ => None,
        };
        let sending = self.inner.send(message);
        async move {
            let mut request = request;
            request.iter_mut().for_each(OnItsWay::begin);
            let result = sending.await;
            request
                .iter_mut()
                .for_each(|request| request.end(result.is_ok()));
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

    /// Sends the same message forever.
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
        let mut watched = Watched::new(
            Parrot(r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#),
            &Watch::default(),
        );
        for _ in 0..MAX_QUESTIONS {
            assert!(watched.receive().await.is_some());
        }
        let more: Vec<_> = (0..1000)
            .filter_map(|_| watched.pass(wire::read(watched.inner.0.as_bytes()).unwrap()))
            .collect();
        assert!(more.is_empty());
        // Control: after the period, requests are accepted again.
        tokio::time::advance(COUNTED_TIME + Duration::from_secs(1)).await;
        assert!(watched.receive().await.is_some());
    }

    async fn fate(steps: impl FnOnce(&mut OnItsWay)) -> bool {
        let sent: Arc<Sent> = Arc::default();
        let mut request = OnItsWay::new(&sent, RequestId::Number(1));
        steps(&mut request);
        drop(request);
        sent.may_have_arrived(&RequestId::Number(1)).await
    }

    #[tokio::test]
    async fn only_what_was_begun_and_did_not_fail_may_have_arrived() {
        assert!(
            !Sent::default()
                .may_have_arrived(&RequestId::Number(1))
                .await
        );
        assert!(!fate(|_| {}).await);
        assert!(fate(OnItsWay::begin).await);
        assert!(fate(|request| request.end(true)).await);
        assert!(!fate(|request| request.end(false)).await);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_not_known_counts_as_sent() {
        let sent: Arc<Sent> = Arc::default();
        let _request = OnItsWay::new(&sent, RequestId::Number(1));
        assert!(sent.may_have_arrived(&RequestId::Number(1)).await);
    }

    #[tokio::test]
    async fn what_nobody_asks_about_any_more_is_forgotten() {
        let id = RequestId::Number(1);
        for is_early in [true, false] {
            let sent: Arc<Sent> = Arc::default();
            if is_early {
                sent.forget(&id);
            }
            let mut request = OnItsWay::new(&sent, id.clone());
            if !is_early {
                sent.forget(&id);
            }
            request.begin();
            request.end(true);
            drop(request);
            // A request that was already being sent leaves no entry. Otherwise an entry remains
            // until sending starts and removes it.
            sent.lock()
                .retain(|_, sending| *sending != Sending::Forgotten);
            assert!(sent.lock().is_empty(), "{is_early}");
        }
    }
}
