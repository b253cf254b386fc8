//! The warden: pid 1 of the jail's own namespaces, maker and keeper of sandboxes.
//!
//! It is one loop over three kinds of sockets: commands from the server, the zygote, and the inits of sandboxes. It decides nothing by itself;
//! it carries out commands and reports what happened. In its user namespace it is root, on the host it is nobody.
//!
//! A sandbox goes `Waiting → Building → Mapped → Ready`, and at any time to its end. What it sends to the server carries the slot, so that
//! the server can have several on the way.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{DumpableBehavior, Pid, PidfdFlags, Signal, WaitOptions};

use crate::guardian::{self, OpenMounts, OpenedMounts};
use crate::identity::INSIDE_ID;
use crate::init::{self, OperatorMounts, Order, Word as InitWord};
use crate::root::{self, RootError, Tree};
use crate::seccomp::{self, Filters};
use crate::sys::{self, Forked};
use crate::wire::{self, Command, Event, Generation, Setup, Slot};
use crate::zygote::{JOINED, Word as ZygoteWord, Zygote};

/// What the warden is started with.
pub(crate) struct Start {
    pub(crate) gate: OwnedFd,
    pub(crate) commands: OwnedFd,
    /// Where id-mapped mounts are asked for; only on a server that runs as root.
    pub(crate) mounts_from_guardian: Option<OwnedFd>,
    /// The read-only mounts, if the guardian could open them already.
    pub(crate) trees: Option<Vec<Tree>>,
    pub(crate) setup: Setup,
}

struct Sandbox {
    init: Pid,
    orders: OwnedFd,
    /// Open from the moment the sandbox is mapped.
    namespaces: Vec<OwnedFd>,
    rules: Option<OwnedFd>,
    interpreter: Option<(i32, Generation)>,
    /// False once the other end of `orders` is closed.
    listening: bool,
}

struct Warden {
    setup: Setup,
    filters: Filters,
    commands: OwnedFd,
    mounts_from_guardian: Option<OwnedFd>,
    children: OwnedFd,
    /// Oldest first. The newest warm one forks; older ones end when a newer one is warm.
    zygotes: Vec<Zygote>,
    sandboxes: BTreeMap<Slot, Sandbox>,
}

/// Which sockets have something to read.
struct Ready {
    commands: bool,
    children: bool,
    zygotes: Vec<Pid>,
    inits: Vec<Slot>,
}

/// Runs the warden; never returns.
pub(crate) fn main(start: Start) -> ! {
    let commands = start.commands.try_clone();
    if let (Err(error), Ok(commands)) = (run(start), commands) {
        let _ = wire::send(&commands, &Event::Broken { why: guardian::chain(&error) }, &[]);
    }
    sys::exit_now(0);
}

fn run(start: Start) -> Result<(), RootError> {
    let failed = |attempt: &'static str| move |cause: io::Error| RootError::new(attempt, cause);
    end_with_the_guardian()?;
    let mut byte = [0];
    if rustix::io::read(&start.gate, &mut byte)
        .map_err(|cause| RootError::new("could not wait for the id maps", cause))?
        != 1
    {
        return Ok(());
    }
    rustix::thread::set_name(c"cb-warden").map_err(|cause| RootError::new("could not name the warden", cause))?;
    become_warden_root(&start.setup).map_err(failed("could not become root of the jail"))?;
    // The kernel forgets the promise when a process changes its user.
    end_with_the_guardian()?;
    let trees = match start.trees {
        Some(trees) => trees,
        None => root::open_all(&start.setup.binds, &start.setup.leave_out)?,
    };
    let standing = if start.mounts_from_guardian.is_none() {
        root::open_operator_mounts(&start.setup.mounts)?
    } else {
        Vec::new()
    };
    root::become_root(&trees, &standing, &start.setup.leave_out)?;
    drop(trees);
    sys::bring_loopback_up().map_err(failed("could not bring up the loopback interface"))?;
    let mut warden = Warden {
        filters: seccomp::filters(),
        children: sys::child_signal_descriptor().map_err(failed("could not watch children"))?,
        commands: start.commands,
        mounts_from_guardian: start.mounts_from_guardian,
        zygotes: Vec::new(),
        sandboxes: BTreeMap::new(),
        setup: start.setup,
    };
    warden.tell(&Event::Ready, &[]).and_then(|()| warden.serve()).map_err(failed("the warden's loop broke"))
}

/// Has the kernel end this process, and so all its namespace, when the guardian is killed.
fn end_with_the_guardian() -> Result<(), RootError> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|cause| RootError::new("could not tie the warden to its guardian", cause))
}

fn become_warden_root(setup: &Setup) -> io::Result<()> {
    let (uid, gid) = (rustix::process::Uid::ROOT, rustix::process::Gid::ROOT);
    if matches!(setup.identity, crate::identity::Identity::Block { .. }) {
        rustix::thread::set_thread_groups(&[])?;
    }
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    // The change of user made this process, and every init forked from it, unreadable; but it must write the id maps of its inits.
    rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    Ok(())
}

impl Warden {
    fn tell(&self, event: &Event, descriptors: &[&OwnedFd]) -> io::Result<()> {
        let descriptors: Vec<_> = descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
        wire::send(&self.commands, event, &descriptors)
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            // What is readable is noted first and handled afterwards, because handling changes the table of sandboxes.
            let ready = self.wait_for_something()?;
            if ready.commands {
                match wire::receive::<Command>(&self.commands)? {
                    Some((command, descriptors)) => self.carry_out(command, descriptors)?,
                    None => return Ok(()),
                }
            }
            for zygote in ready.zygotes {
                self.hear_zygote(zygote)?;
            }
            for slot in ready.inits {
                self.hear_init(slot)?;
            }
            if ready.children {
                self.collect_children()?;
            }
        }
    }

    fn wait_for_something(&self) -> io::Result<Ready> {
        let listening = || self.sandboxes.iter().filter(|(_, sandbox)| sandbox.listening);
        let zygotes = || self.zygotes.iter().filter(|zygote| zygote.listening);
        let mut events = vec![PollFd::new(&self.commands, PollFlags::IN), PollFd::new(&self.children, PollFlags::IN)];
        events.extend(zygotes().map(|zygote| PollFd::new(&zygote.socket, PollFlags::IN)));
        events.extend(listening().map(|(_, sandbox)| PollFd::new(&sandbox.orders, PollFlags::IN)));
        loop {
            match rustix::event::poll(&mut events, None) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut ready = events.iter().map(|event| !event.revents().is_empty());
        let mut next = || ready.next().unwrap_or(false);
        Ok(Ready {
            commands: next(),
            children: next(),
            zygotes: zygotes().filter(|_| next()).map(|zygote| zygote.pid).collect(),
            inits: listening().filter(|_| next()).map(|(slot, _)| *slot).collect(),
        })
    }

    fn carry_out(&mut self, command: Command, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        match command {
            Command::Warm => self.warm(),
            Command::Prepare { slot } => match self.prepare(slot, descriptors) {
                Ok(init) => self.tell(&Event::Created { slot }, &[&init]),
                Err(error) => self.tell(&Event::Failed { slot, why: guardian::chain(&error) }, &[]),
            },
            Command::Proceed { slot } => self.order(slot, &Order::Go),
            Command::Sweep { slot, number } => self.order(slot, &Order::Sweep { number }),
            Command::Fork { slot, generation } => match self.fork(slot, generation, &descriptors) {
                Ok(()) => Ok(()),
                Err(why) => self.tell(&Event::Failed { slot, why }, &[]),
            },
            Command::Destroy { slot } => match self.sandboxes.get(&slot) {
                Some(sandbox) => {
                    let _ = rustix::process::kill_process(sandbox.init, Signal::KILL);
                    Ok(())
                }
                None => self.tell(&Event::Destroyed { slot }, &[]),
            },
        }
    }

    fn order(&self, slot: Slot, order: &Order) -> io::Result<()> {
        // An init that has just died is reported when it is collected.
        if let Some(sandbox) = self.sandboxes.get(&slot) {
            let _ = wire::send(&sandbox.orders, order, &[]);
        }
        Ok(())
    }

    fn warm(&mut self) -> io::Result<()> {
        match Zygote::start(&self.setup, &self.filters) {
            Ok(zygote) => {
                self.zygotes.push(zygote);
                Ok(())
            }
            Err(error) => self.tell(&Event::ZygoteEnded { was_warm: false, words: error.to_string() }, &[]),
        }
    }

    fn prepare(&mut self, slot: Slot, doors: Vec<OwnedFd>) -> Result<OwnedFd, RootError> {
        let mounts = self.operator_mounts(slot)?;
        let failed = |cause: io::Error| RootError::new("could not make the sandbox's namespaces", cause);
        let (orders, theirs) = wire::pair().map_err(failed)?;
        match sys::clone_process(guardian::NAMESPACES).map_err(failed)? {
            Forked::Child => init::main(init::Start {
                warden: theirs,
                doors,
                mounts,
                scratch: self.setup.scratch,
                owner: self.setup.identity.in_warden(slot),
                private_work_folder: !self.setup.mounts.iter().any(|mount| mount.inside.as_os_str() == root::WORK),
                leave_out: self.setup.leave_out.clone(),
            }),
            Forked::Parent(init) => {
                let handle =
                    rustix::process::pidfd_open(init, PidfdFlags::empty()).map_err(|cause| failed(cause.into()))?;
                let sandbox =
                    Sandbox { init, orders, listening: true, namespaces: Vec::new(), rules: None, interpreter: None };
                self.sandboxes.insert(slot, sandbox);
                Ok(handle)
            }
        }
    }

    fn operator_mounts(&self, slot: Slot) -> Result<OperatorMounts, RootError> {
        let Some(guardian) = &self.mounts_from_guardian else {
            return Ok(OperatorMounts::Standing(self.setup.mounts.clone()));
        };
        if self.setup.mounts.is_empty() {
            return Ok(OperatorMounts::Given(Vec::new()));
        }
        let failed = |cause: io::Error| RootError::new("could not ask the guardian for mounts", cause);
        wire::send(guardian, &OpenMounts { slot }, &[]).map_err(failed)?;
        let (OpenedMounts { error }, opened) =
            wire::receive(guardian).map_err(failed)?.ok_or_else(|| failed(io::ErrorKind::UnexpectedEof.into()))?;
        match error {
            Some(why) => Err(RootError::new("could not open the operator's mounts", io::Error::other(why))),
            None => Ok(OperatorMounts::Given(
                self.setup
                    .mounts
                    .iter()
                    .zip(opened)
                    .map(|(mount, opened)| Tree::from_guardian(mount, opened))
                    .collect(),
            )),
        }
    }

    fn fork(&mut self, slot: Slot, generation: Generation, descriptors: &[OwnedFd]) -> Result<(), String> {
        let zygote = self.zygotes.iter().rev().find(|zygote| zygote.warm).ok_or("there is no warm interpreter")?;
        let sandbox = self.sandboxes.get(&slot).ok_or("the sandbox is gone")?;
        let (channel, doors) = descriptors.split_first().ok_or("the command came without a channel")?;
        zygote
            .fork(slot, generation, channel, &sandbox.namespaces, doors, sandbox.rules.as_ref())
            .map_err(|error| format!("the warm interpreter does not answer: {error}"))
    }

    fn hear_zygote(&mut self, pid: Pid) -> io::Result<()> {
        let Some(index) = self.zygotes.iter().position(|zygote| zygote.pid == pid) else { return Ok(()) };
        let zygote = &mut self.zygotes[index];
        let word = match wire::receive::<ZygoteWord>(&zygote.socket) {
            Ok(Some((word, _))) => word,
            // Its end is told when it is collected as a child; an unreadable word means that it is broken.
            Ok(None) | Err(_) => {
                zygote.listening = false;
                let _ = rustix::process::kill_process(pid, Signal::KILL);
                return Ok(());
            }
        };
        match word {
            ZygoteWord::Warm => {
                zygote.warm = true;
                // Forks of the older ones live on; as children of a dead parent they come to this process.
                for older in &mut self.zygotes[..index] {
                    older.replaced = true;
                    let _ = rustix::process::kill_process(older.pid, Signal::KILL);
                }
                let handle = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
                self.tell(&Event::Warmed, &[&handle])
            }
            ZygoteWord::Failed { slot, why } => self.tell(&Event::Failed { slot, why }, &[]),
            ZygoteWord::Exited { pid, status } => self.interpreter_ended(pid, status),
            ZygoteWord::Forked { slot, generation, pid } => {
                let handle = Pid::from_raw(pid)
                    .ok_or(rustix::io::Errno::SRCH)
                    .and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()));
                match (handle, self.sandboxes.get_mut(&slot)) {
                    (Ok(handle), Some(sandbox)) => {
                        sandbox.interpreter = Some((pid, generation));
                        self.tell(&Event::Forked { slot, generation }, &[&handle])
                    }
                    _ => self.tell(&Event::Failed { slot, why: "the interpreter ended at once".to_owned() }, &[]),
                }
            }
        }
    }

    fn interpreter_ended(&mut self, pid: i32, status: i32) -> io::Result<()> {
        let ended = self.sandboxes.iter_mut().find_map(|(slot, sandbox)| match sandbox.interpreter {
            Some((found, generation)) if found == pid => {
                sandbox.interpreter = None;
                Some((*slot, generation))
            }
            _ => None,
        });
        match ended {
            Some((slot, generation)) => {
                let words = self.zygotes.last().map(Zygote::last_words).unwrap_or_default();
                self.tell(&Event::Exited { slot, generation, status, words }, &[])
            }
            None => Ok(()),
        }
    }

    fn hear_init(&mut self, slot: Slot) -> io::Result<()> {
        let Some(sandbox) = self.sandboxes.get_mut(&slot) else { return Ok(()) };
        match wire::receive::<InitWord>(&sandbox.orders) {
            Ok(Some((InitWord::MapMe, mut rules))) => {
                sandbox.rules = rules.pop();
                match map(sandbox.init, self.setup.identity.in_warden(slot)) {
                    Ok(namespaces) => {
                        sandbox.namespaces = namespaces;
                        self.order(slot, &Order::Mapped)
                    }
                    Err(error) => {
                        let _ = rustix::process::kill_process(sandbox.init, Signal::KILL);
                        let why = format!("could not map the session's user: {error}");
                        self.tell(&Event::Failed { slot, why }, &[])
                    }
                }
            }
            Ok(Some((InitWord::Ready, _))) => self.tell(&Event::Prepared { slot }, &[]),
            Ok(Some((InitWord::Swept { number }, _))) => self.tell(&Event::Swept { slot, number }, &[]),
            Ok(Some((InitWord::Failed { why }, _))) => self.tell(&Event::Failed { slot, why }, &[]),
            // Its end is told when it is collected as a child.
            Ok(None) | Err(_) => {
                sandbox.listening = false;
                Ok(())
            }
        }
    }

    fn collect_children(&mut self) -> io::Result<()> {
        // The descriptor only wakes us; one signal may stand for several children.
        let mut note = [0u8; 128];
        while rustix::io::read(&self.children, &mut note).is_ok() {}
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            let status = status.as_raw();
            if let Some(index) = self.zygotes.iter().position(|zygote| zygote.pid == pid) {
                let zygote = self.zygotes.remove(index);
                if !zygote.replaced {
                    self.tell(&Event::ZygoteEnded { was_warm: zygote.warm, words: zygote.last_words() }, &[])?;
                }
            } else if let Some(slot) = self.slot_of_init(pid) {
                self.sandboxes.remove(&slot);
                self.tell(&Event::Destroyed { slot }, &[])?;
            } else {
                self.interpreter_ended(pid.as_raw_pid(), status)?;
            }
        }
        Ok(())
    }

    fn slot_of_init(&self, pid: Pid) -> Option<Slot> {
        self.sandboxes.iter().find(|(_, sandbox)| sandbox.init == pid).map(|(slot, _)| *slot)
    }
}

/// Writes the id maps of an init's user namespace and opens the namespaces that interpreters will join. It must happen while the init is
/// still readable for us.
fn map(init: Pid, id: u32) -> io::Result<Vec<OwnedFd>> {
    let folder = format!("/proc/{}", init.as_raw_pid());
    let line = format!("{INSIDE_ID} {id} 1\n");
    std::fs::write(format!("{folder}/uid_map"), &line)?;
    std::fs::write(format!("{folder}/gid_map"), &line)?;
    JOINED.iter().map(|name| std::fs::File::open(format!("{folder}/ns/{name}")).map(OwnedFd::from)).collect()
}
