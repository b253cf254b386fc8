//! Wiring: reads the settings and executes the commands.
//!
//! This is the only module that depends on all others. It parses the command line, creates the
//! parts and connects them; each command is in the file of its name.

mod approvals;
mod audit_command;
mod audited;
mod cli;
mod config_command;
mod containers;
mod daemon;
mod descriptors;
mod doctor;
mod env_command;
mod image_command;
mod ipybox_commands;
mod key_command;
mod memory;
mod network;
mod output;
mod packages;
mod packages_command;
mod progress;
mod run;
mod service;
mod settings_diff;
mod stdio;
mod upstream;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use cellblock_jail::wire::{Bind, OperatorMount};
use tokio::sync::watch;

use self::cli::{Arguments, Command, DaemonCommand};
pub use self::containers::OwnSupplies;
use self::daemon::KeepByDefault;
use self::network::EgressSetup;
use self::output::{print, standard_output};
use self::packages::PackageService;
use self::upstream::UpstreamBroker;
pub use self::upstream::WRAPPER_ARGUMENT;
use crate::audit::Audit;
use crate::config::{self, BackendChoice, Settings};
use crate::environment::{self, Environment, EnvironmentSpec, runner_files};
use crate::mcp::{self, Front, McpSettings};
use crate::ops::{self, Host, HostExt};
use crate::sandbox::native::{
    NativeBackend, NativeSettings, Programs, TestSwitches, WORK_FOLDER, WarmEnvironment,
};
use crate::sandbox::{Backend, Preparation};
use crate::session::install::{PackageInstaller, PackageSource};
use crate::session::servers::ServerSetup;
use crate::session::tools::{Broker, Tools};
use crate::session::{self, Principal, SessionSettings, Sessions, WorkFolder};
use crate::telemetry::{self, TelemetrySettings};

/// Runs the program.
pub fn main() -> ExitCode {
    let arguments = Arguments::of_this_process();
    match carry_out(arguments) {
        Ok(status) => status,
        Err(error) => output::failure(&error),
    }
}

fn carry_out(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let flags = arguments.flags.clone();
    // These commands do not depend on valid settings.
    match &arguments.command {
        Command::Version => {
            print(concat!("cellblock ", env!("CARGO_PKG_VERSION"), "\n"))?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Completions { shell } => {
            standard_output().write_all(&Arguments::completions(*shell))?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Man { folder } => {
            let why = || format!("manual pages cannot be written to {}", folder.display());
            Arguments::write_manual(folder).with_context(why)?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Config(command) => {
            print(&config_command::execute(
                command,
                arguments.config.as_deref(),
                flags,
            )?)?;
            return Ok(ExitCode::SUCCESS);
        }
        _ => {}
    }
    // A daemon takes over the descriptors from its server before a second thread exists.
    let inheritance = match arguments.command {
        Command::Daemon(DaemonCommand::Hold) => Some(daemon::inherit()?),
        _ => None,
    };
    let settings = match &inheritance {
        Some(inheritance) => config::load_handed_over(inheritance.settings.clone())?,
        None => config::load(arguments.config.as_deref(), flags.clone())?,
    };
    // The other commands report errors as their result, not in a log.
    let serves = matches!(
        arguments.command,
        Command::Mcp(_) | Command::Serve | Command::Daemon(DaemonCommand::Hold)
    );
    let fallback = if serves { "info" } else { "error" };
    let telemetry = telemetry::start(&TelemetrySettings {
        filter: settings.log_filter.clone(),
        fallback,
        format: settings.log_format,
        // Short-lived commands have nothing to trace.
        traces: settings.traces.clone().filter(|_| serves),
    })?;
    let ineffective = match &arguments.command {
        Command::Mcp(mcp) => mcp.notices(),
        _ => Vec::new(),
    };
    for notice in settings.notices.iter().chain(&ineffective) {
        tracing::warn!("{notice}");
    }
    // The server that started a daemon has reported them already.
    if inheritance.is_none() {
        let former_names = arguments.former_name.iter().chain(&settings.former_names);
        former_names.for_each(|warning| match serves {
            true => tracing::warn!("{warning}"),
            // The log of the other commands has errors only.
            false => output::say(format_args!("cellblock: warning: {warning}")),
        });
    }
    let open_files = descriptors::raise_limit();
    let starts_sessions = serves || matches!(arguments.command, Command::Run(_));
    if starts_sessions && matches!(settings.backend, BackendChoice::Native) {
        descriptors::check(open_files)?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("could not start the runtime")?;
    if serves {
        runtime.spawn(memory::keep_small());
    }
    let status = runtime.block_on(async {
        match arguments.command {
            Command::Mcp(_) => stdio::serve(settings).await,
            Command::Serve => {
                let again = || config::load(arguments.config.as_deref(), flags.clone());
                service::serve(settings, again).await
            }
            Command::Run(run) => run::execute(&run, settings).await,
            Command::Doctor(doctor) => doctor::execute(&doctor, &settings).await,
            Command::Audit(command) => audit_command::execute(command, &mut standard_output()),
            Command::Key(command) => {
                key_command::execute(&command, &mut standard_output()).map(|()| ExitCode::SUCCESS)
            }
            Command::Env(command) => {
                env_command::execute(command, &settings, &mut standard_output())
                    .await
                    .map(|()| ExitCode::SUCCESS)
            }
            Command::Image(command) => {
                image_command::execute(command, &settings, &mut standard_output())
                    .await
                    .map(|()| ExitCode::SUCCESS)
            }
            Command::Daemon(command) => daemon::execute(command, settings, inheritance).await,
            Command::Build(build) => {
                let build = cli::ImageCommand::Build(build);
                image_command::execute(build, &settings, &mut standard_output())
                    .await
                    .map(|()| ExitCode::SUCCESS)
            }
            Command::Cleanup(cleanup) => {
                print(&ipybox_commands::clean_up(&cleanup, &settings).await?)?;
                Ok(ExitCode::SUCCESS)
            }
            Command::Keeper(_)
            | Command::Version
            | Command::Completions { .. }
            | Command::Man { .. }
            | Command::Config(_) => {
                unreachable!("done above")
            }
            Command::Packages(command) => {
                print(&packages_command::execute(&command, &settings)?)?;
                Ok(ExitCode::SUCCESS)
            }
        }
    });
    // A pending read of standard input must not keep the process alive.
    runtime.shutdown_background();
    telemetry.shut_down(MAX_FLUSH_TIME);
    status
}

/// Timeout for flushing the last spans to the collector when the process stops.
const MAX_FLUSH_TIME: Duration = Duration::from_secs(3);

/// Opens the audit log of the settings, if there is one.
fn open_audit(settings: &Settings) -> anyhow::Result<Audit> {
    Ok(match &settings.audit {
        Some(log) => Audit::open(&log.file, log.settings)?,
        None => Audit::off(),
    })
}

/// Each costs a process of 100 KiB and saves a burst of new sessions a few milliseconds.
const EMPTY_SANDBOXES: usize = 2;

/// The kind of warm-up for a command.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum StartMode {
    /// Popular packages of the environment are imported once, and sessions wait in a pool.
    Full,
    /// A single session, started as soon as possible: nothing is imported that it may not need.
    OneShot,
}

/// Creates the backend and its sessions; the environment and the warm interpreter are prepared in
/// the background.
fn local_sessions(settings: &Settings, mode: StartMode) -> anyhow::Result<LocalSessions> {
    // A single run of code ends before an installation would pay off.
    let packages = if mode == StartMode::OneShot || !can_install(settings) {
        None
    } else {
        PackageService::new(settings)?
    };
    let backend = backend(settings, mode, packages.clone())?;
    // Nor does it need other MCP servers.
    let upstreams = (mode == StartMode::Full).then(|| UpstreamBroker::new(&settings.upstreams));
    let sessions = sessions(settings, mode, backend, packages.clone(), upstreams.clone())?;
    if let Some(packages) = &packages {
        packages.work_in(sessions.clone());
    }
    Ok(LocalSessions {
        sessions,
        packages,
        upstreams,
    })
}

/// The sessions of a command, and the services they use.
struct LocalSessions {
    sessions: Sessions,
    packages: Option<Arc<PackageService>>,
    upstreams: Option<UpstreamBroker>,
}

impl LocalSessions {
    /// Stops everything and cleans up.
    async fn shut_down(&self) {
        self.sessions.shut_down().await;
        if let Some(packages) = &self.packages {
            packages.clean_up();
        }
        if let Some(upstreams) = &self.upstreams {
            upstreams.shut_down().await;
        }
    }
}

/// Returns whether sessions may install packages. The package store is a folder of this machine,
/// which containers of a remote engine could not see.
fn can_install(settings: &Settings) -> bool {
    let sees_store = match &settings.backend {
        BackendChoice::Native => true,
        BackendChoice::Containers(choice) => choice.address.is_local(),
    };
    settings.packages.allowed && sees_store
}

/// Starts the backend chosen by the operator.
fn backend(
    settings: &Settings,
    mode: StartMode,
    packages: Option<Arc<PackageService>>,
) -> anyhow::Result<Arc<dyn Backend>> {
    match &settings.backend {
        BackendChoice::Native => native_backend(settings, mode, packages),
        BackendChoice::Containers(choice) => {
            containers::backend(settings, choice, mode, packages.as_deref())
        }
    }
}

fn native_backend(
    settings: &Settings,
    mode: StartMode,
    packages: Option<Arc<PackageService>>,
) -> anyhow::Result<Arc<dyn Backend>> {
    let preparation = watch::Sender::new(Preparation::Working {
        step: "preparing Python".to_owned(),
        done: 0,
        total: None,
    });
    let mut usual_ports = packages
        .as_ref()
        .map(|_| PackageService::usual_ports())
        .unwrap_or_default();
    if settings.approvals.policy.opens_domains() {
        usual_ports.extend(approvals::PORTS);
    }
    let mut egress = EgressSetup::new(settings, usual_ports)?;
    let mut native = native_settings(settings)?;
    native.variables.append(&mut egress.variables);
    let (spec, data_dir) = (
        settings.environment_spec().clone(),
        settings.data_dir.clone(),
    );
    let heard = preparation.clone();
    let egress = Arc::new(egress);
    let environment = move || {
        let (spec, data_dir, heard) = (spec.clone(), data_dir.clone(), heard.clone());
        let (packages, egress) = (packages.clone(), Arc::clone(&egress));
        async move {
            let (built, runner) = build_environment(spec, data_dir, heard).await?;
            let index_ports = match &packages {
                Some(packages) => packages.know(&built).await,
                None => BTreeSet::new(),
            };
            let mut warm = warm_environment(built, runner, mode);
            warm.binds.extend(egress.binds.iter().cloned());
            warm.binds.extend(
                packages
                    .iter()
                    .flat_map(|packages| [packages.store_to_show(), packages.tools_to_show()]),
            );
            warm.network = egress.network.clone().map(|mut network| {
                network.ports.extend(index_ports);
                network
            });
            warm.held.push(Box::new(egress.certificates.clone()));
            Ok(warm)
        }
    };
    if mode == StartMode::OneShot {
        (native.pool, native.empty) = (0, 0);
    }
    Ok(Arc::new(NativeBackend::start(
        native,
        preparation,
        environment,
    )))
}

/// Returns whether sessions may start programs themselves.
fn programs(settings: &Settings) -> Programs {
    if settings.approvals.policy.shell_is_open() {
        Programs::Free
    } else {
        Programs::Refused
    }
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
        limits_apart: settings.packages.sandbox_limits(&settings.limits),
        mounts: workspace.chain(mounts).collect(),
        masks: settings.masks.clone(),
        variables: settings
            .variables
            .iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect(),
        allow_missing: settings.allow_missing.clone(),
        programs: programs(settings),
        pool: settings.pool,
        empty: EMPTY_SANDBOXES,
        test_switches: TestSwitches::default(),
    })
}

/// Builds the environment of `spec` if needed, and returns how the jail starts Python with it.
pub async fn prepare_environment(
    spec: EnvironmentSpec,
    data_dir: PathBuf,
    mode: StartMode,
    preparation: watch::Sender<Preparation>,
) -> Result<WarmEnvironment, String> {
    let (built, runner) = build_environment(spec, data_dir, preparation).await?;
    Ok(warm_environment(built, runner, mode))
}

/// Builds the environment of `spec` if needed, and the runner for it.
async fn build_environment(
    spec: EnvironmentSpec,
    data_dir: PathBuf,
    preparation: watch::Sender<Preparation>,
) -> Result<(Environment, PathBuf), String> {
    let tell = |progress: environment::EnvironmentProgress| {
        preparation.send_replace(Preparation::Working {
            step: progress.step,
            done: progress.done,
            total: progress.total,
        });
    };
    // The causes belong to the result: they contain the installer's own messages.
    let with_causes = |error| format!("{:#}", anyhow::Error::new(error));
    let built = environment::ensure(&spec, &data_dir, &tell)
        .await
        .map_err(with_causes)?;
    let runner = runner_files::ensure_runner(&data_dir, &built)
        .await
        .map_err(with_causes)?;
    Ok((built, runner))
}

fn warm_environment(environment: Environment, runner: PathBuf, mode: StartMode) -> WarmEnvironment {
    let bind = |host: PathBuf, inside: &str| Bind {
        host,
        inside: PathBuf::from(inside),
    };
    let mut binds = vec![
        bind(environment.root.clone(), environment::ENVIRONMENT_INSIDE),
        bind(runner, environment::RUNNER_INSIDE),
    ];
    binds.extend(
        environment
            .prefix_to_mount()
            .map(|prefix| bind(prefix.to_owned(), environment::PYTHON_INSIDE)),
    );
    let start = format!(
        "import sys; sys.path.insert(0, '{}'); from cellblock_runner.zygote import main; main()",
        environment::RUNNER_INSIDE
    );
    let mut variables: Vec<(String, String)> = environment
        .variables_inside()
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    for (name, value) in [
        ("HOME", cellblock_jail::root::HOME),
        ("LANG", "C.UTF-8"),
        ("TMPDIR", "/tmp"),
        ("USER", "user"),
    ] {
        variables.push((name.to_owned(), value.to_owned()));
    }
    let preload = if mode == StartMode::Full {
        environment.preload.clone()
    } else {
        Vec::new()
    };
    WarmEnvironment {
        binds,
        python: environment.python_inside.clone(),
        arguments: vec!["-I".to_owned(), "-c".to_owned(), start],
        variables,
        preload,
        quick: mode == StartMode::OneShot,
        network: None,
        held: vec![Box::new(environment)],
    }
}

/// Returns the operator's MCP servers in the form that sessions receive.
fn server_setup(settings: &Settings) -> ServerSetup {
    let config::UpstreamSettings {
        servers,
        allowed_hosts,
        variables,
    } = settings.upstreams.clone();
    ServerSetup {
        servers,
        allowed_hosts,
        variables,
    }
}

/// Passes the operator's MCP servers to the sessions in the background, so that nothing waits for a
/// third-party server.
fn set_up_servers(sessions: Arc<dyn Host>, settings: &Settings) {
    let setup = server_setup(settings);
    tokio::spawn(async move {
        if let Err(refused) = sessions
            .run(&Principal::operator(), ops::SetServers { setup })
            .await
        {
            tracing::warn!(error = %refused, "the MCP servers of the configuration cannot be used");
        }
    });
}

/// Returns the settings of the MCP frontend.
fn mcp_settings(
    settings: &Settings,
    front: Front,
    keep: KeepByDefault,
) -> anyhow::Result<McpSettings> {
    Ok(McpSettings {
        front,
        profile: profile(settings),
        max_wait: settings.service.max_wait,
        default_timeout: settings.timeout,
        max_timeout: settings.max_timeout,
        idle_timeout: settings.idle_timeout,
        work_folder: work_folder(settings),
        can_undo: settings.undo != config::UndoSettings::Off,
        network: settings.network.rules.clone(),
        other_hosts: other_hosts(settings),
        can_install: can_install(settings),
        packages: match settings.backend {
            BackendChoice::Native => settings.environment_spec().packages_for_code(),
            // The packages of the image, which is not queried here.
            BackendChoice::Containers(_) => Vec::new(),
        },
        state_key: approvals::state_key(settings, keep.decides(settings))?,
        sessions_outlive_server: keep.decides(settings),
        ..McpSettings::default()
    })
}

/// Returns whether a person can be asked about unlisted hosts.
fn other_hosts(settings: &Settings) -> mcp::OtherHosts {
    match settings.approvals.policy.opens_domains() {
        true => mcp::OtherHosts::AskedAbout,
        false => mcp::OtherHosts::Closed,
    }
}

/// Returns the profile: the tools that clients see, with their settings.
fn profile(settings: &Settings) -> mcp::Profile {
    let modules = || mcp::Modules {
        allowed: settings.allowed_modules.clone(),
        blocked: settings.blocked_modules.clone(),
        installed: crate::packages::PACKAGES_INSIDE.to_owned(),
        ..mcp::Modules::default()
    };
    match settings.profile {
        config::ProfileName::Default => mcp::Profile::Default,
        config::ProfileName::Ipybox => mcp::Profile::Ipybox {
            images: settings
                .images_dir
                .to_string_lossy()
                .parse()
                .expect("it was checked to be a path inside"),
            workspace: settings.workspace.clone(),
        },
        config::ProfileName::PythonDocker => mcp::Profile::PythonDocker { modules: modules() },
        config::ProfileName::CodeExecuter => mcp::Profile::CodeExecuter { modules: modules() },
        config::ProfileName::Pyexec => mcp::Profile::Pyexec,
    }
}

/// Waits for SIGTERM or SIGINT and returns its name.
async fn asked_to_end() -> &'static str {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) = (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
    ) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}

fn work_folder(settings: &Settings) -> WorkFolder {
    if settings.workspace.is_some() {
        WorkFolder::Shared
    } else {
        WorkFolder::Private
    }
}

/// Creates the sessions of a command. A command that runs code once has nothing to undo and keeps
/// no checkpoints.
fn sessions(
    settings: &Settings,
    mode: StartMode,
    backend: Arc<dyn Backend>,
    packages: Option<Arc<PackageService>>,
    upstreams: Option<UpstreamBroker>,
) -> anyhow::Result<Sessions> {
    let undo = match (mode, settings.undo) {
        (StartMode::OneShot, _) | (_, config::UndoSettings::Off) => session::UndoPolicy::Off,
        (StartMode::Full, config::UndoSettings::On { checkpoints, files }) => {
            session::UndoPolicy::On { checkpoints, files }
        }
    };
    let approvals = approvals::approvals(settings)?;
    let max_sessions = match &settings.backend {
        BackendChoice::Native => {
            descriptors::sessions_within(descriptors::raise_limit(), settings.max_sessions)
        }
        BackendChoice::Containers(_) => settings.max_sessions,
    };
    Ok(Sessions::new(
        backend,
        SessionSettings {
            approvals: approvals.into(),
            work_folder: work_folder(settings),
            max_sessions,
            idle_timeout: settings.idle_timeout,
            undo,
            explore_parallel: settings.explore_parallel,
            max_running: settings.max_running,
            quotas: settings.quotas,
            memory_limit: Some(settings.limits.memory),
            packages: PackageSource(packages.map(|packages| packages as Arc<dyn PackageInstaller>)),
            tools: Tools(upstreams.map(|upstreams| Arc::new(upstreams) as Arc<dyn Broker>)),
            grace: session::INTERRUPT_GRACE,
        },
    ))
}
