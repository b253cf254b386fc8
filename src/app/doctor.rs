//! `cellblock doctor`: what isolation this machine enforces, what it cannot, why, and the cure.
//!
//! The answer comes from a sandbox that is really made and taken away again, not from version numbers.

use std::fmt::Write;
use std::process::ExitCode;

use cellblock_jail::probe;
use serde_json::json;

use super::cli::DoctorArguments;
use super::{native_settings, packages_command, print};
use crate::config::Settings;
use crate::environment;
use crate::sandbox::native;
use crate::sandbox::{Isolation, LaunchError, Layer, LayerKind};

/// Carries out the command. Fails when sessions could not be started here as things are.
pub(super) async fn execute(arguments: &DoctorArguments, settings: &Settings) -> anyhow::Result<ExitCode> {
    let tried = native::trial(native_settings(settings)?).await;
    let usable = tried.as_ref().is_ok_and(|isolation| isolation.first_unallowed(&settings.allow_missing).is_none());
    let report = if arguments.json { as_json(&tried, usable)? } else { as_text(&tried, usable, settings)? };
    print(&report)?;
    Ok(if usable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn as_json(tried: &Result<Isolation, LaunchError>, usable: bool) -> anyhow::Result<String> {
    let report = match tried {
        Ok(isolation) => json!({ "usable": usable, "layers": isolation.layers }),
        Err(error) => json!({ "usable": false, "error": error.to_string(), "cure": cure(error) }),
    };
    Ok(serde_json::to_string_pretty(&report)? + "\n")
}

fn as_text(
    tried: &Result<Isolation, LaunchError>,
    usable: bool,
    settings: &Settings,
) -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    match tried {
        Ok(isolation) => write_layers(&mut text, isolation)?,
        Err(error) => {
            writeln!(text, "A sandbox cannot be made here: {error}")?;
            if let Some(cure) = cure(error) {
                writeln!(text, "Cure: {cure}")?;
            }
        }
    }
    writeln!(text, "\nPython environments: {}", environments(settings))?;
    writeln!(text, "Packages of sessions: {}", packages_command::summary(settings))?;
    let verdict = if usable { "Sessions can be started." } else { "Sessions cannot be started as things are." };
    writeln!(text, "\n{verdict}")?;
    Ok(text)
}

fn write_layers(text: &mut String, isolation: &Isolation) -> std::fmt::Result {
    writeln!(text, "Isolation of a session on this machine:")?;
    for kind in LayerKind::ALL {
        let (mark, how, why) = match isolation.layers.get(&kind) {
            Some(Layer::Enforced { how }) => ("enforced", how.as_str(), None),
            Some(Layer::Reduced { how, why }) => ("reduced", how.as_str(), Some(why)),
            Some(Layer::Missing { why }) => ("MISSING", "", Some(why)),
            None => ("MISSING", "", None),
        };
        writeln!(text, "  {:<13} {:<9} {how}", kind.name(), mark)?;
        if let Some(why) = why {
            writeln!(text, "  {:23} because {why}", "")?;
        }
        if let Some(cure) = cure_of(kind).filter(|_| mark != "enforced") {
            writeln!(text, "  {:23} cure: {cure}", "")?;
        }
    }
    Ok(())
}

/// What turns a reduced layer into an enforced one.
fn cure_of(kind: LayerKind) -> Option<&'static str> {
    match kind {
        LayerKind::Identity => {
            Some("start the server as root; it gives up root's rights for everything that runs code")
        }
        LayerKind::Resources => Some(
            "start the server as root, or inside a delegated cgroup: systemd-run --user --scope -p Delegate=yes cellblock …",
        ),
        LayerKind::Landlock => Some("use Linux 6.2 or newer"),
        _ => None,
    }
}

fn cure(error: &LaunchError) -> Option<String> {
    let namespaces = probe::user_namespaces();
    match error {
        LaunchError::Start { .. } | LaunchError::LayerMissing { kind: LayerKind::Namespaces, .. } => {
            namespaces.cure.or_else(|| {
                std::path::Path::new("/.dockerenv").exists().then(|| {
                    "inside Docker, start the container with --security-opt seccomp=unconfined --security-opt systempaths=unconfined"
                        .to_owned()
                })
            })
        }
        _ => None,
    }
}

fn environments(settings: &Settings) -> String {
    let built = environment::list(&settings.data_dir);
    let names: Vec<String> =
        built.iter().map(|built| format!("{} (Python {})", built.record.name, built.record.python_version)).collect();
    if names.is_empty() { "none yet; the first run builds one".to_owned() } else { names.join(", ") }
}
