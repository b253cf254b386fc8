//! `cellblock env …`: environments from the command line.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use serde_json::json;
use tokio::sync::watch;

use super::cli::{BuildArguments, EnvCommand};
use super::output::Interrupted;
use super::{asked_to_end, progress};
use crate::config::Settings;
use crate::config::quantity::format_size;
use crate::environment::{
    self, Built, Environment, EnvironmentError, EnvironmentName, EnvironmentSpec, Input, Lockfile,
    PythonRequest, spec,
};
use crate::sandbox::Preparation;

/// Executes one command and writes its result to `output`.
pub(super) async fn execute(
    command: EnvCommand,
    settings: &Settings,
    output: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    match command {
        EnvCommand::List { json } => {
            let built = environment::list(&settings.data_dir);
            let text = if json {
                as_json(&built)?
            } else {
                as_text(&built)
            };
            output.write_all(text.as_bytes())?;
        }
        EnvCommand::Build(arguments) => build(&arguments, settings, output).await?,
        EnvCommand::Show { name } => show(&name, settings, output)?,
        EnvCommand::Remove { name } => {
            let freed = environment::remove(&settings.data_dir, &parse_name(&name)?)?;
            writeln!(output, "removed {name}, {} freed", format_size(freed))?;
        }
    }
    Ok(())
}

async fn build(
    arguments: &BuildArguments,
    settings: &Settings,
    output: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let wish = wanted(arguments, settings)?;
    let (spec, environment) = tokio::select! {
        built = fulfil_with_progress(wish, settings) => built?,
        // Dropping the future also removes the installer and its folders.
        _ = asked_to_end() => return Err(Interrupted.into()),
    };
    let packages = spec.requirements().join(", ");
    writeln!(
        output,
        "{} is ready: Python {}, {packages}",
        spec.name, environment.python_version
    )?;
    Ok(())
}

/// Prints the lock of the newest environment with this name.
fn show(name: &str, settings: &Settings, output: &mut (dyn Write + Send)) -> anyhow::Result<()> {
    let wanted = parse_name(name)?;
    let built = environment::list(&settings.data_dir)
        .into_iter()
        .find(|built| built.record.name == wanted);
    let built = built
        .ok_or_else(|| anyhow!("there is no environment \"{name}\" to show; build it first"))?;
    let lock = built.lock().ok_or_else(|| {
        anyhow!(
            "\"{name}\" was built by an older version, which wrote no lock; \"cellblock env \
                 build {name}\" builds it again"
        )
    })?;
    output.write_all(lock.as_bytes())?;
    Ok(())
}

/// The requested build.
#[derive(Debug, PartialEq, Eq)]
enum Wish {
    /// A known environment, or packages listed on the command line.
    Spec(EnvironmentSpec),
    /// Requirement files. The packages of the spec are derived from them.
    Files {
        input: Input,
        name: EnvironmentName,
        preload: Vec<String>,
        python: Option<PythonRequest>,
    },
    Locked(Lockfile, EnvironmentSpec),
}

async fn fulfil(
    wish: Wish,
    data_dir: &Path,
    tell: environment::Progress<'_>,
) -> Result<(EnvironmentSpec, Environment), EnvironmentError> {
    let (lockfile, spec) = match wish {
        Wish::Spec(spec) => {
            let environment = environment::ensure(&spec, data_dir, tell).await?;
            return Ok((spec, environment));
        }
        Wish::Files {
            input,
            name,
            preload,
            python,
        } => {
            let (lockfile, python) =
                environment::resolve(&input, python.as_ref(), data_dir, tell).await?;
            let packages = lockfile.requirements();
            (
                lockfile,
                EnvironmentSpec {
                    name,
                    packages,
                    preload,
                    python,
                },
            )
        }
        Wish::Locked(lockfile, spec) => (lockfile, spec),
    };
    let environment = environment::ensure_locked(&spec, &lockfile, data_dir, tell).await?;
    Ok((spec, environment))
}

/// Builds or finds the requested environment and shows the progress.
async fn fulfil_with_progress(
    wish: Wish,
    settings: &Settings,
) -> Result<(EnvironmentSpec, Environment), EnvironmentError> {
    let (told, heard) = watch::channel(Preparation::Working {
        step: "starting".to_owned(),
        done: 0,
        total: None,
    });
    let tell = |progress: environment::EnvironmentProgress| {
        let environment::EnvironmentProgress { step, done, total } = progress;
        told.send_replace(Preparation::Working { step, done, total });
    };
    let work = async {
        let result = fulfil(wish, &settings.data_dir, &tell).await;
        told.send_replace(Preparation::Ready);
        result
    };
    // The work is polled first, so that a finished environment is ready before any progress is
    // shown.
    let (result, ()) = tokio::join!(work, progress::show(heard));
    result
}

/// Decides what to build: an environment of the configuration, or a new name described by flags.
fn wanted(arguments: &BuildArguments, settings: &Settings) -> anyhow::Result<Wish> {
    let name = arguments
        .name
        .as_deref()
        .map_or_else(|| Ok(settings.environment.clone()), parse_name)?;
    let python = arguments.python.as_deref().map(parse_python).transpose()?;
    if let Some(misfit) = arguments
        .packages
        .iter()
        .find(|package| !spec::is_requirement(package))
    {
        bail!(
            "--packages {misfit}: it must be {}",
            spec::REQUIREMENT_ALLOWED
        );
    }
    if let Some(misfit) = arguments
        .preload
        .iter()
        .find(|module| !spec::is_module_name(module))
    {
        bail!("--preload {misfit}: it must be a module name such as numpy or matplotlib.pyplot");
    }
    let preload = arguments.preload.clone();
    let is_filled = !arguments.packages.is_empty()
        || !arguments.requirements.is_empty()
        || arguments.pyproject.is_some()
        || arguments.locked.is_some();
    match settings.environments.get(&name) {
        Some(known) if !is_filled && python.is_none() => return Ok(Wish::Spec(known.clone())),
        // A server would follow the configuration and rebuild its own version, so the flags would
        // be lost.
        Some(_) if settings.described.contains(&name) => bail!(
            "\"{name}\" is built in or described in the configuration file, so its packages and \
             Python are changed there \
             (environments: {name}: …), or under another name here"
        ),
        _ if !is_filled => bail!(
            "there is no environment \"{name}\" yet: say what to install with --packages, \
             --requirements, --pyproject or --locked"
        ),
        _ => {}
    }
    if let Some(file) = &arguments.locked {
        return locked(file, name, preload, python);
    }
    Ok(match input(arguments)? {
        Some(input) => Wish::Files {
            input,
            name,
            preload,
            python,
        },
        None => {
            let packages = arguments.packages.clone();
            Wish::Spec(EnvironmentSpec {
                name,
                packages,
                preload,
                python: python.unwrap_or(PythonRequest::Any),
            })
        }
    })
}

fn parse_python(text: &str) -> anyhow::Result<PythonRequest> {
    PythonRequest::parse(text)
        .ok_or_else(|| anyhow!("--python {text}: it must be {}", PythonRequest::ALLOWED))
}

/// Reads a lock. Unless another Python is given, the one that the versions were resolved for is
/// used.
fn locked(
    file: &Path,
    name: EnvironmentName,
    preload: Vec<String>,
    python: Option<PythonRequest>,
) -> anyhow::Result<Wish> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("could not read the lock {}", file.display()))?;
    let lockfile =
        Lockfile::parse(&text).with_context(|| format!("{} is not a lock", file.display()))?;
    let python = python.or(lockfile.python()).unwrap_or(PythonRequest::Any);
    let spec = EnvironmentSpec {
        name,
        packages: lockfile.requirements(),
        preload,
        python,
    };
    Ok(Wish::Locked(lockfile, spec))
}

/// Returns the files that list the packages, if there are any.
fn input(arguments: &BuildArguments) -> anyhow::Result<Option<Input>> {
    if let Some(written) = &arguments.pyproject {
        let file = if written.is_dir() {
            written.join(PROJECT_FILE)
        } else {
            written.clone()
        };
        if file.file_name() != Some(OsStr::new(PROJECT_FILE)) {
            bail!(
                "--pyproject {}: it must be a file called {PROJECT_FILE}, or its folder",
                written.display()
            );
        }
        return Ok(Some(Input::Project {
            file: existing("--pyproject", &file)?,
            extras: arguments.extras.clone(),
        }));
    }
    let files = arguments
        .requirements
        .iter()
        .map(|file| existing("--requirements", file));
    let files = files.collect::<anyhow::Result<Vec<_>>>()?;
    Ok(Some(files)
        .filter(|files| !files.is_empty())
        .map(Input::Requirements))
}

const PROJECT_FILE: &str = "pyproject.toml";

/// Returns the absolute path of a file, because the installer works in another folder.
fn existing(flag: &str, file: &Path) -> anyhow::Result<PathBuf> {
    if !file.is_file() {
        bail!("{flag} {}: there is no such file", file.display());
    }
    std::path::absolute(file)
        .with_context(|| format!("{flag} {}: it cannot be found", file.display()))
}

fn parse_name(name: &str) -> anyhow::Result<EnvironmentName> {
    EnvironmentName::new(name).with_context(|| {
        format!(
            "\"{name}\" cannot be an environment's name: {}",
            EnvironmentName::ALLOWED
        )
    })
}

fn as_text(built: &[Built]) -> String {
    if built.is_empty() {
        return "no environment has been built yet; the first session or \"cellblock env build\" \
                builds one\n"
            .to_owned();
    }
    let mut rows =
        vec![["NAME", "PYTHON", "SIZE", "IN USE", "PACKAGES", "PATH"].map(str::to_owned)];
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
    let width = |column: usize| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..6).map(width).collect();
    rows.iter()
        .map(|row| {
            let cells = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:width$}"))
                .collect::<Vec<_>>();
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
            packages: packages
                .iter()
                .map(|package| (*package).to_owned())
                .collect(),
            ..BuildArguments::default()
        }
    }

    fn wish(arguments: &BuildArguments) -> Result<Wish, String> {
        let folder = tempfile::tempdir().unwrap();
        wanted(arguments, &settings_below(folder.path())).map_err(|error| format!("{error:#}"))
    }

    fn outcome(
        name: Option<&str>,
        python: Option<&str>,
        packages: &[&str],
    ) -> Result<EnvironmentSpec, String> {
        match wish(&arguments(name, python, packages))? {
            Wish::Spec(spec) => Ok(spec),
            other => panic!("it is not described by packages: {other:?}"),
        }
    }

    #[test]
    fn without_a_name_the_usual_environment_is_built() {
        assert_eq!(
            outcome(None, None, &[]).unwrap(),
            EnvironmentSpec::built_in()[0]
        );
        assert_eq!(
            outcome(Some("minimal"), None, &[]).unwrap(),
            EnvironmentSpec::built_in()[1]
        );
    }

    #[test]
    fn a_new_name_needs_packages() {
        let spec = outcome(Some("science"), Some("3.12"), &["scipy"]).unwrap();
        assert_eq!(
            (spec.packages.len(), spec.python),
            (1, PythonRequest::Version("3.12".to_owned()))
        );
        assert!(
            outcome(Some("science"), None, &[])
                .unwrap_err()
                .contains("--packages")
        );
    }

    #[test]
    fn flags_cannot_quietly_differ_from_the_configuration() {
        assert!(
            outcome(Some("default"), None, &["scipy"])
                .unwrap_err()
                .contains("another name")
        );
        assert!(
            outcome(None, Some("3.12"), &[])
                .unwrap_err()
                .contains("another name")
        );
    }

    #[test]
    fn files_are_found_before_anything_is_built() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        std::fs::write(file("a.txt"), "six").unwrap();
        std::fs::write(file(PROJECT_FILE), "[project]").unwrap();
        let named = || arguments(Some("a"), None, &[]);
        let requirements = |name: &str| BuildArguments {
            requirements: vec![file(name)],
            ..named()
        };
        let project = |path: PathBuf| BuildArguments {
            pyproject: Some(path),
            extras: vec!["x".to_owned()],
            ..named()
        };
        let input = |arguments: BuildArguments| -> Result<Input, String> {
            match wish(&arguments)? {
                Wish::Files { input, .. } => Ok(input),
                other => panic!("it is not described by files: {other:?}"),
            }
        };
        assert_eq!(
            input(requirements("a.txt")),
            Ok(Input::Requirements(vec![file("a.txt")]))
        );
        let expected = Input::Project {
            file: file(PROJECT_FILE),
            extras: vec!["x".to_owned()],
        };
        assert_eq!(
            input(project(folder.path().to_owned())),
            Ok(expected.clone())
        );
        assert_eq!(input(project(file(PROJECT_FILE))), Ok(expected));
        let refusal = |arguments: BuildArguments| input(arguments).unwrap_err();
        assert!(refusal(requirements("b.txt")).ends_with("b.txt: there is no such file"));
        assert!(refusal(project(file("a.txt"))).contains("called pyproject.toml"));
        let described = BuildArguments {
            name: Some("default".to_owned()),
            ..requirements("a.txt")
        };
        assert!(refusal(described).contains("another name"));
    }

    #[test]
    fn a_lock_decides_packages_and_python() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.lock");
        let locked = |text: &str, python: Option<&str>| {
            std::fs::write(&file, text).unwrap();
            wish(&BuildArguments {
                locked: Some(file.clone()),
                ..arguments(Some("a"), python, &[])
            })
        };
        let text = "# Locked by Cellblock for Python 3.12 on linux x86_64.\nipython==9.0 \
                    --hash=sha256:aa\n";
        let python = |wish: Result<Wish, String>| match wish.unwrap() {
            Wish::Locked(lockfile, spec) => {
                assert_eq!(
                    (spec.requirements(), lockfile.requirements().len()),
                    (vec!["ipython==9.0".to_owned()], 1)
                );
                spec.python.to_string()
            }
            other => panic!("it is not locked: {other:?}"),
        };
        assert_eq!(python(locked(text, None)), "Python 3.12");
        assert_eq!(python(locked(text, Some("3.13"))), "Python 3.13");
        let refusal = locked("ipython==9.0\n", None).unwrap_err();
        assert!(
            refusal.contains("a.lock is not a lock: \"ipython==9.0\" has no hash"),
            "{refusal}"
        );
    }

    #[test]
    fn mistakes_name_their_flag() {
        assert!(
            outcome(Some("a"), None, &["--index-url=x"])
                .unwrap_err()
                .starts_with("--packages --index-url=x")
        );
        assert!(
            outcome(Some("a"), Some("2.7"), &["x"])
                .unwrap_err()
                .starts_with("--python 2.7")
        );
        assert!(
            outcome(Some("../a"), None, &["x"])
                .unwrap_err()
                .contains("../a")
        );
    }

    #[tokio::test]
    async fn an_empty_machine_lists_nothing_and_removes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings_below(folder.path());
        let mut output = Vec::new();
        execute(EnvCommand::List { json: false }, &settings, &mut output)
            .await
            .unwrap();
        assert!(
            String::from_utf8(output)
                .unwrap()
                .starts_with("no environment")
        );
        let mut output = Vec::new();
        execute(EnvCommand::List { json: true }, &settings, &mut output)
            .await
            .unwrap();
        assert_eq!(
            serde_json::from_slice::<serde_json::Value>(&output).unwrap(),
            json!([])
        );
        let refusal = execute(
            EnvCommand::Remove {
                name: "a".to_owned(),
            },
            &settings,
            &mut Vec::new(),
        )
        .await
        .unwrap_err();
        assert!(
            refusal
                .to_string()
                .contains("there is no environment \"a\"")
        );
        let refusal = execute(
            EnvCommand::Show {
                name: "a".to_owned(),
            },
            &settings,
            &mut Vec::new(),
        )
        .await
        .unwrap_err();
        assert!(
            refusal
                .to_string()
                .contains("there is no environment \"a\" to show")
        );
    }
}
