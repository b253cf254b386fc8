//! The base image: whether it is present, and which Python it has.
//!
//! Its Python is run once, with no access to anything else. The reply determines which wheels are
//! fetched, so a wrong reply results in a broken image and nothing worse.

use std::path::PathBuf;

use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use super::{ImageError, ImageReference, counted};
use crate::environment::{Elsewhere, EnvironmentProgress, Platform, Progress};
use crate::sandbox::container::{Engine, EngineError, ImageProbe, ImageProbeError};

/// Names under which an image may provide Python.
const NAMES: [&str; 2] = ["python3", "python"];

/// The oldest Python that the runner supports.
const OLDEST: (u32, u32) = (3, 10);

/// An image that can be built on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Base {
    /// Its id, which unlike a tag never changes.
    pub(super) id: String,
    pub(super) python: Elsewhere,
}

/// The report of the image's Python.
#[derive(Debug, Deserialize)]
struct Answer {
    implementation: String,
    version: (u32, u32, u32),
    executable: PathBuf,
    machine: String,
    glibc: Option<String>,
    free_threaded: bool,
}

const QUESTION: &str = r#"
import json, os, platform, sys, sysconfig
try:
    glibc = os.confstr("CS_GNU_LIBC_VERSION")
except (AttributeError, OSError, ValueError):
    glibc = None
print(json.dumps({
    "implementation": sys.implementation.name,
    "version": sys.version_info[:3],
    "executable": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
    "machine": platform.machine(),
    "glibc": glibc.split()[-1] if glibc else None,
    "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
}))
"#;

/// Finds the image, pulls it if the engine does not have it, and queries its Python.
pub(super) async fn look_at(
    engine: &Engine,
    base: &ImageReference,
    cancelled: &CancellationToken,
    progress: Progress<'_>,
) -> Result<Base, ImageError> {
    progress(EnvironmentProgress {
        step: "looking at the base image".to_owned(),
        done: 0,
        total: None,
    });
    let image = match engine.image_facts(base.as_str()).await {
        Err(EngineError::Missing(_)) => {
            fetch(engine, base, cancelled, progress).await?;
            engine.image_facts(base.as_str()).await?
        }
        found => found?,
    };
    let unusable = |why: String| ImageError::UnusableBase {
        base: base.clone(),
        why,
    };
    if let Some(system) = image.system.as_deref().filter(|system| *system != "linux") {
        return Err(unusable(format!(
            "it is for {system}, and sessions need linux"
        )));
    }
    let mut tried = Vec::new();
    for program in NAMES {
        let arguments = ["-I", "-S", "-B", "-c", QUESTION]
            .map(str::to_owned)
            .to_vec();
        let probe = ImageProbe {
            image: image.id.clone(),
            program: program.to_owned(),
            arguments,
        };
        match engine.ask(&probe, cancelled).await {
            Ok(said) => {
                return Ok(Base {
                    id: image.id,
                    python: understood(&said).map_err(unusable)?,
                });
            }
            Err(ImageProbeError::NoProgram(_)) => tried.push(program),
            Err(ImageProbeError::Cancelled) => return Err(ImageError::Cancelled),
            Err(ImageProbeError::Engine(error)) => return Err(ImageError::Engine(error)),
            Err(other) => return Err(unusable(format!("its Python could not be asked: {other}"))),
        }
    }
    Err(unusable(format!(
        "it has no program called {}",
        tried.join(" or ")
    )))
}

async fn fetch(
    engine: &Engine,
    base: &ImageReference,
    cancelled: &CancellationToken,
    progress: Progress<'_>,
) -> Result<(), ImageError> {
    let step = format!("fetching {base} (MiB)");
    let tell =
        |done: u64, total: Option<u64>| progress(counted(&step, done, total.unwrap_or(done)));
    tokio::select! {
        fetched = engine.pull(base.as_str(), &tell) => match fetched {
            Ok(()) => Ok(()),
            Err(EngineError::DiskFull) => Err(ImageError::Engine(EngineError::DiskFull)),
            Err(cause) => Err(ImageError::NoBase { base: base.clone(), cause }),
        },
        () = cancelled.cancelled() => Err(ImageError::Cancelled),
    }
}

fn understood(said: &str) -> Result<Elsewhere, String> {
    let answer: Answer = serde_json::from_str(said.trim())
        .map_err(|_| "its Python says something else than what it was asked".to_owned())?;
    let (major, minor, patch) = answer.version;
    if answer.implementation != "cpython" {
        return Err(format!(
            "its Python is {}, and only CPython can be used",
            answer.implementation
        ));
    }
    if (major, minor) < OLDEST {
        return Err(format!(
            "it has Python {major}.{minor}, and {}.{} is the oldest that can be used",
            OLDEST.0, OLDEST.1
        ));
    }
    if answer.free_threaded {
        return Err(
            "its Python is built without the global lock, for which there are hardly any wheels"
                .to_owned(),
        );
    }
    if !answer.executable.is_absolute() {
        return Err("its Python does not know where it is".to_owned());
    }
    let platform = Platform::new(&answer.machine, answer.glibc.as_deref()).ok_or_else(|| {
        let library = answer
            .glibc
            .as_deref()
            .map_or("musl".to_owned(), |version| format!("glibc {version}"));
        format!(
            "there are no wheels for its kind of machine, {} with {library}",
            answer.machine
        )
    })?;
    Ok(Elsewhere {
        version: format!("{major}.{minor}.{patch}"),
        platform,
        executable: answer.executable,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(change: impl FnOnce(&mut serde_json::Value)) -> Result<Elsewhere, String> {
        let mut answer = serde_json::json!({
            "implementation": "cpython", "version": [3, 13, 1],
            "executable": "/usr/local/bin/python3.13", "machine": "x86_64", "glibc": "2.41",
            "free_threaded": false,
        });
        change(&mut answer);
        understood(&format!("{answer}\n"))
    }

    #[test]
    fn the_python_of_an_image_is_known_from_its_answer() {
        let python = answer(|_| ()).unwrap();
        assert_eq!(
            (python.version.as_str(), python.line().as_str()),
            ("3.13.1", "3.13")
        );
        assert_eq!(python.platform.name(), "x86_64-manylinux_2_40");
        let musl = answer(|answer| answer["glibc"] = serde_json::Value::Null).unwrap();
        assert_eq!(musl.platform.name(), "x86_64-unknown-linux-musl");
    }

    #[test]
    fn an_image_that_cannot_be_built_on_is_refused_with_the_reason() {
        let refusal = |name: &str, value: serde_json::Value| {
            answer(|answer| answer[name] = value).unwrap_err()
        };
        assert!(refusal("implementation", "pypy".into()).contains("pypy"));
        assert!(refusal("version", serde_json::json!([3, 9, 2])).contains("Python 3.9"));
        assert!(refusal("free_threaded", true.into()).contains("global lock"));
        assert!(refusal("machine", "s390x".into()).contains("s390x with glibc 2.41"));
        assert!(refusal("executable", "".into()).contains("where it is"));
        assert!(
            understood("Python 3.13")
                .unwrap_err()
                .contains("something else")
        );
    }
}
