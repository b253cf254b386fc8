//! The state machine of a session. It performs nothing; the driver carries out the actions.
//!
//! One request runs at a time; the others wait in the order of their arrival. Every submitted
//! request gets exactly one `Answer`, whatever else happens.
//!
//! A cell that is first in its session's queue also needs a run permit, because the number of
//! concurrent cells in the whole server is limited. It stays in the queue until it receives one.
//!
//! The state that a cell is about to change is copied first: preferably right after the previous
//! cell, when no request is waiting, and at the latest before the cell starts. The same state is
//! never copied twice.

use std::collections::VecDeque;

use super::{SessionState, StateAfter};

/// Requests that may be queued in one session. More would wait longer than any caller does.
pub(super) const MAX_WAITING: usize = 64;

/// Id of a request, and on the wire of its execution or transfer.
pub(super) type RequestId = u64;

/// Kind of a request, as far as it affects when the request may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestKind {
    /// Changes the session's state.
    Cell,
    File,
    Fork,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// An interpreter is being started: the first one of the session, or a fresh one after a reset.
    Starting {
        first: bool,
    },
    Idle,
    /// The first cell in the queue waits for a run permit among the cells of all sessions.
    Waiting,
    Running {
        request: RequestId,
        kind: RequestKind,
        stopping: Option<Stop>,
    },
    /// The interpreter is being copied: for a later undo, or for the forks of a request.
    Copying {
        fork: Option<RequestId>,
    },
    /// The current interpreter is being replaced by another one with its own state.
    Replacing,
    /// The interpreter is gone; the sandbox and its files still exist.
    Ended,
    Gone,
}

impl State {
    pub(super) fn shown(self) -> SessionState {
        match self {
            State::Starting { .. } | State::Replacing => SessionState::Starting,
            State::Idle | State::Copying { .. } => SessionState::Idle,
            State::Waiting => SessionState::Waiting,
            State::Running { .. } => SessionState::Running,
            State::Ended | State::Gone => SessionState::Ended,
        }
    }
}

/// Why a running request is being stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    TimedOut,
    Cancelled,
}

/// Input of the state machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SessionEvent {
    Submitted(RequestId, RequestKind),
    CancelAsked(RequestId),
    /// The interpreter that was being started has sent its greeting. If `copied`, a copy of its
    /// state already exists.
    Started {
        copied: bool,
    },
    StartFailed,
    /// The runner claims that a request is over.
    Finished(RequestId),
    /// The request that was to start could not, and has been answered.
    Declined(RequestId),
    /// The state differs from the last copy.
    Changed,
    /// The copying is over, with or without a copy, and so is the making of forks from it.
    Copied,
    /// Copies are impossible here, now and later.
    CopiesImpossible,
    /// The current interpreter is to be replaced by another one.
    ReplaceAsked,
    /// The waiting cell received its run permit.
    PermitGranted,
    /// Too many cells wait for a run permit.
    PermitRefused,
    TimeIsUp,
    GraceIsOver,
    InterpreterGone,
    ProtocolBroken,
    ResetAsked,
    /// The session is closed, has expired, or the server ends.
    ShutdownAsked,
}

/// Actions for the driver, carried out in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Requests a run permit for the first cell in the queue.
    RequestPermit,
    Start(RequestId),
    Copy,
    Fork(RequestId),
    Interrupt,
    Kill,
    Answer(RequestId, RequestEnd),
    Restart,
    Replace,
    RefuseReplacement,
}

/// The final answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestEnd {
    Finished,
    Stopped(Stop, StateAfter),
    InterpreterGone,
    ProtocolBroken,
    Reset,
    Closed,
    Refused(RequestRefusal),
}

/// Reason why a request was never started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestRefusal {
    Busy,
    /// Too many cells wait in the whole server.
    Overloaded,
    /// A fork was requested while a cell runs or waits.
    CellRunning,
    Cancelled,
    StartFailed,
    Ended,
    Reset,
    Closed,
}

#[derive(Debug)]
pub(super) struct Machine {
    state: State,
    queue: VecDeque<(RequestId, RequestKind)>,
    copies: Copies,
}

/// Whether the current state must be copied before a cell changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Copies {
    Off,
    Wanted,
    /// It has been copied, or an attempt failed.
    Tried,
}

impl Machine {
    /// Creates a machine whose first interpreter is being started. With `undo`, the state is copied
    /// before each cell.
    pub(super) fn new(undo: bool) -> Machine {
        let copies = if undo { Copies::Wanted } else { Copies::Off };
        Machine {
            state: State::Starting { first: true },
            queue: VecDeque::new(),
            copies,
        }
    }

    pub(super) fn state(&self) -> State {
        self.state
    }

    /// Returns the first request in the queue.
    pub(super) fn first(&self) -> Option<RequestId> {
        self.queue.front().map(|(request, _)| *request)
    }

    /// Returns whether a cell runs or waits for a run permit.
    pub(super) fn has_cell(&self) -> bool {
        matches!(
            self.state,
            State::Running {
                kind: RequestKind::Cell,
                ..
            }
        ) || self
            .queue
            .iter()
            .any(|(_, kind)| *kind == RequestKind::Cell)
    }

    /// Decides how to handle `event`.
    pub(super) fn next(&mut self, event: SessionEvent) -> Vec<Action> {
        let mut actions = Vec::new();
        match (self.state, event) {
            (State::Ended | State::Gone, SessionEvent::Submitted(request, _)) => {
                actions.push(Action::Answer(
                    request,
                    RequestEnd::Refused(RequestRefusal::Ended),
                ));
            }
            (_, SessionEvent::Submitted(request, RequestKind::Fork)) if self.has_cell() => {
                actions.push(Action::Answer(
                    request,
                    RequestEnd::Refused(RequestRefusal::CellRunning),
                ));
            }
            (State::Idle, SessionEvent::Submitted(request, kind)) => {
                self.queue.push_back((request, kind));
                self.begin_next(&mut actions);
            }
            (_, SessionEvent::Submitted(request, kind)) => {
                if self.queue.len() >= MAX_WAITING {
                    actions.push(Action::Answer(
                        request,
                        RequestEnd::Refused(RequestRefusal::Busy),
                    ));
                } else {
                    self.queue.push_back((request, kind));
                }
            }

            (
                State::Running {
                    request,
                    kind,
                    stopping: None,
                },
                SessionEvent::CancelAsked(cancelled),
            ) if request == cancelled => {
                self.state = State::Running {
                    request,
                    kind,
                    stopping: Some(Stop::Cancelled),
                };
                actions.push(Action::Interrupt);
            }
            // The copying cannot be cancelled; its result is discarded.
            (
                State::Copying {
                    fork: Some(request),
                },
                SessionEvent::CancelAsked(cancelled),
            ) if request == cancelled => {
                self.state = State::Copying { fork: None };
                actions.push(Action::Answer(
                    request,
                    RequestEnd::Refused(RequestRefusal::Cancelled),
                ));
            }
            (state, SessionEvent::CancelAsked(cancelled)) => {
                if let Some(place) = self
                    .queue
                    .iter()
                    .position(|(waiting, _)| *waiting == cancelled)
                {
                    self.queue.remove(place);
                    actions.push(Action::Answer(
                        cancelled,
                        RequestEnd::Refused(RequestRefusal::Cancelled),
                    ));
                    // If another cell is first now, it takes over the ticket.
                    if state == State::Waiting
                        && !matches!(self.queue.front(), Some((_, RequestKind::Cell)))
                    {
                        self.begin_next(&mut actions);
                    }
                }
            }

            (State::Waiting, SessionEvent::PermitGranted) => {
                if let Some((request, kind)) = self.queue.pop_front() {
                    self.state = State::Running {
                        request,
                        kind,
                        stopping: None,
                    };
                    actions.push(Action::Start(request));
                }
            }
            (State::Waiting, SessionEvent::PermitRefused) => {
                let refused = self.queue.pop_front();
                actions.extend(refused.map(|(request, _)| {
                    Action::Answer(request, RequestEnd::Refused(RequestRefusal::Overloaded))
                }));
                self.begin_next(&mut actions);
            }

            (State::Starting { .. }, SessionEvent::Started { copied }) => {
                self.want_copy();
                if copied && self.copies == Copies::Wanted {
                    self.copies = Copies::Tried;
                }
                self.begin_next(&mut actions);
            }
            (State::Replacing, SessionEvent::Started { .. }) => self.begin_next(&mut actions),
            (State::Starting { first: true }, SessionEvent::StartFailed) => {
                self.state = State::Gone;
                self.refuse_waiting(RequestRefusal::StartFailed, &mut actions);
            }
            (State::Starting { first: false } | State::Replacing, SessionEvent::StartFailed) => {
                self.state = State::Ended;
                self.refuse_waiting(RequestRefusal::StartFailed, &mut actions);
            }

            (
                State::Running {
                    request,
                    kind,
                    stopping,
                },
                SessionEvent::Finished(finished),
            ) if request == finished => {
                let answer = match stopping {
                    Some(stop) => RequestEnd::Stopped(stop, StateAfter::Kept),
                    None => RequestEnd::Finished,
                };
                actions.push(Action::Answer(request, answer));
                if kind == RequestKind::Cell
                    && self.queue.is_empty()
                    && self.copies == Copies::Wanted
                {
                    self.copy(&mut actions);
                } else {
                    self.begin_next(&mut actions);
                }
            }
            (State::Running { request, .. }, SessionEvent::Declined(declined))
                if request == declined =>
            {
                self.begin_next(&mut actions);
            }
            (
                State::Running {
                    request,
                    kind,
                    stopping: None,
                },
                SessionEvent::TimeIsUp,
            ) => {
                self.state = State::Running {
                    request,
                    kind,
                    stopping: Some(Stop::TimedOut),
                };
                actions.push(Action::Interrupt);
            }
            (
                State::Running {
                    request,
                    stopping: Some(stop),
                    ..
                },
                SessionEvent::GraceIsOver,
            ) => {
                actions.push(Action::Kill);
                self.end(
                    Some((request, RequestEnd::Stopped(stop, StateAfter::Lost))),
                    &mut actions,
                );
            }

            (_, SessionEvent::Changed) => self.want_copy(),
            (_, SessionEvent::CopiesImpossible) => self.copies = Copies::Off,
            (State::Copying { fork }, SessionEvent::Copied) => {
                actions.extend(fork.map(|request| Action::Answer(request, RequestEnd::Finished)));
                self.begin_next(&mut actions);
            }
            (
                State::Idle | State::Ended | State::Copying { fork: None },
                SessionEvent::ReplaceAsked,
            ) => {
                if self.copies == Copies::Wanted {
                    self.copies = Copies::Tried;
                }
                self.state = State::Replacing;
                actions.push(Action::Replace);
            }
            (_, SessionEvent::ReplaceAsked) => actions.push(Action::RefuseReplacement),

            (
                State::Running {
                    request, stopping, ..
                },
                SessionEvent::InterpreterGone,
            ) => {
                let answer = match stopping {
                    Some(stop) => RequestEnd::Stopped(stop, StateAfter::Lost),
                    None => RequestEnd::InterpreterGone,
                };
                self.end(Some((request, answer)), &mut actions);
            }
            (State::Idle | State::Waiting, SessionEvent::InterpreterGone) => {
                self.end(None, &mut actions)
            }
            (State::Copying { fork }, SessionEvent::InterpreterGone) => {
                self.end(
                    fork.map(|request| (request, RequestEnd::InterpreterGone)),
                    &mut actions,
                );
            }
            (State::Running { request, .. }, SessionEvent::ProtocolBroken) => {
                actions.push(Action::Kill);
                self.end(Some((request, RequestEnd::ProtocolBroken)), &mut actions);
            }
            (State::Idle | State::Waiting, SessionEvent::ProtocolBroken) => {
                actions.push(Action::Kill);
                self.end(None, &mut actions);
            }
            (State::Copying { fork }, SessionEvent::ProtocolBroken) => {
                actions.push(Action::Kill);
                self.end(
                    fork.map(|request| (request, RequestEnd::ProtocolBroken)),
                    &mut actions,
                );
            }

            (State::Starting { .. }, SessionEvent::ResetAsked) => {
                self.refuse_waiting(RequestRefusal::Reset, &mut actions)
            }
            (
                State::Idle
                | State::Waiting
                | State::Running { .. }
                | State::Copying { .. }
                | State::Replacing
                | State::Ended,
                SessionEvent::ResetAsked,
            ) => {
                actions.extend(
                    self.under_way()
                        .map(|request| Action::Answer(request, RequestEnd::Reset)),
                );
                self.refuse_waiting(RequestRefusal::Reset, &mut actions);
                self.state = State::Starting { first: false };
                actions.push(Action::Restart);
            }

            (_, SessionEvent::ShutdownAsked) => {
                actions.extend(
                    self.under_way()
                        .map(|request| Action::Answer(request, RequestEnd::Closed)),
                );
                self.refuse_waiting(RequestRefusal::Closed, &mut actions);
                self.state = State::Gone;
            }

            // The remaining events come too late or are false claims: the end of a request that
            // does not run, or a timeout of one.
            (
                _,
                SessionEvent::Started { .. }
                | SessionEvent::StartFailed
                | SessionEvent::Finished(_)
                | SessionEvent::Declined(_)
                | SessionEvent::Copied
                | SessionEvent::PermitGranted
                | SessionEvent::PermitRefused
                | SessionEvent::TimeIsUp
                | SessionEvent::GraceIsOver,
            )
            | (
                State::Starting { .. } | State::Replacing | State::Ended | State::Gone,
                SessionEvent::InterpreterGone | SessionEvent::ProtocolBroken,
            )
            | (State::Gone, SessionEvent::ResetAsked) => {}
        }
        actions
    }

    /// Returns the request that is being carried out.
    fn under_way(&self) -> Option<RequestId> {
        match self.state {
            State::Running { request, .. } => Some(request),
            State::Copying { fork } => fork,
            _ => None,
        }
    }

    fn want_copy(&mut self) {
        if self.copies == Copies::Tried {
            self.copies = Copies::Wanted;
        }
    }

    fn copy(&mut self, actions: &mut Vec<Action>) {
        self.copies = Copies::Tried;
        self.state = State::Copying { fork: None };
        actions.push(Action::Copy);
    }

    fn begin_next(&mut self, actions: &mut Vec<Action>) {
        if let Some((_, RequestKind::Cell)) = self.queue.front() {
            if self.copies == Copies::Wanted {
                return self.copy(actions);
            }
            self.state = State::Waiting;
            return actions.push(Action::RequestPermit);
        }
        self.state = match self.queue.pop_front() {
            Some((request, RequestKind::Fork)) => {
                actions.push(Action::Fork(request));
                State::Copying {
                    fork: Some(request),
                }
            }
            Some((request, kind)) => {
                actions.push(Action::Start(request));
                State::Running {
                    request,
                    kind,
                    stopping: None,
                }
            }
            None => State::Idle,
        };
    }

    fn end(&mut self, running: Option<(RequestId, RequestEnd)>, actions: &mut Vec<Action>) {
        if let Some((request, answer)) = running {
            actions.push(Action::Answer(request, answer));
        }
        self.state = State::Ended;
        self.refuse_waiting(RequestRefusal::Ended, actions);
    }

    fn refuse_waiting(&mut self, refusal: RequestRefusal, actions: &mut Vec<Action>) {
        actions.extend(
            self.queue
                .drain(..)
                .map(|(request, _)| Action::Answer(request, RequestEnd::Refused(refusal))),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const RUNNING: State = State::Running {
        request: 1,
        kind: RequestKind::File,
        stopping: None,
    };
    const CELL: State = State::Running {
        request: 1,
        kind: RequestKind::Cell,
        stopping: None,
    };
    const STOPPING: State = State::Running {
        request: 1,
        kind: RequestKind::Cell,
        stopping: Some(Stop::TimedOut),
    };
    const STARTING: State = State::Starting { first: true };
    const RESTARTING: State = State::Starting { first: false };
    const COPYING: State = State::Copying { fork: None };
    const FORKING: State = State::Copying { fork: Some(1) };
    const STATES: [State; 12] = [
        STARTING,
        RESTARTING,
        State::Idle,
        State::Waiting,
        RUNNING,
        CELL,
        STOPPING,
        COPYING,
        FORKING,
        State::Replacing,
        State::Ended,
        State::Gone,
    ];

    fn waits(state: State) -> bool {
        !matches!(state, State::Idle | State::Ended | State::Gone)
    }

    /// Puts a machine without copies into `state`, with request 2 waiting where requests can wait:
    /// a file, or the cell that waits for a run permit.
    fn machine(state: State) -> Machine {
        let kind = if state == State::Waiting {
            RequestKind::Cell
        } else {
            RequestKind::File
        };
        let queue = if waits(state) {
            VecDeque::from([(2, kind)])
        } else {
            VecDeque::new()
        };
        Machine {
            state,
            queue,
            copies: Copies::Off,
        }
    }

    fn check(state: State, event: SessionEvent, expected: State, actions: &[Action]) {
        let mut machine = machine(state);
        assert_eq!(
            (machine.next(event), machine.state),
            (actions.to_vec(), expected),
            "{state:?} and {event:?}"
        );
    }

    /// Puts a machine with copies into `state`, applies `events`, and checks the resulting actions.
    fn check_copies(
        state: State,
        copies: Copies,
        queue: &[(RequestId, RequestKind)],
        events: &[SessionEvent],
        expected: &[Action],
    ) {
        let mut machine = Machine {
            state,
            queue: queue.iter().copied().collect(),
            copies,
        };
        let actions = events
            .iter()
            .flat_map(|event| machine.next(*event))
            .collect::<Vec<_>>();
        assert_eq!(
            actions, expected,
            "{state:?}, {copies:?}, {queue:?} and {events:?}"
        );
    }

    fn refused(refusal: RequestRefusal) -> Action {
        Action::Answer(2, RequestEnd::Refused(refusal))
    }

    fn answer(answer: RequestEnd) -> Action {
        Action::Answer(1, answer)
    }

    fn running(request: RequestId, kind: RequestKind) -> State {
        State::Running {
            request,
            kind,
            stopping: None,
        }
    }

    #[test]
    fn a_submitted_request_runs_waits_or_is_refused() {
        let ended = [Action::Answer(
            3,
            RequestEnd::Refused(RequestRefusal::Ended),
        )];
        for kind in [RequestKind::Cell, RequestKind::File] {
            let submitted = SessionEvent::Submitted(3, kind);
            for state in STATES {
                match state {
                    State::Idle if kind == RequestKind::Cell => {
                        check(state, submitted, State::Waiting, &[Action::RequestPermit])
                    }
                    State::Idle => check(state, submitted, running(3, kind), &[Action::Start(3)]),
                    State::Ended | State::Gone => check(state, submitted, state, &ended),
                    _ => check(state, submitted, state, &[]),
                }
            }
        }
    }

    #[test]
    fn a_fork_is_made_waits_or_is_refused_while_a_cell_runs() {
        let submitted = SessionEvent::Submitted(3, RequestKind::Fork);
        let refusal = |refusal| [Action::Answer(3, RequestEnd::Refused(refusal))];
        for state in STATES {
            match state {
                State::Idle => check(
                    state,
                    submitted,
                    State::Copying { fork: Some(3) },
                    &[Action::Fork(3)],
                ),
                State::Ended | State::Gone => {
                    check(state, submitted, state, &refusal(RequestRefusal::Ended))
                }
                CELL | STOPPING | State::Waiting => {
                    check(
                        state,
                        submitted,
                        state,
                        &refusal(RequestRefusal::CellRunning),
                    );
                }
                _ => check(state, submitted, state, &[]),
            }
        }
        let waiting = [(2, RequestKind::Cell)];
        check_copies(
            COPYING,
            Copies::Tried,
            &waiting,
            &[submitted],
            &refusal(RequestRefusal::CellRunning),
        );
        check_copies(
            STARTING,
            Copies::Tried,
            &[],
            &[submitted, SessionEvent::Started { copied: false }],
            &[Action::Fork(3)],
        );
    }

    #[test]
    fn more_waiting_requests_than_allowed_are_refused() {
        let mut machine = Machine::new(true);
        for request in 0..MAX_WAITING as u64 {
            assert_eq!(
                machine.next(SessionEvent::Submitted(request, RequestKind::Cell)),
                []
            );
        }
        let one_more = SessionEvent::Submitted(99, RequestKind::Cell);
        assert_eq!(
            machine.next(one_more),
            [Action::Answer(
                99,
                RequestEnd::Refused(RequestRefusal::Busy)
            )]
        );
    }

    #[test]
    fn a_waiting_request_is_cancelled_without_running() {
        for state in STATES {
            match waits(state) {
                true if state == State::Waiting => {
                    check(
                        state,
                        SessionEvent::CancelAsked(2),
                        State::Idle,
                        &[refused(RequestRefusal::Cancelled)],
                    );
                }
                true => check(
                    state,
                    SessionEvent::CancelAsked(2),
                    state,
                    &[refused(RequestRefusal::Cancelled)],
                ),
                false => check(state, SessionEvent::CancelAsked(2), state, &[]),
            }
            check(state, SessionEvent::CancelAsked(77), state, &[]);
        }
    }

    #[test]
    fn a_cell_starts_when_its_turn_comes_and_not_before() {
        for state in STATES {
            match state {
                State::Waiting => {
                    check(
                        state,
                        SessionEvent::PermitGranted,
                        running(2, RequestKind::Cell),
                        &[Action::Start(2)],
                    );
                    check(
                        state,
                        SessionEvent::PermitRefused,
                        State::Idle,
                        &[refused(RequestRefusal::Overloaded)],
                    );
                }
                _ => {
                    check(state, SessionEvent::PermitGranted, state, &[]);
                    check(state, SessionEvent::PermitRefused, state, &[]);
                }
            }
        }
    }

    #[test]
    fn when_the_first_waiting_cell_is_cancelled_the_next_one_has_its_turn_and_a_file_needs_none() {
        let cancelled = refused(RequestRefusal::Cancelled);
        let cancel = SessionEvent::CancelAsked(2);
        let cells = [(2, RequestKind::Cell), (3, RequestKind::Cell)];
        check_copies(
            State::Waiting,
            Copies::Off,
            &cells,
            &[cancel, SessionEvent::PermitGranted],
            &[cancelled, Action::Start(3)],
        );
        check_copies(
            State::Waiting,
            Copies::Off,
            &cells,
            &[SessionEvent::CancelAsked(3), cancel],
            &[
                Action::Answer(3, RequestEnd::Refused(RequestRefusal::Cancelled)),
                cancelled,
            ],
        );
        let file = [(2, RequestKind::Cell), (3, RequestKind::File)];
        check_copies(
            State::Waiting,
            Copies::Off,
            &file,
            &[cancel],
            &[cancelled, Action::Start(3)],
        );
    }

    #[test]
    fn a_running_request_is_interrupted_once() {
        for kind in [RequestKind::Cell, RequestKind::File] {
            let stopping = |stop| State::Running {
                request: 1,
                kind,
                stopping: Some(stop),
            };
            check(
                running(1, kind),
                SessionEvent::CancelAsked(1),
                stopping(Stop::Cancelled),
                &[Action::Interrupt],
            );
            check(
                running(1, kind),
                SessionEvent::TimeIsUp,
                stopping(Stop::TimedOut),
                &[Action::Interrupt],
            );
        }
        check(STOPPING, SessionEvent::CancelAsked(1), STOPPING, &[]);
        check(STOPPING, SessionEvent::TimeIsUp, STOPPING, &[]);
        for state in STATES
            .into_iter()
            .filter(|state| !matches!(state, State::Running { .. }))
        {
            check(state, SessionEvent::TimeIsUp, state, &[]);
        }
    }

    #[test]
    fn a_fork_that_is_cancelled_is_answered_at_once_and_its_copying_goes_on() {
        let cancelled = answer(RequestEnd::Refused(RequestRefusal::Cancelled));
        check(FORKING, SessionEvent::CancelAsked(1), COPYING, &[cancelled]);
        check(COPYING, SessionEvent::CancelAsked(1), COPYING, &[]);
    }

    #[test]
    fn a_started_interpreter_takes_the_first_waiting_request() {
        for state in STATES {
            match state {
                State::Starting { .. } | State::Replacing => {
                    check(
                        state,
                        SessionEvent::Started { copied: false },
                        running(2, RequestKind::File),
                        &[Action::Start(2)],
                    );
                }
                _ => check(state, SessionEvent::Started { copied: false }, state, &[]),
            }
        }
    }

    #[test]
    fn a_failed_start_ends_a_new_session_and_keeps_the_files_of_an_old_one() {
        for state in STATES {
            let failed = [refused(RequestRefusal::StartFailed)];
            match state {
                STARTING => check(state, SessionEvent::StartFailed, State::Gone, &failed),
                RESTARTING | State::Replacing => {
                    check(state, SessionEvent::StartFailed, State::Ended, &failed)
                }
                _ => check(state, SessionEvent::StartFailed, state, &[]),
            }
        }
    }

    #[test]
    fn only_the_end_of_the_running_request_counts() {
        for state in [RUNNING, CELL] {
            let actions = [answer(RequestEnd::Finished), Action::Start(2)];
            check(
                state,
                SessionEvent::Finished(1),
                running(2, RequestKind::File),
                &actions,
            );
        }
        let kept = answer(RequestEnd::Stopped(Stop::TimedOut, StateAfter::Kept));
        check(
            STOPPING,
            SessionEvent::Finished(1),
            running(2, RequestKind::File),
            &[kept, Action::Start(2)],
        );
        check(FORKING, SessionEvent::Finished(1), FORKING, &[]);
        for state in STATES {
            check(state, SessionEvent::Finished(77), state, &[]);
            check(state, SessionEvent::Finished(2), state, &[]);
        }
    }

    #[test]
    fn when_the_copying_is_over_its_forks_are_handed_out_and_the_next_request_begins() {
        for state in STATES {
            match state {
                COPYING => check(
                    state,
                    SessionEvent::Copied,
                    running(2, RequestKind::File),
                    &[Action::Start(2)],
                ),
                FORKING => {
                    let actions = [answer(RequestEnd::Finished), Action::Start(2)];
                    check(
                        state,
                        SessionEvent::Copied,
                        running(2, RequestKind::File),
                        &actions,
                    );
                }
                _ => check(state, SessionEvent::Copied, state, &[]),
            }
        }
    }

    #[test]
    fn the_state_is_copied_before_a_cell_and_not_before_a_file_or_a_fork() {
        let cell = [
            SessionEvent::Submitted(3, RequestKind::Cell),
            SessionEvent::Copied,
        ];
        let file = [SessionEvent::Submitted(3, RequestKind::File)];
        check_copies(
            State::Idle,
            Copies::Wanted,
            &[],
            &cell,
            &[Action::Copy, Action::RequestPermit],
        );
        check_copies(
            State::Idle,
            Copies::Tried,
            &[],
            &cell[..1],
            &[Action::RequestPermit],
        );
        check_copies(
            State::Idle,
            Copies::Off,
            &[],
            &cell[..1],
            &[Action::RequestPermit],
        );
        check_copies(State::Idle, Copies::Wanted, &[], &file, &[Action::Start(3)]);
        let fork = [SessionEvent::Submitted(3, RequestKind::Fork)];
        check_copies(State::Idle, Copies::Wanted, &[], &fork, &[Action::Fork(3)]);
    }

    #[test]
    fn the_state_is_copied_after_a_cell_that_changed_it_when_nobody_waits() {
        let finished = answer(RequestEnd::Finished);
        let changed = [SessionEvent::Changed, SessionEvent::Finished(1)];
        check_copies(
            CELL,
            Copies::Tried,
            &[],
            &changed,
            &[finished, Action::Copy],
        );
        check_copies(CELL, Copies::Tried, &[], &changed[1..], &[finished]);
        check_copies(CELL, Copies::Off, &[], &changed, &[finished]);
        check_copies(
            CELL,
            Copies::Tried,
            &[(2, RequestKind::File)],
            &changed,
            &[finished, Action::Start(2)],
        );
        check_copies(
            CELL,
            Copies::Tried,
            &[(2, RequestKind::Cell)],
            &changed,
            &[finished, Action::Copy],
        );
        check_copies(RUNNING, Copies::Tried, &[], &changed, &[finished]);
    }

    #[test]
    fn the_same_state_is_never_copied_twice() {
        let twice = [
            SessionEvent::Submitted(3, RequestKind::Cell),
            SessionEvent::Copied,
            SessionEvent::PermitGranted,
            SessionEvent::Finished(3),
            SessionEvent::Submitted(4, RequestKind::Cell),
        ];
        let finished = Action::Answer(3, RequestEnd::Finished);
        let actions = [
            Action::Copy,
            Action::RequestPermit,
            Action::Start(3),
            finished,
            Action::RequestPermit,
        ];
        check_copies(State::Idle, Copies::Wanted, &[], &twice, &actions);
    }

    #[test]
    fn a_fresh_interpreter_is_copied_before_its_first_cell_and_a_restored_one_is_not() {
        let cell = [(2, RequestKind::Cell)];
        for state in [STARTING, RESTARTING] {
            check_copies(
                state,
                Copies::Tried,
                &cell,
                &[SessionEvent::Started { copied: false }],
                &[Action::Copy],
            );
            check_copies(
                state,
                Copies::Tried,
                &[],
                &[SessionEvent::Started { copied: false }],
                &[],
            );
        }
        let restored = [
            SessionEvent::ReplaceAsked,
            SessionEvent::Started { copied: false },
            SessionEvent::Submitted(3, RequestKind::Cell),
        ];
        check_copies(
            State::Ended,
            Copies::Wanted,
            &[],
            &restored,
            &[Action::Replace, Action::RequestPermit],
        );
        let adopted = [
            SessionEvent::ReplaceAsked,
            SessionEvent::Changed,
            SessionEvent::Started { copied: false },
            SessionEvent::Submitted(3, RequestKind::Cell),
        ];
        check_copies(
            State::Idle,
            Copies::Tried,
            &[],
            &adopted,
            &[Action::Replace, Action::Copy],
        );
    }

    #[test]
    fn where_nothing_can_be_copied_it_is_not_tried_again() {
        let events = [
            SessionEvent::CopiesImpossible,
            SessionEvent::Copied,
            SessionEvent::PermitGranted,
            SessionEvent::Changed,
            SessionEvent::Finished(2),
        ];
        let actions = [
            Action::RequestPermit,
            Action::Start(2),
            Action::Answer(2, RequestEnd::Finished),
        ];
        check_copies(
            COPYING,
            Copies::Tried,
            &[(2, RequestKind::Cell)],
            &events,
            &actions,
        );
    }

    #[test]
    fn an_interpreter_is_replaced_when_nothing_runs() {
        for state in STATES {
            match state {
                State::Idle | COPYING | State::Ended => {
                    check(
                        state,
                        SessionEvent::ReplaceAsked,
                        State::Replacing,
                        &[Action::Replace],
                    );
                }
                _ => check(
                    state,
                    SessionEvent::ReplaceAsked,
                    state,
                    &[Action::RefuseReplacement],
                ),
            }
        }
    }

    #[test]
    fn code_that_ignores_the_interrupt_loses_its_state() {
        let lost = answer(RequestEnd::Stopped(Stop::TimedOut, StateAfter::Lost));
        check(
            STOPPING,
            SessionEvent::GraceIsOver,
            State::Ended,
            &[Action::Kill, lost, refused(RequestRefusal::Ended)],
        );
        check(
            STOPPING,
            SessionEvent::InterpreterGone,
            State::Ended,
            &[lost, refused(RequestRefusal::Ended)],
        );
        for state in STATES.into_iter().filter(|state| *state != STOPPING) {
            check(state, SessionEvent::GraceIsOver, state, &[]);
        }
    }

    #[test]
    fn the_end_of_the_interpreter_ends_the_session_and_not_its_files() {
        let gone = [
            answer(RequestEnd::InterpreterGone),
            refused(RequestRefusal::Ended),
        ];
        for state in STATES {
            match state {
                RUNNING | CELL | FORKING => {
                    check(state, SessionEvent::InterpreterGone, State::Ended, &gone)
                }
                COPYING => check(
                    state,
                    SessionEvent::InterpreterGone,
                    State::Ended,
                    &gone[1..],
                ),
                State::Waiting => check(
                    state,
                    SessionEvent::InterpreterGone,
                    State::Ended,
                    &gone[1..],
                ),
                State::Idle => check(state, SessionEvent::InterpreterGone, State::Ended, &[]),
                STOPPING => {}
                _ => check(state, SessionEvent::InterpreterGone, state, &[]),
            }
        }
    }

    #[test]
    fn a_broken_protocol_kills_the_interpreter() {
        for state in STATES {
            let broken = [
                Action::Kill,
                answer(RequestEnd::ProtocolBroken),
                refused(RequestRefusal::Ended),
            ];
            match state {
                State::Running { .. } | FORKING => {
                    check(state, SessionEvent::ProtocolBroken, State::Ended, &broken)
                }
                COPYING | State::Waiting => {
                    check(
                        state,
                        SessionEvent::ProtocolBroken,
                        State::Ended,
                        &[Action::Kill, broken[2]],
                    );
                }
                State::Idle => check(
                    state,
                    SessionEvent::ProtocolBroken,
                    State::Ended,
                    &[Action::Kill],
                ),
                _ => check(state, SessionEvent::ProtocolBroken, state, &[]),
            }
        }
    }

    #[test]
    fn a_reset_acts_at_once_in_every_state() {
        for state in STATES {
            let actions = [
                answer(RequestEnd::Reset),
                refused(RequestRefusal::Reset),
                Action::Restart,
            ];
            match state {
                State::Running { .. } | FORKING => {
                    check(state, SessionEvent::ResetAsked, RESTARTING, &actions)
                }
                COPYING | State::Replacing | State::Waiting => {
                    check(state, SessionEvent::ResetAsked, RESTARTING, &actions[1..]);
                }
                State::Idle | State::Ended => check(
                    state,
                    SessionEvent::ResetAsked,
                    RESTARTING,
                    &[Action::Restart],
                ),
                State::Starting { .. } => check(
                    state,
                    SessionEvent::ResetAsked,
                    state,
                    &[refused(RequestRefusal::Reset)],
                ),
                _ => check(state, SessionEvent::ResetAsked, state, &[]),
            }
        }
    }

    #[test]
    fn leaving_answers_everybody() {
        for state in STATES {
            let actions = [answer(RequestEnd::Closed), refused(RequestRefusal::Closed)];
            match state {
                State::Running { .. } | FORKING => {
                    check(state, SessionEvent::ShutdownAsked, State::Gone, &actions)
                }
                state if waits(state) => check(
                    state,
                    SessionEvent::ShutdownAsked,
                    State::Gone,
                    &actions[1..],
                ),
                _ => check(state, SessionEvent::ShutdownAsked, State::Gone, &[]),
            }
        }
    }

    /// An event; the id of a submitted request is chosen later.
    #[derive(Debug, Clone)]
    enum Step {
        Submit(RequestKind),
        Happen(SessionEvent),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => prop::sample::select(vec![RequestKind::Cell, RequestKind::File, RequestKind::Fork])
                .prop_map(Step::Submit),
            1 => (0u64..40).prop_map(|request| Step::Happen(SessionEvent::CancelAsked(request))),
            3 => (0u64..40).prop_map(|request| Step::Happen(SessionEvent::Finished(request))),
            5 => prop::sample::select(vec![
                SessionEvent::Started { copied: false }, SessionEvent::StartFailed,
                SessionEvent::TimeIsUp, SessionEvent::GraceIsOver, SessionEvent::InterpreterGone,
                SessionEvent::ProtocolBroken, SessionEvent::ResetAsked, SessionEvent::Changed,
                SessionEvent::Copied, SessionEvent::Copied, SessionEvent::PermitGranted,
                SessionEvent::PermitGranted, SessionEvent::PermitGranted,
                SessionEvent::PermitRefused, SessionEvent::CopiesImpossible,
                SessionEvent::ReplaceAsked,
            ]).prop_map(Step::Happen),
        ]
    }

    proptest! {
        #[test]
        fn every_request_gets_exactly_one_answer(
            steps in prop::collection::vec(step(), 0..120), undo: bool
        ) {
            let mut machine = Machine::new(undo);
            let mut answers = BTreeMap::new();
            let mut running = None;
            let submitted =
                steps.iter().filter(|step| matches!(step, Step::Submit(_))).count() as u64;
            let mut next = 0;
            for step in steps.into_iter().chain([Step::Happen(SessionEvent::ShutdownAsked)]) {
                let event = match step {
                    Step::Submit(kind) => { next += 1; SessionEvent::Submitted(next - 1, kind) }
                    Step::Happen(event) => event,
                };
                for action in machine.next(event) {
                    match action {
                        Action::Start(request) | Action::Fork(request) => {
                            prop_assert_eq!(running, None, "two requests run at once");
                            prop_assert!(!answers.contains_key(&request));
                            running = Some(request);
                        }
                        Action::Copy => {
                            prop_assert!(undo, "nobody wants copies");
                            prop_assert_eq!(running, None, "a copy is made while a request runs");
                        }
                        Action::Answer(request, _) => {
                            *answers.entry(request).or_insert(0) += 1;
                            running = running.filter(|known| *known != request);
                        }
                        _ => {}
                    }
                }
            }
            prop_assert_eq!(answers.len() as u64, submitted);
            prop_assert!(answers.values().all(|count| *count == 1));
        }
    }
}
