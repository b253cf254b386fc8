//! Images: inspecting, pulling, building and removing them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::time::Duration;

use bollard::errors::Error;
use bollard::models::{CreateImageInfo, ImageInspect, ImageSummary};
use bollard::query_parameters::{
    BuildImageOptionsBuilder, BuilderVersion, CreateImageOptionsBuilder, ListImagesOptionsBuilder,
    RemoveImageOptionsBuilder,
};
use bollard::{body_full, body_try_stream};
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use sha2::{Digest, Sha256};

use super::{Engine, EngineError, MAX_REFUSAL_LENGTH, credentials};

/// The engine answers a build only when it has read all the files, which may take long over a slow
/// connection.
const BUILD_PATIENCE: Duration = Duration::from_secs(4 * 60 * 60);

/// Number of lines of a build that its failure repeats.
const LINES_KEPT: usize = 20;

/// The engine's description of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageFacts {
    /// The id of the image, which unlike its names cannot move.
    pub id: String,
    pub tags: Vec<String>,
    pub labels: BTreeMap<String, String>,
    /// Such as `linux`, if reported.
    pub system: Option<String>,
    /// Such as `amd64`, if reported.
    pub architecture: Option<String>,
    pub size: u64,
    /// Seconds since 1970, if the engine reports them as a number.
    pub created: Option<i64>,
}

/// The image to build.
#[derive(Debug, Clone, Copy)]
pub struct Building<'a> {
    pub tag: &'a str,
    /// Do not use cached steps.
    pub afresh: bool,
}

/// Progress of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BuildNews {
    Step {
        number: u64,
        of: u64,
        instruction: String,
    },
    /// A step was cached.
    Known,
    Line(String),
}

/// Why an image was not built, and the last lines of the engine's output.
#[derive(Debug, Clone)]
pub struct BuildFailure {
    pub error: EngineError,
    pub said: String,
}

impl Engine {
    /// Inspects an image that the engine has.
    pub async fn image_facts(&self, name: &str) -> Result<ImageFacts, EngineError> {
        Ok(inspected(self.image(name).await?))
    }

    /// Pulls an image, with credentials if there are some for its registry; `tell` receives the
    /// bytes downloaded and the known total.
    pub async fn pull(
        &self,
        name: &str,
        tell: &(dyn Fn(u64, Option<u64>) + Send + Sync),
    ) -> Result<(), EngineError> {
        let options = CreateImageOptionsBuilder::default().from_image(name);
        // Without a tag the engine would pull all tags.
        let options = if name.contains('@')
            || name
                .rsplit('/')
                .next()
                .is_some_and(|last| last.contains(':'))
        {
            options.build()
        } else {
            options.tag("latest").build()
        };
        let (credentials, lack) = match credentials::find(&self.credentials, name).await {
            Ok(found) => (found, None),
            Err(why) => (None, Some(why)),
        };
        let mut layers = Layers::default();
        let mut news = std::pin::pin!(self.docker.create_image(Some(options), None, credentials));
        while let Some(news) = news.next().await {
            match news {
                Ok(news) => {
                    if let Some((done, total)) = layers.add(news) {
                        tell(done, Some(total));
                    }
                }
                Err(error) => return Err(self.pull_failure(error, name, lack)),
            }
        }
        Ok(())
    }

    /// Registries also answer "no such image" when it is private. So the rest of their message is
    /// included, and the reason why credentials were not found.
    fn pull_failure(&self, error: Error, name: &str, lack: Option<String>) -> EngineError {
        let failure = match error {
            Error::DockerResponseServerError {
                status_code: 404,
                message,
            } => EngineError::Refused(message.chars().take(MAX_REFUSAL_LENGTH).collect()),
            other => self.failure(other, &format!("image {name}")),
        };
        match (failure, lack) {
            (EngineError::Refused(why), Some(lack)) => {
                EngineError::Refused(format!("{why}; {lack}"))
            }
            (failure, _) => failure,
        }
    }

    /// Returns the id of an empty image under a name of ours; creates it if the engine has none.
    ///
    /// A non-empty image of that name is rejected, and left alone.
    pub(in crate::sandbox::container) async fn empty_image(
        &self,
        name: &str,
    ) -> Result<String, EngineError> {
        let found = match self.image(name).await {
            Err(EngineError::Missing(_)) => {
                let options = CreateImageOptionsBuilder::default()
                    .from_src("-")
                    .repo(name)
                    .tag("latest")
                    .build();
                let archive = body_full(Bytes::from_static(&EMPTY_ARCHIVE));
                let mut news =
                    std::pin::pin!(self.docker.create_image(Some(options), Some(archive), None));
                while let Some(news) = news.next().await {
                    news.map_err(|error| self.failure(error, &format!("image {name}")))?;
                }
                self.image(name).await
            }
            found => found,
        }?;
        let layers = found
            .root_fs
            .and_then(|files| files.layers)
            .unwrap_or_default();
        match found.id {
            Some(id) if layers == [empty_layer()] => Ok(id),
            _ => Err(EngineError::Refused(format!(
                "the image {name} is not the empty one that is made here"
            ))),
        }
    }

    /// Lists the images that have a label with this value, newest first.
    pub async fn images(&self, label: &str, value: &str) -> Result<Vec<ImageFacts>, EngineError> {
        let filters = HashMap::from([("label", vec![format!("{label}={value}")])]);
        let options = ListImagesOptionsBuilder::default()
            .filters(&filters)
            .build();
        let found = self
            .docker
            .list_images(Some(options))
            .await
            .map_err(|error| self.failure(error, "list of images"))?;
        let mut found: Vec<ImageFacts> = found.into_iter().map(listed).collect();
        found.sort_by_key(|image| std::cmp::Reverse(image.created));
        Ok(found)
    }

    /// Builds an image from an archive with a `Dockerfile`. Steps have no network.
    ///
    /// Dropping this future cancels the build: the engine notices the closed connection, and
    /// removes the container of the current step.
    pub async fn build(
        &self,
        building: Building<'_>,
        files: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
        tell: &(dyn Fn(BuildNews) + Send + Sync),
    ) -> Result<(), BuildFailure> {
        let options = BuildImageOptionsBuilder::default()
            .dockerfile("Dockerfile")
            .t(building.tag)
            .nocache(building.afresh)
            .rm(true)
            .forcerm(true)
            .networkmode("none")
            .version(BuilderVersion::BuilderV1)
            .build();
        let patient = self.docker.clone().with_timeout(BUILD_PATIENCE);
        let mut said = Lines::default();
        let mut news =
            std::pin::pin!(patient.build_image(options, None, Some(body_try_stream(files))));
        while let Some(news) = news.next().await {
            match news {
                Ok(news) => said.add(news.stream.as_deref().unwrap_or_default(), tell),
                Err(error) => return Err(self.build_failure(error, said)),
            }
        }
        Ok(())
    }

    fn build_failure(&self, error: Error, said: Lines) -> BuildFailure {
        let told = self.failure(error, "such image");
        // A step that runs out of space reports it in its output; the engine reports only that the
        // step failed.
        let is_full = said
            .kept
            .iter()
            .any(|line| line.contains("No space left on device"));
        let error = if is_full { EngineError::DiskFull } else { told };
        BuildFailure {
            error,
            said: Vec::from(said.kept).join("\n"),
        }
    }

    /// Removes an image by name or id. One that a container uses is kept.
    pub async fn remove_image(&self, name: &str) -> Result<(), EngineError> {
        let options = RemoveImageOptionsBuilder::default().build();
        let removed = self.docker.remove_image(name, Some(options), None).await;
        removed.map(|_| ()).map_err(|error| match error {
            Error::DockerResponseServerError {
                status_code: 409,
                message,
            } => EngineError::InUse(message),
            other => self.failure(other, &format!("image {name}")),
        })
    }
}

/// An archive ends with two blocks of zeros, and this one consists of nothing else.
const EMPTY_ARCHIVE: [u8; 1024] = [0; 1024];

/// Returns the name of a layer, which is the digest of its archive.
fn empty_layer() -> String {
    let digest = Sha256::digest(EMPTY_ARCHIVE);
    digest.iter().fold("sha256:".to_owned(), |text, byte| {
        format!("{text}{byte:02x}")
    })
}

fn inspected(found: ImageInspect) -> ImageFacts {
    let labels = found
        .config
        .and_then(|config| config.labels)
        .unwrap_or_default();
    ImageFacts {
        id: found.id.unwrap_or_default(),
        tags: found.repo_tags.unwrap_or_default(),
        labels: labels.into_iter().collect(),
        system: found.os.filter(|system| !system.is_empty()),
        architecture: found
            .architecture
            .filter(|architecture| !architecture.is_empty()),
        size: found
            .size
            .and_then(|size| u64::try_from(size).ok())
            .unwrap_or(0),
        created: None,
    }
}

fn listed(found: ImageSummary) -> ImageFacts {
    ImageFacts {
        id: found.id,
        // An untagged image is listed under a placeholder name.
        tags: found
            .repo_tags
            .into_iter()
            .filter(|tag| tag != "<none>:<none>")
            .collect(),
        labels: found.labels.into_iter().collect(),
        system: None,
        architecture: None,
        size: u64::try_from(found.size).unwrap_or(0),
        created: Some(found.created),
    }
}

/// The layers of an image that is being pulled: bytes downloaded, and all bytes.
#[derive(Default)]
struct Layers(HashMap<String, (u64, u64)>);

impl Layers {
    /// Adds a progress event, and returns the sums if they changed.
    fn add(&mut self, news: CreateImageInfo) -> Option<(u64, u64)> {
        // Unpacking after the download counts from zero again.
        if news.status.as_deref() == Some("Extracting") {
            return None;
        }
        let detail = news.progress_detail?;
        let bytes = |count: Option<i64>| count.and_then(|count| u64::try_from(count).ok());
        self.0
            .insert(news.id?, (bytes(detail.current)?, bytes(detail.total)?));
        let sum = |part: fn(&(u64, u64)) -> u64| self.0.values().map(part).sum::<u64>();
        Some((sum(|layer| layer.0), sum(|layer| layer.1)))
    }
}

/// The lines of a build. They arrive in pieces.
#[derive(Default)]
struct Lines {
    unfinished: String,
    kept: VecDeque<String>,
}

impl Lines {
    fn add(&mut self, piece: &str, tell: &(dyn Fn(BuildNews) + Send + Sync)) {
        self.unfinished.push_str(piece);
        while let Some((line, rest)) = self.unfinished.split_once('\n') {
            let line = line.trim_end().to_owned();
            self.unfinished = rest.to_owned();
            if line.is_empty() {
                continue;
            }
            tell(understood(&line));
            self.kept.push_back(line);
            if self.kept.len() > LINES_KEPT {
                self.kept.pop_front();
            }
        }
        // The output of a step that writes an endless line is not kept.
        if self.unfinished.len() > 64 * 1024 {
            self.unfinished.clear();
        }
    }
}

/// Parses `Step 3/6 : RUN …` of Docker and `STEP 3/6: RUN …` of Podman.
fn understood(line: &str) -> BuildNews {
    let step = || {
        let rest = line.strip_prefix("Step ").or(line.strip_prefix("STEP "))?;
        let (numbers, instruction) = rest.split_once(':')?;
        let (number, of) = numbers.trim().split_once('/')?;
        Some(BuildNews::Step {
            number: number.parse().ok()?,
            of: of.parse().ok()?,
            instruction: instruction.trim().to_owned(),
        })
    };
    match line.trim_start() {
        trimmed
            if trimmed.starts_with("---> Using cache")
                || trimmed.starts_with("--> Using cache") =>
        {
            BuildNews::Known
        }
        _ => step().unwrap_or_else(|| BuildNews::Line(line.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn heard(pieces: &[&str]) -> Vec<BuildNews> {
        let heard = Mutex::new(Vec::new());
        let mut lines = Lines::default();
        for piece in pieces {
            lines.add(piece, &|news| heard.lock().unwrap().push(news));
        }
        heard.into_inner().unwrap()
    }

    #[test]
    fn the_layer_in_which_there_is_nothing_has_the_name_that_engines_give_it() {
        assert_eq!(
            empty_layer(),
            "sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"
        );
    }

    #[test]
    fn steps_of_both_engines_are_understood_in_whatever_pieces_they_come() {
        let step = |number, instruction: &str| BuildNews::Step {
            number,
            of: 9,
            instruction: instruction.to_owned(),
        };
        assert_eq!(
            heard(&["Step 1/9 : FR", "OM a\nStep 2/9 : RUN x", "\n"]),
            [step(1, "FROM a"), step(2, "RUN x")]
        );
        assert_eq!(heard(&["STEP 3/9: COPY a b\n"]), [step(3, "COPY a b")]);
        assert_eq!(
            heard(&[" ---> Using cache\n", "--> Using cache 12ab\n"]),
            [BuildNews::Known, BuildNews::Known]
        );
        assert_eq!(
            heard(&["Step by step: x\n", "\n"]),
            [BuildNews::Line("Step by step: x".to_owned())]
        );
    }

    #[test]
    fn what_has_come_of_an_image_only_grows() {
        let news = |layer: &str, status: &str, current: i64, total: i64| -> CreateImageInfo {
            let detail = serde_json::json!({"current": current, "total": total});
            serde_json::from_value(
                serde_json::json!({"id": layer, "status": status, "progressDetail": detail}),
            )
            .unwrap()
        };
        let mut layers = Layers::default();
        assert_eq!(layers.add(news("a", "Downloading", 1, 10)), Some((1, 10)));
        assert_eq!(layers.add(news("b", "Downloading", 5, 20)), Some((6, 30)));
        assert_eq!(layers.add(news("a", "Downloading", 10, 10)), Some((15, 30)));
        assert_eq!(layers.add(news("a", "Extracting", 1, 10)), None);
        assert_eq!(layers.add(CreateImageInfo::default()), None);
        assert_eq!(layers.add(news("b", "Downloading", 20, 20)), Some((30, 30)));
    }

    #[test]
    fn only_the_last_lines_are_kept() {
        let mut lines = Lines::default();
        for number in 0..100 {
            lines.add(&format!("line {number}\n"), &|_| ());
        }
        assert_eq!(
            (lines.kept.len(), lines.kept[0].as_str()),
            (LINES_KEPT, "line 80")
        );
        lines.add(&"x".repeat(100_000), &|_| ());
        assert!(lines.unfinished.is_empty());
    }
}
