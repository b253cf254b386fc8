//! Wiring: settings in, commands carried out.
//!
//! This is the only room that knows all others. It reads the command line, makes the parts and connects them; what a command does is in
//! the file of its name.

mod cli;
mod doctor;
mod env_command;
mod network;
mod packages;
mod progress;
mod run;
mod serve;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use cellblock_jail::wire::{Bind, OperatorMount};
use clap::Parser;
use tokio::sync::watch;

use self::cli::{Arguments, Command};
use self::network::WayOut;
use self::packages::Packages;
use crate::config::{self, Settings};
use crate::environment::{self, Environment, EnvironmentSpec, runner_files};
use crate::sandbox::native::{NativeBackend, NativeSettings, WORK_FOLDER, WarmEnvironment};
use crate::sandbox::{Backend, Preparation};
use crate::session::install::{Installer, Source};
use crate::session::{self, SessionSettings, Sessions, WorkFolder};
use crate::telemetry;

/// Runs the program.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match carry_out(arguments) {
        Ok(status) => status,
        Err(error) => {
            eprintln!("cellblock: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn carry_out(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let settings = config::load(arguments.general.config.as_deref(), arguments.flags())?;
    // What goes wrong in the other commands is their answer, not a line in a log.
    let fallback = if matches!(arguments.command, Command::Mcp(_)) { "info" } else { "error" };
    telemetry::start(settings.log_filter.as_deref(), fallback)?;
    for notice in &settings.notices {
        tracing::warn!("{notice}");
    }
    raise_descriptor_limit();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("could not start the runtime")?;
    let status = runtime.block_on(async {
        match arguments.command {
            Command::Mcp(_) => serve::stdio(settings).await,
            Command::Run(run) => run::execute(&run, settings).await,
            Command::Doctor(doctor) => doctor::execute(&doctor, &settings).await,
            Command::Env(command) => {
                env_command::execute(command, &settings, &mut std::io::stdout()).await.map(|()| ExitCode::SUCCESS)
            }
        }
    });
    // A read of standard input that never ends must not keep the program alive.
    runtime.shutdown_background();
    status
}

/// Prints to standard output. A reader that has gone away has seen enough.
fn print(text: &str) -> std::io::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        printed => printed,
    }
}

/// Every sandbox costs the server a few descriptors and the warden a dozen.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // With the lower limit fewer sessions fit, and a launch that fails says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// They cost a process of 100 KiB each and save a burst of new sessions a few milliseconds.
const EMPTY_SANDBOXES: usize = 2;

/// Which warm-up suits a command.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Warmth {
    /// The environment's popular packages are imported once, and sessions wait in a pool.
    Full,
    /// One session is wanted and soonest: nothing is imported that it may not need.
    OneShot,
}

/// Makes the backend and its sessions; the environment and the warm interpreter are prepared in the background.
fn house(settings: &Settings, warmth: Warmth) -> anyhow::Result<House> {
    // One run of code ends before an installation would pay off.
    let packages = if warmth == Warmth::OneShot { None } else { Packages::new(settings)? };
    let backend = native_backend(settings, warmth, packages.clone())?;
    let sessions = sessions(settings, warmth, backend, packages.clone());
    if let Some(packages) = &packages {
        packages.work_in(sessions.clone());
    }
    Ok(House { sessions, packages })
}

/// The sessions of a command, and what serves them.
struct House {
    sessions: Sessions,
    packages: Option<Arc<Packages>>,
}

impl House {
    /// Ends everything and leaves nothing behind.
    async fn shut_down(&self) {
        self.sessions.shut_down().await;
        if let Some(packages) = &self.packages {
            packages.clean_up();
        }
    }
}

fn native_backend(
    settings: &Settings,
    warmth: Warmth,
    packages: Option<Arc<Packages>>,
) -> anyhow::Result<Arc<dyn Backend>> {
    let preparation =
        watch::Sender::new(Preparation::Working { step: "preparing Python".to_owned(), done: 0, total: None });
    let know = packages.clone();
    let environment = prepare_environment_and(
        settings.environment_spec().clone(),
        settings.data_dir.clone(),
        warmth,
        preparation.clone(),
        move |environment| {
            if let Some(packages) = know {
                packages.know(environment);
            }
        },
    );
    let way_out = WayOut::new(settings, packages.as_ref().map(|packages| packages.ports()).unwrap_or_default())?;
    let mut native = native_settings(settings)?;
    native.variables.extend(way_out.variables);
    let environment = async move {
        let mut warm = environment.await?;
        warm.binds.extend(way_out.binds);
        warm.network = way_out.network;
        if let Some(packages) = &packages {
            warm.binds.extend(packages.binds());
        }
        warm.held.push(Box::new(way_out.certificates));
        Ok(warm)
    };
    if warmth == Warmth::OneShot {
        (native.pool, native.empty) = (0, 0);
    }
    Ok(Arc::new(NativeBackend::start(native, preparation, environment)))
}

fn native_settings(settings: &Settings) -> anyhow::Result<NativeSettings> {
    let workspace = settings.workspace.iter().map(|folder| OperatorMount {
        host: folder.clone(),
        inside: PathBuf::from(WORK_FOLDER),
        writable: true,
    });
    let mounts = settings.mounts.iter().map(|mount| OperatorMount {
        host: mount.host.clone(),
        inside: PathBuf::from(WORK_FOLDER).join(&mount.inside),
        writable: mount.writable,
    });
    Ok(NativeSettings {
        guardian: std::env::current_exe().context("could not find this program")?,
        runtime_dir: settings.runtime_dir.clone(),
        limits: settings.limits.clone(),
        mounts: workspace.chain(mounts).collect(),
        variables: settings.variables.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        allow_missing: settings.allow_missing.clone(),
        pool: settings.pool,
        empty: EMPTY_SANDBOXES,
        leave_out: Vec::new(),
        skipped_steps: Vec::new(),
    })
}

/// Builds what `spec` describes if need be, and tells how the jail starts Python with it.
pub async fn prepare_environment(
    spec: EnvironmentSpec,
    data_dir: PathBuf,
    warmth: Warmth,
    preparation: watch::Sender<Preparation>,
) -> Result<WarmEnvironment, String> {
    prepare_environment_and(spec, data_dir, warmth, preparation, |_| ()).await
}

async fn prepare_environment_and(
    spec: EnvironmentSpec,
    data_dir: PathBuf,
    warmth: Warmth,
    preparation: watch::Sender<Preparation>,
    know: impl FnOnce(&Environment) + Send,
) -> Result<WarmEnvironment, String> {
    let tell = |progress: environment::EnvironmentProgress| {
        preparation.send_replace(Preparation::Working {
            step: progress.step,
            done: progress.done,
            total: progress.total,
        });
    };
    // Its causes belong to the answer: they hold the installer's own words.
    let with_causes = |error| format!("{:#}", anyhow::Error::new(error));
    let built = environment::ensure(&spec, &data_dir, &tell).await.map_err(with_causes)?;
    let runner = runner_files::ensure_runner(&data_dir, &built).await.map_err(with_causes)?;
    know(&built);
    Ok(warm_environment(built, runner, warmth))
}

fn warm_environment(environment: Environment, runner: PathBuf, warmth: Warmth) -> WarmEnvironment {
    let bind = |host: PathBuf, inside: &str| Bind { host, inside: PathBuf::from(inside) };
    let mut binds =
        vec![bind(environment.root.clone(), environment::ENVIRONMENT_INSIDE), bind(runner, environment::RUNNER_INSIDE)];
    binds.extend(environment.prefix_to_mount().map(|prefix| bind(prefix.to_owned(), environment::PYTHON_INSIDE)));
    let start = format!(
        "import sys; sys.path.insert(0, '{}'); from cellblock_runner.zygote import main; main()",
        environment::RUNNER_INSIDE
    );
    let mut variables: Vec<(String, String)> =
        environment.variables_inside().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    for (name, value) in
        [("HOME", cellblock_jail::root::HOME), ("LANG", "C.UTF-8"), ("TMPDIR", "/tmp"), ("USER", "user")]
    {
        variables.push((name.to_owned(), value.to_owned()));
    }
    let preload = if warmth == Warmth::Full { environment.preload.clone() } else { Vec::new() };
    WarmEnvironment {
        binds,
        python: environment.python_inside.clone(),
        arguments: vec!["-I".to_owned(), "-c".to_owned(), start],
        variables,
        preload,
        quick: warmth == Warmth::OneShot,
        network: None,
        held: vec![Box::new(environment)],
    }
}

fn work_folder(settings: &Settings) -> WorkFolder {
    if settings.workspace.is_some() { WorkFolder::Shared } else { WorkFolder::Private }
}

impl From<&config::Quotas> for session::Quotas {
    fn from(quotas: &config::Quotas) -> session::Quotas {
        session::Quotas {
            sessions: quotas.sessions,
            memory: quotas.memory,
            processor_time: quotas.cpu,
            processor_window: quotas.cpu_window,
            cells_per_minute: quotas.cells,
            starts_per_minute: quotas.starts,
            stored: quotas.stored,
        }
    }
}

/// Makes the sessions of a command. One that runs code once has nothing to undo and keeps no past of it.
fn sessions(
    settings: &Settings,
    warmth: Warmth,
    backend: Arc<dyn Backend>,
    packages: Option<Arc<Packages>>,
) -> Sessions {
    let undo = match (warmth, settings.undo) {
        (Warmth::OneShot, _) | (_, config::Undo::Off) => session::Undo::Off,
        (Warmth::Full, config::Undo::On { checkpoints, files }) => session::Undo::On { checkpoints, files },
    };
    Sessions::new(
        backend,
        SessionSettings {
            work_folder: work_folder(settings),
            max_sessions: settings.max_sessions,
            idle_timeout: settings.idle_timeout,
            undo,
            explore_parallel: settings.explore_parallel,
            max_running: settings.max_running,
            memory_limit: Some(settings.limits.memory),
            packages: Source(packages.map(|packages| packages as Arc<dyn Installer>)),
            ..SessionSettings::default()
        },
    )
}
