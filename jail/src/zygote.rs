//! Starting the warm interpreter and talking to it.
//!
//! The zygote is Python (`runner/cellblock_runner/zygote.py`) in the warden's namespaces, with a `/tmp` of its own and the wide filter
//! loaded. It keeps the capabilities of the warden's user namespace, because its forks must enter sandboxes; on the host they are worth nothing.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::mount::MountAttrFlags;
use rustix::process::{Pid, Resource, Rlimit};
use serde::{Deserialize, Serialize};

use crate::identity::INSIDE_ID;
use crate::root;
use crate::seccomp::Filters;
use crate::sys::{self, Forked};
use crate::wire::{self, Generation, LeftOut, ResourceLimit, Setup, Slot};

/// The zygote finds its socket here.
const SOCKET: i32 = 3;

/// The first message to the zygote: how its forks enter a sandbox. The numbers of system calls come from here, so that the Python side knows none.
#[derive(Serialize)]
struct Plan<'a> {
    preload: &'a [String],
    quick: bool,
    environment: &'a [(String, String)],
    work_folder: &'a str,
    id: u32,
    /// Without a block of ids the kernel does not let a process give up its groups.
    drop_groups: bool,
    rlimits: &'a [ResourceLimit],
    /// `struct sock_filter` array as hexadecimal digits; empty in a test that leaves it out.
    closing_filter: String,
    calls: Calls,
}

#[derive(Serialize)]
struct Calls {
    setns: i64,
    prctl: i64,
    capset: i64,
    seccomp: i64,
    landlock_restrict_self: i64,
}

/// What the warden asks of the zygote; carries channel, pid namespace, the other namespaces, the doors of the control group, and the rules last.
#[derive(Serialize)]
struct Request {
    slot: Slot,
    generation: Generation,
    doors: usize,
    has_rules: bool,
}

/// What the zygote tells the warden.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub(crate) enum Word {
    Warm,
    Forked { slot: Slot, generation: Generation, pid: i32 },
    Exited { pid: i32, status: i32 },
    Failed { slot: Slot, why: String },
}

/// The warm interpreter as the warden sees it.
pub(crate) struct Zygote {
    pub(crate) pid: Pid,
    pub(crate) socket: OwnedFd,
    /// It has said that it can fork.
    pub(crate) warm: bool,
    /// A newer one has taken its place.
    pub(crate) replaced: bool,
    /// False once the other end of `socket` is closed.
    pub(crate) listening: bool,
    /// Its standard error, for words of complaint when it ends.
    complaints: OwnedFd,
}

impl Zygote {
    /// Starts Python with the plan for its forks.
    pub(crate) fn start(setup: &Setup, filters: &Filters) -> io::Result<Zygote> {
        let (socket, inside) = wire::pair()?;
        let (complaints, standard_error) =
            rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK)?;
        let pid = match sys::clone_process(libc::CLONE_NEWNS)? {
            Forked::Child => {
                let error = become_python(setup, filters, &inside, &standard_error);
                let _ = rustix::io::write(rustix::stdio::stderr(), error.to_string().as_bytes());
                sys::exit_now(127);
            }
            Forked::Parent(pid) => pid,
        };
        let plan = Plan {
            preload: &setup.zygote.preload,
            quick: setup.zygote.quick,
            environment: &setup.zygote.session_environment,
            work_folder: root::WORK,
            id: INSIDE_ID,
            drop_groups: matches!(setup.identity, crate::identity::Identity::Block { .. }),
            rlimits: &setup.rlimits,
            closing_filter: if setup.leave_out.contains(&LeftOut::Seccomp) {
                String::new()
            } else {
                filters.closing_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
            },
            calls: Calls {
                setns: libc::SYS_setns,
                prctl: libc::SYS_prctl,
                capset: libc::SYS_capset,
                seccomp: libc::SYS_seccomp,
                landlock_restrict_self: libc::SYS_landlock_restrict_self,
            },
        };
        wire::send(&socket, &plan, &[])?;
        Ok(Zygote { pid, socket, warm: false, replaced: false, listening: true, complaints })
    }

    /// Asks for a fork into the given namespaces, the pid namespace first.
    pub(crate) fn fork(
        &self,
        slot: Slot,
        generation: Generation,
        channel: &OwnedFd,
        namespaces: &[OwnedFd],
        doors: &[OwnedFd],
        rules: Option<&OwnedFd>,
    ) -> io::Result<()> {
        let descriptors: Vec<BorrowedFd<'_>> =
            std::iter::once(channel).chain(namespaces).chain(doors).chain(rules).map(AsFd::as_fd).collect();
        let request = Request { slot, generation, doors: doors.len(), has_rules: rules.is_some() };
        wire::send(&self.socket, &request, &descriptors)
    }
}

impl Zygote {
    /// Reads what it wrote to its standard error.
    pub(crate) fn last_words(&self) -> String {
        let mut words = vec![0; 8192];
        let length = rustix::io::read(&self.complaints, &mut words).unwrap_or(0);
        String::from_utf8_lossy(&words[..length]).trim().to_owned()
    }
}

/// Prepares this process and replaces it by Python. Returns only on failure.
fn become_python(setup: &Setup, filters: &Filters, socket: &OwnedFd, standard_error: &OwnedFd) -> io::Error {
    let attempt = || -> io::Result<(CString, Vec<CString>, Vec<CString>)> {
        rustix::thread::set_name(c"cb-zygote")?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        let temporary =
            root::memory_file_system(&[("mode", "0700"), ("size", "64m"), ("nr_inodes", "4k")], attributes)?;
        root::attach(&temporary, "/tmp")?;
        std::fs::create_dir(root::HOME)?;
        // What an operator mounts is for sessions.
        root::remove_standing_mounts(setup.mounts.len());
        let nothing = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())?;
        rustix::stdio::dup2_stdin(&nothing)?;
        rustix::stdio::dup2_stdout(&nothing)?;
        rustix::stdio::dup2_stderr(standard_error)?;
        sys::place(socket.as_fd(), SOCKET)?;
        sys::unblock_signals();
        // Address space layout and hash seed of all sessions come from here; nothing secret may.
        rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(1) })?;
        let program = CString::new(setup.zygote.program.as_str())?;
        let arguments = std::iter::once(&setup.zygote.program).chain(&setup.zygote.arguments);
        let arguments = arguments.map(|text| CString::new(text.as_str())).collect::<Result<Vec<_>, _>>()?;
        let environment = setup.zygote.environment.iter().map(|(name, value)| CString::new(format!("{name}={value}")));
        let environment = environment.collect::<Result<Vec<_>, _>>()?;
        if !setup.leave_out.contains(&LeftOut::Seccomp) {
            seccompiler::apply_filter(&filters.wide).map_err(io::Error::other)?;
        }
        Ok((program, arguments, environment))
    };
    match attempt() {
        Ok((program, arguments, environment)) => {
            let arguments: Vec<_> = arguments.iter().map(CString::as_c_str).collect();
            let environment: Vec<_> = environment.iter().map(CString::as_c_str).collect();
            // Only now: everything above has closed its own descriptors.
            sys::close_all_but(&[0, 1, 2, SOCKET]);
            sys::execute(&program, &arguments, &environment)
        }
        Err(error) => error,
    }
}

/// The namespaces an interpreter joins, in the order of the request.
pub(crate) const JOINED: [&str; 7] = ["pid", "mnt", "net", "ipc", "uts", "cgroup", "user"];
