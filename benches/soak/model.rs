//! The model of a session: what its variables, its files and its undo history must be.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::random::Random;

/// Variables that cells change. `log` is a list, the others are numbers.
const VARIABLES: [&str; 4] = ["a", "b", "c", "d"];
const FILES: [&str; 4] = ["f0", "f1", "f2", "f3"];
/// Elements of `log`, and characters of a file, after which it is made shorter.
const MAX_LOG_LENGTH: usize = 12;
const MAX_FILE_LENGTH: usize = 400;
/// States that the server keeps of a session by default.
const KEPT_STATES: usize = 10;

/// Prints all variables and files after `=> `. It assigns nothing.
pub(crate) const SHOW: &str = concat!(
    r#"print("=>", __import__("json").dumps(["#,
    r#"{k: globals()[k] for k in ("who", "n", "a", "b", "c", "d", "log", "late") "#,
    r#"if k in globals()}, "#,
    r#"{f: open(f).read() for f in __import__("os").listdir()}]))"#
);

/// What a cell prints with `SHOW`.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct State {
    variables: BTreeMap<String, Value>,
    pub(crate) files: BTreeMap<&'static str, String>,
}

impl State {
    pub(crate) fn shown(&self) -> Value {
        json!([self.variables, self.files])
    }

    /// One of the numbers that are set, with its value.
    pub(crate) fn some_variable(&self, random: &mut Random) -> Option<(&str, &Value)> {
        let set: Vec<_> = VARIABLES
            .iter()
            .filter_map(|name| Some((*name, self.variables.get(*name)?)))
            .collect();
        if set.is_empty() {
            None
        } else {
            Some(*random.choose(&set))
        }
    }

    pub(crate) fn forget_variables(&mut self) {
        self.variables.clear();
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.variables.get(name).and_then(Value::as_u64)
    }
}

/// One statement of a cell.
#[derive(Debug, Clone)]
pub(crate) enum Statement {
    Set(&'static str, Value),
    Add(&'static str, u64),
    Append(u64),
    Trim,
    Delete(&'static str),
    Write(&'static str, String),
    Extend(&'static str, String),
    Remove(&'static str),
}

impl Statement {
    /// A statement that is valid in this state.
    pub(crate) fn any(state: &State, random: &mut Random) -> Statement {
        let (name, file, number) = (
            *random.choose(&VARIABLES),
            *random.choose(&FILES),
            random.below(1_000_000),
        );
        let exists = state.variables.contains_key(name);
        match random.below(8) {
            0 if exists => Statement::Add(name, number),
            1 if exists => Statement::Delete(name),
            2 | 3 => match state.variables.get("log").and_then(Value::as_array) {
                None => Statement::Set("log", json!([])),
                Some(log) if log.len() >= MAX_LOG_LENGTH => Statement::Trim,
                Some(_) => Statement::Append(number),
            },
            4 if state
                .files
                .get(file)
                .is_some_and(|text| text.len() < MAX_FILE_LENGTH) =>
            {
                Statement::Extend(file, random.text())
            }
            5 if state.files.contains_key(file) => Statement::Remove(file),
            4..=6 => Statement::Write(file, random.text()),
            _ => Statement::Set(name, json!(number)),
        }
    }

    pub(crate) fn code(&self) -> String {
        match self {
            Statement::Set(name, value) => format!("{name} = {value}"),
            Statement::Add(name, number) => format!("{name} += {number}"),
            Statement::Append(number) => format!("log.append({number})"),
            Statement::Trim => "del log[:10]".to_owned(),
            Statement::Delete(name) => format!("del {name}"),
            Statement::Write(file, text) => {
                format!("with open('{file}', 'w') as out: out.write('{text}')")
            }
            Statement::Extend(file, text) => {
                format!("with open('{file}', 'a') as out: out.write('{text}')")
            }
            Statement::Remove(file) => format!("__import__('os').remove('{file}')"),
        }
    }

    pub(crate) fn apply(&self, state: &mut State) {
        match self {
            Statement::Set(name, value) => {
                drop(state.variables.insert((*name).to_owned(), value.clone()))
            }
            Statement::Add(name, number) => {
                let sum = state.number(name).unwrap_or(0) + number;
                state.variables.insert((*name).to_owned(), json!(sum));
            }
            Statement::Append(number) => {
                if let Some(log) = state.variables.get_mut("log").and_then(Value::as_array_mut) {
                    log.push(json!(number));
                }
            }
            Statement::Trim => {
                if let Some(log) = state.variables.get_mut("log").and_then(Value::as_array_mut) {
                    log.drain(..10);
                }
            }
            Statement::Delete(name) => drop(state.variables.remove(*name)),
            Statement::Write(file, text) => drop(state.files.insert(file, text.clone())),
            Statement::Extend(file, text) => state.files.entry(file).or_default().push_str(text),
            Statement::Remove(file) => drop(state.files.remove(file)),
        }
    }
}

/// The states that an interrupted cell may leave: before, between and after its statements. A file
/// is emptied before it is written.
pub(crate) fn states(from: &State, statements: &[Statement]) -> Vec<State> {
    let mut states = vec![from.clone()];
    for statement in statements {
        let mut next = states[states.len() - 1].clone();
        if let Statement::Write(file, _) = statement {
            Statement::Write(file, String::new()).apply(&mut next);
            states.push(next.clone());
        }
        statement.apply(&mut next);
        states.push(next);
    }
    states
}

/// What a session is now, and what it was before each cell that can be undone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Model {
    pub(crate) state: State,
    past: Vec<(String, State)>,
}

impl From<State> for Model {
    /// A copy of a session has no past of its own.
    fn from(state: State) -> Model {
        Model {
            state,
            past: Vec::new(),
        }
    }
}

impl Model {
    /// Notes that a cell begins, whose first line is this.
    pub(crate) fn begin_cell(&mut self, first_line: &str) {
        self.past.push((first_line.to_owned(), self.state.clone()));
    }

    /// Takes over how many cells can be undone. Fewer states may be kept when memory was short.
    pub(crate) fn keep(&mut self, cells: usize, was_short: bool) -> Result<(), String> {
        let fewest = if was_short {
            1
        } else {
            self.past.len().min(KEPT_STATES)
        };
        if !(fewest..=self.past.len()).contains(&cells) {
            return Err(format!(
                "{fewest} to {} cells that can be undone",
                self.past.len()
            ));
        }
        self.past.drain(..self.past.len() - cells);
        Ok(())
    }

    /// The cells that can be undone, the last one first.
    pub(crate) fn undoable(&self) -> Vec<&str> {
        self.past
            .iter()
            .rev()
            .map(|(first_line, _)| first_line.as_str())
            .collect()
    }

    pub(crate) fn undo(&mut self, cells: usize) {
        let kept = self.past.len() - cells;
        if let Some((_, state)) = self.past.drain(kept..).next() {
            self.state = state;
        }
    }

    pub(crate) fn forget_past(&mut self) {
        self.past.clear();
    }

    /// Files stay.
    pub(crate) fn reset(&mut self) {
        self.state.forget_variables();
        self.forget_past();
    }
}
