//! Tests with servers that are programs: their output, failures and exit.

use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncBufReadExt;
use tokio_util::sync::CancellationToken;

use crate::fixtures::{
    self, call, call_with, child, child_with, connect, is_alive, name, process, settings,
    until_dead,
};
use crate::greeting::told;
use crate::{
    CallError, CallErrorCode, CallOptions, CallProgress, ConnectError, Era, ServerLimits,
    ServerParams, ToolState, Upstream,
};

async fn refused(script: Value, limits: ServerLimits) -> ConnectError {
    let mut settings = settings();
    settings.limits = limits;
    Upstream::connect(&name("fixture"), &child(script), &settings)
        .await
        .unwrap_err()
}

fn reason(result: Result<crate::CallReply, CallError>) -> CallErrorCode {
    result.unwrap_err().reason()
}

fn quickly() -> CallOptions {
    CallOptions {
        time: Some(Duration::from_millis(100)),
        ..CallOptions::default()
    }
}

#[tokio::test]
async fn both_eras_are_spoken() {
    for (script, era) in [
        (json!({}), Era::Legacy),
        (json!({"modern": true}), Era::Modern),
    ] {
        let upstream = connect(&child(script)).await;
        let info = upstream.info();
        assert_eq!(
            (info.era, info.server.as_deref(), info.is_alive),
            (Some(era), Some("fixture 1"), true)
        );
        let reply = call(&upstream, "echo", json!({"text": "é", "number": 7}))
            .await
            .unwrap();
        assert_eq!(reply.structured, Some(json!({"text": "é", "number": 7})));
    }
}

#[tokio::test]
async fn a_server_that_takes_the_question_for_its_era_badly_is_greeted_in_the_old_way() {
    for script in [
        json!({"dies_when_probed": true}),
        json!({"silent_when_probed": true}),
        json!({"garbage": true}),
    ] {
        let mut settings = settings();
        settings.limits.connect = Duration::from_secs(5);
        let upstream = Upstream::connect(&name("fixture"), &child(script), &settings)
            .await
            .unwrap();
        assert_eq!(upstream.info().era, Some(Era::Legacy));
        assert!(call(&upstream, "echo", json!({})).await.is_ok());
    }
}

#[tokio::test]
async fn tools_that_cannot_be_used_are_noted_and_spoil_no_other() {
    let upstream = connect(&child(json!({}))).await;
    let info = upstream.info();
    assert_eq!(info.notes.len(), 2, "{:?}", info.notes);
    assert!(
        info.tools
            .iter()
            .any(|tool| tool.name == "echo" && tool.state == ToolState::Ready)
    );
    assert!(!info.tools.iter().any(|tool| tool.name.contains('\u{202e}')));
    assert!(
        upstream
            .package()
            .files
            .iter()
            .any(|file| file.path == "mcptools/fixture/echo.py")
    );
    assert_eq!(
        reason(call(&upstream, "ev\u{202e}il", json!({})).await),
        CallErrorCode::Unknown
    );
}

#[tokio::test]
async fn all_pages_of_the_list_are_read() {
    let upstream = connect(&child(json!({"list": "pages"}))).await;
    let names: Vec<String> = upstream
        .info()
        .tools
        .into_iter()
        .map(|tool| tool.name)
        .collect();
    assert_eq!(names, ["die", "echo", "slow"]);
}

#[tokio::test]
async fn a_list_that_never_ends_or_is_too_long_is_refused() {
    let small = ServerLimits {
        largest_list: 1_000_000,
        ..ServerLimits::default()
    };
    for (list, words) in [
        ("repeat", "a page that has been read"),
        ("endless", "too many pages"),
        ("huge", "too long"),
        ("wrong", "is none"),
    ] {
        let error = told(&refused(json!({"list": list}), small.clone()).await);
        assert!(error.contains(words), "{list}: {error}");
    }
    let few = ServerLimits {
        most_tools: 5,
        ..ServerLimits::default()
    };
    assert!(
        refused(json!({}), few)
            .await
            .to_string()
            .contains("too long")
    );
}

#[tokio::test]
async fn a_program_that_ends_at_once_says_why() {
    let error = refused(json!({"ends_at_once": true}), ServerLimits::default()).await;
    assert!(matches!(&error, ConnectError::Ended { .. }), "{error:?}");
    assert!(
        error
            .to_string()
            .contains("cannot find the module `left-pad`"),
        "{error}"
    );
}

#[tokio::test]
async fn a_program_that_never_greets_is_given_up_and_ended() {
    let mut settings = settings();
    settings.limits.connect = Duration::from_millis(300);
    let folder = tempfile::tempdir().unwrap();
    let script = "echo $$ >> pids; exec sleep 1000";
    let params = json!({"command": "sh", "args": ["-c", script], "cwd": folder.path()});
    let params = ServerParams::parse(&params).unwrap();
    let error = Upstream::connect(&name("fixture"), &params, &settings)
        .await
        .unwrap_err();
    assert!(matches!(error, ConnectError::Timeout { .. }), "{error}");
    for process in std::fs::read_to_string(folder.path().join("pids"))
        .unwrap()
        .lines()
    {
        until_dead(process.parse().unwrap()).await;
    }
}

#[tokio::test]
async fn missing_variables_are_all_named_and_nothing_is_started() {
    let folder = tempfile::tempdir().unwrap();
    let params = json!({
        "command": "touch", "args": ["started", "${NO_SUCH}"],
        "env": {"A": "${NEITHER} ${TOKEN}"}, "cwd": folder.path(),
    });
    let params = ServerParams::parse(&params).unwrap();
    let error = Upstream::connect(&name("fixture"), &params, &settings())
        .await
        .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("these variables are not set where the server runs: NEITHER, NO_SUCH; ")
    );
    assert!(!folder.path().join("started").exists());
}

#[tokio::test]
async fn variables_reach_the_server_and_no_message() {
    let upstream = connect(&child_with(json!({}), json!({"KEY": "${TOKEN}"}))).await;
    let seen = call(&upstream, "environment", json!({}))
        .await
        .unwrap()
        .structured
        .unwrap();
    assert_eq!(seen["KEY"], "[hidden]");
    assert!(!seen.to_string().contains("never-given"), "{seen}");
    let refused = call(&upstream, "refuses", json!({})).await.unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the server fixture answered with an error of the protocol: the key [hidden] is wrong \
         really (code -32000)"
    );
    let died = call(&upstream, "die", json!({})).await.unwrap_err();
    assert!(
        died.to_string()
            .ends_with("fatal: the key [hidden] is wrong"),
        "{died}"
    );
    let printed = format!("{upstream:?} {:?} {refused:?} {died:?}", upstream.info());
    assert!(!printed.contains("hunter2"), "{printed}");
}

#[tokio::test]
async fn what_was_filled_in_does_not_come_back_to_whoever_calls() {
    let told: Arc<Mutex<Vec<CallProgress>>> = Arc::default();
    let calls = async |environment: Value| {
        let upstream = connect(&child_with(json!({}), environment)).await;
        let reply = call(&upstream, "leaks", json!({})).await.unwrap();
        let sink = Arc::clone(&told);
        let options = CallOptions {
            progress: Some(Arc::new(move |step| sink.lock().unwrap().push(step))),
            ..Default::default()
        };
        call_with(&upstream, "progress", json!({"end": true}), options)
            .await
            .unwrap();
        (
            format!(
                "{reply:?} {:?} {:?}",
                upstream.package(),
                std::mem::take(&mut *told.lock().unwrap())
            ),
            reply,
        )
    };
    let (all, reply) = calls(json!({"KEY": "${TOKEN}"})).await;
    assert!(!all.contains("hunter2"), "{all}");
    assert_eq!(
        reply.content[0]["text"], "the key is [hidden] of 13 letters",
        "it was there"
    );
    assert_eq!(
        reply.content[1]["resource"]["text"],
        r#"{"key":"[hidden]"}"#
    );
    assert_eq!(reply.structured, Some(json!({"headers": ["[hidden]"]})));
    assert!(
        all.contains("Does echo.[hidden]") && all.contains("step 4[hidden]"),
        "{all}"
    );
    // Control: a literal value is not a variable of the host, and results are passed on unchanged.
    let (all, reply) = calls(json!({"KEY": "hunter2-token"})).await;
    assert_eq!(
        reply.structured,
        Some(json!({"headers": ["hunter2-token"]}))
    );
    assert!(all.contains("Does echo.hunter2-token"), "{all}");
}

#[tokio::test]
async fn arguments_that_do_not_fit_are_not_sent() {
    let upstream = connect(&child(json!({}))).await;
    let error = call(&upstream, "echo", json!({"number": "seven"}))
        .await
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the arguments do not fit the schema of the tool \"echo\": at /number: \"seven\" is not of \
         type \"integer\""
    );
    let many: Vec<u32> = (0..5000).collect();
    assert_eq!(
        reason(call(&upstream, "echo", json!({"text": many})).await),
        CallErrorCode::Invalid
    );
    // Controls: small and large.
    assert!(call(&upstream, "echo", json!({"number": 7})).await.is_ok());
    assert!(
        call(&upstream, "echo", json!({"text": "x".repeat(1_000_000)}))
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn an_unknown_tool_is_refused_with_the_nearest() {
    let upstream = connect(&child(json!({}))).await;
    let error = call(&upstream, "ecko", json!({})).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "the server fixture has no tool \"ecko\"; did you mean \"echo\"?"
    );
}

#[tokio::test]
async fn results_of_every_kind_have_their_reason() {
    let upstream = connect(&child(json!({}))).await;
    assert!(call(&upstream, "fails", json!({})).await.unwrap().is_error);
    assert_eq!(
        reason(call(&upstream, "wrong", json!({})).await),
        CallErrorCode::Protocol
    );
    assert_eq!(
        reason(call(&upstream, "refuses", json!({})).await),
        CallErrorCode::Protocol
    );
    assert_eq!(
        reason(call(&upstream, "input", json!({})).await),
        CallErrorCode::Protocol
    );
    assert_eq!(
        reason(call_with(&upstream, "slow", json!({}), quickly()).await),
        CallErrorCode::Timeout
    );
    assert!(call(&upstream, "echo", json!({})).await.is_ok());
}

#[tokio::test]
async fn a_result_that_is_too_large_fails_alone() {
    let mut settings = settings();
    settings.limits.largest_message = 100_000;
    let upstream = Upstream::connect(&name("fixture"), &child(json!({})), &settings)
        .await
        .unwrap();
    let before = process(&upstream).await;
    let error = call(&upstream, "big", json!({"bytes": 200_000}))
        .await
        .unwrap_err();
    assert_eq!(error.reason(), CallErrorCode::TooLarge);
    // Control, on the same connection.
    let reply = call(&upstream, "big", json!({"bytes": 90_000}))
        .await
        .unwrap();
    assert_eq!(reply.content[0]["text"].as_str().unwrap().len(), 90_000);
    assert_eq!(process(&upstream).await, before);
}

#[tokio::test]
async fn an_answer_that_is_nested_too_deeply_fails_alone_and_at_once() {
    let upstream = connect(&child(json!({}))).await;
    let error = call(&upstream, "deep", json!({"levels": 200}))
        .await
        .unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("it is no JSON, or nested too deeply"),
        "{error}"
    );
    // Control.
    assert!(
        call(&upstream, "deep", json!({"levels": 100}))
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn many_calls_run_at_a_time_and_each_gets_its_own_answer() {
    let upstream = connect(&child(json!({}))).await;
    let slow = tokio::spawn({
        let upstream = upstream.clone();
        async move { call(&upstream, "slow", json!({})).await }
    });
    let calls: Vec<_> = (0..200)
        .map(|number| {
            let upstream = upstream.clone();
            tokio::spawn(async move {
                (
                    number,
                    call(&upstream, "echo", json!({"number": number}))
                        .await
                        .unwrap(),
                )
            })
        })
        .collect();
    for task in calls {
        let (number, reply) = task.await.unwrap();
        assert_eq!(reply.structured, Some(json!({"number": number})));
    }
    assert!(!slow.is_finished());
    slow.abort();
}

#[tokio::test]
async fn a_call_that_is_cancelled_or_dropped_or_late_is_told_to_the_server() {
    for way in ["cancel", "drop", "timeout"] {
        let folder = tempfile::tempdir().unwrap();
        let upstream = connect(&child(json!({"folder": folder.path()}))).await;
        let noted = |name: &'static str| {
            let upstream = upstream.clone();
            async move {
                loop {
                    let reply = call(&upstream, "notes", json!({"name": name}))
                        .await
                        .unwrap()
                        .structured
                        .unwrap();
                    if reply != "" {
                        return reply;
                    }
                }
            }
        };
        let cancel = CancellationToken::new();
        let time = (way == "timeout").then(|| Duration::from_millis(50));
        let options = CallOptions {
            cancel: cancel.clone(),
            time,
            progress: None,
        };
        let task = tokio::spawn({
            let upstream = upstream.clone();
            async move { call_with(&upstream, "slow", json!({}), options).await }
        });
        let request = noted("slow").await;
        match way {
            "cancel" => cancel.cancel(),
            "drop" => task.abort(),
            _ => {}
        }
        assert_eq!(noted("cancelled").await, request, "{way}");
        let expected = [
            ("cancel", CallErrorCode::Cancelled),
            ("timeout", CallErrorCode::Timeout),
        ]
        .into_iter()
        .find(|(name, _)| *name == way);
        assert_eq!(
            task.await.ok().map(reason),
            expected.map(|(_, reason)| reason),
            "{way}"
        );
    }
}

#[tokio::test]
async fn progress_is_told_in_order_and_keeps_a_call_alive() {
    let upstream = connect(&child(json!({}))).await;
    let told: Arc<Mutex<Vec<CallProgress>>> = Arc::default();
    let sink = Arc::clone(&told);
    let options = CallOptions {
        progress: Some(Arc::new(move |step| sink.lock().unwrap().push(step))),
        ..quickly()
    };
    let error = call_with(
        &upstream,
        "progress",
        json!({"end": false}),
        options.clone(),
    )
    .await
    .unwrap_err();
    // The timeout started again at the last progress notification.
    assert!(
        matches!(error, CallError::Timeout { time, .. } if time >= Duration::from_millis(100)),
        "{error:?}"
    );
    let steps = |told: &[CallProgress]| told.iter().map(|step| step.progress).collect::<Vec<f64>>();
    assert_eq!(
        steps(&std::mem::take(&mut *told.lock().unwrap())),
        [1.0, 3.0, 4.0]
    );
    // Progress sent just before the response is delivered too.
    call_with(&upstream, "progress", json!({"end": true}), options)
        .await
        .unwrap();
    let told = told.lock().unwrap();
    assert_eq!(steps(&told), [1.0, 3.0, 4.0]);
    assert_eq!(
        (told[2].total, told[2].message.as_deref()),
        (Some(4.0), Some("step 4"))
    );
}

#[tokio::test]
async fn whatever_a_server_asks_of_us_is_declined() {
    let upstream = connect(&child(json!({}))).await;
    let form = json!({
        "message": "Your password?", "requestedSchema": {"type": "object", "properties": {}},
    });
    let answer = async |method: &str, params: Value| {
        call(
            &upstream,
            "ask",
            json!({"method": method, "params": params}),
        )
        .await
        .unwrap()
        .structured
        .unwrap()
    };
    let elicited = answer("elicitation/create", form).await;
    assert!(
        elicited["result"]["action"] == "decline" || elicited["error"].is_object(),
        "{elicited}"
    );
    let sampled = answer(
        "sampling/createMessage",
        json!({"messages": [], "maxTokens": 1}),
    )
    .await;
    assert!(sampled["error"].is_object(), "{sampled}");
    let roots = answer("roots/list", json!({})).await;
    assert!(
        roots["error"].is_object() || roots["result"]["roots"] == json!([]),
        "{roots}"
    );
    // Control: a request that every client answers.
    assert!(answer("ping", json!({})).await["result"].is_object());
}

#[tokio::test]
async fn a_tool_that_changes_is_not_called_any_more() {
    for script in [json!({}), json!({"modern": true})] {
        a_tool_that_changes(&connect(&child(script)).await).await;
    }
}

async fn a_tool_that_changes(upstream: &Upstream) {
    assert!(
        call(upstream, "echo", json!({"text": "before"}))
            .await
            .is_ok()
    );
    call(upstream, "change", json!({})).await.unwrap();
    let error = call(upstream, "echo", json!({"text": "after"}))
        .await
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the tool \"echo\" of the server fixture has changed since it was registered, so it is not \
         called; register the server again to use it"
    );
    assert_eq!(error.reason(), CallErrorCode::Unavailable);
    let gone = call(upstream, "pid", json!({})).await.unwrap_err();
    assert!(
        gone.to_string().contains("is gone since it was registered"),
        "{gone}"
    );
    // Control: an unchanged tool.
    assert!(call(upstream, "fails", json!({})).await.is_ok());
    let states: Vec<ToolState> = upstream
        .info()
        .tools
        .iter()
        .map(|tool| tool.state)
        .collect();
    assert!(
        states.contains(&ToolState::Changed)
            && states.contains(&ToolState::Gone)
            && states.contains(&ToolState::Ready)
    );
}

#[tokio::test]
async fn a_server_that_died_is_started_again_and_the_call_is_not_repeated() {
    let upstream = connect(&child(json!({}))).await;
    let before = process(&upstream).await;
    let error = call(&upstream, "die", json!({})).await.unwrap_err();
    assert!(matches!(error, CallError::Interrupted { .. }), "{error}");
    assert_eq!(error.reason(), CallErrorCode::Unavailable);
    assert!(
        error
            .to_string()
            .contains("may have been carried out and is not repeated"),
        "{error}"
    );
    assert_ne!(process(&upstream).await, before);
    assert!(upstream.info().is_alive);
}

#[tokio::test]
async fn a_server_that_was_killed_between_calls_is_not_noticed_by_the_caller() {
    let upstream = connect(&child(json!({}))).await;
    for _ in 0..5 {
        let before = process(&upstream).await;
        let group = rustix::process::Pid::from_raw(i32::try_from(before).unwrap()).unwrap();
        rustix::process::kill_process(group, rustix::process::Signal::KILL).unwrap();
        until_dead(before).await;
        assert_ne!(process(&upstream).await, before);
    }
}

#[tokio::test]
async fn one_new_connection_serves_all_who_wait_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let upstream = connect(&child(json!({"folder": folder.path()}))).await;
    call(&upstream, "die", json!({})).await.unwrap_err();
    let calls: Vec<_> = (0..20)
        .map(|_| {
            let upstream = upstream.clone();
            tokio::spawn(async move { process(&upstream).await })
        })
        .collect();
    let mut processes = std::collections::HashSet::new();
    for task in calls {
        processes.insert(task.await.unwrap());
    }
    assert_eq!(processes.len(), 1);
    // The first connection and this one. The era was known, so there was no probe.
    assert_eq!(
        std::fs::read_to_string(folder.path().join("starts")).unwrap(),
        "xx"
    );
}

#[tokio::test]
async fn a_server_that_comes_back_with_other_tools_is_seen_through() {
    let folder = tempfile::tempdir().unwrap();
    let upstream = connect(&child(
        json!({"folder": folder.path(), "changes_when_restarted": true}),
    ))
    .await;
    assert!(
        call(&upstream, "echo", json!({"text": "before"}))
            .await
            .is_ok()
    );
    call(&upstream, "die", json!({})).await.unwrap_err();
    let error = call(&upstream, "echo", json!({"text": "after"}))
        .await
        .unwrap_err();
    assert!(matches!(error, CallError::ToolChanged { .. }), "{error}");
    // Control.
    assert!(call(&upstream, "fails", json!({})).await.is_ok());
}

#[tokio::test]
async fn a_server_that_comes_back_in_another_era_is_understood() {
    let folder = tempfile::tempdir().unwrap();
    let upstream = connect(&child(
        json!({"folder": folder.path(), "modern_when_restarted": true}),
    ))
    .await;
    assert_eq!(upstream.info().era, Some(Era::Legacy));
    call(&upstream, "die", json!({})).await.unwrap_err();
    assert!(call(&upstream, "echo", json!({})).await.is_ok());
    assert_eq!(upstream.info().era, Some(Era::Modern));
}

#[tokio::test]
async fn a_server_that_keeps_failing_is_left_alone_for_a_while() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("server");
    std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &script).unwrap();
    let fixture = json!({
        "command": &script, "args": ["--exact", "fixtures::child_server", "--nocapture"],
        "env": {"CELLBLOCK_FIXTURE": "{}"},
    });
    let upstream = connect(&ServerParams::parse(&fixture).unwrap()).await;
    call(&upstream, "die", json!({})).await.unwrap_err();
    std::fs::remove_file(&script).unwrap();
    let first = call(&upstream, "echo", json!({}))
        .await
        .unwrap_err()
        .to_string();
    assert!(
        first.contains("there is no program of that name"),
        "{first}"
    );
    let second = call(&upstream, "echo", json!({}))
        .await
        .unwrap_err()
        .to_string();
    assert!(second.contains("is not tried again before"), "{second}");
    // Control: when the program is back and the backoff has passed, it is used again.
    std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &script).unwrap();
    while call(&upstream, "echo", json!({})).await.is_err() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn dropping_the_last_handle_ends_the_program() {
    let upstream = connect(&child(json!({}))).await;
    let process = process(&upstream).await;
    let other = upstream.clone();
    drop(upstream);
    assert!(call(&other, "echo", json!({})).await.is_ok());
    drop(other);
    until_dead(process).await;
}

#[tokio::test]
async fn closing_waits_until_the_program_is_gone() {
    let upstream = connect(&child(json!({}))).await;
    let process = process(&upstream).await;
    upstream.close().await;
    assert!(!is_alive(process));
    assert_eq!(
        reason(call(&upstream, "echo", json!({})).await),
        CallErrorCode::Unavailable
    );
}

#[tokio::test]
async fn a_wrapped_program_works_and_ends_as_any_other() {
    let mut settings = settings();
    settings.wrapper = Some(fixtures::wrapper_command());
    let upstream = Upstream::connect(&name("fixture"), &child(json!({})), &settings)
        .await
        .unwrap();
    let process = process(&upstream).await;
    drop(upstream);
    until_dead(process).await;
}

#[tokio::test]
async fn a_wrapped_program_does_not_outlive_a_killed_process() {
    for (kind, survives) in [("wrapped", false), ("bare", true)] {
        let mut host = tokio::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "fixtures::host", "--nocapture"])
            .env("CELLBLOCK_FIXTURE_HOST", kind)
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = tokio::io::BufReader::new(host.stdout.take().unwrap()).lines();
        let server: u64 = loop {
            let line = lines
                .next_line()
                .await
                .unwrap()
                .expect("the host says which server it has");
            if let Some(server) = line.strip_prefix("server ") {
                break server.parse().unwrap();
            }
        };
        host.kill().await.unwrap();
        if survives {
            // Control: the server ignores the end of its input, and it was not killed.
            assert!(is_alive(server));
            let server = rustix::process::Pid::from_raw(i32::try_from(server).unwrap()).unwrap();
            rustix::process::kill_process(server, rustix::process::Signal::KILL).unwrap();
        } else {
            until_dead(server).await;
        }
    }
}

#[tokio::test]
async fn a_server_that_is_slow_to_start_is_waited_for_and_not_started_twice() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = settings();
    settings.limits.connect = Duration::from_secs(20);
    let script = json!({"modern": true, "starts_after_milliseconds": 700, "folder": folder.path()});
    let upstream = Upstream::connect(&name("fixture"), &child(script), &settings)
        .await
        .unwrap();
    assert_eq!(upstream.info().era, Some(Era::Modern));
    assert_eq!(
        std::fs::read_to_string(folder.path().join("starts")).unwrap(),
        "x"
    );
}

#[tokio::test]
async fn progress_does_not_keep_a_call_alive_for_ever() {
    let mut settings = settings();
    settings.limits.call = Duration::from_millis(200);
    settings.limits.longest_call = Duration::from_millis(700);
    let upstream = Upstream::connect(&name("fixture"), &child(json!({})), &settings)
        .await
        .unwrap();
    let error = call(&upstream, "ticks", json!({})).await.unwrap_err();
    assert!(
        matches!(error, CallError::Timeout { time, .. } if time >= Duration::from_millis(700)),
        "{error:?}"
    );
}

#[tokio::test]
async fn the_parameters_say_how_long_a_call_may_take() {
    let mut params = child(json!({}));
    params.call_timeout = Some(Duration::from_millis(50));
    let upstream = connect(&params).await;
    let error = call(&upstream, "slow", json!({})).await.unwrap_err();
    assert!(
        matches!(error, CallError::Timeout { time, .. } if time < Duration::from_secs(10)),
        "{error:?}"
    );
}

#[tokio::test]
async fn a_server_that_was_replaced_is_closed_although_a_call_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let upstream = connect(&child(json!({"folder": folder.path()}))).await;
    let process = process(&upstream).await;
    let running = tokio::spawn({
        let upstream = upstream.clone();
        async move { call(&upstream, "slow", json!({})).await }
    });
    while !folder.path().join("slow").exists() {
        tokio::task::yield_now().await;
    }
    upstream.retire(Duration::from_millis(50)).await;
    assert_eq!(reason(running.await.unwrap()), CallErrorCode::Unavailable);
    assert!(!is_alive(process));
}

#[cfg(unix)]
#[tokio::test]
async fn a_program_that_installs_first_is_started_once_and_not_cut_off() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let npx = folder.path().join("npx");
    // It installs until its input has ended, and longer than the connect timeout.
    let script = "#!/bin/sh\necho start >> starts\nfor n in 1 2 3 4 5 6; do echo line $n >&2; \
                  done\n\
                  cat > /dev/null\ntouch finished\n";
    std::fs::write(&npx, script).unwrap();
    std::fs::set_permissions(&npx, std::fs::Permissions::from_mode(0o755)).unwrap();
    let params = json!({"command": npx, "args": [], "cwd": folder.path(), "connect_timeout": 1});
    let params = ServerParams::parse(&params).unwrap();
    let error = Upstream::connect(&name("fixture"), &params, &settings())
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("\"connect_timeout\""), "{error}");
    assert!(
        error.ends_with("line 2\nline 3\nline 4\nline 5\nline 6"),
        "{error}"
    );
    let finished = folder.path().join("finished");
    while !finished.exists() {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        std::fs::read_to_string(folder.path().join("starts")).unwrap(),
        "start\n"
    );
}
