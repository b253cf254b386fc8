//! A worker: one caller with some sessions, who takes random steps and compares every answer with
//! the model of the session.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Caller, Ended, Trouble, wrong};
use crate::model::{Model, SHOW, State, Statement, states};
use crate::random::Random;
use crate::tally::Tally;

/// A cell that is to be stopped sleeps so long, and then notes that it was not.
const NEVER: &str = "print('set')\n__import__('time').sleep(60)\nlate = 1";
/// A timeout that ends such a cell.
const SHORT: f64 = 0.3;
/// Longer than a call waits for its cell (`MAX_WAIT`).
const LONG: &str = "__import__('time').sleep(1.3)";
const BLOCKED: &str = "blocked: example.org (not in the allowed list)";

/// The steps, and how often each is taken.
const STEPS: [(Step, u64); 21] = [
    (Step::Cell, 50),
    (Step::Value, 8),
    (Step::SyntaxError, 3),
    (Step::Exception, 5),
    (Step::Upload, 8),
    (Step::Download, 8),
    (Step::Undo, 12),
    (Step::Checkpoints, 6),
    (Step::Fork, 5),
    (Step::Explore, 2),
    (Step::ExploreAndReplace, 2),
    (Step::Reset, 3),
    (Step::Renew, 4),
    (Step::Sessions, 4),
    (Step::Blocked, 3),
    (Step::Install, 2),
    (Step::Timeout, 3),
    (Step::Exit, 4),
    (Step::Memory, 1),
    (Step::Cancel, 3),
    (Step::Long, 2),
];
const RARE_STEPS: [Step; 2] = [Step::Interrupt, Step::ResetRunning];
/// One step of so many is a rare one: it takes seconds.
const RARE: u64 = 80;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    Cell,
    Value,
    SyntaxError,
    Exception,
    Upload,
    Download,
    Undo,
    Checkpoints,
    Fork,
    Explore,
    ExploreAndReplace,
    Reset,
    /// Closes the session and begins one of the same name.
    Renew,
    Sessions,
    Blocked,
    Install,
    Timeout,
    Exit,
    Memory,
    Cancel,
    Long,
    Interrupt,
    ResetRunning,
}

impl Step {
    fn any(random: &mut Random) -> Step {
        if random.below(RARE) == 0 {
            return *random.choose(&RARE_STEPS);
        }
        let mut place = random.below(STEPS.iter().map(|(_, weight)| weight).sum());
        for (step, weight) in STEPS {
            match place.checked_sub(weight) {
                Some(rest) => place = rest,
                None => return step,
            }
        }
        Step::Cell
    }
}

type Checked<T = ()> = Result<T, Trouble>;

pub(crate) struct Worker {
    name: String,
    caller: Caller,
    sessions: Vec<(String, Model)>,
    random: Random,
    /// Numbers the cells, so that no two are alike.
    cells: u64,
}

impl Worker {
    pub(crate) async fn connect(
        name: String,
        sessions: usize,
        address: SocketAddr,
        key: String,
        seed: u64,
    ) -> anyhow::Result<Worker> {
        let sessions = (0..sessions)
            .map(|number| (format!("s{number}"), Model::default()))
            .collect();
        let caller = Caller::connect(address, key).await?;
        Ok(Worker {
            name,
            caller,
            sessions,
            random: Random::new(seed),
            cells: 0,
        })
    }

    /// Takes steps until the time is over, then closes all sessions.
    pub(crate) async fn work(mut self, end: Instant, tally: &Tally) -> anyhow::Result<()> {
        self.recover(tally).await?;
        while Instant::now() < end {
            let step = Step::any(&mut self.random);
            let at = self.random.below(self.sessions.len() as u64) as usize;
            let begun = Instant::now();
            let done = self.take(step, at).await;
            tally.count(step, begun.elapsed(), self.caller.take_calls());
            if let Err(trouble) = done {
                tally.trouble(
                    &format!(
                        "{}, session {}, step {step:?}",
                        self.name, self.sessions[at].0
                    ),
                    &trouble,
                );
                self.recover(tally).await?;
            }
        }
        for at in 0..self.sessions.len() {
            if let Err(trouble) = self.close(at).await {
                tally.trouble(&format!("{}, closing", self.name), &trouble);
            }
        }
        Ok(())
    }

    /// Begins all sessions anew. One wrong answer must not cause others.
    async fn recover(&mut self, tally: &Tally) -> anyhow::Result<()> {
        self.caller.reconnect().await?;
        for at in 0..self.sessions.len() {
            let _ = self.close(at).await;
            if let Err(trouble) = self.begin(at).await {
                tally.trouble(
                    &format!("{}, begin of session {}", self.name, self.sessions[at].0),
                    &trouble,
                );
            }
        }
        Ok(())
    }

    async fn take(&mut self, step: Step, at: usize) -> Checked {
        match step {
            Step::Cell => self.cell(at, 4, SHOW).await,
            Step::Long => self.cell(at, 2, &format!("{LONG}\n{SHOW}")).await,
            Step::Value => self.value(at).await,
            Step::SyntaxError => self.failing_cell(at, &[], "(", "SyntaxError").await,
            Step::Exception => {
                let statements = self.statements(at, 3);
                self.failing_cell(at, &statements, "raise ValueError('x')", "ValueError")
                    .await
            }
            Step::Upload => self.upload(at).await,
            Step::Download => self.download(at).await,
            Step::Undo => self.undo(at, false).await,
            Step::Checkpoints => self.checkpoints(at).await,
            Step::Fork => self.fork(at).await,
            Step::Explore => self.explore(at, false).await,
            Step::ExploreAndReplace => self.explore(at, true).await,
            Step::Reset => self.reset(at, false).await,
            Step::Renew => {
                self.close(at).await?;
                self.begin(at).await
            }
            Step::Sessions => self.list(at).await,
            Step::Blocked => self.blocked(at).await,
            Step::Install => {
                let install = json!({"session_id": self.sessions[at].0, "package_name": "../x"});
                self.refused("install_package", &install, "cannot be installed")
                    .await
            }
            Step::Timeout => self.timeout(at).await,
            Step::Exit => self.death(at, "__import__('os')._exit(3)", "died").await,
            Step::Memory => self.death(at, "b'x' * (1 << 30)", "out_of_memory").await,
            Step::Cancel => self.cancel(at).await,
            Step::Interrupt => self.interrupt(at).await,
            Step::ResetRunning => self.reset_running(at).await,
        }
    }

    /// Some statements that are valid in a session, each after those before. The first one makes
    /// the first line of the cell unique.
    fn statements(&mut self, at: usize, most: u64) -> Vec<Statement> {
        self.cells += 1;
        let mut statements = vec![Statement::Set("n", json!(self.cells))];
        let mut state = self.sessions[at].1.state.clone();
        for _ in 0..self.random.below(most + 1) {
            let statement = Statement::any(&state, &mut self.random);
            statement.apply(&mut state);
            statements.push(statement);
        }
        statements
    }

    async fn run(&mut self, at: usize, code: &str, more: Value) -> Checked<Ended> {
        self.caller.run(&self.sessions[at].0, code, more).await
    }

    /// Runs statements and an end that shows the state; compares it with the model.
    async fn cell(&mut self, at: usize, most: u64, end: &str) -> Checked {
        let statements = self.statements(at, most);
        let ended = self.run(at, &code(&statements, end), json!({})).await?;
        self.complete(at, &statements, &ended)
    }

    /// Compares the answer of a cell that shows the state at its end.
    fn complete(&mut self, at: usize, statements: &[Statement], ended: &Ended) -> Checked {
        let model = &mut self.sessions[at].1;
        model.begin_cell(&statements[0].code());
        statements
            .iter()
            .for_each(|statement| statement.apply(&mut model.state));
        ended.expect_status("ok")?;
        let (wanted, got) = (model.state.shown(), ended.shown()?);
        if wanted != got {
            return wrong("state", wanted, got);
        }
        keep(model, ended, false)
    }

    /// A cell that only names a variable: the server knows that it changes nothing.
    async fn value(&mut self, at: usize) -> Checked {
        let Some((name, value)) = self.sessions[at].1.state.some_variable(&mut self.random) else {
            return Ok(());
        };
        let (name, value) = (name.to_owned(), value.to_string());
        let ended = self.run(at, &name, json!({})).await?;
        self.sessions[at].1.begin_cell(&name);
        ended.expect_status("ok")?;
        if ended.text.trim() != value {
            return wrong("value", value, &ended.text);
        }
        keep(&mut self.sessions[at].1, &ended, false)
    }

    async fn failing_cell(
        &mut self,
        at: usize,
        statements: &[Statement],
        end: &str,
        error: &str,
    ) -> Checked {
        let cell = code(statements, end);
        let ended = self.run(at, &cell, json!({})).await?;
        let model = &mut self.sessions[at].1;
        model.begin_cell(cell.lines().next().unwrap_or_default());
        statements
            .iter()
            .for_each(|statement| statement.apply(&mut model.state));
        ended.expect_status("error")?;
        if ended.content["error"]["name"] != error {
            return wrong("error", error, &ended.content["error"]);
        }
        keep(model, &ended, false)
    }

    async fn upload(&mut self, at: usize) -> Checked {
        let (file, text) = (*self.random.choose(&["f0", "f1"]), self.random.text());
        let (session, model) = &mut self.sessions[at];
        let upload =
            json!({"session_id": session, "relpath": file, "text": text, "overwrite": true});
        let result = self.caller.call("upload_file", &upload).await?;
        if result["structuredContent"]["bytes"] != text.len() {
            return wrong("bytes of an upload", text.len(), &result);
        }
        model.state.files.insert(file, text);
        Ok(())
    }

    async fn download(&mut self, at: usize) -> Checked {
        let file = *self.random.choose(&["f0", "f1"]);
        let (session, model) = &self.sessions[at];
        let download = json!({"session_id": session, "relpath": file});
        let Some(wanted) = model.state.files.get(file) else {
            return self
                .refused("download_file", &download, "there is no such file")
                .await;
        };
        let result = self.caller.call("download_file", &download).await?;
        match result["content"][0]["resource"]["text"].as_str() {
            Some(text) if text == wanted => Ok(()),
            _ => wrong("downloaded file", wanted, &result),
        }
    }

    /// Undoes some cells and looks at the state.
    async fn undo(&mut self, at: usize, is_dead: bool) -> Checked {
        let (session, model) = &mut self.sessions[at];
        let most = model.undoable().len();
        if most == 0 {
            let undo = json!({"session_id": session});
            return self.refused("undo", &undo, "can be undone").await;
        }
        let cells = 1 + self.random.below(most as u64) as usize;
        let result = self
            .caller
            .call("undo", &json!({"session_id": session, "cells": cells}))
            .await?;
        let told = &result["structuredContent"];
        let facts = json!([
            told["undone"],
            told["revived"],
            told["files"]["state"],
            told["not_carried_over"]
        ]);
        let wanted = json!([cells, is_dead, "restored", []]);
        if facts != wanted {
            return wrong("undo", wanted, &result);
        }
        model.undo(cells);
        compare_checkpoints(model, told)?;
        self.cell(at, 0, SHOW).await
    }

    async fn checkpoints(&mut self, at: usize) -> Checked {
        let (session, model) = &self.sessions[at];
        let result = self
            .caller
            .call("list_checkpoints", &json!({"session_id": session}))
            .await?;
        compare_checkpoints(model, &result["structuredContent"])
    }

    /// Puts a copy of the session in the place of another one.
    async fn fork(&mut self, at: usize) -> Checked {
        let other = (at + 1) % self.sessions.len();
        self.close(other).await?;
        let (source, fork) = (&self.sessions[at].0, &self.sessions[other].0);
        let result = self
            .caller
            .call(
                "fork_session",
                &json!({"session_id": source, "names": [fork]}),
            )
            .await?;
        let told = &result["structuredContent"];
        let facts = json!([
            told["forks"],
            told["files"]["state"],
            told["not_carried_over"]
        ]);
        let wanted = json!([[fork], "copied", []]);
        if facts != wanted {
            return wrong("fork", wanted, &result);
        }
        let state = self.sessions[at].1.state.clone();
        self.sessions[other].1 = Model::from(state);
        self.cell(other, 1, SHOW).await
    }

    async fn explore(&mut self, at: usize, replaces: bool) -> Checked {
        let (one, two) = (self.statements(at, 2), self.statements(at, 2));
        let before = self.sessions[at].1.state.clone();
        let after =
            [&one, &two].map(|statements| states(&before, statements).pop().unwrap_or_default());
        let variants = json!([
            {"name": "one", "code": code(&one, SHOW)}, {"name": "two", "code": code(&two, SHOW)}
        ]);
        let mut arguments = json!({"session_id": self.sessions[at].0, "variants": variants});
        if replaces {
            arguments["keep"] = json!("best");
            arguments["best_by"] = json!("n");
            arguments["replace"] = json!(true);
        }
        let session = self.sessions[at].0.clone();
        let ended = self.caller.ended(&session, "explore", &arguments).await?;
        for (place, state) in after.iter().enumerate() {
            let variant = &ended.content["variants"][place];
            let text = variant["text"]
                .as_str()
                .and_then(|text| text.trim().strip_prefix("=> "));
            let got: Option<Value> = text.and_then(|text| serde_json::from_str(text).ok());
            if got.as_ref() != Some(&state.shown()) {
                return wrong("variant", state.shown(), &ended.content);
            }
        }
        if ended.content["replaced"] != replaces {
            return wrong("replaced", replaces, &ended.content);
        }
        if replaces {
            let [_, two] = after;
            self.sessions[at].1 = Model::from(two);
        }
        self.cell(at, 0, SHOW).await
    }

    async fn reset(&mut self, at: usize, interrupts: bool) -> Checked {
        let (session, model) = &mut self.sessions[at];
        let result = self
            .caller
            .call("reset", &json!({"session_id": session}))
            .await?;
        let told = &result["structuredContent"];
        if told["files_kept"] != true || told["interrupted_running_cell"] != interrupts {
            return wrong(
                "reset",
                format!("files kept, cell interrupted: {interrupts}"),
                &result,
            );
        }
        model.reset();
        Ok(())
    }

    async fn close(&mut self, at: usize) -> Checked {
        let session = &self.sessions[at].0;
        let result = self
            .caller
            .call("close_session", &json!({"session_id": session}))
            .await?;
        if result["structuredContent"]["session_id"] != session.as_str() {
            return wrong("close", session, &result);
        }
        Ok(())
    }

    /// Begins a session, with a file or with a cell.
    async fn begin(&mut self, at: usize) -> Checked {
        self.sessions[at].1 = Model::default();
        if self.random.below(3) == 0 {
            self.upload(at).await?;
        }
        let mut statements = self.statements(at, 0);
        let who = format!("{} {} {}", self.name, self.sessions[at].0, self.cells);
        statements.push(Statement::Set("who", json!(who)));
        let ended = self.run(at, &code(&statements, SHOW), json!({})).await?;
        if !ended.content["notes"]
            .to_string()
            .contains("This is a new session")
        {
            return wrong("note", "This is a new session", &ended.content);
        }
        self.complete(at, &statements, &ended)
    }

    async fn list(&mut self, at: usize) -> Checked {
        let result = self.caller.call("list_sessions", &json!({})).await?;
        let told = result["structuredContent"]["sessions"].as_array();
        let told = told
            .into_iter()
            .flatten()
            .map(|session| json!([session["session_id"], session["state"]]));
        let (mut told, wanted): (Vec<Value>, Vec<Value>) = (
            told.collect(),
            self.sessions
                .iter()
                .map(|(name, _)| json!([name, "idle"]))
                .collect(),
        );
        told.sort_by_key(Value::to_string);
        if told != wanted {
            return wrong("sessions", json!(wanted), json!(told));
        }
        self.cell(at, 0, SHOW).await
    }

    async fn blocked(&mut self, at: usize) -> Checked {
        let statements = self.statements(at, 1);
        let end = "try: __import__('socket').create_connection(('example.org', 80))\nexcept \
                   OSError: pass\n";
        let more = if self.random.below(2) == 0 {
            json!({})
        } else {
            json!({"allowed_domains": []})
        };
        let ended = self
            .run(at, &code(&statements, &format!("{end}{SHOW}")), more)
            .await?;
        if ended.content["blocked"] != json!([BLOCKED]) {
            return wrong("blocked", BLOCKED, &ended.content);
        }
        self.complete(at, &statements, &ended)
    }

    async fn timeout(&mut self, at: usize) -> Checked {
        let statements = self.statements(at, 2);
        let ended = self
            .run(at, &code(&statements, NEVER), json!({"timeout": SHORT}))
            .await?;
        ended.expect_status("timeout")?;
        let ran = if ended.text.contains("set") {
            Ran::ToSleep
        } else {
            Ran::Partly
        };
        self.settle(at, &statements, ran).await
    }

    /// Ends Python, sees that cells are refused, and goes on with an undo or a reset.
    async fn death(&mut self, at: usize, how: &str, status: &str) -> Checked {
        let statements = self.statements(at, 2);
        let ended = self.run(at, &code(&statements, how), json!({})).await?;
        let model = &mut self.sessions[at].1;
        model.begin_cell(&statements[0].code());
        statements
            .iter()
            .for_each(|statement| statement.apply(&mut model.state));
        ended.expect_status(status)?;
        keep(model, &ended, status == "out_of_memory")?;
        let cell = json!({"session_id": self.sessions[at].0, "code": "1"});
        self.refused("execute_ipython_cell", &cell, "this session ended because")
            .await?;
        if self.random.below(2) == 0 {
            self.undo(at, true).await
        } else {
            self.reset(at, false).await?;
            self.cell(at, 0, SHOW).await
        }
    }

    /// Closes the connection while a cell waits or runs. That cancels the cell.
    async fn cancel(&mut self, at: usize) -> Checked {
        let statements = self.statements(at, 2);
        let soon = Duration::from_millis(5 + self.random.below(300));
        let cell = json!({"session_id": self.sessions[at].0, "code": code(&statements, NEVER)});
        self.caller
            .abandon("execute_ipython_cell", &cell, soon)
            .await?;
        self.settle(at, &statements, Ran::Perhaps).await
    }

    async fn interrupt(&mut self, at: usize) -> Checked {
        let statements = self.statements(at, 2);
        self.begin_running(at, &statements).await?;
        let session = self.sessions[at].0.clone();
        let check = json!({"session_id": session, "interrupt": true});
        self.caller
            .ended(&session, "check_execution", &check)
            .await?
            .expect_status("cancelled")?;
        self.settle(at, &statements, Ran::Partly).await
    }

    async fn reset_running(&mut self, at: usize) -> Checked {
        let statements = self.statements(at, 2);
        let possible = states(&self.sessions[at].1.state, &statements);
        self.begin_running(at, &statements).await?;
        self.reset(at, true).await?;
        let session = self.sessions[at].0.clone();
        self.caller
            .ended(&session, "check_execution", &json!({"session_id": session}))
            .await?
            .expect_status("reset")?;
        let possible = possible.into_iter().map(|mut state| {
            state.forget_variables();
            state
        });
        self.look(at, possible.collect()).await
    }

    /// Starts a cell that sleeps, and returns when it runs and its call has been answered.
    async fn begin_running(&mut self, at: usize, statements: &[Statement]) -> Checked {
        let session = &self.sessions[at].0;
        let cell = json!({"session_id": session, "code": code(statements, NEVER)});
        let mut result = self.caller.call("execute_ipython_cell", &cell).await?;
        while result["structuredContent"]["status"] == "waiting" {
            result = self
                .caller
                .call("check_execution", &json!({"session_id": session}))
                .await?;
        }
        if result["structuredContent"]["status"] != "running" {
            return wrong("status", "running", &result);
        }
        Ok(())
    }

    /// After a cell that was stopped somewhere: sees how far it came.
    async fn settle(&mut self, at: usize, statements: &[Statement], ran: Ran) -> Checked {
        let mut possible = states(&self.sessions[at].1.state, statements);
        let first_line = statements[0].code();
        if ran == Ran::ToSleep {
            possible.drain(..possible.len() - 1);
        }
        if ran != Ran::Perhaps {
            self.sessions[at].1.begin_cell(&first_line);
            return self.look(at, possible).await;
        }
        // The next cell runs after it. The list of cells then tells whether it ran.
        let ended = self.run(at, SHOW, json!({})).await?;
        ended.expect_status("ok")?;
        self.caller.collect_abandoned(&self.sessions[at].0).await?;
        let checkpoints = self
            .caller
            .call(
                "list_checkpoints",
                &json!({"session_id": self.sessions[at].0}),
            )
            .await?;
        let model = &mut self.sessions[at].1;
        if checkpoints["structuredContent"]["can_undo"][1]["before"] == first_line.as_str() {
            model.begin_cell(&first_line);
        }
        model.state = matching(possible, &ended.shown()?)?;
        model.begin_cell(SHOW);
        keep(model, &ended, false)?;
        compare_checkpoints(model, &checkpoints["structuredContent"])
    }

    /// Runs a cell that shows the state, which is one of these.
    async fn look(&mut self, at: usize, possible: Vec<State>) -> Checked {
        let ended = self.run(at, SHOW, json!({})).await?;
        ended.expect_status("ok")?;
        let model = &mut self.sessions[at].1;
        model.state = matching(possible, &ended.shown()?)?;
        model.begin_cell(SHOW);
        keep(model, &ended, false)
    }

    /// Calls a tool that must refuse the call with these words.
    async fn refused(&mut self, tool: &'static str, arguments: &Value, words: &str) -> Checked {
        let result = self.caller.call(tool, arguments).await?;
        let text = result["content"][0]["text"].as_str().unwrap_or_default();
        if result["isError"] != true || !text.contains(words) {
            return wrong("refusal", words, &result);
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ran {
    /// All statements before the sleep.
    ToSleep,
    Partly,
    /// Or not at all.
    Perhaps,
}

fn code(statements: &[Statement], end: &str) -> String {
    let mut lines: Vec<String> = statements.iter().map(Statement::code).collect();
    lines.push(end.to_owned());
    lines.join("\n")
}

fn matching(possible: Vec<State>, shown: &Value) -> Checked<State> {
    match possible.iter().find(|state| state.shown() == *shown) {
        Some(state) => Ok(state.clone()),
        None => wrong(
            "state",
            json!(possible.iter().map(State::shown).collect::<Vec<_>>()),
            shown,
        ),
    }
}

fn keep(model: &mut Model, ended: &Ended, was_short: bool) -> Checked {
    let cells = ended.content["can_undo"].as_u64().unwrap_or_default() as usize;
    model
        .keep(cells, was_short)
        .or_else(|wanted| wrong("can_undo", wanted, &ended.content))
}

/// Compares the cells that can be undone.
fn compare_checkpoints(model: &Model, told: &Value) -> Checked {
    let listed = told["can_undo"].as_array();
    let listed: Vec<&str> = listed
        .into_iter()
        .flatten()
        .filter_map(|cell| cell["before"].as_str())
        .collect();
    let wanted = model.undoable();
    // Long lines are cut.
    let is_same =
        |(wanted, told): (&&str, &&str)| wanted.starts_with(told.trim_end_matches('…').trim_end());
    if wanted.len() != listed.len() || !wanted.iter().zip(&listed).all(is_same) {
        return wrong("cells that can be undone", json!(wanted), json!(listed));
    }
    Ok(())
}
