//! Starts the warm interpreter.
//!
//! The zygote is Python (`runner/cellblock_runner/zygote.py`) in the warden's namespaces, with its
//! own `/tmp` and the wide filter loaded. It keeps the capabilities of the warden's user namespace,
//! because its copies must enter families; on the host these capabilities grant nothing. It never
//! holds user data: its copies enter the user namespace of their family before they do (`family`).
//! Once it is warm it is parked (`twin`).

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::mount::MountAttrFlags;
use rustix::process::{Pid, Resource, Rlimit};
use serde::{Deserialize, Serialize};

use crate::root;
use crate::seccomp::Filters;
use crate::sys::{self, ForkSide};
use crate::twin::{ForkPointTracer, MemoryRange, StopWaiter, TRACE_OPTIONS, Twin};
use crate::wire::{self, OmittedLayer, Programs, Setup};

/// Descriptor number of the zygote's socket.
const SOCKET_FD: i32 = 3;

/// The first message to the zygote.
#[derive(Serialize)]
struct Plan<'a> {
    preload: &'a [String],
    quick: bool,
    environment: &'a [(String, String)],
    work_folder: &'a str,
    programs: Programs,
}

/// Requests of the warden to the zygote.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
enum Request {
    /// Stop at the point from which all sessions continue.
    Park,
}

/// Messages from the zygote to the warden.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub(crate) enum ZygoteReport {
    /// Carries addresses of Python objects, one for each part of memory that contains some.
    Warm { objects: Vec<u64> },
}

/// The warm interpreter as the warden sees it.
pub(crate) struct Zygote {
    pub(crate) pid: Pid,
    pub(crate) socket: OwnedFd,
    /// Set once it is parked.
    pub(crate) twin: Option<Twin>,
    /// A newer zygote has replaced it.
    pub(crate) replaced: bool,
    /// False once the other end of `socket` is closed.
    pub(crate) listening: bool,
    /// Its standard error, for the error report when it ends.
    stderr: OwnedFd,
}

impl Zygote {
    /// Starts Python with the plan for its forks.
    pub(crate) fn start(setup: &Setup, filters: &Filters) -> io::Result<Zygote> {
        let (socket, inside) = wire::pair()?;
        let (stderr, standard_error) = rustix::pipe::pipe_with(
            rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK,
        )?;
        let pid = match sys::clone_process(libc::CLONE_NEWNS)? {
            ForkSide::Child => {
                let error = become_python(setup, filters, &inside, &standard_error);
                let _ = rustix::io::write(rustix::stdio::stderr(), error.to_string().as_bytes());
                sys::exit_now(127);
            }
            ForkSide::Parent(pid) => pid,
        };
        let plan = Plan {
            preload: &setup.zygote.preload,
            quick: setup.zygote.quick,
            environment: &setup.zygote.session_environment,
            work_folder: root::WORK,
            programs: setup.zygote.programs,
        };
        wire::send(&socket, &plan, &[])?;
        Ok(Zygote {
            pid,
            socket,
            twin: None,
            replaced: false,
            listening: true,
            stderr,
        })
    }

    /// Parks it: from now on it is a twin and never runs again.
    pub(crate) fn park(
        &mut self,
        waiter: &StopWaiter<'_>,
        objects: &[u64],
        quick: bool,
    ) -> io::Result<()> {
        let tracer = ForkPointTracer::begin(self.pid, TRACE_OPTIONS)?;
        wire::send(&self.socket, &Request::Park, &[])?;
        let saved = tracer.finish(waiter)?;
        let mut twin = Twin::park(waiter, self.pid, saved)?;
        if !quick {
            twin.move_to_memfd(waiter, &movable_ranges(self.pid, objects)?)?;
        }
        twin.keep_scratch(waiter)?;
        self.twin = Some(twin);
        Ok(())
    }
}

impl Zygote {
    /// Reads what it wrote to its standard error.
    pub(crate) fn read_stderr(&self) -> String {
        let mut words = vec![0; 8192];
        let length = rustix::io::read(&self.stderr, &mut words).unwrap_or(0);
        String::from_utf8_lossy(&words[..length]).trim().to_owned()
    }
}

/// Returns the ranges of the zygote's memory that may be moved: its heap, the arenas that contain
/// these objects, and the written data of libraries.
///
/// `move_to_memfd` relies on the fact that all of them are returned to the kernel as a whole and
/// never resized in place. The C library's large blocks are resized, so it is kept from allocating
/// any while the zygote warms up.
fn movable_ranges(process: Pid, objects: &[u64]) -> io::Result<Vec<MemoryRange>> {
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", process.as_raw_pid()))?;
    let mut ranges: Vec<MemoryRange> = Vec::new();
    // The end of the last file mapping: a library's zeroed data follows its other data without a
    // name.
    let mut end_of_file = 0;
    let mut candidate: Option<MemoryRange> = None;
    for line in maps.lines() {
        if let Some(size) = line.strip_prefix("Anonymous:") {
            let holds_something = size.trim() != "0 kB";
            ranges.extend(candidate.take().filter(|_| holds_something));
            continue;
        }
        // The first line of a mapping: from-to permissions offset device inode path
        let mut fields = line.split_whitespace();
        let Some((from, to)) = fields.next().and_then(|range| range.split_once('-')) else {
            continue;
        };
        let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16))
        else {
            continue;
        };
        let permissions = fields.next().unwrap_or_default();
        let path = fields.nth(3).unwrap_or_default();
        let range = from..to;
        let of_file = path.starts_with('/') || (path.is_empty() && from == end_of_file);
        if of_file {
            end_of_file = to;
        }
        let holds_objects =
            path.is_empty() && objects.iter().any(|address| range.contains(address));
        let private = permissions.ends_with('p') && !permissions.contains('x');
        let movable = private && (of_file || holds_objects || path == "[heap]");
        candidate = movable.then(|| MemoryRange {
            range,
            writable: permissions.contains('w'),
        });
    }
    Ok(ranges)
}

/// Prepares this process and replaces it with Python. Returns only on failure.
fn become_python(
    setup: &Setup,
    filters: &Filters,
    socket: &OwnedFd,
    standard_error: &OwnedFd,
) -> io::Error {
    let attempt = || -> io::Result<(CString, Vec<CString>, Vec<CString>)> {
        rustix::thread::set_name(c"cb-zygote")?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        let temporary = root::memory_file_system(
            &[("mode", "0700"), ("size", "64m"), ("nr_inodes", "4k")],
            attributes,
        )?;
        root::attach(&temporary, "/tmp")?;
        std::fs::create_dir(root::HOME)?;
        // The operator's mounts are for sessions.
        root::remove_staged_mounts(setup.mounts.len());
        let nothing = rustix::fs::open(
            "/dev/null",
            rustix::fs::OFlags::RDWR,
            rustix::fs::Mode::empty(),
        )?;
        rustix::stdio::dup2_stdin(&nothing)?;
        rustix::stdio::dup2_stdout(&nothing)?;
        rustix::stdio::dup2_stderr(standard_error)?;
        sys::dup_to(socket.as_fd(), SOCKET_FD)?;
        sys::unblock_signals();
        // A twin uses high descriptor numbers, whatever the host's soft limit is.
        let open_files = rustix::process::getrlimit(Resource::Nofile);
        rustix::process::setrlimit(
            Resource::Nofile,
            Rlimit {
                current: open_files.maximum,
                ..open_files
            },
        )?;
        // All sessions inherit their address space layout and hash seed from here; they must not
        // inherit a secret.
        rustix::process::setrlimit(
            Resource::Core,
            Rlimit {
                current: Some(0),
                maximum: Some(1),
            },
        )?;
        let program = CString::new(setup.zygote.program.as_str())?;
        let arguments = std::iter::once(&setup.zygote.program).chain(&setup.zygote.arguments);
        let arguments = arguments
            .map(|text| CString::new(text.as_str()))
            .collect::<Result<Vec<_>, _>>()?;
        let environment = setup
            .zygote
            .environment
            .iter()
            .map(|(name, value)| CString::new(format!("{name}={value}")));
        let environment = environment.collect::<Result<Vec<_>, _>>()?;
        if !setup.leave_out.contains(&OmittedLayer::Seccomp) {
            seccompiler::apply_filter(&filters.wide).map_err(io::Error::other)?;
        }
        Ok((program, arguments, environment))
    };
    match attempt() {
        Ok((program, arguments, environment)) => {
            let arguments: Vec<_> = arguments.iter().map(CString::as_c_str).collect();
            let environment: Vec<_> = environment.iter().map(CString::as_c_str).collect();
            // Only now: everything above has closed its own descriptors.
            sys::close_all_but(&[0, 1, 2, SOCKET_FD]);
            sys::execute(&program, &arguments, &environment)
        }
        Err(error) => error,
    }
}
