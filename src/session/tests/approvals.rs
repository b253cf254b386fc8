//! Tests of approvals, with the fake backend, a broker controlled by the test, and a paused clock.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::lifecycle::{Setting, id, owner, request, setting_with, text, without_undo};
use super::tools::FakeBroker;
use crate::approval::{
    ApprovalAnswer, ApprovalStore, Defaults, Effect, Policy, PolicyRule, registered_rules,
};
use crate::sandbox::fake::FakeBackend;
use crate::session::install::InstallApproval;
use crate::session::tools::Tools;
use crate::session::*;

const SECOND: Duration = Duration::from_secs(1);

fn rule(written: Value) -> PolicyRule {
    PolicyRule::parse(&written).unwrap()
}

/// A policy that requires approval for tools and packages, and denies the tool `fail`.
fn asking() -> Approvals {
    let mut policy = Policy::new(Defaults {
        tools: Effect::Ask,
        packages: Effect::Ask,
        ..Defaults::default()
    });
    policy.add(rule(json!({"deny": {"tool": "fail"}})), "line 3");
    Approvals {
        policy: Arc::new(policy),
        ..Approvals::default()
    }
}

fn house_with(settings: SessionSettings) -> (Setting, Arc<FakeBroker>) {
    let broker = FakeBroker::new();
    let tools = Tools(Some(broker.clone()));
    (
        setting_with(FakeBackend::new(), SessionSettings { tools, ..settings }),
        broker,
    )
}

fn inner() -> (Setting, Arc<FakeBroker>) {
    house_with(SessionSettings {
        approvals: asking().into(),
        ..without_undo()
    })
}

fn nobody() -> ProgressChannel {
    ProgressChannel::new(String::new())
}

fn cell(code: &str) -> ExecuteRequest {
    ExecuteRequest {
        asking: Approver::Person,
        ..request(code)
    }
}

impl Setting {
    /// Starts a cell and waits until it has ended or requests an approval.
    async fn begin_asking(&self, session: &str, code: &str) -> ExecutionReport {
        let wait = Some(1000 * SECOND);
        let (owner, session) = (owner(), id(session));
        let begun = self.sessions.begin(
            &owner,
            &session,
            cell(code),
            wait,
            CancellationToken::new(),
            nobody(),
        );
        begun.await.unwrap()
    }

    /// Starts a cell that requests an approval.
    async fn asks(&self, session: &str, code: &str) -> Underway {
        match self.begin_asking(session, code).await {
            ExecutionReport::Underway(underway) if !underway.approvals.is_empty() => underway,
            other => panic!("nothing was asked: {other:?}"),
        }
    }

    /// Runs a cell that requests no approval.
    async fn unasked(&self, session: &str, code: &str) -> Outcome {
        match self.begin_asking(session, code).await {
            ExecutionReport::Finished { outcome, .. } => *outcome,
            other => panic!("it did not finish: {other:?}"),
        }
    }

    async fn decide(&self, underway: &Underway, answers: &[ApprovalAnswer]) -> Vec<Ruling> {
        let decisions = underway
            .approvals
            .iter()
            .zip(answers)
            .map(|(asked, answer)| Decision {
                id: asked.id,
                answer: *answer,
            });
        self.sessions
            .decide(&owner(), &underway.handle, decisions.collect())
            .await
            .unwrap()
            .rulings
    }

    async fn check(&self, underway: &Underway) -> ExecutionReport {
        let which = ExecutionRef::Handle(underway.handle.clone());
        self.sessions
            .check(&owner(), &which, 1000 * SECOND, 1000, nobody())
            .await
            .unwrap()
    }

    async fn ended(&self, underway: &Underway) -> Outcome {
        match self.check(underway).await {
            ExecutionReport::Finished { outcome, .. } => *outcome,
            other => panic!("it has not finished: {other:?}"),
        }
    }
}

fn answers(outcome: &Outcome) -> Vec<Value> {
    text(outcome)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[tokio::test(start_paused = true)]
async fn a_call_waits_for_a_person_and_goes_on_as_it_was_shown() {
    let (setting, broker) = inner();
    let underway = setting.asks("a", r#"call notes echo {"title": "x"}"#).await;
    let [asked] = underway.approvals.as_slice() else {
        panic!("{:?}", underway.approvals)
    };
    assert_eq!(
        (asked.text.as_str(), asked.kind.as_str()),
        (r#"notes.echo(title="x")"#, "tool")
    );
    assert_eq!(
        (asked.line.as_str(), asked.can_last),
        ("`approve_tools: ask`", false)
    );
    assert_eq!(
        asked.covers,
        "every call of notes.echo, whatever its arguments"
    );
    assert!(
        broker.seen.lock().unwrap().is_empty(),
        "nothing is called before the answer"
    );
    let rulings = setting.decide(&underway, &[ApprovalAnswer::Once]).await;
    assert_eq!(
        (rulings.len(), rulings[0].by),
        (1, DecidedBy::Person(ApprovalAnswer::Once))
    );
    let outcome = setting.ended(&underway).await;
    assert_eq!(answers(&outcome)[0]["structured"], json!({"title": "x"}));
    assert_eq!(
        (outcome.rulings.len(), broker.seen.lock().unwrap().len()),
        (0, 1)
    );
    setting.asks("a", r#"call notes echo {"title": "x"}"#).await; // `Once` covers one call.
}

#[tokio::test(start_paused = true)]
async fn what_is_denied_by_a_person_or_a_rule_is_refused_with_the_reason() {
    let (setting, broker) = inner();
    let underway = setting.asks("a", "call notes echo").await;
    setting.decide(&underway, &[ApprovalAnswer::Deny]).await;
    let refused = &answers(&setting.ended(&underway).await)[0];
    assert_eq!(
        (refused["ok"].clone(), refused["reason"].clone()),
        (json!(false), json!("denied"))
    );
    assert!(
        refused["text"].as_str().unwrap().contains("did not allow"),
        "{refused}"
    );
    let outcome = setting.unasked("a", "call notes fail").await;
    let refused = &answers(&outcome)[0];
    assert!(
        refused["text"]
            .as_str()
            .unwrap()
            .contains("`deny: {tool: \"fail\"}` (line 3)"),
        "{refused}"
    );
    assert_eq!(outcome.rulings[0].by, DecidedBy::Policy);
    assert!(broker.seen.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_caller_who_cannot_ask_is_refused_at_once_by_the_line_of_the_policy() {
    let (setting, broker) = inner();
    let begun = Instant::now();
    let outcome = setting.ok("a", "call notes echo").await;
    let refused = answers(&outcome)[0]["text"].as_str().unwrap().to_owned();
    for words in [
        "`approve_tools: ask`",
        "does not support elicitation",
        "`approve_tools: allow`",
    ] {
        assert!(refused.contains(words), "{refused}");
    }
    assert_eq!(
        (outcome.rulings[0].by, begun.elapsed()),
        (DecidedBy::NobodyToAsk, Duration::ZERO)
    );
    assert!(broker.seen.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_clock_stands_still_while_somebody_thinks_and_then_goes_on() {
    let (setting, _) = inner();
    let begun = Instant::now();
    let underway = setting
        .asks("a", "sleep 4\ncall notes echo\nsleep 60")
        .await;
    tokio::time::sleep(300 * SECOND).await;
    setting.decide(&underway, &[ApprovalAnswer::Once]).await;
    let outcome = setting.ended(&underway).await;
    assert!(
        matches!(
            outcome.status,
            Status::TimedOut {
                state: StateAfter::Kept,
                ..
            }
        ),
        "{:?}",
        outcome.status
    );
    // The timeout is ten seconds, four of which were used before the request.
    let rest = begun.elapsed() - 304 * SECOND;
    assert!(rest >= 6 * SECOND && rest < 7 * SECOND, "{rest:?}");
}

#[tokio::test(start_paused = true)]
async fn a_question_that_nobody_answers_is_refused_and_no_other_is_asked_in_that_cell() {
    let (setting, _) = inner();
    let begun = Instant::now();
    let underway = setting.asks("a", "call notes echo\ncall notes echo").await;
    tokio::time::sleep(601 * SECOND).await;
    let outcome = setting.ended(&underway).await;
    assert_eq!(outcome.status, Status::Completed);
    let refused = answers(&outcome);
    assert_eq!(refused.len(), 2);
    assert!(
        refused[0]["text"]
            .as_str()
            .unwrap()
            .contains("nobody answered within 600 s"),
        "{refused:?}"
    );
    assert!(
        begun.elapsed() < 602 * SECOND,
        "the second one was not asked"
    );
    let by = outcome
        .rulings
        .iter()
        .map(|ruling| ruling.by)
        .collect::<Vec<_>>();
    assert_eq!(by, [DecidedBy::NobodyAnswered, DecidedBy::NobodyToAsk]);
    setting.asks("a", "call notes echo").await; // The next cell requests approval again.
}

#[tokio::test(start_paused = true)]
async fn questions_of_one_moment_are_asked_together_and_answered_one_by_one() {
    let (setting, _) = inner();
    let underway = setting.asks("a", "calls 5 notes echo").await;
    assert_eq!(underway.approvals.len(), 5);
    let some = [
        ApprovalAnswer::Once,
        ApprovalAnswer::Deny,
        ApprovalAnswer::Once,
        ApprovalAnswer::Deny,
    ];
    assert_eq!(setting.decide(&underway, &some).await.len(), 4);
    let ExecutionReport::Underway(still) = setting.check(&underway).await else {
        panic!("one is left")
    };
    assert_eq!(
        still
            .approvals
            .iter()
            .map(|asked| asked.id)
            .collect::<Vec<_>>(),
        [underway.approvals[4].id]
    );
    assert_eq!(
        setting.decide(&underway, &some).await,
        [],
        "what was decided is decided"
    );
    setting.decide(&still, &[ApprovalAnswer::Once]).await;
    assert_eq!(
        text(&setting.ended(&underway).await),
        "{\"answered\": 3, \"denied\": 2}\n"
    );
}

#[tokio::test(start_paused = true)]
async fn a_permission_for_the_session_answers_the_same_question_of_the_same_moment() {
    let (setting, _) = inner();
    let underway = setting.asks("a", "calls 5 notes echo").await;
    setting.decide(&underway, &[ApprovalAnswer::Session]).await;
    assert_eq!(text(&setting.ended(&underway).await), "{\"answered\": 5}\n");
}

#[tokio::test(start_paused = true)]
async fn a_permission_for_the_session_outlives_interpreters_and_goes_to_forks() {
    let (setting, _) = house_with(SessionSettings {
        approvals: asking().into(),
        ..SessionSettings::default()
    });
    let underway = setting.asks("a", "call notes echo").await;
    setting.decide(&underway, &[ApprovalAnswer::Session]).await;
    setting.ended(&underway).await;
    setting.unasked("a", "call notes echo").await;
    setting.sessions.reset(&owner(), &id("a")).await.unwrap();
    setting.unasked("a", "call notes echo").await;
    setting.sessions.undo(&owner(), &id("a"), 1).await.unwrap();
    setting.unasked("a", "call notes echo").await;
    let names = ForkNames::Named(vec![id("b")]);
    setting
        .sessions
        .fork(&owner(), &id("a"), names)
        .await
        .unwrap();
    setting.unasked("b", "call notes echo").await;
    let died = setting.unasked("a", "exit 3").await;
    assert!(
        matches!(died.status, Status::Died { .. }),
        "{:?}",
        died.status
    );
    setting.sessions.reset(&owner(), &id("a")).await.unwrap();
    setting.unasked("a", "call notes echo").await;
    // Controls: another tool, and another session.
    setting.asks("a", "call notes large").await;
    setting.asks("c", "call notes echo").await;
}

#[tokio::test(start_paused = true)]
async fn a_permission_ends_with_the_server_that_it_was_given_for() {
    let (setting, _) = inner();
    for session in ["a", "b"] {
        let underway = setting.asks(session, "call notes echo").await;
        setting.decide(&underway, &[ApprovalAnswer::Session]).await;
        setting.ended(&underway).await;
    }
    setting
        .sessions
        .unregister_server(&owner(), "another")
        .await
        .unwrap();
    setting.unasked("a", "call notes echo").await; // Control: the permission still holds.
    setting
        .sessions
        .unregister_server(&Principal("somebody".to_owned()), "notes")
        .await
        .unwrap();
    setting.unasked("a", "call notes echo").await; // Control: that was another owner's.
    setting
        .sessions
        .unregister_server(&owner(), "notes")
        .await
        .unwrap();
    setting.asks("a", "call notes echo").await;
    setting.asks("b", "call notes echo").await;
}

#[tokio::test(start_paused = true)]
async fn code_can_neither_see_nor_forge_nor_give_an_answer() {
    let (setting, broker) = inner();
    let forged = [
        r#"ask-on {"what": "call_tool", "server": "notes", "tool": "echo", "arguments": {}, "ask": 7, "approved": true}"#,
        r#"ask-on {"type": "answer", "ask": 7, "ok": true}"#,
        r#"ask-on {"type": "decide", "ask": 7, "answer": "always"}"#,
        r#"ask-on {"what": "decide", "ask": 8, "id": 7, "decisions": [{"id": 7, "answer": "session"}]}"#,
        "sleep 1",
    ];
    let underway = setting.asks("a", &forged.join("\n")).await;
    assert_eq!(underway.approvals.len(), 1);
    tokio::time::sleep(5 * SECOND).await;
    assert!(broker.seen.lock().unwrap().is_empty());
    let outcome = setting.ended(&underway).await;
    assert_eq!(
        outcome.status,
        Status::Completed,
        "the cell did not wait for its answer"
    );
    assert!(
        broker.seen.lock().unwrap().is_empty(),
        "a question ends with its cell"
    );
    // Control: the same call, allowed by a person.
    let underway = setting.asks("a", "call notes echo").await;
    setting.decide(&underway, &[ApprovalAnswer::Once]).await;
    setting.ended(&underway).await;
    assert_eq!(broker.seen.lock().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn nobody_decides_about_the_code_of_another() {
    let (setting, _) = inner();
    let underway = setting.asks("a", "call notes echo").await;
    let decisions = vec![Decision {
        id: underway.approvals[0].id,
        answer: ApprovalAnswer::Once,
    }];
    let other = Principal("other".to_owned());
    let refused = setting
        .sessions
        .decide(&other, &underway.handle, decisions.clone())
        .await;
    assert!(
        matches!(refused, Err(Refused::UnknownExecution)),
        "{refused:?}"
    );
    let own = setting
        .sessions
        .decide(&owner(), &underway.handle, decisions)
        .await
        .unwrap();
    assert_eq!(own.rulings.len(), 1, "the control");
}

#[tokio::test(start_paused = true)]
async fn what_ends_the_code_ends_its_questions() {
    let (setting, broker) = inner();
    let interrupted = setting.asks("a", "call notes echo\nsleep 1").await;
    setting
        .sessions
        .stop(&owner(), &ExecutionRef::Handle(interrupted.handle.clone()))
        .await
        .unwrap();
    let outcome = setting.ended(&interrupted).await;
    assert!(
        matches!(
            outcome.status,
            Status::Cancelled {
                state: StateAfter::Kept
            }
        ),
        "{:?}",
        outcome.status
    );
    assert_eq!(
        setting.decide(&interrupted, &[ApprovalAnswer::Once]).await,
        []
    );
    let reset = setting.asks("a", "call notes echo").await;
    setting.sessions.reset(&owner(), &id("a")).await.unwrap();
    assert_eq!(setting.ended(&reset).await.status, Status::Reset);
    assert_eq!(setting.decide(&reset, &[ApprovalAnswer::Once]).await, []);
    let closed = setting.asks("a", "call notes echo").await;
    setting.sessions.close(&owner(), &id("a")).await.unwrap();
    let decisions = vec![Decision {
        id: closed.approvals[0].id,
        answer: ApprovalAnswer::Once,
    }];
    assert!(
        setting
            .sessions
            .decide(&owner(), &closed.handle, decisions)
            .await
            .is_err()
    );
    assert!(broker.seen.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_withdrawn_question_is_not_asked_any_more() {
    let (setting, broker) = inner();
    let outcome = setting.unasked("a", "forget notes echo").await;
    let told = answers(&outcome);
    assert_eq!(
        (told[0]["reason"].clone(), told[1]["ok"].clone()),
        (json!("cancelled"), json!(true)),
        "{told:?}"
    );
    assert!(broker.seen.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_question_is_there_for_whoever_asks_next_when_its_caller_is_gone() {
    let (setting, _) = inner();
    let call = setting.begin_asking("a", "call notes echo");
    assert!(
        tokio::time::timeout(Duration::from_millis(10), call)
            .await
            .is_err(),
        "the caller is gone"
    );
    let which = ExecutionRef::InSession(id("a"));
    let checked = setting
        .sessions
        .check(&owner(), &which, 9 * SECOND, 1000, nobody())
        .await
        .unwrap();
    let ExecutionReport::Underway(underway) = checked else {
        panic!("{checked:?}")
    };
    setting.decide(&underway, &[ApprovalAnswer::Once]).await;
    assert_eq!(setting.ended(&underway).await.status, Status::Completed);
}

#[tokio::test(start_paused = true)]
async fn two_sessions_are_asked_about_at_the_same_time() {
    let (setting, _) = inner();
    let (one, two) = tokio::join!(
        setting.asks("a", "call notes echo"),
        setting.asks("b", "call notes large")
    );
    setting.decide(&two, &[ApprovalAnswer::Deny]).await;
    assert_eq!(answers(&setting.ended(&two).await)[0]["reason"], "denied");
    setting.decide(&one, &[ApprovalAnswer::Once]).await;
    assert_eq!(answers(&setting.ended(&one).await)[0]["ok"], true);
}

#[tokio::test(start_paused = true)]
async fn too_many_questions_at_once_are_refused() {
    let (setting, _) = inner();
    let underway = setting.asks("a", "calls 103 notes echo").await;
    assert_eq!(underway.approvals.len(), 100);
    setting.decide(&underway, &[ApprovalAnswer::Session]).await;
    assert_eq!(
        text(&setting.ended(&underway).await),
        "{\"answered\": 100, \"denied\": 3}\n"
    );
}

#[tokio::test(start_paused = true)]
async fn a_variant_of_an_exploration_cannot_ask() {
    let (setting, _) = house_with(SessionSettings {
        approvals: asking().into(),
        ..SessionSettings::default()
    });
    setting.unasked("a", "print ready").await;
    let request = ExploreRequest {
        variants: vec![Variant {
            name: "one".to_owned(),
            code: "call notes echo".to_owned(),
        }],
        timeout: 10 * SECOND,
        max_output_chars: 1000,
        keep: Keep::Nothing,
        replace: false,
        recorder: Default::default(),
    };
    let report = setting
        .sessions
        .explore(
            &owner(),
            &id("a"),
            request,
            CancellationToken::new(),
            nobody(),
        )
        .await
        .unwrap();
    let outcome = report.variants[0].ended.as_ref().unwrap();
    let refused = answers(outcome)[0]["text"].as_str().unwrap().to_owned();
    assert!(
        refused.contains("variant of `explore`") && refused.contains("`approve_tools: ask`"),
        "{refused}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_registration_can_only_be_stricter() {
    let (setting, broker) = house_with(without_undo());
    let says = |word: &str| {
        let mut policy = Policy::default();
        registered_rules("notes", &json!(word))
            .unwrap()
            .into_iter()
            .for_each(|rule| policy.add(rule, "its registration"));
        broker
            .policies
            .lock()
            .unwrap()
            .insert("notes".to_owned(), Arc::new(policy));
    };
    setting.unasked("a", "call notes echo").await; // Control: the operator allows it.
    says("ask");
    let underway = setting.asks("a", "call notes echo").await;
    assert!(
        underway.approvals[0].line.contains("its registration"),
        "{:?}",
        underway.approvals
    );
    setting.decide(&underway, &[ApprovalAnswer::Deny]).await;
    says("deny");
    let outcome = setting.unasked("a", "call notes echo").await;
    assert_eq!(answers(&outcome)[0]["reason"], "denied");
    let (strict, broker) = inner();
    let mut loose = Policy::default();
    registered_rules("notes", &json!("allow"))
        .unwrap()
        .into_iter()
        .for_each(|rule| loose.add(rule, "its registration"));
    broker
        .policies
        .lock()
        .unwrap()
        .insert("notes".to_owned(), Arc::new(loose));
    strict.asks("a", "call notes echo").await;
}

#[tokio::test(start_paused = true)]
async fn what_is_always_allowed_is_so_in_every_session_of_the_same_owner() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(ApprovalStore::open(&folder.path().join("approvals.yaml")).unwrap());
    let approvals = Approvals {
        store: store.clone(),
        ..asking()
    };
    let (setting, broker) = house_with(SessionSettings {
        approvals: approvals.into(),
        ..without_undo()
    });
    let underway = setting.asks("a", "call notes echo").await;
    assert!(underway.approvals[0].can_last);
    setting.decide(&underway, &[ApprovalAnswer::Always]).await;
    setting.ended(&underway).await;
    // The file is written on another thread, which a paused clock does not wait for.
    while !store.covers("local", &echo()) {
        tokio::task::yield_now().await;
    }
    setting.unasked("b", "call notes echo").await;
    let other = Principal("other".to_owned());
    let wait = Some(1000 * SECOND);
    let session = id("b");
    let begun = setting.sessions.begin(
        &other,
        &session,
        cell("call notes echo"),
        wait,
        CancellationToken::new(),
        nobody(),
    );
    assert!(
        matches!(begun.await.unwrap(), ExecutionReport::Underway(_)),
        "it counts for its owner alone"
    );
    broker.edition.send_modify(|edition| *edition += 1);
    for session in ["a", "c"] {
        setting.asks(session, "call notes echo").await; // It is another tool of that name.
    }
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_became_another_one_while_a_person_thought_is_not_called() {
    let (setting, broker) = inner();
    let underway = setting.asks("a", "call notes echo").await;
    broker.edition.send_modify(|edition| *edition += 1);
    setting.decide(&underway, &[ApprovalAnswer::Session]).await;
    let refused = &answers(&setting.ended(&underway).await)[0];
    assert_eq!(
        (&refused["ok"], &refused["reason"]),
        (&json!(false), &json!("unavailable")),
        "{refused}"
    );
    assert!(broker.seen.lock().unwrap().is_empty());
    // The session's permission was for the other tool.
    let underway = setting.asks("a", "call notes echo").await;
    setting.decide(&underway, &[ApprovalAnswer::Once]).await;
    assert_eq!(
        answers(&setting.ended(&underway).await)[0]["ok"],
        true,
        "the control"
    );
}

#[tokio::test(start_paused = true)]
async fn nobody_is_asked_about_a_tool_that_is_not_there() {
    let (setting, _) = inner();
    let refused = &answers(&setting.unasked("a", "call notes absent").await)[0];
    assert_eq!(refused["reason"], "unknown", "{refused}");
}

fn setup(defaults: Defaults) -> ApprovalSetup {
    ApprovalSetup {
        policy: Policy::new(defaults),
        store: None,
        timeout: 600 * SECOND,
    }
}

#[tokio::test(start_paused = true)]
async fn other_approvals_hold_at_once_for_what_is_asked_next_and_what_waits_stays_asked() {
    let (setting, broker) = inner();
    setting.ok("b", "print 1").await;
    let underway = setting.asks("a", "call notes echo").await;
    setting
        .sessions
        .set_up_approvals(setup(Defaults::default()))
        .unwrap();
    assert_eq!(
        answers(&setting.unasked("b", "call notes echo").await)[0]["ok"],
        true,
        "also in a session that was there"
    );
    let ExecutionReport::Underway(still) = setting.check(&underway).await else {
        panic!("it does not wait any more")
    };
    assert_eq!(still.approvals[0].id, underway.approvals[0].id);
    setting.decide(&underway, &[ApprovalAnswer::Once]).await;
    assert_eq!(answers(&setting.ended(&underway).await)[0]["ok"], true);
    // An action that is denied in the meantime stays denied, whatever the person answers.
    setting
        .sessions
        .set_up_approvals(setup(Defaults {
            tools: Effect::Ask,
            ..Defaults::default()
        }))
        .unwrap();
    let underway = setting.asks("a", "call notes echo").await;
    setting
        .sessions
        .set_up_approvals(setup(Defaults {
            tools: Effect::Deny,
            ..Defaults::default()
        }))
        .unwrap();
    let rulings = setting.decide(&underway, &[ApprovalAnswer::Always]).await;
    assert_eq!(rulings[0].by, DecidedBy::Policy);
    let refused = &answers(&setting.ended(&underway).await)[0];
    assert!(
        refused["text"]
            .as_str()
            .unwrap()
            .contains("`approve_tools: deny`"),
        "{refused}"
    );
    assert_eq!(broker.seen.lock().unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn approvals_that_cannot_hold_are_refused_as_a_whole() {
    let (setting, _) = house_with(without_undo());
    let shell = Defaults {
        shell: Effect::Ask,
        tools: Effect::Deny,
        ..Defaults::default()
    };
    let refused = setting.sessions.set_up_approvals(setup(shell));
    assert!(
        matches!(&refused, Err(Refused::Approvals { why }) if why.contains("restart")),
        "{refused:?}"
    );
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("approvals.yaml");
    std::fs::write(&store, "nonsense").unwrap();
    let deny = Defaults {
        tools: Effect::Deny,
        ..Defaults::default()
    };
    let unreadable = ApprovalSetup {
        store: Some(store.clone()),
        ..setup(deny)
    };
    assert!(
        setting
            .sessions
            .set_up_approvals(unreadable.clone())
            .is_err()
    );
    assert_eq!(
        answers(&setting.unasked("a", "call notes echo").await)[0]["ok"],
        true,
        "the old ones hold"
    );
    std::fs::remove_file(&store).unwrap();
    setting.sessions.set_up_approvals(unreadable).unwrap(); // Control.
    assert_eq!(
        answers(&setting.unasked("a", "call notes echo").await)[0]["reason"],
        "denied"
    );
    // A sandbox made for approvals accepts a policy that allows all commands, and back.
    let (closed, _) = house_with(SessionSettings {
        approvals: with_policy(shell).into(),
        ..without_undo()
    });
    for defaults in [Defaults::default(), shell] {
        closed.sessions.set_up_approvals(setup(defaults)).unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn approvals_can_be_remembered_from_one_moment_on() {
    let folder = tempfile::tempdir().unwrap();
    let (setting, _) = inner();
    assert!(!setting.asks("a", "call notes echo").await.approvals[0].can_last); // Control.
    let ask = Defaults {
        tools: Effect::Ask,
        ..Defaults::default()
    };
    let store = Some(folder.path().join("approvals.yaml"));
    setting
        .sessions
        .set_up_approvals(ApprovalSetup {
            store,
            ..setup(ask)
        })
        .unwrap();
    assert!(setting.asks("b", "call notes echo").await.approvals[0].can_last);
}

/// Has all packages already.
struct Unpacker;

impl install::PackageInstaller for Unpacker {
    fn install<'a>(
        &'a self,
        _request: install::InstallRequest,
        _tell: &'a (dyn Fn(String) + Send + Sync),
    ) -> BoxFuture<'a, Result<install::Installed, install::InstallError>> {
        Box::pin(async { Ok(install::Installed::default()) })
    }
}

fn echo() -> crate::approval::Subject {
    let (server, tool) = ("notes".to_owned(), "echo".to_owned());
    let fingerprint = Some(FakeBroker::fingerprint_of("notes", "echo", 0));
    crate::approval::Subject::Tool {
        server,
        tool,
        arguments: serde_json::Map::new(),
        fingerprint,
    }
}

#[tokio::test(start_paused = true)]
async fn nobody_is_asked_about_a_requirement_that_is_too_long() {
    let packages = install::PackageSource(Some(Arc::new(Unpacker)));
    let (setting, _) = house_with(SessionSettings {
        approvals: asking().into(),
        packages,
        ..without_undo()
    });
    let ask = |length: usize| {
        format!(
            r#"ask {{"what": "install", "requirements": ["{}"]}}"#,
            "x".repeat(length)
        )
    };
    let told = answers(&setting.unasked("a", &ask(501)).await);
    assert!(
        told[0]["text"]
            .as_str()
            .unwrap()
            .contains("501 characters is too long"),
        "{told:?}"
    );
    let many = format!(
        r#"ask {{"what": "install", "requirements": {:?}}}"#,
        vec!["x"; 101]
    );
    let told = answers(&setting.unasked("a", &many).await);
    assert!(
        told[0]["text"]
            .as_str()
            .unwrap()
            .contains("101 requirements are too many"),
        "{told:?}"
    );
    let approval = InstallApproval {
        asking: Approver::Person,
        answer: None,
    };
    let refused = setting
        .sessions
        .install(
            &owner(),
            &id("b"),
            vec!["x".repeat(501)],
            approval,
            CancellationToken::new(),
            &|_| (),
        )
        .await
        .unwrap_err();
    assert!(matches!(refused, Refused::Install(_)), "{refused}");
    setting.asks("a", &ask(500)).await; // Control.
}

#[tokio::test(start_paused = true)]
async fn questions_with_more_text_than_may_wait_are_refused() {
    let (setting, _) = inner();
    // Each call has 5 MiB; twelve of them fit into 64 MiB, thirteen do not.
    let call = format!(
        r#"calls 14 notes echo {{"text": "{}"}}"#,
        "x".repeat(5 << 20)
    );
    let underway = setting.asks("a", &call).await;
    assert_eq!(underway.approvals.len(), 12);
    assert!(
        underway
            .approvals
            .iter()
            .all(|asked| asked.text.len() < 4000),
        "they are shown short"
    );
}

#[tokio::test(start_paused = true)]
async fn packages_are_asked_for_in_a_cell_and_in_a_call() {
    let packages = install::PackageSource(Some(Arc::new(Unpacker)));
    let (setting, _) = house_with(SessionSettings {
        approvals: asking().into(),
        packages,
        ..without_undo()
    });
    let underway = setting
        .asks("a", r#"ask {"what": "install", "requirements": ["numpy"]}"#)
        .await;
    assert_eq!(underway.approvals[0].text, r#"install "numpy""#);
    setting.decide(&underway, &[ApprovalAnswer::Deny]).await;
    assert_eq!(answers(&setting.ended(&underway).await)[0]["ok"], false);
    let install = async |requirements: &[&str], asking: Approver, answer: Option<Decision>| {
        let requirements = requirements.iter().map(ToString::to_string).collect();
        let approval = InstallApproval { asking, answer };
        setting
            .sessions
            .install(
                &owner(),
                &id("a"),
                requirements,
                approval,
                CancellationToken::new(),
                &|_| (),
            )
            .await
    };
    let refused = install(&["numpy"], Approver::Nobody, None)
        .await
        .unwrap_err();
    assert!(
        refused.to_string().contains("`approve_packages: ask`"),
        "{refused}"
    );
    let Err(Refused::ApprovalNeeded { asked, .. }) =
        install(&["numpy"], Approver::Person, None).await
    else {
        panic!()
    };
    let yes = Some(Decision {
        id: asked.id,
        answer: ApprovalAnswer::Once,
    });
    let other = install(&["polars"], Approver::Person, yes).await;
    assert!(
        matches!(other, Err(Refused::ApprovalNeeded { .. })),
        "an answer is for what was shown: {other:?}"
    );
    let report = install(&["numpy"], Approver::Person, yes).await.unwrap();
    assert_eq!(
        report.ruling.unwrap().by,
        DecidedBy::Person(ApprovalAnswer::Once)
    );
    let again = install(&["numpy"], Approver::Person, yes).await;
    assert!(
        matches!(again, Err(Refused::ApprovalNeeded { .. })),
        "an answer counts once: {again:?}"
    );
    let Err(Refused::ApprovalNeeded { asked, .. }) = again else {
        panic!()
    };
    let no = Some(Decision {
        id: asked.id,
        answer: ApprovalAnswer::Deny,
    });
    let denied = install(&["numpy"], Approver::Person, no).await;
    assert!(
        matches!(denied, Err(Refused::NotApproved { .. })),
        "{denied:?}"
    );
    let Err(Refused::ApprovalNeeded { asked, .. }) =
        install(&["numpy"], Approver::Person, None).await
    else {
        panic!()
    };
    let session = Some(Decision {
        id: asked.id,
        answer: ApprovalAnswer::Session,
    });
    install(&["numpy"], Approver::Person, session)
        .await
        .unwrap();
    install(&["numpy>=2"], Approver::Nobody, None)
        .await
        .unwrap();
    setting
        .unasked("a", r#"ask {"what": "install", "requirements": ["NumPy"]}"#)
        .await;
}

fn with_policy(defaults: Defaults) -> Approvals {
    Approvals {
        policy: Arc::new(Policy::new(defaults)),
        ..Approvals::default()
    }
}

#[tokio::test(start_paused = true)]
async fn a_command_waits_for_a_person_and_runs_from_the_words_that_were_shown() {
    let approvals = with_policy(Defaults {
        shell: Effect::Ask,
        ..Defaults::default()
    });
    let (setting, _) = house_with(SessionSettings {
        approvals: approvals.into(),
        ..without_undo()
    });
    let underway = setting.asks("a", "run echo out").await;
    assert_eq!(
        (
            underway.approvals[0].kind.as_str(),
            underway.approvals[0].text.as_str()
        ),
        ("shell", "!\n   | echo out")
    );
    assert_eq!(underway.approvals[0].covers, "exactly this command");
    assert!(setting.backend.launched().is_empty());
    setting.decide(&underway, &[ApprovalAnswer::Session]).await;
    assert!(text(&setting.ended(&underway).await).starts_with("out\n"));
    assert_eq!(
        setting.backend.launched(),
        [["/bin/bash", "-c", "echo out"]]
    );
    setting.unasked("a", "run echo out").await;
    let other = setting.asks("a", "run echo other").await;
    setting.decide(&other, &[ApprovalAnswer::Deny]).await;
    let told: Value = serde_json::from_str(
        text(&setting.ended(&other).await)
            .lines()
            .next_back()
            .unwrap(),
    )
    .unwrap();
    assert_eq!(told["reason"], "denied");
    assert_eq!(setting.backend.launched().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_connection_is_held_until_somebody_has_decided() {
    let approvals = with_policy(Defaults {
        domains: Effect::Ask,
        ..Defaults::default()
    });
    let (setting, _) = house_with(SessionSettings {
        approvals: approvals.into(),
        ..without_undo()
    });
    setting.unasked("a", "print ready").await;
    let connect = || {
        let backend = setting.backend.clone();
        tokio::spawn(async move { backend.connect("api.example.com", 443).await })
    };
    assert!(
        !connect().await.unwrap(),
        "nobody can be asked while no cell runs"
    );
    let sessions = setting.sessions.clone();
    let request = ExecuteRequest {
        timeout: 5 * SECOND,
        ..cell("sleep 4")
    };
    let running = tokio::spawn(async move {
        sessions
            .begin(
                &owner(),
                &id("a"),
                request,
                Some(1000 * SECOND),
                CancellationToken::new(),
                nobody(),
            )
            .await
    });
    setting
        .wait_until(|info| info.state == SessionState::Running)
        .await;
    let (one, two) = (connect(), connect());
    let ExecutionReport::Underway(underway) = running.await.unwrap().unwrap() else {
        panic!("nothing was asked")
    };
    let [asked] = underway.approvals.as_slice() else {
        panic!("two to the same place are one: {:?}", underway.approvals)
    };
    assert_eq!(
        (asked.kind.as_str(), asked.text.as_str()),
        ("domain", "connect to api.example.com at port 443")
    );
    setting.decide(&underway, &[ApprovalAnswer::Session]).await;
    assert!(one.await.unwrap() && two.await.unwrap());
    setting.ended(&underway).await;
    assert!(
        connect().await.unwrap(),
        "it was allowed for the session, and needs no cell"
    );
    assert!(!setting.backend.connect("other.example.com", 443).await);
    setting.sessions.reset(&owner(), &id("a")).await.unwrap();
    assert!(
        setting.backend.connect("api.example.com", 443).await,
        "a reset keeps it"
    );
    let rules = crate::sandbox::Rules::none();
    setting.narrow("a", rules).await.unwrap();
    assert!(
        !setting.backend.connect("api.example.com", 443).await,
        "whoever narrows the network means it"
    );
}

#[tokio::test(start_paused = true)]
async fn without_an_asker_names_are_as_closed_as_ever() {
    let (setting, _) = inner();
    setting.unasked("a", "print ready").await;
    assert!(!setting.backend.connect("api.example.com", 443).await);
}
