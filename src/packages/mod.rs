//! Packages: what a session gets when it asks for one.
//!
//! ```text
//! wish ─ requirement ─→ what may be asked at all
//!          │
//!          ├─ resolve    uv, in a fresh hidden sandbox that reaches only the index: which versions, which hashes
//!          ├─ store      which of them the host has already
//!          ├─ install    uv again, there: the missing wheels, unpacked, one stream of files each → store
//!          └─ build      only when there is no wheel: in another fresh sandbox, because it runs the package's code → private trees
//!          ↓
//! Installed: folders for the session's `sys.path`, read-only, shared by all who have the package
//! ```
//!
//! `installer` leads, `answers` reads what the inside says, `installer.py` is what runs inside. The hidden sandbox is behind the trait
//! `Workshop`: this room does not know how one is made.
//!
//! No package is ever unpacked, built or imported on the host; a stream of plain files is all that comes out of a sandbox. A tree made where a
//! package's code ran is never shared. Passwords of an index and addresses of proxies go into sandboxes in which no package's code runs, and
//! nowhere else.

mod answers;
mod index;
mod installer;
mod requirement;
mod store;
mod stream;

use std::fmt;
use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;

pub use index::{FileHosts, IndexError, IndexSettings, IndexUrl, Proxies};
pub use installer::{Installer, Wish};
pub use requirement::{
    LONGEST_REQUIREMENT, Location, MOST_REQUIREMENTS, Requirement, RequirementError, Source,
    normalised,
};
pub use store::{Key, Record, Room, Sharing, Store, StoreError, Tree, TreeName};
pub use stream::{Bounds, StreamError};

/// Where `Store::trees` is mounted inside, read-only.
pub const PACKAGES_INSIDE: &str = "/opt/cellblock/packages";

/// A distribution of a certain version.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Package {
    /// In its normalised spelling.
    pub name: String,
    pub version: String,
}

impl Package {
    pub fn new(name: &str, version: &str) -> Package {
        Package {
            name: normalised(name),
            version: version.to_owned(),
        }
    }

    /// Reads `name==version`, the form in which environments record what they hold.
    pub fn parse(text: &str) -> Option<Package> {
        let (name, version) = text.split_once("==")?;
        (requirement::is_name(name) && requirement::is_version(version))
            .then(|| Package::new(name, version))
    }
}

impl fmt::Display for Package {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}-{}", self.name, self.version)
    }
}

/// What came of a wish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// Folders inside, for the front of the session's `sys.path`, in this order.
    pub paths: Vec<PathBuf>,
    pub added: Vec<Package>,
    /// What the session had already of what it takes.
    pub already: Vec<Package>,
    /// Trees that belong to this session alone. `Store::remove` them when it and its copies have ended.
    pub private: Vec<TreeName>,
    /// What pip would say in the end.
    pub text: String,
}

/// Bounds of one installation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// From the request to the last tree.
    pub time: Duration,
    /// All new trees together.
    pub bytes: u64,
    /// Each tree.
    pub files: u64,
    pub builds: Builds,
    /// All trees of the store together, before one installation adds to them.
    pub store: u64,
    /// Files in the sandbox of the installer. It is enforced there; here it is only told.
    pub disk: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            time: Duration::from_secs(300),
            bytes: 2 << 30,
            files: 50_000,
            builds: Builds::Allowed,
            store: 10 << 30,
            disk: 4 << 30,
        }
    }
}

/// Whether packages without a wheel are built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Builds {
    Allowed,
    Refused,
}

/// What an installation is doing right now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Resolving,
    Downloading {
        packages: usize,
    },
    Building,
    Adding {
        package: Package,
        done: usize,
        total: usize,
    },
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Resolving => formatter.write_str("resolving packages"),
            Step::Downloading { packages: 1 } => formatter.write_str("downloading 1 package"),
            Step::Downloading { packages } => write!(formatter, "downloading {packages} packages"),
            Step::Building => formatter.write_str("building packages from source"),
            Step::Adding {
                package,
                done,
                total,
            } => {
                write!(
                    formatter,
                    "adding {} {} ({} of {total})",
                    package.name,
                    package.version,
                    done + 1
                )
            }
        }
    }
}

/// Hears of each step as it begins.
pub type Tell<'a> = &'a (dyn Fn(Step) + Send + Sync);

/// Why nothing was installed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// The resolver's or builder's own words, shortened if need be, without passwords.
    #[error("{words}")]
    Refused { words: String },
    #[error(
        "the installation was stopped because it took longer than {} s; install fewer packages at once. The server's \
         setting package_timeout allows more time",
        time.as_secs()
    )]
    TimedOut { time: Duration },
    #[error(
        "the packages are larger than {}, the limit for one installation. The server's setting package_size allows more",
        stream::mebibytes(*.limit)
    )]
    TooLarge { limit: u64 },
    #[error(
        "a package needs more than {} of disk in the sandbox of the installer. The server's setting package_disk \
         allows more",
        stream::mebibytes(*.disk)
    )]
    NoRoom { disk: u64 },
    #[error(
        "the installer needed more memory than its sandbox has. The server's setting package_memory allows more"
    )]
    NoMemory,
    /// The sandbox could not be made, or broke.
    #[error("the installer could not do its work: {why}")]
    Workshop { why: String },
    /// The inside said something that cannot be true.
    #[error("the installer gave an answer that does not fit: {0}")]
    Unfitting(&'static str),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the file with the index's certificates cannot be read")]
    Certificates(#[source] std::io::Error),
}

/// Makes hidden sandboxes for installers.
#[async_trait]
pub trait Workshops: Send + Sync {
    /// Returns a fresh sandbox that nobody's code has run in and that can reach only what these egress rules list.
    async fn open(&self, rules: &[String]) -> Result<Box<dyn Workshop>, InstallError>;
}

/// A hidden sandbox with Python and uv in it. Dropping it destroys it, whatever runs there.
///
/// It needs room for the unpacked packages twice, and for as many files.
#[async_trait]
pub trait Workshop: Send {
    /// Returns the path of uv inside.
    fn uv(&self) -> String;

    /// Writes a file into the working folder.
    async fn put(&mut self, name: &str, content: Vec<u8>) -> Result<(), InstallError>;

    /// Runs code as a cell in the working folder and returns what it printed. Code that takes longer is ended: `TimedOut`.
    async fn run(&mut self, code: &str, time: Duration) -> Result<String, InstallError>;

    /// Copies a plain file of the working folder out, at most `limit` bytes of it: `TooLarge`. What it holds is a claim.
    async fn take(&mut self, name: &str, limit: u64) -> Result<File, InstallError>;
}
