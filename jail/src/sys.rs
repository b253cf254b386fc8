//! System calls that no crate wraps safely. The only unsafe code of the project.
//!
//! Each function makes one call. None of them promises to be async-signal-safe: the callers are
//! single-threaded processes, so a child created by `clone_process` may allocate and use locks like
//! its parent.

use std::ffi::c_long;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::process::Pid;
use rustix::thread::UnshareFlags;

/// The two sides of a fork.
pub(crate) enum ForkSide {
    Parent(Pid),
    Child,
}

/// Forks with the given namespace flags; the child is a copy of this single-threaded process.
pub(crate) fn clone_process(namespaces: libc::c_int) -> io::Result<ForkSide> {
    let flags = c_long::from(namespaces | libc::SIGCHLD);
    // SAFETY: without CLONE_VM and with a null stack, clone is fork: the child gets a copy of this
    // address space and returns here. This process has one thread (asserted by the guardian at its
    // start), so no lock can be held by a thread that vanished.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(ForkSide::Child),
        pid => Ok(ForkSide::Parent(
            Pid::from_raw(pid as i32).expect("clone returns a positive pid to the parent"),
        )),
    }
}

/// Moves this process into new namespaces.
pub(crate) fn unshare(flags: UnshareFlags) -> io::Result<()> {
    // SAFETY: the danger named by rustix is CLONE_FILES seen by other threads; this process has no
    // other thread.
    unsafe { rustix::thread::unshare_unsafe(flags) }.map_err(io::Error::from)
}

/// `struct mount_attr` of the kernel.
#[repr(C)]
#[derive(Default)]
pub(crate) struct MountAttr {
    pub(crate) attr_set: u64,
    pub(crate) attr_clr: u64,
    pub(crate) propagation: u64,
    pub(crate) userns_fd: u64,
}

/// Changes the attributes of a mount and of all mounts below it.
pub(crate) fn mount_setattr(mount: impl AsFd, attributes: &MountAttr) -> io::Result<()> {
    mount_setattr_with(mount, attributes, libc::AT_RECURSIVE)
}

/// Changes the attributes of a mount but not of the mounts below it.
pub(crate) fn mount_setattr_only(mount: impl AsFd, attributes: &MountAttr) -> io::Result<()> {
    mount_setattr_with(mount, attributes, 0)
}

fn mount_setattr_with(
    mount: impl AsFd,
    attributes: &MountAttr,
    depth: libc::c_int,
) -> io::Result<()> {
    let flags = libc::AT_EMPTY_PATH | depth;
    // SAFETY: the path is a C string, `attributes` has the kernel's layout and the size given is
    // its size; the kernel only reads both.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            flags,
            std::ptr::from_ref(attributes),
            size_of::<MountAttr>(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Opens the user namespace that a namespace belongs to.
pub(crate) fn owning_user_namespace(namespace: impl AsFd) -> io::Result<OwnedFd> {
    /// Not defined by the libc crate: `_IO(0xb7, 0x1)`.
    const NS_GET_USERNS: libc::Ioctl = 0xb701;
    // SAFETY: the request takes no argument and returns a new descriptor or an error.
    let raw = unsafe { libc::ioctl(namespace.as_fd().as_raw_fd(), NS_GET_USERNS) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor for us, and nothing else refers to it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Returns the address of the dynamic loader in this process; zero if there is none.
pub(crate) fn loader_address() -> u64 {
    // SAFETY: reads one value that the kernel gave this process at its start.
    unsafe { libc::getauxval(libc::AT_BASE) }
}

/// Brings up the loopback interface of this network namespace.
pub(crate) fn bring_loopback_up() -> io::Result<()> {
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        None,
    )?;
    let mut name = [0; libc::IFNAMSIZ];
    name[0] = b'l' as libc::c_char;
    name[1] = b'o' as libc::c_char;
    let request = libc::ifreq {
        ifr_name: name,
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_flags: (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short,
        },
    };
    // SAFETY: SIOCSIFFLAGS reads one ifreq, whose name is terminated by the zeros it was filled
    // with.
    let result = unsafe {
        libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFFLAGS,
            std::ptr::from_ref(&request),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns a descriptor that becomes readable when a child of this process changes state. Blocks
/// SIGCHLD.
pub(crate) fn child_signal_descriptor() -> io::Result<OwnedFd> {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set it is given.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: sigemptyset above has initialised it.
    let mut set = unsafe { set.assume_init() };
    // SAFETY: the set is initialised and SIGCHLD is a signal number.
    unsafe { libc::sigaddset(&mut set, libc::SIGCHLD) };
    // SAFETY: the set is initialised and the old mask is not asked for.
    unsafe { libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
    // SAFETY: -1 asks for a new descriptor; the set is initialised.
    let raw = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: signalfd returned a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Blocks the signals that request termination.
pub(crate) fn block_termination_signals() {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set it is given.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: sigemptyset above has initialised it.
    let mut set = unsafe { set.assume_init() };
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY: the set is initialised and these are signal numbers.
        unsafe { libc::sigaddset(&mut set, signal) };
    }
    // SAFETY: the set is initialised and the old mask is not asked for.
    unsafe { libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
}

/// Makes the kernel reap children of this process when they end, without a wait.
pub(crate) fn ignore_sigchld() {
    // SAFETY: SIG_IGN installs no handler, so no code of ours can be called at a bad moment.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Unblocks all signals; for a child that will exec a program.
pub(crate) fn unblock_signals() {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set it is given.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: the set was initialised above and the old mask is not asked for.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, set.as_ptr(), std::ptr::null_mut()) };
}

/// Restores the default action of SIGPIPE, which the Rust runtime changes at start; for a child
/// that will exec a program.
pub(crate) fn restore_default_sigpipe() {
    // SAFETY: SIG_DFL installs no handler, so no code of ours can be called at a bad moment.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Sets a resource limit of this process permanently.
pub(crate) fn set_limit(resource: u32, value: u64) -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: value,
        rlim_max: value,
    };
    // SAFETY: the kernel reads one rlimit from the place given, and is not asked for the old one.
    let result = unsafe { libc::prlimit(0, resource, &limit, std::ptr::null_mut()) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Restricts this process permanently to the landlock rules.
pub(crate) fn landlock_restrict_self(rules: impl AsFd) -> io::Result<()> {
    // SAFETY: the call takes two numbers and touches no memory.
    let result = unsafe {
        libc::syscall(
            libc::SYS_landlock_restrict_self,
            rules.as_fd().as_raw_fd(),
            0,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Sends a signal to every process this one can see in its pid namespace, except itself and pid 1.
pub(crate) fn signal_all(signal: libc::c_int) -> io::Result<()> {
    // SAFETY: kill takes two numbers and touches no memory.
    let result = unsafe { libc::kill(-1, signal) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Takes ownership of this process's standard input.
pub(crate) fn take_stdin() -> OwnedFd {
    // SAFETY: descriptor 0 was opened for us before exec, and nothing in this process reads from
    // std::io::stdin.
    unsafe { OwnedFd::from_raw_fd(0) }
}

/// Duplicates `descriptor` to a fixed number, kept across exec.
pub(crate) fn dup_to(descriptor: std::os::fd::BorrowedFd<'_>, number: i32) -> io::Result<()> {
    // SAFETY: dup2 closes whatever had that number; the caller execs a program next and uses only
    // the listed descriptors.
    let result = unsafe { libc::dup2(descriptor.as_raw_fd(), number) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    if descriptor.as_raw_fd() == number {
        // SAFETY: F_SETFD takes a number; dup2 onto itself leaves close-on-exec as it was.
        unsafe { libc::fcntl(number, libc::F_SETFD, 0) };
    }
    Ok(())
}

/// Closes every descriptor except the given ones. For a freshly forked process that never returns
/// into code of its parent.
pub(crate) fn close_all_but(kept: &[i32]) {
    let mut kept = kept.to_vec();
    kept.sort_unstable();
    let mut from = 0;
    for number in kept.into_iter().chain([i32::MAX]) {
        if number > from {
            // SAFETY: nothing owns these descriptors any more: the values that did belong to the
            // parent's code, which this process left.
            unsafe {
                libc::syscall(
                    libc::SYS_close_range,
                    from as libc::c_uint,
                    (number - 1) as libc::c_uint,
                    0,
                )
            };
        }
        from = number.saturating_add(1);
    }
}

/// Replaces this process with a program, without a `PATH` search.
pub(crate) fn execute(
    program: &std::ffi::CStr,
    arguments: &[&std::ffi::CStr],
    environment: &[&std::ffi::CStr],
) -> io::Error {
    let pointers = |list: &[&std::ffi::CStr]| -> Vec<*const libc::c_char> {
        list.iter()
            .map(|text| text.as_ptr())
            .chain([std::ptr::null()])
            .collect()
    };
    let (arguments, environment) = (pointers(arguments), pointers(environment));
    // SAFETY: both lists end with a null pointer and their strings outlive the call.
    unsafe { libc::execve(program.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
    io::Error::last_os_error()
}

/// Returns the hard limit of a resource for this process; `None` if it is unlimited.
pub(crate) fn hard_limit(resource: u32) -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel writes one rlimit to the place given.
    let result = unsafe { libc::prlimit(0, resource, std::ptr::null(), &mut limit) };
    (result == 0 && limit.rlim_max != libc::RLIM_INFINITY).then_some(limit.rlim_max)
}

/// Makes one ptrace request about a process that this one traces, with plain numbers as arguments.
fn ptrace(request: libc::c_uint, process: Pid, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: the callers below pass numbers, or addresses of values that outlive the call and have
    // the size that the request asks for.
    let result = unsafe { libc::ptrace(request, process.as_raw_pid(), address, data) };
    if result == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// How a stopped process is resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resume {
    /// Until the next event.
    Continue,
    /// Until it enters or leaves a system call, or the next event.
    ToSyscall,
}

/// Starts tracing a process, without stopping it.
pub(crate) fn seize(process: Pid, options: libc::c_int) -> io::Result<()> {
    ptrace(libc::PTRACE_SEIZE, process, 0, options as usize)
}

/// Makes a traced process stop as soon as possible.
pub(crate) fn interrupt(process: Pid) -> io::Result<()> {
    ptrace(libc::PTRACE_INTERRUPT, process, 0, 0)
}

/// Resumes a stopped process, with a signal if that is not zero.
pub(crate) fn resume(process: Pid, how: Resume, signal: libc::c_int) -> io::Result<()> {
    let request = match how {
        Resume::Continue => libc::PTRACE_CONT,
        Resume::ToSyscall => libc::PTRACE_SYSCALL,
    };
    ptrace(request, process, 0, signal as usize)
}

/// Resumes a stopped process and stops tracing it.
pub(crate) fn detach(process: Pid) -> io::Result<()> {
    ptrace(libc::PTRACE_DETACH, process, 0, 0)
}

/// Returns the message of the ptrace event that a process stopped for: the pid of a new process.
pub(crate) fn event_message(process: Pid) -> io::Result<u64> {
    let mut message: libc::c_ulong = 0;
    ptrace(
        libc::PTRACE_GETEVENTMSG,
        process,
        0,
        std::ptr::from_mut(&mut message) as usize,
    )?;
    Ok(message)
}

/// Reads one register set of a stopped process; returns its size in bytes.
pub(crate) fn read_registers(
    process: Pid,
    set: libc::c_int,
    buffer: &mut [u8],
) -> io::Result<usize> {
    let mut place = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    ptrace(
        libc::PTRACE_GETREGSET,
        process,
        set as usize,
        std::ptr::from_mut(&mut place) as usize,
    )?;
    Ok(place.iov_len)
}

/// Writes one register set of a stopped process.
pub(crate) fn write_registers(process: Pid, set: libc::c_int, bytes: &[u8]) -> io::Result<()> {
    let place = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    ptrace(
        libc::PTRACE_SETREGSET,
        process,
        set as usize,
        std::ptr::from_ref(&place) as usize,
    )
}

/// The system call whose entry a process stopped at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SyscallEntry {
    pub(crate) number: u64,
    pub(crate) arguments: [u64; 6],
    /// The address at which it continues afterwards.
    pub(crate) returns_to: u64,
}

/// From `linux/audit.h`.
#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
/// From `linux/audit.h`.
#[cfg(target_arch = "aarch64")]
const AUDIT_ARCH_AARCH64: u32 = 0xc000_00b7;

/// The kernel's number for system calls of this architecture.
#[cfg(target_arch = "x86_64")]
const NATIVE_AUDIT_ARCH: u32 = AUDIT_ARCH_X86_64;
/// The kernel's number for system calls of this architecture.
#[cfg(target_arch = "aarch64")]
const NATIVE_AUDIT_ARCH: u32 = AUDIT_ARCH_AARCH64;

/// Reads which system call a process is about to make; `None` if it stopped at the exit of one.
pub(crate) fn syscall_entry(process: Pid) -> io::Result<Option<SyscallEntry>> {
    let mut info = std::mem::MaybeUninit::<libc::ptrace_syscall_info>::zeroed();
    let size = size_of::<libc::ptrace_syscall_info>();
    // SAFETY: the kernel writes at most `size` bytes to the place, which is as large.
    let result = unsafe {
        libc::ptrace(
            libc::PTRACE_GET_SYSCALL_INFO,
            process.as_raw_pid(),
            size,
            info.as_mut_ptr().cast::<libc::c_void>(),
        )
    };
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all zeros are a valid value, and the kernel has filled in the rest.
    let info = unsafe { info.assume_init() };
    // A call of another architecture has different numbers.
    if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY || info.arch != NATIVE_AUDIT_ARCH {
        return Ok(None);
    }
    // SAFETY: at the entry of a call the kernel fills in this member of the union.
    let entry = unsafe { info.u.entry };
    Ok(Some(SyscallEntry {
        number: entry.nr,
        arguments: entry.args,
        returns_to: info.instruction_pointer,
    }))
}

/// Reads the signal mask of a stopped process.
pub(crate) fn signal_mask(process: Pid) -> io::Result<u64> {
    let mut mask = 0_u64;
    ptrace(
        libc::PTRACE_GETSIGMASK,
        process,
        size_of::<u64>(),
        std::ptr::from_mut(&mut mask) as usize,
    )?;
    Ok(mask)
}

/// Sets the signal mask of a stopped process.
pub(crate) fn set_signal_mask(process: Pid, mask: u64) -> io::Result<()> {
    ptrace(
        libc::PTRACE_SETSIGMASK,
        process,
        size_of::<u64>(),
        std::ptr::from_ref(&mask) as usize,
    )
}

/// The restartable sequences that a thread has registered with the kernel: `struct
/// ptrace_rseq_configuration`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RseqConfiguration {
    pub(crate) address: u64,
    pub(crate) size: u32,
    pub(crate) signature: u32,
    flags: u32,
    padding: u32,
}

/// Reads the area that a stopped process has registered; its address is zero if there is none.
pub(crate) fn rseq_configuration(process: Pid) -> io::Result<RseqConfiguration> {
    /// Not yet defined by the libc crate.
    const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
    let mut area = RseqConfiguration::default();
    let size = size_of::<RseqConfiguration>();
    ptrace(
        PTRACE_GET_RSEQ_CONFIGURATION,
        process,
        size,
        std::ptr::from_mut(&mut area) as usize,
    )?;
    Ok(area)
}

/// Returns the CPU time of a process.
pub(crate) fn cpu_time(process: Pid) -> io::Result<Duration> {
    let mut clock = 0;
    // SAFETY: the pointer is to a variable of the right type.
    let error = unsafe { libc::clock_getcpuclockid(process.as_raw_pid(), &raw mut clock) };
    if error != 0 {
        return Err(io::Error::from_raw_os_error(error));
    }
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: as above.
    match unsafe { libc::clock_gettime(clock, &raw mut time) } {
        0 => Ok(Duration::new(
            time.tv_sec.cast_unsigned(),
            time.tv_nsec as u32,
        )),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns free memory in the middle of the heaps to the kernel.
pub(crate) fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: any thread may call it at any time; the allocator takes its own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Exits immediately, without running exit handlers copied from the parent.
pub(crate) fn exit_now(status: i32) -> ! {
    // SAFETY: _exit never returns and touches no memory of ours.
    unsafe { libc::_exit(status) }
}
