//! Images for sessions in containers: a base image, packages, an unprivileged user.
//!
//! ```text
//! base image ──query──→ its Python ──→ exact versions ──→ wheels for that Python, unpacked here
//!                                                                      │ one archive, sent once
//!                                                 engine: COPY files, RUN prepare.py (no network),
//!                                                 labels
//! ```
//!
//! `base` queries the image, `recipe` writes the Dockerfile, `context` packs the files, and
//! `local_images` lists and removes built images. Only wheels are used, and none of their code
//! runs, neither here nor during the image build. The engine needs no network, and the base image
//! needs no pip.
//!
//! The same request gives the same layers: see `prepare.py`. An image that already exists is not
//! built again.
//!
//! This module never changes an image that it did not build.

mod base;
mod context;
mod local_images;
mod recipe;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures_util::StreamExt;
use tokio_util::sync::CancellationToken;

use self::base::Base;
use self::context::Context;
use self::recipe::{LABEL_RECIPE, Recipe};
use crate::environment::{
    Contents, EnvironmentError, EnvironmentProgress, Input, Lockfile, Progress, install_elsewhere,
    lock_elsewhere,
};
use crate::sandbox::container::{
    BuildFailure, BuildNews, Building, Engine, EngineError, ImageFacts,
};

pub use self::local_images::{MadeImage, list, remove};
pub use self::recipe::ImageUser;

/// An image reference, such as `python:3.13-slim` or `registry.example.com/team/cells:1`.
///
/// It becomes part of a Dockerfile, so it must not contain a space or a quote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageReference(String);

impl ImageReference {
    /// Rules for a name, for messages.
    pub const ALLOWED: &str = "lower-case letters, digits, \".\", \"_\", \"-\" and \"/\", then a \
                               tag behind \":\" if you like, such as cells or team/cells:1";

    pub fn new(text: &str) -> Option<ImageReference> {
        let (name, digest) = match text.split_once('@') {
            Some((name, digest)) => (name, Some(digest)),
            None => (text, None),
        };
        let begins_last = name.rfind('/').map_or(0, |slash| slash + 1);
        let (path, tag) = match name[begins_last..].find(':') {
            Some(colon) => (
                &name[..begins_last + colon],
                Some(&name[begins_last + colon + 1..]),
            ),
            None => (name, None),
        };
        let is_part = |part: &str| {
            part.starts_with(|letter: char| letter.is_ascii_alphanumeric())
                && part.chars().all(|letter| {
                    letter.is_ascii_lowercase() || letter.is_ascii_digit() || "._-".contains(letter)
                })
        };
        let mut parts = path.split('/');
        let first = parts.next().unwrap_or_default();
        // The first component may be a host with a port.
        let host = first
            .split_once(':')
            .filter(|(_, port)| path.contains('/') && port.parse::<u16>().is_ok());
        let fits = is_part(host.map_or(first, |(host, _)| host))
            && parts.all(is_part)
            && tag.is_none_or(|tag| {
                (1..=128).contains(&tag.len())
                    && tag
                        .starts_with(|letter: char| letter.is_ascii_alphanumeric() || letter == '_')
                    && tag
                        .chars()
                        .all(|letter| letter.is_ascii_alphanumeric() || "._-".contains(letter))
            })
            && digest.is_none_or(|digest| {
                digest.strip_prefix("sha256:").is_some_and(|hex| {
                    hex.len() == 64 && hex.chars().all(|digit| digit.is_ascii_hexdigit())
                })
            })
            && text.len() <= 255;
        fits.then(|| ImageReference(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ImageReference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// The packages of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageContents {
    /// Packages by name, and the requirements of files.
    Packages {
        packages: Vec<String>,
        files: Option<Input>,
    },
    /// Exactly the content of a lock.
    Locked(Lockfile),
}

/// A request to build an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageRequest {
    pub tag: ImageReference,
    pub base: ImageReference,
    pub contents: ImageContents,
    pub user: ImageUser,
    /// Whether to rebuild everything without the engine's cache.
    pub afresh: bool,
}

/// Result of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuiltImage {
    pub image: MadeImage,
    /// Whether the image already existed.
    pub was_there: bool,
}

/// Error while building, listing or removing an image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(
        "the base image {base} is not here and could not be fetched\nName one that the engine has \
         with --base (\"docker images\" lists them), or let \
         the engine reach a registry"
    )]
    NoBase {
        base: ImageReference,
        #[source]
        cause: EngineError,
    },
    #[error(
        "the base image {base} cannot be used: {why}\nName another one with --base, such as \
         python:3.13-slim"
    )]
    UnusableBase { base: ImageReference, why: String },
    #[error(
        "the packages could not be had for Python {python} of {base} ({platform})\nOnly wheels are \
         taken. If one is missing, name another version of \
         the package, or a base whose Python it has wheels for"
    )]
    Packages {
        base: ImageReference,
        python: String,
        platform: String,
        #[source]
        cause: EnvironmentError,
    },
    #[error("the image could not be built{}", each_on_a_line(said))]
    Build {
        said: String,
        #[source]
        cause: EngineError,
    },
    #[error("could not {attempt}")]
    Files {
        attempt: &'static str,
        #[source]
        cause: io::Error,
    },
    #[error("the image {0} was not made by cellblock, so it is not removed; \"docker rmi\" would")]
    NotOurs(ImageReference),
    #[error(
        "the image {image} is in use ({why})\nRemove the containers that use it, then try again"
    )]
    InUse { image: ImageReference, why: String },
    #[error("it was cancelled; no image was made")]
    Cancelled,
}

fn each_on_a_line(said: &str) -> String {
    said.lines().map(|line| format!("\n  {line}")).collect()
}

/// Builds an image, or finds the existing one. Reports progress. If `cancelled` is triggered,
/// everything that was created is removed.
pub async fn build(
    request: &ImageRequest,
    engine: &Engine,
    data_dir: &Path,
    cancelled: &CancellationToken,
    progress: Progress<'_>,
) -> Result<BuiltImage, ImageError> {
    let (base, lockfile) = plan(request, engine, data_dir, cancelled, progress).await?;
    let recipe = Recipe {
        name: &request.base,
        base: &base,
        lockfile: &lockfile,
        user: request.user,
    };
    let before = engine.image_facts(request.tag.as_str()).await.ok();
    if let Some(found) = before
        .as_ref()
        .filter(|found| !request.afresh && is_made_by(found, &recipe))
    {
        return Ok(BuiltImage {
            image: MadeImage::new(found.clone()),
            was_there: true,
        });
    }

    let build_folder = tempfile::tempdir().map_err(while_doing("make a folder to build in"))?;
    let tree = build_folder
        .path()
        .join(recipe::PLACE.trim_start_matches('/'));
    std::fs::create_dir_all(tree.parent().unwrap_or(build_folder.path()))
        .map_err(while_doing("make a folder to build in"))?;
    let installed = install_elsewhere(&lockfile, &base.python, &tree, data_dir, progress);
    unless_cancelled(cancelled, installed)
        .await?
        .map_err(packages_missing(request, &base))?;
    let context = pack(&recipe, build_folder.path().to_owned()).await?;
    unless_cancelled(cancelled, send(engine, request, context, progress)).await??;
    let made = engine.image_facts(request.tag.as_str()).await?;
    if let Some(replaced) = before.filter(|before| before.id != made.id) {
        local_images::put_away(engine, &replaced).await;
    }
    Ok(BuiltImage {
        image: MadeImage::new(made),
        was_there: false,
    })
}

/// Returns the Dockerfile of an image without building it. Exact versions are resolved; only the
/// base image is fetched.
pub async fn dockerfile(
    request: &ImageRequest,
    engine: &Engine,
    data_dir: &Path,
    cancelled: &CancellationToken,
    progress: Progress<'_>,
) -> Result<String, ImageError> {
    let (base, lockfile) = plan(request, engine, data_dir, cancelled, progress).await?;
    Ok(Recipe {
        name: &request.base,
        base: &base,
        lockfile: &lockfile,
        user: request.user,
    }
    .dockerfile())
}

/// Determines the exact content of the image.
async fn plan(
    request: &ImageRequest,
    engine: &Engine,
    data_dir: &Path,
    cancelled: &CancellationToken,
    progress: Progress<'_>,
) -> Result<(Base, Lockfile), ImageError> {
    let base = base::look_at(engine, &request.base, cancelled, progress).await?;
    let (packages, files) = match &request.contents {
        ImageContents::Locked(lockfile) => return Ok((base, lockfile.clone())),
        ImageContents::Packages { packages, files } => (packages, files.as_ref()),
    };
    let locked = lock_elsewhere(
        Contents { packages, files },
        &base.python,
        data_dir,
        progress,
    );
    let lockfile = unless_cancelled(cancelled, locked)
        .await?
        .map_err(packages_missing(request, &base))?;
    Ok((base, lockfile))
}

fn packages_missing(
    request: &ImageRequest,
    base: &Base,
) -> impl FnOnce(EnvironmentError) -> ImageError {
    let (name, python) = (request.base.clone(), base.python.clone());
    move |cause| ImageError::Packages {
        base: name,
        python: python.version,
        platform: python.platform.name().to_owned(),
        cause,
    }
}

fn is_made_by(image: &ImageFacts, recipe: &Recipe<'_>) -> bool {
    image.labels.get(LABEL_RECIPE) == Some(&recipe.digest())
}

async fn unless_cancelled<T>(
    cancelled: &CancellationToken,
    work: impl Future<Output = T>,
) -> Result<T, ImageError> {
    cancelled
        .run_until_cancelled(work)
        .await
        .ok_or(ImageError::Cancelled)
}

/// Collects the files of the build.
async fn pack(recipe: &Recipe<'_>, root: PathBuf) -> Result<Context, ImageError> {
    let mut context = Context::default();
    context.add_text("Dockerfile", &recipe.dockerfile());
    let packed = tokio::task::spawn_blocking(move || {
        let program = root.join(recipe::PREPARE_PLACE.trim_start_matches('/'));
        std::fs::create_dir_all(program.parent().unwrap_or(&root))?;
        std::fs::write(program, recipe::PREPARE)?;
        context.add_tree(recipe::FILES, &root).map(|()| context)
    });
    packed
        .await
        .expect("walking a folder does not panic")
        .map_err(while_doing("read the packages"))
}

/// Sends the files to the engine and follows the build.
async fn send(
    engine: &Engine,
    request: &ImageRequest,
    context: Context,
    progress: Progress<'_>,
) -> Result<(), ImageError> {
    let total = context.size();
    let sent = std::sync::Arc::new(AtomicU64::new(0));
    let (counter, (told, mut heard)) = (sent.clone(), tokio::sync::watch::channel(0));
    let files = context.archive().inspect(move |piece: &io::Result<Bytes>| {
        let length = piece.as_ref().map_or(0, |piece| piece.len() as u64);
        told.send_replace(counter.fetch_add(length, Ordering::Relaxed) + length);
    });
    let tell = |news: BuildNews| {
        if let BuildNews::Step {
            number,
            of,
            instruction,
        } = news
        {
            let word = instruction.split_whitespace().next().unwrap_or_default();
            progress(EnvironmentProgress {
                step: format!("building ({word})"),
                done: number,
                total: Some(of),
            });
        }
    };
    let building = Building {
        tag: request.tag.as_str(),
        afresh: request.afresh,
    };
    let mut build = std::pin::pin!(engine.build(building, files, &tell));
    let built = loop {
        tokio::select! {
            built = &mut build => break built,
            Ok(()) = heard.changed() => {
                let sent = (*heard.borrow_and_update()).min(total);
                progress(counted("sending packages to the engine (MiB)", sent, total));
            }
        }
    };
    built.map_err(|BuildFailure { error, said }| match error {
        EngineError::Refused(_) => ImageError::Build { said, cause: error },
        other => ImageError::Engine(other),
    })
}

/// Returns progress in mebibytes.
fn counted(step: &str, done: u64, total: u64) -> EnvironmentProgress {
    EnvironmentProgress {
        step: step.to_owned(),
        done: done >> 20,
        total: Some((total >> 20).max(1)),
    }
}

/// Converts a file system error into an error that names the attempt.
fn while_doing(attempt: &'static str) -> impl FnOnce(io::Error) -> ImageError {
    move |cause| ImageError::Files { attempt, cause }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_images_are_told_from_everything_else() {
        let digest = format!("a@sha256:{}", "0".repeat(64));
        for good in [
            "cellblock",
            "python:3.13-slim",
            "host.example:5000/team/cells:V1",
            "localhost:5000/a",
            "a/b_c/d-e",
            &digest,
        ] {
            assert!(ImageReference::new(good).is_some(), "{good}");
        }
        for bad in [
            "",
            "A",
            "a b",
            "a:b:c",
            "-a",
            "a/",
            "/a",
            "a:",
            "a:-b",
            "a\nRUN x",
            "a$b",
            "a\"b",
            "a@sha256:12",
            "host:port/a",
            "--force",
            "..",
            "a//b",
        ] {
            assert!(ImageReference::new(bad).is_none(), "{bad:?}");
        }
        assert!(ImageReference::new(&"a".repeat(256)).is_none());
    }

    #[test]
    fn bytes_are_told_in_mebibytes_and_never_of_nothing() {
        let told = counted("x", 3 << 20, 10 << 20);
        assert_eq!((told.done, told.total), (3, Some(10)));
        assert_eq!(counted("x", 0, 10).total, Some(1));
    }
}
