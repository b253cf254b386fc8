//! `cellblock doctor`: which isolation this machine enforces, which it cannot, why, and the remedy.
//!
//! The result comes from a real sandbox that is created and destroyed, not from version numbers.
//! Where sessions run in containers, the engine and the image are checked first, and a container is
//! created only from a local image: nothing is pulled.

use std::fmt::Write;
use std::process::ExitCode;

use cellblock_jail::probe;
use serde_json::json;

use super::cli::DoctorArguments;
use super::output::print;
use super::{StartMode, containers, descriptors, native_settings, packages_command};
use crate::config::{BackendChoice, ContainerChoice, Settings};
use crate::environment;
use crate::sandbox::container::{EngineFinding, Examined, FindingState, examine};
use crate::sandbox::native;
use crate::sandbox::{Isolation, LaunchError, LayerKind, LayerState};

/// The findings.
struct Report {
    /// The engine and the image, where sessions run in containers.
    engine: Vec<EngineFinding>,
    /// The isolation of a test sandbox, if one was created.
    tried: Option<Result<Isolation, LaunchError>>,
    /// The limit of open files of this process.
    open_files: u64,
    usable: bool,
}

/// Executes the command. Fails if sessions cannot start in the current state.
pub(super) async fn execute(
    arguments: &DoctorArguments,
    settings: &Settings,
) -> anyhow::Result<ExitCode> {
    let (engine, tried) = match &settings.backend {
        BackendChoice::Native => (
            Vec::new(),
            Some(native::trial(native_settings(settings)?).await),
        ),
        BackendChoice::Containers(choice) => {
            let engine = examine(&examined(settings, choice)).await;
            let is_fine = engine
                .iter()
                .all(|finding| finding.state == FindingState::Fine);
            let tried = if is_fine {
                Some(container_trial(settings, choice).await?)
            } else {
                None
            };
            (engine, tried)
        }
    };
    let is_whole =
        |isolation: &Isolation| isolation.first_unallowed(&settings.allow_missing).is_none();
    let usable = tried
        .as_ref()
        .is_some_and(|tried| tried.as_ref().is_ok_and(is_whole));
    let open_files = descriptors::raise_limit();
    let is_native = matches!(settings.backend, BackendChoice::Native);
    let usable = usable && (!is_native || descriptors::fitting(open_files) > 0);
    let report = Report {
        engine,
        tried,
        open_files,
        usable,
    };
    print(&if arguments.json {
        as_json(&report, settings)?
    } else {
        as_text(&report, settings)?
    })?;
    Ok(if usable {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn examined<'a>(settings: &Settings, choice: &'a ContainerChoice) -> Examined<'a> {
    Examined {
        kind: choice.kind,
        address: &choice.address,
        image: &choice.image,
        runtime: choice.runtime.as_deref(),
        has_network: !settings.network.rules.is_empty(),
    }
}

/// Creates a container with a session as servers do, and removes it again.
async fn container_trial(
    settings: &Settings,
    choice: &ContainerChoice,
) -> anyhow::Result<Result<Isolation, LaunchError>> {
    let backend = containers::backend(settings, choice, StartMode::OneShot, None)?;
    let tried = match backend.launch().await {
        Ok((mut sandbox, _)) => {
            sandbox.destroy().await;
            Ok(sandbox.isolation().clone())
        }
        Err(error) => Err(error),
    };
    backend.shut_down().await;
    Ok(tried)
}

fn as_json(report: &Report, settings: &Settings) -> anyhow::Result<String> {
    let mut told = match &report.tried {
        Some(Ok(isolation)) => json!({ "usable": report.usable, "layers": isolation.layers }),
        Some(Err(error)) => {
            json!({ "usable": false, "error": error.to_string(), "cure": cure(error) })
        }
        None => json!({ "usable": false }),
    };
    if !report.engine.is_empty() {
        told["engine"] = json!(report.engine);
    } else {
        let fitting = descriptors::fitting(report.open_files).min(settings.max_sessions);
        told["open_files"] = json!({ "limit": report.open_files, "sessions": fitting });
    }
    Ok(serde_json::to_string_pretty(&told)? + "\n")
}

fn as_text(report: &Report, settings: &Settings) -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    let is_native = report.engine.is_empty();
    if !is_native {
        writeln!(text, "Container engine:")?;
        for finding in &report.engine {
            let mark = if finding.state == FindingState::Fine {
                "fine"
            } else {
                "MISSING"
            };
            write_line(
                &mut text,
                finding.name,
                mark,
                &finding.what,
                finding.why.as_deref(),
                finding.cure.as_deref(),
            )?;
        }
        writeln!(text)?;
    }
    match &report.tried {
        Some(Ok(isolation)) => {
            let place = if is_native {
                "on this machine"
            } else {
                "in a container"
            };
            writeln!(text, "Isolation of a session {place}:")?;
            write_layers(&mut text, isolation, is_native)?;
        }
        Some(Err(error)) => {
            let (error, cure) = (error.to_string(), cure(error).filter(|_| is_native));
            let told = cure.as_ref().map_or(error.as_str(), |cure| {
                error.trim_end_matches(&format!("; cure: {cure}"))
            });
            writeln!(text, "A sandbox cannot be made here: {told}")?;
            if let Some(cure) = cure {
                writeln!(text, "Cure: {cure}")?;
            }
        }
        None => writeln!(text, "No container was made.")?,
    }
    if is_native {
        writeln!(text, "\nPython environments: {}", environments(settings))?;
        writeln!(
            text,
            "Packages of sessions: {}",
            packages_command::summary(settings)
        )?;
        writeln!(
            text,
            "Open files: {}",
            descriptors::summary(report.open_files, settings.max_sessions)
        )?;
    }
    let usable = report.usable;
    let verdict = if usable {
        "Sessions can be started."
    } else {
        "Sessions cannot be started as things are."
    };
    writeln!(text, "\n{verdict}")?;
    Ok(text)
}

/// Writes one check: its status and, if it failed, the reason and the remedy.
fn write_line(
    text: &mut String,
    name: &str,
    mark: &str,
    what: &str,
    why: Option<&str>,
    cure: Option<&str>,
) -> std::fmt::Result {
    writeln!(
        text,
        "{}",
        format!("  {name:<13} {mark:<9} {what}").trim_end()
    )?;
    if let Some(why) = why {
        writeln!(text, "  {:23} because {why}", "")?;
    }
    if let Some(cure) = cure {
        writeln!(text, "  {:23} cure: {cure}", "")?;
    }
    Ok(())
}

fn write_layers(text: &mut String, isolation: &Isolation, is_native: bool) -> std::fmt::Result {
    for kind in LayerKind::ALL {
        let (mark, how, why) = match isolation.layers.get(&kind) {
            Some(LayerState::Enforced { how }) => ("enforced", how.as_str(), None),
            Some(LayerState::Reduced { how, why }) => ("reduced", how.as_str(), Some(why)),
            Some(LayerState::Missing { why }) => ("MISSING", "", Some(why)),
            None => ("MISSING", "", None),
        };
        let cure = cure_of(kind)
            .filter(|_| mark != "enforced" && (is_native || kind == LayerKind::Landlock));
        write_line(text, kind.name(), mark, how, why.map(String::as_str), cure)?;
    }
    Ok(())
}

/// Returns the remedy for a reduced layer.
fn cure_of(kind: LayerKind) -> Option<&'static str> {
    match kind {
        LayerKind::Identity => Some(
            "start the server as root; it gives up root's rights for everything that runs code",
        ),
        LayerKind::Resources => Some(
            "start the server as root, or let systemd delegate a control group: docs/isolation.md, \
             section Control groups",
        ),
        LayerKind::Landlock => Some("use Linux 5.13 or newer"),
        _ => None,
    }
}

/// Returns the remedy for a sandbox that does not start. A refused namespace carries its own.
fn cure(error: &LaunchError) -> Option<String> {
    match error {
        LaunchError::Start { why }
        | LaunchError::LayerMissing {
            kind: LayerKind::Namespaces,
            why,
        } => {
            let told = why.split_once("; cure: ").map(|(_, cure)| cure.to_owned());
            told.or_else(|| probe::container(std::path::Path::new("/")).map(str::to_owned))
        }
        _ => None,
    }
}

fn environments(settings: &Settings) -> String {
    let built = environment::list(&settings.data_dir);
    let names: Vec<String> = built
        .iter()
        .map(|built| {
            format!(
                "{} (Python {})",
                built.record.name, built.record.python_version
            )
        })
        .collect();
    if names.is_empty() {
        "none yet; the first run builds one".to_owned()
    } else {
        names.join(", ")
    }
}
