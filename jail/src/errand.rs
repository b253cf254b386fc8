//! Side processes (`Errand`): programs that the server starts in a sandbox, beside its interpreter.
//!
//! If programs need approval, the kernel refuses `execve` to the interpreter and to everything that
//! it forks (`seccomp`). An approved program is started here instead, from arguments that the
//! server holds: no process of the session is involved.
//!
//! ```text
//! server                         the new process, a child of the warden
//!  │                              │ control group, namespaces, limits, user, no
//!  │                              │ capability, rules, folder, filters
//!  │◄──────── "stands" ───────────│
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

use crate::init::{give_up_capabilities, take_root};
use crate::seccomp::Filters;
use crate::twin::Entry;
use crate::wire::{ERRAND_BROKEN, ERRAND_NOT_STARTED, ERRAND_STANDS, Errand};
use crate::{cgroup, sys};

/// Size limit of an `Errand`: arguments and variables within the kernel's limit fit into it.
const LARGEST_ERRAND: u64 = 8 * 1024 * 1024;

/// The descriptors of the command to start a program.
pub(crate) struct Luggage {
    /// An `Errand`.
    pub(crate) plan: OwnedFd,
    pub(crate) report: OwnedFd,
    pub(crate) gate: OwnedFd,
    pub(crate) output: OwnedFd,
    pub(crate) errors: OwnedFd,
    pub(crate) input: Option<OwnedFd>,
    /// The descriptors of the control group.
    pub(crate) doors: Vec<OwnedFd>,
}

impl Luggage {
    /// Assigns the descriptors of a command.
    pub(crate) fn unpack(descriptors: Vec<OwnedFd>, has_input: bool) -> Option<Luggage> {
        let mut all = descriptors.into_iter();
        Some(Luggage {
            plan: all.next()?,
            report: all.next()?,
            gate: all.next()?,
            output: all.next()?,
            errors: all.next()?,
            input: if has_input { Some(all.next()?) } else { None },
            doors: all.collect(),
        })
    }
}

/// The sandbox of the program.
pub(crate) struct Place<'a> {
    /// All except the pid namespace, which this process is in already; the user namespace last.
    pub(crate) namespaces: &'a [OwnedFd],
    pub(crate) root: &'a OwnedFd,
    pub(crate) rules: &'a OwnedFd,
    /// `None` in a test that leaves them out.
    pub(crate) filters: Option<&'a Filters>,
    pub(crate) entry: &'a Entry,
}

/// Becomes the program; never returns. For a freshly forked process.
pub(crate) fn main(luggage: Luggage, place: &Place<'_>) -> ! {
    let status = match prepare(&luggage, place) {
        Ok(program) => {
            let stands = rustix::io::write(&luggage.report, &[ERRAND_STANDS]);
            // A server that cancels the start, or is gone, closes the gate.
            if stands.is_ok() && matches!(rustix::io::read(&luggage.gate, &mut [0]), Ok(1)) {
                let error = program.run().raw_os_error().unwrap_or(libc::EIO);
                let _ = rustix::io::write(
                    &luggage.report,
                    &[&[ERRAND_NOT_STARTED][..], &error.to_ne_bytes()].concat(),
                );
            }
            127
        }
        Err(error) => {
            let _ = rustix::io::write(
                &luggage.report,
                format!("{}{error}", char::from(ERRAND_BROKEN)).as_bytes(),
            );
            126
        }
    };
    sys::exit_now(status);
}

/// The program in the form that the kernel expects.
struct Prepared {
    /// Candidate paths, in this order.
    places: Vec<CString>,
    arguments: Vec<CString>,
    environment: Vec<CString>,
}

impl Prepared {
    fn new(errand: &Errand) -> io::Result<Prepared> {
        let texts = |list: &[String]| {
            list.iter()
                .map(|text| CString::new(text.as_str()))
                .collect::<Result<_, _>>()
        };
        let variables = errand
            .environment
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect::<Vec<_>>();
        Ok(Prepared {
            places: texts(&places(errand))?,
            arguments: texts(&errand.words)?,
            environment: texts(&variables)?,
        })
    }

    /// Replaces this process with the program. Returns only on failure.
    fn run(&self) -> io::Error {
        let arguments: Vec<&CStr> = self.arguments.iter().map(CString::as_c_str).collect();
        let environment: Vec<&CStr> = self.environment.iter().map(CString::as_c_str).collect();
        let mut told = io::Error::from_raw_os_error(libc::ENOENT);
        for place in &self.places {
            let error = sys::execute(place, &arguments, &environment);
            match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTDIR) => {}
                // A later path may have an executable file.
                Some(libc::EACCES) => told = error,
                _ => return error,
            }
        }
        told
    }
}

/// Returns the candidate paths of the program.
fn places(errand: &Errand) -> Vec<String> {
    let Some(name) = errand.words.first().filter(|name| !name.is_empty()) else {
        return Vec::new();
    };
    if name.contains('/') {
        return vec![name.clone()];
    }
    let path = errand
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
fn prepare(luggage: &Luggage, place: &Place<'_>) -> io::Result<Prepared> {
    let step = |name: &'static str| {
        move |error: io::Error| io::Error::new(error.kind(), format!("{name}: {error}"))
    };
    let mut kept = vec![
        &luggage.report,
        &luggage.gate,
        &luggage.output,
        &luggage.errors,
        place.root,
        place.rules,
    ];
    kept.extend(
        luggage
            .input
            .iter()
            .chain(&luggage.doors)
            .chain(place.namespaces),
    );
    kept.push(&luggage.plan);
    sys::close_all_but(&kept.into_iter().map(AsRawFd::as_raw_fd).collect::<Vec<_>>());
    let _ = rustix::thread::set_name(c"cb-errand");
    let errand = read(&luggage.plan).map_err(step("its words"))?;
    let prepared = Prepared::new(&errand).map_err(step("its words"))?;

    cgroup::enter(&luggage.doors).map_err(step("enter the control group"))?;
    // Leaves the process group of the jail: signals to a group cross namespaces.
    rustix::process::setsid().map_err(|error| step("setsid")(error.into()))?;
    sys::unshare(UnshareFlags::NEWCGROUP).map_err(step("make a cgroup namespace"))?;
    for namespace in place.namespaces {
        let entered = rustix::thread::move_into_link_name_space(namespace.as_fd(), None);
        entered.map_err(|error| step("setns")(error.into()))?;
    }
    take_root(place.root).map_err(step("take the root of the sandbox"))?;
    for limit in &place.entry.rlimits {
        sys::limit(limit.resource, limit.value).map_err(step("set a limit"))?;
    }
    become_user(place.entry).map_err(step("become the session's user"))?;
    give_up_capabilities().map_err(step("give up capabilities"))?;
    sys::restrict_files(place.rules).map_err(step("enter the landlock rules"))?;
    lay_out(luggage).map_err(step("open its descriptors"))?;
    rustix::process::chdir(errand.folder.as_str())
        .map_err(|error| step("enter its folder")(error.into()))?;
    sys::unblock_signals();
    sys::die_of_broken_pipes();
    if let Some(filters) = place.filters {
        for filter in [&filters.wide, &filters.closing] {
            seccompiler::apply_filter(filter)
                .map_err(|error| step("load a filter")(io::Error::other(error)))?;
        }
    }
    Ok(prepared)
}

fn read(plan: &OwnedFd) -> io::Result<Errand> {
    let mut bytes = Vec::new();
    let mut plan = File::from(plan.try_clone()?);
    io::Seek::rewind(&mut plan)?;
    plan.take(LARGEST_ERRAND).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

fn become_user(entry: &Entry) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(entry.id), Gid::from_raw(entry.id));
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    Ok(())
}

/// Puts the program's three descriptors in place. All others are closed at exec.
fn lay_out(luggage: &Luggage) -> io::Result<()> {
    match &luggage.input {
        Some(input) => sys::place(input.as_fd(), 0)?,
        None => {
            let nothing =
                rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            sys::place(nothing.as_fd(), 0)?;
            // The lowest number was free, so this may be 0 itself.
            if nothing.as_raw_fd() == 0 {
                std::mem::forget(nothing);
            }
        }
    }
    sys::place(luggage.output.as_fd(), 1)?;
    sys::place(luggage.errors.as_fd(), 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errand(words: &[&str], environment: &[(&str, &str)]) -> Errand {
        Errand {
            words: words.iter().map(|word| (*word).to_owned()).collect(),
            folder: "/".to_owned(),
            environment: environment
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
        }
    }

    #[test]
    fn a_program_without_a_slash_is_looked_for_in_its_own_path() {
        let found = |words: &[&str], path: &str| places(&errand(words, &[("PATH", path)]));
        assert_eq!(found(&["perl", "-w"], "/a:/b"), ["/a/perl", "/b/perl"]);
        assert_eq!(found(&["perl"], ""), ["./perl"], "as the C library has it");
        assert_eq!(found(&["./perl"], "/a"), ["./perl"]);
        assert_eq!(found(&["/bin/sh"], "/a"), ["/bin/sh"]);
        assert_eq!(places(&errand(&["sh"], &[])), ["/usr/bin/sh", "/bin/sh"]);
        assert!(found(&[""], "/a").is_empty() && found(&[], "/a").is_empty());
        assert_eq!(
            places(&errand(&["sh"], &[("PATH", "/a"), ("PATH", "/b")])),
            ["/b/sh"],
            "the last one counts"
        );
    }

    #[test]
    fn words_that_the_kernel_cannot_take_are_refused() {
        assert!(Prepared::new(&errand(&["sh", "a\0b"], &[])).is_err());
        assert!(Prepared::new(&errand(&["sh"], &[("A", "b\0c")])).is_err());
        // Control.
        assert!(Prepared::new(&errand(&["sh", "a b"], &[("A", "b=c")])).is_ok());
    }

    #[test]
    fn descriptors_are_sorted_with_and_without_an_input() {
        let descriptors = |count| {
            (0..count)
                .map(|_| OwnedFd::from(File::open("/dev/null").unwrap()))
                .collect()
        };
        let with = Luggage::unpack(descriptors(8), true).unwrap();
        assert!(with.input.is_some() && with.doors.len() == 2);
        let without = Luggage::unpack(descriptors(8), false).unwrap();
        assert!(without.input.is_none() && without.doors.len() == 3);
        assert!(Luggage::unpack(descriptors(4), false).is_none());
        assert!(Luggage::unpack(descriptors(5), true).is_none());
    }
}
