//! Questions to the person behind a client, in both protocol eras: real sessions that ask before
//! packages are installed.

use std::pin::Pin;

use serde_json::{Value, json};

use super::*;
use crate::approval::{Defaults, Effect, Policy};
use crate::session::Approvals;
use crate::session::install::{
    InstallRequest, Installed, PackageInstaller, PackageSource as Packages,
};

/// Has everything already, and says so.
struct Unpacker;

impl PackageInstaller for Unpacker {
    fn install<'a>(
        &'a self,
        request: InstallRequest,
        _tell: &'a (dyn Fn(String) + Send + Sync),
    ) -> Pin<Box<dyn Future<Output = Result<Installed, InstallError>> + Send + 'a>> {
        let text = format!("has {}", request.requirements.join(" "));
        Box::pin(async {
            Ok(Installed {
                paths: Vec::new(),
                text,
            })
        })
    }
}

const ASK: &str = r#"ask {"what": "install", "requirements": ["numpy"]}"#;

fn connected() -> Client {
    let policy = Policy::new(Defaults {
        packages: Effect::Ask,
        ..Defaults::default()
    });
    let approvals = Approvals {
        policy: Arc::new(policy),
        ..Approvals::default()
    }
    .into();
    let packages = Packages(Some(Arc::new(Unpacker)));
    let settings = SessionSettings {
        approvals,
        packages,
        ..SessionSettings::default()
    };
    let sessions = Sessions::new(Arc::new(FakeBackend::new()), settings);
    let (_, never) = mpsc::channel(64);
    Client::of(
        Arc::new(sessions),
        never,
        watch::Sender::new(Preparation::Ready),
    )
}

async fn older(version: &str, capabilities: Value) -> Client {
    let mut client = connected();
    let mut opening = initialize(version);
    opening["params"]["capabilities"] = capabilities;
    client.ask(opening).await;
    client
        .send(json!({"jsonrpc": "2.0", "method": "notifications/initialized"}))
        .await;
    client
}

impl Client {
    /// Waits for the form that the server shows.
    async fn form(&mut self) -> Value {
        let form = self.next().await;
        assert_eq!(form["method"], "elicitation/create", "{form}");
        form
    }

    async fn fill_in(&mut self, form: &Value, result: Value) {
        self.send(json!({"jsonrpc": "2.0", "id": form["id"], "result": result}))
            .await;
    }
}

fn accept(decision: &str) -> Value {
    json!({"action": "accept", "content": {"decision": decision}})
}

/// A call of a newer client that can be asked.
fn newer(tool: &str, arguments: &Value, more: Value) -> Value {
    let mut params = json!({"name": tool, "arguments": arguments});
    params
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().cloned().unwrap_or_default());
    with_capabilities(
        modern(1, "tools/call", params),
        json!({"elicitation": {"form": {}}}),
    )
}

fn with_capabilities(mut request: Value, capabilities: Value) -> Value {
    request["params"]["_meta"]["io.modelcontextprotocol/clientCapabilities"] = capabilities;
    request
}

/// The answer to the one form of a result.
fn answer_to(asked: &Value, result: Value) -> Value {
    let key = asked["inputRequests"]
        .as_object()
        .unwrap()
        .keys()
        .next()
        .unwrap()
        .clone();
    json!({"inputResponses": {key: result}, "requestState": asked["requestState"]})
}

#[tokio::test]
async fn an_older_client_shows_a_form_and_the_code_goes_on() {
    let mut client = older("2025-11-25", json!({"elicitation": {}})).await;
    client.send(execute(1, &format!("print once\n{ASK}"))).await;
    let form = client.form().await;
    let message = form["params"]["message"].as_str().unwrap();
    for words in [
        r#"1. install "numpy""#,
        "`approve_packages: ask`",
        "every version of numpy",
        "`default`",
    ] {
        assert!(message.contains(words), "{message}");
    }
    assert_eq!(
        form["params"]["requestedSchema"]["properties"]["decision"]["oneOf"][0]["const"],
        "once"
    );
    client.fill_in(&form, accept("session")).await;
    let answer = client.next().await;
    assert!(
        text(&answer).starts_with("once\n") && text(&answer).contains("has numpy"),
        "{answer}"
    );
    let again = client.ask(execute(2, ASK)).await;
    assert!(
        text(&again).contains("has numpy"),
        "it was allowed for the session: {again}"
    );
    // The tool asks about what the session has no permission for.
    client
        .send(call("install_package", json!({"package_name": "polars"})))
        .await;
    let form = client.form().await;
    assert!(
        form["params"]["message"]
            .as_str()
            .unwrap()
            .contains(r#"install "polars""#),
        "{form}"
    );
    client.fill_in(&form, accept("once")).await;
    assert!(text(&client.next().await).contains("has polars"));
}

#[tokio::test]
async fn whatever_is_not_a_yes_is_a_no() {
    let mut client = older("2025-11-25", json!({"elicitation": {"form": {}}})).await;
    let no = [
        json!({"action": "decline"}),
        json!({"action": "cancel"}),
        json!({"action": "accept"}),
        json!({"action": "accept", "content": {"decision": "certainly"}}),
    ];
    for (number, result) in (1..).zip(no) {
        client.send(execute(number, ASK)).await;
        let form = client.form().await;
        client.fill_in(&form, result.clone()).await;
        let answer = client.next().await;
        assert!(
            text(&answer).contains("did not allow"),
            "{result}: {answer}"
        );
    }
    client.send(execute(9, ASK)).await;
    let form = client.form().await;
    let error =
        json!({"jsonrpc": "2.0", "id": form["id"], "error": {"code": -1, "message": "no window"}});
    client.send(error).await;
    assert!(text(&client.next().await).contains("did not allow"));
    client
        .send(call("install_package", json!({"package_name": "polars"})))
        .await;
    let form = client.form().await;
    client.fill_in(&form, json!({"action": "decline"})).await;
    let answer = client.next().await;
    assert_eq!(answer["result"]["isError"], true);
    assert!(text(&answer).contains("nothing was installed"), "{answer}");
}

#[tokio::test]
async fn revisions_before_titles_get_the_names_that_they_know() {
    let mut client = older("2025-06-18", json!({"elicitation": {}})).await;
    client.send(execute(1, ASK)).await;
    let form = client.form().await;
    let decision = &form["params"]["requestedSchema"]["properties"]["decision"];
    assert_eq!(decision["enum"], json!(["once", "session", "deny"]));
    assert_eq!(decision["enumNames"].as_array().unwrap().len(), 3);
    client.fill_in(&form, accept("once")).await;
    assert!(text(&client.next().await).contains("has numpy"));
}

#[tokio::test]
async fn a_client_that_cannot_ask_is_told_so_at_once() {
    let refused = |answer: &Value| {
        let said = text(answer).to_owned();
        assert!(
            said.contains("`approve_packages: ask`")
                && said.contains("does not support elicitation"),
            "{said}"
        );
    };
    for capabilities in [json!({}), json!({"elicitation": {"url": {}}})] {
        let mut client = older("2025-11-25", capabilities).await;
        refused(&client.ask(execute(1, ASK)).await);
        refused(
            &client
                .ask(call("install_package", json!({"package_name": "numpy"})))
                .await,
        );
    }
    let mut client = connected();
    let arguments = json!({"code": ASK});
    let params = json!({"name": "execute_ipython_cell", "arguments": arguments});
    refused(&client.ask(modern(1, "tools/call", params)).await);
    // Control: the same client, when the request itself says that it can.
    let asked = client
        .ask(newer("execute_ipython_cell", &arguments, json!({})))
        .await;
    assert_eq!(asked["result"]["resultType"], "input_required", "{asked}");
}

#[tokio::test]
async fn a_call_that_is_cancelled_takes_its_form_away() {
    let mut client = older("2025-11-25", json!({"elicitation": {}})).await;
    client.send(execute(1, ASK)).await;
    let form = client.form().await;
    client.send(cancel(1)).await;
    let withdrawn = client.next().await;
    assert_eq!(
        withdrawn["method"], "notifications/cancelled",
        "{withdrawn}"
    );
    assert_eq!(withdrawn["params"]["requestId"], form["id"]);
    client.fill_in(&form, accept("session")).await;
    let checked = client
        .ask(request(
            2,
            "tools/call",
            json!({"name": "check_execution", "arguments": {}}),
        ))
        .await;
    assert_eq!(
        checked["result"]["structuredContent"]["status"], "cancelled",
        "{checked}"
    );
    // Control: the late answer has allowed nothing.
    client.send(execute(3, ASK)).await;
    client.form().await;
}

#[tokio::test]
async fn a_newer_client_sends_the_call_again_with_the_answer_and_the_code_runs_once() {
    let mut client = connected();
    let arguments = json!({"code": format!("print once\n{ASK}")});
    let tool = "execute_ipython_cell";
    let asked = client.ask(newer(tool, &arguments, json!({}))).await["result"].take();
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    let form = asked["inputRequests"]
        .as_object()
        .unwrap()
        .values()
        .next()
        .unwrap()
        .clone();
    assert_eq!(form["method"], "elicitation/create");
    assert!(
        form["params"]["message"]
            .as_str()
            .unwrap()
            .contains(r#"install "numpy""#),
        "{form}"
    );
    let answered = client
        .ask(newer(tool, &arguments, answer_to(&asked, accept("once"))))
        .await;
    assert_eq!(answered["result"]["resultType"], "complete");
    assert_eq!(text(&answered).matches("once").count(), 1, "{answered}");
    assert!(text(&answered).contains("has numpy"));
    // The same message again finds the same execution, and decides nothing.
    let replayed = client
        .ask(newer(tool, &arguments, answer_to(&asked, accept("deny"))))
        .await;
    assert!(text(&replayed).contains("has numpy"), "{replayed}");
    let next = client.ask(newer(tool, &arguments, json!({}))).await;
    assert_eq!(
        next["result"]["resultType"], "input_required",
        "once is once"
    );
}

#[tokio::test]
async fn an_answer_that_is_missing_is_asked_for_again() {
    let mut client = connected();
    let arguments = json!({"code": format!("print once\n{ASK}")});
    let tool = "execute_ipython_cell";
    let first = client.ask(newer(tool, &arguments, json!({}))).await["result"].take();
    let state = json!({"requestState": first["requestState"]});
    let second = client.ask(newer(tool, &arguments, state)).await["result"].take();
    assert_eq!(second["resultType"], "input_required", "{second}");
    let stray = json!({
        "requestState": second["requestState"],
        "inputResponses": {"something": accept("once")},
    });
    let third = client.ask(newer(tool, &arguments, stray)).await["result"].take();
    assert_eq!(
        third["inputRequests"], first["inputRequests"],
        "the same question"
    );
    let denied = client
        .ask(newer(
            tool,
            &arguments,
            answer_to(&third, json!({"action": "decline"})),
        ))
        .await;
    assert!(text(&denied).contains("did not allow"), "{denied}");
    assert_eq!(text(&denied).matches("once").count(), 1, "{denied}");
}

#[tokio::test]
async fn a_state_that_is_not_for_this_call_gets_nothing_done() {
    let mut client = connected();
    let arguments = json!({"code": ASK});
    let tool = "execute_ipython_cell";
    let asked = client.ask(newer(tool, &arguments, json!({}))).await["result"].take();
    let mut forged = answer_to(&asked, accept("session"));
    let state = asked["requestState"].as_str().unwrap();
    forged["requestState"] = json!(format!("{}x", &state[..state.len() - 1]));
    let other = json!({"code": format!("{ASK} ")});
    let yes = answer_to(&asked, accept("session"));
    let attempts = [
        newer(tool, &arguments, forged),
        newer(tool, &arguments, json!({"requestState": ""})),
        newer(tool, &other, yes.clone()),
        newer("check_execution", &json!({}), yes.clone()),
    ];
    for attempt in attempts {
        let refused = client.ask(attempt).await;
        assert_eq!(refused["error"]["code"], -32602, "{refused}");
        assert!(
            refused["error"]["message"]
                .as_str()
                .unwrap()
                .contains("Nothing was executed"),
            "{refused}"
        );
    }
    let answered = client.ask(newer(tool, &arguments, yes)).await;
    assert!(
        text(&answered).contains("has numpy"),
        "the control: {answered}"
    );
}

#[tokio::test]
async fn a_check_asks_too_and_so_does_an_installation() {
    let mut client = connected();
    let arguments = json!({"code": ASK});
    client
        .ask(newer("execute_ipython_cell", &arguments, json!({})))
        .await;
    let asked = client
        .ask(newer("check_execution", &json!({}), json!({})))
        .await["result"]
        .take();
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    let answered = client
        .ask(newer(
            "check_execution",
            &json!({}),
            answer_to(&asked, accept("once")),
        ))
        .await;
    assert!(text(&answered).contains("has numpy"), "{answered}");
    let arguments = json!({"package_name": "polars"});
    let asked = client
        .ask(newer("install_package", &arguments, json!({})))
        .await["result"]
        .take();
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    let yes = answer_to(&asked, accept("once"));
    assert!(
        text(
            &client
                .ask(newer("install_package", &arguments, yes.clone()))
                .await
        )
        .contains("has polars")
    );
    let again = client.ask(newer("install_package", &arguments, yes)).await;
    assert_eq!(
        again["result"]["resultType"], "input_required",
        "an answer counts once: {again}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_task_shows_its_form_and_takes_the_answer() {
    let mut client = connected();
    let capabilities =
        json!({"elicitation": {}, "extensions": {"io.modelcontextprotocol/tasks": {}}});
    let arguments = json!({"code": format!("sleep 5\n{ASK}")});
    let params = json!({"name": "execute_ipython_cell", "arguments": arguments});
    let of_task = |method: &str, params: Value| {
        with_capabilities(modern(1, method, params), capabilities.clone())
    };
    let created = client.ask(of_task("tools/call", params)).await["result"].take();
    assert_eq!(created["resultType"], "task", "{created}");
    let task = json!({"taskId": created["taskId"]});
    let asked = loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let told = client.ask(of_task("tasks/get", task.clone())).await["result"].take();
        if told["status"] == "input_required" {
            break told;
        }
        assert_eq!(told["status"], "working", "{told}");
    };
    let mut update = answer_to(&asked, accept("once"));
    update["taskId"] = created["taskId"].clone();
    client.ask(of_task("tasks/update", update)).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let told = client.ask(of_task("tasks/get", task)).await["result"].take();
    assert_eq!(told["status"], "completed", "{told}");
    assert!(
        told["result"]["content"][0]["text"]
            .as_str()
            .unwrap()
            .contains("has numpy"),
        "{told}"
    );
}
