//! The pool: empty sandboxes, and warm sessions in sandboxes.
//!
//! A warm session answers its first cell at once; an empty sandbox saves most of the work when a
//! burst has emptied the pool. Both are refilled in the background. A sandbox that ran a user's
//! code never enters the pool.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

use tokio::sync::Notify;

use super::sandbox::NativeSandbox;
use crate::sandbox::Interpreter;

/// The waiting members.
#[derive(Default)]
pub(super) struct NativePool {
    waiting: Mutex<Waiting>,
    taken: Notify,
}

#[derive(Default)]
struct Waiting {
    warm: VecDeque<(NativeSandbox, Interpreter)>,
    empty: VecDeque<NativeSandbox>,
    closed: bool,
}

/// The kind of member that is missing most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MissingMember {
    Warm,
    Empty,
}

impl NativePool {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().expect("no holder of the pool panics")
    }

    /// Takes a warm session. One that has died in the meantime is never returned.
    pub(super) fn take_warm(&self) -> Option<(NativeSandbox, Interpreter)> {
        let taken = loop {
            let (sandbox, interpreter) = self.waiting().warm.pop_front()?;
            if sandbox.is_alive() {
                break (sandbox, interpreter);
            }
        };
        self.taken.notify_one();
        Some(taken)
    }

    pub(super) fn take_empty(&self) -> Option<NativeSandbox> {
        let taken = loop {
            let sandbox = self.waiting().empty.pop_front()?;
            if sandbox.is_alive() {
                break sandbox;
            }
        };
        self.taken.notify_one();
        Some(taken)
    }

    /// Adds a warm session. After `close` it is dropped, and thereby destroyed.
    pub(super) fn add_warm(&self, member: (NativeSandbox, Interpreter)) {
        let mut waiting = self.waiting();
        if !waiting.closed {
            waiting.warm.push_back(member);
        }
    }

    pub(super) fn add_empty(&self, sandbox: NativeSandbox) {
        let mut waiting = self.waiting();
        if !waiting.closed {
            waiting.empty.push_back(sandbox);
        }
    }

    /// Returns which kind is missing to reach these numbers of warm sessions and empty sandboxes.
    pub(super) fn missing(&self, warm: usize, empty: usize) -> Option<MissingMember> {
        let waiting = self.waiting();
        if waiting.closed {
            None
        } else if waiting.warm.len() < warm {
            Some(MissingMember::Warm)
        } else if waiting.empty.len() < empty {
            Some(MissingMember::Empty)
        } else {
            None
        }
    }

    /// Waits until a member was taken.
    pub(super) async fn taken(&self) {
        self.taken.notified().await;
    }

    pub(super) fn is_closed(&self) -> bool {
        self.waiting().closed
    }

    /// Destroys the waiting members and accepts no more.
    pub(super) fn close(&self) {
        self.waiting().closed = true;
        self.clear();
        self.taken.notify_one();
    }

    /// Destroys the waiting members.
    pub(super) fn clear(&self) {
        let mut waiting = self.waiting();
        let members = (
            std::mem::take(&mut waiting.warm),
            std::mem::take(&mut waiting.empty),
        );
        drop(waiting);
        drop(members);
    }
}
