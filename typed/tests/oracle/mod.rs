//! A Python beside the tests that answers questions about generated packages. See
//! `python/oracle.py`.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, OnceLock};

use cellblock_typed::Package;
use serde_json::{Map, Value};

/// The folder of the runner's Python.
pub(crate) fn runner() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("it is in the workspace")
        .join("runner")
}

/// All files of a package, and the index of all servers.
pub(crate) fn files(package: &Package) -> Value {
    let index = cellblock_typed::index(&[package]);
    let pairs = package
        .files
        .iter()
        .chain([&index])
        .map(|file| (file.path.clone(), Value::String(file.text.clone())));
    Value::Object(pairs.collect::<Map<_, _>>())
}

pub(crate) struct Oracle {
    process: Child,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Oracle {
    /// Any Python.
    pub(crate) fn plain() -> Oracle {
        Oracle::start(Path::new("python3"))
    }

    /// One that has Pydantic, or nothing where none can be had.
    pub(crate) fn with_pydantic() -> Option<Oracle> {
        python_with("pydantic").map(|python| Oracle::start(&python))
    }

    fn start(python: &Path) -> Oracle {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/oracle.py");
        let mut command = Command::new(python);
        command
            .arg(script)
            .arg(runner())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = command
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", python.display()));
        let questions = process.stdin.take().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap());
        Oracle {
            process,
            questions,
            answers,
        }
    }

    pub(crate) fn ask(&mut self, question: Value) -> Value {
        writeln!(self.questions, "{question}").unwrap();
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        serde_json::from_str(&answer)
            .unwrap_or_else(|error| panic!("Python answered {answer:?}: {error}"))
    }
}

impl Drop for Oracle {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns a Python that has a module: the one that CELLBLOCK_TEST_PYTHON names, the usual one, or
/// one that is made for these tests.
pub(crate) fn python_with(module: &str) -> Option<PathBuf> {
    static MAKING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = MAKING
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let named = std::env::var_os("CELLBLOCK_TEST_PYTHON").map(PathBuf::from);
    let usual = named.unwrap_or_else(|| PathBuf::from("python3"));
    let has_it = |python: &Path| {
        let mut command = Command::new(python);
        command
            .args(["-c", &format!("import pydantic, {module}")])
            .stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let found = if has_it(&usual) {
        Some(usual)
    } else {
        made().filter(|python| has_it(python))
    };
    if found.is_none() {
        println!("skipped: needs Python with Pydantic and {module}");
    }
    found
}

/// Makes a virtual environment with Pydantic and a type checker, once, where builds put what they
/// make.
fn made() -> Option<PathBuf> {
    static MADE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let make = || {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("typed-python");
        let python = folder.join("bin/python");
        if folder.join("complete").exists() {
            return Some(python);
        }
        let run = |command: &mut Command| {
            command
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .ok()?
                .success()
                .then_some(())
        };
        run(Command::new("python3")
            .args(["-m", "venv", "--clear"])
            .arg(&folder))?;
        run(Command::new(&python).args(["-m", "pip", "install", "pydantic>=2", "mypy"]))?;
        std::fs::write(folder.join("complete"), "").ok()?;
        Some(python)
    };
    MADE.get_or_init(make).clone()
}
