//! `cellblock env …`: environments from the command line.

use std::io::Write;

use anyhow::{Context, anyhow, bail};
use serde_json::json;
use tokio::sync::watch;

use super::cli::{BuildArguments, EnvCommand};
use super::progress;
use crate::config::Settings;
use crate::config::quantity::format_size;
use crate::environment::{self, Built, EnvironmentError, EnvironmentName, EnvironmentSpec, PythonRequest, spec};
use crate::sandbox::Preparation;

/// Carries out one command and writes its result to `output`.
pub(super) async fn execute(
    command: EnvCommand,
    settings: &Settings,
    output: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    match command {
        EnvCommand::List { json } => {
            let built = environment::list(&settings.data_dir);
            let text = if json { as_json(&built)? } else { as_text(&built) };
            output.write_all(text.as_bytes())?;
        }
        EnvCommand::Build(arguments) => build(&arguments, settings, output).await?,
        EnvCommand::Remove { name } => {
            let freed = environment::remove(&settings.data_dir, &parse_name(&name)?)?;
            writeln!(output, "removed {name}, {} freed", format_size(freed))?;
        }
    }
    Ok(())
}

async fn build(arguments: &BuildArguments, settings: &Settings, output: &mut (dyn Write + Send)) -> anyhow::Result<()> {
    let spec = wanted(arguments, settings)?;
    let environment = ensure_with_progress(&spec, settings).await?;
    let packages = spec.requirements().join(", ");
    writeln!(output, "{} is ready: Python {}, {packages}", spec.name, environment.python_version)?;
    Ok(())
}

/// Builds or finds an environment and shows the progress meanwhile.
async fn ensure_with_progress(
    spec: &EnvironmentSpec,
    settings: &Settings,
) -> Result<environment::Environment, EnvironmentError> {
    let (told, heard) = watch::channel(Preparation::Working { step: "starting".to_owned(), done: 0, total: None });
    let tell = |progress: environment::EnvironmentProgress| {
        let environment::EnvironmentProgress { step, done, total } = progress;
        told.send_replace(Preparation::Working { step, done, total });
    };
    let work = async {
        let result = environment::ensure(spec, &settings.data_dir, &tell).await;
        told.send_replace(Preparation::Ready);
        result
    };
    // The work goes first, so that a finished environment is ready before anything could be shown.
    let (result, ()) = tokio::join!(work, progress::show(heard));
    result
}

/// Decides what to build: what the configuration describes, or what the flags say about a name of their own.
fn wanted(arguments: &BuildArguments, settings: &Settings) -> anyhow::Result<EnvironmentSpec> {
    let name = arguments.name.as_deref().map_or_else(|| Ok(settings.environment.clone()), parse_name)?;
    let known = settings.environments.get(&name);
    let python = match arguments.python.as_deref() {
        Some(text) => Some(
            PythonRequest::parse(text)
                .ok_or_else(|| anyhow!("--python {text}: it must be {}", PythonRequest::ALLOWED))?,
        ),
        None => None,
    };
    if let Some(misfit) = arguments.packages.iter().find(|package| !spec::is_requirement(package)) {
        bail!("--packages {misfit}: it must be {}", spec::REQUIREMENT_ALLOWED);
    }
    if let Some(misfit) = arguments.preload.iter().find(|module| !spec::is_module_name(module)) {
        bail!("--preload {misfit}: it must be a module name such as numpy or matplotlib.pyplot");
    }
    let is_changed = !arguments.packages.is_empty() || python.is_some();
    match known {
        Some(known) if !is_changed => Ok(known.clone()),
        // A server would follow the configuration and build its own again, so the flags would be forgotten.
        Some(_) if settings.described.contains(&name) => bail!(
            "\"{name}\" is built in or described in the configuration file, so its packages and Python are changed there \
             (environments: {name}: …), or under another name here"
        ),
        _ if arguments.packages.is_empty() => {
            bail!("there is no environment \"{name}\" yet: say what to install with --packages")
        }
        _ => Ok(EnvironmentSpec {
            name,
            packages: arguments.packages.clone(),
            preload: arguments.preload.clone(),
            python: python.unwrap_or(PythonRequest::Any),
        }),
    }
}

fn parse_name(name: &str) -> anyhow::Result<EnvironmentName> {
    EnvironmentName::new(name)
        .with_context(|| format!("\"{name}\" cannot be an environment's name: {}", EnvironmentName::ALLOWED))
}

fn as_text(built: &[Built]) -> String {
    if built.is_empty() {
        return "no environment has been built yet; the first session or \"cellblock env build\" builds one\n"
            .to_owned();
    }
    let mut rows = vec![["NAME", "PYTHON", "SIZE", "IN USE", "PACKAGES", "PATH"].map(str::to_owned)];
    rows.extend(built.iter().map(|built| {
        let processes: Vec<String> = built.processes.iter().map(u32::to_string).collect();
        let in_use = match (built.in_use, processes.is_empty()) {
            (false, _) => "no".to_owned(),
            (true, true) => "yes".to_owned(),
            (true, false) => format!("by {}", processes.join(", ")),
        };
        [
            built.record.name.to_string(),
            built.record.python_version.clone(),
            format_size(built.record.size),
            in_use,
            built.record.packages.join(", "),
            built.directory.display().to_string(),
        ]
    }));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..6).map(width).collect();
    rows.iter()
        .map(|row| {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect::<Vec<_>>();
            format!("{}\n", cells.join("  ").trim_end())
        })
        .collect()
}

fn as_json(built: &[Built]) -> anyhow::Result<String> {
    let entries: Vec<serde_json::Value> = built
        .iter()
        .map(|built| {
            json!({
                "name": built.record.name,
                "python": built.record.python_version,
                "packages": built.record.packages,
                "installed": built.record.installed,
                "preload": built.record.preload,
                "size": built.record.size,
                "created": built.record.created,
                "path": built.directory,
                "in_use": built.in_use,
                "processes": built.processes,
            })
        })
        .collect();
    Ok(format!("{}\n", serde_json::to_string_pretty(&entries)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests_support::settings_below;

    fn arguments(name: Option<&str>, python: Option<&str>, packages: &[&str]) -> BuildArguments {
        BuildArguments {
            name: name.map(str::to_owned),
            python: python.map(str::to_owned),
            packages: packages.iter().map(|package| (*package).to_owned()).collect(),
            preload: Vec::new(),
        }
    }

    fn outcome(name: Option<&str>, python: Option<&str>, packages: &[&str]) -> Result<EnvironmentSpec, String> {
        let folder = tempfile::tempdir().unwrap();
        wanted(&arguments(name, python, packages), &settings_below(folder.path())).map_err(|error| error.to_string())
    }

    #[test]
    fn without_a_name_the_usual_environment_is_built() {
        assert_eq!(outcome(None, None, &[]).unwrap(), EnvironmentSpec::built_in()[0]);
        assert_eq!(outcome(Some("minimal"), None, &[]).unwrap(), EnvironmentSpec::built_in()[1]);
    }

    #[test]
    fn a_new_name_needs_packages() {
        let spec = outcome(Some("science"), Some("3.12"), &["scipy"]).unwrap();
        assert_eq!((spec.packages.len(), spec.python), (1, PythonRequest::Version("3.12".to_owned())));
        assert!(outcome(Some("science"), None, &[]).unwrap_err().contains("--packages"));
    }

    #[test]
    fn flags_cannot_quietly_differ_from_the_configuration() {
        assert!(outcome(Some("default"), None, &["scipy"]).unwrap_err().contains("another name"));
        assert!(outcome(None, Some("3.12"), &[]).unwrap_err().contains("another name"));
    }

    #[test]
    fn mistakes_name_their_flag() {
        assert!(outcome(Some("a"), None, &["--index-url=x"]).unwrap_err().starts_with("--packages --index-url=x"));
        assert!(outcome(Some("a"), Some("2.7"), &["x"]).unwrap_err().starts_with("--python 2.7"));
        assert!(outcome(Some("../a"), None, &["x"]).unwrap_err().contains("../a"));
    }

    #[tokio::test]
    async fn an_empty_machine_lists_nothing_and_removes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings_below(folder.path());
        let mut output = Vec::new();
        execute(EnvCommand::List { json: false }, &settings, &mut output).await.unwrap();
        assert!(String::from_utf8(output).unwrap().starts_with("no environment"));
        let mut output = Vec::new();
        execute(EnvCommand::List { json: true }, &settings, &mut output).await.unwrap();
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&output).unwrap(), json!([]));
        let refusal =
            execute(EnvCommand::Remove { name: "a".to_owned() }, &settings, &mut Vec::new()).await.unwrap_err();
        assert!(refusal.to_string().contains("there is no environment \"a\""));
    }
}
