//! The content of an image, and the Dockerfile for it. Pure.
//!
//! The Dockerfile contains nothing that varies between builds: the same request gives the same
//! text, and the same text with the same files gives the same image.

use super::ImageReference;
use super::base::Base;
use crate::environment::Lockfile;

/// Directory of the packages inside. The runner is mounted at a different one.
pub(super) const PLACE: &str = "/opt/venv";
/// Directory of the image's files in the archive, laid out by their paths in the image. They are
/// copied over its root: the *target* directory of a copy gets the time of the build, and only the
/// root belongs to no layer.
pub(super) const FILES: &str = "files";
/// The working directory inside, the same as in the native backend.
pub(super) const WORK: &str = cellblock_jail::root::WORK;
/// The image's user and its home directory.
const USER: &str = "cellblock";
const HOME: &str = "/home/cellblock";

/// Marks an image as ours, in the format of this version.
pub(super) const LABEL_IMAGE: &str = "cellblock.image";
pub(super) const LABEL_IMAGE_VALUE: &str = "1";
/// Identifies the whole recipe: two images with the same value are the same.
pub(super) const LABEL_RECIPE: &str = "cellblock.recipe";
pub(super) const LABEL_PYTHON: &str = "cellblock.python";
pub(super) const LABEL_PACKAGES: &str = "cellblock.packages";
const LABEL_LOCK: &str = "cellblock.lock";
const LABEL_VERSION: &str = "cellblock.version";
const LABEL_BASE: &str = "org.opencontainers.image.base.name";
const LABEL_BASE_ID: &str = "cellblock.base";

/// Path of the script that runs in the image during the build.
pub(super) const PREPARE_PLACE: &str = "/opt/venv/share/cellblock/prepare.py";
pub(super) const PREPARE: &str = include_str!("prepare.py");

/// The default user of programs in the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageUser {
    Ordinary {
        uid: u32,
        gid: u32,
    },
    /// For images that users modify by hand. A session never runs as root, whatever the image
    /// specifies.
    Root,
}

/// Everything that determines the content of an image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Recipe<'a> {
    pub(super) name: &'a ImageReference,
    pub(super) base: &'a Base,
    pub(super) lockfile: &'a Lockfile,
    pub(super) user: ImageUser,
}

impl Recipe<'_> {
    /// Returns a hash of the recipe: its text, and the script that it runs.
    pub(super) fn digest(&self) -> String {
        use sha2::{Digest, Sha256};
        let mut hash = Sha256::new();
        for part in [self.text(None).as_str(), PREPARE] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        hash.finalize()
            .iter()
            .take(16)
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    /// Returns the Dockerfile.
    pub(super) fn dockerfile(&self) -> String {
        self.text(Some(&self.digest()))
    }

    fn text(&self, digest: Option<&str>) -> String {
        let Recipe {
            name,
            base,
            lockfile,
            user,
        } = self;
        let mut labels = vec![
            (LABEL_IMAGE, LABEL_IMAGE_VALUE.to_owned()),
            (LABEL_VERSION, env!("CARGO_PKG_VERSION").to_owned()),
            (LABEL_BASE, name.to_string()),
            (LABEL_BASE_ID, base.id.clone()),
            (LABEL_PYTHON, base.python.version.clone()),
            (LABEL_LOCK, lockfile.digest()),
            (LABEL_PACKAGES, packages(lockfile)),
        ];
        labels.extend(digest.map(|digest| (LABEL_RECIPE, digest.to_owned())));
        let labels: Vec<String> = labels
            .iter()
            .map(|(name, value)| format!("{name}={}", quoted(value)))
            .collect();
        let labels = labels.join(" \\\n      ");
        let (uid, gid, home) = match user {
            ImageUser::Ordinary { uid, gid } => (*uid, *gid, HOME),
            ImageUser::Root => (0, 0, "/root"),
        };
        let python = base.python.executable.to_string_lossy();
        let run = [
            &*python,
            "-s",
            "-S",
            "-B",
            PREPARE_PLACE,
            PLACE,
            &uid.to_string(),
            &gid.to_string(),
            USER,
            home,
            WORK,
        ];
        let run = serde_json::to_string(&run).expect("texts can be written as JSON");
        // Labels come last: they are cheap, and changing one does not invalidate the build cache of
        // the steps before.
        format!(
            "# Made by cellblock: {name} with Python {} and the packages of a session.\n\
             FROM {}\n\
             ENV PATH={PLACE}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
             VIRTUAL_ENV={PLACE} HOME={home} LANG=C.UTF-8\n\
             COPY {FILES} /\n\
             USER 0:0\n\
             RUN {run}\n\
             WORKDIR {WORK}\n\
             USER {uid}:{gid}\n\
             ENTRYPOINT []\n\
             CMD [\"python3\"]\n\
             LABEL {labels}\n",
            base.python.version, base.id,
        )
    }
}

/// Lists the installed packages without URLs, because a URL could contain a password.
fn packages(lockfile: &Lockfile) -> String {
    let plain = |requirement: &String| {
        let requirement = requirement.split(';').next().unwrap_or_default();
        requirement
            .split(" @ ")
            .next()
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    lockfile
        .requirements()
        .iter()
        .map(plain)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Quotes a text so that the engine reads it literally: variables are not expanded, and quotes do
/// not end it.
fn quoted(text: &str) -> String {
    let escaped: String = text
        .chars()
        .filter(|letter| !letter.is_control())
        .flat_map(|letter| match letter {
            '"' | '\\' | '$' => vec!['\\', letter],
            other => vec![other],
        })
        .collect();
    format!("\"{escaped}\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::{Elsewhere, Platform};

    fn base() -> Base {
        let platform = Platform::new("x86_64", Some("2.36")).unwrap();
        let executable = "/usr/local/bin/python3.13".into();
        Base {
            id: "sha256:0a1b".to_owned(),
            python: Elsewhere {
                version: "3.13.1".to_owned(),
                platform,
                executable,
            },
        }
    }

    fn lockfile(lines: &str) -> Lockfile {
        Lockfile::parse(&format!("ipython==9.0 --hash=sha256:aa\n{lines}")).unwrap()
    }

    fn recipe(base: &Base, lockfile: &Lockfile, user: ImageUser) -> (String, String) {
        let name = ImageReference::new("python:3.13-slim").unwrap();
        let recipe = Recipe {
            name: &name,
            base,
            lockfile,
            user,
        };
        (recipe.dockerfile(), recipe.digest())
    }

    const ME: ImageUser = ImageUser::Ordinary {
        uid: 1234,
        gid: 2345,
    };

    #[test]
    fn the_text_says_everything_and_in_this_order() {
        let lockfile = lockfile("six==1.17.0 --hash=sha256:bb");
        let (text, digest) = recipe(&base(), &lockfile, ME);
        let expected = format!(
            r#"# Made by cellblock: python:3.13-slim with Python 3.13.1 and the packages of a session.
FROM sha256:0a1b
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin VIRTUAL_ENV=/opt/venv HOME=/home/cellblock LANG=C.UTF-8
COPY files /
USER 0:0
RUN ["/usr/local/bin/python3.13","-s","-S","-B","/opt/venv/share/cellblock/prepare.py","/opt/venv","1234","2345","cellblock","/home/cellblock","/work"]
WORKDIR /work
USER 1234:2345
ENTRYPOINT []
CMD ["python3"]
LABEL cellblock.image="1" \
      cellblock.version="{version}" \
      org.opencontainers.image.base.name="python:3.13-slim" \
      cellblock.base="sha256:0a1b" \
      cellblock.python="3.13.1" \
      cellblock.lock="{lock}" \
      cellblock.packages="ipython==9.0 six==1.17.0" \
      cellblock.recipe="{digest}"
"#,
            version = env!("CARGO_PKG_VERSION"),
            lock = lockfile.digest(),
        );
        assert_eq!(text, expected);
    }

    #[test]
    fn another_wish_is_another_recipe_and_the_same_wish_the_same() {
        let lock = lockfile("");
        let (_, digest) = recipe(&base(), &lock, ME);
        assert_eq!(recipe(&base(), &lock, ME).1, digest);
        assert_ne!(
            recipe(&base(), &lockfile("six==1.17.0 --hash=sha256:bb"), ME).1,
            digest
        );
        assert_ne!(recipe(&base(), &lock, ImageUser::Root).1, digest);
        let moved = Base {
            id: "sha256:ffff".to_owned(),
            ..base()
        };
        assert_ne!(
            recipe(&moved, &lock, ME).1,
            digest,
            "the name of the base leads to another image now"
        );
    }

    #[test]
    fn an_address_with_a_password_is_written_nowhere() {
        let lock = lockfile("x @ https://me:password@example.com/x.whl --hash=sha256:bb");
        let (text, _) = recipe(&base(), &lock, ME);
        assert!(text.contains("\"ipython==9.0 x\""), "{text}");
        assert!(!text.contains("password"), "{text}");
    }

    #[test]
    fn nothing_in_a_label_is_read_as_something_else() {
        assert_eq!(quoted("a\"b$c\\d\ne"), "\"a\\\"b\\$c\\\\de\"");
    }

    #[test]
    fn root_keeps_its_own_folder() {
        let (text, _) = recipe(&base(), &lockfile(""), ImageUser::Root);
        assert!(
            text.contains("USER 0:0\nENTRYPOINT") && text.contains("HOME=/root "),
            "{text}"
        );
    }
}
