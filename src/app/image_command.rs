//! `cellblock image …`: images for sessions in containers.

use std::io::Write;

use anyhow::{Context, bail};
use tokio::sync::watch;

use super::cli::{ImageArguments, ImageCommand};
use super::progress;
use crate::config;
use crate::environment::EnvironmentSpec;
use crate::sandbox::Preparation;
use crate::sandbox::container::EngineKind;
use crate::sandbox::container::build::{self, Recipe};

/// Who owns the working folder of an image that root builds.
const ORDINARY_ID: u32 = 1000;

/// Carries out one command and writes its result to `output`.
pub(super) async fn execute(command: ImageCommand, output: &mut (dyn Write + Send)) -> anyhow::Result<()> {
    let ImageCommand::Build(arguments) = command;
    let kind = if arguments.engine == "podman" { EngineKind::Podman } else { EngineKind::Docker };
    let address = config::engine_address(kind)?;
    let recipe = recipe(&arguments)?;
    let working = |step: String| Preparation::Working { step, done: 0, total: None };
    let work = watch::Sender::new(working(format!("building {}", recipe.tag)));
    let shown = tokio::spawn(progress::show(work.subscribe()));
    let tell = |line: &str| {
        work.send_replace(working(line.to_owned()));
    };
    let built = build::build(kind, &address, &recipe, &tell).await;
    work.send_replace(Preparation::Ready);
    let _ = shown.await;
    built.with_context(|| format!("{} could not be built", recipe.tag))?;
    writeln!(output, "{} is ready: --backend {} --container-tag {}", recipe.tag, arguments.engine, recipe.tag)?;
    Ok(())
}

fn recipe(arguments: &ImageArguments) -> anyhow::Result<Recipe> {
    for name in [&arguments.tag, &arguments.base] {
        if !config::is_image_name(name) {
            bail!("\"{name}\" is no name of an image");
        }
    }
    let mut requirements = vec!["ipython>=8".to_owned()];
    if !arguments.bare {
        let usual = EnvironmentSpec::built_in().into_iter().find(|spec| spec.name.as_str() == "default");
        requirements.extend(usual.map(|spec| spec.packages).unwrap_or_default());
    }
    for file in &arguments.requirements {
        let text = std::fs::read_to_string(file).with_context(|| format!("could not read {}", file.display()))?;
        requirements.extend(text.lines().map(str::to_owned));
    }
    requirements.extend(arguments.packages.iter().cloned());
    // A line of the Dockerfile's own could otherwise be smuggled in by none of these, but an option of pip could.
    if let Some(line) = requirements.iter().find(|line| line.trim_start().starts_with("--") || line.contains('\n')) {
        bail!("\"{line}\" is no requirement; options of pip cannot be given here");
    }
    let own = |id: u32| if id == 0 { ORDINARY_ID } else { id };
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let (uid, gid) = (arguments.uid.unwrap_or_else(|| own(uid)), arguments.gid.unwrap_or_else(|| own(gid)));
    if uid == 0 || gid == 0 {
        bail!("the working folder cannot belong to root: sessions never are root");
    }
    Ok(Recipe {
        tag: arguments.tag.clone(),
        base: arguments.base.clone(),
        requirements,
        uid,
        gid,
        network: arguments.network.clone(),
    })
}
