//! Tests of tool calls in sessions, with the fake backend and a broker controlled by the test.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use cellblock_typed::{Package, ServerName, ToolSchema};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use super::lifecycle::{Setting, id, owner, request, setting_with, text, without_undo};
use crate::approval::{Fingerprint, Policy};
use crate::sandbox::fake::FakeBackend;
use crate::session::servers::{ServerReport, ServerRequest, ServerSetup};
use crate::session::tools::{
    Broker, CallEnd, ToolReason, ToolRefused, ToolReply, Tools, UpstreamToolCall,
};
use crate::session::*;

/// Has the servers `notes`, for all owners, and `private`, for `ann`. Tools: `echo`, `fail`,
/// `wait`, `large`, `panic`.
pub(super) struct FakeBroker {
    pub(super) packages: Mutex<BTreeMap<String, Vec<Arc<Package>>>>,
    pub(super) version: watch::Sender<u64>,
    /// Policies of the registrations.
    pub(super) policies: Mutex<BTreeMap<String, Arc<Policy>>>,
    /// Permits for calls of `wait` to continue.
    pub(super) go: Semaphore,
    pub(super) seen: Mutex<Vec<(String, String)>>,
    /// Counts how often the tools have changed.
    pub(super) edition: watch::Sender<u64>,
    under_way: watch::Sender<usize>,
    given_up: watch::Sender<usize>,
}

impl FakeBroker {
    pub(super) fn new() -> Arc<FakeBroker> {
        Arc::new(FakeBroker {
            packages: Mutex::default(),
            version: watch::Sender::new(0),
            policies: Mutex::default(),
            go: Semaphore::new(0),
            seen: Mutex::default(),
            edition: watch::Sender::new(0),
            under_way: watch::Sender::new(0),
            given_up: watch::Sender::new(0),
        })
    }

    /// Returns the fingerprint of a tool in this edition.
    pub(super) fn fingerprint_of(server: &str, tool: &str, edition: u64) -> Fingerprint {
        Fingerprint::of(&[server.as_bytes(), tool.as_bytes(), &edition.to_le_bytes()])
    }

    /// Replaces an owner's servers; each has one tool with the given description.
    fn offer(&self, owner: &str, servers: &[(&str, &str)]) {
        let package =
            |(server, description): &(&str, &str)| package(server, &[("echo", description)]);
        self.hold(owner, servers.iter().map(package).collect());
    }

    fn hold(&self, owner: &str, packages: Vec<Arc<Package>>) {
        self.packages
            .lock()
            .unwrap()
            .insert(owner.to_owned(), packages);
        self.version.send_modify(|version| *version += 1);
    }

    async fn until_under_way(&self, count: usize) {
        self.under_way
            .subscribe()
            .wait_for(|now| *now == count)
            .await
            .unwrap();
    }

    async fn until_given_up(&self, count: usize) {
        self.given_up
            .subscribe()
            .wait_for(|now| *now == count)
            .await
            .unwrap();
    }
}

/// Builds the package of a server with these tools and their descriptions.
fn package(server: &str, tools: &[(&str, &str)]) -> Arc<Package> {
    let tool = |(name, description): &(&str, &str)| ToolSchema {
        name: (*name).to_owned(),
        title: None,
        description: Some((*description).to_owned()),
        input: json!({"type": "object"}),
        output: None,
    };
    let tools = tools.iter().map(tool).collect::<Vec<_>>();
    Arc::new(cellblock_typed::generate(&ServerName::new(server).unwrap(), &tools).unwrap())
}

/// Records whether a call completed.
struct UnderWay<'a> {
    broker: &'a FakeBroker,
    over: bool,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.broker.under_way.send_modify(|count| *count -= 1);
        if !self.over {
            self.broker.given_up.send_modify(|count| *count += 1);
        }
    }
}

#[async_trait]
impl Broker for FakeBroker {
    async fn call(
        &self,
        owner: &Principal,
        session: &SessionId,
        call: UpstreamToolCall,
        tell: &(dyn Fn(String) + Send + Sync),
    ) -> Result<ToolReply, ToolRefused> {
        if call.fingerprint
            != Some(FakeBroker::fingerprint_of(
                &call.server,
                &call.tool,
                *self.edition.borrow(),
            ))
        {
            return Err(ToolRefused::another_tool(&call.server));
        }
        self.seen
            .lock()
            .unwrap()
            .push((owner.0.clone(), session.as_str().to_owned()));
        let is_there = call.server == "notes" || (call.server == "private" && owner.0 == "ann");
        if !is_there {
            return Err(ToolRefused::no_server(&call.server));
        }
        self.under_way.send_modify(|count| *count += 1);
        let mut under_way = UnderWay {
            broker: self,
            over: false,
        };
        let text = |text: &str| vec![json!({"type": "text", "text": text})];
        let result = match call.tool.as_str() {
            "echo" => Ok(ToolReply {
                structured: Some(Value::Object(call.arguments)),
                ..ToolReply::default()
            }),
            "fail" => Ok(ToolReply {
                content: text("it broke"),
                is_error: true,
                ..ToolReply::default()
            }),
            "wait" => {
                tell("half\nof it".to_owned());
                self.go.acquire().await.unwrap().forget();
                Ok(ToolReply::default())
            }
            "large" => Ok(ToolReply {
                content: text(&"x".repeat(33 << 20)),
                ..ToolReply::default()
            }),
            "panic" => panic!("a broker that breaks"),
            _ => Err(ToolRefused::new(
                ToolReason::Unknown,
                "there is no such tool",
            )),
        };
        under_way.over = true;
        result
    }

    fn fingerprint(
        &self,
        _: &Principal,
        server: &str,
        tool: &str,
    ) -> Result<Option<Fingerprint>, ToolRefused> {
        if tool == "absent" {
            return Err(ToolRefused::new(
                ToolReason::Unknown,
                "there is no such tool; did you mean \"echo\"?",
            ));
        }
        Ok(Some(FakeBroker::fingerprint_of(
            server,
            tool,
            *self.edition.borrow(),
        )))
    }

    fn policy(&self, _owner: &Principal, server: &str) -> Option<Arc<Policy>> {
        self.policies.lock().unwrap().get(server).cloned()
    }

    fn packages(&self, owner: &Principal) -> Vec<Arc<Package>> {
        self.packages
            .lock()
            .unwrap()
            .get(&owner.0)
            .cloned()
            .unwrap_or_default()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    async fn register(
        &self,
        _: &Principal,
        request: ServerRequest,
    ) -> Result<ServerReport, String> {
        Err(format!("nothing is registered as {}", request.name))
    }

    fn set_up(&self, _: ServerSetup) {}

    async fn unregister(&self, _: &Principal, _: &str) -> Result<(), String> {
        Ok(())
    }

    fn servers(&self, _: &Principal) -> Vec<ServerReport> {
        Vec::new()
    }
}

pub(super) fn with_tools() -> (Setting, Arc<FakeBroker>) {
    let broker = FakeBroker::new();
    let tools = Tools(Some(broker.clone()));
    (
        setting_with(
            FakeBackend::new(),
            SessionSettings {
                tools,
                ..without_undo()
            },
        ),
        broker,
    )
}

fn answer(outcome: &Outcome) -> Value {
    serde_json::from_str(text(outcome).lines().next().unwrap_or_default()).unwrap()
}

#[tokio::test]
async fn a_cell_calls_a_tool_and_gets_what_it_returned() {
    let (setting, broker) = with_tools();
    let outcome = setting
        .ok("a", r#"call notes echo {"title": "żółw", "count": null}"#)
        .await;
    let expected = json!({"ask": 1, "ok": true, "content": [], "is_error": false,
        "structured": {"title": "żółw", "count": null}});
    assert_eq!(answer(&outcome), expected);
    assert_eq!(
        (outcome.tool_calls.total, outcome.tool_calls.failed),
        (1, 0)
    );
    let noted = &outcome.tool_calls.noted[0];
    assert_eq!(
        (noted.server.as_str(), noted.tool.as_str(), noted.ended),
        ("notes", "echo", CallEnd::Answered)
    );
    assert_eq!(
        *broker.seen.lock().unwrap(),
        [("local".to_owned(), "a".to_owned())]
    );
    assert_eq!(
        setting.ok("a", "print 1").await.tool_calls,
        Default::default(),
        "each cell has calls of its own"
    );
}

#[tokio::test]
async fn errors_of_tools_and_refusals_are_told_by_their_words() {
    let (setting, _) = with_tools();
    let failed = setting.ok("a", "call notes fail").await;
    assert_eq!(
        (&answer(&failed)["ok"], &answer(&failed)["is_error"]),
        (&json!(true), &json!(true))
    );
    assert_eq!(failed.tool_calls.noted[0].ended, CallEnd::ToolError);
    for (call, reason) in [
        ("notes nothing", "unknown"),
        ("nobody echo", "unknown"),
        ("notes large", "too_large"),
        ("notes panic", "other"),
    ] {
        let outcome = setting.ok("a", &format!("call {call}")).await;
        let answer = answer(&outcome);
        assert_eq!(
            (&answer["ok"], answer["reason"].as_str()),
            (&json!(false), Some(reason)),
            "{call}"
        );
        assert!(!answer["text"].as_str().unwrap().is_empty());
        assert_eq!(outcome.tool_calls.failed, 1);
    }
}

#[tokio::test]
async fn a_session_has_the_rights_of_its_owner_whatever_its_code_says() {
    let (setting, broker) = with_tools();
    let run = async |owner: &str, code: &str| {
        let owner = Principal(owner.to_owned());
        let outcome = setting
            .sessions
            .execute(&owner, &id("a"), request(code), CancellationToken::new())
            .await;
        answer(&outcome.unwrap())
    };
    assert_eq!(
        run("ann", "call private echo {}").await["ok"],
        true,
        "the control"
    );
    let words = r#"ask {"what": "call_tool", "server": "private", "tool": "echo", "arguments": {}, "owner": "ann", "principal": "ann", "session": "a"}"#;
    let (bob, nobody) = (
        run("bob", words).await,
        run("bob", "call absent echo {}").await,
    );
    assert_eq!(bob["reason"], "unknown");
    assert_eq!(
        bob["text"].as_str().unwrap().replace("private", "absent"),
        nobody["text"].as_str().unwrap()
    );
    let owners: Vec<String> = broker
        .seen
        .lock()
        .unwrap()
        .iter()
        .map(|(owner, _)| owner.clone())
        .collect();
    assert_eq!(owners, ["ann", "bob", "bob"]);
}

#[tokio::test]
async fn without_a_broker_there_are_no_servers() {
    let setting = setting_with(FakeBackend::new(), without_undo());
    assert_eq!(
        answer(&setting.ok("a", "call notes echo").await)["reason"],
        "unknown"
    );
}

#[tokio::test]
async fn many_calls_are_under_way_at_once_and_the_rest_wait() {
    let (setting, broker) = with_tools();
    let cell = setting
        .begin("a", "calls 200 notes wait", CancellationToken::new())
        .await;
    broker.until_under_way(64).await;
    broker.go.add_permits(200);
    assert_eq!(text(&cell.await.unwrap().unwrap()), "{\"answered\": 200}\n");
}

#[tokio::test]
async fn a_cell_that_calls_without_end_is_told_so() {
    let (setting, _) = with_tools();
    // Ten thousand calls take seconds, and longer on a busy machine.
    let mut many = request("calls 10005 notes echo");
    many.timeout = Duration::from_secs(120);
    let outcome = setting
        .sessions
        .execute(&owner(), &id("a"), many, CancellationToken::new())
        .await
        .unwrap();
    assert_eq!(text(&outcome), "{\"answered\": 10000, \"budget\": 5}\n");
    assert_eq!(
        (outcome.tool_calls.total, outcome.tool_calls.noted.len()),
        (10_005, 100)
    );
    assert_eq!(
        text(&setting.ok("a", "calls 1 notes echo").await),
        "{\"answered\": 1}\n",
        "the next one begins anew"
    );
}

#[tokio::test]
async fn a_withdrawn_call_is_cancelled_and_both_are_answered() {
    let (setting, broker) = with_tools();
    let outcome = setting.ok("a", "forget notes wait").await;
    let answers = text(&outcome);
    let answers: Vec<Value> = answers
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        (&answers[0]["ask"], answers[0]["reason"].as_str()),
        (&json!(1), Some("cancelled"))
    );
    assert_eq!(
        (&answers[1]["ask"], &answers[1]["ok"]),
        (&json!(2), &json!(true))
    );
    broker.until_under_way(0).await;
    assert_eq!(
        outcome.tool_calls.noted[0].ended,
        CallEnd::Refused(ToolReason::Cancelled)
    );
}

#[tokio::test(start_paused = true)]
async fn a_call_ends_with_its_cell() {
    let (setting, broker) = with_tools();
    let mut slow = request("call notes wait");
    slow.timeout = Duration::from_secs(1);
    let outcome = setting
        .sessions
        .execute(&owner(), &id("a"), slow, CancellationToken::new())
        .await
        .unwrap();
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
    broker.until_given_up(1).await;
    let cell = setting
        .begin("a", "call notes wait", CancellationToken::new())
        .await;
    broker.until_under_way(1).await;
    setting.sessions.reset(&owner(), &id("a")).await.unwrap();
    broker.until_given_up(2).await;
    assert_eq!(cell.await.unwrap().unwrap().status, Status::Reset);
}

#[tokio::test]
async fn what_a_call_tells_is_news_of_the_cell() {
    let (setting, broker) = with_tools();
    let (news, mut heard) = watch::channel(String::new());
    let (sessions, code) = (setting.sessions.clone(), request("call notes wait"));
    let cell = tokio::spawn(async move {
        sessions
            .begin(
                &owner(),
                &id("a"),
                code,
                None,
                CancellationToken::new(),
                news,
            )
            .await
    });
    heard.wait_for(|line| line == "half of it").await.unwrap();
    broker.go.add_permits(1);
    assert!(matches!(
        cell.await.unwrap().unwrap(),
        ExecutionReport::Finished { .. }
    ));
}

#[tokio::test]
async fn the_number_of_a_question_is_used_once() {
    let (setting, broker) = with_tools();
    let wait = r#"ask-on {"what": "call_tool", "server": "notes", "tool": "wait", "ask": 7}"#;
    let outcome = setting.ok("a", &format!("{wait}\n{wait}\nsleep 9")).await;
    assert!(
        matches!(outcome.status, Status::ProtocolError { .. }),
        "{:?}",
        outcome.status
    );
    broker.until_under_way(0).await;
}

/// Returns the file of a tool, if it exists.
async fn module(setting: &Setting, session: &str, server: &str) -> Option<String> {
    let outcome = setting
        .ok(session, &format!("file mcptools/{server}/echo.py"))
        .await;
    (outcome.status == Status::Completed).then(|| text(&outcome))
}

async fn index(setting: &Setting, session: &str) -> String {
    text(&setting.ok(session, "file mcptools/__init__.py").await)
}

#[tokio::test]
async fn a_session_has_the_packages_of_its_owner_before_its_first_cell() {
    let (setting, broker) = with_tools();
    broker.offer("local", &[("notes", "Says it.")]);
    broker.offer("ann", &[("private", "Hers.")]);
    assert!(
        module(&setting, "a", "notes")
            .await
            .unwrap()
            .contains("Says it.")
    );
    assert!(index(&setting, "a").await.contains("notes"));
    assert_eq!(module(&setting, "a", "private").await, None);
}

#[tokio::test]
async fn without_servers_nothing_is_written() {
    let (setting, _) = with_tools();
    assert!(matches!(
        setting.ok("a", "file mcptools/__init__.py").await.status,
        Status::Raised(_)
    ));
}

#[tokio::test]
async fn a_change_reaches_a_session_at_rest_at_once_and_a_running_one_after_its_cell() {
    let (setting, broker) = with_tools();
    setting.ok("a", "print 1").await;
    broker.offer("local", &[("notes", "First.")]);
    // The file appears without a cell in between.
    while setting
        .download("a", "mcptools/__init__.py", 10_000)
        .await
        .is_err()
    {
        tokio::task::yield_now().await;
    }
    let cell = setting
        .begin(
            "a",
            "call notes wait\nfile mcptools/notes/echo.py",
            CancellationToken::new(),
        )
        .await;
    broker.until_under_way(1).await;
    broker.offer("local", &[("notes", "Second."), ("more", "Third.")]);
    broker.go.add_permits(1);
    assert!(
        text(&cell.await.unwrap().unwrap()).contains("First."),
        "nothing changes under a running cell"
    );
    assert!(
        module(&setting, "a", "notes")
            .await
            .unwrap()
            .contains("Second.")
    );
    assert!(module(&setting, "a", "more").await.is_some());
    broker.offer("local", &[("more", "Third.")]);
    assert_eq!(module(&setting, "a", "notes").await, None);
    broker.offer("local", &[]);
    assert_eq!(module(&setting, "a", "more").await, None);
    assert!(!index(&setting, "a").await.contains("more"));
}

#[tokio::test]
async fn what_was_missed_is_made_up_for_after_a_reset_and_an_undo() {
    let broker = FakeBroker::new();
    let settings = SessionSettings {
        tools: Tools(Some(broker.clone())),
        ..SessionSettings::default()
    };
    let setting = setting_with(FakeBackend::new(), settings);
    broker.offer("local", &[("old", "Old.")]);
    setting.ok("a", "set x 1").await;
    setting.ok("a", "set x 2").await;
    broker.offer("local", &[("new", "New.")]);
    assert!(module(&setting, "a", "new").await.is_some());
    setting.sessions.undo(&owner(), &id("a"), 2).await.unwrap();
    assert_eq!(
        text(&setting.ok("a", "get x").await),
        "1\n",
        "the undo itself"
    );
    assert!(module(&setting, "a", "new").await.is_some());
    assert_eq!(module(&setting, "a", "old").await, None);
    setting.ok("a", "exit 1").await;
    broker.offer("local", &[("newest", "Newest.")]);
    setting.sessions.reset(&owner(), &id("a")).await.unwrap();
    assert!(module(&setting, "a", "newest").await.is_some());
    assert_eq!(module(&setting, "a", "new").await, None);
}

#[tokio::test]
async fn a_session_in_whose_folder_nothing_can_be_written_says_so_once() {
    let (setting, broker) = with_tools();
    setting.ok("a", "set refuse-tools 1").await;
    broker.offer("local", &[("notes", "Says it.")]);
    let outcome = setting.ok("a", "sleep 0.01").await;
    assert!(
        outcome
            .notes
            .iter()
            .any(|note| note.text.contains("no room")),
        "{:?}",
        outcome.notes
    );
    assert!(setting.ok("a", "print 1").await.notes.is_empty());
}

#[tokio::test]
async fn a_fork_keeps_its_grants_and_can_be_given_fewer_and_never_more() {
    let (setting, broker) = with_tools();
    broker.offer("local", &[("more", "More."), ("notes", "Notes.")]);
    setting.ok("a", "print 1").await;
    let fork = async |source: &str, name: &str, servers: Option<&[&str]>| {
        let servers = servers.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
        let request = ForkRequest {
            names: ForkNames::Named(vec![id(name)]),
            servers,
        };
        setting.sessions.fork(&owner(), &id(source), request).await
    };
    fork("a", "all", None).await.unwrap();
    fork("a", "less", Some(&["more"])).await.unwrap();
    assert_eq!(
        answer(&setting.ok("all", "call notes echo").await)["ok"],
        true,
        "the control"
    );
    assert!(module(&setting, "all", "notes").await.is_some());
    assert_eq!(
        answer(&setting.ok("less", "call notes echo").await)["reason"],
        "unknown"
    );
    assert_eq!(module(&setting, "less", "notes").await, None);
    assert!(module(&setting, "less", "more").await.is_some());
    // Neither a reset nor a fork of the fork restores the tools that it lacks.
    setting.sessions.reset(&owner(), &id("less")).await.unwrap();
    assert_eq!(
        answer(&setting.ok("less", "call notes echo").await)["reason"],
        "unknown"
    );
    assert!(matches!(fork("less", "again", Some(&["notes"])).await,
            Err(Refused::NoServer { name }) if name == "notes"));
    fork("less", "child", None).await.unwrap();
    assert_eq!(
        answer(&setting.ok("child", "call notes echo").await)["reason"],
        "unknown"
    );
    fork("a", "none", Some(&[])).await.unwrap();
    assert_eq!(
        answer(&setting.ok("none", "call notes echo").await)["reason"],
        "unknown"
    );
    assert!(matches!(
        fork("a", "wrong", Some(&["absent"])).await,
        Err(Refused::NoServer { .. })
    ));
}

#[tokio::test]
async fn a_fork_can_be_given_some_tools_of_a_server_and_the_others_are_not_there() {
    let (setting, broker) = with_tools();
    let tools = [
        ("echo", "Says it."),
        ("fail", "Breaks."),
        ("wait", "Waits."),
    ];
    broker.hold(
        "local",
        vec![package("more", &tools), package("notes", &tools)],
    );
    setting.ok("a", "print 1").await;
    let fork = async |source: &str, name: &str, servers: &[&str]| {
        let servers = Some(servers.iter().map(|name| (*name).to_owned()).collect());
        let request = ForkRequest {
            names: ForkNames::Named(vec![id(name)]),
            servers,
        };
        setting.sessions.fork(&owner(), &id(source), request).await
    };
    let file = async |session: &str, path: &str| {
        text(&setting.ok(session, &format!("file mcptools/{path}")).await)
    };
    assert!(
        file("a", "notes/fail.py").await.contains("Breaks."),
        "the control"
    );
    fork("a", "some", &["notes.e*", "notes.fa*"]).await.unwrap();
    fork("some", "one", &["notes.echo"]).await.unwrap();
    for session in ["some", "one"] {
        assert_eq!(
            answer(&setting.ok(session, "call notes echo").await)["ok"],
            true,
            "{session}"
        );
        assert!(file(session, "notes/echo.py").await.contains("Says it."));
        assert!(!file(session, "notes/__init__.py").await.contains("Waits."));
        assert!(!file(session, "notes/wait.py").await.contains("Waits."));
        assert!(!file(session, "__init__.py").await.contains("wait"));
        assert!(!file(session, "more/echo.py").await.contains("Says it."));
    }
    // A tool that was not granted and one that does not exist give identical texts, which name
    // nothing else.
    let refused = async |session: &str, tool: &str| {
        let refused = answer(&setting.ok(session, &format!("call notes {tool}")).await);
        (
            refused["reason"].clone(),
            refused["text"]
                .as_str()
                .unwrap_or_default()
                .replace(tool, "?"),
        )
    };
    assert_eq!(refused("one", "fail").await, refused("one", "absent").await);
    assert_eq!(
        refused("some", "wait").await,
        refused("some", "absent").await
    );
    assert_eq!(
        refused("some", "fail").await.0,
        Value::Null,
        "the control: it may call this one"
    );
    let server = answer(&setting.ok("one", "call more echo").await)["text"]
        .as_str()
        .unwrap()
        .replace("more", "?");
    assert_eq!(
        server,
        answer(&setting.ok("one", "call none echo").await)["text"]
            .as_str()
            .unwrap()
            .replace("none", "?")
    );
    // A fork of it never gets more tools, and a reset restores none.
    for wrong in [
        "notes.wait",
        "notes.w*",
        "more",
        "more.echo",
        "notes.absent",
        "absent",
    ] {
        assert!(
            matches!(fork("some", "wrong", &[wrong]).await,
                Err(Refused::NoServer { name }) if name == wrong),
            "{wrong}"
        );
    }
    fork("one", "whole", &["notes"]).await.unwrap();
    setting.sessions.reset(&owner(), &id("one")).await.unwrap();
    for session in ["one", "whole"] {
        assert_eq!(refused(session, "fail").await.0, "unknown", "{session}");
        assert!(!file(session, "notes/fail.py").await.contains("Breaks."));
    }
}
