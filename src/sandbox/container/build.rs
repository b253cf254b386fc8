//! Building an image of our own: a Python with packages, in which nobody is root.
//!
//! The engine builds it from a Dockerfile and a list of requirements, which is all that is sent. Packages are installed into a virtual environment, so that any base image with
//! Python and `venv` serves.

use std::fmt::Write as _;

use super::engine::{Engine, EngineAddress, EngineError, EngineKind};

/// What an image is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    /// The name that it gets.
    pub tag: String,
    /// The image that it begins with; it needs Python 3.10 or newer with `venv`.
    pub base: String,
    /// What is installed, as pip reads it: one requirement per line.
    pub requirements: Vec<String>,
    /// Who owns the working folder inside and runs what is started there by hand.
    pub uid: u32,
    pub gid: u32,
    /// The network of the build, if it is not the engine's usual one.
    pub network: Option<String>,
}

/// Has the engine build an image; `tell` gets each line that it says.
pub async fn build(
    kind: EngineKind,
    address: &EngineAddress,
    recipe: &Recipe,
    tell: &(dyn Fn(&str) + Send + Sync),
) -> Result<(), EngineError> {
    let engine = Engine::connect(kind, address).await?;
    let requirements = recipe.requirements.iter().fold(String::new(), |text, line| text + line + "\n");
    let context = archive(&[("Dockerfile", &dockerfile(recipe)), ("requirements.txt", &requirements)]);
    engine.build(&recipe.tag, recipe.network.as_deref(), context, tell).await
}

/// Writes the Dockerfile of a recipe. Its only free text is the name of the base image, which is checked by whoever read the settings.
fn dockerfile(recipe: &Recipe) -> String {
    let Recipe { base, uid, gid, .. } = recipe;
    let mut text = String::new();
    let mut line = |words: &str| writeln!(text, "{words}").expect("writing to a text does not fail");
    line(&format!("FROM {base}"));
    line("COPY requirements.txt /opt/requirements.txt");
    line(
        "RUN python3 -m venv /opt/venv && /opt/venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check -r /opt/requirements.txt",
    );
    line("ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1");
    // Not by useradd, which small images lack.
    line(&format!(
        "RUN echo 'user:x:{uid}:{gid}:session:/work:/bin/sh' >> /etc/passwd && echo 'user:x:{gid}:' >> /etc/group && mkdir -p /work && chown {uid}:{gid} /work"
    ));
    line("WORKDIR /work");
    line(&format!("USER {uid}:{gid}"));
    text
}

/// A block of an archive.
const BLOCK: usize = 512;

/// Packs files as engines take them: a tar archive, each file readable by everybody.
fn archive(files: &[(&str, &str)]) -> Vec<u8> {
    let mut archive = Vec::new();
    for (name, text) in files {
        let mut head = [0u8; BLOCK];
        let mut put = |place: usize, bytes: &[u8]| head[place..place + bytes.len()].copy_from_slice(bytes);
        put(0, name.as_bytes());
        put(100, b"0000644\0");
        put(108, b"0000000\0");
        put(116, b"0000000\0");
        put(124, format!("{:011o}\0", text.len()).as_bytes());
        put(136, b"00000000000\0");
        // The sum is made as if its own place held spaces.
        put(148, b"        ");
        put(156, b"0");
        put(257, b"ustar\x0000");
        let sum: u32 = head.iter().map(|byte| u32::from(*byte)).sum();
        head[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        archive.extend(head);
        archive.extend(text.as_bytes());
        archive.resize(archive.len().next_multiple_of(BLOCK), 0);
    }
    archive.resize(archive.len() + 2 * BLOCK, 0);
    archive
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn recipe() -> Recipe {
        Recipe {
            tag: "cellblock:latest".to_owned(),
            base: "python:3.13-slim".to_owned(),
            requirements: vec!["ipython".to_owned(), "numpy>=2".to_owned()],
            uid: 1000,
            gid: 100,
            network: None,
        }
    }

    #[test]
    fn nobody_in_the_image_is_root() {
        let text = dockerfile(&recipe());
        assert!(text.starts_with("FROM python:3.13-slim\n"), "{text}");
        assert!(text.ends_with("USER 1000:100\n"), "{text}");
        assert!(text.contains("chown 1000:100 /work"), "{text}");
    }

    #[test]
    fn the_archive_is_one_that_tar_reads() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("context.tar");
        let long = "x".repeat(700);
        std::fs::write(&file, archive(&[("Dockerfile", "FROM x\n"), ("requirements.txt", &long)])).unwrap();
        let done = Command::new("tar").arg("-xf").arg(&file).arg("-C").arg(folder.path()).status().unwrap();
        assert!(done.success());
        assert_eq!(std::fs::read_to_string(folder.path().join("Dockerfile")).unwrap(), "FROM x\n");
        assert_eq!(std::fs::read_to_string(folder.path().join("requirements.txt")).unwrap(), long);
    }
}
