//! Command line syntax. The commands themselves are implemented elsewhere.
//!
//! Flags for settings are generated from the rows of `config` and passed on unparsed; `config`
//! merges them with the file and the environment and checks them.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{
    Arg, ArgAction, ArgGroup, ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand,
};
use clap_complete::Shell;

use crate::audit::Kind;
use crate::audit::verify::Noted;
use crate::auth::Scope;
use crate::config::{Commands, FORMER_NAME_ENDS, Flags, Key, Values};
use crate::daemon::DaemonName;
use crate::sandbox::LayerKind;

/// Runs untrusted Python in fresh, locked-down Linux sandboxes.
#[derive(Parser)]
#[command(
    name = "cellblock",
    version,
    about,
    propagate_version = true,
    arg_required_else_help = true,
    after_help = EXAMPLES
)]
pub(super) struct Arguments {
    /// Configuration file [default: $CELLBLOCK_CONFIG, then cellblock/config.yaml in the user's
    /// configuration folder]
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(subcommand)]
    pub command: Command,
    /// All settings among the flags, as they were written.
    #[arg(skip)]
    pub flags: Flags,
    /// A warning about a command that was written under its former name.
    #[arg(skip)]
    pub former_name: Option<String>,
}

impl Arguments {
    /// Parses the command line of this process. Prints help or a usage error and exits if that is
    /// the result.
    pub(super) fn of_this_process() -> Arguments {
        Arguments::read(std::env::args_os().collect()).unwrap_or_else(|answer| answer.exit())
    }

    fn read(line: Vec<OsString>) -> Result<Arguments, clap::Error> {
        let words = line
            .iter()
            .skip(1)
            .filter_map(|word| word.to_str())
            .take_while(|word| *word != "--");
        let typed: BTreeSet<String> = words
            .filter(|word| word.starts_with("--"))
            .map(|flag| flag.split('=').next().unwrap_or(flag).to_owned())
            .collect();
        let matches = definition()
            .try_get_matches_from(&line)
            .map_err(with_likely_names)?;
        let arguments = Arguments::from_arg_matches(&matches)?;
        let mut flags = written_settings(&matches);
        if let Command::Mcp(other) = &arguments.command {
            flags = flags.single(Key::LogLevel, other.debug.then(|| "debug".to_owned()));
        }
        let (command, former_name) = match arguments.command {
            // A server of an earlier version starts its daemon by the former name.
            Command::Keeper(hold @ DaemonCommand::Hold) => (Command::Daemon(hold), None),
            Command::Keeper(command) => {
                let warning =
                    format!("cellblock keeper is now called cellblock daemon; {FORMER_NAME_ENDS}");
                (Command::Daemon(command), Some(warning))
            }
            command => (command, None),
        };
        Ok(Arguments {
            command,
            former_name,
            flags: flags.as_typed(&typed),
            ..arguments
        })
    }

    /// Writes the manual pages of all commands into a folder.
    pub(super) fn write_manual(folder: &Path) -> io::Result<()> {
        std::fs::create_dir_all(folder)?;
        clap_mangen::generate_to(definition(), folder)
    }

    /// Returns a script that completes commands and flags in a shell.
    pub(super) fn completions(shell: Shell) -> Vec<u8> {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut definition(), "cellblock", &mut script);
        script
    }
}

/// The complete command line: commands with their own arguments, and the settings they accept.
fn definition() -> clap::Command {
    use Commands::{All, Sandboxes, Servers, Service};
    let server = [Sandboxes, Servers, Service];
    Arguments::command()
        .args(settings_of(&[All]).map(|argument| argument.global(true)))
        .mut_subcommand("run", |run| run.args(settings_of(&[Sandboxes])))
        .mut_subcommand("mcp", |mcp| mcp.args(settings_of(&[Sandboxes, Servers])))
        .mut_subcommand("serve", |serve| serve.args(settings_of(&server)))
        .mut_subcommand("config", |config| {
            config.mut_subcommand("show", |show| show.args(settings_of(&server)))
        })
        .mut_subcommand("doctor", |doctor| {
            let examined = [Key::Backend, Key::ContainerTag, Key::Runtime];
            doctor.args(examined.into_iter().filter_map(argument))
        })
}

/// Returns the flags of the settings that these commands accept.
fn settings_of(commands: &[Commands]) -> impl Iterator<Item = Arg> {
    Key::all()
        .filter(|key| {
            let flag = key.row().flag.as_ref();
            flag.is_some_and(|flag| commands.contains(&flag.commands))
        })
        .flat_map(|key| argument(key).into_iter().chain(former_arguments(key)))
}

/// Returns the hidden flags of a setting from earlier releases.
fn former_arguments(key: Key) -> impl Iterator<Item = Arg> {
    let row = key.row();
    let flags = row.former.iter().filter_map(|former| former.flag);
    flags.map(move |flag| {
        let action = match row.is_list() {
            true => ArgAction::Append,
            false => ArgAction::Set,
        };
        Arg::new(flag)
            .long(without_dashes(flag))
            .action(action)
            .hide(true)
    })
}

fn argument(key: Key) -> Option<Arg> {
    let row = key.row();
    let flag = row.flag.as_ref()?;
    let words = match (key, row.values) {
        (Key::AllowMissing, _) => LayerKind::ALL.map(LayerKind::name).to_vec(),
        (_, Values::Words(words)) => words.to_vec(),
        _ => Vec::new(),
    };
    // Named by the flag, so that it cannot collide with an argument of the command itself.
    let argument = Arg::new(flag.name)
        .long(without_dashes(flag.name))
        .value_name(flag.value)
        .value_parser(Suggestion(words))
        .hide_possible_values(flag.value.contains('|'))
        .help(row.help())
        .long_help(row.long_help())
        .action(if row.is_list() {
            ArgAction::Append
        } else {
            ArgAction::Set
        });
    Some(match flag.alias {
        Some(alias) => argument.visible_alias(without_dashes(alias)),
        None => argument,
    })
}

fn without_dashes(flag: &'static str) -> &'static str {
    flag.trim_start_matches('-')
}

/// Collects the settings among the arguments of the given command.
fn written_settings(matches: &ArgMatches) -> Flags {
    // A global flag is also known to the innermost command.
    let mut command = matches;
    while let Some((_, inner)) = command.subcommand() {
        command = inner;
    }
    let mut flags = Flags::default();
    for key in Key::all() {
        let row = key.row();
        let own = row.flag.iter().map(|flag| flag.name);
        let former = row.former.iter().filter_map(|former| former.flag);
        for name in own.chain(former) {
            if command.try_contains_id(name).ok() != Some(true) {
                continue;
            }
            let values = command.get_many::<String>(name).into_iter().flatten();
            flags = flags.given_as(key, name, values.cloned().collect());
        }
    }
    flags
}

/// Accepts any text and offers the usual values to help and shell completion. `config` rejects
/// other values, with a better message.
#[derive(Clone)]
struct Suggestion(Vec<&'static str>);

impl TypedValueParser for Suggestion {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let words = self.0.iter().copied().map(PossibleValue::new);
        (!self.0.is_empty()).then(|| Box::new(words) as Box<_>)
    }
}

/// Reduces the commands that an error suggests to likely corrections of the mistyped word. The
/// parser suggests every name that shares a few letters.
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

/// Returns whether `typed` may be a misspelling of `name`: at most one typing mistake per three
/// letters, or one is a prefix of the other.
fn is_likely(typed: &str, name: &str) -> bool {
    const MIN_COMMON: usize = 3;
    let shorter = typed.len().min(name.len());
    let mistakes = strsim::damerau_levenshtein(typed, name);
    let goes_on = shorter >= MIN_COMMON && (typed.starts_with(name) || name.starts_with(typed));
    goes_on || mistakes <= (shorter / 3).max(1)
}

const EXAMPLES: &str = "\
Examples:
  cellblock run -c 'print(sum(range(10)))'    run one line and print the result
  cellblock run analysis.py --workspace .     run a script that can see this folder
  cellblock mcp --workspace ~/work            serve an MCP client over standard input and output
  cellblock doctor                            show what this machine can enforce
  cellblock config show                       show all settings, and where each was written

Every flag can also be a line of the configuration file or a variable: --memory 2G, \"memory: \
2G\", CELLBLOCK_MEMORY=2G.
Flags win over variables, variables over the file.";

#[derive(Subcommand)]
pub(super) enum Command {
    /// Serve an MCP client over standard input and output
    #[command(after_help = MCP_EXAMPLES)]
    Mcp(OtherServersArguments),
    /// Serve many MCP clients over HTTP
    #[command(after_help = SERVE_EXAMPLES)]
    Serve,
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
    /// Show and stop the session daemons, which keep sessions while their server restarts
    #[command(subcommand, arg_required_else_help = true)]
    Daemon(DaemonCommand),
    /// The former name of "daemon"
    #[command(subcommand, arg_required_else_help = true, hide = true)]
    Keeper(DaemonCommand),
    /// Check the configuration, or show all settings and where each was written
    #[command(subcommand, arg_required_else_help = true)]
    Config(ConfigCommand),
    /// Print a script that completes commands and flags in a shell
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Write manual pages for this program and its commands
    #[command(after_help = MAN_EXAMPLES)]
    Man {
        /// The folder for them; made if missing
        folder: PathBuf,
    },
    /// Print the version
    Version,
    /// The same as "image build", under the name that ipybox has for it
    #[command(hide = true)]
    Build(ImageArguments),
    /// Remove containers that a killed server left, or packages that nothing uses; see
    /// docs/migrate/ipybox.md
    #[command(hide = true)]
    Cleanup(IpyboxCleanupArguments),
}

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  source <(cellblock completions bash)                                        in ~/.bashrc
  cellblock completions zsh > ~/.zfunc/_cellblock                             with ~/.zfunc in fpath
  cellblock completions fish > ~/.config/fish/completions/cellblock.fish";

const MAN_EXAMPLES: &str = "\
Example:
  cellblock man ~/.local/share/man/man1 && man cellblock-serve";

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
    Show {
        /// Print the settings as JSON
        #[arg(long)]
        json: bool,
    },
}

const CHECK_EXAMPLES: &str = "\
Example:
  cellblock config check new.yaml && mv new.yaml ~/.config/cellblock/config.yaml

The exit status is 0 if a server would start with it, 2 if not. Variables of the environment count \
too: they win over the file.";

const CONFIG_EXAMPLES: &str = "\
Examples:
  cellblock config show
  cellblock config show --profile pyexec --memory 1G          with flags, as \"cellblock serve\" \
  would have them
  cellblock config show --json | jq .memory";

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

#[derive(Subcommand)]
pub(super) enum DaemonCommand {
    /// List the session daemons of this user: process, age, sessions, version
    Status {
        /// Print the list as JSON
        #[arg(long)]
        json: bool,
    },
    /// End a session daemon and all its sessions, unless code is running in one
    Stop {
        /// The daemon's name
        #[arg(default_value = "serve")]
        name: DaemonName,
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
  cellblock serve                                   on this machine, with a token of its own in a \
  file that it names
  cellblock serve --listen 0.0.0.0:8443 --tls-cert cert.pem --tls-key key.pem --public-url \
  https://cells.example.com
  cellblock serve --max-wait 30s --keep-sessions off

Who may call is said in the configuration file or by MCP_JWKS_URI, MCP_ISSUER and MCP_AUDIENCE.";

const RUN_EXAMPLES: &str = "\
Examples:
  cellblock run script.py
  cellblock run -c 'import numpy; numpy.arange(3)'
  echo 'print(1)' | cellblock run -
  cellblock run plot.py --output-dir plots";

/// Flags of servers that profiles stand in for, without a flag of ours that does the same. Hidden:
/// whoever needs them has them in a client's configuration already.
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
    #[arg(long, hide = true, conflicts_with = "--log-level")]
    debug: bool,
}

impl OtherServersArguments {
    /// Reports which of these flags have no effect.
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
    /// The container engine: docker (found by DOCKER_HOST and contexts) or podman (found by
    /// CONTAINER_HOST) [default: that of the backend, or docker]
    #[arg(long, value_name = "NAME", value_parser = ["docker", "podman"])]
    pub engine: Option<String>,
}

const IMAGE_EXAMPLES: &str = "\
Examples:
  cellblock image build                                       \"cellblock\", with the science \
  packages
  cellblock image build --tag cells:1 --packages polars 'httpx>=0.28'
  cellblock image build --tag cells:1 --no-science --requirements requirements.txt --base \
  python:3.12-slim
  cellblock image build --dockerfile                          print what would be built

Without --base the engine must have python:3.13-slim or be able to fetch it. Packages are fetched \
by this program, not by the engine.";

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
    /// A file of quoted requirements, one to a line, as the list of dependencies in a
    /// pyproject.toml has them
    #[arg(short, long, value_name = "FILE")]
    pub dependencies: Option<PathBuf>,
    /// Install exactly what a lock lists: a requirements file with exact versions and hashes
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["packages", "requirements", "dependencies", "no_science"]
    )]
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
  cellblock audit verify audit.jsonl* --last 1234:9f86d0…     … which must still hold this record; \
  see the server's log for it

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
    /// A record that must be in the files: its number, and its hash if it is known. Finds an end
    /// that was cut off
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
    #[arg(
        long,
        value_name = "KIND",
        value_parser = clap::builder::PossibleValuesParser::new(Kind::NAMES)
    )]
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
        /// What the owner is called: in the configuration, in the audit log, as the owner of
        /// sessions
        name: String,
        /// What the owner may do; repeat for more [default: python:execute]
        #[arg(
            long = "scope",
            value_name = "SCOPE",
            value_parser = clap::builder::PossibleValuesParser::new(Scope::ALL.map(Scope::name))
        )]
        scopes: Vec<String>,
    },
}

const BUILD_EXAMPLES: &str = "\
Examples:
  cellblock env build                                         the environment that sessions use by \
  default
  cellblock env build science --packages scipy 'polars>=1' --python 3.12
  cellblock env build science --requirements requirements.txt
  cellblock env build science --pyproject --extra plots       the dependencies of the project in \
  this folder
  cellblock env build science --locked science.lock           exactly what \"cellblock env show \
  science\" printed elsewhere
  cellblock mcp --environment science                         … and how it is used";

const SHOW_EXAMPLES: &str = "\
Example:
  cellblock env show science > science.lock                   to make the same environment \
  elsewhere";

#[derive(Args, Default)]
#[command(
    group = ArgGroup::new("contents").args(["packages", "requirements", "pyproject", "locked"])
)]
pub(super) struct BuildArguments {
    /// The environment's name [default: the one that sessions use]
    pub name: Option<String>,
    /// The Python to build it with: a version such as 3.12, or the path of an interpreter
    #[arg(long, value_name = "VERSION|PATH")]
    pub python: Option<String>,
    /// What to install; a name that the configuration does not describe needs this or one of the
    /// next three
    #[arg(long, value_name = "REQUIREMENT", num_args = 1..)]
    pub packages: Vec<String>,
    /// Requirements files that say what to install
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub requirements: Vec<PathBuf>,
    /// Install the dependencies of a project [default file: pyproject.toml]
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "pyproject.toml")]
    pub pyproject: Option<PathBuf>,
    /// A group of the project's optional dependencies; repeat for more
    #[arg(
        long = "extra",
        value_name = "NAME",
        requires = "pyproject",
        conflicts_with_all = ["packages", "requirements", "locked"]
    )]
    pub extras: Vec<String>,
    /// Install exactly what a lock lists: a requirements file with exact versions and hashes
    #[arg(long, value_name = "FILE")]
    pub locked: Option<PathBuf>,
    /// Modules to import before the first session, so that sessions start with them
    #[arg(long, value_name = "MODULE", num_args = 1.., requires = "contents")]
    pub preload: Vec<String>,
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
        definition().debug_assert();
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
            &["mcp", "--keep-sessions", "on", "--daemon-name", "mine"],
            &["daemon", "status", "--json"],
            &["daemon", "stop"],
            &["daemon", "stop", "mcp", "--now"],
            &["daemon", "hold"],
            &["keeper", "stop", "mcp", "--now"],
            &["mcp", "--keeper", "mine"],
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
            &["man", "folder"],
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
            &["env", "remove"],
            &["env", "show"],
            &["env", "build", "a", "--packages", "x", "--locked", "y"],
            &["env", "build", "a", "--requirements", "x", "--pyproject"],
            &["env", "build", "a", "--packages", "x", "--extra", "y"],
            &["env", "build", "a", "--preload", "x"],
            &["audit", "verify"],
            &["audit", "verify", "a.jsonl", "--last", "7:short"],
            &["audit", "show", "a.jsonl", "--kind", "everything"],
            &["run", "-c", "1", "--undo", "on"],
            &["run", "-c", "1", "--keep-sessions", "on"],
            &["daemon"],
            &["daemon", "stop", "../x"],
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
            Command::Mcp(mcp) => mcp.notices(),
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
            ("deamon", "'daemon'"),
            ("environment", "'env'"),
            ("completion", "'completions'"),
            ("Run", "'run'"),
        ] {
            assert_eq!(hint(word).as_deref(), Some(meant), "{word}");
        }
        for word in ["repl", "shell", "uninstall", "upgrade", "fly", "ls"] {
            assert_eq!(hint(word), None, "{word}");
        }
        let nested = parse(&["daemon", "stauts"]).err().unwrap().to_string();
        assert!(nested.contains("'status'"), "{nested}");
    }

    #[test]
    fn every_flag_of_a_setting_is_handed_on() {
        for key in Key::all() {
            let Some(flag) = &key.row().flag else {
                continue;
            };
            let former = key.row().former.iter().map(|former| former.flag);
            let names = [Some(flag.name), flag.alias].into_iter().chain(former);
            for name in names.flatten() {
                let written = parse(&["serve", name, "x"]).unwrap().flags;
                assert_eq!(written.keys(), [key], "{name}");
                let shown = parse(&["config", "show", name, "x"]).unwrap().flags;
                assert_eq!(shown.keys(), [key], "{name}");
                let twice = parse(&["serve", name, "x", name, "y"]);
                assert_eq!(twice.is_ok(), key.row().is_list(), "{name}");
            }
        }
        let general = parse(&["--log-level", "x", "mcp"]).unwrap().flags;
        assert_eq!(general.keys(), [Key::LogLevel]);
        assert_eq!(
            parse(&["mcp", "--debug"]).unwrap().flags.keys(),
            [Key::LogLevel]
        );
        assert!(parse(&["mcp"]).unwrap().flags.keys().is_empty()); // control
    }

    #[test]
    fn the_former_name_of_a_command_works_with_a_warning() {
        let parsed = |line: &[&str]| {
            let arguments = parse(line).unwrap();
            let is_daemon = matches!(arguments.command, Command::Daemon(_));
            (is_daemon, arguments.former_name)
        };
        let warning = "cellblock keeper is now called cellblock daemon; the former name works in \
                       this release only";
        let warned = (true, Some(warning.to_owned()));
        assert_eq!(parsed(&["keeper", "status"]), warned);
        assert_eq!(parsed(&["keeper", "stop", "mcp", "--now"]), warned);
        // Only servers of an earlier version do this.
        assert_eq!(parsed(&["keeper", "hold"]), (true, None));
        assert_eq!(parsed(&["daemon", "stop", "keeper"]), (true, None)); // control
    }

    #[test]
    fn manual_pages_have_the_commands_and_their_settings() {
        let folder = tempfile::tempdir().unwrap();
        Arguments::write_manual(folder.path()).unwrap();
        let page = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert!(page("cellblock.1").contains("cellblock\\-serve(1)"));
        let serve = page("cellblock-serve.1");
        assert!(serve.contains("64 MiB to 16 TiB"), "{serve}");
        assert!(!page("cellblock-run.1").contains("undo"));
    }

    #[test]
    fn help_has_the_texts_and_defaults_of_settings_without_markup() {
        let mut definition = definition();
        let serve = definition.find_subcommand_mut("serve").unwrap();
        let help = serve.render_help().to_string();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in [
            "--memory <SIZE> Memory of each sandbox, such as 512M, 2G or 2GiB [default: 2G]",
            "--environment <NAME> Python environment that sessions run in [default: default]",
            "--undo <on|off> Whether sessions keep what is needed to undo cells [default: on]",
            "read-only with :ro; repeat for more [alias: --container-bind]",
            "[possible values: default, ipybox, python-docker-mcp, code-executer, pyexec]",
        ] {
            assert!(help.contains(part), "{part}\n{help}");
        }
        assert!(!help.contains(".md") && !help.contains('`'), "{help}");
    }
}
