//! Checks of an engine before a container is made: whether it is reachable, what it can enforce,
//! and whether the image is suitable. `doctor` shows all of it; the backend uses the same
//! functions.
//!
//! Nothing is pulled and nothing is left behind. The actual properties of a container are known
//! only after it was made.

use bollard::models::SystemInfo;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::engine::{Engine, EngineAddress, EngineError, EngineKind, ImageProbe, ImageProbeError};
use super::image::{NAMES, OLDEST, wrong_platform};

/// The subject of the checks.
pub struct Examined<'a> {
    pub kind: EngineKind,
    pub address: &'a EngineAddress,
    pub image: &'a str,
    pub runtime: Option<&'a str>,
    /// Sessions may reach at least one destination.
    pub has_network: bool,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EngineFinding {
    pub name: &'static str,
    pub state: FindingState,
    /// What was found.
    pub what: String,
    /// Why it is not as required.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cure: Option<String>,
}

/// The outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FindingState {
    Fine,
    Missing,
}

impl EngineFinding {
    fn fine(name: &'static str, what: impl Into<String>) -> EngineFinding {
        EngineFinding {
            name,
            state: FindingState::Fine,
            what: what.into(),
            why: None,
            cure: None,
        }
    }

    fn missing(
        name: &'static str,
        why: impl Into<String>,
        cure: impl Into<String>,
    ) -> EngineFinding {
        let (why, cure) = (Some(why.into()), Some(cure.into()));
        EngineFinding {
            name,
            state: FindingState::Missing,
            what: String::new(),
            why,
            cure,
        }
    }
}

/// Checks an engine and an image. An unreachable engine yields a single finding.
pub async fn examine(examined: &Examined<'_>) -> Vec<EngineFinding> {
    let connected = async {
        let engine = Engine::connect(examined.kind, examined.address).await?;
        let info = engine.info().await?;
        Ok::<_, EngineError>((engine, info))
    };
    match connected.await {
        Ok((engine, info)) => {
            let mut findings = about_engine(&info, examined);
            findings.push(about_image(&engine, &info, examined).await);
            findings
        }
        Err(error) => vec![EngineFinding::missing(
            "engine",
            reason(&error),
            start_cure(examined, &error),
        )],
    }
}

/// Returns only the reason: the address and the remedy are shown beside it.
fn reason(error: &EngineError) -> String {
    match error {
        EngineError::Unreachable { kind, address, why } => {
            format!("{} cannot be reached at {address}: {why}", kind.name())
        }
        other => other.to_string(),
    }
}

fn start_cure(examined: &Examined<'_>, error: &EngineError) -> String {
    let is_forbidden =
        matches!(error, EngineError::Unreachable { why, .. } if why.contains("ermission denied"));
    let variable = examined.kind.variable();
    match (examined.address, examined.kind) {
        (EngineAddress::Unix(_), EngineKind::Docker) if is_forbidden => {
            "run it as a user who may use Docker: root, a member of the group docker, or the owner \
             of a rootless daemon"
                .to_owned()
        }
        (EngineAddress::Unix(_), EngineKind::Docker) => {
            format!("start it (systemctl start docker), or name another one with {variable}")
        }
        (EngineAddress::Unix(_), EngineKind::Podman) => {
            format!(
                "start its service (systemctl --user start podman.socket), or name another one \
                     with {variable}"
            )
        }
        (EngineAddress::Tcp(_), _) => format!(
            "see whether it listens there without TLS, and what \
                                               {variable} says"
        ),
        (EngineAddress::Tls { .. }, _) => {
            "see whether it listens there, and whether ca.pem, cert.pem and key.pem in \
             DOCKER_CERT_PATH are those of this engine"
                .to_owned()
        }
        (EngineAddress::Ssh(_), _) => {
            "try `docker version` over ssh by hand: it must need no password, know the host, and \
             find docker there"
                .to_owned()
        }
    }
}

fn about_engine(info: &SystemInfo, examined: &Examined<'_>) -> Vec<EngineFinding> {
    let version = info
        .server_version
        .as_deref()
        .unwrap_or("of an unknown version");
    let engine = format!("{} {version} at {}", examined.kind.name(), examined.address);
    let mut findings = vec![
        EngineFinding::fine("engine", engine),
        runtime(info, examined),
        system_calls(info, examined),
        users(info),
        resources(info),
    ];
    if examined.has_network && !examined.address.is_local() {
        findings.push(EngineFinding::missing(
            "network",
            "allowed domains and secrets need an engine of this machine",
            "leave them out, or use an engine of this machine or --backend native",
        ));
    }
    findings
}

fn runtime(info: &SystemInfo, examined: &Examined<'_>) -> EngineFinding {
    let name = "runtime";
    let usual = usual_runtime(info);
    match examined
        .runtime
        .map(|wanted| (wanted, missing_runtime(examined.kind, info, wanted)))
    {
        Some((_, Some(MissingRuntime { why, cure }))) => EngineFinding::missing(name, why, cure),
        Some((wanted, None)) => EngineFinding::fine(
            name,
            format!("{wanted}{}", other_runtimes(info, &[Some(wanted), usual])),
        ),
        None => {
            let others = other_runtimes(info, &[usual]);
            EngineFinding::fine(
                name,
                format!(
                    "{}, the engine's usual one{others}",
                    usual.unwrap_or("not told")
                ),
            )
        }
    }
}

/// Why an engine would not make a container with a runtime, and how to fix it.
pub(super) struct MissingRuntime {
    pub(super) why: String,
    pub(super) cure: String,
}

/// Returns why an engine would not make containers with this runtime, as far as that is known
/// beforehand.
pub(super) fn missing_runtime(
    kind: EngineKind,
    info: &SystemInfo,
    wanted: &str,
) -> Option<MissingRuntime> {
    let known = known_runtimes(info);
    match kind {
        // An engine that lists none may know it anyway, and rejects the container if it does not.
        EngineKind::Docker if known.is_empty() || known.contains(&wanted) => None,
        EngineKind::Docker => Some(MissingRuntime {
            why: format!("the engine does not know the runtime {wanted}"),
            cure: format!(
                "name one that it knows ({}), or add {wanted} to the engine's settings",
                known.join(", ")
            ),
        }),
        // Its API accepts any name and makes every container with the runtime of the service.
        EngineKind::Podman if usual_runtime(info).is_some_and(|usual| usual == wanted) => None,
        EngineKind::Podman => Some(MissingRuntime {
            why: format!(
                "Podman makes all containers with {}",
                usual_runtime(info).unwrap_or("a runtime that it does not name")
            ),
            cure: format!(
                "set runtime = \"{wanted}\" in its containers.conf and start its service anew, or \
                 use Docker"
            ),
        }),
    }
}

fn known_runtimes(info: &SystemInfo) -> Vec<&str> {
    let mut known: Vec<&str> = info
        .runtimes
        .iter()
        .flat_map(|known| known.keys())
        .map(String::as_str)
        .collect();
    known.sort_unstable();
    known
}

/// Returns the default runtime of an engine. Podman reports its path.
fn usual_runtime(info: &SystemInfo) -> Option<&str> {
    let told = info.default_runtime.as_deref()?;
    told.rsplit('/').next().filter(|name| !name.is_empty())
}

fn other_runtimes(info: &SystemInfo, told: &[Option<&str>]) -> String {
    let others: Vec<&str> = known_runtimes(info)
        .into_iter()
        .filter(|name| !told.contains(&Some(name)))
        .collect();
    if others.is_empty() {
        String::new()
    } else {
        format!("; it also knows {}", others.join(", "))
    }
}

/// Returns whether the users of an engine's containers are other users on its machine, because it
/// has a user namespace.
pub(super) fn has_user_namespace(info: &SystemInfo) -> bool {
    ["userns", "rootless"]
        .into_iter()
        .any(|name| has_option(info, name))
}

fn has_option(info: &SystemInfo, name: &str) -> bool {
    let options = info.security_options.iter().flatten();
    // Docker and Podman write `name=seccomp,profile=builtin`, older engines the bare name.
    options
        .flat_map(|option| option.split(','))
        .any(|part| part.strip_prefix("name=").unwrap_or(part) == name)
}

fn system_calls(info: &SystemInfo, examined: &Examined<'_>) -> EngineFinding {
    let name = "system-calls";
    if examined.kind == EngineKind::Podman && !examined.address.is_local() {
        return EngineFinding::missing(
            name,
            "Podman takes the list of system calls only as a file of its own machine",
            "use Podman over a Unix socket, or Docker",
        );
    }
    match has_option(info, "seccomp") {
        true => EngineFinding::fine(name, "seccomp, with Cellblock's own list"),
        false => EngineFinding::missing(
            name,
            "the engine has no seccomp",
            "use a kernel with CONFIG_SECCOMP_FILTER and an engine that was built with seccomp",
        ),
    }
}

fn users(info: &SystemInfo) -> EngineFinding {
    EngineFinding::fine(
        "identity",
        match (has_option(info, "rootless"), has_option(info, "userns")) {
            (true, _) => "the engine is rootless; sessions are users of its user namespace",
            (_, true) => "the engine has a user namespace; sessions are users of it",
            _ => "each container is another host user",
        },
    )
}

fn resources(info: &SystemInfo) -> EngineFinding {
    let version = info
        .cgroup_version
        .as_ref()
        .map(ToString::to_string)
        .unwrap_or_default();
    let is_rootless = has_option(info, "rootless");
    // Properties that an engine does not report are tested when a container is made.
    let lacks: Vec<&str> = [
        ("memory", info.memory_limit),
        ("processes", info.pids_limit),
        ("CPU time", info.cpu_cfs_quota),
    ]
    .into_iter()
    .filter_map(|(what, can)| (can == Some(false)).then_some(what))
    .collect();
    if lacks.is_empty() {
        let version = if version.is_empty() {
            String::new()
        } else {
            format!(" (version {version})")
        };
        return EngineFinding::fine(
            "resources",
            format!("control groups{version} for memory, processes and CPU time"),
        );
    }
    let cure = match is_rootless {
        true => {
            "let systemd delegate the controllers to the user of the engine: Delegate=cpu cpuset \
             memory pids for user@.service"
        }
        false => {
            "boot with the controllers switched on (cgroup_enable=memory), or use control groups \
             version 2"
        }
    };
    EngineFinding::missing(
        "resources",
        format!("the engine cannot limit {}", lacks.join(", ")),
        cure,
    )
}

/// The report of Python in an image about itself.
#[derive(Debug, Deserialize)]
struct Said {
    version: (u32, u32, u32),
    ipython: bool,
}

const ASKED: &str = "import importlib.util, json, sys; print(json.dumps({'version': \
                     sys.version_info[:3], 'ipython': importlib.util.find_spec('IPython') is not \
                     None}))";

async fn about_image(engine: &Engine, info: &SystemInfo, examined: &Examined<'_>) -> EngineFinding {
    let name = examined.image;
    let (seen, another) = ("image", "name another image with --container-tag");
    let facts = match engine.image_facts(name).await {
        Ok(facts) => facts,
        Err(EngineError::Missing(_)) => {
            let cure = "the first session fetches it if a registry has it; make it with `cellblock \
                        image build`, or name another with --container-tag";
            return EngineFinding::missing(seen, format!("the engine has no {name}"), cure);
        }
        Err(error) => return EngineFinding::missing(seen, reason(&error), another),
    };
    let (system, architecture) = (
        facts.system.unwrap_or_default(),
        facts.architecture.unwrap_or_default(),
    );
    let machine = info.architecture.as_deref().unwrap_or_default();
    if let Some(why) = wrong_platform(name, &system, &architecture, machine) {
        return EngineFinding::missing(seen, why, another);
    }
    let platform = format!("{}/{}", or_unknown(&system), or_unknown(&architecture));
    match python_of(engine, &facts.id).await {
        Ok(said) => about_python(name, &platform, &said),
        Err(why) => EngineFinding::missing(seen, format!("{name} ({platform}): {why}"), another),
    }
}

fn or_unknown(text: &str) -> &str {
    if text.is_empty() { "not told" } else { text }
}

fn about_python(image: &str, platform: &str, said: &Said) -> EngineFinding {
    let (major, minor, patch) = said.version;
    let (oldest, oldest_minor) = OLDEST;
    if (major, minor) < OLDEST {
        return EngineFinding::missing(
            "image",
            format!(
                "{image} has Python {major}.{minor}; sessions need {oldest}.{oldest_minor} or newer"
            ),
            "name another image with --container-tag",
        );
    }
    let ipython = if said.ipython {
        "with IPython"
    } else {
        "IPython is added beside it"
    };
    EngineFinding::fine(
        "image",
        format!("{image} ({platform}), Python {major}.{minor}.{patch}, {ipython}"),
    )
}

async fn python_of(engine: &Engine, image: &str) -> Result<Said, String> {
    for program in NAMES {
        let arguments = ["-I", "-c", ASKED].map(str::to_owned).to_vec();
        let probe = ImageProbe {
            image: image.to_owned(),
            program: program.to_owned(),
            arguments,
        };
        match engine.ask(&probe, &CancellationToken::new()).await {
            Ok(said) => {
                return serde_json::from_str(said.trim())
                    .map_err(|_| "its Python is not understood".to_owned());
            }
            Err(ImageProbeError::NoProgram(_)) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    Err("it has no Python that could be started".to_owned())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn examined(kind: EngineKind, address: &EngineAddress) -> Examined<'_> {
        Examined {
            kind,
            address,
            image: "python",
            runtime: None,
            has_network: false,
        }
    }

    fn unix() -> EngineAddress {
        EngineAddress::Unix(PathBuf::from("/x.sock"))
    }

    /// Returns the info of a typical Docker.
    fn usual() -> SystemInfo {
        serde_json::from_value(serde_json::json!({
            "ServerVersion": "28.2", "Architecture": "x86_64",
            "DefaultRuntime": "runc", "CgroupVersion": "2",
            "Runtimes": {"runc": {}, "runsc": {}},
            "SecurityOptions": ["name=seccomp,profile=builtin", "name=cgroupns"],
            "MemoryLimit": true, "PidsLimit": true, "CpuCfsQuota": true,
        }))
        .unwrap()
    }

    /// Returns the info of a typical Podman: paths, and runtimes that may not be installed.
    fn usual_podman() -> SystemInfo {
        serde_json::from_value(serde_json::json!({
            "ServerVersion": "4.3.1", "Architecture": "amd64", "DefaultRuntime": "/usr/bin/crun",
            "Runtimes": {"crun": {"path": "/usr/bin/crun"}, "runsc": {"path": "/usr/bin/runsc"}},
            "SecurityOptions": ["name=seccomp,profile=default"],
        }))
        .unwrap()
    }

    fn of(findings: &[EngineFinding], name: &str) -> EngineFinding {
        findings
            .iter()
            .find(|finding| finding.name == name)
            .expect("it was looked at")
            .clone()
    }

    #[test]
    fn a_usual_engine_is_fine_and_says_what_it_has() {
        let address = unix();
        let findings = about_engine(&usual(), &examined(EngineKind::Docker, &address));
        assert!(
            findings
                .iter()
                .all(|finding| finding.state == FindingState::Fine),
            "{findings:?}"
        );
        assert_eq!(
            of(&findings, "engine").what,
            "Docker 28.2 at unix:///x.sock"
        );
        assert_eq!(
            of(&findings, "runtime").what,
            "runc, the engine's usual one; it also knows runsc"
        );
        assert!(of(&findings, "resources").what.contains("version 2"));
        assert!(of(&findings, "identity").what.contains("another host user"));
    }

    #[test]
    fn what_an_engine_lacks_has_a_reason_and_a_cure() {
        let address = unix();
        let check = |change: fn(&mut SystemInfo), name: &str, words: [&str; 2]| {
            let mut info = usual();
            change(&mut info);
            let finding = of(
                &about_engine(&info, &examined(EngineKind::Docker, &address)),
                name,
            );
            assert_eq!(finding.state, FindingState::Missing, "{finding:?}");
            let (why, cure) = (finding.why.unwrap(), finding.cure.unwrap());
            assert!(
                why.contains(words[0]) && cure.contains(words[1]),
                "{why}\n{cure}"
            );
        };
        check(
            |info| info.security_options = None,
            "system-calls",
            ["no seccomp", "CONFIG_SECCOMP_FILTER"],
        );
        check(
            |info| info.memory_limit = Some(false),
            "resources",
            ["cannot limit memory", "cgroup_enable=memory"],
        );
        let rootless: fn(&mut SystemInfo) = |info| {
            info.pids_limit = Some(false);
            info.security_options =
                Some(vec!["name=seccomp".to_owned(), "name=rootless".to_owned()]);
        };
        check(
            rootless,
            "resources",
            ["cannot limit processes", "Delegate="],
        );
    }

    #[test]
    fn an_unknown_runtime_is_answered_with_the_known_ones() {
        let address = unix();
        let asked = |runtime| {
            about_engine(
                &usual(),
                &Examined {
                    runtime,
                    ..examined(EngineKind::Docker, &address)
                },
            )
        };
        assert_eq!(of(&asked(Some("runsc")), "runtime").what, "runsc"); // control
        let finding = of(&asked(Some("kata")), "runtime");
        assert!(finding.cure.unwrap().contains("runc, runsc"));
    }

    #[test]
    fn podman_has_one_runtime_whatever_it_lists() {
        let info = |usual: &str| SystemInfo {
            default_runtime: Some(usual.to_owned()),
            ..usual_podman()
        };
        let missing = |usual: &str| missing_runtime(EngineKind::Podman, &info(usual), "runsc");
        assert!(missing("/usr/bin/runsc").is_none() && missing("runsc").is_none()); // control
        for usual in ["/usr/sbin/runc", "crun", "/usr/bin/runsc-old", ""] {
            assert!(
                missing(usual).is_some_and(|missing| missing.cure.contains("containers.conf")),
                "{usual}"
            );
        }
    }

    #[test]
    fn a_user_namespace_is_known_by_the_whole_name_of_an_option() {
        let told = |options: &[&str]| {
            let options = options.iter().map(|option| (*option).to_owned()).collect();
            has_user_namespace(&SystemInfo {
                security_options: Some(options),
                ..usual()
            })
        };
        let seccomp = "name=seccomp,profile=builtin";
        for option in [
            "name=userns",
            "name=rootless",
            "userns",
            "rootless",
            "name=userns,mode=auto",
        ] {
            assert!(told(&[seccomp, option]), "{option}");
        }
        for option in [
            "name=cgroupns",
            "name=userns-remapped",
            "name=notrootless",
            "name=seccomp,profile=userns",
            "",
        ] {
            assert!(!told(&[seccomp, option]), "{option}");
        }
        assert!(!has_user_namespace(&SystemInfo {
            security_options: None,
            ..usual()
        }));
    }

    #[test]
    fn engines_elsewhere_cannot_do_everything() {
        let there = EngineAddress::Tcp("tcp://there:2375".to_owned());
        let docker = Examined {
            has_network: true,
            ..examined(EngineKind::Docker, &there)
        };
        let findings = about_engine(&usual(), &docker);
        assert_eq!(of(&findings, "network").state, FindingState::Missing);
        assert_eq!(of(&findings, "system-calls").state, FindingState::Fine); // control
        let findings = about_engine(&usual(), &examined(EngineKind::Podman, &there));
        assert_eq!(of(&findings, "system-calls").state, FindingState::Missing);
    }

    #[test]
    fn an_old_python_is_named_with_what_is_needed() {
        let said = |version| Said {
            version,
            ipython: false,
        };
        assert_eq!(
            about_python("x", "linux/amd64", &said((3, 11, 2))).state,
            FindingState::Fine
        ); // control
        let finding = about_python("x", "linux/amd64", &said((3, 9, 1)));
        assert!(
            finding
                .why
                .unwrap()
                .contains("has Python 3.9; sessions need 3.10")
        );
    }

    #[test]
    fn every_way_to_an_engine_has_a_cure_of_its_own() {
        let error = |why: &str| EngineError::Unreachable {
            kind: EngineKind::Docker,
            address: "there".to_owned(),
            why: why.to_owned(),
        };
        let cure = |address: &EngineAddress, why: &str| {
            start_cure(&examined(EngineKind::Docker, address), &error(why))
        };
        assert!(cure(&unix(), "No such file").contains("systemctl start docker"));
        assert!(cure(&unix(), "Permission denied (os error 13)").contains("group docker"));
        let tls = EngineAddress::Tls {
            address: "tcp://there".to_owned(),
            certificates: PathBuf::new(),
        };
        assert!(cure(&tls, "unknown issuer").contains("ca.pem"));
        assert!(cure(&EngineAddress::Ssh("ssh://there".to_owned()), "x").contains("ssh"));
    }
}
