//! Programs of the fake backend, played by tasks.
//!
//! The last argument of a program is its script, one command per line:
//!
//! | command | does |
//! |---|---|
//! | `echo X`, `complain X` | writes a line to standard output or error |
//! | `cat` | writes its standard input |
//! | `variable NAME` | writes the change to an environment variable |
//! | `sleep SECONDS` | waits; an interrupt ends the program with signal 2 |
//! | `stubborn` | waits for ever and ignores interrupts |
//! | `exit N` | ends the program |
//!
//! A program with any other command does not exist.

use std::fs::File;
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Notify, watch};

use crate::sandbox::{Exit, Launcher, Process, ProgramError, ProgramSpec};

const COMMANDS: [&str; 8] = [
    "", "echo", "complain", "cat", "variable", "sleep", "stubborn", "exit",
];

/// The programs launched in the sandboxes of a backend that have not ended.
#[derive(Default)]
pub(super) struct Launched {
    /// The command line of every program launched so far.
    words: Mutex<Vec<Vec<String>>>,
    alive: Arc<()>,
}

impl Launched {
    fn words(&self) -> MutexGuard<'_, Vec<Vec<String>>> {
        self.words
            .lock()
            .expect("nothing panics while it holds the words")
    }

    pub(super) fn all(&self) -> Vec<Vec<String>> {
        self.words().clone()
    }

    pub(super) fn alive(&self) -> usize {
        Arc::strong_count(&self.alive) - 1
    }
}

#[async_trait]
impl Launcher for Launched {
    async fn launch(&self, program: ProgramSpec) -> Result<Box<dyn Process>, ProgramError> {
        let script = program.words.last().cloned().unwrap_or_default();
        let name = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
        if script
            .lines()
            .any(|line| !COMMANDS.contains(&name(line).as_str()))
        {
            return Err(ProgramError::Missing);
        }
        self.words().push(program.words.clone());
        let (interrupt, kill) = (Arc::<Notify>::default(), Arc::<Notify>::default());
        let (ended, exit) = watch::channel(None);
        let (interrupted, killed, alive) = (
            Arc::clone(&interrupt),
            Arc::clone(&kill),
            Arc::clone(&self.alive),
        );
        tokio::spawn(async move {
            let status = tokio::select! {
                status = play(&script, program, &interrupted) => status,
                () = killed.notified() => Exit::Signal(9),
            };
            drop(alive);
            ended.send_replace(Some(status));
        });
        Ok(Box::new(FakeProgram {
            interrupt,
            kill,
            exit,
        }))
    }
}

async fn play(script: &str, program: ProgramSpec, interrupt: &Notify) -> Exit {
    let (mut output, mut errors) = (File::from(program.output), File::from(program.errors));
    for line in script.lines() {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        let written = match command {
            "echo" => writeln!(output, "{rest}"),
            "complain" => writeln!(errors, "{rest}"),
            "cat" => output.write_all(program.input.as_deref().unwrap_or_default()),
            "variable" => {
                let found = program.environment.iter().find(|(name, _)| name == rest);
                writeln!(output, "{:?}", found.map(|(_, value)| value))
            }
            "sleep" => tokio::select! {
                () = tokio::time::sleep(
                    Duration::from_secs_f64(rest.parse().unwrap_or(0.0))
                ) => Ok(()),
                () = interrupt.notified() => return Exit::Signal(2),
            },
            "stubborn" => std::future::pending().await,
            "exit" => return Exit::Code(rest.parse().unwrap_or(0)),
            _ => Ok(()),
        };
        if written.is_err() {
            return Exit::Signal(13);
        }
    }
    Exit::Code(0)
}

struct FakeProgram {
    interrupt: Arc<Notify>,
    kill: Arc<Notify>,
    exit: watch::Receiver<Option<Exit>>,
}

#[async_trait]
impl Process for FakeProgram {
    fn interrupt(&self) {
        self.interrupt.notify_one();
    }

    fn kill(&self) {
        self.kill.notify_one();
    }

    async fn exited(&mut self) -> Exit {
        self.exit
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|exit| *exit)
            .unwrap_or(Exit::Unknown)
    }
}

impl Drop for FakeProgram {
    fn drop(&mut self) {
        self.kill();
    }
}
