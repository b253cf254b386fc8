//! Inspection of an image: one program, run once, in a container without any rights.
//!
//! This is how the contents of an image are determined. The container has no network, no
//! capabilities and nothing writable, and is always removed. Its output is an untrusted claim of
//! the image's author.

use std::collections::HashMap;
use std::time::Duration;

use bollard::container::LogOutput;
use bollard::models::{ContainerCreateBody, HostConfig, ResourcesUlimits};
use bollard::query_parameters::{
    AttachContainerOptionsBuilder, CreateContainerOptions, StartContainerOptions,
};
use futures_util::StreamExt;
use tokio_util::sync::CancellationToken;

use super::{Engine, EngineError};

/// Timeout for the program on a slow disk.
const LONGEST: Duration = Duration::from_secs(120);

/// Maximum size of the output.
const MAX_OUTPUT: usize = 64 * 1024;

/// The program to run, and the image to run it in.
#[derive(Debug, Clone)]
pub struct ImageProbe {
    pub image: String,
    pub program: String,
    pub arguments: Vec<String>,
}

/// Why the program gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ImageProbeError {
    #[error("there is no {0}")]
    NoProgram(String),
    #[error("{program} said: {said}")]
    Failed { program: String, said: String },
    #[error("it took longer than {} s", LONGEST.as_secs())]
    TooLong,
    #[error("it was cancelled")]
    Cancelled,
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl Engine {
    /// Runs the program in its own container and returns its standard output.
    pub async fn ask(
        &self,
        probe: &ImageProbe,
        cancelled: &CancellationToken,
    ) -> Result<String, ImageProbeError> {
        let image = format!("image {}", probe.image);
        let made = self
            .docker
            .create_container(None::<CreateContainerOptions>, container(probe))
            .await;
        let id = made.map_err(|error| self.failure(error, &image))?.id;
        let done = tokio::select! {
            done = tokio::time::timeout(LONGEST, self.follow(&id, probe)) => {
                done.unwrap_or(Err(ImageProbeError::TooLong))
            }
            () = cancelled.cancelled() => Err(ImageProbeError::Cancelled),
        };
        self.remove(&id).await;
        done
    }

    async fn follow(&self, id: &str, probe: &ImageProbe) -> Result<String, ImageProbeError> {
        let thing = "such container";
        let options = AttachContainerOptionsBuilder::default()
            .stdout(true)
            .stderr(true)
            .stream(true)
            .build();
        let attached = self.docker.attach_container(id, Some(options)).await;
        let mut output = attached.map_err(|error| self.failure(error, thing))?.output;
        let started = self
            .docker
            .start_container(id, None::<StartContainerOptions>)
            .await;
        started.map_err(|error| match self.failure(error, thing) {
            EngineError::Refused(why) if is_program_missing(&why) => {
                ImageProbeError::NoProgram(probe.program.clone())
            }
            // Some engines use this status code when the program, not the container, is missing.
            EngineError::Missing(_) => ImageProbeError::NoProgram(probe.program.clone()),
            other => ImageProbeError::Engine(other),
        })?;
        let (mut said, mut error_output) = (Vec::new(), Vec::new());
        while let Some(piece) = output.next().await {
            match piece.map_err(|error| self.failure(error, thing))? {
                LogOutput::StdErr { message } => error_output.extend_from_slice(&message),
                LogOutput::StdOut { message } | LogOutput::Console { message } => {
                    said.extend_from_slice(&message)
                }
                LogOutput::StdIn { .. } => {}
            }
            if said.len() + error_output.len() > MAX_OUTPUT {
                let said = "more than it was asked for".to_owned();
                return Err(ImageProbeError::Failed {
                    program: probe.program.clone(),
                    said,
                });
            }
        }
        if said.is_empty() {
            let error_output = String::from_utf8_lossy(&error_output);
            let said = error_output
                .trim()
                .lines()
                .last()
                .unwrap_or("nothing")
                .to_owned();
            return Err(ImageProbeError::Failed {
                program: probe.program.clone(),
                said,
            });
        }
        Ok(String::from_utf8_lossy(&said).into_owned())
    }
}

fn is_program_missing(why: &str) -> bool {
    [
        "executable file not found",
        "no such file or directory",
        "not found in $PATH",
    ]
    .iter()
    .any(|text| why.contains(text))
}

fn container(probe: &ImageProbe) -> ContainerCreateBody {
    let limits = HostConfig {
        network_mode: Some("none".to_owned()),
        cap_drop: Some(vec!["ALL".to_owned()]),
        security_opt: Some(vec!["no-new-privileges".to_owned()]),
        readonly_rootfs: Some(true),
        memory: Some(512 << 20),
        pids_limit: Some(32),
        // Low values, because a limit above that of the engine itself cannot be set, and some
        // engines would try.
        ulimits: Some(vec![limit("nofile", 1024), limit("nproc", 1024)]),
        ..HostConfig::default()
    };
    ContainerCreateBody {
        image: Some(probe.image.clone()),
        entrypoint: Some(vec![probe.program.clone()]),
        cmd: Some(probe.arguments.clone()),
        // The user `nobody`, which owns nothing. Its number is the same everywhere.
        user: Some("65534:65534".to_owned()),
        labels: Some(HashMap::from([(
            "cellblock.role".to_owned(),
            "probe".to_owned(),
        )])),
        attach_stdout: Some(true),
        attach_stderr: Some(true),
        host_config: Some(limits),
        ..ContainerCreateBody::default()
    }
}

fn limit(name: &str, most: i64) -> ResourcesUlimits {
    ResourcesUlimits {
        name: Some(name.to_owned()),
        soft: Some(most),
        hard: Some(most),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_has_no_rights_and_no_network() {
        let probe = ImageProbe {
            image: "a".to_owned(),
            program: "python3".to_owned(),
            arguments: vec!["-V".to_owned()],
        };
        let made = container(&probe);
        let limits = made.host_config.unwrap();
        assert_eq!(limits.network_mode.as_deref(), Some("none"));
        assert_eq!(
            (limits.cap_drop, limits.readonly_rootfs),
            (Some(vec!["ALL".to_owned()]), Some(true))
        );
        assert_eq!(
            limits.security_opt,
            Some(vec!["no-new-privileges".to_owned()])
        );
        assert_eq!(
            (limits.binds, limits.mounts, limits.privileged),
            (None, None, None)
        );
        assert_eq!(made.user.as_deref(), Some("65534:65534"));
    }

    #[test]
    fn engines_say_in_several_ways_that_a_program_is_missing() {
        assert!(is_program_missing(
            "exec: \"python3\": executable file not found in $PATH: unknown"
        ));
        assert!(is_program_missing(
            "crun: executable file `python3` not found in $PATH: No such file or directory"
        ));
        assert!(!is_program_missing("permission denied"));
    }
}
