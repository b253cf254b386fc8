//! `cellblock image …`: images for sessions in containers, from the command line.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::cli::{EngineArguments, ImageArguments, ImageCommand};
use super::output::Interrupted;
use super::{asked_to_end, progress};
use crate::config::quantity::format_size;
use crate::config::{self, BackendChoice, Settings};
use crate::environment::{EnvironmentProgress, EnvironmentSpec, Input, Lockfile, spec};
use crate::image::{
    self, BuiltImage, ImageContents, ImageError, ImageReference, ImageRequest, ImageUser, MadeImage,
};
use crate::sandbox::Preparation;
use crate::sandbox::container::{Engine, EngineKind};

/// Executes one command and writes its result to `output`.
pub(super) async fn execute(
    command: ImageCommand,
    settings: &Settings,
    output: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    match command {
        ImageCommand::Build(arguments) => build(&arguments, settings, output).await?,
        ImageCommand::List { json, engine } => {
            let made = image::list(&connect(&engine, settings).await?).await?;
            let text = if json {
                as_json(&made)?
            } else {
                as_text(&made)
            };
            output.write_all(text.as_bytes())?;
        }
        ImageCommand::Remove { name, engine } => {
            image::remove(
                &connect(&engine, settings).await?,
                &reference("the image", &name)?,
            )
            .await?;
            writeln!(output, "removed {name}")?;
        }
    }
    Ok(())
}

/// Connects to the engine given on the command line, or to the one that sessions would use.
pub(super) async fn connect(
    arguments: &EngineArguments,
    settings: &Settings,
) -> anyhow::Result<Engine> {
    let asked = arguments.engine.as_deref().map(|word| match word {
        "podman" => EngineKind::Podman,
        _ => EngineKind::Docker,
    });
    let (kind, address) = match (&settings.backend, asked) {
        (BackendChoice::Containers(containers), None) => {
            (containers.kind, containers.address.clone())
        }
        (_, asked) => {
            let kind = asked.unwrap_or(EngineKind::Docker);
            (kind, config::engine_address(kind)?)
        }
    };
    Ok(Engine::connect(kind, &address)
        .await?
        .with_credentials(&config::engine_credentials(kind)))
}

async fn build(
    arguments: &ImageArguments,
    settings: &Settings,
    output: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let wish = wanted(arguments, Caller::own())?;
    let engine = connect(&arguments.engine, settings).await?;
    let (told, heard) = watch::channel(Preparation::Working {
        step: "starting".to_owned(),
        done: 0,
        total: None,
    });
    let tell = |progress: EnvironmentProgress| {
        let EnvironmentProgress { step, done, total } = progress;
        told.send_replace(Preparation::Working { step, done, total });
    };
    let cancelled = CancellationToken::new();
    let work = async {
        let result = carry_out(
            arguments.dockerfile,
            &wish,
            &engine,
            settings,
            &cancelled,
            &tell,
        )
        .await;
        told.send_replace(Preparation::Ready);
        result
    };
    let mut work = std::pin::pin!(async { tokio::join!(work, progress::show(heard)).0 });
    let text = tokio::select! {
        text = &mut work => text,
        _ = asked_to_end() => {
            cancelled.cancel();
            work.await
        }
    };
    let text = match text {
        Err(ImageError::Cancelled) => return Err(anyhow!(Interrupted).context("no image was made")),
        text => text?,
    };
    output.write_all(text.as_bytes())?;
    Ok(())
}

/// Executes the command and returns its output.
async fn carry_out(
    only_dockerfile: bool,
    wish: &ImageRequest,
    engine: &Engine,
    settings: &Settings,
    cancelled: &CancellationToken,
    tell: crate::environment::Progress<'_>,
) -> Result<String, ImageError> {
    if only_dockerfile {
        return image::dockerfile(wish, engine, &settings.data_dir, cancelled, tell).await;
    }
    let BuiltImage { image, was_there } =
        image::build(wish, engine, &settings.data_dir, cancelled, tell).await?;
    let (python, packages, size) = (&image.python, image.packages.len(), format_size(image.size));
    let found = if was_there {
        "is there already"
    } else {
        "is ready"
    };
    Ok(format!(
        "{} {found}: Python {python}, {packages} packages, {size}\n",
        wish.tag
    ))
}

/// The user who builds.
#[derive(Debug, Clone, Copy)]
struct Caller {
    uid: u32,
    gid: u32,
}

impl Caller {
    fn own() -> Caller {
        Caller {
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
        }
    }
}

/// The user of an image built by root: usually the number of the first regular user of a machine.
const USUAL_USER: u32 = 1000;

/// Decides what to build.
fn wanted(arguments: &ImageArguments, caller: Caller) -> anyhow::Result<ImageRequest> {
    Ok(ImageRequest {
        tag: reference("--tag", &arguments.tag)?,
        base: reference("--base", &arguments.base)?,
        contents: contents(arguments)?,
        user: user(arguments, caller)?,
        afresh: arguments.no_cache,
    })
}

fn reference(what: &str, written: &str) -> anyhow::Result<ImageReference> {
    ImageReference::new(written).ok_or_else(|| {
        anyhow!(
            "{what} {written}: the name of an image is {}",
            ImageReference::ALLOWED
        )
    })
}

fn user(arguments: &ImageArguments, caller: Caller) -> anyhow::Result<ImageUser> {
    if arguments.root {
        return Ok(ImageUser::Root);
    }
    let uid = arguments.uid.unwrap_or(if caller.uid == 0 {
        USUAL_USER
    } else {
        caller.uid
    });
    let gid = match (arguments.gid, arguments.uid) {
        (Some(gid), _) => gid,
        (None, None) if caller.uid != 0 && caller.gid != 0 => caller.gid,
        (None, _) => uid,
    };
    if uid == 0 || gid == 0 {
        bail!(
            "0 is the number of root, which a session never is; --root makes an image whose own \
             user is root"
        );
    }
    Ok(ImageUser::Ordinary { uid, gid })
}

fn contents(arguments: &ImageArguments) -> anyhow::Result<ImageContents> {
    if let Some(file) = &arguments.locked {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("could not read the lock {}", file.display()))?;
        let lockfile =
            Lockfile::parse(&text).with_context(|| format!("{} is not a lock", file.display()))?;
        return Ok(ImageContents::Locked(lockfile));
    }
    let mut packages = if arguments.no_science {
        Vec::new()
    } else {
        science()
    };
    packages.extend(arguments.packages.iter().cloned());
    if let Some(file) = &arguments.dependencies {
        packages.extend(dependencies(file)?);
    }
    if let Some(misfit) = packages
        .iter()
        .find(|package| !spec::is_requirement(package))
    {
        bail!(
            "\"{misfit}\" cannot be installed: it must be {}",
            spec::REQUIREMENT_ALLOWED
        );
    }
    let files = arguments
        .requirements
        .iter()
        .map(|file| existing(file))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let files = Some(files)
        .filter(|files| !files.is_empty())
        .map(Input::Requirements);
    Ok(ImageContents::Packages { packages, files })
}

/// The packages of native sessions.
fn science() -> Vec<String> {
    let [default, _] = EnvironmentSpec::built_in();
    default.packages
}

fn dependencies(file: &Path) -> anyhow::Result<Vec<String>> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("could not read {}", file.display()))?;
    quoted_requirements(&text).map_err(|line| {
        anyhow!(
            "{} line {line}: a line is a requirement in quotes, with a comma behind it",
            file.display()
        )
    })
}

/// Parses lines of a TOML array: `"numpy>=2",`. Returns the number of the first malformed line.
fn quoted_requirements(text: &str) -> Result<Vec<String>, usize> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let line = line.strip_suffix(',').unwrap_or(line).trim_end();
        let unquoted = ['"', '\'']
            .iter()
            .find_map(|quote| line.strip_prefix(*quote)?.strip_suffix(*quote));
        match unquoted.filter(|text| !text.is_empty() && !text.contains(['"', '\\'])) {
            Some(requirement) => found.push(requirement.to_owned()),
            None => return Err(index + 1),
        }
    }
    Ok(found)
}

/// Returns the absolute path of a file, because the installer works in another folder.
fn existing(file: &Path) -> anyhow::Result<PathBuf> {
    if !file.is_file() {
        bail!("--requirements {}: there is no such file", file.display());
    }
    std::path::absolute(file)
        .with_context(|| format!("--requirements {}: it cannot be found", file.display()))
}

fn as_text(made: &[MadeImage]) -> String {
    if made.is_empty() {
        return "no image has been built yet; \"cellblock image build\" builds one\n".to_owned();
    }
    let mut rows = vec![["NAME", "ID", "PYTHON", "PACKAGES", "SIZE"].map(str::to_owned)];
    rows.extend(made.iter().map(|image| {
        let name = if image.tags.is_empty() {
            "(replaced)".to_owned()
        } else {
            image.tags.join(", ")
        };
        let packages = image.packages.len().to_string();
        [
            name,
            short(&image.id).to_owned(),
            image.python.clone(),
            packages,
            format_size(image.size),
        ]
    }));
    let width = |column: usize| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..5).map(width).collect();
    let line = |row: &[String; 5]| {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

/// The first characters of an id, as engines print it.
fn short(id: &str) -> &str {
    let digits = id.strip_prefix("sha256:").unwrap_or(id);
    digits.get(..12).unwrap_or(digits)
}

fn as_json(made: &[MadeImage]) -> anyhow::Result<String> {
    let entry = |image: &MadeImage| {
        json!({
            "id": image.id, "tags": image.tags, "python": image.python,
            "packages": image.packages, "size": image.size,
            "created": image.created,
        })
    };
    let entries: Vec<serde_json::Value> = made.iter().map(entry).collect();
    Ok(format!("{}\n", serde_json::to_string_pretty(&entries)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: Caller = Caller {
        uid: 1234,
        gid: 2345,
    };
    const SUPERUSER: Caller = Caller { uid: 0, gid: 0 };

    fn arguments() -> ImageArguments {
        ImageArguments {
            tag: "cellblock".to_owned(),
            base: "python:3.13-slim".to_owned(),
            ..ImageArguments::default()
        }
    }

    fn packages(arguments: &ImageArguments) -> Vec<String> {
        match contents(arguments).unwrap() {
            ImageContents::Packages { packages, .. } => packages,
            ImageContents::Locked(_) => panic!("no lock was given"),
        }
    }

    #[test]
    fn an_image_has_the_science_packages_unless_they_are_not_wanted() {
        let usual = packages(&arguments());
        assert!(usual.contains(&"numpy".to_owned()), "{usual:?}");
        let more = ImageArguments {
            packages: vec!["polars>=1".to_owned()],
            ..arguments()
        };
        assert_eq!(packages(&more).len(), usual.len() + 1);
        let bare = ImageArguments {
            no_science: true,
            packages: vec!["Pydantic==2.11".to_owned()],
            ..arguments()
        };
        assert_eq!(packages(&bare), ["Pydantic==2.11"]);
    }

    #[test]
    fn an_option_does_not_pass_for_a_package() {
        let smuggled = ImageArguments {
            packages: vec!["--index-url=http://example.com".to_owned()],
            ..arguments()
        };
        assert!(
            contents(&smuggled)
                .unwrap_err()
                .to_string()
                .contains("--index-url")
        );
    }

    #[test]
    fn dependencies_may_be_written_as_a_project_has_them() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            file.path(),
            "# tools\n\"polars>=1\",\n\n  'x; python_version > \"3\"' ,\n",
        )
        .unwrap();
        let given = ImageArguments {
            no_science: true,
            dependencies: Some(file.path().to_owned()),
            ..arguments()
        };
        assert!(
            contents(&given).unwrap_err().to_string().contains("line 4"),
            "quotes within quotes are not read"
        );
        std::fs::write(
            file.path(),
            "# tools\n\"polars>=1\",\n\n  'pandas[excel] >=2' ,\n\"six\"",
        )
        .unwrap();
        assert_eq!(packages(&given), ["polars>=1", "pandas[excel] >=2", "six"]);
        assert_eq!(quoted_requirements("\"numpy\",\nnumpy = \"^2\"\n"), Err(2));
        assert_eq!(quoted_requirements("scipy"), Err(1));
    }

    #[test]
    fn the_user_is_the_one_who_builds_and_never_root_by_accident() {
        let of = |arguments: &ImageArguments, caller: Caller| {
            user(arguments, caller).map_err(|error| error.to_string())
        };
        let ordinary = |uid, gid| Ok(ImageUser::Ordinary { uid, gid });
        assert_eq!(of(&arguments(), ME), ordinary(1234, 2345));
        assert_eq!(of(&arguments(), SUPERUSER), ordinary(1000, 1000));
        assert_eq!(of(&arguments(), Caller { uid: 5, gid: 0 }), ordinary(5, 5));
        assert_eq!(
            of(
                &ImageArguments {
                    uid: Some(7),
                    ..arguments()
                },
                ME
            ),
            ordinary(7, 7)
        );
        assert_eq!(
            of(
                &ImageArguments {
                    uid: Some(7),
                    gid: Some(8),
                    ..arguments()
                },
                ME
            ),
            ordinary(7, 8)
        );
        assert!(
            of(
                &ImageArguments {
                    uid: Some(0),
                    ..arguments()
                },
                ME
            )
            .unwrap_err()
            .contains("--root")
        );
        assert!(
            of(
                &ImageArguments {
                    gid: Some(0),
                    ..arguments()
                },
                ME
            )
            .unwrap_err()
            .contains("--root")
        );
        assert_eq!(
            of(
                &ImageArguments {
                    root: true,
                    ..arguments()
                },
                ME
            ),
            Ok(ImageUser::Root)
        );
    }

    #[test]
    fn names_are_checked_before_anything_is_asked() {
        let wish = |tag: &str| {
            wanted(
                &ImageArguments {
                    tag: tag.to_owned(),
                    ..arguments()
                },
                ME,
            )
        };
        assert!(wish("cells:1").is_ok());
        let refusal = wish("Cells\nRUN x").unwrap_err().to_string();
        assert!(
            refusal.starts_with("--tag") && refusal.contains("lower-case"),
            "{refusal}"
        );
    }

    #[test]
    fn the_list_has_a_line_for_each_image() {
        let image = MadeImage {
            id: format!("sha256:{}", "ab".repeat(32)),
            tags: Vec::new(),
            python: "3.13.1".to_owned(),
            packages: vec!["six==1.17.0".to_owned()],
            size: 3 << 20,
            created: Some(1),
        };
        let named = MadeImage {
            tags: vec!["cells:1".to_owned()],
            ..image.clone()
        };
        let text = as_text(&[named.clone(), image]);
        let expected = "NAME        ID            PYTHON  PACKAGES  SIZE\n\
                        cells:1     abababababab  3.13.1  1         3 MiB\n\
                        (replaced)  abababababab  3.13.1  1         3 MiB\n";
        assert_eq!(text, expected);
        assert!(as_text(&[]).contains("image build"));
        let json: serde_json::Value = serde_json::from_str(&as_json(&[named]).unwrap()).unwrap();
        assert_eq!(
            (json[0]["tags"][0].as_str(), json[0]["created"].as_i64()),
            (Some("cells:1"), Some(1))
        );
    }
}
