//! Decodes large texts away from the async workers.
//!
//! A worker that decodes 32 MiB serves no other task meanwhile. So large texts are decoded on
//! threads for blocking work, and only `AT_ONCE` of them at a time: callers that send many large
//! texts wait for each other, and other callers do not wait for them.

use std::future;
use std::pin::Pin;

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Semaphore;
use tokio::task;

use crate::budget::{Budget, MAX_DEPTH};

/// Size limit of a text that is decoded on the current thread.
const SMALL: usize = 64 * 1024;
/// The same limit for the memory of its structure, which takes more time than text.
const SMALL_STRUCTURE: usize = 512 * 1024;
/// Number of large texts decoded at the same time.
const AT_ONCE: usize = 2;

static TURNS: Semaphore = Semaphore::const_new(AT_ONCE);

/// A decoding in progress. It can be stored and polled again after other work, so that order is
/// preserved.
pub type Decoding<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Returns whether a text is decoded within about a millisecond.
pub fn is_small(text: &[u8]) -> bool {
    text.len() <= SMALL
        && Budget {
            depth: MAX_DEPTH,
            memory: SMALL_STRUCTURE,
        }
        .check(text)
        .is_ok()
}

/// Decodes a text: a small one at once, a large one on another thread. Dropping the future discards
/// the result.
pub fn decoding<I, T>(
    is_small: bool,
    input: I,
    decode: impl FnOnce(I) -> T + Send + 'static,
) -> Decoding<T>
where
    I: Send + 'static,
    T: Send + 'static,
{
    if is_small {
        return Box::pin(future::ready(decode(input)));
    }
    Box::pin(async move {
        let turn = TURNS.acquire().await;
        match task::spawn_blocking(move || decode(input)).await {
            Ok(decoded) => {
                drop(turn);
                decoded
            }
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The runtime is shutting down, and the result is no longer needed.
            Err(_) => future::pending().await,
        }
    })
}

/// Decodes a large text on the current thread, for callers that cannot wait. Other tasks of this
/// worker move to another thread.
pub fn decode_now<T>(decode: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|handle| handle.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => task::block_in_place(decode),
        _ => decode(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, mpsc};
    use std::thread;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_large_text_holds_no_worker_and_a_small_one_is_decoded_at_once() {
        let worker = thread::current().id();
        let (release, released) = mpsc::channel::<()>();
        let large = tokio::spawn(decoding(false, (), move |()| {
            released.recv().unwrap();
            thread::current().id()
        }));
        // The only worker is free while the large text is being decoded.
        let small = tokio::spawn(async { decoding(true, (), |()| thread::current().id()).await })
            .await
            .unwrap();
        release.send(()).unwrap();
        let large = large.await.unwrap();
        assert_ne!(large, small);
        assert_ne!(large, worker);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn only_so_many_are_decoded_at_once() {
        let (under_way, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let tasks = (0..20).map(|_| {
            let (under_way, most) = (under_way.clone(), most.clone());
            tokio::spawn(decoding(false, (), move |()| {
                most.fetch_max(
                    under_way.fetch_add(1, Ordering::SeqCst) + 1,
                    Ordering::SeqCst,
                );
                thread::yield_now();
                under_way.fetch_sub(1, Ordering::SeqCst);
            }))
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        assert!(most.load(Ordering::SeqCst) <= AT_ONCE);
    }

    #[test]
    fn structure_makes_a_short_text_large() {
        assert!(is_small(&[b' '; SMALL]));
        assert!(!is_small(&[b' '; SMALL + 1]));
        assert!(is_small("{},".repeat(500).as_bytes()));
        assert!(!is_small("{},".repeat(1000).as_bytes()));
        assert!(!is_small("[".repeat(1000).as_bytes()));
    }

    #[tokio::test]
    async fn a_panic_reaches_whoever_waits() {
        let failed = tokio::spawn(decoding(false, (), |()| panic!("of the test"))).await;
        assert!(failed.unwrap_err().is_panic());
        // Its permit is free again.
        for _ in 0..=AT_ONCE {
            assert_eq!(decoding(false, 1, |one| one + 1).await, 2);
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn decoding_now_lets_other_tasks_of_the_worker_go_on() {
        let (told, hears) = mpsc::channel::<()>();
        let decoded = tokio::spawn(async move {
            tokio::spawn(async move { told.send(()).unwrap() });
            decode_now(move || hears.recv().is_ok())
        });
        assert!(decoded.await.unwrap());
    }
}
