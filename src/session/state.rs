//! What a session does about what happens to it. Nothing is performed here; the driver carries out the actions.
//!
//! One request runs at a time, the others wait in the order of their arrival. Every request that comes in gets exactly one `Answer`,
//! whatever else happens.

use std::collections::VecDeque;

use super::StateAfter;

/// Requests that may wait for one session. More would wait longer than any caller does.
pub(super) const MOST_WAITING: usize = 64;

/// Names a request, and on the wire its execution or transfer.
pub(super) type RequestId = u64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// An interpreter is being started: the first one of the session, or a fresh one after a reset.
    Starting {
        first: bool,
    },
    Idle,
    Running {
        request: RequestId,
        stopping: Option<Stop>,
    },
    /// The interpreter is gone; the sandbox and its files are there.
    Ended,
    Gone,
}

impl State {
    pub(super) fn name(self) -> &'static str {
        match self {
            State::Starting { .. } => "starting",
            State::Idle => "idle",
            State::Running { .. } => "running",
            State::Ended | State::Gone => "ended",
        }
    }
}

/// Why a running request is being stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    TimedOut,
    Cancelled,
}

/// What happens to a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    Submitted(RequestId),
    CancelAsked(RequestId),
    /// The interpreter that was being started has greeted.
    Started,
    StartFailed,
    /// The runner claims that a request is over.
    Finished(RequestId),
    TimeIsUp,
    GraceIsOver,
    InterpreterGone,
    ProtocolBroken,
    ResetAsked,
    /// It is closed, has expired, or the server ends.
    LeaveAsked,
}

/// What the driver does, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Start(RequestId),
    Interrupt,
    Kill,
    Answer(RequestId, Answer),
    Restart,
}

/// The one ending of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Finished,
    Stopped(Stop, StateAfter),
    InterpreterGone,
    ProtocolBroken,
    Reset,
    Closed,
    Refused(Refusal),
}

/// Why a request never began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    Busy,
    Cancelled,
    StartFailed,
    Ended,
    Reset,
    Closed,
}

#[derive(Debug)]
pub(super) struct Machine {
    state: State,
    queue: VecDeque<RequestId>,
}

impl Machine {
    pub(super) fn new() -> Machine {
        Machine { state: State::Starting { first: true }, queue: VecDeque::new() }
    }

    pub(super) fn state(&self) -> State {
        self.state
    }

    /// Decides what to do about `event`.
    pub(super) fn next(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        match (self.state, event) {
            (State::Starting { .. } | State::Running { .. }, Event::Submitted(request)) => {
                if self.queue.len() >= MOST_WAITING {
                    actions.push(Action::Answer(request, Answer::Refused(Refusal::Busy)));
                } else {
                    self.queue.push_back(request);
                }
            }
            (State::Idle, Event::Submitted(request)) => {
                self.state = State::Running { request, stopping: None };
                actions.push(Action::Start(request));
            }
            (State::Ended | State::Gone, Event::Submitted(request)) => {
                actions.push(Action::Answer(request, Answer::Refused(Refusal::Ended)));
            }

            (State::Running { request, stopping: None }, Event::CancelAsked(cancelled)) if request == cancelled => {
                self.state = State::Running { request, stopping: Some(Stop::Cancelled) };
                actions.push(Action::Interrupt);
            }
            (_, Event::CancelAsked(cancelled)) => {
                if let Some(place) = self.queue.iter().position(|waiting| *waiting == cancelled) {
                    self.queue.remove(place);
                    actions.push(Action::Answer(cancelled, Answer::Refused(Refusal::Cancelled)));
                }
            }

            (State::Starting { .. }, Event::Started) => self.begin_next(&mut actions),
            (State::Starting { first }, Event::StartFailed) => {
                self.state = if first { State::Gone } else { State::Ended };
                self.refuse_waiting(Refusal::StartFailed, &mut actions);
            }

            (State::Running { request, stopping }, Event::Finished(finished)) if request == finished => {
                let answer = match stopping {
                    Some(stop) => Answer::Stopped(stop, StateAfter::Kept),
                    None => Answer::Finished,
                };
                actions.push(Action::Answer(request, answer));
                self.begin_next(&mut actions);
            }
            (State::Running { request, stopping: None }, Event::TimeIsUp) => {
                self.state = State::Running { request, stopping: Some(Stop::TimedOut) };
                actions.push(Action::Interrupt);
            }
            (State::Running { request, stopping: Some(stop) }, Event::GraceIsOver) => {
                actions.push(Action::Kill);
                self.end(Some((request, Answer::Stopped(stop, StateAfter::Lost))), &mut actions);
            }

            (State::Running { request, stopping }, Event::InterpreterGone) => {
                let answer = match stopping {
                    Some(stop) => Answer::Stopped(stop, StateAfter::Lost),
                    None => Answer::InterpreterGone,
                };
                self.end(Some((request, answer)), &mut actions);
            }
            (State::Idle, Event::InterpreterGone) => self.end(None, &mut actions),
            (State::Running { request, .. }, Event::ProtocolBroken) => {
                actions.push(Action::Kill);
                self.end(Some((request, Answer::ProtocolBroken)), &mut actions);
            }
            (State::Idle, Event::ProtocolBroken) => {
                actions.push(Action::Kill);
                self.end(None, &mut actions);
            }

            (State::Starting { .. }, Event::ResetAsked) => self.refuse_waiting(Refusal::Reset, &mut actions),
            (State::Idle | State::Running { .. } | State::Ended, Event::ResetAsked) => {
                if let State::Running { request, .. } = self.state {
                    actions.push(Action::Answer(request, Answer::Reset));
                }
                self.refuse_waiting(Refusal::Reset, &mut actions);
                self.state = State::Starting { first: false };
                actions.push(Action::Restart);
            }

            (_, Event::LeaveAsked) => {
                if let State::Running { request, .. } = self.state {
                    actions.push(Action::Answer(request, Answer::Closed));
                }
                self.refuse_waiting(Refusal::Closed, &mut actions);
                self.state = State::Gone;
            }

            // What is left comes too late or is a lie: an end of something that does not run, a time that ran out for it.
            (_, Event::Started | Event::StartFailed | Event::Finished(_) | Event::TimeIsUp | Event::GraceIsOver)
            | (State::Starting { .. } | State::Ended | State::Gone, Event::InterpreterGone | Event::ProtocolBroken)
            | (State::Gone, Event::ResetAsked) => {}
        }
        actions
    }

    fn begin_next(&mut self, actions: &mut Vec<Action>) {
        self.state = match self.queue.pop_front() {
            Some(request) => {
                actions.push(Action::Start(request));
                State::Running { request, stopping: None }
            }
            None => State::Idle,
        };
    }

    fn end(&mut self, running: Option<(RequestId, Answer)>, actions: &mut Vec<Action>) {
        if let Some((request, answer)) = running {
            actions.push(Action::Answer(request, answer));
        }
        self.state = State::Ended;
        self.refuse_waiting(Refusal::Ended, actions);
    }

    fn refuse_waiting(&mut self, refusal: Refusal, actions: &mut Vec<Action>) {
        actions.extend(self.queue.drain(..).map(|request| Action::Answer(request, Answer::Refused(refusal))));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const RUNNING: State = State::Running { request: 1, stopping: None };
    const STOPPING: State = State::Running { request: 1, stopping: Some(Stop::TimedOut) };
    const STARTING: State = State::Starting { first: true };
    const RESTARTING: State = State::Starting { first: false };
    const STATES: [State; 7] = [STARTING, RESTARTING, State::Idle, RUNNING, STOPPING, State::Ended, State::Gone];

    /// Puts a machine into `state`, with request 2 waiting where requests can wait.
    fn machine(state: State) -> Machine {
        let waits = matches!(state, State::Starting { .. } | State::Running { .. });
        Machine { state, queue: if waits { VecDeque::from([2]) } else { VecDeque::new() } }
    }

    fn check(state: State, event: Event, expected: State, actions: &[Action]) {
        let mut machine = machine(state);
        assert_eq!((machine.next(event), machine.state), (actions.to_vec(), expected), "{state:?} and {event:?}");
    }

    fn refused(refusal: Refusal) -> Action {
        Action::Answer(2, Answer::Refused(refusal))
    }

    fn answer(answer: Answer) -> Action {
        Action::Answer(1, answer)
    }

    fn running(request: RequestId) -> State {
        State::Running { request, stopping: None }
    }

    #[test]
    fn a_submitted_request_runs_waits_or_is_refused() {
        let ended = [Action::Answer(3, Answer::Refused(Refusal::Ended))];
        for state in STATES {
            match state {
                State::Idle => check(state, Event::Submitted(3), running(3), &[Action::Start(3)]),
                State::Ended | State::Gone => check(state, Event::Submitted(3), state, &ended),
                _ => check(state, Event::Submitted(3), state, &[]),
            }
        }
    }

    #[test]
    fn more_waiting_requests_than_allowed_are_refused() {
        let mut machine = Machine::new();
        for request in 0..MOST_WAITING as u64 {
            assert_eq!(machine.next(Event::Submitted(request)), []);
        }
        assert_eq!(machine.next(Event::Submitted(99)), [Action::Answer(99, Answer::Refused(Refusal::Busy))]);
    }

    #[test]
    fn a_waiting_request_is_cancelled_without_running() {
        for state in [STARTING, RESTARTING, RUNNING, STOPPING] {
            check(state, Event::CancelAsked(2), state, &[refused(Refusal::Cancelled)]);
        }
        for state in STATES {
            check(state, Event::CancelAsked(77), state, &[]);
        }
    }

    #[test]
    fn a_running_request_is_interrupted_once() {
        let cancelled = State::Running { request: 1, stopping: Some(Stop::Cancelled) };
        check(RUNNING, Event::CancelAsked(1), cancelled, &[Action::Interrupt]);
        check(RUNNING, Event::TimeIsUp, STOPPING, &[Action::Interrupt]);
        check(STOPPING, Event::CancelAsked(1), STOPPING, &[]);
        check(STOPPING, Event::TimeIsUp, STOPPING, &[]);
        for state in [STARTING, RESTARTING, State::Idle, State::Ended, State::Gone] {
            check(state, Event::TimeIsUp, state, &[]);
        }
    }

    #[test]
    fn a_started_interpreter_takes_the_first_waiting_request() {
        for state in STATES {
            match state {
                State::Starting { .. } => check(state, Event::Started, running(2), &[Action::Start(2)]),
                _ => check(state, Event::Started, state, &[]),
            }
        }
    }

    #[test]
    fn a_failed_start_ends_a_new_session_and_keeps_the_files_of_an_old_one() {
        check(STARTING, Event::StartFailed, State::Gone, &[refused(Refusal::StartFailed)]);
        check(RESTARTING, Event::StartFailed, State::Ended, &[refused(Refusal::StartFailed)]);
        for state in [State::Idle, RUNNING, STOPPING, State::Ended, State::Gone] {
            check(state, Event::StartFailed, state, &[]);
        }
    }

    #[test]
    fn only_the_end_of_the_running_request_counts() {
        check(RUNNING, Event::Finished(1), running(2), &[answer(Answer::Finished), Action::Start(2)]);
        let kept = answer(Answer::Stopped(Stop::TimedOut, StateAfter::Kept));
        check(STOPPING, Event::Finished(1), running(2), &[kept, Action::Start(2)]);
        for state in STATES {
            check(state, Event::Finished(77), state, &[]);
            check(state, Event::Finished(2), state, &[]);
        }
    }

    #[test]
    fn code_that_ignores_the_interrupt_loses_its_state() {
        let lost = answer(Answer::Stopped(Stop::TimedOut, StateAfter::Lost));
        check(STOPPING, Event::GraceIsOver, State::Ended, &[Action::Kill, lost, refused(Refusal::Ended)]);
        check(STOPPING, Event::InterpreterGone, State::Ended, &[lost, refused(Refusal::Ended)]);
        for state in STATES.into_iter().filter(|state| *state != STOPPING) {
            check(state, Event::GraceIsOver, state, &[]);
        }
    }

    #[test]
    fn the_end_of_the_interpreter_ends_the_session_and_not_its_files() {
        check(
            RUNNING,
            Event::InterpreterGone,
            State::Ended,
            &[answer(Answer::InterpreterGone), refused(Refusal::Ended)],
        );
        check(State::Idle, Event::InterpreterGone, State::Ended, &[]);
        for state in [STARTING, RESTARTING, State::Ended, State::Gone] {
            check(state, Event::InterpreterGone, state, &[]);
        }
    }

    #[test]
    fn a_broken_protocol_kills_the_interpreter() {
        let broken = answer(Answer::ProtocolBroken);
        for state in [RUNNING, STOPPING] {
            check(state, Event::ProtocolBroken, State::Ended, &[Action::Kill, broken, refused(Refusal::Ended)]);
        }
        check(State::Idle, Event::ProtocolBroken, State::Ended, &[Action::Kill]);
        for state in [STARTING, RESTARTING, State::Ended, State::Gone] {
            check(state, Event::ProtocolBroken, state, &[]);
        }
    }

    #[test]
    fn a_reset_acts_at_once_in_every_state() {
        for state in [RUNNING, STOPPING] {
            let actions = [answer(Answer::Reset), refused(Refusal::Reset), Action::Restart];
            check(state, Event::ResetAsked, RESTARTING, &actions);
        }
        for state in [State::Idle, State::Ended] {
            check(state, Event::ResetAsked, RESTARTING, &[Action::Restart]);
        }
        for state in [STARTING, RESTARTING] {
            check(state, Event::ResetAsked, state, &[refused(Refusal::Reset)]);
        }
        check(State::Gone, Event::ResetAsked, State::Gone, &[]);
    }

    #[test]
    fn leaving_answers_everybody() {
        for state in STATES {
            match state {
                State::Running { .. } => {
                    check(state, Event::LeaveAsked, State::Gone, &[answer(Answer::Closed), refused(Refusal::Closed)]);
                }
                State::Starting { .. } => check(state, Event::LeaveAsked, State::Gone, &[refused(Refusal::Closed)]),
                _ => check(state, Event::LeaveAsked, State::Gone, &[]),
            }
        }
    }

    fn event() -> impl Strategy<Value = Option<Event>> {
        prop_oneof![
            4 => Just(None),
            1 => (0u64..40).prop_map(|request| Some(Event::CancelAsked(request))),
            3 => (0u64..40).prop_map(|request| Some(Event::Finished(request))),
            4 => prop::sample::select(vec![
                Event::Started, Event::StartFailed, Event::TimeIsUp, Event::GraceIsOver, Event::InterpreterGone,
                Event::ProtocolBroken, Event::ResetAsked,
            ]).prop_map(Some),
        ]
    }

    proptest! {
        /// `None` stands for the next request.
        #[test]
        fn every_request_gets_exactly_one_answer(events in prop::collection::vec(event(), 0..120)) {
            let mut machine = Machine::new();
            let mut answers = BTreeMap::new();
            let mut running = None;
            let submitted = events.iter().filter(|event| event.is_none()).count() as u64;
            let mut next = 0;
            for event in events.into_iter().chain([Some(Event::LeaveAsked)]) {
                let event = event.unwrap_or_else(|| { next += 1; Event::Submitted(next - 1) });
                for action in machine.next(event) {
                    match action {
                        Action::Start(request) => {
                            prop_assert_eq!(running, None, "two requests run at once");
                            prop_assert!(!answers.contains_key(&request));
                            running = Some(request);
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
