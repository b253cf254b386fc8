//! Cache of the keys that an issuer publishes.
//!
//! ```text
//!  age of the keys    key is known                                key is not known
//!  under 1 h          use it                                      fetch, at most once a minute
//!  1 h to 24 h        fetch first; while the server is            the same
//!                     unreachable, use it and fetch in
//!                     the background
//!  over 24 h, none    fetch; while the server is unreachable, all tokens are rejected
//! ```
//!
//! `next_step` decides, `KeyServer` acts. There is only one fetch at a time, and it continues when
//! the caller that started it disconnects. Its result replaces all keys: a key that is no longer
//! published is no longer valid.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use super::fetch::{FetchError, Fetcher};
use super::keys::{Algorithm, KeySet, PublicKey};

/// How long keys are used without a new fetch.
const FRESH: Duration = Duration::from_secs(3600);

/// How long keys are used while their server is unreachable. A key that was revoked in that time
/// would still be accepted.
const USABLE: Duration = Duration::from_secs(24 * 3600);

/// Minimum interval between fetches for an unknown key or an old set: unauthenticated senders can
/// name any key in a token.
const MIN_PAUSE: Duration = Duration::from_secs(60);

/// The same without any keys, when all tokens are rejected anyway.
const PAUSE_WITHOUT_KEYS: Duration = Duration::from_secs(5);

/// The source of keys. Tests have their own.
pub(super) trait KeySetFetcher: Send + Sync {
    fn fetch(&self) -> Pin<Box<dyn Future<Output = Result<KeySet, FetchError>> + Send>>;
}

impl KeySetFetcher for Fetcher {
    fn fetch(&self) -> Pin<Box<dyn Future<Output = Result<KeySet, FetchError>> + Send>> {
        let fetcher = self.clone();
        Box::pin(async move { Fetcher::fetch(&fetcher).await })
    }
}

/// Why there is no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoKey {
    /// The issuer has no such key.
    Unknown,
    /// The issuer is unreachable.
    Away,
}

/// The keys of one issuer.
pub(super) struct KeyServer {
    issuer: String,
    source: Arc<dyn KeySetFetcher>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    keys: Option<(Arc<KeySet>, Instant)>,
    /// When the last fetch was, and whether it failed.
    asked: Option<(Instant, bool)>,
    /// Closes when the current fetch ends.
    question: Option<watch::Receiver<()>>,
}

impl KeyServer {
    pub(super) fn new(issuer: String, source: Arc<dyn KeySetFetcher>) -> KeyServer {
        KeyServer {
            issuer,
            source,
            state: Arc::default(),
        }
    }

    /// Finds the key of a token, and fetches the keys if needed.
    pub(super) async fn find(
        &self,
        id: Option<&str>,
        algorithm: Algorithm,
    ) -> Result<PublicKey, NoKey> {
        if let Some(answer) = self.look(id, algorithm, Asked::NotYet) {
            return answer;
        }
        let mut answered = self.ask();
        // The sender sends nothing: it is dropped once the result is stored.
        let _ = answered.changed().await;
        self.look(id, algorithm, Asked::Just)
            .expect("after a question there is no other")
    }

    /// Looks up a key in the cache. `None` means that a fetch is needed first.
    fn look(
        &self,
        id: Option<&str>,
        algorithm: Algorithm,
        asked: Asked,
    ) -> Option<Result<PublicKey, NoKey>> {
        let (step, key) = {
            let state = self.lock();
            let set = state.keys.as_ref().map(|(set, _)| set.clone());
            let key = set.and_then(|set| set.find(id, algorithm).cloned());
            (next_step(&state.view(key.is_some()), asked), key)
        };
        match (step, key) {
            (Step::Use, Some(key)) => Some(Ok(key)),
            (Step::UseAndAsk, Some(key)) => {
                self.ask();
                Some(Ok(key))
            }
            (Step::Ask, _) => None,
            (Step::Refuse(why), _) => Some(Err(why)),
            (Step::Use | Step::UseAndAsk, None) => {
                unreachable!("a key that is not known is not used")
            }
        }
    }

    /// Starts a fetch, or joins the current one. The receiver closes when it ends.
    fn ask(&self) -> watch::Receiver<()> {
        let mut state = self.lock();
        if let Some(under_way) = state.under_way() {
            return under_way.clone();
        }
        let (answer, answered) = watch::channel(());
        state.question = Some(answered.clone());
        let (source, shared, issuer) =
            (self.source.clone(), self.state.clone(), self.issuer.clone());
        tokio::spawn(async move {
            let fetched = source.fetch().await;
            match &fetched {
                Ok(_) => info!(issuer, "keys fetched"),
                Err(error) => {
                    let cause = std::error::Error::source(error).map(ToString::to_string);
                    warn!(issuer, %error, cause, "keys could not be fetched");
                }
            }
            let mut state = shared.lock().unwrap_or_else(PoisonError::into_inner);
            state.asked = Some((Instant::now(), fetched.is_err()));
            if let Ok(set) = fetched {
                state.keys = Some((Arc::new(set), Instant::now()));
            }
            state.question = None;
            drop(answer);
        });
        answered
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn view(&self, is_known: bool) -> View {
        View {
            age: self.keys.as_ref().map(|(_, fetched)| fetched.elapsed()),
            since_asked: self.asked.map(|(when, _)| when.elapsed()),
            is_away: self.asked.is_some_and(|(_, failed)| failed),
            is_being_asked: self.under_way().is_some(),
            is_known,
        }
    }

    /// The current fetch. If its task panicked, the channel is closed without a result, and the
    /// fetch does not count.
    fn under_way(&self) -> Option<&watch::Receiver<()>> {
        self.question
            .as_ref()
            .filter(|question| question.has_changed().is_ok())
    }
}

/// Everything that the decision about a token depends on.
#[derive(Debug, Clone, Copy)]
struct View {
    /// Of the keys, if there are any.
    age: Option<Duration>,
    since_asked: Option<Duration>,
    /// Whether the last fetch failed.
    is_away: bool,
    is_being_asked: bool,
    /// Whether the key of the token is in the cache.
    is_known: bool,
}

/// Whether a fetch was already done for this token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    NotYet,
    Just,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Use,
    /// Use the key and fetch in the background.
    UseAndAsk,
    /// Fetch, wait, and look again.
    Ask,
    Refuse(NoKey),
}

/// Decides. Performs nothing; `KeyServer` acts.
fn next_step(view: &View, asked: Asked) -> Step {
    let may_ask = |pause: Duration| {
        asked == Asked::NotYet
            && (view.is_being_asked || view.since_asked.is_none_or(|since| since >= pause))
    };
    let has_usable_keys = view.age.is_some_and(|age| age < USABLE);
    let is_fresh = view.age.is_some_and(|age| age < FRESH);
    if !has_usable_keys {
        return if may_ask(PAUSE_WITHOUT_KEYS) {
            Step::Ask
        } else {
            Step::Refuse(NoKey::Away)
        };
    }
    match view.is_known {
        true if is_fresh || asked == Asked::Just => Step::Use,
        true if !view.is_away => Step::Ask,
        true if may_ask(MIN_PAUSE) => Step::UseAndAsk,
        true => Step::Use,
        false if may_ask(MIN_PAUSE) => Step::Ask,
        false if view.is_away => Step::Refuse(NoKey::Away),
        false => Step::Refuse(NoKey::Unknown),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use serde_json::json;
    use tokio::sync::Notify;

    use super::super::tests::{P256, P384, RSA_SIGNER};
    use super::*;

    /// A server with scripted responses that counts its requests.
    #[derive(Clone, Default)]
    struct Script(Arc<Mutex<Lines>>);

    #[derive(Default)]
    struct Lines {
        /// The next responses; the last one is repeated.
        answers: VecDeque<Option<KeySet>>,
        questions: usize,
        /// If set, each response waits for a notification.
        gate: Option<Arc<Notify>>,
    }

    impl Script {
        fn says(&self, answer: Option<KeySet>) {
            self.0.lock().unwrap().answers = VecDeque::from([answer]);
        }

        fn questions(&self) -> usize {
            self.0.lock().unwrap().questions
        }
    }

    impl KeySetFetcher for Script {
        fn fetch(&self) -> Pin<Box<dyn Future<Output = Result<KeySet, FetchError>> + Send>> {
            let (answer, gate) = {
                let mut lines = self.0.lock().unwrap();
                lines.questions += 1;
                let answer = if lines.answers.len() > 1 {
                    lines.answers.pop_front()
                } else {
                    lines.answers.front().cloned()
                };
                (answer.flatten(), lines.gate.clone())
            };
            Box::pin(async move {
                if let Some(gate) = gate {
                    gate.notified().await;
                }
                answer.ok_or(FetchError::TimedOut)
            })
        }
    }

    fn keys(ids: &[&str]) -> Option<KeySet> {
        let all = [&*RSA_SIGNER, &*P256, &*P384];
        let jwks: Vec<_> = ids
            .iter()
            .flat_map(|id| all.iter().map(move |signer| (id, signer)))
            .map(|(id, signer)| {
                let mut jwk = signer.jwk.clone();
                jwk["kid"] = json!(id);
                jwk
            })
            .collect();
        Some(KeySet::from_json(json!({"keys": jwks}).to_string().as_bytes()).unwrap())
    }

    fn server(script: &Script) -> Arc<KeyServer> {
        Arc::new(KeyServer::new(
            "https://id.example.com".to_owned(),
            Arc::new(script.clone()),
        ))
    }

    async fn find(server: &KeyServer, id: &str) -> Result<(), NoKey> {
        server.find(Some(id), Algorithm::Rs256).await.map(|_| ())
    }

    async fn pass(time: Duration) {
        tokio::time::advance(time).await;
    }

    const MINUTE: Duration = Duration::from_secs(60);
    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn keys_are_fetched_once_an_hour() {
        let script = Script::default();
        script.says(keys(&["a"]));
        let server = server(&script);
        for _ in 0..100 {
            assert_eq!(find(&server, "a").await, Ok(()));
        }
        assert_eq!(script.questions(), 1);
        pass(HOUR - Duration::from_secs(1)).await;
        assert_eq!(find(&server, "a").await, Ok(()));
        assert_eq!(script.questions(), 1);
        pass(Duration::from_secs(2)).await;
        assert_eq!(find(&server, "a").await, Ok(()));
        assert_eq!(script.questions(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_key_is_found_and_an_old_one_is_forgotten() {
        let script = Script::default();
        script.says(keys(&["old"]));
        let server = server(&script);
        assert_eq!(find(&server, "old").await, Ok(()));
        script.says(keys(&["new"]));
        pass(MINUTE).await;
        assert_eq!(find(&server, "old").await, Ok(()), "nobody has asked yet");
        assert_eq!(find(&server, "new").await, Ok(()));
        assert_eq!(find(&server, "old").await, Err(NoKey::Unknown));
        assert_eq!(script.questions(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_unknown_ids_asks_once_a_minute() {
        let script = Script::default();
        script.says(keys(&["a"]));
        let server = server(&script);
        assert_eq!(find(&server, "a").await, Ok(()));
        for minute in 0..5 {
            for stranger in 0..200 {
                assert_eq!(
                    find(&server, &format!("x{stranger}")).await,
                    Err(NoKey::Unknown)
                );
            }
            // In the first minute the result of the first fetch is still fresh enough.
            assert_eq!(script.questions(), 1 + minute);
            assert_eq!(find(&server, "a").await, Ok(()), "others are not affected");
            pass(MINUTE).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn many_who_ask_at_once_share_one_question() {
        let script = Script::default();
        script.says(keys(&["a"]));
        let gate = Arc::new(Notify::new());
        script.0.lock().unwrap().gate = Some(gate.clone());
        let server = server(&script);
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..100 {
            let server = server.clone();
            all.spawn(async move { find(&server, "a").await });
        }
        // One of them disconnects, and the fetch continues.
        let gone = tokio::spawn({
            let server = server.clone();
            async move { find(&server, "a").await }
        });
        tokio::task::yield_now().await;
        gone.abort();
        assert!(gone.await.unwrap_err().is_cancelled());
        gate.notify_one();
        while let Some(found) = all.join_next().await {
            assert_eq!(found.unwrap(), Ok(()));
        }
        assert_eq!(script.questions(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn while_the_server_is_away_keys_are_good_for_a_day_and_then_nobody_is_let_in() {
        let script = Script::default();
        script.says(keys(&["a"]));
        let server = server(&script);
        assert_eq!(find(&server, "a").await, Ok(()));
        script.says(None);
        for _ in 0..23 {
            pass(HOUR).await;
            assert_eq!(find(&server, "a").await, Ok(()));
        }
        assert_eq!(
            find(&server, "b").await,
            Err(NoKey::Away),
            "it may exist; nobody can tell"
        );
        pass(HOUR).await;
        assert_eq!(find(&server, "a").await, Err(NoKey::Away));
        let before = script.questions();
        for _ in 0..100 {
            assert_eq!(find(&server, "a").await, Err(NoKey::Away));
        }
        assert_eq!(
            script.questions(),
            before,
            "a server that is away is not asked by everybody"
        );
        script.says(keys(&["a"]));
        pass(PAUSE_WITHOUT_KEYS).await;
        assert_eq!(find(&server, "a").await, Ok(()), "it recovers by itself");
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_is_away_from_the_start_lets_nobody_in_until_it_is_back() {
        let script = Script::default();
        script.says(None);
        let server = server(&script);
        assert_eq!(find(&server, "a").await, Err(NoKey::Away));
        script.says(keys(&["a"]));
        assert_eq!(find(&server, "a").await, Err(NoKey::Away));
        pass(PAUSE_WITHOUT_KEYS).await;
        assert_eq!(find(&server, "a").await, Ok(()));
        assert_eq!(script.questions(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_key_does_not_wait_for_a_server_that_is_known_to_be_away() {
        let script = Script::default();
        script.says(keys(&["a"]));
        let server = server(&script);
        assert_eq!(find(&server, "a").await, Ok(()));
        script.says(None);
        pass(HOUR).await;
        assert_eq!(
            find(&server, "a").await,
            Ok(()),
            "this one waited for the question that failed"
        );
        // From here on the server does not respond at all.
        script.0.lock().unwrap().gate = Some(Arc::new(Notify::new()));
        pass(MINUTE).await;
        for _ in 0..10 {
            assert_eq!(find(&server, "a").await, Ok(()));
        }
        tokio::task::yield_now().await;
        assert_eq!(script.questions(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn an_issuer_that_withdraws_all_keys_is_obeyed() {
        let script = Script::default();
        script.says(keys(&["a"]));
        let server = server(&script);
        assert_eq!(find(&server, "a").await, Ok(()));
        script.says(keys(&[]));
        pass(HOUR).await;
        assert_eq!(find(&server, "a").await, Err(NoKey::Unknown));
    }

    #[test]
    fn no_state_lets_anybody_in_without_a_key_that_is_young_enough() {
        let times = [
            None,
            Some(Duration::ZERO),
            Some(MINUTE),
            Some(HOUR),
            Some(24 * HOUR),
            Some(100 * HOUR),
        ];
        for age in times {
            for since_asked in times {
                for bits in 0..16 {
                    let (is_away, is_being_asked, is_known) =
                        (bits & 1 > 0, bits & 2 > 0, bits & 4 > 0);
                    let asked = if bits & 8 > 0 {
                        Asked::Just
                    } else {
                        Asked::NotYet
                    };
                    let view = View {
                        age,
                        since_asked,
                        is_away,
                        is_being_asked,
                        is_known,
                    };
                    let step = next_step(&view, asked);
                    let uses = matches!(step, Step::Use | Step::UseAndAsk);
                    assert!(
                        !uses || (is_known && age.is_some_and(|age| age < USABLE)),
                        "{view:?}: {step:?}"
                    );
                    assert!(
                        asked == Asked::NotYet || step != Step::Ask,
                        "{view:?}: asked for ever"
                    );
                }
            }
        }
    }
}
