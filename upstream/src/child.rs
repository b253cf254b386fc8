//! A server that is a program on this machine.
//!
//! It is started without a shell, in its own process group and with a clean environment: the few
//! variables that every MCP client passes on, and those of the parameters. It is stopped gracefully
//! if possible (end of input, then SIGTERM, then SIGKILL), together with its group.
//!
//! It must not outlive this process, however this process ends. The kernel can ensure that with the
//! parent-death signal, but only the child itself can request it. So the program is started through
//! a wrapper, a command of ours that calls [`exec_with_parent`]. For the kernel the parent is the
//! *thread* that started the child, not the process. So a single thread that never ends starts all
//! of them.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use rustix::process::{Pid, Signal, getppid, kill_process_group, set_parent_process_death_signal};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::variables::{SecretMask, Variables};

/// Variables that MCP clients pass on to the servers they start.
pub(crate) const INHERITED: [&str; 7] =
    ["HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG"];
/// Search path for programs if none is set.
const USUAL_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
/// Timeout for a server to exit after its input has ended. Interpreters take that long on a busy
/// machine.
const PATIENCE_AFTER_INPUT: Duration = Duration::from_secs(2);
/// Timeout for a program that installs packages to finish the installation.
const PATIENCE_FOR_PACKAGES: Duration = Duration::from_secs(120);
/// Timeout after SIGTERM.
const PATIENCE_AFTER_TERM: Duration = Duration::from_secs(1);
/// Timeout for the last output of a program to arrive.
const PATIENCE_FOR_WORDS: Duration = Duration::from_millis(300);
/// Limits on the retained standard error output of a server.
const KEPT_LINES: usize = 20;
const MAX_KEPT_LINE_LENGTH: usize = 500;
/// Number of reported lines: the cause is often above the last one.
const TOLD_LINES: usize = 5;

/// The command through which programs are started, so that they are killed when this process ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrapperCommand {
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
}

/// Sets the parent-death signal, then replaces this process with the program in the arguments.
/// Returns only on failure.
///
/// The arguments are those after the wrapper's own arguments: the pid of the expected parent, the
/// program, its arguments.
pub fn exec_with_parent(arguments: impl IntoIterator<Item = OsString>) -> io::Error {
    let mut arguments = arguments.into_iter();
    let parent = arguments
        .next()
        .and_then(|text| text.to_str()?.parse().ok())
        .and_then(Pid::from_raw);
    let (Some(parent), Some(program)) = (parent, arguments.next()) else {
        return io::Error::new(
            io::ErrorKind::InvalidInput,
            "expected a process and a program",
        );
    };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return error.into();
    }
    // A parent that died before the line above sends no signal.
    if getppid() != Some(parent) {
        return io::Error::other("the process that started this has ended");
    }
    std::process::Command::new(program).args(arguments).exec()
}

/// The program to start.
pub(crate) struct Program<'a> {
    pub(crate) command: &'a str,
    pub(crate) arguments: &'a [String],
    pub(crate) environment: &'a BTreeMap<String, String>,
    pub(crate) folder: Option<&'a str>,
}

/// Error while starting a program.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(
        "there is no program of that name; one without a `/` is looked for on the PATH of the \
         server"
    )]
    NoProgram,
    #[error("the folder it should start in does not exist")]
    NoFolder,
    #[error("it could not be started")]
    Spawn(#[source] io::Error),
}

/// A started program. Dropping it kills its group.
pub(crate) struct Child {
    process: tokio::process::Child,
    group: Option<Pid>,
    /// Cancelled when the program is dropped.
    over: CancellationToken,
}

/// The pipes of a started program, and its last output.
pub(crate) struct Started {
    pub(crate) child: Child,
    pub(crate) input: ChildStdin,
    pub(crate) output: ChildStdout,
    pub(crate) last_words: LastWords,
}

/// Starts a program.
pub(crate) async fn start(
    program: Program<'_>,
    host: &Variables,
    wrapper: Option<&WrapperCommand>,
    mask: SecretMask,
) -> Result<Started, StartError> {
    if program
        .folder
        .is_some_and(|folder| !Path::new(folder).is_dir())
    {
        return Err(StartError::NoFolder);
    }
    let environment = environment(host, program.environment);
    let path = environment.get("PATH").map_or(USUAL_PATH, String::as_str);
    let found = find(program.command, path, program.folder).ok_or(StartError::NoProgram)?;
    let mut command = match wrapper {
        Some(wrapper) => {
            let mut command = Command::new(&wrapper.program);
            command
                .args(&wrapper.arguments)
                .arg(std::process::id().to_string())
                .arg(&found);
            command
        }
        None => Command::new(&found),
    };
    command
        .args(program.arguments)
        .env_clear()
        .envs(&environment)
        .process_group(0)
        .kill_on_drop(true);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if let Some(folder) = program.folder {
        command.current_dir(folder);
    }
    let mut process = spawn(command).await.map_err(StartError::Spawn)?;
    let group = process.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    let missing = || StartError::Spawn(io::Error::other("a pipe is missing"));
    let (input, output) = (
        process.stdin.take().ok_or_else(missing)?,
        process.stdout.take().ok_or_else(missing)?,
    );
    let errors = process.stderr.take().ok_or_else(missing)?;
    let last_words = LastWords::default();
    let over = CancellationToken::new();
    tokio::spawn(listen(errors, last_words.clone(), mask, over.clone()));
    Ok(Started {
        child: Child {
            process,
            group,
            over,
        },
        input,
        output,
        last_words,
    })
}

/// Programs that install packages before they run one. Killing them can leave a corrupt cache that
/// other programs share.
const PACKAGE_RUNNERS: [&str; 8] = ["bunx", "npm", "npx", "pipx", "pnpm", "uv", "uvx", "yarn"];

/// Returns whether a command installs packages first.
pub(crate) fn installs_first(command: &str) -> bool {
    PACKAGE_RUNNERS.contains(&command.rsplit('/').next().unwrap_or(command))
}

impl Child {
    /// Stops the program, whose input has been closed, and its group.
    pub(crate) async fn end(&mut self) {
        self.end_within(PATIENCE_AFTER_INPUT).await;
    }

    /// Like `end`, but allows the time of a package installation.
    pub(crate) async fn end_slowly(&mut self) {
        self.end_within(PATIENCE_FOR_PACKAGES).await;
    }

    async fn end_within(&mut self, patience: Duration) {
        if timeout(patience, self.process.wait()).await.is_err() {
            self.signal(Signal::TERM);
            if timeout(PATIENCE_AFTER_TERM, self.process.wait())
                .await
                .is_err()
            {
                self.signal(Signal::KILL);
                // A killed process ends, unless it is stuck in the kernel, which can last
                // indefinitely.
                let _ = timeout(PATIENCE_AFTER_TERM, self.process.wait()).await;
            }
        }
        // Kills leftover processes of the group.
        self.signal(Signal::KILL);
        self.group = None;
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group {
            // Fails only if no process is left.
            let _ = kill_process_group(group, signal);
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        self.over.cancel();
    }
}

/// The last lines of a program's standard error, with secrets masked.
#[derive(Clone, Default)]
pub(crate) struct LastWords {
    lines: Arc<Mutex<VecDeque<String>>>,
    /// Cancelled at the end of standard error.
    ended: CancellationToken,
}

impl LastWords {
    /// Returns the last non-empty lines of a program that seems to have ended. Waits briefly for
    /// output that is still in the pipe.
    pub(crate) async fn last(&self) -> Option<String> {
        let _ = timeout(PATIENCE_FOR_WORDS, self.ended.cancelled()).await;
        let lines = self.lines();
        let told: Vec<&str> = lines
            .iter()
            .skip(lines.len().saturating_sub(TOLD_LINES))
            .map(String::as_str)
            .collect();
        (!told.is_empty()).then(|| told.join("\n"))
    }

    fn add(&self, line: &[u8], mask: &SecretMask) {
        let line = mask.hide(&String::from_utf8_lossy(line));
        let line: String = line
            .trim()
            .chars()
            .filter(|character| !character.is_control())
            .take(MAX_KEPT_LINE_LENGTH)
            .collect();
        if line.is_empty() {
            return;
        }
        tracing::debug!(line, "an MCP server wrote to its standard error");
        let mut lines = self.lines();
        if lines.len() == KEPT_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    fn lines(&self) -> std::sync::MutexGuard<'_, VecDeque<String>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads standard error until it ends, so that the program never blocks on it. Stops soon after the
/// program is dropped, in case another process still holds the pipe open.
async fn listen(
    errors: impl AsyncRead + Unpin,
    last_words: LastWords,
    mask: SecretMask,
    over: CancellationToken,
) {
    let given_up = async {
        over.cancelled().await;
        sleep(PATIENCE_FOR_WORDS).await;
    };
    tokio::select! {
        () = read(errors, &last_words, &mask) => {}
        () = given_up => {}
    }
    last_words.ended.cancel();
}

/// Reads lines. A long line is truncated.
async fn read(mut errors: impl AsyncRead + Unpin, last_words: &LastWords, mask: &SecretMask) {
    let mut line = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = errors.read(&mut buffer).await {
        for byte in &buffer[..count] {
            if *byte == b'\n' {
                last_words.add(&line, mask);
                line.clear();
            } else if line.len() < 4 * MAX_KEPT_LINE_LENGTH {
                line.push(*byte);
            }
        }
    }
    last_words.add(&line, mask);
}

fn environment(host: &Variables, given: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let inherited = INHERITED
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), host.get(name)?.to_owned())));
    let mut environment: BTreeMap<String, String> = inherited.collect();
    environment.extend(given.clone());
    environment
}

/// Finds a program as a shell would, so that a missing program is reported directly and not by the
/// wrapper.
fn find(command: &str, path: &str, folder: Option<&str>) -> Option<PathBuf> {
    let is_program = |path: &Path| {
        std::fs::metadata(path)
            .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    if command.contains('/') {
        let found = folder.map_or_else(
            || PathBuf::from(command),
            |folder| Path::new(folder).join(command),
        );
        return is_program(&found).then(|| std::path::absolute(&found).unwrap_or(found));
    }
    std::env::split_paths(path)
        .map(|folder| folder.join(command))
        .find(|found| found.is_absolute() && is_program(found))
}

struct Job {
    command: Command,
    runtime: tokio::runtime::Handle,
    answer: oneshot::Sender<io::Result<tokio::process::Child>>,
}

/// Starts a command from the thread that never ends.
async fn spawn(command: Command) -> io::Result<tokio::process::Child> {
    static SPAWNER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, jobs) = mpsc::channel::<Job>();
        let work = move || {
            for mut job in jobs {
                let _inside = job.runtime.enter();
                // If the caller is gone, the child is dropped and killed.
                let _ = job.answer.send(job.command.spawn());
            }
        };
        std::thread::Builder::new()
            .name("cb-upstreams".to_owned())
            .spawn(work)
            .expect("a thread can be started");
        sender
    });
    let (answer, started) = oneshot::channel();
    let job = Job {
        command,
        runtime: tokio::runtime::Handle::current(),
        answer,
    };
    spawner
        .send(job)
        .map_err(|_| io::Error::other("the thread that starts programs is gone"))?;
    started
        .await
        .map_err(|_| io::Error::other("the thread that starts programs is gone"))?
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncBufReadExt;

    use super::*;

    fn host() -> Variables {
        let path = std::env::var("PATH").unwrap();
        Variables::new([
            ("PATH".to_owned(), path),
            ("SECRET_OF_HOST".to_owned(), "never".to_owned()),
        ])
    }

    async fn shell(script: &str, environment: &[(&str, &str)]) -> Started {
        let environment = environment
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let arguments = ["-c".to_owned(), script.to_owned()];
        let program = Program {
            command: "sh",
            arguments: &arguments,
            environment: &environment,
            folder: None,
        };
        start(program, &host(), None, SecretMask::default())
            .await
            .unwrap()
    }

    async fn output(started: &mut Started) -> String {
        let mut text = String::new();
        started.output.read_to_string(&mut text).await.unwrap();
        text
    }

    fn is_alive(process: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        // A zombie is dead and waits only to be reaped.
        stat.rsplit(") ")
            .next()
            .is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
    }

    #[tokio::test]
    async fn the_environment_is_clean_but_for_what_was_given() {
        let mut started = shell("env", &[("GIVEN", "yes")]).await;
        let text = output(&mut started).await;
        assert!(
            text.contains("GIVEN=yes") && text.contains("PATH="),
            "{text}"
        );
        assert!(
            !text.contains("SECRET_OF_HOST") && !text.contains("CARGO"),
            "{text}"
        );
    }

    #[tokio::test]
    async fn a_missing_program_or_folder_is_a_plain_error() {
        let environment = BTreeMap::new();
        let program = |command, folder| Program {
            command,
            arguments: &[],
            environment: &environment,
            folder,
        };
        let attempt = async |command, folder| {
            start(
                program(command, folder),
                &host(),
                None,
                SecretMask::default(),
            )
            .await
            .err()
        };
        assert!(matches!(
            attempt("no-such-program", None).await,
            Some(StartError::NoProgram)
        ));
        assert!(matches!(
            attempt("./sh", None).await,
            Some(StartError::NoProgram)
        ));
        assert!(matches!(
            attempt("true", Some("/no/such/folder")).await,
            Some(StartError::NoFolder)
        ));
        // Control.
        assert!(attempt("true", Some("/")).await.is_none());
    }

    #[tokio::test]
    async fn a_program_that_ignores_everything_is_killed_with_what_it_started() {
        let mut started = shell(
            "trap '' TERM; sleep 1000 & echo $!; while :; do sleep 1000; done",
            &[],
        )
        .await;
        let mut lines = tokio::io::BufReader::new(&mut started.output).lines();
        let grandchild = lines.next_line().await.unwrap().unwrap();
        assert!(is_alive(&grandchild));
        drop(started.input);
        started.child.end().await;
        while is_alive(&grandchild) {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn dropping_kills_the_group_at_once() {
        let mut started = shell("sleep 1000 & echo $!; wait", &[]).await;
        let mut lines = tokio::io::BufReader::new(&mut started.output).lines();
        let grandchild = lines.next_line().await.unwrap().unwrap();
        drop(started.child);
        while is_alive(&grandchild) {
            tokio::task::yield_now().await;
        }
    }

    #[test]
    fn programs_that_install_packages_are_known_by_their_name() {
        for command in ["npx", "/usr/bin/npx", "uvx"] {
            assert!(installs_first(command), "{command}");
        }
        for command in ["node", "npxx", "/npx/server"] {
            assert!(!installs_first(command), "{command}");
        }
    }

    #[tokio::test]
    async fn last_words_are_kept_within_bounds_and_without_secrets() {
        let filled = crate::variables::fill(
            &Variables::new([("K".to_owned(), "hunter2".to_owned())]),
            |fill| fill.text("${K}"),
        );
        let words = LastWords::default();
        let many: String = (0..100).map(|number| format!("line {number}\n")).collect();
        listen(
            many.as_bytes(),
            words.clone(),
            SecretMask::default(),
            CancellationToken::new(),
        )
        .await;
        assert_eq!(words.lines().len(), KEPT_LINES);
        let text = format!("{}\nthe key hunter2 is wrong\r\n\n", "x".repeat(100_000));
        listen(
            text.as_bytes(),
            words.clone(),
            filled.unwrap().mask,
            CancellationToken::new(),
        )
        .await;
        assert_eq!(
            words.last().await.unwrap().lines().last(),
            Some("the key [hidden] is wrong")
        );
        assert_eq!(words.last().await.unwrap().lines().count(), TOLD_LINES);
        assert!(
            words
                .lines()
                .iter()
                .all(|line| line.len() <= MAX_KEPT_LINE_LENGTH)
        );
    }

    #[test]
    fn the_wrapper_refuses_a_parent_that_is_not_there() {
        let refused =
            |arguments: &[&str]| exec_with_parent(arguments.iter().map(OsString::from)).to_string();
        assert_eq!(refused(&[]), "expected a process and a program");
        assert_eq!(refused(&["x", "true"]), "expected a process and a program");
        // This changes the parent-death signal of the test's own thread, which ends with the test.
        assert_eq!(
            refused(&["1073741823", "true"]),
            "the process that started this has ended"
        );
    }
}
