//! Images built here: finds them by their labels and removes them.

use super::recipe::{LABEL_IMAGE, LABEL_IMAGE_VALUE, LABEL_PACKAGES, LABEL_PYTHON};
use super::{ImageError, ImageReference};
use crate::sandbox::container::{Engine, EngineError, ImageFacts};

/// An image that we built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MadeImage {
    pub id: String,
    /// Its tags. An image that was replaced by a newer one has none.
    pub tags: Vec<String>,
    /// Such as `3.13.1`.
    pub python: String,
    /// The installed packages, as `name==version`.
    pub packages: Vec<String>,
    pub size: u64,
    /// Seconds since 1970, if the engine reports it.
    pub created: Option<i64>,
}

impl MadeImage {
    pub(super) fn new(facts: ImageFacts) -> MadeImage {
        let label = |name: &str| facts.labels.get(name).cloned().unwrap_or_default();
        MadeImage {
            python: label(LABEL_PYTHON),
            packages: label(LABEL_PACKAGES)
                .split_whitespace()
                .map(str::to_owned)
                .collect(),
            id: facts.id,
            tags: facts.tags,
            size: facts.size,
            created: facts.created,
        }
    }
}

/// Lists the images that we built, newest first.
pub async fn list(engine: &Engine) -> Result<Vec<MadeImage>, ImageError> {
    let found = engine.images(LABEL_IMAGE, LABEL_IMAGE_VALUE).await?;
    Ok(found.into_iter().map(MadeImage::new).collect())
}

/// Removes an image that we built, unless a container uses it. Other images are rejected, so that a
/// mistyped name cannot remove one.
pub async fn remove(engine: &Engine, image: &ImageReference) -> Result<(), ImageError> {
    if !is_ours(&engine.image_facts(image.as_str()).await?) {
        return Err(ImageError::NotOurs(image.clone()));
    }
    engine
        .remove_image(image.as_str())
        .await
        .map_err(|error| match error {
            EngineError::InUse(why) => ImageError::InUse {
                image: image.clone(),
                why,
            },
            other => ImageError::Engine(other),
        })
}

/// Removes an image that lost its last tag to a newer one. An image in use is kept, and `list`
/// shows it.
pub(super) async fn put_away(engine: &Engine, replaced: &ImageFacts) {
    let Ok(found) = engine.image_facts(&replaced.id).await else {
        return;
    };
    if is_ours(&found) && found.tags.is_empty() {
        let _ = engine.remove_image(&found.id).await;
    }
}

fn is_ours(image: &ImageFacts) -> bool {
    image
        .labels
        .get(LABEL_IMAGE)
        .is_some_and(|value| value == LABEL_IMAGE_VALUE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(labels: &[(&str, &str)]) -> ImageFacts {
        ImageFacts {
            id: "sha256:00".to_owned(),
            tags: vec!["cells:latest".to_owned()],
            labels: labels
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
            system: None,
            architecture: None,
            size: 7,
            created: Some(1),
        }
    }

    #[test]
    fn an_image_tells_by_its_labels_what_it_is() {
        let made = MadeImage::new(facts(&[
            (LABEL_PYTHON, "3.13.1"),
            (LABEL_PACKAGES, "ipython==9.0 six==1.17.0"),
        ]));
        assert_eq!(
            (made.python.as_str(), made.packages.len(), made.size),
            ("3.13.1", 2, 7)
        );
        assert!(is_ours(&facts(&[(LABEL_IMAGE, LABEL_IMAGE_VALUE)])));
        assert!(!is_ours(&facts(&[])) && !is_ours(&facts(&[(LABEL_IMAGE, "2")])));
    }
}
