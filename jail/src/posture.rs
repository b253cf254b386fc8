//! The kernel's view of a live process: the facts behind every claim of isolation.
//!
//! The server reads these for each interpreter before it sends the first byte of user code, and
//! refuses to continue if a fact is not as expected. It does not rely on earlier reports.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;

/// The namespaces a session must not share with the host.
pub const NAMESPACES: [&str; 7] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];

/// Facts about one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Posture {
    pub uids: [u32; 4],
    pub gids: [u32; 4],
    pub groups: Vec<u32>,
    /// Inheritable, permitted, effective, bounding, ambient.
    pub capabilities: [u64; 5],
    pub no_new_privs: bool,
    /// The seccomp mode; `SECCOMP_MODE_FILTER` when a filter is loaded.
    pub seccomp: u32,
    pub seccomp_filters: u32,
    /// Whether it leads its own session, and so its own process group.
    pub leads_session: bool,
    /// The identity of each namespace.
    pub namespaces: BTreeMap<&'static str, PathBuf>,
}

/// A fact that is not as expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PostureFault {
    #[error("it runs as host user {0} instead of {1}")]
    User(u32, u32),
    #[error("it belongs to host groups {0:?}")]
    Groups(Vec<u32>),
    #[error("it has capabilities")]
    Capabilities,
    #[error("it could gain privileges")]
    NewPrivileges,
    #[error("it is in the process group of others")]
    Group,
    #[error("it has {0} of {1} seccomp filters")]
    Seccomp(u32, u32),
    #[error("it shares the {0} namespace with {1}")]
    Shared(&'static str, &'static str),
    #[error("it is not in {0}, a namespace of its sandbox")]
    Elsewhere(String),
}

/// Expected facts of a session.
#[derive(Debug, Clone, Copy)]
pub struct ExpectedPosture {
    pub host_uid: u32,
    pub host_gid: u32,
    /// An unprivileged user cannot drop its groups in a namespace that it created.
    pub groups_empty: bool,
    pub seccomp_filters: u32,
}

impl Posture {
    /// Reads the facts of the process with this pid.
    pub fn read(pid: u32) -> io::Result<Posture> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let mut posture = Posture::parse(&status)
            .ok_or_else(|| io::Error::other("the kernel's status has an unknown form"))?;
        for name in NAMESPACES {
            posture
                .namespaces
                .insert(name, fs::read_link(format!("/proc/{pid}/ns/{name}"))?);
        }
        Ok(posture)
    }

    fn parse(status: &str) -> Option<Posture> {
        let field = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .map(str::trim)
        };
        let numbers = |name: &str| -> Option<Vec<u32>> {
            field(name)?
                .split_whitespace()
                .map(|number| number.parse().ok())
                .collect()
        };
        let mask = |name: &str| u64::from_str_radix(field(name)?, 16).ok();
        Some(Posture {
            uids: numbers("Uid")?.try_into().ok()?,
            gids: numbers("Gid")?.try_into().ok()?,
            groups: numbers("Groups")?,
            capabilities: [
                mask("CapInh")?,
                mask("CapPrm")?,
                mask("CapEff")?,
                mask("CapBnd")?,
                mask("CapAmb")?,
            ],
            no_new_privs: field("NoNewPrivs")? == "1",
            seccomp: field("Seccomp")?.parse().ok()?,
            seccomp_filters: field("Seccomp_filters")?.parse().ok()?,
            leads_session: field("NSpid")? == field("NSsid")?
                && field("NSpid")? == field("NSpgid")?,
            namespaces: BTreeMap::new(),
        })
    }

    /// Returns the first fact that is wrong. `host` is the posture of the server itself, `warm`
    /// that of the warm interpreter, `home` are the namespaces of its sandbox.
    pub fn fault(
        &self,
        expected: &ExpectedPosture,
        host: &Posture,
        warm: &Posture,
        home: &[PathBuf],
    ) -> Option<PostureFault> {
        if let Some(uid) = self
            .uids
            .iter()
            .find(|uid| **uid != expected.host_uid || **uid == 0)
        {
            return Some(PostureFault::User(*uid, expected.host_uid));
        }
        if self
            .gids
            .iter()
            .any(|gid| *gid != expected.host_gid || *gid == 0)
            || (expected.groups_empty && !self.groups.is_empty())
        {
            return Some(PostureFault::Groups(
                self.gids.iter().chain(&self.groups).copied().collect(),
            ));
        }
        if self.capabilities != [0; 5] {
            return Some(PostureFault::Capabilities);
        }
        if !self.no_new_privs {
            return Some(PostureFault::NewPrivileges);
        }
        if !self.leads_session {
            return Some(PostureFault::Group);
        }
        if expected.seccomp_filters > 0
            && (self.seccomp != libc::SECCOMP_MODE_FILTER
                || self.seccomp_filters < expected.seccomp_filters)
        {
            return Some(PostureFault::Seccomp(
                self.seccomp_filters,
                expected.seccomp_filters,
            ));
        }
        let shares = |name: &&'static str, other: &Posture| {
            self.namespaces.get(name) == other.namespaces.get(name)
        };
        let with_host = NAMESPACES
            .into_iter()
            .find(|name| shares(name, host))
            .map(|name| PostureFault::Shared(name, "the host"));
        let with_warm = || NAMESPACES.into_iter().find(|name| shares(name, warm));
        let elsewhere = || {
            home.iter()
                .find(|namespace| !self.namespaces.values().any(|own| own == *namespace))
        };
        with_host
            .or_else(|| with_warm().map(|name| PostureFault::Shared(name, "the warm interpreter")))
            .or_else(|| {
                elsewhere()
                    .map(|namespace| PostureFault::Elsewhere(namespace.display().to_string()))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tpython\n\
        Uid:\t1900000001\t1900000001\t1900000001\t1900000001\n\
        Gid:\t1900000001\t1900000001\t1900000001\t1900000001\n\
        Groups:\t \nNSpid:\t900\t12\t3\nNSsid:\t900\t12\t3\nNSpgid:\t900\t12\t3\n\
        CapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\n\
        CapBnd:\t0000000000000000\nCapAmb:\t0000000000000000\n\
        NoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t2\n";

    fn locked_down() -> Posture {
        let mut posture = Posture::parse(STATUS).unwrap();
        posture.namespaces = NAMESPACES
            .iter()
            .map(|name| (*name, PathBuf::from("inside")))
            .collect();
        posture
    }

    fn home() -> Vec<PathBuf> {
        vec![PathBuf::from("inside")]
    }

    fn host() -> Posture {
        elsewhere("host")
    }

    fn warm() -> Posture {
        elsewhere("warm")
    }

    fn elsewhere(place: &str) -> Posture {
        let mut posture = locked_down();
        posture.namespaces = NAMESPACES
            .iter()
            .map(|name| (*name, PathBuf::from(place)))
            .collect();
        posture
    }

    const EXPECTED: ExpectedPosture = ExpectedPosture {
        host_uid: 1_900_000_001,
        host_gid: 1_900_000_001,
        groups_empty: true,
        seccomp_filters: 2,
    };

    #[test]
    fn a_locked_down_process_has_no_fault() {
        assert_eq!(
            locked_down().fault(&EXPECTED, &host(), &warm(), &home()),
            None
        );
    }

    #[test]
    fn every_single_weakness_is_a_fault() {
        let weaken = |change: fn(&mut Posture)| {
            let mut posture = locked_down();
            change(&mut posture);
            posture.fault(&EXPECTED, &host(), &warm(), &home())
        };
        assert!(matches!(
            weaken(|posture| posture.uids[3] = 0),
            Some(PostureFault::User(0, _))
        ));
        assert!(matches!(
            weaken(|posture| posture.uids[1] = 1000),
            Some(PostureFault::User(1000, _))
        ));
        assert!(matches!(
            weaken(|posture| posture.gids[0] = 0),
            Some(PostureFault::Groups(_))
        ));
        assert!(matches!(
            weaken(|posture| posture.groups.push(27)),
            Some(PostureFault::Groups(_))
        ));
        for set in 0..5 {
            let mut posture = locked_down();
            posture.capabilities[set] = 1;
            assert_eq!(
                posture.fault(&EXPECTED, &host(), &warm(), &home()),
                Some(PostureFault::Capabilities)
            );
        }
        assert_eq!(
            weaken(|posture| posture.no_new_privs = false),
            Some(PostureFault::NewPrivileges)
        );
        assert_eq!(
            weaken(|posture| posture.leads_session = false),
            Some(PostureFault::Group)
        );
        assert!(matches!(
            weaken(|posture| posture.seccomp = 0),
            Some(PostureFault::Seccomp(..))
        ));
        assert!(matches!(
            weaken(|posture| posture.seccomp_filters = 1),
            Some(PostureFault::Seccomp(1, 2))
        ));
        for name in NAMESPACES {
            for (place, with) in [("host", "the host"), ("warm", "the warm interpreter")] {
                let mut posture = locked_down();
                posture.namespaces.insert(name, PathBuf::from(place));
                assert_eq!(
                    posture.fault(&EXPECTED, &host(), &warm(), &home()),
                    Some(PostureFault::Shared(name, with))
                );
            }
        }
        let fault = locked_down().fault(
            &EXPECTED,
            &host(),
            &warm(),
            &["inside".into(), "another sandbox".into()],
        );
        assert_eq!(
            fault,
            Some(PostureFault::Elsewhere("another sandbox".to_owned()))
        );
    }

    #[test]
    fn host_root_is_a_fault_even_when_it_was_expected() {
        let mut posture = locked_down();
        posture.uids = [0; 4];
        assert!(matches!(
            posture.fault(
                &ExpectedPosture {
                    host_uid: 0,
                    ..EXPECTED
                },
                &host(),
                &warm(),
                &home()
            ),
            Some(PostureFault::User(0, 0))
        ));
    }
}
