//! Settings for the backend.

use std::collections::BTreeMap;
use std::path::Path;

use super::{Check, ReadNamedFile, has_default};
use crate::config::table::Key;
use crate::config::{BackendChoice, ConfigError, ContainerChoice, engine};
use crate::sandbox::container::EngineKind;

/// Names of the backends.
const NATIVE: &str = "native";
const DOCKER: &str = "docker";
const PODMAN: &str = "podman";

impl Check<'_> {
    pub(super) fn backend(
        &self,
        surroundings: &BTreeMap<String, String>,
        read: ReadNamedFile<'_>,
    ) -> Result<BackendChoice, ConfigError> {
        let kind = self.value(Key::Backend, |text| match text {
            NATIVE => Ok(None),
            DOCKER => Ok(Some(EngineKind::Docker)),
            PODMAN => Ok(Some(EngineKind::Podman)),
            _ => Err(None),
        })?;
        let image = self.read(
            Key::ContainerTag,
            "the name of an image, such as python:3.13-slim",
            image_name,
        )?;
        let runtime = self.read(
            Key::Runtime,
            "a runtime that the engine knows, such as runsc",
            runtime_name,
        )?;
        let pool_max_age = self.duration(Key::PoolMaxAge)?;
        let pool_creations = self.number(Key::PoolCreations)?;
        let Some(kind) = kind.flatten() else {
            // An operator who names an image and gets no container should be warned.
            for key in [Key::ContainerTag, Key::Runtime] {
                if self.is_written(key)? {
                    return Err(self.invalid(key, "nothing without --backend docker or podman"));
                }
            }
            return Ok(BackendChoice::Native);
        };
        Ok(BackendChoice::Containers(ContainerChoice {
            kind,
            address: engine::find(kind, surroundings, read, &Path::exists)?,
            credentials: engine::credential_files(kind, surroundings),
            image: has_default(image),
            runtime,
            pool_max_age,
            pool_creations,
        }))
    }
}

/// Image names contain only these characters, and none that could be misinterpreted in an engine
/// request.
fn image_name(text: &str) -> Result<String, Option<String>> {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "._-/:@+".contains(letter);
    let fits = !text.is_empty() && text.len() <= 512 && text.chars().all(is_plain);
    let begins = text.starts_with(|letter: char| letter.is_ascii_alphanumeric());
    if fits && begins && !text.contains("..") {
        Ok(text.to_owned())
    } else {
        Err(None)
    }
}

fn runtime_name(text: &str) -> Result<String, Option<String>> {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
    let fits = !text.is_empty() && text.len() <= 128 && text.chars().all(is_plain);
    if fits && text.starts_with(|letter: char| letter.is_ascii_alphanumeric()) {
        Ok(text.to_owned())
    } else {
        Err(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_images_are_what_registries_allow() {
        for good in [
            "python",
            "python:3.13-slim",
            "localhost:5000/a/b_c:tag",
            "a@sha256:0123",
            "GHCR.io/x",
        ] {
            assert!(image_name(good).is_ok(), "{good}");
        }
        for bad in ["", "-x", "/x", "a b", "a\nb", "a/../b", "a?b=c", "a&b"] {
            assert!(image_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_of_runtimes_are_words() {
        assert!(runtime_name("runsc").is_ok() && runtime_name("io.containerd.kata.v2").is_ok());
        for bad in ["", "-x", "/usr/bin/evil", "a b"] {
            assert!(runtime_name(bad).is_err(), "{bad:?}");
        }
    }
}
