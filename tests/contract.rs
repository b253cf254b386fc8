//! What every backend promises to sessions, as one list of cases.
//!
//! A case speaks in `Step`s, which each backend's language can say. A new backend joins with a
//! variant of `Kind`, and nothing else.

use std::sync::Arc;
use std::time::Duration;

use cellblock::sandbox::Exit;
use cellblock::sandbox::fake::FakeBackend;
use cellblock::session::{
    Approver, ExecuteRequest, ExecutionRef, ExecutionReport, FileNote, Outcome, Part, Principal,
    ProgressChannel, Refused, SessionSettings, SessionState, Sessions, StateAfter, Status, Stream,
};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::support::native::{self, Session};
use crate::support::places::Place;

/// Something that every backend's interpreter can do.
enum Step {
    Print(&'static str),
    PrintError(&'static str),
    Value(&'static str),
    Set(&'static str, &'static str),
    Get(&'static str),
    Raise(&'static str),
    /// Waits, and can be interrupted.
    Sleep,
    /// Waits for a second.
    Pause,
    IgnoreInterrupts,
    Exit(i32),
}

/// A backend under test.
struct TestBackend {
    kind: Kind,
    sessions: Sessions,
}

enum Kind {
    Real(Place),
    Fake(Arc<FakeBackend>),
}

impl TestBackend {
    fn of(place: Place) -> TestBackend {
        TestBackend {
            kind: Kind::Real(place),
            sessions: place.sessions().clone(),
        }
    }

    fn fake() -> TestBackend {
        let fake = Arc::new(FakeBackend::new());
        TestBackend {
            sessions: Sessions::new(fake.clone(), SessionSettings::default()),
            kind: Kind::Fake(fake),
        }
    }

    fn session(&self) -> Cells<'_> {
        Cells {
            backend: self,
            session: Session::new(&self.sessions),
        }
    }

    /// Says the steps in the language of the backend.
    fn code(&self, steps: &[Step]) -> String {
        let say = match self.kind {
            Kind::Real(_) => in_python,
            Kind::Fake(_) => in_fake,
        };
        steps.iter().map(say).collect::<Vec<_>>().join("\n")
    }

    /// Notes what exists on the host because of this session; the answer tells how much of it is
    /// left.
    async fn traces(&self, session: &Session) -> Box<dyn Fn() -> usize> {
        match &self.kind {
            Kind::Real(place) => place.traces(session).await,
            Kind::Fake(fake) => {
                let fake = fake.clone();
                Box::new(move || fake.sandboxes())
            }
        }
    }
}

fn in_python(step: &Step) -> String {
    match step {
        Step::Print(text) => format!("print({text:?})"),
        Step::PrintError(text) => format!("import sys; print({text:?}, file=sys.stderr)"),
        Step::Value(text) => (*text).to_owned(),
        Step::Set(name, text) => format!("{name} = {text:?}"),
        Step::Get(name) => format!("print({name})"),
        Step::Raise(text) => format!("raise ValueError({text:?})"),
        Step::Sleep => "import time; time.sleep(600)".to_owned(),
        Step::Pause => "import time; time.sleep(1)".to_owned(),
        Step::IgnoreInterrupts => {
            "import time\nwhile True:\n    try:\n        time.sleep(600)\n    except \
             KeyboardInterrupt:\n        pass"
                .to_owned()
        }
        Step::Exit(code) => format!("import os; os._exit({code})"),
    }
}

fn in_fake(step: &Step) -> String {
    match step {
        Step::Print(text) => format!("print {text}"),
        Step::PrintError(text) => format!("err {text}"),
        Step::Value(text) => format!("value {text}"),
        Step::Set(name, text) => format!("set {name} {text}"),
        Step::Get(name) => format!("get {name}"),
        Step::Raise(text) => format!("raise {text}"),
        Step::Sleep => "sleep 600".to_owned(),
        Step::Pause => "sleep 1".to_owned(),
        Step::IgnoreInterrupts => "ignore-interrupt".to_owned(),
        Step::Exit(code) => format!("exit {code}"),
    }
}

/// A session that understands steps.
struct Cells<'a> {
    backend: &'a TestBackend,
    session: Session,
}

/// Longer than any step of a case that is expected to end by itself.
const PATIENCE: Duration = Duration::from_secs(60);
/// A limit that code reaches only once it has begun, also on a busy machine.
const ENOUGH_TO_BEGIN: Duration = Duration::from_secs(2);

impl Cells<'_> {
    async fn try_run(&self, steps: &[Step]) -> Result<Outcome, Refused> {
        self.session.execute(&self.backend.code(steps)).await
    }

    async fn run(&self, steps: &[Step]) -> Outcome {
        self.try_run(steps)
            .await
            .expect("the session takes the cell")
    }

    async fn run_for(&self, limit: Duration, steps: &[Step]) -> Outcome {
        let code = self.backend.code(steps);
        self.session
            .execute_with(&code, limit, CancellationToken::new())
            .await
            .expect("the session takes the cell")
    }

    /// Starts a cell and returns when it is running.
    async fn begin(
        &self,
        cancel: CancellationToken,
        steps: &[Step],
    ) -> JoinHandle<Result<Outcome, Refused>> {
        let (session, code) = (self.session.clone(), self.backend.code(steps));
        // The state follows the reply of an earlier cell a moment later, so that one has to be over
        // first.
        self.reach(SessionState::Idle).await;
        let cell = tokio::spawn(async move { session.execute_with(&code, PATIENCE, cancel).await });
        self.reach(SessionState::Running).await;
        cell
    }

    async fn reach(&self, state: SessionState) {
        let is_there = || {
            let all = self.backend.sessions.list(&Principal::local());
            all.iter()
                .any(|info| info.id == self.session.id && info.state == state)
        };
        while !is_there() {
            tokio::task::yield_now().await;
        }
    }

    async fn get(&self, name: &'static str) -> String {
        native::printed(&self.run(&[Step::Get(name)]).await)
    }

    /// Whether the variable is known.
    async fn has(&self, name: &'static str) -> bool {
        match self.run(&[Step::Get(name)]).await.status {
            Status::Completed => true,
            Status::Raised(error) if error.name == "NameError" => false,
            other => panic!("{other:?}"),
        }
    }
}

fn parts(outcome: &Outcome) -> Vec<(Stream, String)> {
    let texts = outcome.output.parts.iter().filter_map(|part| match part {
        Part::Text { stream, text } => Some((*stream, text.trim_end().to_owned())),
        _ => None,
    });
    texts.collect()
}

macro_rules! on_every_backend {
    ($($cases:tt)*) => {
        crate::support::places::cases! {
            TestBackend,
            [
                native_backend: Some(super::TestBackend::of(crate::support::places::Place::Native)),
                docker_backend: crate::support::places::Place::docker().map(super::TestBackend::of),
                podman_backend: crate::support::places::Place::podman().map(super::TestBackend::of),
                fake_backend: Some(super::TestBackend::fake()),
            ],
            { $($cases)* }
        }
    };
}

on_every_backend! {
    async fn variables_live_between_cells(backend) {
        let session = backend.session();
        session.run(&[Step::Set("x", "five")]).await;
        assert_eq!(session.get("x").await, "five\n");
    }

    async fn two_sessions_share_no_variable(backend) {
        let (one, other) = (backend.session(), backend.session());
        one.run(&[Step::Set("x", "mine")]).await;
        assert!(one.has("x").await);
        assert!(!other.has("x").await);
    }

    async fn output_comes_in_the_order_in_which_it_was_made(backend) {
        let session = backend.session();
        let steps = [
            Step::Print("one"),
            Step::PrintError("two"),
            Step::Print("three"),
            Step::PrintError("four"),
            Step::Value("5"),
        ];
        let outcome = session.run(&steps).await;
        let expected = [
            (Stream::Stdout, "one"),
            (Stream::Stderr, "two"),
            (Stream::Stdout, "three"),
            (Stream::Stderr, "four"),
            (Stream::Value, "5"),
        ];
        assert_eq!(parts(&outcome), expected.map(|(stream, text)| (stream, text.to_owned())));
    }

    async fn an_error_keeps_what_came_before_it_and_the_state(backend) {
        let session = backend.session();
        let steps = [
            Step::Set("x", "kept"),
            Step::Print("before"),
            Step::Raise("broken"),
            Step::Print("after"),
        ];
        let outcome = session.run(&steps).await;
        let Status::Raised(error) = &outcome.status else { panic!("{:?}", outcome.status) };
        assert_eq!(
            (error.name.as_str(), error.message.as_str(), error.line),
            ("ValueError", "broken", Some(3))
        );
        assert!(parts(&outcome).contains(&(Stream::Stdout, "before".to_owned())));
        assert!(!native::everything(&outcome).contains("after\n"));
        assert_eq!(session.get("x").await, "kept\n");
    }

    async fn a_long_cell_is_followed_to_its_end(backend) {
        let session = backend.session();
        let steps = [Step::Print("one"), Step::Pause, Step::Pause, Step::Print("two")];
        let request = ExecuteRequest {
            code: backend.code(&steps),
            timeout: PATIENCE,
            max_output_chars: 1000,
            asking: Approver::Nobody,
            rules: None,
            recorder: Default::default(),
        };
        let (owner, id) = (Principal::local(), session.session.id.clone());
        session.run(&[Step::Set("x", "warm")]).await;
        let (wait, cancel) = (Duration::from_millis(300), CancellationToken::new());
        let begun = backend
            .sessions
            .begin(&owner, &id, request, Some(wait), cancel, ProgressChannel::default())
            .await
            .unwrap();
        let ExecutionReport::Underway(mut underway) = begun else { panic!("{begun:?}") };
        let which = ExecutionRef::Handle(underway.handle.clone());
        while underway.text.is_empty() {
            let checked = backend
                .sessions
                .check(&owner, &which, wait, 1000, ProgressChannel::default())
                .await
                .unwrap();
            let ExecutionReport::Underway(later) = checked else { panic!("{checked:?}") };
            underway = later;
        }
        assert_eq!((underway.text.as_str(), underway.ahead), ("one\n", 0));
        for told_before in [false, true] {
            let checked = backend
                .sessions
                .check(&owner, &which, PATIENCE, 1000, ProgressChannel::default())
                .await
                .unwrap();
            let ExecutionReport::Finished { outcome, again, .. } = checked else {
                panic!("{checked:?}")
            };
            assert_eq!((native::printed(&outcome).as_str(), again), ("one\ntwo\n", told_before));
        }
    }

    async fn a_file_is_listed_and_read_in_parts(backend) {
        let session = backend.session();
        session.session.upload("folder/data.bin", b"0123456789").await.unwrap();
        let (owner, id) = (Principal::local(), &session.session.id);
        let list = backend.sessions.list_files(&owner, id).await.unwrap();
        assert_eq!(list.files, [FileNote { path: "folder/data.bin".to_owned(), size: 10 }]);
        let path = list.files[0].path.parse().unwrap();
        let mut bytes = Vec::new();
        let first = backend
            .sessions
            .read_file_range(&owner, id, &path, 0, Some(4), &mut bytes)
            .await
            .unwrap();
        let second = backend
            .sessions
            .read_file_range(&owner, id, &path, 4, None, &mut bytes)
            .await
            .unwrap();
        assert_eq!(
            (bytes.as_slice(), first.total, first.sent, second.sent),
            (&b"0123456789"[..], 10, 4, 6)
        );
        assert!(!first.version.is_empty() && first.version == second.version);
    }

    async fn a_reset_loses_variables_and_keeps_files(backend) {
        let session = backend.session();
        session.run(&[Step::Set("x", "gone")]).await;
        session.session.upload("folder/kept.bin", b"bytes").await.unwrap();
        session.session.reset().await;
        assert!(!session.has("x").await);
        assert_eq!(session.session.download("folder/kept.bin", 100).await.unwrap(), b"bytes");
    }

    async fn a_reset_works_in_the_middle_of_a_cell(backend) {
        let session = backend.session();
        session.run(&[Step::Set("x", "gone")]).await;
        let cell = session.begin(CancellationToken::new(), &[Step::Sleep]).await;
        session.session.reset().await;
        assert_eq!(cell.await.unwrap().unwrap().status, Status::Reset);
        assert!(!session.has("x").await);
    }

    async fn a_time_out_interrupts_and_keeps_the_state(backend) {
        let session = backend.session();
        session.run(&[Step::Set("x", "kept")]).await;
        let limit = ENOUGH_TO_BEGIN;
        let outcome = session.run_for(limit, &[Step::Print("begun"), Step::Sleep]).await;
        assert_eq!(outcome.status, Status::TimedOut { limit, state: StateAfter::Kept });
        assert!(native::everything(&outcome).starts_with("begun\n"));
        assert_eq!(session.get("x").await, "kept\n");
    }

    async fn code_that_ignores_the_interrupt_is_killed_and_files_stay(backend) {
        let session = backend.session();
        session.session.upload("kept", b"bytes").await.unwrap();
        let limit = ENOUGH_TO_BEGIN;
        let outcome = session.run_for(limit, &[Step::IgnoreInterrupts]).await;
        assert_eq!(outcome.status, Status::TimedOut { limit, state: StateAfter::Lost });
        assert!(outcome.duration < limit + PATIENCE, "{:?}", outcome.duration);
        let refused = session.try_run(&[Step::Print("x")]).await.unwrap_err();
        assert!(matches!(refused, Refused::Ended { .. }), "{refused}");
        session.session.reset().await;
        assert_eq!(session.session.download("kept", 100).await.unwrap(), b"bytes");
    }

    async fn a_cancelled_cell_stops_and_the_session_goes_on(backend) {
        let session = backend.session();
        session.run(&[Step::Set("x", "kept")]).await;
        let cancel = CancellationToken::new();
        let cell = session.begin(cancel.clone(), &[Step::Sleep]).await;
        cancel.cancel();
        let outcome = cell.await.unwrap().unwrap();
        assert_eq!(outcome.status, Status::Cancelled { state: StateAfter::Kept });
        assert_eq!(session.get("x").await, "kept\n");
    }

    async fn the_exit_code_of_an_interpreter_that_ends_is_told(backend) {
        let session = backend.session();
        let outcome = session.run(&[Step::Print("last words"), Step::Exit(7)]).await;
        assert_eq!(outcome.status, Status::Died { exit: Exit::Code(7) });
        assert_eq!(native::everything(&outcome), "last words\n");
    }

    async fn a_dead_session_says_so_until_it_is_reset(backend) {
        let session = backend.session();
        session.run(&[Step::Set("x", "gone")]).await;
        session.session.upload("kept", b"bytes").await.unwrap();
        session.run(&[Step::Exit(0)]).await;
        for _ in 0..2 {
            let refused = session.try_run(&[Step::Print("x")]).await.unwrap_err();
            assert!(matches!(refused, Refused::Ended { .. }), "{refused}");
        }
        session.session.reset().await;
        assert!(!session.has("x").await);
        assert_eq!(session.session.download("kept", 100).await.unwrap(), b"bytes");
    }

    async fn files_come_back_byte_for_byte(backend) {
        let session = backend.session();
        let every_byte: Vec<u8> = (0..=255).collect();
        let large: Vec<u8> = (0..3_000_000u32)
            .map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        for (name, bytes) in [
            ("every byte.bin", every_byte),
            ("deep/er/large.bin", large),
            ("empty", Vec::new()),
        ] {
            assert_eq!(session.session.upload(name, &bytes).await.unwrap(), bytes.len() as u64);
            assert_eq!(session.session.download(name, 4_000_000).await.unwrap(), bytes, "{name}");
        }
    }

    async fn a_file_larger_than_asked_for_and_a_missing_one_are_refused(backend) {
        let session = backend.session();
        session.session.upload("four", b"1234").await.unwrap();
        assert_eq!(session.session.download("four", 4).await.unwrap(), b"1234");
        assert!(matches!(session.session.download("four", 3).await, Err(Refused::File { .. })));
        assert!(matches!(session.session.download("absent", 100).await, Err(Refused::File { .. })));
    }

    async fn a_closed_session_leaves_nothing_and_its_name_begins_anew(backend) {
        let session = backend.session();
        session.run(&[Step::Set("x", "gone")]).await;
        session.session.upload("gone", b"bytes").await.unwrap();
        let left = backend.traces(&session.session).await;
        assert!(left() > 0);
        session.session.close().await;
        assert_eq!(left(), 0);
        assert!(!session.has("x").await);
        assert!(session.session.download("gone", 100).await.is_err());
    }

    async fn many_short_cells_lose_nothing(backend) {
        let session = backend.session();
        for _ in 0..200 {
            let outcome = session.run(&[Step::Print("out"), Step::PrintError("err")]).await;
            let expected =
                [(Stream::Stdout, "out".to_owned()), (Stream::Stderr, "err".to_owned())];
            assert_eq!(parts(&outcome), expected);
        }
    }
}

#[test]
fn the_kernel_tells_what_a_session_uses() {
    native::run(async {
        let sessions = native::shared().sessions.clone();
        // Somebody of its own, so that nothing else counts.
        let (owner, id) = (Principal("counted".to_owned()), "counted".parse().unwrap());
        let burn = "import time\nbegun = time.process_time()\nwhile time.process_time() - begun < \
                    0.4: pass\n\
                    open('data', 'wb').write(bytes(5_000_000))";
        let request = ExecuteRequest {
            code: burn.to_owned(),
            timeout: PATIENCE,
            max_output_chars: 1000,
            asking: Approver::Nobody,
            rules: None,
            recorder: Default::default(),
        };
        let outcome = sessions
            .execute(&owner, &id, request, CancellationToken::new())
            .await
            .unwrap();
        assert_eq!(outcome.status, Status::Completed);
        let usage = sessions.usage(&owner);
        assert!(
            usage.processor_time >= Duration::from_millis(400),
            "{usage:?}"
        );
        assert!(
            usage.processor_time < outcome.duration * 4 + Duration::from_secs(1),
            "{usage:?}"
        );
        assert!(
            usage.stored >= 5_000_000 && usage.memory >= usage.stored,
            "{usage:?}"
        );
        assert_eq!((usage.sessions, usage.cells, usage.starts), (1, 1, 1));
        sessions.close(&owner, &id).await.unwrap();
        let after = sessions.usage(&owner);
        assert!(
            after.processor_time >= usage.processor_time && after.memory == 0,
            "{after:?}"
        );
    });
}
