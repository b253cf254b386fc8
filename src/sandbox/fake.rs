//! A backend without any isolation, for tests.
//!
//! Its interpreter is a task that speaks the runner's protocol over a real socket and real pipes and understands one command per line:
//!
//! | command | does |
//! |---|---|
//! | `print X`, `err X`, `value X` | writes a line to standard output or error, gives a value |
//! | `display ID X`, `update ID X`, `clear`, `picture BASE64` | rich output |
//! | `set NAME X`, `get NAME` | keeps a variable, prints it or raises `NameError` |
//! | `raise X` | ends the cell with a `ValueError` |
//! | `sleep SECONDS` | waits; an interrupt raises `KeyboardInterrupt` |
//! | `ignore-interrupt` | waits for ever |
//! | `flood N` | prints N numbered lines |
//! | `exit N`, `crash`, `oom` | ends the interpreter; `exit-later N` does so after the end of the cell |
//! | `garbage`, `unknown`, `done-twice`, `other-done`, `forge SEQ` | lies on the channel or in a pipe |
//! | `late X` | prints after the end of the cell |
//! | `mute` | answers nothing after this cell |
//!
//! It reports every layer of isolation as missing, because that is true, and must never run anything but these commands.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::pipe::Sender;
use tokio::sync::{Notify, watch};

use super::{
    Backend, Exit, Interpreter, Isolation, LaunchError, Layer, LayerKind, MemoryUse, Preparation, Process, Sandbox,
};

const MARKER: [u8; 16] = *b"fake interpreter";

/// Makes sandboxes that isolate nothing.
pub struct FakeBackend {
    preparation: watch::Sender<Preparation>,
    /// Sandboxes that were made and not destroyed.
    alive: Arc<AtomicUsize>,
}

impl FakeBackend {
    /// A backend that is ready.
    pub fn new() -> FakeBackend {
        FakeBackend { preparation: watch::Sender::new(Preparation::Ready), alive: Arc::default() }
    }

    /// A backend whose preparation stands still until `prepare` is called.
    pub fn unprepared() -> FakeBackend {
        let working = Preparation::Working { step: "preparing".to_owned(), done: 0, total: None };
        FakeBackend { preparation: watch::Sender::new(working), alive: Arc::default() }
    }

    /// Ends the preparation.
    pub fn prepare(&self, preparation: Preparation) {
        self.preparation.send_replace(preparation);
    }

    /// Counts the sandboxes that exist.
    pub fn sandboxes(&self) -> usize {
        self.alive.load(Ordering::SeqCst)
    }
}

impl Default for FakeBackend {
    fn default() -> FakeBackend {
        FakeBackend::new()
    }
}

#[async_trait]
impl Backend for FakeBackend {
    fn preparation(&self) -> watch::Receiver<Preparation> {
        self.preparation.subscribe()
    }

    async fn launch(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        let mut preparation = self.preparation.subscribe();
        let done = preparation.wait_for(|state| !matches!(state, Preparation::Working { .. })).await;
        if let Ok(Preparation::Failed { why }) = done.as_deref() {
            return Err(LaunchError::Preparation { why: why.clone() });
        }
        drop(done);
        let files = tempfile::tempdir().map_err(start_failed)?;
        let mut isolation = Isolation::default();
        for kind in LayerKind::ALL {
            isolation.record(kind, Layer::Missing { why: "the fake backend isolates nothing".to_owned() });
        }
        let (interpreter, process) = start(files.path())?;
        self.alive.fetch_add(1, Ordering::SeqCst);
        let sandbox = FakeSandbox { files: Some(files), isolation, process, alive: self.alive.clone() };
        Ok((Box::new(sandbox), interpreter))
    }

    async fn shut_down(&self) {}
}

fn start_failed(error: io::Error) -> LaunchError {
    LaunchError::Start { why: error.to_string() }
}

struct FakeSandbox {
    files: Option<TempDir>,
    isolation: Isolation,
    process: FakeProcess,
    alive: Arc<AtomicUsize>,
}

#[async_trait]
impl Sandbox for FakeSandbox {
    fn isolation(&self) -> &Isolation {
        &self.isolation
    }

    async fn restart(&mut self) -> Result<Interpreter, LaunchError> {
        self.process.kill();
        self.process.exited().await;
        let files = self.files.as_ref().ok_or(LaunchError::Start { why: "the sandbox is destroyed".to_owned() })?;
        let (interpreter, process) = start(files.path())?;
        self.process = process;
        Ok(interpreter)
    }

    fn memory(&self) -> MemoryUse {
        MemoryUse { now: 1024, peak: 2048 }
    }

    fn forget_peak(&self) {}

    async fn destroy(&mut self) {
        self.process.kill();
        self.process.exited().await;
        if self.files.take().is_some() {
            self.alive.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// What the host can do to the task that plays the interpreter.
#[derive(Clone)]
struct FakeProcess {
    interrupt: Arc<Notify>,
    kill: Arc<Notify>,
    exit: watch::Receiver<Option<Exit>>,
}

#[async_trait]
impl Process for FakeProcess {
    fn interrupt(&self) {
        self.interrupt.notify_one();
    }

    fn kill(&self) {
        self.kill.notify_one();
    }

    async fn exited(&mut self) -> Exit {
        self.exit.wait_for(Option::is_some).await.ok().and_then(|exit| *exit).unwrap_or(Exit::Unknown)
    }
}

/// Starts a task that plays an interpreter.
fn start(files: &Path) -> Result<(Interpreter, FakeProcess), LaunchError> {
    let (host, channel) = UnixStream::pair().map_err(start_failed)?;
    let (out, out_writer) = io::pipe().map_err(start_failed)?;
    let (err, err_writer) = io::pipe().map_err(start_failed)?;
    let hello = json!({"type": "hello", "version": 1, "python": "fake", "marker": format!("{:032x}", u128::from_be_bytes(MARKER))});
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [out.as_fd(), err.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    rustix::net::sendmsg(&channel, &[io::IoSlice::new(&frame(&hello, b""))], &mut control, SendFlags::empty())
        .map_err(|error| start_failed(error.into()))?;

    let (exit_sender, exit) = watch::channel(None);
    let process = FakeProcess { interrupt: Arc::default(), kill: Arc::default(), exit };
    let mut script = Script {
        channel,
        pipes: [
            Sender::from_owned_fd(out_writer.into()).map_err(start_failed)?,
            Sender::from_owned_fd(err_writer.into()).map_err(start_failed)?,
        ],
        interrupt: process.interrupt.clone(),
        files: files.to_owned(),
        variables: BTreeMap::new(),
        upload: None,
        seq: 0,
        last_pipe: 0,
        muted: false,
    };
    let kill = process.kill.clone();
    tokio::spawn(async move {
        let exit = tokio::select! {
            exit = script.serve() => exit,
            () = kill.notified() => Exit::Signal(9),
        };
        drop(script);
        exit_sender.send_replace(Some(exit));
    });
    Ok((Interpreter { channel: host, process: Box::new(process.clone()) }, process))
}

fn frame(header: &Value, payload: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    let length = 4 + header.len() + payload.len();
    [&(length as u32).to_be_bytes(), &(header.len() as u32).to_be_bytes(), header.as_bytes(), payload].concat()
}

/// The interpreter's side of the channel.
struct Script {
    channel: UnixStream,
    pipes: [Sender; 2],
    interrupt: Arc<Notify>,
    files: PathBuf,
    variables: BTreeMap<String, String>,
    upload: Option<(PathBuf, bool, Vec<u8>)>,
    seq: u32,
    last_pipe: usize,
    muted: bool,
}

/// Why a cell did not come to its end.
enum Interruption {
    Exit(Exit),
    Raised { name: &'static str, message: String },
}

impl From<io::Error> for Interruption {
    fn from(_: io::Error) -> Interruption {
        Interruption::Exit(Exit::Code(1))
    }
}

impl Script {
    async fn serve(&mut self) -> Exit {
        loop {
            match self.answer_one().await {
                Ok(()) => {}
                Err(Interruption::Exit(exit)) => return exit,
                Err(Interruption::Raised { .. }) => return Exit::Code(1),
            }
        }
    }

    async fn answer_one(&mut self) -> Result<(), Interruption> {
        let length = self.channel.read_u32().await? as usize;
        let header_length = self.channel.read_u32().await? as usize;
        let mut body = vec![0; length - 4];
        self.channel.read_exact(&mut body).await?;
        let payload = body.split_off(header_length);
        let header: Value = serde_json::from_slice(&body).map_err(io::Error::from)?;
        let id = &header["id"];
        let path = || self.files.join(header["path"].as_str().unwrap_or_default());
        match header["type"].as_str() {
            _ if self.muted => Ok(()),
            Some("execute") => self.execute(id, &String::from_utf8_lossy(&payload)).await,
            Some("read_file") => self.read_file(id, path(), header["limit"].as_u64().unwrap_or(0)).await,
            Some("write_begin") => {
                self.upload = Some((path(), header["overwrite"] == true, Vec::new()));
                Ok(())
            }
            Some("write_data") => {
                if let Some((_, _, bytes)) = &mut self.upload {
                    bytes.extend(payload);
                }
                Ok(())
            }
            Some("write_end") => self.write_file(id).await,
            _ => Ok(()),
        }
    }

    async fn say(&mut self, header: Value, payload: &[u8]) -> Result<(), Interruption> {
        Ok(self.channel.write_all(&frame(&header, payload)).await?)
    }

    async fn mark(&mut self, kind: u8) -> Result<u32, Interruption> {
        self.seq += 1;
        self.write_marker(0, self.seq, kind).await?;
        self.write_marker(1, self.seq, kind).await?;
        Ok(self.seq)
    }

    async fn write_marker(&mut self, pipe: usize, seq: u32, kind: u8) -> Result<(), Interruption> {
        let marker = [b"\0\x1bCB", &MARKER[..], &seq.to_be_bytes(), &[kind, b'\n']].concat();
        Ok(self.pipes[pipe].write_all(&marker).await?)
    }

    async fn write(&mut self, pipe: usize, text: &str) -> Result<(), Interruption> {
        if self.last_pipe != pipe {
            self.mark(b'P').await?;
            self.last_pipe = pipe;
        }
        Ok(self.pipes[pipe].write_all(text.as_bytes()).await?)
    }

    async fn say_in_order(&mut self, mut header: Value) -> Result<(), Interruption> {
        header["seq"] = json!(self.mark(b'F').await?);
        self.say(header, b"").await
    }

    async fn execute(&mut self, id: &Value, code: &str) -> Result<(), Interruption> {
        self.say_in_order(json!({"type": "started", "id": id, "rotated": false})).await?;
        let (mut late, mut twice, mut exit) = (None, false, None);
        let mut error = Value::Null;
        for (number, line) in code.lines().enumerate() {
            let (command, rest) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
            match command {
                "late" => late = Some(rest.to_owned()),
                "done-twice" => twice = true,
                "exit-later" => exit = rest.parse().ok(),
                _ => match self.run(id, command, rest).await {
                    Ok(()) => {}
                    Err(Interruption::Raised { name, message }) => {
                        let traceback = format!("line {}\n{name}: {message}", number + 1);
                        error = json!({"name": name, "message": message, "traceback": traceback, "line": number + 1});
                        break;
                    }
                    Err(exit) => return Err(exit),
                },
            }
        }
        let status = if error.is_null() { "ok" } else { "error" };
        let none = json!({"created": [], "changed": [], "deleted": [], "omitted": 0});
        let done =
            json!({"type": "done", "id": id, "status": status, "error": error, "variables": none, "files": none});
        self.say_in_order(done.clone()).await?;
        if twice {
            self.say_in_order(done).await?;
        }
        if let Some(text) = late {
            self.pipes[0].write_all(text.as_bytes()).await?;
        }
        if let Some(code) = exit {
            return Err(Interruption::Exit(Exit::Code(code)));
        }
        Ok(())
    }

    async fn run(&mut self, id: &Value, command: &str, rest: &str) -> Result<(), Interruption> {
        let display = |update: bool| {
            let (name, text) = rest.split_once(' ').unwrap_or((rest, ""));
            json!({"type": "display", "id": id, "data": {"text/plain": text}, "blobs": [], "display_id": name, "update": update})
        };
        match command {
            "" => Ok(()),
            "print" => self.write(0, &format!("{rest}\n")).await,
            "err" => self.write(1, &format!("{rest}\n")).await,
            "value" => {
                self.say_in_order(json!({"type": "value", "id": id, "data": {"text/plain": rest}, "blobs": []})).await
            }
            "display" => self.say_in_order(display(false)).await,
            "update" => self.say_in_order(display(true)).await,
            "picture" => {
                self.say_in_order(json!({"type": "display", "id": id, "data": {"image/png": rest}, "blobs": []})).await
            }
            "clear" => self.say_in_order(json!({"type": "clear", "id": id, "wait": false})).await,
            "set" => {
                let (name, text) = rest.split_once(' ').unwrap_or((rest, ""));
                self.variables.insert(name.to_owned(), text.to_owned());
                Ok(())
            }
            "get" => match self.variables.get(rest).cloned() {
                Some(text) => self.write(0, &format!("{text}\n")).await,
                None => {
                    Err(Interruption::Raised { name: "NameError", message: format!("name '{rest}' is not defined") })
                }
            },
            "raise" => Err(Interruption::Raised { name: "ValueError", message: rest.to_owned() }),
            "sleep" => {
                let interrupt = self.interrupt.clone();
                tokio::select! {
                    () = tokio::time::sleep(Duration::from_secs_f64(rest.parse().unwrap_or(0.0))) => Ok(()),
                    () = interrupt.notified() => Err(Interruption::Raised { name: "KeyboardInterrupt", message: String::new() }),
                }
            }
            "ignore-interrupt" => std::future::pending().await,
            "mute" => {
                self.muted = true;
                Ok(())
            }
            "flood" => {
                for number in 0..rest.parse().unwrap_or(0) {
                    self.write(0, &format!("line {number}\n")).await?;
                }
                Ok(())
            }
            "exit" => Err(Interruption::Exit(Exit::Code(rest.parse().unwrap_or(0)))),
            "crash" => Err(Interruption::Exit(Exit::Signal(11))),
            "oom" => Err(Interruption::Exit(Exit::OutOfMemory { limit: 512 * 1024 * 1024 })),
            "garbage" => Ok(self.channel.write_all(b"\xff\xff\xff\xffgarbage").await?),
            "unknown" => self.say(json!({"type": "from-the-future"}), b"?").await,
            "other-done" => self.say_in_order(json!({"type": "done", "id": 0, "status": "ok"})).await,
            "forge" => self.write_marker(0, rest.parse().unwrap_or(0), b'F').await,
            _ => Err(Interruption::Raised { name: "SyntaxError", message: format!("unknown command {command}") }),
        }
    }

    async fn read_file(&mut self, id: &Value, path: PathBuf, limit: u64) -> Result<(), Interruption> {
        let failed = |reason: &str| json!({"type": "failed", "id": id, "reason": reason, "message": ""});
        let Ok(bytes) = std::fs::read(&path) else {
            return self.say(failed(if path.exists() { "not_a_file" } else { "missing" }), b"").await;
        };
        if bytes.len() as u64 > limit {
            return self.say(failed("too_large"), b"").await;
        }
        for chunk in bytes.chunks(256 * 1024) {
            self.say(json!({"type": "file_data", "id": id}), chunk).await?;
        }
        self.say(json!({"type": "file_end", "id": id, "size": bytes.len()}), b"").await
    }

    async fn write_file(&mut self, id: &Value) -> Result<(), Interruption> {
        let Some((path, overwrite, bytes)) = self.upload.take() else { return Ok(()) };
        if path.exists() && !overwrite {
            return self.say(json!({"type": "failed", "id": id, "reason": "exists", "message": ""}), b"").await;
        }
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let replaced = path.exists();
        std::fs::write(&path, &bytes)?;
        self.say(json!({"type": "written", "id": id, "size": bytes.len(), "replaced": replaced}), b"").await
    }
}
