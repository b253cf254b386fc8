//! Twins. A twin is a snapshot process: a stopped process from which interpreters are created.
//!
//! A twin has the memory of an interpreter and all rights in the user namespace of its
//! family (`family`), and no other rights. It is always stopped, with the warden as its tracer, and
//! never executes an instruction that its memory could have prepared for it, because user code
//! controls that memory. There are three kinds, which work the same way:
//!
//! - the zygote, warm and parked at the point from which all fresh sessions continue. It has the
//!   warden's rights and contains no user data;
//! - the twin of a live interpreter, which shares its memory and its descriptor table. A copy of
//!   this twin is a copy of the interpreter;
//! - a checkpoint: such a copy, kept.
//!
//! ```text
//!  copy              twin ──clone──► another twin, with its own memory from then on
//!  copy_into_family  zygote ──clone──► a twin in the pid namespace of a family, which it enters
//!                    first
//!  spawn             twin ──clone(memory shared)──► a process that enters a sandbox, drops every
//!                    right, and becomes an interpreter
//! ```
//!
//! A twin is used without trusting its memory as follows. It gets registers for one system call and
//! is resumed until it enters the kernel. There the kernel reports which call it is about to make,
//! with which arguments and from which address. Anything other than the requested call kills the
//! twin. A fresh copy has memory that no other process can write, except for shared mappings; so a
//! whole program of calls is put into a private page made for it and run there. Even if a twin
//! could be steered, it would be confined to its family.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, WaitOptions};

use crate::program::{AssembledProgram, SyscallProgram};
use crate::registers::{self, Argument, Registers};
use crate::sys::{self, Resume, RseqConfiguration};
use crate::test_switches::TestSwitches;
use crate::wire::{self, Programs, ResourceLimit};

/// Descriptor number of an interpreter's end of the channel.
pub const CHANNEL_FD: u64 = 1000;
/// Descriptor numbers that a process uses while it enters a sandbox: its landlock rules, and the
/// user namespace that it enters last.
const RULESET_FD: u64 = 1001;
const USER_NAMESPACE_FD: u64 = 1002;
/// Descriptor number, in a twin, of the pid namespace that it returns to.
const OWN_PID_NAMESPACE_FD: u64 = 1003;

/// Timeout for one step of a twin. It only makes system calls; copying many gigabytes of memory
/// takes a second.
const STEP_TIMEOUT: Duration = Duration::from_secs(10);
/// CPU time a twin may use before its next system call. CPU time is measured because a busy machine
/// delays a twin. Its memory is not trusted, so it may never get there. It cannot do anything in
/// the meantime, and is killed afterwards.
const SYSCALL_ENTRY_TIMEOUT: Duration = Duration::from_millis(200);
/// How long this process polls before it sleeps: most steps take less time than a wake-up.
const SPIN_TIMEOUT: Duration = Duration::from_micros(60);

/// Size of the mapping for a program and its data. Only pages that are used are allocated.
const SCRATCH_SIZE: u64 = 128 * 1024;
/// Offset of the data in it.
const DATA_OFFSET: u64 = 96 * 1024;
/// Offset in it of the program that enters the sandbox.
const ENTER_PROGRAM_OFFSET: u64 = 8 * 1024;

/// The saved registers of a process that is entering the `clone` of a fork. A copy can continue
/// from there.
#[derive(Clone)]
pub(crate) struct SavedRegisters {
    general: Registers,
    extended: Vec<u8>,
    signal_mask: u64,
    rseq: RseqConfiguration,
    /// The address at which the C library keeps the thread id.
    child_tid_address: Option<u64>,
}

/// A stopped process.
pub(crate) struct Twin {
    pub(crate) pid: Pid,
    saved: SavedRegisters,
    /// An existing mapping for programs.
    scratch: Option<u64>,
}

/// A range of a process's memory.
pub(crate) struct MemoryRange {
    pub(crate) range: Range<u64>,
    pub(crate) writable: bool,
}

/// How an interpreter enters a sandbox; the same for all sandboxes of a jail.
pub(crate) struct LockDownSettings {
    pub(crate) rlimits: Vec<ResourceLimit>,
    pub(crate) id: u32,
    /// In the kernel's format; empty in a test that leaves them out.
    pub(crate) closing_filter: Vec<u8>,
    pub(crate) no_exec_filter: Vec<u8>,
    pub(crate) last_capability: u64,
    pub(crate) test_switches: TestSwitches,
}

/// Launch arguments of one interpreter.
pub(crate) struct LaunchArguments<'a> {
    pub(crate) channel: &'a OwnedFd,
    /// The `cgroup.procs` or `tasks` descriptors of its control group.
    pub(crate) cgroup_procs: &'a [OwnedFd],
    /// The user namespace of the family, for a twin that is not in it yet.
    pub(crate) family: Option<&'a OwnedFd>,
    /// The pid namespace of the family and of all its twins.
    pub(crate) own_pid_namespace: &'a OwnedFd,
    /// The namespaces of the sandbox, in the order of `init::JOINED_NAMESPACES`.
    pub(crate) namespaces: &'a [OwnedFd],
    /// The root of the sandbox, in a mount namespace that contains no process (`init::Mounts`).
    pub(crate) root: &'a OwnedFd,
    pub(crate) rules: Option<&'a OwnedFd>,
    pub(crate) programs: Programs,
}

impl LaunchArguments<'_> {
    /// Returns the descriptors to pass on, in the order that `leave_program` expects.
    fn descriptors(&self) -> Vec<&OwnedFd> {
        let mut all = vec![self.channel, self.own_pid_namespace];
        all.extend(self.namespaces);
        all.push(self.root);
        all.extend(self.rules);
        all.extend(self.family);
        all.extend(self.cgroup_procs);
        all
    }
}

/// Waits for traced processes to stop, with a timeout.
pub(crate) struct StopWaiter<'a> {
    /// Becomes readable when any child or traced process changes state.
    pub(crate) sigchld: &'a OwnedFd,
}

/// Why a traced process stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// At the entry or exit of a system call.
    SystemCall,
    /// It created a process.
    Forked,
    /// It has just been created, or was interrupted.
    EventStop,
    /// A signal is about to be delivered to it.
    Signal(i32),
    Exited,
}

impl StopReason {
    pub(crate) fn from_status(status: i32) -> StopReason {
        if !libc::WIFSTOPPED(status) {
            return StopReason::Exited;
        }
        match (status >> 16, libc::WSTOPSIG(status)) {
            (libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK | libc::PTRACE_EVENT_CLONE, _) => {
                StopReason::Forked
            }
            (libc::PTRACE_EVENT_STOP, _) => StopReason::EventStop,
            // PTRACE_O_TRACESYSGOOD sets this bit.
            (_, signal) if signal == libc::SIGTRAP | 0x80 => StopReason::SystemCall,
            (_, signal) => StopReason::Signal(signal),
        }
    }
}

impl StopWaiter<'_> {
    fn stop_of(&self, process: Pid, limit: Duration) -> io::Result<StopReason> {
        let begun = Instant::now();
        loop {
            match rustix::process::waitpid(Some(process), WaitOptions::NOHANG) {
                Ok(Some((_, status))) => return Ok(StopReason::from_status(status.as_raw())),
                Ok(None) => {}
                Err(error) => return Err(error.into()),
            }
            let spent = begun.elapsed();
            if spent < SPIN_TIMEOUT {
                std::hint::spin_loop();
                continue;
            }
            if spent >= limit {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let left = limit - spent;
            let pause = rustix::event::Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut events = [PollFd::new(self.sigchld, PollFlags::IN)];
            let _ = rustix::event::poll(&mut events, Some(&pause));
            // The caller always checks afterwards for other processes that changed state.
            let mut note = [0_u8; 128];
            while rustix::io::read(self.sigchld, &mut note).is_ok() {}
        }
    }

    /// Waits for a process that is about to enter the kernel but may compute for ever instead.
    fn expect_syscall_entry(&self, process: Pid) -> io::Result<()> {
        let (begun, before) = (Instant::now(), sys::cpu_time(process)?);
        loop {
            match self.expect(process, StopReason::SystemCall, 2 * SYSCALL_ENTRY_TIMEOUT) {
                Err(error)
                    if error.kind() == io::ErrorKind::TimedOut
                        && begun.elapsed() < STEP_TIMEOUT =>
                {
                    if sys::cpu_time(process)?.saturating_sub(before) >= SYSCALL_ENTRY_TIMEOUT {
                        return Err(error);
                    }
                }
                ended => return ended,
            }
        }
    }

    fn expect(&self, process: Pid, wanted: StopReason, limit: Duration) -> io::Result<()> {
        let stopped = self.stop_of(process, limit)?;
        if stopped == wanted {
            Ok(())
        } else {
            Err(io::Error::other(format!(
                "a stopped process did something else: {stopped:?} instead of {wanted:?}"
            )))
        }
    }
}

/// Trace options of twins: they are killed with the warden, and processes that they create are
/// traced as well.
pub(crate) const TRACE_OPTIONS: i32 = libc::PTRACE_O_TRACESYSGOOD
    | libc::PTRACE_O_EXITKILL
    | libc::PTRACE_O_TRACEFORK
    | libc::PTRACE_O_TRACEVFORK
    | libc::PTRACE_O_TRACECLONE;

/// Traces a process to its fork point: it sends a signal (SIGCONT, which has no other effect), and
/// enters the `clone` of a fork soon afterwards.
pub(crate) struct ForkPointTracer {
    process: Pid,
    signaled: bool,
    steps: u32,
    cancelled: bool,
}

/// Limit of stops between the signal and the `clone`, two for each system call. Fork handlers make
/// some.
const MAX_STEPS: u32 = 400;

impl ForkPointTracer {
    /// Starts tracing a process, without disturbing it.
    pub(crate) fn begin(process: Pid, options: i32) -> io::Result<ForkPointTracer> {
        sys::seize(process, options)?;
        Ok(ForkPointTracer {
            process,
            signaled: false,
            steps: 0,
            cancelled: false,
        })
    }

    /// Handles one stop of the process and resumes it, unless it is at its fork point. An error
    /// means that it will not get there.
    pub(crate) fn step(&mut self, stopped: StopReason) -> io::Result<Option<SavedRegisters>> {
        self.steps += 1;
        if self.steps > MAX_STEPS || self.cancelled {
            return Err(io::Error::other("it did not come to its branch point"));
        }
        let mut signal = 0;
        match stopped {
            StopReason::Exited => return Err(io::Error::other("it ended")),
            StopReason::SystemCall => {
                if let Some(saved) = SavedRegisters::of(self.process)? {
                    return Ok(Some(saved));
                }
            }
            StopReason::Signal(libc::SIGCONT) => self.signaled = true,
            // A process that really stops could not be resumed.
            StopReason::Signal(libc::SIGSTOP) => {}
            StopReason::Signal(other) => signal = other,
            StopReason::EventStop | StopReason::Forked => {}
        }
        sys::resume(
            self.process,
            if self.signaled {
                Resume::ToSyscall
            } else {
                Resume::Continue
            },
            signal,
        )?;
        Ok(None)
    }

    /// Cancels the copy: the next stop of the process, which comes soon, is the last.
    pub(crate) fn cancel(&mut self) -> io::Result<()> {
        self.cancelled = true;
        sys::interrupt(self.process)
    }

    /// Waits until a trusted process is at its fork point.
    pub(crate) fn finish(mut self, waiter: &StopWaiter<'_>) -> io::Result<SavedRegisters> {
        loop {
            let stopped = waiter.stop_of(self.process, STEP_TIMEOUT)?;
            if let Some(saved) = self.step(stopped)? {
                return Ok(saved);
            }
        }
    }
}

impl SavedRegisters {
    /// Reads the state of a process that is entering a system call, if it is the call of a fork.
    pub(crate) fn of(process: Pid) -> io::Result<Option<SavedRegisters>> {
        let Some(call) = sys::syscall_entry(process)? else {
            return Ok(None);
        };
        if call.number.cast_signed() != libc::SYS_clone {
            return Ok(None);
        }
        let mut extended = vec![0; 16 * 1024];
        let length = sys::read_registers(process, registers::EXTENDED_SET, &mut extended)?;
        extended.truncate(length);
        let sets_child_tid = call.arguments[0] & libc::CLONE_CHILD_SETTID as u64 != 0;
        Ok(Some(SavedRegisters {
            general: read_general(process)?,
            extended,
            signal_mask: sys::signal_mask(process)?,
            // A kernel that cannot report them has none: parking the zygote verified that.
            rseq: sys::rseq_configuration(process).unwrap_or_default(),
            child_tid_address: sets_child_tid.then_some(call.arguments[registers::CLONE_CHILD_TID]),
        }))
    }

    /// The address of an instruction that enters the kernel, unless it was overwritten.
    fn enter(&self) -> u64 {
        self.general.instruction() - registers::SYSCALL_LENGTH
    }

    /// Resumes the process with this state as the parent of a fork, and stops tracing it.
    pub(crate) fn resume_parent(&self, process: Pid) -> io::Result<()> {
        // The parent's `fork` returns a positive number: its own pid.
        registers::replace_syscall(process, self.general, libc::SYS_getpid as u64)?;
        sys::detach(process)
    }
}

fn read_general(process: Pid) -> io::Result<Registers> {
    let mut bytes = [0; registers::SIZE];
    sys::read_registers(process, libc::NT_PRSTATUS, &mut bytes)?;
    Ok(Registers::from_bytes(&bytes))
}

fn write_general(process: Pid, registers: Registers) -> io::Result<()> {
    sys::write_registers(process, libc::NT_PRSTATUS, &registers.to_bytes())
}

impl Twin {
    /// Parks the zygote, which is entering the `clone` of a fork: from now on it is a twin.
    pub(crate) fn park(
        waiter: &StopWaiter<'_>,
        process: Pid,
        saved: SavedRegisters,
    ) -> io::Result<Twin> {
        registers::replace_syscall(process, saved.general, libc::SYS_getpid as u64)?;
        sys::resume(process, Resume::ToSyscall, 0)?;
        waiter.expect(process, StopReason::SystemCall, STEP_TIMEOUT)?;
        let twin = Twin {
            pid: process,
            saved,
            scratch: None,
        };
        twin.unregister_rseq(waiter)?;
        Ok(twin)
    }

    /// Unregisters the restartable sequences of the zygote while its memory is still trusted.
    /// Copies inherit that.
    ///
    /// When a registered process returns to user mode after a context switch, the kernel reads from
    /// its memory where to continue. User code controls the memory of a twin, so a registered twin
    /// would execute whatever that code chose.
    fn unregister_rseq(&self, waiter: &StopWaiter<'_>) -> io::Result<()> {
        let area = match sys::rseq_configuration(self.pid) {
            Ok(area) => area,
            // There is nothing to unregister if the kernel has no restartable sequences at all.
            Err(error) => match self.call(waiter, libc::SYS_rseq, [0; 6]) {
                Err(absent) if absent.raw_os_error() == Some(libc::ENOSYS) => return Ok(()),
                _ => return Err(unverified_rseq(error)),
            },
        };
        if area.address != 0 {
            let (size, signature) = (u64::from(area.size), u64::from(area.signature));
            self.call(
                waiter,
                libc::SYS_rseq,
                [area.address, size, RSEQ_FLAG_UNREGISTER, signature, 0, 0],
            )?;
        }
        require_no_rseq(self.pid)
    }

    /// Moves large parts of the twin's own memory into a memory file, mapped privately at the same
    /// addresses.
    ///
    /// For anonymous memory the kernel copies one page table entry per page whenever a process is
    /// copied. For a private file mapping it copies only the entries of pages that this process has
    /// touched; the others are found in the file. The zygote's copies touch little of its memory.
    /// Each part must be private and readable, and must not be resized later.
    pub(crate) fn move_to_memfd(
        &self,
        waiter: &StopWaiter<'_>,
        parts: &[MemoryRange],
    ) -> io::Result<()> {
        let name = c"cellblock-zygote";
        let file = File::from(rustix::fs::memfd_create(
            name,
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?);
        let memory = File::open(format!("/proc/{}/mem", self.pid.as_raw_pid()))?;
        let mut length = 0;
        let mut places = Vec::new();
        for part in parts {
            copy_pages(&memory, &part.range, &file, length)?;
            places.push((part, length));
            length += part.range.end - part.range.start;
        }
        file.set_len(length)?;
        // From now on the file is identical for every process that maps it.
        seal(&file)?;

        let file = OwnedFd::from(file);
        let mut program = SyscallProgram::default();
        let own = Argument::Value(std::process::id().into());
        let warden = program.call("pidfd_open", libc::SYS_pidfd_open, &[own]);
        let number = Argument::Value(file.as_raw_fd() as u64);
        let taken = program.call(
            "pidfd_getfd",
            libc::SYS_pidfd_getfd,
            &[warden.into(), number],
        );
        let flags = Argument::Value((libc::MAP_PRIVATE | libc::MAP_FIXED) as u64);
        for (MemoryRange { range, writable }, offset) in places {
            let size = range.end - range.start;
            let protection =
                (libc::PROT_READ | if *writable { libc::PROT_WRITE } else { 0 }) as u64;
            let arguments = [
                range.start.into(),
                size.into(),
                protection.into(),
                flags,
                taken.into(),
                offset.into(),
            ];
            program.call("mmap", libc::SYS_mmap, &arguments);
        }
        program.call("close", libc::SYS_close, &[taken.into()]);
        program.call("close", libc::SYS_close, &[warden.into()]);
        let scratch = self.map_scratch(waiter)?;
        let program = program.assemble(scratch + DATA_OFFSET);
        self.memory()?.write_all_at(&program.code, scratch)?;
        write_general(self.pid, self.saved.general.at(scratch))?;
        run_to_end(waiter, self.pid, scratch, &program)?;
        self.call(
            waiter,
            libc::SYS_munmap,
            [scratch, SCRATCH_SIZE, 0, 0, 0, 0],
        )
        .map(drop)
    }

    /// Maps memory for programs that stays mapped in this process and in all its copies.
    pub(crate) fn keep_scratch(&mut self, waiter: &StopWaiter<'_>) -> io::Result<()> {
        self.scratch = Some(self.map_scratch(waiter)?);
        Ok(())
    }

    fn memory(&self) -> io::Result<File> {
        File::options()
            .write(true)
            .open(format!("/proc/{}/mem", self.pid.as_raw_pid()))
    }

    /// Maps memory for a program and its data.
    fn map_scratch(&self, waiter: &StopWaiter<'_>) -> io::Result<u64> {
        let protection = (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC) as u64;
        let mapping = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
        let place = self.call(
            waiter,
            libc::SYS_mmap,
            [0, SCRATCH_SIZE, protection, mapping, u64::MAX, 0],
        )?;
        Ok(place.cast_unsigned())
    }

    /// Makes a copy that continues from `saved`, or from where this twin would continue. With
    /// `shared` the copy uses the same descriptor table as long as it is only kept.
    ///
    /// After a failure the twin may be executing code from its memory, and must be killed.
    pub(crate) fn copy(
        &self,
        waiter: &StopWaiter<'_>,
        saved: Option<SavedRegisters>,
        shared: bool,
    ) -> io::Result<Twin> {
        let flags = libc::SIGCHLD | if shared { libc::CLONE_FILES } else { 0 };
        let copied = self.call(waiter, libc::SYS_clone, [flags as u64, 0, 0, 0, 0, 0])?;
        let pid =
            Pid::from_raw(i32::try_from(copied).unwrap_or(0)).ok_or(io::ErrorKind::NotFound)?;
        waiter.expect(pid, StopReason::EventStop, STEP_TIMEOUT)?;
        Ok(Twin {
            pid,
            saved: saved.unwrap_or_else(|| self.saved.clone()),
            scratch: self.scratch,
        })
    }

    /// Makes a copy of the zygote in the pid namespace of a family.
    ///
    /// After a failure the zygote must be killed.
    pub(crate) fn copy_into_family(
        &self,
        waiter: &StopWaiter<'_>,
        pid_namespace: &OwnedFd,
    ) -> io::Result<Twin> {
        let scratch = self.scratch.ok_or(io::ErrorKind::InvalidInput)?;
        let mut program = SyscallProgram::default();
        let warden = program.call(
            "pidfd_open",
            libc::SYS_pidfd_open,
            &[Argument::Value(std::process::id().into())],
        );
        let number = Argument::Value(pid_namespace.as_raw_fd() as u64);
        let taken = program.call(
            "pidfd_getfd",
            libc::SYS_pidfd_getfd,
            &[warden.into(), number],
        );
        program.call(
            "setns pid",
            libc::SYS_setns,
            &[taken.into(), (libc::CLONE_NEWPID as u64).into()],
        );
        program.call("close", libc::SYS_close, &[taken.into()]);
        program.call("close", libc::SYS_close, &[warden.into()]);
        program.call("clone", libc::SYS_clone, &[(libc::SIGCHLD as u64).into()]);
        let program = program.assemble(scratch + DATA_OFFSET);
        self.memory()?.write_all_at(&program.code, scratch)?;
        write_general(self.pid, self.saved.general.at(scratch))?;
        let pid = run_to_process(waiter, self.pid, scratch, &program)?;
        let finished = run_to_end(waiter, self.pid, scratch, &program);
        let finished =
            finished.and_then(|()| waiter.expect(pid, StopReason::EventStop, STEP_TIMEOUT));
        if finished.is_err() {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        finished.map(|()| Twin {
            pid,
            saved: self.saved.clone(),
            scratch: Some(scratch),
        })
    }

    /// Makes the twin execute one system call. If the call creates a process, the result is its
    /// pid.
    fn call(&self, waiter: &StopWaiter<'_>, number: i64, arguments: [u64; 6]) -> io::Result<i64> {
        call(waiter, self.pid, &self.saved, number, arguments)
    }

    /// Creates an interpreter from this twin, which becomes the interpreter's twin. The interpreter
    /// is complete, locked down, and stopped until it is released.
    ///
    /// After a failure the twin is in an unknown state and must be killed.
    pub(crate) fn spawn(
        &mut self,
        waiter: &StopWaiter<'_>,
        settings: &LockDownSettings,
        launch: &LaunchArguments<'_>,
    ) -> io::Result<Pid> {
        let scratch = match self.scratch.take() {
            Some(scratch) => scratch,
            None => self.map_scratch(waiter)?,
        };
        self.queue_descriptors(waiter, scratch, launch)?;

        let memory = self.memory()?;
        let mut data = Data {
            base: scratch + DATA_OFFSET,
            bytes: Vec::new(),
        };
        let first = self.leave_program(&mut data, settings, launch);
        let first_results = data.reserve(first.results());
        let first = first.assemble(first_results);
        memory.write_all_at(&first.code, scratch)?;
        let second = self.enter_program(&mut data, settings, launch);
        let second_results = data.reserve(second.results());
        let second = second.assemble(second_results);
        memory.write_all_at(&second.code, scratch + ENTER_PROGRAM_OFFSET)?;
        memory.write_all_at(&data.bytes, scratch + DATA_OFFSET)?;
        debug_assert!(
            first.code.len() as u64 <= ENTER_PROGRAM_OFFSET
                && ENTER_PROGRAM_OFFSET + second.code.len() as u64 <= DATA_OFFSET
        );

        write_general(self.pid, self.saved.general.at(scratch))?;
        let child = run_to_process(waiter, self.pid, scratch, &first)?;
        let entered = run_to_end(waiter, self.pid, scratch, &first);
        let entered = entered.and_then(|()| self.enter(waiter, child, scratch, &second));
        if entered.is_err() {
            let _ = rustix::process::kill_process(child, Signal::KILL);
        }
        entered.map(|()| child)
    }

    /// Gives the twin its own descriptor table, which contains only the two ends of a socket. The
    /// descriptors of its new interpreter are queued in that socket. The twin cannot take them from
    /// the warden, and must not be able to.
    fn queue_descriptors(
        &self,
        waiter: &StopWaiter<'_>,
        scratch: u64,
        launch: &LaunchArguments<'_>,
    ) -> io::Result<()> {
        let mut data = Data {
            base: scratch + DATA_OFFSET,
            bytes: Vec::new(),
        };
        let mut program = SyscallProgram::default();
        // No descriptor of the session may be inherited or occupy a number. The table of a
        // checkpoint is still that of its session.
        let unshare = Argument::Value(libc::CLOSE_RANGE_UNSHARE.into());
        program.call(
            "close_range",
            libc::SYS_close_range,
            &[0.into(), u64::from(u32::MAX).into(), unshare],
        );
        let name = data.put(b"cb-twin\0");
        program.call(
            "name",
            libc::SYS_prctl,
            &[(libc::PR_SET_NAME as u64).into(), name.into()],
        );
        let pair = data.reserve(8);
        let (domain, kind) = (
            Argument::Value(libc::AF_UNIX as u64),
            Argument::Value(libc::SOCK_SEQPACKET as u64),
        );
        program.call(
            "socketpair",
            libc::SYS_socketpair,
            &[domain, kind, 0.into(), pair.into()],
        );
        let results = data.reserve(program.results());
        let program = program.assemble(results);
        let memory = self.memory()?;
        memory.write_all_at(&program.code, scratch)?;
        memory.write_all_at(&data.bytes, scratch + DATA_OFFSET)?;
        write_general(self.pid, self.saved.general.at(scratch))?;
        run_to_end(waiter, self.pid, scratch, &program)?;
        // The table was empty, so the two ends are 0 and 1.
        let handle = rustix::process::pidfd_open(self.pid, PidfdFlags::empty())?;
        let far_end = rustix::process::pidfd_getfd(&handle, 1, PidfdGetfdFlags::empty())?;
        let passed: Vec<_> = launch
            .descriptors()
            .into_iter()
            .map(|descriptor| descriptor.as_fd())
            .collect();
        wire::send(&far_end, &(), &passed)
    }

    /// Makes a new process run the program that locks it down, and sets its registers to continue
    /// from the saved state.
    fn enter(
        &self,
        waiter: &StopWaiter<'_>,
        child: Pid,
        scratch: u64,
        program: &AssembledProgram,
    ) -> io::Result<()> {
        waiter.expect(child, StopReason::EventStop, STEP_TIMEOUT)?;
        write_general(child, self.saved.general.at(scratch + ENTER_PROGRAM_OFFSET))?;
        run_to_end(waiter, child, scratch + ENTER_PROGRAM_OFFSET, program)?;
        call(
            waiter,
            child,
            &self.saved,
            libc::SYS_munmap,
            [scratch, SCRATCH_SIZE, 0, 0, 0, 0],
        )?;
        // Last, after the filters: from here on the memory decides where this process continues.
        let area = &self.saved.rseq;
        if area.address != 0 {
            let (size, signature) = (u64::from(area.size), u64::from(area.signature));
            // A refusal affects only the session: its C library works without.
            let _ = call(
                waiter,
                child,
                &self.saved,
                libc::SYS_rseq,
                [area.address, size, 0, signature, 0, 0],
            );
        }
        write_general(child, self.saved.general.returning(0))?;
        sys::write_registers(child, registers::EXTENDED_SET, &self.saved.extended)?;
        sys::set_signal_mask(child, self.saved.signal_mask)
    }

    /// Returns the program of the twin itself: it receives the descriptors of the new interpreter,
    /// enters its family, the control group and the namespaces of the sandbox, closes all other
    /// descriptors, and creates the process, which shares its memory.
    fn leave_program(
        &self,
        data: &mut Data,
        settings: &LockDownSettings,
        launch: &LaunchArguments<'_>,
    ) -> SyscallProgram {
        let mut program = SyscallProgram::new(&settings.test_switches);
        let descriptors = launch.descriptors().len();
        // struct iovec, and a buffer for SCM_RIGHTS: a header of 16 bytes, then the numbers.
        let word = data.reserve(64);
        let vector = data.put(&[word.to_ne_bytes(), 64_u64.to_ne_bytes()].concat());
        let size = 16 + (4 * descriptors).next_multiple_of(8);
        let control = data.reserve(size);
        // struct msghdr: no name, one part of data, the buffer, no flags.
        let message = [0, 0, vector, 1, control, size as u64, 0].map(u64::to_ne_bytes);
        let message = data.put(message.as_flattened());
        program.call("recvmsg", libc::SYS_recvmsg, &[0.into(), message.into()]);
        // The kernel allocates the lowest free numbers, in order.
        let mut numbers = (2_u64..).map(Argument::Value);
        let mut next = || {
            numbers
                .next()
                .expect("there are more numbers than descriptors")
        };
        let (channel, own_pid_namespace) = (next(), next());
        let [pid, mnt, net, ipc, uts, user] = std::array::from_fn(|_| next());
        let root = next();
        let rules = launch.rules.map(|_| next());
        if launch.family.is_some() {
            program.call(
                "setns family",
                libc::SYS_setns,
                &[next(), (libc::CLONE_NEWUSER as u64).into()],
            );
            let id = Argument::Value(settings.id.into());
            program.call("setresgid", libc::SYS_setresgid, &[id, id, id]);
            program.call("setresuid", libc::SYS_setresuid, &[id, id, id]);
        }
        let zero = data.put(b"0");
        for _ in launch.cgroup_procs {
            // A zero means the writing process.
            program.call(
                "enter the control group",
                libc::SYS_write,
                &[next(), zero.into(), 1.into()],
            );
        }
        program.call("setns pid", libc::SYS_setns, &[pid]);
        for (name, namespace) in ["setns mnt", "setns net", "setns ipc", "setns uts"]
            .into_iter()
            .zip([mnt, net, ipc, uts])
        {
            program.call(name, libc::SYS_setns, &[namespace]);
        }
        let here = data.put(b".\0");
        program.call("fchdir", libc::SYS_fchdir, &[root]);
        program.call("chroot", libc::SYS_chroot, &[here.into()]);
        let mut place = |taken: Argument, place: u64| {
            let flags = Argument::Value(libc::O_CLOEXEC as u64);
            program.call("dup3", libc::SYS_dup3, &[taken, place.into(), flags]);
        };
        place(channel, CHANNEL_FD);
        if let Some(rules) = rules {
            place(rules, RULESET_FD);
        }
        place(user, USER_NAMESPACE_FD);
        place(own_pid_namespace, OWN_PID_NAMESPACE_FD);
        program.call(
            "close_range",
            libc::SYS_close_range,
            &[0.into(), (CHANNEL_FD - 1).into()],
        );
        let shared = (libc::CLONE_VM | libc::CLONE_FILES) as u64;
        match self.saved.child_tid_address {
            Some(place) => {
                let flags = shared | (libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID) as u64;
                // The order of the last two arguments differs between architectures; the other one
                // is not used.
                let arguments = [flags.into(), 0.into(), 0.into(), place.into(), place.into()];
                program.call("clone", libc::SYS_clone, &arguments)
            }
            None => program.call("clone", libc::SYS_clone, &[shared.into()]),
        };
        // Later copies of this twin must not be in the sandbox's pid namespace.
        program.call(
            "setns back",
            libc::SYS_setns,
            &[OWN_PID_NAMESPACE_FD.into()],
        );
        program.call("close", libc::SYS_close, &[OWN_PID_NAMESPACE_FD.into()]);
        program
    }

    /// Returns the program of the new process: it enters the user namespace of the session and
    /// drops every right.
    fn enter_program(
        &self,
        data: &mut Data,
        settings: &LockDownSettings,
        launch: &LaunchArguments<'_>,
    ) -> SyscallProgram {
        let mut program = SyscallProgram::new(&settings.test_switches);
        let name = data.put(b"python\0");
        program.call(
            "name",
            libc::SYS_prctl,
            &[(libc::PR_SET_NAME as u64).into(), name.into()],
        );
        // Leaves the process group of the jail: signals to a group cross namespaces.
        program.call("setsid", libc::SYS_setsid, &[]);
        let cgroup = Argument::Value(libc::CLONE_NEWCGROUP as u64);
        program.call("unshare cgroup", libc::SYS_unshare, &[cgroup]);
        program.call("setns user", libc::SYS_setns, &[USER_NAMESPACE_FD.into()]);
        program.call("close", libc::SYS_close, &[USER_NAMESPACE_FD.into()]);
        for limit in &settings.rlimits {
            let both = data.put(&[limit.value.to_ne_bytes(), limit.value.to_ne_bytes()].concat());
            let resource = u64::from(limit.resource);
            program.call(
                "prlimit64",
                libc::SYS_prlimit64,
                &[0.into(), resource.into(), both.into()],
            );
        }
        // Emptying the bounding set needs a capability, so it comes before the capabilities are
        // dropped.
        for capability in 0..=settings.last_capability {
            let drop = Argument::Value(libc::PR_CAPBSET_DROP as u64);
            program.call("bounding set", libc::SYS_prctl, &[drop, capability.into()]);
        }
        let header = data.put(&[LINUX_CAPABILITY_VERSION_3.to_ne_bytes(), [0; 4]].concat());
        let nothing = data.put(&[0; 24]);
        program.call("capset", libc::SYS_capset, &[header.into(), nothing.into()]);
        // The change of user made the host's root the owner of /proc/self; restore it.
        program.call(
            "prctl",
            libc::SYS_prctl,
            &[(libc::PR_SET_DUMPABLE as u64).into(), 1.into()],
        );
        program.call(
            "prctl",
            libc::SYS_prctl,
            &[(libc::PR_SET_NO_NEW_PRIVS as u64).into(), 1.into()],
        );
        if launch.rules.is_some() {
            program.call(
                "landlock_restrict_self",
                libc::SYS_landlock_restrict_self,
                &[RULESET_FD.into()],
            );
            program.call("close", libc::SYS_close, &[RULESET_FD.into()]);
        }
        let path = data.put(b"/dev/null\0");
        let flags = Argument::Value(libc::O_RDWR as u64);
        // The lowest number is free, so this is 0.
        let null = program.call(
            "open",
            libc::SYS_openat,
            &[(libc::AT_FDCWD as u64).into(), path.into(), flags],
        );
        program.call("dup", libc::SYS_dup, &[null.into()]);
        program.call("dup", libc::SYS_dup, &[null.into()]);
        let mut load = |name, steps: &[u8]| {
            let count = (steps.len() / 8) as u64;
            let steps = data.put(steps);
            // struct sock_fprog: the number of instructions, padding, their address.
            let filter = data.put(&[count.to_ne_bytes(), steps.to_ne_bytes()].concat());
            let mode = Argument::Value(libc::SECCOMP_SET_MODE_FILTER.into());
            program.call(name, libc::SYS_seccomp, &[mode, 0.into(), filter.into()]);
        };
        if launch.programs == Programs::Refused && !settings.no_exec_filter.is_empty() {
            load("refuse programs", &settings.no_exec_filter);
        }
        // Last: the filter forbids the very calls used above.
        if !settings.closing_filter.is_empty() {
            load("seccomp", &settings.closing_filter);
        }
        program
    }

    /// Lets the twin execute its memory, if that memory requests it with this value at this
    /// address. Returns whether it was released.
    #[cfg(all(feature = "test-support", debug_assertions))]
    pub(crate) fn hand_over(&self) -> bool {
        const PLACE: u64 = 0x7e00_0000_0000;
        const CODE: u64 = PLACE + 128;
        let mut word = [0; 8];
        let memory = File::open(format!("/proc/{}/mem", self.pid.as_raw_pid()));
        let asked = memory.and_then(|memory| memory.read_exact_at(&mut word, PLACE));
        asked.is_ok()
            && &word == b"HANDOVER"
            && write_general(self.pid, self.saved.general.at(CODE)).is_ok()
            && sys::resume(self.pid, Resume::Continue, 0).is_ok()
    }

    /// Kills the twin. Its exit is reported like that of any traced process.
    pub(crate) fn end(&self) {
        let _ = rustix::process::kill_process(self.pid, Signal::KILL);
    }
}

/// `_LINUX_CAPABILITY_VERSION_3` of `linux/capability.h`.
const LINUX_CAPABILITY_VERSION_3: u32 = 0x2008_0522;

/// Lets a process run its program, which starts at this address, until it has created another
/// process. Returns that process.
fn run_to_process(
    waiter: &StopWaiter<'_>,
    process: Pid,
    begin: u64,
    program: &AssembledProgram,
) -> io::Result<Pid> {
    require_no_rseq(process)?;
    sys::resume(process, Resume::Continue, 0)?;
    match waiter.stop_of(process, STEP_TIMEOUT)? {
        StopReason::Forked => {}
        StopReason::Signal(libc::SIGTRAP) => {
            let ended = read_general(process)?;
            program.check_trap(ended.instruction().wrapping_sub(begin), ended.result())?;
            return Err(io::Error::other("a twin created no process"));
        }
        other => {
            return Err(io::Error::other(format!(
                "a twin stopped for another reason: {other:?}"
            )));
        }
    }
    let number = i32::try_from(sys::event_message(process)?).unwrap_or(0);
    Pid::from_raw(number).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Lets a process run its program, which starts at this address, to the end.
fn run_to_end(
    waiter: &StopWaiter<'_>,
    process: Pid,
    begin: u64,
    program: &AssembledProgram,
) -> io::Result<()> {
    require_no_rseq(process)?;
    sys::resume(process, Resume::Continue, 0)?;
    waiter.expect(process, StopReason::Signal(libc::SIGTRAP), STEP_TIMEOUT)?;
    let ended = read_general(process)?;
    program.check_trap(ended.instruction().wrapping_sub(begin), ended.result())
}

/// Number of attempts to seal a file: three seconds in total.
const SEAL_ATTEMPTS: usize = 20;

/// The flag of `rseq` that ends a registration.
const RSEQ_FLAG_UNREGISTER: u64 = 1;

/// Refuses a process that has restartable sequences registered: its memory could decide where it
/// continues.
fn require_no_rseq(process: Pid) -> io::Result<()> {
    match sys::rseq_configuration(process) {
        Ok(area) if area.address == 0 => Ok(()),
        Ok(_) => Err(io::Error::other(
            "a stopped process has restartable sequences registered",
        )),
        // Unknown request: parking has shown that this kernel has no restartable sequences.
        Err(error) if error.raw_os_error() == Some(libc::EIO) => Ok(()),
        Err(error) => Err(unverified_rseq(error)),
    }
}

fn unverified_rseq(cause: io::Error) -> io::Error {
    let text = "the kernel does not report restartable sequences (it must be 5.13 or newer)";
    io::Error::new(cause.kind(), format!("{text}: {cause}"))
}

/// Makes a stopped process execute one system call at the instruction of its saved state, and
/// verifies that it is that call.
fn call(
    waiter: &StopWaiter<'_>,
    process: Pid,
    saved: &SavedRegisters,
    number: i64,
    arguments: [u64; 6],
) -> io::Result<i64> {
    write_general(
        process,
        saved
            .general
            .calling(saved.enter(), number.cast_unsigned(), arguments),
    )?;
    sys::resume(process, Resume::ToSyscall, 0)?;
    waiter.expect_syscall_entry(process)?;
    let wanted = sys::SyscallEntry {
        number: number.cast_unsigned(),
        arguments,
        returns_to: saved.general.instruction(),
    };
    if sys::syscall_entry(process)? != Some(wanted) {
        return Err(io::Error::other(
            "the memory of the session is not what it was: it entered the kernel elsewhere",
        ));
    }
    sys::resume(process, Resume::ToSyscall, 0)?;
    let mut made = None;
    match waiter.stop_of(process, STEP_TIMEOUT)? {
        StopReason::SystemCall => {}
        StopReason::Forked => {
            made = Some(sys::event_message(process)?.cast_signed());
            sys::resume(process, Resume::ToSyscall, 0)?;
            waiter.expect(process, StopReason::SystemCall, STEP_TIMEOUT)?;
        }
        other => {
            return Err(io::Error::other(format!(
                "a stopped process did something else: {other:?}"
            )));
        }
    }
    let result = read_general(process)?.result();
    if result < 0 && result > -4096 {
        return Err(io::Error::from_raw_os_error(-(result as i32)));
    }
    // The process itself sees a different pid if its pid namespace differs.
    Ok(made.unwrap_or(result))
}

/// Makes a memory file immutable.
///
/// The kernel refuses with EBUSY while there is any other reference to a page of the file. Our code
/// holds none, but the kernel's own lists and migration do for short times, and on a busy machine
/// for longer than the 0.15 s that each attempt waits.
fn seal(file: &File) -> io::Result<()> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
    let mut attempts = 1..SEAL_ATTEMPTS;
    loop {
        match rustix::fs::fcntl_add_seals(file, seals) {
            Err(rustix::io::Errno::BUSY) if attempts.next().is_some() => {}
            done => return Ok(done?),
        }
    }
}

/// Copies the non-empty pages of a range to a file.
fn copy_pages(memory: &File, range: &Range<u64>, file: &File, at: u64) -> io::Result<()> {
    const PAGE: usize = 4096;
    let mut buffer = vec![0; 256 * PAGE];
    let mut done = 0;
    while range.start + done < range.end {
        let size = buffer.len().min((range.end - range.start - done) as usize);
        memory.read_exact_at(&mut buffer[..size], range.start + done)?;
        for (index, page) in buffer[..size].chunks(PAGE).enumerate() {
            if page.iter().any(|byte| *byte != 0) {
                file.write_all_at(page, at + done + (index * PAGE) as u64)?;
            }
        }
        done += size as u64;
    }
    Ok(())
}

/// Data of a program, placed consecutively in the memory of the process.
struct Data {
    base: u64,
    bytes: Vec<u8>,
}

impl Data {
    fn reserve(&mut self, size: usize) -> u64 {
        let place = self.base + self.bytes.len() as u64;
        self.bytes
            .resize(self.bytes.len() + size.next_multiple_of(8), 0);
        place
    }

    fn put(&mut self, bytes: &[u8]) -> u64 {
        let place = self.reserve(bytes.len());
        let offset = (place - self.base) as usize;
        self.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::ForkSide;

    /// A twin of a process that only goes to its fork point. It is killed with the test's thread,
    /// which traces it.
    struct Parked {
        /// A folder: polling it always returns at once, and reading it fails. SIGCHLD may be
        /// delivered to another thread here.
        sigchld: OwnedFd,
        twin: Twin,
    }

    /// Creates a traced process that sends its signal and then runs `then`. Other threads of the
    /// tests may have held any lock when it was created, so it only makes system calls.
    fn traced_to_fork_point(then: fn() -> !) -> (Pid, ForkPointTracer) {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        match sys::clone_process(0).unwrap() {
            ForkSide::Parent(process) => {
                let tracer = ForkPointTracer::begin(process, TRACE_OPTIONS).unwrap();
                rustix::io::write(&writer, b"x").unwrap();
                (process, tracer)
            }
            ForkSide::Child => {
                let _ = rustix::io::read(&reader, &mut [0]);
                let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::CONT);
                then()
            }
        }
    }

    impl Parked {
        fn new() -> Parked {
            let sigchld = OwnedFd::from(File::open("/").unwrap());
            let (process, tracer) = traced_to_fork_point(|| {
                let _ = sys::clone_process(0);
                sys::exit_now(1)
            });
            let waiter = StopWaiter { sigchld: &sigchld };
            let saved = tracer.finish(&waiter).unwrap();
            let twin = Twin::park(&waiter, process, saved).unwrap();
            Parked { sigchld, twin }
        }

        fn waiter(&self) -> StopWaiter<'_> {
            StopWaiter {
                sigchld: &self.sigchld,
            }
        }

        fn memory(&self) -> File {
            let path = format!("/proc/{}/mem", self.twin.pid.as_raw_pid());
            File::options().read(true).write(true).open(path).unwrap()
        }

        /// Runs a program in the twin and returns the results of its steps.
        fn run(&self, program: &SyscallProgram) -> io::Result<Vec<i64>> {
            let scratch = self.twin.map_scratch(&self.waiter())?;
            let assembled = program.assemble(scratch + DATA_OFFSET);
            self.memory().write_all_at(&assembled.code, scratch)?;
            write_general(self.twin.pid, self.twin.saved.general.at(scratch))?;
            run_to_end(&self.waiter(), self.twin.pid, scratch, &assembled)?;
            let mut bytes = vec![0; program.results()];
            self.memory()
                .read_exact_at(&mut bytes, scratch + DATA_OFFSET)?;
            Ok(bytes
                .chunks_exact(8)
                .map(|eight| i64::from_ne_bytes(eight.try_into().unwrap()))
                .collect())
        }
    }

    impl Drop for Parked {
        fn drop(&mut self) {
            self.twin.end();
        }
    }

    fn state_of(process: Pid) -> char {
        let status =
            std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_pid())).unwrap();
        status.rsplit_once(") ").unwrap().1.chars().next().unwrap()
    }

    #[test]
    fn a_twin_makes_the_call_that_it_is_asked_for_and_stands_still_again() {
        let parked = Parked::new();
        let ask = |number, arguments| parked.twin.call(&parked.waiter(), number, arguments);
        let number = parked.twin.pid.as_raw_pid();
        assert_eq!(ask(libc::SYS_getpid, [0; 6]).unwrap(), i64::from(number));
        assert_eq!(
            ask(libc::SYS_getppid, [0; 6]).unwrap(),
            i64::from(std::process::id())
        );
        let refused = ask(libc::SYS_close, [99_999, 0, 0, 0, 0, 0]).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBADF));
        assert_eq!(
            ask(libc::SYS_getpid, [0; 6]).unwrap(),
            i64::from(number),
            "a call that failed is no harm"
        );
        assert_eq!(state_of(parked.twin.pid), 't');
    }

    #[test]
    fn a_copy_has_memory_of_its_own_and_can_be_copied() {
        let parked = Parked::new();
        let scratch = parked.twin.map_scratch(&parked.waiter()).unwrap();
        parked.memory().write_all_at(b"before", scratch).unwrap();
        let copy = parked.twin.copy(&parked.waiter(), None, false).unwrap();
        parked.memory().write_all_at(b"after!", scratch).unwrap();
        let again = copy.copy(&parked.waiter(), None, true).unwrap();
        for twin in [&copy, &again] {
            let mut held = [0; 6];
            File::open(format!("/proc/{}/mem", twin.pid.as_raw_pid()))
                .unwrap()
                .read_exact_at(&mut held, scratch)
                .unwrap();
            assert_eq!(&held, b"before");
            assert_eq!(state_of(twin.pid), 't');
            let number = twin
                .call(&parked.waiter(), libc::SYS_getpid, [0; 6])
                .unwrap();
            assert_eq!(number, i64::from(twin.pid.as_raw_pid()));
            twin.end();
        }
    }

    #[test]
    fn a_program_runs_in_order_with_earlier_results_as_arguments() {
        let parked = Parked::new();
        let mut program = SyscallProgram::default();
        let scratch = parked.twin.map_scratch(&parked.waiter()).unwrap();
        parked.memory().write_all_at(b"name\0", scratch).unwrap();
        let file = program.call("memfd_create", libc::SYS_memfd_create, &[scratch.into()]);
        let written = program.call(
            "write",
            libc::SYS_write,
            &[file.into(), scratch.into(), 4.into()],
        );
        let moved = program.call(
            "lseek",
            libc::SYS_lseek,
            &[file.into(), 0.into(), (libc::SEEK_CUR as u64).into()],
        );
        // Truncates the file to the number of bytes written.
        program.call(
            "ftruncate",
            libc::SYS_ftruncate,
            &[file.into(), written.into()],
        );
        program.call("close", libc::SYS_close, &[file.into()]);
        let results = parked.run(&program).unwrap();
        assert_eq!((results[1], results[2], results[4]), (4, 4, 0), "{moved:?}");
        assert_eq!(state_of(parked.twin.pid), 't');
    }

    #[test]
    fn a_program_stops_at_the_first_step_that_fails() {
        let parked = Parked::new();
        let mut program = SyscallProgram::default();
        program.call("umask", libc::SYS_umask, &[0o77.into()]);
        program.call("close nothing", libc::SYS_close, &[99_999.into()]);
        program.call("umask", libc::SYS_umask, &[0o22.into()]);
        let error = parked.run(&program).unwrap_err();
        assert!(error.to_string().starts_with("close nothing: "), "{error}");
        let mask = parked
            .twin
            .call(&parked.waiter(), libc::SYS_umask, [0; 6])
            .unwrap();
        assert_eq!(
            mask, 0o77,
            "the first step was made and the last one was not"
        );
    }

    #[test]
    fn a_twin_whose_instruction_was_written_over_makes_no_other_call() {
        if !cfg!(target_arch = "x86_64") {
            return;
        }
        // A loop, the gate of 32-bit calls, a breakpoint, an invalid instruction, two nops.
        for bytes in [
            [0xeb, 0xfe],
            [0xcd, 0x80],
            [0xcc, 0x90],
            [0x0f, 0x0b],
            [0x90, 0x90],
        ] {
            let parked = Parked::new();
            let number = i64::from(parked.twin.pid.as_raw_pid());
            // Control: the instruction is the one that is used.
            assert_eq!(
                parked
                    .twin
                    .call(&parked.waiter(), libc::SYS_getpid, [0; 6])
                    .unwrap(),
                number
            );
            parked
                .memory()
                .write_all_at(&bytes, parked.twin.saved.enter())
                .unwrap();
            let arguments = [
                0,
                4096,
                libc::PROT_READ as u64,
                (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64,
                u64::MAX,
                0,
            ];
            assert!(
                parked
                    .twin
                    .call(&parked.waiter(), libc::SYS_mmap, arguments)
                    .is_err(),
                "{bytes:?}"
            );
        }
    }

    /// Writes to the twin's memory so that the kernel makes it continue elsewhere when it is about
    /// to make a system call.
    fn arm_rseq(parked: &Parked) {
        let area = parked.twin.saved.rseq;
        assert!(
            area.address != 0,
            "the C library of the tests registers restartable sequences"
        );
        let scratch = parked.twin.map_scratch(&parked.waiter()).unwrap();
        let handler = scratch + 128;
        let section: Vec<u8> = [
            0,
            parked.twin.saved.enter(),
            registers::SYSCALL_LENGTH,
            handler + 4,
        ]
        .iter()
        .flat_map(|word: &u64| word.to_ne_bytes())
        .collect();
        parked.memory().write_all_at(&section, scratch).unwrap();
        // The signature that the kernel expects, then an instruction that only traps.
        let mut code = area.signature.to_ne_bytes().to_vec();
        registers::trap(&mut code);
        parked.memory().write_all_at(&code, handler).unwrap();
        // `rseq_cs` follows two CPU numbers.
        parked
            .memory()
            .write_all_at(&scratch.to_ne_bytes(), area.address + 8)
            .unwrap();
    }

    #[test]
    fn restartable_sequences_in_its_memory_do_not_steer_a_twin_or_its_copies() {
        let parked = Parked::new();
        arm_rseq(&parked);
        let number = i64::from(parked.twin.pid.as_raw_pid());
        assert_eq!(
            parked
                .twin
                .call(&parked.waiter(), libc::SYS_getpid, [0; 6])
                .unwrap(),
            number
        );
        let copy = parked.twin.copy(&parked.waiter(), None, true).unwrap();
        let number = i64::from(copy.pid.as_raw_pid());
        assert_eq!(
            copy.call(&parked.waiter(), libc::SYS_getpid, [0; 6])
                .unwrap(),
            number
        );
        copy.end();
    }

    #[test]
    fn a_registered_process_is_not_run() {
        let parked = Parked::new();
        let area = parked.twin.saved.rseq;
        require_no_rseq(parked.twin.pid).unwrap();
        let arguments = [
            area.address,
            area.size.into(),
            0,
            area.signature.into(),
            0,
            0,
        ];
        parked
            .twin
            .call(&parked.waiter(), libc::SYS_rseq, arguments)
            .unwrap();
        assert!(
            parked
                .run(&SyscallProgram::default())
                .unwrap_err()
                .to_string()
                .contains("restartable sequences")
        );
        // Control: while registered, its memory steers it, so that it does not make the requested
        // call.
        arm_rseq(&parked);
        assert!(
            parked
                .twin
                .call(&parked.waiter(), libc::SYS_getpid, [0; 6])
                .is_err()
        );
    }

    #[test]
    fn a_process_that_makes_too_many_calls_on_its_way_is_given_up() {
        let sigchld = OwnedFd::from(File::open("/").unwrap());
        let (process, tracer) = traced_to_fork_point(|| {
            loop {
                let _ = rustix::process::getppid();
            }
        });
        let ended = tracer.finish(&StopWaiter { sigchld: &sigchld });
        let _ = rustix::process::kill_process(process, Signal::KILL);
        assert!(ended.is_err_and(|error| error.to_string().contains("branch point")));
    }
}
