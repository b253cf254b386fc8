//! Side processes: programs that the server starts in a sandbox, beside its interpreter.
//!
//! If programs need approval, the kernel refuses `execve` to the interpreter and to everything that
//! it forks (`seccomp`). An approved program is started here instead, from arguments that the
//! server holds: no process of the session is involved.
//!
//! ```text
//! server                         the new process, a child of the warden
//!  │                              │ control group, namespaces, limits, user, no
//!  │                              │ capability, rules, folder, filters
//!  │◄──────── "ready" ────────────│
//!  │ reads its posture            │ waits at its gate
//!  │───────── a byte ────────────►│
//!  │◄──────── EOF, or an error ───│ becomes the program
//! ```
//!
//! Until it has become the program it cannot be read or signalled from inside: it is not dumpable,
//! and the rules of an interpreter allow access only to its own children. Afterwards those rules
//! keep the two apart, although they have the same user.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Gid, Uid};
use rustix::thread::UnshareFlags;

use crate::init::{enter_root, give_up_capabilities};
use crate::seccomp::Filters;
use crate::twin::LockDownSettings;
use crate::wire::{
    SIDE_PROCESS_EXEC_FAILED, SIDE_PROCESS_READY, SIDE_PROCESS_SETUP_FAILED, SideProcessSpec,
};
use crate::{cgroup, sys};

/// Size limit of a `SideProcessSpec`: arguments and variables within the kernel's limit fit into
/// it.
const MAX_SPEC_BYTES: u64 = 8 * 1024 * 1024;

/// The descriptors of the command to start a program.
pub(crate) struct LaunchFds {
    /// A `SideProcessSpec`.
    pub(crate) spec: OwnedFd,
    pub(crate) report: OwnedFd,
    pub(crate) gate: OwnedFd,
    pub(crate) output: OwnedFd,
    pub(crate) errors: OwnedFd,
    pub(crate) input: Option<OwnedFd>,
    /// The descriptors of the control group.
    pub(crate) cgroup_procs: Vec<OwnedFd>,
}

impl LaunchFds {
    /// Assigns the descriptors of a command.
    pub(crate) fn from_command(descriptors: Vec<OwnedFd>, has_input: bool) -> Option<LaunchFds> {
        let mut all = descriptors.into_iter();
        Some(LaunchFds {
            spec: all.next()?,
            report: all.next()?,
            gate: all.next()?,
            output: all.next()?,
            errors: all.next()?,
            input: if has_input { Some(all.next()?) } else { None },
            cgroup_procs: all.collect(),
        })
    }
}

/// The sandbox of the program.
pub(crate) struct SideProcessSandbox<'a> {
    /// All except the pid namespace, which this process is in already; the user namespace last.
    pub(crate) namespaces: &'a [OwnedFd],
    pub(crate) root: &'a OwnedFd,
    pub(crate) rules: &'a OwnedFd,
    /// `None` in a test that leaves them out.
    pub(crate) filters: Option<&'a Filters>,
    pub(crate) settings: &'a LockDownSettings,
}

/// Becomes the program; never returns. For a freshly forked process.
pub(crate) fn main(fds: LaunchFds, sandbox: &SideProcessSandbox<'_>) -> ! {
    let status = match prepare(&fds, sandbox) {
        Ok(program) => {
            let reported = rustix::io::write(&fds.report, &[SIDE_PROCESS_READY]);
            // A server that cancels the start, or is gone, closes the gate.
            if reported.is_ok() && matches!(rustix::io::read(&fds.gate, &mut [0]), Ok(1)) {
                let error = program.run().raw_os_error().unwrap_or(libc::EIO);
                let _ = rustix::io::write(
                    &fds.report,
                    &[&[SIDE_PROCESS_EXEC_FAILED][..], &error.to_ne_bytes()].concat(),
                );
            }
            127
        }
        Err(error) => {
            let _ = rustix::io::write(
                &fds.report,
                format!("{}{error}", char::from(SIDE_PROCESS_SETUP_FAILED)).as_bytes(),
            );
            126
        }
    };
    sys::exit_now(status);
}

/// The program in the form that the kernel expects.
struct Prepared {
    /// Candidate paths, in this order.
    paths: Vec<CString>,
    arguments: Vec<CString>,
    environment: Vec<CString>,
}

impl Prepared {
    fn new(spec: &SideProcessSpec) -> io::Result<Prepared> {
        let texts = |list: &[String]| {
            list.iter()
                .map(|text| CString::new(text.as_str()))
                .collect::<Result<_, _>>()
        };
        let variables = spec
            .environment
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect::<Vec<_>>();
        Ok(Prepared {
            paths: texts(&candidate_paths(spec))?,
            arguments: texts(&spec.argv)?,
            environment: texts(&variables)?,
        })
    }

    /// Replaces this process with the program. Returns only on failure.
    fn run(&self) -> io::Error {
        let arguments: Vec<&CStr> = self.arguments.iter().map(CString::as_c_str).collect();
        let environment: Vec<&CStr> = self.environment.iter().map(CString::as_c_str).collect();
        let mut first_error = io::Error::from_raw_os_error(libc::ENOENT);
        for path in &self.paths {
            let error = sys::execute(path, &arguments, &environment);
            match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTDIR) => {}
                // A later path may have an executable file.
                Some(libc::EACCES) => first_error = error,
                _ => return error,
            }
        }
        first_error
    }
}

/// Returns the candidate paths of the program.
fn candidate_paths(spec: &SideProcessSpec) -> Vec<String> {
    let Some(name) = spec.argv.first().filter(|name| !name.is_empty()) else {
        return Vec::new();
    };
    if name.contains('/') {
        return vec![name.clone()];
    }
    let path = spec
        .environment
        .iter()
        .rev()
        .find(|(variable, _)| variable == "PATH");
    let folders = path
        .map_or("/usr/bin:/bin", |(_, folders)| folders.as_str())
        .split(':');
    folders
        .map(|folder| format!("{}/{name}", if folder.is_empty() { "." } else { folder }))
        .collect()
}

/// Enters the sandbox and drops every right, in the same order as an interpreter.
fn prepare(fds: &LaunchFds, sandbox: &SideProcessSandbox<'_>) -> io::Result<Prepared> {
    let step = |name: &'static str| {
        move |error: io::Error| io::Error::new(error.kind(), format!("{name}: {error}"))
    };
    let mut kept = vec![
        &fds.report,
        &fds.gate,
        &fds.output,
        &fds.errors,
        sandbox.root,
        sandbox.rules,
    ];
    kept.extend(
        fds.input
            .iter()
            .chain(&fds.cgroup_procs)
            .chain(sandbox.namespaces),
    );
    kept.push(&fds.spec);
    sys::close_all_but(&kept.into_iter().map(AsRawFd::as_raw_fd).collect::<Vec<_>>());
    let _ = rustix::thread::set_name(c"cb-side-process");
    let spec = read(&fds.spec).map_err(step("its spec"))?;
    let prepared = Prepared::new(&spec).map_err(step("its spec"))?;

    cgroup::enter(&fds.cgroup_procs).map_err(step("enter the control group"))?;
    // Leaves the process group of the jail: signals to a group cross namespaces.
    rustix::process::setsid().map_err(|error| step("setsid")(error.into()))?;
    sys::unshare(UnshareFlags::NEWCGROUP).map_err(step("make a cgroup namespace"))?;
    for namespace in sandbox.namespaces {
        let entered = rustix::thread::move_into_link_name_space(namespace.as_fd(), None);
        entered.map_err(|error| step("setns")(error.into()))?;
    }
    enter_root(sandbox.root).map_err(step("take the root of the sandbox"))?;
    for limit in &sandbox.settings.rlimits {
        sys::set_limit(limit.resource, limit.value).map_err(step("set a limit"))?;
    }
    become_user(sandbox.settings).map_err(step("become the session's user"))?;
    give_up_capabilities().map_err(step("give up capabilities"))?;
    sys::landlock_restrict_self(sandbox.rules).map_err(step("enter the landlock rules"))?;
    place_standard_fds(fds).map_err(step("open its descriptors"))?;
    rustix::process::chdir(spec.folder.as_str())
        .map_err(|error| step("enter its folder")(error.into()))?;
    sys::unblock_signals();
    sys::restore_default_sigpipe();
    if let Some(filters) = sandbox.filters {
        for filter in [&filters.wide, &filters.closing] {
            seccompiler::apply_filter(filter)
                .map_err(|error| step("load a filter")(io::Error::other(error)))?;
        }
    }
    Ok(prepared)
}

fn read(spec: &OwnedFd) -> io::Result<SideProcessSpec> {
    let mut bytes = Vec::new();
    let mut spec = File::from(spec.try_clone()?);
    io::Seek::rewind(&mut spec)?;
    spec.take(MAX_SPEC_BYTES).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

fn become_user(settings: &LockDownSettings) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(settings.id), Gid::from_raw(settings.id));
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    Ok(())
}

/// Puts the program's three descriptors in place. All others are closed at exec.
fn place_standard_fds(fds: &LaunchFds) -> io::Result<()> {
    match &fds.input {
        Some(input) => sys::dup_to(input.as_fd(), 0)?,
        None => {
            let nothing =
                rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            sys::dup_to(nothing.as_fd(), 0)?;
            // The lowest number was free, so this may be 0 itself.
            if nothing.as_raw_fd() == 0 {
                std::mem::forget(nothing);
            }
        }
    }
    sys::dup_to(fds.output.as_fd(), 1)?;
    sys::dup_to(fds.errors.as_fd(), 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(argv: &[&str], environment: &[(&str, &str)]) -> SideProcessSpec {
        SideProcessSpec {
            argv: argv.iter().map(|word| (*word).to_owned()).collect(),
            folder: "/".to_owned(),
            environment: environment
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
        }
    }

    #[test]
    fn a_program_without_a_slash_is_looked_for_in_its_own_path() {
        let found = |argv: &[&str], path: &str| candidate_paths(&spec(argv, &[("PATH", path)]));
        assert_eq!(found(&["perl", "-w"], "/a:/b"), ["/a/perl", "/b/perl"]);
        assert_eq!(found(&["perl"], ""), ["./perl"], "as the C library has it");
        assert_eq!(found(&["./perl"], "/a"), ["./perl"]);
        assert_eq!(found(&["/bin/sh"], "/a"), ["/bin/sh"]);
        assert_eq!(
            candidate_paths(&spec(&["sh"], &[])),
            ["/usr/bin/sh", "/bin/sh"]
        );
        assert!(found(&[""], "/a").is_empty() && found(&[], "/a").is_empty());
        assert_eq!(
            candidate_paths(&spec(&["sh"], &[("PATH", "/a"), ("PATH", "/b")])),
            ["/b/sh"],
            "the last one counts"
        );
    }

    #[test]
    fn words_that_the_kernel_cannot_take_are_refused() {
        assert!(Prepared::new(&spec(&["sh", "a\0b"], &[])).is_err());
        assert!(Prepared::new(&spec(&["sh"], &[("A", "b\0c")])).is_err());
        // Control.
        assert!(Prepared::new(&spec(&["sh", "a b"], &[("A", "b=c")])).is_ok());
    }

    #[test]
    fn descriptors_are_sorted_with_and_without_an_input() {
        let descriptors = |count| {
            (0..count)
                .map(|_| OwnedFd::from(File::open("/dev/null").unwrap()))
                .collect()
        };
        let with = LaunchFds::from_command(descriptors(8), true).unwrap();
        assert!(with.input.is_some() && with.cgroup_procs.len() == 2);
        let without = LaunchFds::from_command(descriptors(8), false).unwrap();
        assert!(without.input.is_none() && without.cgroup_procs.len() == 3);
        assert!(LaunchFds::from_command(descriptors(4), false).is_none());
        assert!(LaunchFds::from_command(descriptors(5), true).is_none());
    }
}
