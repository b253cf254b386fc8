//! The table of settings: one row for each.
//!
//! A row has everything that is known about a setting before it is given a value. The configuration
//! file, the variables, the command line with its help, the tables in `docs/configuration.md` and
//! `README.md`, the ranges and defaults of `checks`, the comparison with a session daemon and the
//! report after a reload are all derived from it. The value itself is a field of `Settings`, which
//! `checks` fills and `shown` prints.
//!
//! Texts are Markdown with links relative to `docs`; help shows them without the markup.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::quantity::{format_duration, format_size};
use Commands::{All, Sandboxes, Servers, Service};
use DefaultValue::{Adapted, Derived, Nothing, Value};
use TakesEffect::{NewSessions, Reload, Restart};
use Values::{FileOnly, List, Number, Pairs, Phrases, Size, Text, Time, Words};

/// The static description of a setting.
pub(crate) struct Setting {
    /// Its name in the file and in messages. `CELLBLOCK_` and the name in capitals is its variable.
    pub name: &'static str,
    /// Its names in earlier releases.
    pub former: &'static [FormerName],
    pub flag: Option<Flag>,
    pub values: Values,
    pub default: DefaultValue,
    pub takes_effect: TakesEffect,
    /// One sentence without a full stop, for help and for documents.
    pub text: &'static str,
    /// Further text for documents, or empty.
    pub details: &'static str,
}

/// A name that a setting had in an earlier release. It works for one release, with a warning, in
/// the file, as a variable and as a flag.
pub(crate) struct FormerName {
    pub name: &'static str,
    pub flag: Option<&'static str>,
}

/// How a setting is written on the command line.
pub(crate) struct Flag {
    pub name: &'static str,
    /// The placeholder for its value in help.
    pub value: &'static str,
    pub commands: Commands,
    /// Its name in the server that a profile replaces.
    pub alias: Option<&'static str>,
}

/// The commands that accept a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Commands {
    /// Every command.
    All,
    /// `run`, `mcp` and `serve`.
    Sandboxes,
    /// `mcp` and `serve`.
    Servers,
    /// `serve`.
    Service,
}

/// The allowed values of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Values {
    /// Bytes, with minimum and maximum.
    Size(u64, u64),
    /// Seconds, with minimum and maximum.
    Time(u64, u64),
    /// A whole number, with minimum and maximum.
    Number(u64, u64),
    /// One of these words.
    Words(&'static [&'static str]),
    /// One text, interpreted by its check.
    Text,
    /// Several texts; separated by commas in a variable.
    List,
    /// The same, but a text may contain commas itself. A variable is kept whole, and the check
    /// splits it.
    Phrases,
    /// Names and values. A source adds to those of lower precedence instead of replacing them.
    Pairs,
    /// Nested, so it can be written only in the file.
    FileOnly,
}

/// The value of a setting that is not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DefaultValue {
    /// None.
    Nothing,
    /// In the operator's syntax.
    Value(&'static str),
    /// The same, but adapted by the check. The second text describes how.
    Adapted(&'static str, &'static str),
    /// Derived by the check from the machine, the command or other settings.
    Derived(&'static str),
}

/// When a changed setting takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TakesEffect {
    /// After a reload (SIGHUP). The parts that sessions need are passed on to them.
    Reload,
    /// After a restart of the server. Sessions do not depend on it.
    Restart,
    /// After the session daemon has ended, because its sessions depend on it.
    NewSessions,
}

macro_rules! settings {
    ($($(#[$attribute:meta])* $key:ident => $row:expr;)*) => {
        /// A setting.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum Key { $($(#[$attribute])* $key,)* }

        const KEYS: &[Key] = &[$(Key::$key,)*];

        /// In the order of `Key`.
        const ROWS: &[Setting] = &[$($row,)*];
    };
}

impl Key {
    /// Every setting, in the order of documents and help.
    pub(crate) fn all() -> impl Iterator<Item = Key> {
        KEYS.iter().copied()
    }

    pub(crate) fn row(self) -> &'static Setting {
        &ROWS[self as usize]
    }

    /// The name used in the configuration file and in messages.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    pub(crate) fn names() -> impl Iterator<Item = &'static str> {
        ROWS.iter().map(|row| row.name)
    }

    /// Finds a setting by its name or a former one.
    pub(super) fn from_name(name: &str) -> Option<(Key, Spelling)> {
        let name = name.replace('-', "_");
        let spelling = |key: Key| {
            let is_former = || key.row().former.iter().any(|former| former.name == name);
            if key.name() == name {
                Some((key, Spelling::Present))
            } else {
                is_former().then_some((key, Spelling::Former))
            }
        };
        Key::all().find_map(spelling)
    }

    /// Returns the spelling of one of its flags.
    pub(super) fn flag_spelling(self, flag: &str) -> Spelling {
        let is_former = |former: &FormerName| former.flag == Some(flag);
        match self.row().former.iter().any(is_former) {
            true => Spelling::Former,
            false => Spelling::Present,
        }
    }

    pub(super) fn flag_name(self) -> &'static str {
        self.row().flag.as_ref().map_or("", |flag| flag.name)
    }
}

/// Whether a setting was written under its name or under one of an earlier release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    Present,
    Former,
}

impl Setting {
    const fn flag(mut self, name: &'static str, value: &'static str, commands: Commands) -> Self {
        self.flag = Some(Flag {
            name,
            value,
            commands,
            alias: None,
        });
        self
    }

    const fn alias(mut self, alias: &'static str) -> Self {
        if let Some(flag) = &mut self.flag {
            flag.alias = Some(alias);
        }
        self
    }

    const fn former(mut self, names: &'static [FormerName]) -> Self {
        self.former = names;
        self
    }

    const fn details(mut self, details: &'static str) -> Self {
        self.details = details;
        self
    }

    /// Returns whether a flag can be repeated.
    pub(crate) fn is_list(&self) -> bool {
        matches!(self.values, List | Phrases | Pairs)
    }

    /// Returns the help of its flag, in one sentence.
    pub(crate) fn help(&self) -> String {
        self.help_with(self.text)
    }

    /// Returns the help of its flag with the allowed values.
    pub(crate) fn long_help(&self) -> String {
        self.help_with(&self.meaning())
    }

    /// Returns its purpose and the allowed values.
    pub(super) fn meaning(&self) -> String {
        let values = match self.values {
            Words(words) => format!("`{}`", words.join("`, `")),
            values => values.range(),
        };
        [self.text, &values, self.details]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join("; ")
    }

    fn help_with(&self, text: &str) -> String {
        let repeat = if self.is_list() {
            "; repeat for more"
        } else {
            ""
        };
        let default = match self.default {
            Nothing => String::new(),
            Value(text) | Derived(text) => format!(" [default: {text}]"),
            Adapted(text, how) => format!(" [default: {text}, {how}]"),
        };
        without_markup(&format!("{text}{repeat}{default}"))
    }
}

impl DefaultValue {
    /// Returns the default in the operator's syntax.
    pub(crate) fn written(self) -> Option<&'static str> {
        match self {
            Value(text) | Adapted(text, _) => Some(text),
            Nothing | Derived(_) => None,
        }
    }
}

impl Values {
    /// Describes the allowed values, for an error message.
    pub(super) fn allowed(self) -> String {
        let range = self.range();
        match self {
            Size(..) => format!("a size such as 512M or 2GiB, from {range}"),
            Time(..) => format!("a duration such as 30, 30s or 2m, from {range}"),
            Number(..) => format!("a number from {range}"),
            Words(words) if words.len() > 3 => format!("one of: {}", words.join(", ")),
            Words(words) => match words {
                [first @ .., last] => format!("{} or {last}", first.join(", ")),
                [] => String::new(),
            },
            Text | List | Phrases | Pairs | FileOnly => String::new(),
        }
    }

    /// Describes the range of values; empty where there is none.
    pub(super) fn range(self) -> String {
        let time = |seconds| format_duration(Duration::from_secs(seconds));
        match self {
            Size(least, most) => format!("{} to {}", format_size(least), format_size(most)),
            Time(least, most) => format!("{} to {}", time(least), time(most)),
            Number(least, most) => format!("{least} to {most}"),
            _ => String::new(),
        }
    }
}

/// Removes link targets and code marks from a text.
fn without_markup(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, link)) = rest.split_once("](") {
        // A bracket without a link stays: `[default: …]`, `[:ro]`.
        let (before, label) = before.rsplit_once('[').unwrap_or((before, ""));
        plain.extend([before, label]);
        rest = link.split_once(')').map_or("", |(_, rest)| rest);
    }
    plain.push_str(rest);
    plain.replace('`', "")
}

const fn setting(
    name: &'static str,
    values: Values,
    default: DefaultValue,
    takes_effect: TakesEffect,
    text: &'static str,
) -> Setting {
    Setting {
        name,
        former: &[],
        flag: None,
        values,
        default,
        takes_effect,
        text,
        details: "",
    }
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;

/// With less than this IPython itself does not fit.
const MIN_MEMORY: u64 = 64 * MIB;

/// One `explore` has at most this many variants, so more could not run at once.
pub(super) const MAX_VARIANTS: u64 = 16;

/// Log levels, the most verbose last.
const LOG_LEVELS: &[&str] = &["error", "warn", "info", "debug", "trace"];

const SWITCH: Values = Words(&["on", "off"]);
const EFFECT: Values = Words(&["allow", "ask", "deny"]);

settings! {
    // Contents of sessions.
    Workspace => setting("workspace", Text, Derived("a private folder for each session"),
        NewSessions,
        "Host folder that becomes the working folder; made if missing")
        .flag("--workspace", "DIR", Sandboxes)
        .details("it may not overlap with a folder of Cellblock itself");
    AllowedDirs => setting("allowed_dirs", List, Derived("the workspace"), Restart,
        "Host folder that files may be uploaded from and downloaded to")
        .flag("--allowed-dir", "DIR", Sandboxes)
        .details("folders that exist");
    Mounts => setting("mounts", List, Nothing, NewSessions,
        "Host folder to show below the working folder, read-only with `:ro`")
        .flag("--mount", "HOST:RELATIVE[:ro]", Sandboxes)
        .alias("--container-bind")
        .details("relative to the working folder, without `..`, not overlapping");
    Variables => setting("variables", Pairs, Nothing, NewSessions,
        "Environment variable for the code inside")
        .flag("--env-var", "KEY=VALUE", Sandboxes)
        .alias("--container-env-var")
        .details("`KEY=VALUE`, or a table in the file");
    EnvFiles => setting("env_files", List, Nothing, NewSessions,
        "File of `KEY=VALUE` lines with variables for the code inside")
        .flag("--env-file", "FILE", Sandboxes)
        .alias("--container-env-file");
    Environment => setting("environment", Text, Value("default"), NewSessions,
        "[Python environment](environments.md) that sessions run in")
        .flag("--environment", "NAME", Sandboxes)
        .details("a name from `environments`, built in (`default`, `minimal`), or built by hand");
    Environments => setting("environments", FileOnly, Nothing, NewSessions,
        "Descriptions of [environments](environments.md)");

    // Limits of a session.
    Memory => setting("memory", Size(MIN_MEMORY, 16 * TIB), Value("2G"), NewSessions,
        "Memory of each sandbox, such as `512M`, `2G` or `2GiB`")
        .flag("--memory", "SIZE", Sandboxes);
    FamilyMemory => setting("family_memory", Size(MIN_MEMORY, 32 * TIB),
        Derived("twice `memory`"),
        NewSessions,
        "Memory of a session, its checkpoints and all its forks [together](branching.md#limits)")
        .flag("--family-memory", "SIZE", Servers)
        .details("at least `memory`");
    Cpus => setting("cpus", Text, Adapted("2", "or all cores if fewer"), NewSessions,
        "Processor cores each sandbox may keep busy, such as `0.5` or `2`")
        .flag("--cpus", "N", Sandboxes)
        .details("0.05 to the number of cores");
    Processes => setting("processes", Number(8, 65_536), Value("256"), NewSessions,
        "Processes and threads of each sandbox");
    Disk => setting("disk", Size(MIB, 16 * TIB), Value("1G"), NewSessions,
        "Bytes in each of `/tmp` and the private working folder, and in any single file");
    Files => setting("files", Number(100, 100_000_000), Value("100000"), NewSessions,
        "Entries in each of `/tmp` and the private working folder");
    Timeout => setting("timeout", Time(1, DAY), Adapted("2m", "or `max_timeout` if that is less"),
        Restart,
        "How long a cell may run when its caller does not say, such as `30`, `30s` or `2m`")
        .flag("--timeout", "DURATION", Sandboxes)
        .details("not above `max_timeout`");
    MaxTimeout => setting("max_timeout", Time(1, DAY), Adapted("1h",
        "or `timeout` if that is more"),
        Restart, "The longest time that a caller may ask for");
    MaxWait => setting("max_wait", Time(1, HOUR), Value("50s"), Restart,
        "How long a call [waits for a cell](service.md#long-cells); then the cell goes on and \
         `check_execution` tells how")
        .flag("--max-wait", "DURATION", Sandboxes);
    MaxSessions => setting("max_sessions", Number(1, 10_000), Value("64"), NewSessions,
        "Sessions that may exist at once")
        .flag("--max-sessions", "N", Sandboxes)
        .details("a server can have 1,023 sandboxes, the pool included; natively, each needs 10 of \
                  the [files that may be open](operations.md#limits-of-the-machine)");
    IdleTimeout => setting("idle_timeout", Time(1, 30 * DAY), Value("1h"), NewSessions,
        "How long a session may do nothing before it ends, such as `30m`")
        .flag("--idle-timeout", "DURATION", Sandboxes);
    Pool => setting("pool", Number(0, 1_000), Adapted("2", "or `max_sessions` if that is less"),
        NewSessions, "Warm sessions kept ready")
        .details("never more than `max_sessions`");

    // The backend.
    Backend => setting("backend", Words(&["native", "docker", "podman"]), Value("native"),
        NewSessions,
        "What [sandboxes](containers.md) are made of: namespaces of this kernel, or containers")
        .flag("--backend", "native|docker|podman", Sandboxes);
    ContainerTag => setting("container_tag", Text,
        Adapted("cellblock:latest", "which `cellblock image build` makes"), NewSessions,
        "Image of containers; it needs Python 3.10 or newer")
        .flag("--container-tag", "IMAGE", Sandboxes)
        .details("only with a container backend");
    Runtime => setting("runtime", Text, Derived("the engine's"), NewSessions,
        "Runtime of containers that the engine knows, such as `runsc` or `kata`")
        .flag("--runtime", "NAME", Sandboxes)
        .details("only with a container backend");
    PoolMaxAge => setting("pool_max_age", Time(1, DAY), Value("30m"), NewSessions,
        "How long a container may wait to be used");
    PoolCreations => setting("pool_creations", Number(1, 64), Value("2"), NewSessions,
        "Containers made for the pool at the same time");
    AllowMissing => setting("allow_missing", List, Nothing, NewSessions,
        "Isolation [layer](isolation.md) that may be missing on this machine")
        .flag("--allow-missing", "LAYER", Sandboxes);

    // Checkpoints and forks of sessions.
    Undo => setting("undo", SWITCH, Value("on"), NewSessions,
        "Whether sessions keep what is needed to [undo](branching.md) cells")
        .flag("--undo", "on|off", Servers);
    UndoCheckpoints => setting("undo_checkpoints", Number(1, 100), Value("10"), NewSessions,
        "States of a session that are kept for undo")
        .flag("--undo-checkpoints", "N", Servers);
    UndoFiles => setting("undo_files", Size(0, 16 * TIB), Adapted("64M", "with a workspace `0`"),
        NewSessions, "How much of the working folder undo saves with each state")
        .flag("--undo-files", "SIZE", Servers)
        .details("a larger folder is left alone, and with 0 always");
    ExploreParallel => setting("explore_parallel", Number(1, MAX_VARIANTS),
        Derived("the number of cores, at most 16"), NewSessions,
        "Variants of one `explore` that run at the same time")
        .flag("--explore-parallel", "N", Servers);

    // Quotas.
    MaxRunning => setting("max_running", Number(0, 100_000), Derived("4 for each core"), Reload,
        "Cells that run at once in the whole server, and as many again for callers who run \
         nothing else")
        .details("others [wait their turn](sessions.md#turns); 0 is no limit");
    QuotaSessions => setting("quota_sessions", Number(1, 10_000), Nothing, Reload,
        "Sessions of one caller")
        .details("this and the other [quotas](sessions.md#quotas) hold for `serve` and `mcp` \
                  alike");
    QuotaMemory => setting("quota_memory", Size(MIN_MEMORY, 64 * TIB), Nothing, Reload,
        "Memory held by all sandboxes of one caller");
    QuotaCpu => setting("quota_cpu", Time(1, 365 * DAY), Nothing, Reload,
        "Processor time of one caller within `quota_cpu_window`");
    QuotaCpuWindow => setting("quota_cpu_window", Time(MINUTE, 30 * DAY), Value("1h"), Reload,
        "The time over which `quota_cpu` counts");
    QuotaCells => setting("quota_cells", Number(1, 1_000_000), Nothing, Reload,
        "Cells of one caller per minute");
    QuotaStarts => setting("quota_starts", Number(1, 1_000_000), Nothing, Reload,
        "Sandboxes that one caller starts per minute, for sessions, forks and variants");
    QuotaStored => setting("quota_stored", Size(MIB, 64 * TIB), Nothing, Reload,
        "Files, kept outputs and unfinished uploads of one caller")
        .details("kept outputs are [bounded](results.md#resources) also without it");

    // Network.
    AllowedDomains => setting("allowed_domains", Phrases, Nothing, NewSessions,
        "Host that [code inside may reach](network.md), such as `example.com`, `*.example.com`, \
         `192.168.1.0/24` or `example.com:8443`")
        .flag("--allowed-domain", "RULE", Sandboxes)
        .details("at most 1,000 [rules](network.md#rules)");
    DeniedDomains => setting("denied_domains", Phrases, Nothing, NewSessions,
        "Host that code inside may never reach, whatever else is allowed; written like an \
         allowed one")
        .flag("--denied-domain", "RULE", Sandboxes);
    AllowNetwork => setting("allow_network", Words(&["none", "listed", "all"]),
        Derived("`listed` if something is listed, else `none`"), NewSessions,
        "What code inside may reach: nothing, what is listed, or \
         [everything](network.md#everything)")
        .flag("--allow-network", "none|listed|all", Sandboxes)
        .details("`none` beside `allowed_domains` or `secrets` is refused");
    Secrets => setting("secrets", Phrases, Nothing, NewSessions,
        "Value that is put into HTTPS requests to a host and [never goes \
         inside](network.md#secrets), \
         where `NAME` is a placeholder")
        .flag("--secret", "NAME=env:VAR@HOST[:HEADER]", Sandboxes)
        .details("`NAME=env:VARIABLE@HOST[:HEADER]`, `NAME=file:PATH@…`, or tables in the file");
    NetworkConnections => setting("network_connections", Number(1, 10_000), Value("256"),
        NewSessions,
        "Open connections of one session");
    NetworkBandwidth => setting("network_bandwidth", Size(KIB, TIB), Value("0"), NewSessions,
        "Bytes per second of one session")
        .details("or 0 for no limit");
    NetworkQuestions => setting("network_questions", Number(1, 10_000), Value("100"), NewSessions,
        "DNS queries per second in one session");

    // Packages. The sizes are those of the largest common packages: PyTorch and its libraries have
    // 7 GiB in all, and the largest of them, twice while it is packed, 4 GiB.
    InstallPackages => setting("install_packages", SWITCH, Value("on"), NewSessions,
        "Whether [packages](packages.md) can be installed into sessions")
        .flag("--install-packages", "on|off", Sandboxes)
        .details("never in `cellblock run`");
    PackageSize => setting("package_size", Size(MIB, 16 * TIB), Value("10G"), NewSessions,
        "The most that one installation may hold");
    PackageDisk => setting("package_disk", Size(MIB, 16 * TIB), Value("4G"), NewSessions,
        "Files in the [installer's sandbox](packages.md#limits)");
    PackageMemory => setting("package_memory", Size(MIN_MEMORY, 16 * TIB),
        Derived("`package_disk` and 2 GiB"), NewSessions,
        "Memory of the installer's sandbox, its files included");
    PackageStoreSize => setting("package_store_size", Size(MIB, 16 * TIB), Value("20G"),
        NewSessions,
        "Size of the store beyond which [packages](packages.md#the-store) that no session uses are \
         removed before others are added");
    PackageTimeout => setting("package_timeout", Time(1, DAY), Value("15m"), NewSessions,
        "How long one installation may take");
    PackageIndex => setting("package_index", Text, Derived("the one that uv uses"), NewSessions,
        "Address of the index that packages for sessions come from");
    PackageTrustedHosts => setting("package_trusted_hosts", List, Derived("those that uv trusts"),
        NewSessions, "Hosts of indexes whose certificates are not checked");

    // Approvals.
    Approvals => setting("approvals", FileOnly, Nothing, Reload,
        "A list of [rules](approvals.md#rules); the first that fits decides");
    ApproveTools => setting("approve_tools", EFFECT, Value("allow"), Reload,
        "[Calls](approvals.md) of other MCP servers' tools: allow, ask a person, or deny")
        .flag("--approve-tools", "allow|ask|deny", Sandboxes)
        .details("for those that no rule is about");
    ApproveShell => setting("approve_shell", EFFECT, Value("allow"), NewSessions,
        "Shell commands of cells: allow, ask a person, or deny")
        .flag("--approve-shell", "allow|ask|deny", Sandboxes)
        .details("with anything but `allow`, code can start no program by itself");
    ApprovePackages => setting("approve_packages", EFFECT, Value("allow"), Reload,
        "Installations of packages: allow, ask a person, or deny")
        .flag("--approve-packages", "allow|ask|deny", Sandboxes);
    ApproveDomains => setting("approve_domains", Words(&["ask", "deny"]), Value("deny"),
        NewSessions,
        "[Hosts](approvals.md#hosts) that `allowed_domains` does not list: ask a person, or deny")
        .flag("--approve-domains", "ask|deny", Sandboxes);
    ApprovalTimeout => setting("approval_timeout", Time(5, DAY), Value("10m"), Reload,
        "How long a question waits for its answer");
    RememberApprovals => setting("remember_approvals", SWITCH, Value("off"), Reload,
        "Whether a person can allow something for good, in `approvals.yaml` of the data folder")
        .flag("--remember-approvals", "on|off", Sandboxes);

    // Other MCP servers.
    McpServers => setting("mcp_servers", FileOnly, Nothing, Reload,
        "[MCP servers](tools.md#servers-for-everybody) that all sessions may use")
        .details("a table of names and parameters, as clients are configured");
    McpServersFile => setting("mcp_servers_file", Text, Nothing, Reload,
        "JSON file with [MCP servers](tools.md#servers-for-everybody) that all sessions may use, \
         in \
         the form of client configurations: `{\"mcpServers\": {…}}`")
        .flag("--mcp-servers-file", "FILE", Servers);
    McpAllowedHosts => setting("mcp_allowed_hosts", List, Nothing, Reload,
        "Hosts that callers over HTTP may register although they are at no public address");

    // Servers.
    KeepSessions => setting("keep_sessions", SWITCH, Derived("`on` for `serve`, else `off`"),
        Restart,
        "Whether sessions [outlive this process](sessions.md#sessions-that-outlive-their-server), \
         kept by a session daemon")
        .flag("--keep-sessions", "on|off", Servers);
    // A server of an earlier version passes it to its daemon by the former name.
    #[serde(alias = "Keeper")]
    DaemonName => setting("daemon_name", Text, Derived("the command"), Restart,
        "Name of the session daemon; servers of one user with the same one have the same sessions")
        .flag("--daemon-name", "NAME", Servers)
        .former(&[FormerName { name: "keeper", flag: Some("--keeper") }])
        .details("1 to 32 letters, digits, `_`, `-`");
    Profile => setting("profile",
        Words(&["default", "ipybox", "python-docker-mcp", "code-executer", "pyexec"]),
        Value("default"), Restart,
        "Set of tools that clients see: our own, or those of [another server](migrate/README.md)")
        .flag("--profile", "NAME", Sandboxes)
        .details("it brings its own defaults along, which every source here replaces");
    AllowedModules => setting("allowed_modules", List, Derived("those of the profile"), Restart,
        "Modules that code may import, in the profiles `python-docker-mcp` and `code-executer`")
        .details("[advice](migrate/python-docker-mcp.md#modules), not a wall; an empty list \
                  allows all");
    BlockedModules => setting("blocked_modules", List, Derived("those of the profile"), Restart,
        "Modules that it may not import");
    ImagesDir => setting("images_dir", Text, Value("images"), Restart,
        "Folder below the working folder in which the profile `ipybox` keeps pictures")
        .flag("--images-dir", "DIR", Sandboxes);
    SandboxConfig => setting("sandbox_config", Text, Nothing, NewSessions,
        "File in which ipybox says [what code may reach](migrate/ipybox.md#options)")
        .flag("--sandbox-config", "FILE", Sandboxes);
    DataDir => setting("data_dir", Text,
        Derived("`cellblock` in `$XDG_DATA_HOME` (`~/.local/share`)"),
        NewSessions, "Folder for environments, packages and tools");

    // The HTTP service.
    Listen => setting("listen", Text, Value("127.0.0.1:8000"), Restart,
        "Where to listen: an address and a port, or a port on this machine")
        .flag("--listen", "ADDRESS:PORT", Service);
    Auth => setting("auth", Words(&["development", "off"]), Value("development"), Reload,
        "[Who may call](auth.md), if the configuration file names no issuer and no key: the \
         holder of a \
         token of our own, or everybody")
        .flag("--auth", "development|off", Service)
        .details("or a table in the file");
    PublicUrl => setting("public_url", Text, Derived("the address it listens at"), Restart,
        "Scheme, host and port by which clients know this server, such as \
         `https://cells.example.com`")
        .flag("--public-url", "URL", Service);
    AllowedHosts => setting("allowed_hosts", List, Nothing, Reload,
        "[Name](service.md#names-and-origins) of this server that requests may bear, beside \
         localhost \
         and its own address")
        .flag("--allowed-host", "HOST[:PORT]", Service);
    AllowedOrigins => setting("allowed_origins", List, Nothing, Reload,
        "Origin of pages that may use this server from a browser, such as \
         `https://app.example.com`")
        .flag("--allowed-origin", "ORIGIN", Service);
    TlsCert => setting("tls_cert", Text, Nothing, Reload,
        "PEM file with the chain of certificates for TLS")
        .flag("--tls-cert", "FILE", Service);
    TlsKey => setting("tls_key", Text, Nothing, Reload,
        "PEM file with the private key of the certificate")
        .flag("--tls-key", "FILE", Service)
        .details("not readable by everybody");
    MaxConnections => setting("max_connections", Number(1, 100_000), Value("4096"), Restart,
        "Connections that may be open at once")
        .flag("--max-connections", "N", Service);

    // Observability.
    LogLevel => setting("log_level", Words(LOG_LEVELS),
        Derived("`$RUST_LOG`, then `info` for servers, else `error`"), Restart,
        "How much to log to standard error")
        .flag("--log-level", "LEVEL", All)
        .details("also `critical` for `error` and `warning` for `warn`");
    LogFormat => setting("log_format", Words(&["text", "json"]), Value("text"), Restart,
        "How lines of [the log](operations.md#the-log) are written")
        .flag("--log-format", "text|json", All);
    OtlpEndpoint => setting("otlp_endpoint", Text,
        Derived("`$OTEL_EXPORTER_OTLP_ENDPOINT`, else none"), Restart,
        "Collector that [traces](operations.md#traces) are sent to, such as \
         `http://127.0.0.1:4318`")
        .flag("--otlp-endpoint", "URL", Servers)
        .details("an `http` or `https` address without a user name");
    AuditFile => setting("audit_file", Text, Nothing, Restart,
        "File that every decision is recorded in, as a chain of lines that \
         [can be verified](operations.md#the-audit-log)")
        .flag("--audit-file", "FILE", Servers)
        .details("in a folder that others cannot write and sandboxes cannot see");
    AuditSync => setting("audit_sync", Words(&["interval", "always"]), Value("interval"), Restart,
        "When records are on the disk: within a second, or before a call goes on");
    AuditFailure => setting("audit_failure", Words(&["refuse", "continue"]), Value("refuse"),
        Restart,
        "Whether new work is refused while records cannot be written");
    AuditFileSize => setting("audit_file_size", Size(MIB, TIB), Value("64M"), Restart,
        "Size of an audit file after which the chain goes on in a new one");
    AuditRecords => setting("audit_records", Number(100, 1_000_000_000), Value("10000"), Restart,
        "Audit records of one session in an hour");
}

#[cfg(test)]
mod tests {
    use super::super::checks::tests::case;
    use super::super::{ConfigError, ProfileName};
    use super::*;

    #[test]
    fn every_name_is_that_of_one_row() {
        let names = || {
            let former = |row: &'static Setting| row.former.iter().map(|former| former.name);
            ROWS.iter()
                .flat_map(move |row| std::iter::once(row.name).chain(former(row)))
        };
        let flags = || ROWS.iter().filter_map(|row| row.flag.as_ref());
        let words = || {
            let former = ROWS.iter().flat_map(|row| row.former);
            flags()
                .flat_map(|flag| [Some(flag.name), flag.alias])
                .chain(former.map(|former| former.flag))
                .flatten()
        };
        for key in Key::all() {
            assert_eq!(Key::from_name(key.name()), Some((key, Spelling::Present)));
            for former in key.row().former {
                assert_eq!(Key::from_name(former.name), Some((key, Spelling::Former)));
            }
        }
        for name in names() {
            assert_eq!(names().filter(|other| *other == name).count(), 1, "{name}");
        }
        for flag in words() {
            assert!(flag.starts_with("--"), "{flag}");
            assert_eq!(words().filter(|other| *other == flag).count(), 1, "{flag}");
        }
    }

    #[test]
    fn the_ends_of_every_range_are_taken_and_what_lies_beyond_is_refused() {
        for key in Key::all() {
            let values = key.row().values;
            let (Size(least, most) | Time(least, most) | Number(least, most)) = values else {
                continue;
            };
            // So that the least memory of a family is not below that of a session.
            let memory = match key {
                Key::FamilyMemory => "memory: 64M\n",
                _ => "",
            };
            let written = |value: u64| case().yaml(&format!("{memory}{}: {value}", key.name()));
            for value in [least, most] {
                written(value).settings();
            }
            let beyond = [least.checked_sub(1), Some(most + 1)];
            for value in beyond.into_iter().flatten() {
                // Unlimited, where that is allowed.
                if (key, value) == (Key::NetworkBandwidth, 0) {
                    continue;
                }
                let refusal = written(value).refusal();
                assert!(refusal.contains(&values.range()), "{refusal}");
            }
        }
    }

    #[test]
    fn every_word_of_a_choice_is_taken_and_others_are_refused() {
        for key in Key::all() {
            let Words(words) = key.row().values else {
                continue;
            };
            let refused = |word: &str| {
                let result = case().yaml(&format!("{}: '{word}'", key.name())).result();
                // Without an engine, containers are rejected for another reason.
                matches!(result, Err(ConfigError::Invalid(_)))
            };
            for word in words {
                assert!(!refused(word), "{} {word}", key.name());
            }
            assert!(refused("other"), "{}", key.name());
        }
        let Words(profiles) = Key::Profile.row().values else {
            panic!("a profile is a word")
        };
        assert_eq!(profiles, ProfileName::ALL.map(ProfileName::name));
    }

    #[test]
    fn texts_lose_their_markup_and_keep_other_brackets() {
        assert_eq!(
            without_markup("What [sandboxes](a.md#b) and `c[:ro]` are [default: d]"),
            "What sandboxes and c[:ro] are [default: d]"
        );
    }
}
