//! The file system that a sandbox sees.
//!
//! The warden builds one root on a tmpfs: the host's system folders and the Python environment
//! bound read-only, a small `/etc` of our own (`etc`), a `/sys` of plain files (`sysfs`), six
//! harmless devices. It then makes that root its own, so that the host's files are inaccessible for
//! everything below it. Each family starts with a copy of the warden's mounts, plus the operator's
//! mounts of that family. Each sandbox starts with a copy of its family's mounts, in which the
//! kernel has locked everything, and adds its private parts: `/work`, `/tmp`, `/dev/shm`, `/proc`.
//!
//! Host paths are opened first, as detached mounts (`open_all`): by root before it drops its
//! rights, by an unprivileged user inside its own user namespace.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags,
};
use rustix::process::WaitOptions;

use crate::etc;
use crate::sys::{self, ForkSide, MountAttr};
use crate::sysfs::{self, ShownLimits};
use crate::test_switches::TestSwitches;
use crate::wire::{self, Bind, OperatorMount};

/// The working folder of every session.
pub const WORK: &str = "/work";
/// The home folder; it is below `/tmp` so that caches and settings never end up in the operator's
/// workspace.
pub const HOME: &str = "/tmp/home";

/// System folders that programs need, if the host has them. Nothing else of the host is visible.
const SYSTEM_PATHS: [&str; 15] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/alternatives",
    "/etc/fonts",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/ssl/certs",
];

/// The last one is the controlling terminal of the process that opens it. No process of the jail
/// has one, so it is always one of the sandbox's own.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

/// Our own files of `/etc`: enough for name lookups to work, without information about the host.
const ETC_FILES: [(&str, &str); 6] = [
    (
        "etc/passwd",
        "root:x:0:0:root:/nonexistent:/usr/sbin/nologin\n\
         user:x:1000:1000:session:/tmp/home:/bin/sh\n\
         nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    ),
    ("etc/group", "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n"),
    (
        "etc/hosts",
        "127.0.0.1 localhost cellblock\n::1 localhost\n",
    ),
    ("etc/hostname", "cellblock\n"),
    (
        "etc/resolv.conf",
        "nameserver 127.0.0.1\noptions attempts:1 timeout:5\n",
    ),
    (
        "etc/nsswitch.conf",
        "passwd: files\ngroup: files\nhosts: files dns\n",
    ),
];

/// The entries at the top of `/proc` that programs legitimately read, in addition to the numbered
/// ones of processes. Everything else there is covered.
pub(crate) const VISIBLE_PROC_ENTRIES: [&str; 11] = [
    "cpuinfo",
    "filesystems",
    "loadavg",
    "meminfo",
    "mounts",
    "net",
    "self",
    "stat",
    "thread-self",
    "uptime",
    "version",
];

/// The file that covers `/proc/meminfo`.
const MEMINFO_COVER: &str = "/var/meminfo";

/// A detached mount and its path inside.
pub(crate) struct DetachedMount {
    inside: PathBuf,
    mount: OwnedFd,
    is_folder: bool,
}

/// Why a step of the jail's set-up failed.
#[derive(Debug, thiserror::Error)]
#[error("{attempt}")]
pub(crate) struct JailSetupError {
    attempt: String,
    #[source]
    cause: io::Error,
}

impl JailSetupError {
    pub(crate) fn new(attempt: impl Into<String>, cause: impl Into<io::Error>) -> JailSetupError {
        JailSetupError {
            attempt: attempt.into(),
            cause: cause.into(),
        }
    }

    pub(crate) fn into_cause(self) -> io::Error {
        self.cause
    }
}

/// Opens every read-only bind, including the system folders, as a detached mount.
pub(crate) fn open_all(
    binds: &[Bind],
    test_switches: &TestSwitches,
) -> Result<Vec<DetachedMount>, JailSetupError> {
    let system = SYSTEM_PATHS
        .iter()
        .map(PathBuf::from)
        // A link such as /bin → usr/bin is recreated instead of bound.
        .filter(|path| {
            path.symlink_metadata()
                .is_ok_and(|found| !found.is_symlink())
        })
        .map(|path| Bind {
            inside: path.clone(),
            host: path,
        });
    let devices = DEVICES
        .iter()
        .map(|name| Path::new("/dev").join(name))
        .map(|path| Bind {
            inside: path.clone(),
            host: path,
        });
    let read_only = if test_switches.mounts_writable() {
        MountAttrFlags::empty()
    } else {
        MountAttrFlags::MOUNT_ATTR_RDONLY
    };
    let common = MountAttrFlags::MOUNT_ATTR_NOSUID;
    let mut trees = Vec::new();
    for bind in system.chain(binds.iter().cloned()) {
        trees.push(open_tree(
            &bind.host,
            &bind.inside,
            read_only | common | MountAttrFlags::MOUNT_ATTR_NODEV,
        )?);
    }
    for device in devices {
        trees.push(open_tree(
            &device.host,
            &device.inside,
            common | MountAttrFlags::MOUNT_ATTR_NOEXEC,
        )?);
    }
    Ok(trees)
}

/// Opens the operator's mounts with their owner unchanged.
pub(crate) fn open_operator_mounts(
    mounts: &[OperatorMount],
) -> Result<Vec<DetachedMount>, JailSetupError> {
    mounts
        .iter()
        .map(|mount| open_tree(&mount.host, &mount.inside, operator_attributes(mount)))
        .collect()
}

pub(crate) fn operator_attributes(mount: &OperatorMount) -> MountAttrFlags {
    let common = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    if mount.writable {
        common
    } else {
        common | MountAttrFlags::MOUNT_ATTR_RDONLY
    }
}

/// Opens one host path as a detached, private mount with the given attributes.
pub(crate) fn open_tree(
    host: &Path,
    inside: &Path,
    attributes: MountAttrFlags,
) -> Result<DetachedMount, JailSetupError> {
    let attempt = || {
        format!(
            "could not mount {} of the host as {}",
            host.display(),
            inside.display()
        )
    };
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    let mount = rustix::mount::open_tree(CWD, host, flags)
        .map_err(|cause| JailSetupError::new(attempt(), cause))?;
    let change = MountAttr {
        attr_set: u64::from(attributes.bits()),
        propagation: libc::MS_PRIVATE,
        ..MountAttr::default()
    };
    sys::mount_setattr(&mount, &change).map_err(|cause| JailSetupError::new(attempt(), cause))?;
    let is_folder = is_folder(&mount).map_err(|cause| JailSetupError::new(attempt(), cause))?;
    Ok(DetachedMount {
        inside: inside.to_owned(),
        mount,
        is_folder,
    })
}

impl DetachedMount {
    /// Wraps a mount that the guardian opened for one sandbox.
    pub(crate) fn from_guardian(mount: &OperatorMount, opened: OwnedFd) -> DetachedMount {
        let is_folder = is_folder(&opened).unwrap_or(true);
        DetachedMount {
            inside: mount.inside.clone(),
            mount: opened,
            is_folder,
        }
    }

    pub(crate) fn as_mount(&self) -> &OwnedFd {
        &self.mount
    }

    /// Attaches the mount at its path below `root`, and creates the path first. Links are not
    /// followed: the path may lead through an operator's folder that sessions write to.
    pub(crate) fn attach_below(&self, root: &Path) -> Result<(), JailSetupError> {
        self.attach_at(root, &self.inside)
    }

    fn attach_at(&self, root: &Path, inside: &Path) -> Result<(), JailSetupError> {
        let attempt = || format!("could not put a mount at {}", inside.display());
        let place = make_mount_point(root, inside, self.is_folder)
            .map_err(|cause| JailSetupError::new(attempt(), cause))?;
        let flags =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        rustix::mount::move_mount(&self.mount, "", place, "", flags)
            .map_err(|cause| JailSetupError::new(attempt(), cause))
    }
}

fn is_folder(mount: &OwnedFd) -> io::Result<bool> {
    let found = rustix::fs::fstat(mount)?;
    Ok(rustix::fs::FileType::from_raw_mode(found.st_mode).is_dir())
}

/// The staging folder of the operator's mounts in the root of the warden or of a family, from which
/// a sandbox takes its copy.
const STAGING_FOLDER: &str = "/var/mounts";

fn staged_path(index: usize) -> PathBuf {
    Path::new(STAGING_FOLDER).join(index.to_string())
}

/// Attaches the operator's mounts, as the guardian opened them for a family, in the staging folder
/// of its sandboxes.
///
/// They are in a mount namespace of the warden's, so that the kernel locks them and their
/// attributes in every copy: a process with all rights in the family could otherwise make a
/// read-only mount writable.
pub(crate) fn stage_mounts(trees: &[DetachedMount]) -> Result<(), JailSetupError> {
    if trees.is_empty() {
        return Ok(());
    }
    let failed = |cause: io::Error| {
        JailSetupError::new(
            "could not make the staging folder of the operator's mounts",
            cause,
        )
    };
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let room =
        memory_file_system(&[("mode", "0755"), ("size", "64k")], attributes).map_err(failed)?;
    attach(&room, STAGING_FOLDER).map_err(failed)?;
    for (index, tree) in trees.iter().enumerate() {
        tree.attach_at(Path::new("/"), &staged_path(index))?;
    }
    Ok(())
}

/// Copies the operator's mounts from the staging folder to their paths, and hides the staging
/// folder.
pub(crate) fn place_staged_mounts(mounts: &[OperatorMount]) -> Result<(), JailSetupError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    for (index, mount) in mounts.iter().enumerate() {
        let copy = rustix::mount::open_tree(CWD, staged_path(index), flags)
            .map_err(|cause| JailSetupError::new("could not take the operator's mount", cause))?;
        DetachedMount::from_guardian(mount, copy).attach_below(Path::new("/"))?;
    }
    if mounts.is_empty() {
        return Ok(());
    }
    rustix::mount::mount_bind("/var/empty", STAGING_FOLDER).map_err(|cause| {
        JailSetupError::new(
            "could not hide the staging folder of the operator's mounts",
            cause,
        )
    })
}

/// Removes the operator's mounts from this copy of the warden's root.
pub(crate) fn remove_staged_mounts(count: usize) {
    for index in 0..count {
        // On a server that runs as root there are none here.
        let _ = rustix::mount::unmount(staged_path(index), UnmountFlags::DETACH);
    }
}

/// Creates a folder below another, without following links that user code may have created.
pub fn make_folder(root: &Path, inside: &Path) -> io::Result<()> {
    make_mount_point(root, inside, true).map(drop)
}

/// Creates `inside` below `root`, part by part and without following links, and opens it.
fn make_mount_point(root: &Path, inside: &Path, is_folder: bool) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags, mkdirat, openat};
    let walk = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut here = openat(
        CWD,
        root,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let parts: Vec<_> = inside
        .components()
        .filter_map(|part| match part {
            std::path::Component::Normal(name) => Some(name),
            _ => None,
        })
        .collect();
    for (index, name) in parts.iter().enumerate() {
        let last = index + 1 == parts.len();
        if last && !is_folder {
            match openat(
                &here,
                *name,
                OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC,
                Mode::from(0o644),
            ) {
                Ok(_) | Err(rustix::io::Errno::EXIST | rustix::io::Errno::ROFS) => {}
                Err(error) => return Err(error.into()),
            }
            return Ok(openat(&here, *name, walk, Mode::empty())?);
        }
        match mkdirat(&here, *name, Mode::from(0o755)) {
            Ok(()) | Err(rustix::io::Errno::EXIST | rustix::io::Errno::ROFS) => {}
            Err(error) => return Err(error.into()),
        }
        here = openat(&here, *name, walk | OFlags::DIRECTORY, Mode::empty())?;
    }
    Ok(here)
}

/// Creates a detached tmpfs.
pub(crate) fn memory_file_system(
    options: &[(&str, &str)],
    attributes: MountAttrFlags,
) -> io::Result<OwnedFd> {
    let context = rustix::mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        rustix::mount::fsconfig_set_string(&context, *key, *value)?;
    }
    rustix::mount::fsconfig_create(&context)?;
    Ok(rustix::mount::fsmount(
        &context,
        FsMountFlags::FSMOUNT_CLOEXEC,
        attributes,
    )?)
}

/// Creates a detached devpts instance, or returns `None` if the kernel does not support it.
///
/// It contains neither the host's terminals nor those of other sandboxes. The number is limited,
/// because all instances share one kernel limit (3,072 in addition to those of the host).
pub(crate) fn terminals() -> io::Result<Option<OwnedFd>> {
    let context = match rustix::mount::fsopen("devpts", FsOpenFlags::FSOPEN_CLOEXEC) {
        Err(rustix::io::Errno::NODEV) => return Ok(None),
        opened => opened?,
    };
    for (key, value) in [("ptmxmode", "0666"), ("mode", "0600"), ("max", "64")] {
        rustix::mount::fsconfig_set_string(&context, key, value)?;
    }
    rustix::mount::fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(Some(rustix::mount::fsmount(
        &context,
        FsMountFlags::FSMOUNT_CLOEXEC,
        attributes,
    )?))
}

/// Creates a detached `/proc` of the current pid namespace.
pub(crate) fn process_file_system() -> io::Result<OwnedFd> {
    let context = rustix::mount::fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(rustix::mount::fsmount(
        &context,
        FsMountFlags::FSMOUNT_CLOEXEC,
        attributes,
    )?)
}

/// Creates a detached `/proc` of a pid namespace that has ended: it never shows any process.
fn empty_process_file_system() -> io::Result<OwnedFd> {
    let (ours, theirs) = wire::pair()?;
    let child = match sys::clone_process(libc::CLONE_NEWPID)? {
        ForkSide::Child => {
            let made =
                process_file_system().and_then(|mount| wire::send(&theirs, &(), &[mount.as_fd()]));
            sys::exit_now(i32::from(made.is_err()));
        }
        ForkSide::Parent(child) => child,
    };
    drop(theirs);
    let made = wire::receive::<()>(&ours);
    let _ = rustix::process::waitpid(Some(child), WaitOptions::empty());
    made?
        .and_then(|((), mut mounts)| mounts.pop())
        .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Removes the warden's `/proc`, which shows all families, from this copy of its root.
pub(crate) fn remove_warden_proc() -> Result<(), JailSetupError> {
    rustix::mount::unmount("/proc", UnmountFlags::DETACH)
        .map_err(|cause| JailSetupError::new("could not remove the warden's /proc", cause))
}

/// Attaches a detached mount at an existing path.
pub(crate) fn attach(mount: impl AsFd, place: &str) -> io::Result<()> {
    rustix::mount::move_mount(
        mount,
        "",
        CWD,
        place,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )?;
    Ok(())
}

/// Builds the root from opened mounts and makes it this process's own; afterwards the host's mounts
/// are gone.
pub(crate) fn become_root(
    trees: &[DetachedMount],
    staged: &[DetachedMount],
    shown_limits: &ShownLimits,
    test_switches: &TestSwitches,
) -> Result<(), JailSetupError> {
    // Our mounts must not propagate to the host, and later mounts of the host must not appear here.
    rustix::mount::mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )
    .map_err(|cause| JailSetupError::new("could not separate the mounts from the host's", cause))?;
    // Any existing folder works as the build location; it is covered and not used afterwards. Every
    // Linux has /tmp.
    let place = Path::new("/tmp");
    let attempt = || "could not build the sandbox root";
    let failed = |cause: io::Error| JailSetupError::new(attempt(), cause);
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let root = memory_file_system(
        &[("mode", "0755"), ("size", "32m"), ("nr_inodes", "16k")],
        attributes,
    )
    .map_err(failed)?;
    attach(&root, "/tmp").map_err(failed)?;

    for folder in [
        "etc/ssl",
        "dev/shm",
        "dev/pts",
        "proc",
        "tmp",
        "work",
        "var/empty",
        "var/mounts",
    ] {
        fs::create_dir_all(place.join(folder)).map_err(failed)?;
    }
    etc::copy(Path::new("/etc"), &place.join("etc")).map_err(failed)?;
    sysfs::write(&place.join("sys"), shown_limits).map_err(failed)?;
    let memory = sysfs::memory_info(shown_limits).map_err(failed)?;
    fs::write(place.join(&MEMINFO_COVER[1..]), memory).map_err(failed)?;
    fs::set_permissions(
        place.join(&MEMINFO_COVER[1..]),
        Permissions::from_mode(0o444),
    )
    .map_err(failed)?;
    fs::write(place.join(&crate::mask::UNREADABLE_FILE[1..]), "").map_err(failed)?;
    fs::set_permissions(
        place.join(&crate::mask::UNREADABLE_FILE[1..]),
        Permissions::from_mode(0o000),
    )
    .map_err(failed)?;
    for (path, content) in ETC_FILES {
        fs::write(place.join(path), content).map_err(failed)?;
        fs::set_permissions(place.join(path), Permissions::from_mode(0o644)).map_err(failed)?;
    }
    for path in SYSTEM_PATHS {
        if let Ok(target) = fs::read_link(path) {
            symlink(target, place.join(path.trim_start_matches('/'))).map_err(failed)?;
        }
    }
    for (link, target) in [
        ("dev/fd", "/proc/self/fd"),
        ("dev/stdin", "/proc/self/fd/0"),
        ("dev/stdout", "/proc/self/fd/1"),
        ("dev/stderr", "/proc/self/fd/2"),
        ("dev/ptmx", "pts/ptmx"),
        ("var/tmp", "/tmp"),
    ] {
        symlink(target, place.join(link)).map_err(failed)?;
    }
    for tree in trees {
        tree.attach_below(place)?;
    }
    for (index, tree) in staged.iter().enumerate() {
        tree.attach_at(place, &staged_path(index))?;
    }
    // The warden needs its own /proc. Families remove it from their copy and find below it one
    // without processes: the kernel lets a user namespace mount /proc only if a fully visible one
    // exists.
    let no_proc = |cause: io::Error| JailSetupError::new("could not mount /proc", cause);
    attach(&empty_process_file_system().map_err(no_proc)?, "/tmp/proc").map_err(failed)?;
    attach(&process_file_system().map_err(no_proc)?, "/tmp/proc").map_err(failed)?;

    rustix::process::chdir(place).map_err(|cause| failed(cause.into()))?;
    // With both arguments the same, the old root is mounted on top of the new one and is removed in
    // the next step.
    rustix::process::pivot_root(".", ".").map_err(|cause| failed(cause.into()))?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(|cause| failed(cause.into()))?;
    rustix::process::chdir("/").map_err(|cause| failed(cause.into()))?;
    if !test_switches.mounts_writable() {
        let change = MountAttr {
            attr_set: u64::from(MountAttrFlags::MOUNT_ATTR_RDONLY.bits()),
            ..MountAttr::default()
        };
        let flags = OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let top =
            rustix::mount::open_tree(CWD, "/", flags).map_err(|cause| failed(cause.into()))?;
        sys::mount_setattr_only(&top, &change).map_err(failed)?;
    }
    Ok(())
}

/// Covers every entry at the top of `/proc` that must not be visible, and replaces the memory
/// figures with the limits of a session.
pub(crate) fn cover_proc() -> io::Result<()> {
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.bytes().all(|byte| byte.is_ascii_digit())
            || VISIBLE_PROC_ENTRIES.contains(&name.as_ref())
        {
            continue;
        }
        let kind = entry.file_type()?;
        let cover = if kind.is_dir() {
            "/var/empty"
        } else if kind.is_symlink() {
            continue;
        } else {
            "/dev/null"
        };
        rustix::mount::mount_bind(cover, entry.path())?;
    }
    rustix::mount::mount_bind(MEMINFO_COVER, "/proc/meminfo")?;
    Ok(())
}
