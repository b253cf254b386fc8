//! Sessions that branch: copies of a live session, cells that are taken back, variants that are
//! tried side by side.
//!
//! What becomes of threads, sockets and other things that cannot be copied is tested where copies
//! are made; here it is what a client sees.

use std::fs;

use serde_json::{Value, json};

use super::control::Flag;
use crate::support::server::{Era, MINIMAL, Server, Session, ToolResult, finished, program};

/// Forks a session and returns the one fork.
#[track_caller]
fn fork<'a>(session: &Session<'a>) -> Session<'a> {
    let result = session.call("fork_session", json!({}));
    assert!(!result.is_error(), "{}", result.text());
    let id = result.structured()["forks"][0]
        .as_str()
        .expect("a fork has a name")
        .to_owned();
    Session {
        server: session.server,
        id,
    }
}

/// Takes cells back, which must succeed.
#[track_caller]
fn undo(session: &Session<'_>, cells: u32) -> ToolResult {
    let result = session.call("undo", json!({"cells": cells}));
    assert!(!result.is_error(), "{}", result.text());
    result
}

#[track_caller]
fn explore(session: &Session<'_>, variants: &[(&str, &str)], more: Value) -> ToolResult {
    let variants: Vec<Value> = variants
        .iter()
        .map(|(name, code)| json!({"name": name, "code": code}))
        .collect();
    let mut arguments = json!({"variants": variants});
    for (name, value) in more.as_object().expect("arguments are an object") {
        arguments[name] = value.clone();
    }
    session.call("explore", arguments)
}

/// The names of the sessions that are alive.
fn alive(server: &Server) -> Vec<String> {
    let listed = server.call("list_sessions", json!({}));
    let sessions = listed.structured()["sessions"]
        .as_array()
        .expect("it is a list");
    let alive = sessions
        .iter()
        .filter(|session| session["state"] != "ended");
    alive
        .map(|session| {
            session["session_id"]
                .as_str()
                .expect("a session has a name")
                .to_owned()
        })
        .collect()
}

#[test]
fn a_fork_has_what_its_source_has_and_then_goes_its_own_way_in_both_eras() {
    for era in Era::BOTH {
        let server = Server::start_in(era, MINIMAL);
        let source = server.session();
        source.text("import json as imported\nx = [1]\nopen('file', 'w').write('here')\nNone");
        let result = source.call("fork_session", json!({"names": ["left", "right"]}));
        assert!(!result.is_error(), "{}", result.text());
        let told = result.structured();
        assert_eq!(
            (&told["forks"], &told["source"]),
            (&json!(["left", "right"]), &json!(source.id))
        );
        assert_eq!(
            (&told["not_carried_over"], &told["files"]["state"]),
            (&json!([]), &json!("copied"))
        );
        let [left, right] = ["left", "right"].map(|id| Session {
            server: &server,
            id: id.to_owned(),
        });
        left.text("x.append(2); open('file', 'w').write('changed'); None");
        assert_eq!(
            left.text("imported.dumps(x), open('file').read()"),
            "('[1, 2]', 'changed')"
        );
        for untouched in [&source, &right] {
            assert_eq!(
                untouched.text("imported.dumps(x), open('file').read()"),
                "('[1]', 'here')"
            );
        }
        let grandchild = fork(&left);
        assert_eq!(grandchild.text("x"), "[1, 2]");
        assert!(!source.call("close_session", json!({})).is_error());
        assert!(!left.call("close_session", json!({})).is_error());
        assert_eq!(
            (right.text("x"), grandchild.text("x")),
            ("[1]".to_owned(), "[1, 2]".to_owned())
        );
    }
}

#[test]
fn a_fork_in_the_middle_of_a_cell_is_refused_and_works_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    let server =
        Server::start(&[MINIMAL, &["--workspace", folder.path().to_str().unwrap()]].concat());
    let session = server.session();
    let begun = Flag::new(folder.path(), "begun");
    let running = session.begin(
        &format!("x = 1\n{}\nwhile True: pass", begun.raise()),
        json!({}),
    );
    begun.wait();
    session
        .call("fork_session", json!({}))
        .assert_refused(&["a cell is running", "then fork"]);
    session
        .call("undo", json!({}))
        .assert_refused(&["a cell is running", "then undo"]);
    running.cancel();
    assert_eq!(session.text("x"), "1");
    assert_eq!(fork(&session).text("x"), "1"); // control
}

#[test]
fn an_undo_brings_variables_and_files_back() {
    let session = Server::shared().session();
    session.text("x = 1; open('file', 'w').write('one'); None");
    session.text("x = 2; open('file', 'w').write('two'); open('new', 'w').close()");
    let last = session.run("del x; import os; os.remove('file')");
    assert_eq!(last.structured()["can_undo"], 3);
    let listed = session.call("list_checkpoints", json!({}));
    let cells: Vec<u64> = listed.structured()["can_undo"]
        .as_array()
        .unwrap()
        .iter()
        .map(|checkpoint| checkpoint["cells"].as_u64().unwrap())
        .collect();
    assert_eq!(cells, [1, 2, 3]);
    assert!(listed.text().contains("del x"), "{}", listed.text());

    let undone = undo(&session, 1);
    assert_eq!(
        (
            &undone.structured()["undone"],
            &undone.structured()["revived"]
        ),
        (&json!(1), &json!(false))
    );
    assert_eq!(undone.structured()["files"]["state"], "restored");
    assert_eq!(session.text("x, open('file').read()"), "(2, 'two')");
    // That look changed nothing but counts as a cell.
    undo(&session, 2);
    let code = "import os; x, open('file').read(), os.path.exists('new')";
    assert_eq!(session.text(code), "(1, 'one', False)");
}

#[test]
fn undoing_one_by_one_is_the_same_as_all_at_once() {
    let server = Server::shared();
    let (one, all) = (server.session(), server.session());
    for session in [&one, &all] {
        for number in 0..4 {
            session.text(&format!(
                "x = {number}; open('file', 'w').write(str(x)); None"
            ));
        }
    }
    for _ in 0..3 {
        undo(&one, 1);
    }
    undo(&all, 3);
    for session in [one, all] {
        assert_eq!(session.text("x, open('file').read()"), "(0, '0')");
    }
}

#[test]
fn a_crash_can_be_undone_whatever_killed_python() {
    let server = Server::start(&[MINIMAL, &["--memory", "256M"]].concat());
    for (code, status) in [
        ("import os; os._exit(3)", "died"),
        ("import ctypes; ctypes.string_at(0)", "died"),
        (
            "blocks = []\nwhile True: blocks.append(bytearray(b'x') * (16 << 20))",
            "out_of_memory",
        ),
        (
            "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
            "timeout",
        ),
    ] {
        let session = server.session();
        session.text("x = list(range(1000)); open('file', 'w').write('kept'); None");
        let timeout = if status == "timeout" { 1 } else { 60 };
        let crashed = session.run_with(
            &format!("open('file', 'w').write('lost')\n{code}"),
            json!({"timeout": timeout}),
        );
        if status == "out_of_memory" && crashed.status() == "error" {
            continue; // Without control groups Python itself meets the limit and lives on.
        }
        assert_eq!(crashed.status(), status, "{}", crashed.text());
        crashed.assert_refused(&["`undo`", "`reset`"]);
        session
            .run("1")
            .assert_refused(&["ended because", "`undo`"]);
        let undone = undo(&session, 1);
        assert_eq!(undone.structured()["revived"], true, "{}", undone.text());
        assert_eq!(
            session.text("sum(x), open('file').read()"),
            "(499500, 'kept')"
        );
    }
}

#[test]
fn an_undo_that_cannot_be_is_refused_with_what_can() {
    let session = Server::shared().session();
    session
        .call("undo", json!({}))
        .assert_refused(&["there is no session"]);
    session.text("x = 1");
    session.text("x = 2");
    session
        .call("undo", json!({"cells": 5}))
        .assert_refused(&["5 cells", "2 cells"]);
    assert_eq!(session.text("x"), "2");
    undo(&session, 1); // control
    assert!(!session.call("reset", json!({})).is_error());
    session
        .call("undo", json!({}))
        .assert_refused(&["nothing", "can be undone"]);
}

#[test]
fn a_server_without_undo_says_so_and_still_forks() {
    let server = Server::start(&[MINIMAL, &["--undo", "off"]].concat());
    let session = server.session();
    session.text("x = 1");
    assert_eq!(session.run("x = 2").structured()["can_undo"], 0);
    session
        .call("undo", json!({}))
        .assert_refused(&["switched off"]);
    assert_eq!(fork(&session).text("x"), "2");
    let crashed = session.run("import os; os._exit(1)");
    crashed.assert_refused(&["`reset`"]);
    assert!(!crashed.text().contains("undo"), "{}", crashed.text());
}

#[test]
fn only_so_many_cells_can_be_undone_as_the_operator_keeps() {
    let server = Server::start(&[MINIMAL, &["--undo-checkpoints", "2"]].concat());
    let session = server.session();
    for number in 0..5 {
        session.text(&format!("x = {number}"));
    }
    session
        .call("undo", json!({"cells": 3}))
        .assert_refused(&["3 cells", "2 cells"]);
    undo(&session, 2);
    assert_eq!(session.text("x"), "2");
}

#[test]
fn files_of_a_workspace_are_undone_up_to_the_size_that_was_set() {
    for (size, state, content) in [("64M", "restored", "one"), ("0", "left_alone", "two")] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let server =
            Server::start(&[MINIMAL, &["--workspace", path, "--undo-files", size]].concat());
        let session = server.session();
        session.text("x = 1; open('file', 'w').write('one'); None");
        session.text("x = 2; open('file', 'w').write('two'); None");
        let undone = undo(&session, 1);
        assert_eq!(
            undone.structured()["files"]["state"],
            state,
            "{}",
            undone.text()
        );
        assert_eq!(
            undone.structured()["files"]["why"].is_string(),
            state == "left_alone"
        );
        assert_eq!(
            fs::read_to_string(folder.path().join("file")).unwrap(),
            content
        );
        assert_eq!(session.text("x"), "1");
        let forked = session.call("fork_session", json!({"names": ["copy"]}));
        assert_eq!(
            forked.structured()["files"]["state"],
            "shared",
            "{}",
            forked.text()
        );
        let copy = Session {
            server: &server,
            id: "copy".to_owned(),
        };
        copy.text("open('file', 'w').write('of the fork'); None");
        assert_eq!(session.text("open('file').read()"), "'of the fork'");
    }
}

#[test]
fn what_a_copy_cannot_have_is_named() {
    let session = Server::shared().session();
    session.text(
        "import threading\nstop = False\ndef spin():\n    while not stop: pass\nthread = \
         threading.Thread(target=spin)\nthread.start()",
    );
    let forked = session.call("fork_session", json!({}));
    let lost = forked.structured()["not_carried_over"]
        .as_array()
        .unwrap()
        .clone();
    assert!(
        lost.iter()
            .any(|text| text.as_str().unwrap().contains("1 thread")),
        "{lost:?}"
    );
    assert!(
        forked.text().contains("Not carried over: "),
        "{}",
        forked.text()
    );
    assert_eq!(
        session.text("thread.is_alive()"),
        "True",
        "the source goes on untouched"
    );
    session.text("stop = True; thread.join()");
}

#[test]
fn variants_draw_the_same_random_numbers_and_a_second_exploration_others() {
    let session = Server::shared().session();
    session.text("x = 1");
    let draw = "import random; random.random()";
    let mut drawn = Vec::new();
    for _ in 0..2 {
        let result = explore(&session, &[("a", draw), ("b", draw)], json!({}));
        let values = result.structured()["variants"].clone();
        assert!(values[0]["value"].is_string(), "{}", result.text());
        assert_eq!(values[0]["value"], values[1]["value"]);
        assert!(
            result.text().contains("the same random numbers"),
            "{}",
            result.text()
        );
        drawn.push(values[0]["value"].clone());
    }
    assert_ne!(drawn[0], drawn[1]);
}

#[test]
fn variants_are_compared_and_the_session_is_as_it_was() {
    // Sessions are counted, so nobody else may begin any.
    let server = Server::start(MINIMAL);
    let session = server.session();
    session.text("data = list(range(10))");
    let before = alive(session.server).len();
    let result = explore(
        &session,
        &[
            ("sum", "total = sum(data); data.clear(); total"),
            ("printed", "print('hello'); data.append(1); len(data)"),
            ("broken", "data[99]"),
            ("dead", "import os; os._exit(1)"),
        ],
        json!({}),
    );
    assert!(!result.is_error(), "{}", result.text());
    let told = result.structured();
    let variants = told["variants"].as_array().unwrap();
    let field = |name: &str| {
        variants
            .iter()
            .map(|variant| variant[name].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(field("name"), ["sum", "printed", "broken", "dead"]);
    assert_eq!(field("status"), ["ok", "ok", "error", "died"]);
    assert_eq!(
        field("value"),
        [json!("45"), json!("11"), Value::Null, Value::Null]
    );
    assert!(
        field("duration_ms")
            .iter()
            .all(|duration| duration.as_f64().unwrap() > 0.0)
    );
    assert_eq!(
        told["variants"][0]["variables"]["created"][0]["name"],
        "total"
    );
    assert!(
        told["variants"][2]["error"]
            .as_str()
            .unwrap()
            .starts_with("IndexError"),
        "{told}"
    );
    assert_eq!(
        (&told["kept"], &told["replaced"]),
        (&json!([]), &json!(false))
    );
    for words in [
        "sum | ok | 45 |",
        "--- printed ---\nhello",
        "--- broken ---",
        "No copy was kept",
    ] {
        assert!(
            result.text().contains(words),
            "{words:?} is not in {}",
            result.text()
        );
    }
    assert_eq!(
        session.text("data == list(range(10)), 'total' in globals()"),
        "(True, False)"
    );
    assert_eq!(
        alive(session.server).len(),
        before,
        "nothing is left of the copies"
    );
}

#[test]
fn the_best_variant_is_kept_or_takes_the_place_of_its_source() {
    let server = Server::start(MINIMAL);
    let session = server.session();
    session.text("base = 10; open('file', 'w').write('source'); None");
    let variants = [
        ("low", "score = base - 5"),
        (
            "high",
            "score = base + 5; open('file', 'w').write('high'); None",
        ),
        ("none", "1"),
    ];
    // A word of `keep` is no name.
    explore(&session, &variants, json!({})).assert_refused(&["\"none\"", "something else"]);
    let variants = [variants[0], variants[1], ("without", "del base")];
    let best = json!({"keep": "best", "best_by": "score"});
    let kept = explore(&session, &variants, best.clone());
    let told = kept.structured();
    assert_eq!(
        told["kept"],
        json!([{"variant": "high", "session_id": format!("{}-high", session.id)}])
    );
    assert_eq!(
        (&told["variants"][0]["score"], &told["variants"][1]["score"]),
        (&json!(5.0), &json!(15.0))
    );
    assert!(
        told["variants"][2]["score_error"]
            .as_str()
            .unwrap()
            .contains("NameError"),
        "{told}"
    );
    let high = Session {
        server: &server,
        id: format!("{}-high", session.id),
    };
    assert_eq!(high.text("score, open('file').read()"), "(15, 'high')");
    session.run("score").assert_refused(&["NameError"]);

    let mut replacing = best;
    replacing["replace"] = json!(true);
    let replaced = explore(&session, &variants, replacing);
    assert_eq!(
        replaced.structured()["replaced"],
        true,
        "{}",
        replaced.text()
    );
    assert_eq!(session.text("score, open('file').read()"), "(15, 'high')");
    assert_eq!(alive(&server).len(), 2);
    let all = explore(&session, &variants[..2], json!({"keep": "all"}));
    assert_eq!(
        all.structured()["kept"].as_array().unwrap().len(),
        2,
        "{}",
        all.text()
    );
    let named = explore(
        &session,
        &[("other", "score = 7")],
        json!({"keep": "other", "replace": true}),
    );
    assert_eq!(named.structured()["replaced"], true, "{}", named.text());
    assert_eq!(session.text("score"), "7");
}

#[test]
fn pictures_of_variants_are_named() {
    let session = Server::shared().session();
    session.text("import matplotlib.pyplot as plt");
    let code = |color: &str| format!("plt.plot([1, 2], color='{color}'); plt.show()");
    let result = explore(
        &session,
        &[("one", &code("red")), ("two", &code("blue"))],
        json!({}),
    );
    assert_eq!(result.images().len(), 2, "{}", result.text());
    let blocks = result.0["content"].as_array().unwrap();
    assert_eq!(
        (&blocks[1]["text"], &blocks[3]["text"]),
        (&json!("[image 1, of one]"), &json!("[image 2, of two]"))
    );
    assert_eq!(result.structured()["images"][1]["variant"], "two");
}

#[test]
fn a_long_exploration_counts_its_variants_and_can_be_cancelled() {
    for era in Era::BOTH {
        let server = Server::start_in(era, MINIMAL);
        let session = server.session();
        session.text("x = 1");
        let variants = json!([
            {"name": "quick", "code": "2"}, {"name": "endless", "code": "while True: pass"}
        ]);
        let running = server.begin(
            "explore",
            json!({"session_id": session.id, "variants": variants}),
        );
        let id = running.id();
        let told = server.notification(|message| message["params"]["progressToken"] == id);
        assert_eq!(told["params"]["message"], "1 of 2 variants finished");
        running.cancel();
        // The session takes the next cell, and the copies go.
        assert_eq!(session.text("x"), "1");
        assert!(
            !running.is_answered(),
            "nothing is sent for a cancelled request"
        );
        assert_eq!(alive(&server), [session.id.as_str()]);
    }
}

#[test]
fn forks_count_as_sessions() {
    let server = Server::start(&[MINIMAL, &["--max-sessions", "3"]].concat());
    let session = server.session();
    session.text("x = 1");
    session
        .call("fork_session", json!({"count": 3}))
        .assert_refused(&["3 sessions", "close_session"]);
    assert_eq!(alive(&server).len(), 1, "all or none");
    assert!(!session.call("fork_session", json!({"count": 2})).is_error()); // control
    // Copies of an exploration are not sessions unless they are kept.
    let compared = explore(&session, &[("a", "1"), ("b", "2")], json!({}));
    assert!(!compared.is_error(), "{}", compared.text());
    session
        .call(
            "fork_session",
            json!({"names": [format!("{}-1", session.id)]}),
        )
        .assert_refused(&["in use"]);
}

#[test]
fn bad_arguments_of_a_branch_are_refused_before_anything_happens() {
    let session = Server::shared().session();
    session.text("x = 1");
    for (tool, arguments, words) in [
        (
            "fork_session",
            json!({"count": 0}),
            ["\"count\"", "1 to 16"],
        ),
        (
            "fork_session",
            json!({"count": 2, "names": ["a"]}),
            ["\"count\"", "\"names\" has 1"],
        ),
        (
            "fork_session",
            json!({"names": ["../a"]}),
            ["\"names\"", "letters, digits"],
        ),
        ("undo", json!({"cells": "all"}), ["\"cells\"", "1 to 100"]),
        (
            "list_checkpoints",
            json!({"cells": 1}),
            ["no argument \"cells\"", "session_id"],
        ),
        ("explore", json!({}), ["\"variants\"", "1 to 16"]),
        (
            "explore",
            json!({"variants": [{"name": "a", "cod": "1"}]}),
            ["\"variants\"", "\"cod\""],
        ),
        (
            "explore",
            json!({"variants": [{"name": "a", "code": "1"}], "keep": "b"}),
            ["\"keep\"", "(a)"],
        ),
        (
            "explore",
            json!({"variants": [{"name": "a", "code": "1"}], "replace": true}),
            ["\"replace\"", "exactly one"],
        ),
    ] {
        let refused = session.call(tool, arguments);
        refused.assert_refused(&words);
        refused.assert_refused(&["Nothing was executed"]);
    }
    for tool in ["fork_session", "undo", "list_checkpoints"] {
        session
            .server
            .call(tool, json!({"session_id": "nowhere"}))
            .assert_refused(&["there is no session `nowhere`"]);
    }
    let variants = json!([{"name": "a", "code": "1"}]);
    let refused = session.server.call(
        "explore",
        json!({"session_id": "nowhere", "variants": variants}),
    );
    refused.assert_refused(&["there is no session `nowhere`"]);
    assert_eq!(session.text("x"), "1");
}

#[test]
fn mistakes_in_the_settings_of_branches_are_told() {
    for (arguments, words) in [
        (["--undo", "maybe"], "on or off"),
        (["--undo-checkpoints", "0"], "from 1 to 100"),
        (["--undo-files", "some"], "a size such as"),
        (["--explore-parallel", "17"], "from 1 to 16"),
        (["--family-memory", "1G"], "at least memory, which is 2 GiB"),
    ] {
        let (status, output, errors) = finished(program().arg("mcp").args(arguments));
        assert_eq!(
            (status, output.as_str()),
            (Some(2), ""),
            "{arguments:?}: {errors}"
        );
        assert!(
            errors.contains(arguments[0]) && errors.contains(words),
            "{arguments:?}: {errors}"
        );
    }
    // The control: good settings are taken. Code that runs once has nothing to undo, so the flag is
    // not there.
    let good = [
        "--undo",
        "on",
        "--undo-files",
        "0",
        "--family-memory",
        "2G",
        "--environment",
        "minimal",
    ];
    let (status, _, errors) = finished(program().arg("mcp").args(good));
    assert_eq!(status, Some(0), "{errors}");
    let (status, _, errors) = finished(program().args(["run", "-c", "1", "--undo", "on"]));
    assert_eq!(status, Some(2), "{errors}");
}
