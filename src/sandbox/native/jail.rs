//! The running jail: its processes, its traces on the host, and the isolation it enforces.

use std::any::Any;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::{Arc, Weak};

use cellblock_jail::cgroup;
use cellblock_jail::identity::{Identity, IdentityLease};
use cellblock_jail::posture::Posture;
use cellblock_jail::sysfs::ShownLimits;
use cellblock_jail::wire::{OmittedLayer, Programs, ResourceLimit, Scratch, Setup, ZygoteCommand};
use cellblock_jail::{probe, root};

use super::instance::Instance;
use super::sandbox::{FamilyChoice, NativeSandbox};
use super::warden::{Guardian, Slots, WardenClient};
use super::{NativeSettings, STEP_TIMEOUT, WarmEnvironment};
use crate::sandbox::masks::{self, Mask};
use crate::sandbox::{
    Isolation, LaunchError, LayerKind, LayerState, Sandbox, SandboxLimits, SandboxNetwork,
};

/// Maximum number of open descriptors of a session.
const OPEN_FILES: u64 = 4_096;

/// Variables that the runner adds to every session (`_prefer_plain_output` in `shell.py`).
const PLAIN_OUTPUT: [(&str, &str); 4] = [
    ("NO_COLOR", "1"),
    ("TERM", "dumb"),
    ("PAGER", "cat"),
    ("MPLBACKEND", "module://matplotlib_inline.backend_inline"),
];

/// State available after the preparation.
pub(super) struct Jail {
    pub(super) warden: Arc<WardenClient>,
    pub(super) slots: Slots,
    /// The free family numbers.
    pub(super) families: Slots,
    pub(super) instance: Instance,
    pub(super) identity: Identity,
    pub(super) isolation: Isolation,
    /// The work folder is not a mount of the operator's.
    pub(super) owns_work_folder: bool,
    pub(super) network: Option<Arc<SandboxNetwork>>,
    /// Whether the code of sessions may start programs.
    pub(super) programs: Programs,
    /// The environment variables of a fresh session.
    pub(super) variables: Arc<Vec<(String, String)>>,
    /// The layers that the sandboxes of this jail lack.
    pub(super) leave_out: Vec<OmittedLayer>,
    /// The server's own posture, from which a session's must differ.
    pub(super) host: Posture,
    _lease: IdentityLease,
    _environment: Vec<Box<dyn Any + Send + Sync>>,
}

impl Jail {
    /// Starts the jail's processes except for the warm interpreter. Fails if a mandatory layer is
    /// missing.
    pub(super) async fn start(
        settings: &NativeSettings,
        mut environment: WarmEnvironment,
    ) -> Result<Jail, LaunchError> {
        let failed = |attempt: &'static str| {
            move |error: io::Error| LaunchError::Start {
                why: format!("{attempt}: {error}"),
            }
        };
        let no_runtime_folder = |error: io::Error| {
            // Happens in a unit with ProtectSystem=strict.
            let cure = if error.kind() == io::ErrorKind::ReadOnlyFilesystem {
                "; cure: set RuntimeDirectory=cellblock in the unit of the server"
            } else {
                ""
            };
            LaunchError::Start {
                why: format!("the runtime folder cannot be used: {error}{cure}"),
            }
        };
        let mut instance = Instance::register(&settings.runtime_dir).map_err(no_runtime_folder)?;
        let guardian =
            Guardian::start(&settings.guardian).map_err(failed("the jail did not start"))?;
        let process = guardian
            .process()
            .map_err(failed("the jail did not start"))?;
        instance
            .make_cgroups(process)
            .await
            .map_err(no_runtime_folder)?;
        let lease = IdentityLease::take(&settings.runtime_dir)
            .map_err(failed("no user ids for sessions"))?;
        let identity = lease.identity;
        let (isolation, leave_out) = Jail::plan_isolation(settings, identity, instance.cgroups());
        if let Some((kind, why)) = isolation.first_unallowed(&settings.allowed_to_be_missing()) {
            return Err(LaunchError::LayerMissing {
                kind,
                why: why.to_owned(),
            });
        }
        if settings.programs == Programs::Refused && leave_out.contains(&OmittedLayer::Seccomp) {
            // Without the filter the kernel would refuse nothing, and programs could start without
            // approval.
            let why =
                "programs that need approval can be kept from starting only with it".to_owned();
            return Err(LaunchError::LayerMissing {
                kind: LayerKind::SystemCalls,
                why,
            });
        }
        environment.variables.push(java_options(&settings.limits));
        let variables = environment
            .variables
            .iter()
            .chain(&settings.variables)
            .cloned();
        let variables = variables
            .chain(PLAIN_OUTPUT.map(|(name, value)| (name.to_owned(), value.to_owned())))
            .collect();
        let setup = Setup {
            identity,
            binds: environment.binds,
            mounts: settings.mounts.clone(),
            masks: settings.masks_inside(),
            scratch: scratch(&settings.limits),
            scratch_apart: scratch(&settings.limits_apart),
            zygote: ZygoteCommand {
                programs: settings.programs,
                program: environment.python,
                arguments: environment.arguments,
                environment: environment.variables,
                preload: environment.preload,
                quick: environment.quick,
                session_environment: settings.variables.clone(),
            },
            egress: environment.network.as_ref().map(SandboxNetwork::listeners),
            rlimits: rlimits(&settings.limits, instance.tree().is_some()),
            rlimits_apart: rlimits(&settings.limits_apart, instance.tree().is_some()),
            shown_limits: ShownLimits {
                memory: settings.limits.memory,
                cpus: instance
                    .tree()
                    .filter(|tree| tree.limits_cpu())
                    .map(|_| settings.limits.cpus),
            },
            cgroups: instance
                .tree()
                .map(cgroup::CgroupTree::folders)
                .unwrap_or_default(),
            leave_out,
            test_switches: settings.test_switches.clone(),
        };
        let warden = WardenClient::start(guardian, &setup, instance.tree())
            .await
            .map_err(failed("the jail did not start"))?;
        if let Err(why) = warden.ready(STEP_TIMEOUT).await {
            warden.kill();
            warden.end().await;
            return Err(LaunchError::Start { why });
        }
        let host = Posture::read(std::process::id()).map_err(failed(
            "the kernel does not report the posture of processes",
        ))?;
        Ok(Jail {
            warden: Arc::new(warden),
            slots: Slots::new(identity.slots()),
            families: Slots::new(identity.slots()),
            instance,
            identity,
            isolation,
            owns_work_folder: !setup
                .mounts
                .iter()
                .any(|mount| mount.inside == Path::new(root::WORK)),
            network: environment.network.map(Arc::new),
            programs: settings.programs,
            variables: Arc::new(variables),
            leave_out: setup.leave_out,
            host,
            _lease: lease,
            _environment: environment.held,
        })
    }

    /// Ends everything in the jail and removes its traces.
    pub(super) async fn end(&self) {
        // When its lifeline is closed, the guardian ends everything and removes the control groups.
        self.warden.end().await;
        self.instance.remove();
    }

    /// Determines which layers this machine can enforce, and which must be left out.
    fn plan_isolation(
        settings: &NativeSettings,
        identity: Identity,
        cgroups: Result<&cgroup::CgroupTree, &str>,
    ) -> (Isolation, Vec<OmittedLayer>) {
        let mut isolation = Isolation::default();
        let mut leave_out = settings.test_switches.layers_left_out().to_vec();
        let enforced = |how: &str| LayerState::Enforced {
            how: how.to_owned(),
        };
        let namespaces = Some(probe::user_namespaces())
            .filter(|finding| !finding.works)
            .unwrap_or_else(probe::tracing);
        isolation.record(
            LayerKind::Namespaces,
            if namespaces.works {
                enforced("user, mount, pid, network, ipc, uts and cgroup namespaces")
            } else {
                LayerState::Missing {
                    why: with_cure(&namespaces),
                }
            },
        );
        isolation.record(
            LayerKind::Identity,
            match identity {
                Identity::Block { .. } => {
                    enforced("each session, with its forks, is a host user of its own")
                }
                Identity::Caller { .. } => LayerState::Reduced {
                    how: "sessions run as the server's own unprivileged user".to_owned(),
                    why: "only a server started by root can give each session a user of its own"
                        .to_owned(),
                },
            },
        );
        isolation.record(
            LayerKind::Privileges,
            enforced("no capability, no_new_privs"),
        );
        for (kind, left_out, finding) in [
            (
                LayerKind::SystemCalls,
                OmittedLayer::Seccomp,
                probe::seccomp(),
            ),
            (
                LayerKind::Landlock,
                OmittedLayer::Landlock,
                probe::landlock(),
            ),
        ] {
            let layer = if leave_out.contains(&left_out) {
                LayerState::Missing {
                    why: "it was left out".to_owned(),
                }
            } else if let (true, Some(why)) = (finding.works, &finding.limitation) {
                LayerState::Reduced {
                    how: finding.what.clone(),
                    why: why.clone(),
                }
            } else if finding.works {
                enforced(&finding.what)
            } else {
                leave_out.push(left_out);
                LayerState::Missing {
                    why: with_cure(&finding),
                }
            };
            isolation.record(kind, layer);
        }
        isolation.record(LayerKind::Network, enforced("an empty network namespace"));
        isolation.record(LayerKind::Resources, resources(cgroups));
        (isolation, leave_out)
    }
}

impl NativeSettings {
    /// Returns the layers that may be missing: those the operator allows to be missing, and those a
    /// test leaves out.
    fn allowed_to_be_missing(&self) -> BTreeSet<LayerKind> {
        let left_out = self.test_switches.layers_left_out().iter();
        let left_out = left_out.map(|left_out| match left_out {
            OmittedLayer::Seccomp => LayerKind::SystemCalls,
            OmittedLayer::Landlock => LayerKind::Landlock,
        });
        self.allow_missing.iter().copied().chain(left_out).collect()
    }

    /// Returns the masks that the jail applies.
    fn masks_inside(&self) -> Vec<Mask> {
        let shown: Vec<(&Path, &Path)> = self
            .mounts
            .iter()
            .map(|mount| (mount.host.as_path(), mount.inside.as_path()))
            .collect();
        masks::inside(&self.masks, &shown)
    }
}

/// Returns the variable that limits Java's memory. Java finds its limit through the mount table,
/// which is empty inside, and would otherwise assume the machine's memory.
fn java_options(limits: &SandboxLimits) -> (String, String) {
    let options = format!("-XX:MaxRAM={}", limits.memory);
    ("JAVA_TOOL_OPTIONS".to_owned(), options)
}

/// Returns the sizes of the memory file systems of sandboxes with these limits.
fn scratch(limits: &SandboxLimits) -> Scratch {
    Scratch {
        bytes: limits.disk,
        files: limits.files,
        shared_memory: limits.memory / 2,
    }
}

/// Returns the resource limits of processes in sandboxes with these limits.
fn rlimits(limits: &SandboxLimits, has_control_groups: bool) -> Vec<ResourceLimit> {
    use rustix::process::Resource;
    let limit = |resource: Resource, value: u64| ResourceLimit {
        resource: resource as u32,
        value,
    };
    let mut all = vec![
        // One, not zero: with zero the kernel still passes a crash to the host's core handler if
        // that is a program.
        limit(Resource::Core, 1),
        limit(Resource::Nofile, OPEN_FILES),
        // One byte more than fits, so that a full disk is reported as such and not as a file that
        // is too large.
        limit(Resource::Fsize, limits.disk + 1),
        // Small enough for every host to grant, large enough for programs that lock memory by
        // default.
        limit(Resource::Memlock, 64 * 1024),
        limit(Resource::Sigpending, 1_024),
        limit(Resource::Msgqueue, 0),
        limit(Resource::Nproc, u64::from(limits.processes)),
    ];
    if !has_control_groups {
        all.push(limit(Resource::Data, limits.memory));
    }
    all
}

/// Makes one empty sandbox and removes it again, to find out what this machine enforces. Missing
/// layers are part of the result.
pub async fn trial(mut settings: NativeSettings) -> Result<Isolation, LaunchError> {
    settings.allow_missing = LayerKind::ALL.into_iter().collect();
    // No interpreter is started, so no environment is required.
    let nothing = WarmEnvironment {
        binds: Vec::new(),
        python: String::new(),
        arguments: Vec::new(),
        variables: Vec::new(),
        preload: Vec::new(),
        quick: true,
        network: None,
        held: Vec::new(),
    };
    let jail = Jail::start(&settings, nothing).await?;
    let slot = jail.slots.take().expect("a fresh jail has free slots");
    let begun = NativeSandbox::begin(
        &jail,
        slot,
        &settings.limits,
        FamilyChoice::New { apart: false },
        Weak::new(),
    )
    .await;
    let isolation = match begun {
        Ok(mut sandbox) => {
            let prepared = sandbox.prepared().await;
            sandbox.destroy().await;
            prepared.map(|_| sandbox.isolation().clone())
        }
        Err(error) => Err(error),
    };
    jail.end().await;
    isolation
}

fn with_cure(finding: &probe::ProbeResult) -> String {
    match &finding.cure {
        Some(cure) => format!("{}; cure: {cure}", finding.what),
        None => finding.what.clone(),
    }
}

/// Returns the state of the resource layer.
fn resources(cgroups: Result<&cgroup::CgroupTree, &str>) -> LayerState {
    match cgroups {
        Ok(tree) if tree.limits_cpu() => LayerState::Enforced {
            how: "control groups for memory, CPU time and processes".to_owned(),
        },
        Ok(_) => LayerState::Reduced {
            how: "control groups for memory and processes; CPU time is not limited".to_owned(),
            why: "systemd has delegated a control group without the cpu controller".to_owned(),
        },
        Err(why) => LayerState::Reduced {
            how: "limits per process (rlimits) and fixed-size file systems".to_owned(),
            why: why.to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_reduced_where_cpu_time_cannot_be_limited() {
        let tree = |limits_cpu| cgroup::CgroupTree::V2 {
            folder: "/group".into(),
            server: None,
            limits_cpu,
        };
        let LayerState::Reduced { how, why } = resources(Ok(&tree(false))) else {
            panic!("CPU time is not limited, and nothing says so")
        };
        assert!(
            how.contains("CPU time is not limited") && why.contains("cpu controller"),
            "{how}: {why}"
        );
        // Control: with that controller, everything is enforced.
        assert!(matches!(
            resources(Ok(&tree(true))),
            LayerState::Enforced { .. }
        ));
    }
}
