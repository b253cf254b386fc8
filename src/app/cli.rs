//! The command line: what can be written, and nothing about what it does.
//!
//! Flags that are settings are handed on as they were written; `config` lays them over the file and the environment and checks them.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::audit::Kind;
use crate::audit::verify::Noted;
use crate::auth::Scope;
use crate::config::{Flags, Key, LOG_LEVELS};
use crate::keeper::KeeperName;
use crate::sandbox::LayerKind;
use crate::telemetry::LogFormat;

/// Runs untrusted Python in fresh, locked-down Linux sandboxes.
#[derive(Parser)]
#[command(name = "cellblock", version, about, propagate_version = true, arg_required_else_help = true, after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    pub general: GeneralArguments,
    #[command(subcommand)]
    pub command: Command,
    /// Every flag as it was typed, without its value.
    #[arg(skip)]
    typed: BTreeSet<String>,
}

impl Arguments {
    /// Reads the command line of this process. Prints and ends it where help or a mistake is the
    /// answer.
    pub(super) fn of_this_process() -> Arguments {
        Arguments::read(std::env::args_os().collect()).unwrap_or_else(|answer| answer.exit())
    }

    fn read(line: Vec<OsString>) -> Result<Arguments, clap::Error> {
        let words = line
            .iter()
            .skip(1)
            .filter_map(|word| word.to_str())
            .take_while(|word| *word != "--");
        let flags = words.filter(|word| word.starts_with("--"));
        let typed = flags
            .map(|flag| flag.split('=').next().unwrap_or(flag).to_owned())
            .collect();
        let arguments = Arguments::try_parse_from(&line).map_err(with_likely_names)?;
        Ok(Arguments { typed, ..arguments })
    }

    /// Returns a script that completes commands and flags in a shell.
    pub(super) fn completions(shell: Shell) -> Vec<u8> {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Arguments::command(), "cellblock", &mut script);
        script
    }
}

/// Leaves of the commands that an error suggests those that a mistyped word can have meant. The
/// parser suggests every name with a few of the same letters.
fn with_likely_names(mut error: clap::Error) -> clap::Error {
    if error.kind() != ErrorKind::InvalidSubcommand {
        return error;
    }
    let typed = match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(typed)) => typed.to_ascii_lowercase(),
        _ => return error,
    };
    if let Some(ContextValue::Strings(names)) = error.remove(ContextKind::SuggestedSubcommand) {
        let likely: Vec<String> = names
            .into_iter()
            .filter(|name| is_likely(&typed, name))
            .collect();
        if !likely.is_empty() {
            error.insert(
                ContextKind::SuggestedSubcommand,
                ContextValue::Strings(likely),
            );
        }
    }
    error
}

/// Tells whether somebody who typed one word can have meant the other: one typing mistake in every
/// three letters, or a name that is cut short or goes on.
fn is_likely(typed: &str, name: &str) -> bool {
    const LEAST_COMMON: usize = 3;
    let shorter = typed.len().min(name.len());
    let mistakes = strsim::damerau_levenshtein(typed, name);
    let goes_on = shorter >= LEAST_COMMON && (typed.starts_with(name) || name.starts_with(typed));
    goes_on || mistakes <= (shorter / 3).max(1)
}

const EXAMPLES: &str = "\
Examples:
  cellblock run -c 'print(sum(range(10)))'    run one line and print the result
  cellblock run analysis.py --workspace .     run a script that can see this folder
  cellblock mcp --workspace ~/work            serve an MCP client over standard input and output
  cellblock doctor                            show what this machine can enforce
  cellblock config show                       show all settings, and where each was written

Every flag can also be a line of the configuration file or a variable: --memory 2G, \"memory: 2G\", CELLBLOCK_MEMORY=2G.
Flags win over variables, variables over the file.";

/// Flags of every command.
#[derive(Args)]
pub(super) struct GeneralArguments {
    /// Configuration file [default: $CELLBLOCK_CONFIG, then cellblock/config.yaml in the user's configuration folder]
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// How much to log to standard error [default: $RUST_LOG, then a level that suits the command]
    #[arg(long, global = true, value_name = "LEVEL", value_parser = clap::builder::PossibleValuesParser::new(log_levels()), ignore_case = true)]
    pub log_level: Option<String>,
    /// How lines of the log are written: text or json [default: text]
    #[arg(long, global = true, value_name = "FORMAT", value_parser = clap::builder::PossibleValuesParser::new(LogFormat::ALL.map(LogFormat::name)))]
    pub log_format: Option<String>,
}

#[derive(Subcommand)]
pub(super) enum Command {
    /// Serve an MCP client over standard input and output
    #[command(after_help = MCP_EXAMPLES)]
    Mcp(McpArguments),
    /// Serve many MCP clients over HTTP
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(ServeArguments),
    /// Run Python once in a fresh sandbox and print the result
    #[command(after_help = RUN_EXAMPLES)]
    Run(RunArguments),
    /// Show what isolation this machine can enforce, what is missing, and the cure
    Doctor(DoctorArguments),
    /// List, build, show and remove Python environments
    #[command(subcommand, arg_required_else_help = true)]
    Env(EnvCommand),
    /// Build, list and remove images for sessions in containers
    #[command(subcommand, arg_required_else_help = true)]
    Image(ImageCommand),
    /// Verify and read audit logs
    #[command(subcommand, arg_required_else_help = true)]
    Audit(AuditCommand),
    /// List and remove packages that were installed into sessions
    #[command(subcommand, arg_required_else_help = true)]
    Packages(PackagesCommand),
    /// Make API keys for callers that cannot get tokens
    #[command(subcommand, arg_required_else_help = true)]
    Key(KeyCommand),
    /// Show and stop the processes that keep sessions while their server restarts
    #[command(subcommand, arg_required_else_help = true)]
    Keeper(KeeperCommand),
    /// Check the configuration, or show all settings and where each was written
    #[command(subcommand, arg_required_else_help = true)]
    Config(ConfigCommand),
    /// Print a script that completes commands and flags in a shell
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the version
    Version,
    /// The same as "image build", under the name that ipybox has for it
    #[command(hide = true)]
    Build(ImageArguments),
    /// Remove containers that a killed server left, or packages that nothing uses; see docs/migrate/ipybox.md
    #[command(hide = true)]
    Cleanup(IpyboxCleanupArguments),
}

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  source <(cellblock completions bash)                                        in ~/.bashrc
  cellblock completions zsh > ~/.zfunc/_cellblock                             with ~/.zfunc in fpath
  cellblock completions fish > ~/.config/fish/completions/cellblock.fish";

#[derive(Subcommand)]
pub(super) enum ConfigCommand {
    /// Check the configuration file together with the variables, and make nothing
    #[command(after_help = CHECK_EXAMPLES)]
    Check {
        /// The configuration file [default: --config, $CELLBLOCK_CONFIG, then the usual place]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Show the settings that a server would have, and where each was written; secrets are hidden
    #[command(after_help = CONFIG_EXAMPLES)]
    Show(Box<ConfigShowArguments>),
}

const CHECK_EXAMPLES: &str = "\
Example:
  cellblock config check new.yaml && mv new.yaml ~/.config/cellblock/config.yaml

The exit status is 0 if a server would start with it, 2 if not. Variables of the environment count too: they win over the file.";

const CONFIG_EXAMPLES: &str = "\
Examples:
  cellblock config show
  cellblock config show --profile pyexec --memory 1G          with flags, as \"cellblock serve\" would have them
  cellblock config show --json | jq .memory";

#[derive(Args)]
pub(super) struct ConfigShowArguments {
    /// Print the settings as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    server: ServeArguments,
}

/// What `ipybox cleanup` takes.
#[derive(Args)]
pub(super) struct IpyboxCleanupArguments {
    /// Remove containers of this image whose server is gone, and nothing else; the image stays
    #[arg(short, long, value_name = "TAG")]
    pub ancestor: Option<String>,
    /// Without --ancestor: remove packages that nothing uses without asking
    #[arg(short, long, conflicts_with = "ancestor")]
    pub yes: bool,
    #[command(flatten)]
    pub engine: EngineArguments,
}

/// Levels of the log; Python's programs have other names for two of them.
fn log_levels() -> [clap::builder::PossibleValue; 5] {
    LOG_LEVELS.map(|level| {
        let value = clap::builder::PossibleValue::new(level);
        match level {
            "error" => value.alias("critical"),
            "warn" => value.alias("warning"),
            _ => value,
        }
    })
}

#[derive(Subcommand)]
pub(super) enum KeeperCommand {
    /// List the keepers of this user: process, age, sessions, version
    Status {
        /// Print the list as JSON
        #[arg(long)]
        json: bool,
    },
    /// End a keeper and all its sessions, unless code is running in one
    Stop {
        /// The keeper's name
        #[arg(default_value = "serve")]
        name: KeeperName,
        /// Also when code is running, which is interrupted
        #[arg(long)]
        now: bool,
    },
    /// Keep sessions. The server starts this itself
    #[command(hide = true)]
    Hold,
}

const MCP_EXAMPLES: &str = "\
Examples:
  cellblock mcp
  cellblock mcp --workspace ~/work --allowed-dir ~/Downloads
  cellblock mcp --mount ~/datasets:data:ro --memory 4G --timeout 5m
  cellblock mcp --allowed-domain '*.example.com' --secret TOKEN=env:TOKEN@api.example.com";

const SERVE_EXAMPLES: &str = "\
Examples:
  cellblock serve                                   on this machine, with a token of its own in a file that it names
  cellblock serve --listen 0.0.0.0:8443 --tls-cert cert.pem --tls-key key.pem --public-url https://cells.example.com
  cellblock serve --max-wait 30s --keep-sessions off

Who may call is said in the configuration file or by MCP_JWKS_URI, MCP_ISSUER and MCP_AUDIENCE.";

const RUN_EXAMPLES: &str = "\
Examples:
  cellblock run script.py
  cellblock run -c 'import numpy; numpy.arange(3)'
  echo 'print(1)' | cellblock run -
  cellblock run plot.py --output-dir plots";

#[derive(Args)]
pub(super) struct McpArguments {
    #[command(flatten)]
    pub other: OtherServersArguments,
    #[command(flatten)]
    pub sandbox: SandboxArguments,
    #[command(flatten)]
    branching: BranchingArguments,
    #[command(flatten)]
    watch: WatchArguments,
    #[command(flatten)]
    upstream: UpstreamArguments,
    #[command(flatten)]
    keeping: KeepingArguments,
}

#[derive(Args)]
pub(super) struct ServeArguments {
    #[command(flatten)]
    service: ServiceArguments,
    #[command(flatten)]
    pub sandbox: SandboxArguments,
    #[command(flatten)]
    branching: BranchingArguments,
    #[command(flatten)]
    watch: WatchArguments,
    #[command(flatten)]
    upstream: UpstreamArguments,
    #[command(flatten)]
    keeping: KeepingArguments,
}

/// Flags of servers that profiles stand in for, without a flag of ours that does the same. Hidden: whoever needs them has them in a
/// client's configuration already.
#[derive(Args, Default)]
pub(super) struct OtherServersArguments {
    /// Has no effect: code is always in a sandbox
    #[arg(long, hide = true)]
    sandbox: bool,
    #[arg(long, value_name = "HOST", hide = true)]
    tool_server_host: Option<String>,
    #[arg(long, value_name = "PORT", hide = true)]
    tool_server_port: Option<String>,
    #[arg(long, value_name = "HOST", hide = true)]
    kernel_gateway_host: Option<String>,
    #[arg(long, value_name = "PORT", hide = true)]
    kernel_gateway_port: Option<String>,
    /// The same as --log-level debug
    #[arg(long, hide = true, conflicts_with = "log_level")]
    debug: bool,
}

impl OtherServersArguments {
    fn add_to(&self, flags: Flags) -> Flags {
        flags.single(Key::LogLevel, self.debug.then(|| "debug".to_owned()))
    }

    /// Says which of them have no effect.
    pub(super) fn notices(&self) -> Vec<String> {
        let given = [
            (
                self.tool_server_host.is_some(),
                "--tool-server-host",
                "there is no tool server; calls go over a channel of the sandbox",
            ),
            (
                self.tool_server_port.is_some(),
                "--tool-server-port",
                "there is no tool server; calls go over a channel of the sandbox",
            ),
            (
                self.kernel_gateway_host.is_some(),
                "--kernel-gateway-host",
                "there is no kernel gateway",
            ),
            (
                self.kernel_gateway_port.is_some(),
                "--kernel-gateway-port",
                "there is no kernel gateway",
            ),
        ];
        given
            .iter()
            .filter(|row| row.0)
            .map(|(_, flag, why)| format!("{flag} has no effect here: {why}"))
            .collect()
    }
}

/// Flags about the HTTP service itself.
#[derive(Args, Default)]
struct ServiceArguments {
    /// Where to listen: an address and a port, or a port on this machine [default: 127.0.0.1:8000]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
    /// Who may call, if the configuration file does not say: development (the holder of a token of our own) or off [default: development]
    #[arg(long, value_name = "WORD")]
    auth: Option<String>,
    /// The address by which clients know this server, such as https://cells.example.com
    #[arg(long, value_name = "URL")]
    public_url: Option<String>,
    /// Name of this server that requests may bear, beside localhost and its own address; repeat for more
    #[arg(long = "allowed-host", value_name = "HOST[:PORT]")]
    allowed_hosts: Vec<String>,
    /// Origin of pages that may use this server from a browser, such as https://app.example.com; repeat for more
    #[arg(long = "allowed-origin", value_name = "ORIGIN")]
    allowed_origins: Vec<String>,
    /// File with the chain of certificates for TLS
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<String>,
    /// File with the private key of the certificate
    #[arg(long, value_name = "FILE")]
    tls_key: Option<String>,
    /// Connections that may be open at once [default: 4096]
    #[arg(long, value_name = "N")]
    max_connections: Option<String>,
}

#[derive(Args)]
#[command(group = ArgGroup::new("source").required(true).args(["file", "code"]))]
pub(super) struct RunArguments {
    /// The script to run; "-" reads it from standard input
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Python code to run
    #[arg(
        short = 'c',
        long = "code",
        value_name = "CODE",
        allow_hyphen_values = true
    )]
    code: Option<String>,
    /// Where images and files made by the run are saved [default: the current folder]
    #[arg(long, value_name = "DIR")]
    pub output_dir: Option<PathBuf>,
    #[command(flatten)]
    pub sandbox: SandboxArguments,
}

/// Where the code of `run` comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CodeSource {
    File(PathBuf),
    Text(String),
    StandardInput,
}

impl RunArguments {
    pub(super) fn source(&self) -> CodeSource {
        match (&self.file, &self.code) {
            (_, Some(code)) => CodeSource::Text(code.clone()),
            (Some(file), None) if file.as_os_str() == "-" => CodeSource::StandardInput,
            (Some(file), None) => CodeSource::File(file.clone()),
            (None, None) => unreachable!("the group makes clap ask for one of them"),
        }
    }
}

#[derive(Args)]
pub(super) struct DoctorArguments {
    /// Print the findings as JSON
    #[arg(long)]
    pub json: bool,
    /// Look at this backend instead of the configured one: native, docker or podman
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Look at this image of containers
    #[arg(long, value_name = "IMAGE")]
    container_tag: Option<String>,
    /// Look at this runtime of containers
    #[arg(long, value_name = "NAME")]
    runtime: Option<String>,
}

#[derive(Subcommand)]
pub(super) enum EnvCommand {
    /// List the environments on this machine
    List {
        /// Print the list as JSON
        #[arg(long)]
        json: bool,
    },
    /// Build an environment now instead of at first use
    #[command(after_help = BUILD_EXAMPLES)]
    Build(BuildArguments),
    /// Print the lock of an environment: exact versions with hashes
    #[command(after_help = SHOW_EXAMPLES)]
    Show {
        /// The environment's name
        name: String,
    },
    /// Remove an environment that no server uses
    Remove {
        /// The environment's name
        name: String,
    },
}

#[derive(Subcommand)]
pub(super) enum ImageCommand {
    /// Build an image: a base, packages, a user without rights
    #[command(after_help = IMAGE_EXAMPLES)]
    Build(ImageArguments),
    /// List the images that were built
    List {
        /// Print the list as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        engine: EngineArguments,
    },
    /// Remove an image that was built and that no container uses
    Remove {
        /// The image's name
        name: String,
        #[command(flatten)]
        engine: EngineArguments,
    },
}

/// Which container engine is meant.
#[derive(Args, Default)]
pub(super) struct EngineArguments {
    /// The container engine: docker (found by DOCKER_HOST and contexts) or podman (found by CONTAINER_HOST) [default: that of the backend, or docker]
    #[arg(long, value_name = "NAME", value_parser = ["docker", "podman"])]
    pub engine: Option<String>,
}

const IMAGE_EXAMPLES: &str = "\
Examples:
  cellblock image build                                       \"cellblock\", with the science packages
  cellblock image build --tag cells:1 --packages polars 'httpx>=0.28'
  cellblock image build --tag cells:1 --no-science --requirements requirements.txt --base python:3.12-slim
  cellblock image build --dockerfile                          print what would be built

Without --base the engine must have python:3.13-slim or be able to fetch it. Packages are fetched by this program, not by the engine.";

#[derive(Args, Default)]
pub(super) struct ImageArguments {
    /// The name of the image
    #[arg(short, long, value_name = "NAME[:TAG]", default_value = "cellblock")]
    pub tag: String,
    /// The image to build on; it must have Python 3.10 or newer, and needs no pip
    #[arg(long, value_name = "IMAGE", default_value = "python:3.13-slim")]
    pub base: String,
    /// What to install beside the science packages
    #[arg(long, value_name = "REQUIREMENT", num_args = 1..)]
    pub packages: Vec<String>,
    /// Requirements files that say what to install beside the science packages
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub requirements: Vec<PathBuf>,
    /// A file of quoted requirements, one to a line, as the list of dependencies in a pyproject.toml has them
    #[arg(short, long, value_name = "FILE")]
    pub dependencies: Option<PathBuf>,
    /// Install exactly what a lock lists: a requirements file with exact versions and hashes
    #[arg(long, value_name = "FILE", conflicts_with_all = ["packages", "requirements", "dependencies", "no_science"])]
    pub locked: Option<PathBuf>,
    /// Leave the science packages out: IPython, Pydantic and what you name is all there is
    #[arg(long)]
    pub no_science: bool,
    /// The user that the image runs as [default: the one who builds it, or 1000 for root]
    #[arg(long, value_name = "NUMBER")]
    pub uid: Option<u32>,
    /// The group of that user [default: that of the one who builds it, or the number of the user]
    #[arg(long, value_name = "NUMBER")]
    pub gid: Option<u32>,
    /// Let the image's own user be root; sessions never are
    #[arg(short, long, conflicts_with_all = ["uid", "gid"])]
    pub root: bool,
    /// Build everything again, also what the engine has built before
    #[arg(long)]
    pub no_cache: bool,
    /// Print the Dockerfile and build nothing
    #[arg(long)]
    pub dockerfile: bool,
    #[command(flatten)]
    pub engine: EngineArguments,
}

#[derive(Subcommand)]
pub(super) enum AuditCommand {
    /// Find out whether logs are as they were written: nothing changed, cut, moved or put in
    #[command(after_help = VERIFY_EXAMPLES)]
    Verify(VerifyArguments),
    /// Print the records of logs
    #[command(after_help = RECORDS_EXAMPLES)]
    Show(ShowArguments),
}

const VERIFY_EXAMPLES: &str = "\
Examples:
  cellblock audit verify audit.jsonl*                         all files of a log, in any order
  cellblock audit verify audit.jsonl* --last 1234:9f86d0…     … which must still hold this record; see the server's log for it

The exit status is 0 if everything is as it was written, 1 if not, 2 if a file cannot be read.";

const RECORDS_EXAMPLES: &str = "\
Examples:
  cellblock audit show audit.jsonl --principal anna
  cellblock audit show audit.jsonl* --kind execution --json | jq .details.code";

#[derive(Args)]
pub(super) struct VerifyArguments {
    /// The files of one log
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// A record that must be in the files: its number, and its hash if it is known. Finds an end that was cut off
    #[arg(long, value_name = "NUMBER[:HASH]")]
    pub last: Option<Noted>,
    /// The record before the first one in the files, if older files were put away
    #[arg(long, value_name = "NUMBER[:HASH]")]
    pub after: Option<Noted>,
    /// Print the findings as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub(super) struct ShowArguments {
    /// The files to print, in this order
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Only what this principal did
    #[arg(long, value_name = "NAME")]
    pub principal: Option<String>,
    /// Only what happened in this session
    #[arg(long, value_name = "ID")]
    pub session: Option<String>,
    /// Only records of this kind
    #[arg(long, value_name = "KIND", value_parser = clap::builder::PossibleValuesParser::new(Kind::NAMES))]
    pub kind: Option<String>,
    /// Print the lines as they are
    #[arg(long)]
    pub json: bool,
}

#[derive(Subcommand)]
pub(super) enum PackagesCommand {
    /// List the packages in the store: size, last use, whether sessions use them
    List {
        /// Print the list as JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove the packages that no session uses
    Clean,
}

#[derive(Subcommand)]
pub(super) enum KeyCommand {
    /// Make a key: print it once, and the lines for the configuration that let its owner in
    New {
        /// What the owner is called: in the configuration, in the audit log, as the owner of sessions
        name: String,
        /// What the owner may do; repeat for more [default: python:execute]
        #[arg(long = "scope", value_name = "SCOPE", value_parser = clap::builder::PossibleValuesParser::new(Scope::ALL.map(Scope::name)))]
        scopes: Vec<String>,
    },
}

const BUILD_EXAMPLES: &str = "\
Examples:
  cellblock env build                                         the environment that sessions use by default
  cellblock env build science --packages scipy 'polars>=1' --python 3.12
  cellblock env build science --requirements requirements.txt
  cellblock env build science --pyproject --extra plots       the dependencies of the project in this folder
  cellblock env build science --locked science.lock           exactly what \"cellblock env show science\" printed elsewhere
  cellblock mcp --environment science                         … and how it is used";

const SHOW_EXAMPLES: &str = "\
Example:
  cellblock env show science > science.lock                   to make the same environment elsewhere";

#[derive(Args, Default)]
#[command(group = ArgGroup::new("contents").args(["packages", "requirements", "pyproject", "locked"]))]
pub(super) struct BuildArguments {
    /// The environment's name [default: the one that sessions use]
    pub name: Option<String>,
    /// The Python to build it with: a version such as 3.12, or the path of an interpreter
    #[arg(long, value_name = "VERSION|PATH")]
    pub python: Option<String>,
    /// What to install; a name that the configuration does not describe needs this or one of the next three
    #[arg(long, value_name = "REQUIREMENT", num_args = 1..)]
    pub packages: Vec<String>,
    /// Requirements files that say what to install
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub requirements: Vec<PathBuf>,
    /// Install the dependencies of a project [default file: pyproject.toml]
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "pyproject.toml")]
    pub pyproject: Option<PathBuf>,
    /// A group of the project's optional dependencies; repeat for more
    #[arg(long = "extra", value_name = "NAME", requires = "pyproject", conflicts_with_all = ["packages", "requirements", "locked"])]
    pub extras: Vec<String>,
    /// Install exactly what a lock lists: a requirements file with exact versions and hashes
    #[arg(long, value_name = "FILE")]
    pub locked: Option<PathBuf>,
    /// Modules to import before the first session, so that sessions start with them
    #[arg(long, value_name = "MODULE", num_args = 1.., requires = "contents")]
    pub preload: Vec<String>,
}

/// Flags of every command that makes sandboxes.
// It has no `Debug`: variables may hold secrets.
#[derive(Args, Default)]
pub(super) struct SandboxArguments {
    /// Host folder that becomes the working folder; made if missing [default: a private folder for each session]
    #[arg(long, value_name = "DIR")]
    workspace: Option<String>,
    /// Host folder that files may be uploaded from and downloaded to; repeat for more [default: the workspace]
    #[arg(long = "allowed-dir", value_name = "DIR")]
    allowed_dirs: Vec<String>,
    /// Python environment that sessions run in [default: default]
    #[arg(long, value_name = "NAME")]
    environment: Option<String>,
    /// Host folder to show below the working folder, read-only with ":ro"; repeat for more
    #[arg(
        long = "mount",
        visible_alias = "container-bind",
        value_name = "HOST:RELATIVE[:ro]"
    )]
    mounts: Vec<String>,
    /// Environment variable for the code inside; repeat for more
    #[arg(
        long = "env-var",
        visible_alias = "container-env-var",
        value_name = "KEY=VALUE"
    )]
    variables: Vec<String>,
    /// File of KEY=VALUE lines with variables for the code inside; repeat for more
    #[arg(
        long = "env-file",
        visible_alias = "container-env-file",
        value_name = "FILE"
    )]
    env_files: Vec<String>,
    /// Memory of each sandbox, such as 512M, 2G or 2GiB [default: 2G]
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,
    /// Processor cores each sandbox may keep busy, such as 0.5 or 2 [default: 2]
    #[arg(long, value_name = "N")]
    cpus: Option<String>,
    /// How long a cell may run when its caller does not say, such as 30, 30s or 2m [default: 2m]
    #[arg(long, value_name = "DURATION")]
    timeout: Option<String>,
    /// How long a call waits for a cell; then it goes on and check_execution tells how [default: 50s]
    #[arg(long, value_name = "DURATION")]
    max_wait: Option<String>,
    /// Sessions that may exist at once [default: 64]
    #[arg(long, value_name = "N")]
    max_sessions: Option<String>,
    /// How long a session may do nothing before it ends, such as 30m [default: 1h]
    #[arg(long, value_name = "DURATION")]
    idle_timeout: Option<String>,
    /// Which set of tools clients see: default, ipybox, python-docker-mcp, code-executer or pyexec [default: default]
    #[arg(long, value_name = "NAME")]
    profile: Option<String>,
    /// What sandboxes are made of: native (namespaces of this kernel), docker or podman [default: native]
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Image of containers; it needs Python 3.10 or newer [default: cellblock:latest, which "cellblock image build" makes]
    #[arg(long, value_name = "IMAGE")]
    container_tag: Option<String>,
    /// Runtime of containers, such as runsc or kata [default: the engine's]
    #[arg(long, value_name = "NAME")]
    runtime: Option<String>,
    /// Folder below the working folder in which the profile ipybox keeps pictures [default: images]
    #[arg(long, value_name = "DIR")]
    images_dir: Option<String>,
    /// File in which ipybox says what code may reach: its allowed and denied domains are taken from there
    #[arg(long, value_name = "FILE")]
    sandbox_config: Option<String>,
    /// Isolation layer that may be missing on this machine; repeat for more
    #[arg(long = "allow-missing", value_name = "LAYER", value_parser = clap::builder::PossibleValuesParser::new(LayerKind::ALL.map(LayerKind::name)))]
    allow_missing: Vec<String>,
    #[command(flatten)]
    network: NetworkArguments,
    #[command(flatten)]
    approvals: ApprovalArguments,
}

/// Flags about what sandboxes may reach and install.
#[derive(Args, Default)]
struct NetworkArguments {
    /// Host that code inside may reach, such as example.com, *.example.com, 192.168.1.0/24 or example.com:8443; repeat for more
    #[arg(long = "allowed-domain", value_name = "RULE")]
    allowed_domains: Vec<String>,
    /// Host that code inside may never reach, whatever else is allowed; written like an allowed one; repeat for more
    #[arg(long = "denied-domain", value_name = "RULE")]
    denied_domains: Vec<String>,
    /// What code inside may reach: nothing, what is listed, or everything [default: listed if something is, else none]
    #[arg(long, value_name = "none|listed|all")]
    allow_network: Option<String>,
    /// Value that is put into HTTPS requests to a host and never goes inside, where NAME is a placeholder; repeat for more
    #[arg(long = "secret", value_name = "NAME=env:VAR@HOST[:HEADER]")]
    secrets: Vec<String>,
    /// Whether packages can be installed into sessions: on or off [default: on]
    #[arg(long, value_name = "WORD")]
    install_packages: Option<String>,
}

/// Flags about what code may do only when a person has allowed it.
#[derive(Args, Default)]
struct ApprovalArguments {
    /// Calls of other MCP servers' tools: allow, ask a person, or deny [default: allow]
    #[arg(long, value_name = "allow|ask|deny")]
    approve_tools: Option<String>,
    /// Shell commands of cells: allow, ask a person, or deny [default: allow]
    #[arg(long, value_name = "allow|ask|deny")]
    approve_shell: Option<String>,
    /// Installations of packages: allow, ask a person, or deny [default: allow]
    #[arg(long, value_name = "allow|ask|deny")]
    approve_packages: Option<String>,
    /// Hosts that are not listed: ask a person, or deny [default: deny]
    #[arg(long, value_name = "ask|deny")]
    approve_domains: Option<String>,
    /// Whether a person can allow something for good: on or off [default: off]
    #[arg(long, value_name = "WORD")]
    remember_approvals: Option<String>,
}

/// Flags about sessions that are copied: `undo`, `fork_session`, `explore`. One run of code has no past and no branches.
#[derive(Args, Default)]
struct BranchingArguments {
    /// Whether cells can be undone: on or off [default: on]
    #[arg(long, value_name = "WORD")]
    undo: Option<String>,
    /// States of a session that are kept for undo [default: 10]
    #[arg(long, value_name = "N")]
    undo_checkpoints: Option<String>,
    /// How much of the working folder undo saves, such as 64M; 0 leaves files alone [default: 64M; 0 with a workspace]
    #[arg(long, value_name = "SIZE")]
    undo_files: Option<String>,
    /// Variants of one explore that run at the same time, at most 16 [default: the number of cores]
    #[arg(long, value_name = "N")]
    explore_parallel: Option<String>,
    /// Memory of a session, its checkpoints and all its forks together [default: twice --memory]
    #[arg(long, value_name = "SIZE")]
    family_memory: Option<String>,
}

/// Flags about what operators see of a server.
#[derive(Args, Default)]
struct WatchArguments {
    /// File that every decision is recorded in, as a chain of lines that can be verified [default: none]
    #[arg(long, value_name = "FILE")]
    audit_file: Option<String>,
    /// Collector that traces are sent to, such as http://127.0.0.1:4318 [default: $OTEL_EXPORTER_OTLP_ENDPOINT, else none]
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
}

/// Flags about other MCP servers.
#[derive(Args, Default)]
struct UpstreamArguments {
    /// JSON file with MCP servers that all sessions may use, in the form of client configurations: {"mcpServers": {…}}
    #[arg(long, value_name = "FILE")]
    mcp_servers_file: Option<String>,
}

/// Flags about sessions that outlive the server.
#[derive(Args, Default)]
struct KeepingArguments {
    /// Whether sessions outlive this process, kept by one of their own: on or off [default: on for serve, else off]
    #[arg(long, value_name = "WORD")]
    keep_sessions: Option<String>,
    /// Name of the process that keeps them; servers with the same one have the same sessions [default: the command]
    #[arg(long, value_name = "NAME")]
    keeper: Option<String>,
}

impl Arguments {
    /// Returns all settings among the flags, as they were written.
    pub(super) fn flags(&self) -> Flags {
        let flags = Flags::default()
            .single(Key::LogLevel, self.general.log_level.clone())
            .single(Key::LogFormat, self.general.log_format.clone());
        let flags = match &self.command {
            Command::Mcp(McpArguments {
                other,
                sandbox,
                branching,
                watch,
                upstream,
                keeping,
            }) => keeping
                .add_to(watch.add_to(
                    upstream.add_to(branching.add_to(sandbox.add_to(other.add_to(flags)))),
                )),
            Command::Serve(serve) => serve.add_to(flags),
            Command::Config(ConfigCommand::Show(show)) => show.server.add_to(flags),
            Command::Run(RunArguments { sandbox, .. }) => sandbox.add_to(flags),
            Command::Doctor(DoctorArguments {
                backend,
                container_tag,
                runtime,
                ..
            }) => flags
                .single(Key::Backend, backend.clone())
                .single(Key::ContainerTag, container_tag.clone())
                .single(Key::Runtime, runtime.clone()),
            Command::Env(_)
            | Command::Image(_)
            | Command::Audit(_)
            | Command::Key(_)
            | Command::Packages(_)
            | Command::Build(_)
            | Command::Cleanup(_)
            | Command::Config(ConfigCommand::Check { .. })
            | Command::Completions { .. }
            | Command::Version
            | Command::Keeper(_) => flags,
        };
        flags.as_typed(&self.typed)
    }
}

impl ServeArguments {
    fn add_to(&self, flags: Flags) -> Flags {
        let ServeArguments {
            service,
            sandbox,
            branching,
            watch,
            upstream,
            keeping,
        } = self;
        service.add_to(
            keeping.add_to(watch.add_to(upstream.add_to(branching.add_to(sandbox.add_to(flags))))),
        )
    }
}

impl SandboxArguments {
    fn add_to(&self, flags: Flags) -> Flags {
        let flags = flags
            .single(Key::Workspace, self.workspace.clone())
            .repeated(Key::AllowedDirs, self.allowed_dirs.clone())
            .single(Key::Environment, self.environment.clone())
            .repeated(Key::Mounts, self.mounts.clone())
            .repeated(Key::Variables, self.variables.clone())
            .repeated(Key::EnvFiles, self.env_files.clone())
            .single(Key::Memory, self.memory.clone())
            .single(Key::Cpus, self.cpus.clone())
            .single(Key::Timeout, self.timeout.clone())
            .single(Key::MaxWait, self.max_wait.clone())
            .single(Key::MaxSessions, self.max_sessions.clone())
            .single(Key::IdleTimeout, self.idle_timeout.clone())
            .single(Key::Profile, self.profile.clone())
            .single(Key::Backend, self.backend.clone())
            .single(Key::ContainerTag, self.container_tag.clone())
            .single(Key::Runtime, self.runtime.clone())
            .single(Key::ImagesDir, self.images_dir.clone())
            .single(Key::SandboxConfig, self.sandbox_config.clone())
            .repeated(Key::AllowMissing, self.allow_missing.clone());
        self.approvals.add_to(self.network.add_to(flags))
    }
}

impl ServiceArguments {
    fn add_to(&self, flags: Flags) -> Flags {
        flags
            .single(Key::Listen, self.listen.clone())
            .single(Key::Auth, self.auth.clone())
            .single(Key::PublicUrl, self.public_url.clone())
            .repeated(Key::AllowedHosts, self.allowed_hosts.clone())
            .repeated(Key::AllowedOrigins, self.allowed_origins.clone())
            .single(Key::TlsCert, self.tls_cert.clone())
            .single(Key::TlsKey, self.tls_key.clone())
            .single(Key::MaxConnections, self.max_connections.clone())
    }
}

impl NetworkArguments {
    fn add_to(&self, flags: Flags) -> Flags {
        flags
            .repeated(Key::AllowedDomains, self.allowed_domains.clone())
            .repeated(Key::DeniedDomains, self.denied_domains.clone())
            .single(Key::AllowNetwork, self.allow_network.clone())
            .repeated(Key::Secrets, self.secrets.clone())
            .single(Key::InstallPackages, self.install_packages.clone())
    }
}

impl ApprovalArguments {
    fn add_to(&self, flags: Flags) -> Flags {
        flags
            .single(Key::ApproveTools, self.approve_tools.clone())
            .single(Key::ApproveShell, self.approve_shell.clone())
            .single(Key::ApprovePackages, self.approve_packages.clone())
            .single(Key::ApproveDomains, self.approve_domains.clone())
            .single(Key::RememberApprovals, self.remember_approvals.clone())
    }
}

impl BranchingArguments {
    fn add_to(&self, flags: Flags) -> Flags {
        flags
            .single(Key::Undo, self.undo.clone())
            .single(Key::UndoCheckpoints, self.undo_checkpoints.clone())
            .single(Key::UndoFiles, self.undo_files.clone())
            .single(Key::ExploreParallel, self.explore_parallel.clone())
            .single(Key::FamilyMemory, self.family_memory.clone())
    }
}

impl WatchArguments {
    fn add_to(&self, flags: Flags) -> Flags {
        flags
            .single(Key::AuditFile, self.audit_file.clone())
            .single(Key::OtlpEndpoint, self.otlp_endpoint.clone())
    }
}

impl UpstreamArguments {
    fn add_to(&self, flags: Flags) -> Flags {
        flags.single(Key::McpServersFile, self.mcp_servers_file.clone())
    }
}

impl KeepingArguments {
    fn add_to(&self, flags: Flags) -> Flags {
        flags
            .single(Key::KeepSessions, self.keep_sessions.clone())
            .single(Key::Keeper, self.keeper.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &[&str]) -> Result<Arguments, clap::Error> {
        Arguments::read(
            ["cellblock"]
                .iter()
                .chain(line)
                .map(OsString::from)
                .collect(),
        )
    }

    fn source(line: &[&str]) -> Option<CodeSource> {
        match parse(line).ok()?.command {
            Command::Run(run) => Some(run.source()),
            _ => None,
        }
    }

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn run_takes_code_from_exactly_one_place() {
        assert_eq!(
            source(&["run", "a.py"]),
            Some(CodeSource::File("a.py".into()))
        );
        assert_eq!(source(&["run", "-"]), Some(CodeSource::StandardInput));
        assert_eq!(
            source(&["run", "-c", "print(1)"]),
            Some(CodeSource::Text("print(1)".to_owned()))
        );
        assert_eq!(
            source(&["run", "-c", "-1"]),
            Some(CodeSource::Text("-1".to_owned()))
        );
        assert!(parse(&["run"]).is_err());
        assert!(parse(&["run", "a.py", "-c", "1"]).is_err());
    }

    #[test]
    fn every_command_is_understood() {
        for line in [
            &["mcp"][..],
            &[
                "mcp",
                "--mount",
                "/a:b:ro",
                "--mount",
                "/c:d",
                "--log-level",
                "DEBUG",
            ],
            &[
                "mcp",
                "--undo",
                "off",
                "--undo-checkpoints",
                "3",
                "--undo-files",
                "0",
                "--explore-parallel",
                "2",
            ],
            &["mcp", "--family-memory", "8G"],
            &[
                "mcp",
                "--allowed-domain",
                "*.example.com",
                "--allowed-domain",
                "192.0.2.7",
                "--denied-domain",
                "a.example.com",
            ],
            &[
                "mcp",
                "--allow-network",
                "all",
                "--secret",
                "A=env:B@example.com",
                "--install-packages",
                "off",
            ],
            &[
                "run",
                "-c",
                "1",
                "--allowed-domain",
                "example.com:8000,8443",
            ],
            &[
                "serve",
                "--listen",
                "8001",
                "--keep-sessions",
                "off",
                "--allowed-host",
                "a.test",
                "--max-wait",
                "30s",
            ],
            &["--config", "x.yaml", "mcp"],
            &[
                "mcp",
                "--audit-file",
                "a.jsonl",
                "--otlp-endpoint",
                "http://127.0.0.1:4318",
                "--log-format",
                "json",
            ],
            &[
                "audit",
                "verify",
                "a.jsonl",
                "a.jsonl.000000000001",
                "--last",
                "7",
                "--json",
            ],
            &[
                "audit",
                "show",
                "a.jsonl",
                "--principal",
                "anna",
                "--session",
                "s",
                "--kind",
                "execution",
                "--json",
            ],
            &["doctor", "--json"],
            &[
                "doctor",
                "--backend",
                "docker",
                "--container-tag",
                "x",
                "--runtime",
                "runsc",
            ],
            &["env", "list", "--json"],
            &["env", "build"],
            &[
                "env",
                "build",
                "science",
                "--packages",
                "scipy",
                "polars>=1",
                "--python",
                "3.12",
                "--preload",
                "scipy",
            ],
            &["packages", "list", "--json"],
            &["packages", "clean"],
            &[
                "env",
                "build",
                "science",
                "--requirements",
                "a.txt",
                "b.txt",
                "--preload",
                "scipy",
            ],
            &[
                "env",
                "build",
                "science",
                "--pyproject",
                "--extra",
                "a",
                "--extra",
                "b",
            ],
            &[
                "env",
                "build",
                "science",
                "--pyproject",
                "elsewhere/pyproject.toml",
            ],
            &["env", "build", "science", "--locked", "science.lock"],
            &["env", "show", "science"],
            &["env", "remove", "science"],
            &["mcp", "--keep-sessions", "on", "--keeper", "mine"],
            &["keeper", "status", "--json"],
            &["keeper", "stop"],
            &["keeper", "stop", "mcp", "--now"],
            &["keeper", "hold"],
            &["key", "new", "ci"],
            &[
                "key",
                "new",
                "ci",
                "--scope",
                "sessions:read",
                "--scope",
                "admin",
            ],
            &[
                "mcp",
                "--profile",
                "ipybox",
                "--workspace",
                "w",
                "--sandbox",
                "--sandbox-config",
                "s.json",
            ],
            &[
                "mcp",
                "--tool-server-host",
                "localhost",
                "--tool-server-port",
                "8900",
                "--log-level",
                "WARNING",
            ],
            &[
                "mcp",
                "--kernel-gateway-host",
                "localhost",
                "--kernel-gateway-port",
                "8888",
                "--images-dir",
                "plots",
            ],
            &[
                "mcp",
                "--container-tag",
                "a/b:c",
                "--container-env-var",
                "A=B",
                "--container-env-file",
                ".env",
            ],
            &[
                "mcp",
                "--container-bind",
                "./data:data",
                "--container-bind",
                "a:b",
                "--debug",
            ],
            &["build", "-t", "a/b:c", "-d", "dependencies.txt", "-r"],
            &["build"],
            &["cleanup", "-a", "a/b:c"],
            &["config", "check"],
            &["config", "check", "new.yaml"],
            &[
                "config", "show", "--json", "--memory", "1G", "--listen", "8001",
            ],
            &["completions", "bash"],
            &["version"],
        ] {
            assert!(parse(line).is_ok(), "{line:?}");
        }
        for line in [
            &["fly"][..],
            &["config"],
            &["config", "show", "extra"],
            &["completions"],
            &["completions", "command.com"],
            &["mcp", "--allow-missing", "roof"],
            &["env", "remove"],
            &["env", "show"],
            &["env", "build", "a", "--packages", "x", "--locked", "y"],
            &["env", "build", "a", "--requirements", "x", "--pyproject"],
            &["env", "build", "a", "--packages", "x", "--extra", "y"],
            &["env", "build", "a", "--preload", "x"],
            &["mcp", "--log-level", "loud"],
            &["mcp", "--log-format", "xml"],
            &["audit", "verify"],
            &["audit", "verify", "a.jsonl", "--last", "7:short"],
            &["audit", "show", "a.jsonl", "--kind", "everything"],
            &["run", "-c", "1", "--undo", "on"],
            &["run", "-c", "1", "--keep-sessions", "on"],
            &["keeper"],
            &["keeper", "stop", "../x"],
            &["key", "new"],
            &["key", "new", "ci", "--scope", "everything"],
            &["mcp", "--debug", "--log-level", "info"],
            &["serve", "--tool-server-port", "1"],
        ] {
            assert!(parse(line).is_err(), "{line:?}");
        }
    }

    #[test]
    fn packages_may_be_many_and_a_name_may_come_first() {
        let Command::Env(EnvCommand::Build(build)) =
            parse(&["env", "build", "a", "--packages", "x", "y"])
                .unwrap()
                .command
        else {
            panic!("it is a build");
        };
        assert_eq!(
            (build.name.as_deref(), build.packages.len()),
            (Some("a"), 2)
        );
    }

    #[test]
    fn flags_without_effect_are_told() {
        let told = |line: &[&str]| match parse(line).unwrap().command {
            Command::Mcp(mcp) => mcp.other.notices(),
            _ => panic!("it is mcp"),
        };
        assert!(
            told(&["mcp", "--sandbox"]).is_empty(),
            "code is in a sandbox, as it says"
        );
        assert_eq!(
            told(&[
                "mcp",
                "--tool-server-port",
                "1",
                "--kernel-gateway-host",
                "x"
            ])
            .len(),
            2
        );
    }

    #[test]
    fn an_unknown_command_is_answered_with_what_was_likely_meant_and_nothing_else() {
        let hint = |word: &str| {
            let answer = parse(&[word])
                .err()
                .expect("it is not a command")
                .to_string();
            let (_, hint) = answer.split_once("exist")?;
            Some(
                hint.lines()
                    .next()
                    .unwrap_or_default()
                    .trim_start_matches("s:")
                    .trim_start_matches(':')
                    .trim()
                    .to_owned(),
            )
        };
        for (word, meant) in [
            ("docter", "'doctor'"),
            ("serv", "'serve'"),
            ("kepeer", "'keeper'"),
            ("environment", "'env'"),
            ("completion", "'completions'"),
            ("Run", "'run'"),
        ] {
            assert_eq!(hint(word).as_deref(), Some(meant), "{word}");
        }
        for word in ["repl", "shell", "uninstall", "upgrade", "fly", "ls"] {
            assert_eq!(hint(word), None, "{word}");
        }
        let nested = parse(&["keeper", "stauts"]).err().unwrap().to_string();
        assert!(nested.contains("'status'"), "{nested}");
    }

    #[test]
    fn other_spellings_of_flags_are_known_to_the_settings() {
        let serve = Arguments::command()
            .find_subcommand("serve")
            .unwrap()
            .clone();
        let mut written: Vec<(String, String)> = Vec::new();
        for flag in serve.get_arguments() {
            let aliases = flag.get_all_aliases().unwrap_or_default();
            let long = flag.get_long().unwrap_or_default();
            written.extend(
                aliases
                    .iter()
                    .map(|alias| (format!("--{long}"), format!("--{alias}"))),
            );
        }
        written.sort();
        let mut known: Vec<(String, String)> = Key::ALIASES
            .iter()
            .map(|(key, alias)| (key.flag().to_owned(), (*alias).to_owned()))
            .collect();
        known.sort();
        assert_eq!(written, known);
    }

    #[test]
    fn every_flag_that_a_setting_names_exists() {
        let all = Arguments::command();
        let serve = all.find_subcommand("serve").unwrap().clone();
        let written: Vec<String> = serve
            .get_arguments()
            .chain(Arguments::command().get_arguments())
            .filter_map(|flag| flag.get_long())
            .map(|long| format!("--{long}"))
            .collect();
        for flag in Key::flags() {
            assert!(
                written.iter().any(|known| known == flag),
                "{flag} is named in the table of settings but cannot be written"
            );
        }
    }
}
