//! Package installation into sessions.
//!
//! ```text
//! request ─ requirement ─→ syntax and policy: what a caller may install
//!          │
//!          ├─ resolve    uv in a fresh hidden sandbox that reaches only the index:
//!          │             versions and hashes
//!          ├─ store      packages that the host already has
//!          ├─ install    uv in the same sandbox: unpacks the missing wheels,
//!          │             one stream of files for each → store
//!          └─ build      only without a wheel: in another fresh sandbox,
//!                        because it runs the package's code → private trees
//!          ↓
//! Installed: read-only directories for the session's `sys.path`, shared by all sessions with the
//! package
//! ```
//!
//! `installer` runs the installation on the host, `installer.py` runs inside, and `answers` parses
//! the replies from inside. The hidden sandbox is behind the trait `BuildSandbox`; this module does
//! not know how a sandbox is created.
//!
//! Packages are never unpacked, built or imported on the host. Only a stream of plain files comes
//! out of a sandbox. A tree is never shared if package code ran in the sandbox that produced it.
//! Index passwords and proxy addresses are passed only to sandboxes in which no package code runs.

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
pub use installer::{Installer, PackageRequest};
pub use requirement::{
    Location, MAX_REQUIREMENT_LENGTH, MAX_REQUIREMENTS, Requirement, RequirementError,
    RequirementSource, normalised,
};
pub use store::{Room, Sharing, Store, StoreError, Tree, TreeKey, TreeName, TreeRecord};
pub use stream::{Bounds, StreamError};

/// Mount point of `Store::trees` inside, read-only.
pub const PACKAGES_INSIDE: &str = "/opt/cellblock/packages";

/// One version of a distribution.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackageVersion {
    /// Normalised name.
    pub name: String,
    pub version: String,
}

impl PackageVersion {
    pub fn new(name: &str, version: &str) -> PackageVersion {
        PackageVersion {
            name: normalised(name),
            version: version.to_owned(),
        }
    }

    /// Parses `name==version`, the form in which environments record their packages.
    pub fn parse(text: &str) -> Option<PackageVersion> {
        let (name, version) = text.split_once("==")?;
        (requirement::is_name(name) && requirement::is_version(version))
            .then(|| PackageVersion::new(name, version))
    }
}

impl fmt::Display for PackageVersion {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}-{}", self.name, self.version)
    }
}

/// Result of an installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstallResult {
    /// Directories inside, to prepend to the session's `sys.path` in this order.
    pub paths: Vec<PathBuf>,
    pub added: Vec<PackageVersion>,
    /// Required packages that the session already had.
    pub already: Vec<PackageVersion>,
    /// Trees that belong to this session alone. Call `Store::remove` on them when the session and
    /// its copies have ended.
    pub private: Vec<TreeName>,
    /// Final message in the form that pip prints.
    pub text: String,
}

/// Limits of one installation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstallLimits {
    /// Total time from the request to the last tree.
    pub time: Duration,
    /// Total size of all new trees.
    pub bytes: u64,
    /// Maximum number of files in each tree.
    pub files: u64,
    pub builds: Builds,
    /// Total size of all trees in the store, before one installation adds to them.
    pub store: u64,
    /// Disk space of the installer's sandbox. The sandbox enforces it; this value is only for
    /// messages.
    pub disk: u64,
}

impl Default for InstallLimits {
    fn default() -> InstallLimits {
        InstallLimits {
            time: Duration::from_secs(300),
            bytes: 2 << 30,
            files: 50_000,
            builds: Builds::Allowed,
            store: 10 << 30,
            disk: 4 << 30,
        }
    }
}

/// Whether packages without a wheel are built from source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Builds {
    Allowed,
    Refused,
}

/// Current step of an installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Resolving,
    Downloading {
        packages: usize,
    },
    Building,
    Adding {
        package: PackageVersion,
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

/// Callback that receives each step as it begins.
pub type Tell<'a> = &'a (dyn Fn(Step) + Send + Sync);

/// Error of a failed installation.
#[derive(Debug, thiserror::Error)]
pub enum PackageError {
    /// Output of the resolver or the build, shortened if necessary, without passwords.
    #[error("{words}")]
    Refused { words: String },
    #[error(
        "the installation was stopped because it took longer than {} s; install fewer packages at \
         once. The server's \
         setting package_timeout allows more time",
        time.as_secs()
    )]
    TimedOut { time: Duration },
    #[error(
        "the packages are larger than {}, the limit for one installation. The server's setting \
         package_size allows more",
        stream::mebibytes(*.limit)
    )]
    TooLarge { limit: u64 },
    #[error(
        "a package needs more than {} of disk in the sandbox of the installer. The server's \
         setting package_disk \
         allows more",
        stream::mebibytes(*.disk)
    )]
    NoRoom { disk: u64 },
    #[error(
        "the installer needed more memory than its sandbox has. The server's setting \
         package_memory allows more"
    )]
    NoMemory,
    /// The sandbox could not be created, or it failed.
    #[error("the installer could not do its work: {why}")]
    BuildSandbox { why: String },
    /// The reply from inside is invalid.
    #[error("the installer gave an answer that does not fit: {0}")]
    Unfitting(&'static str),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the file with the index's certificates cannot be read")]
    Certificates(#[source] std::io::Error),
}

/// Creates hidden sandboxes for the installer.
#[async_trait]
pub trait BuildSandboxes: Send + Sync {
    /// Returns a fresh sandbox in which no user or package code has run. It can reach only the
    /// destinations that these egress rules list.
    async fn open(&self, rules: &[String]) -> Result<Box<dyn BuildSandbox>, PackageError>;
}

/// A hidden sandbox with Python and uv. Dropping it destroys it and everything that runs in it.
///
/// It needs disk space for two copies of the unpacked packages, and for their number of files.
#[async_trait]
pub trait BuildSandbox: Send {
    /// Returns the path of uv inside.
    fn uv(&self) -> String;

    /// Writes a file into the working directory.
    async fn put(&mut self, name: &str, content: Vec<u8>) -> Result<(), PackageError>;

    /// Runs code as a cell in the working directory and returns its output. Code that exceeds
    /// `time` is stopped and gives `TimedOut`.
    async fn run(&mut self, code: &str, time: Duration) -> Result<String, PackageError>;

    /// Copies a plain file out of the working directory. A file larger than `limit` bytes gives
    /// `TooLarge`. The content is a claim.
    async fn take(&mut self, name: &str, limit: u64) -> Result<File, PackageError>;
}
