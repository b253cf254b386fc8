//! Addresses that stand for names.
//!
//! Inside, a listed name has an address that exists nowhere else, from 198.18.0.0/15 (reserved for
//! benchmarks, so no real host has it). The destination address of a connection identifies the
//! name: no guessing from shared addresses, and no DNS answer can change it.
//!
//! The table of one session is bounded. When it is full, the least recently used name is evicted; a
//! name whose address a connection uses is never evicted. Addresses are assigned round-robin over
//! the whole range, so that a program that keeps an address for too long finds no name there,
//! rather than another one.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::name::HostName;

/// Limit of names per session. A program rarely needs a hundred; this bounds memory to about a
/// megabyte.
pub(crate) const MAX_NAMES: usize = 4096;

/// 198.18.0.0/15. The first address is left out: some programs reject an address whose host bits
/// are all zero.
const FIRST: u32 = u32::from_be_bytes([198, 18, 0, 1]);
const LAST: u32 = u32::from_be_bytes([198, 19, 255, 254]);

/// The names of one session and their addresses.
#[derive(Default)]
pub(crate) struct Names {
    table: Mutex<Table>,
}

/// A name whose address is in use by a connection. The entry stays in the table until this is
/// dropped.
pub(crate) struct NameInUse {
    names: Arc<Names>,
    address: Ipv4Addr,
    name: HostName,
}

impl Names {
    /// Returns the address that stands for `name`, a new one if it has none. Returns `None` if the
    /// table is full of names in use.
    pub(crate) fn address_of(&self, name: &HostName) -> Option<Ipv4Addr> {
        let mut table = self.table();
        if let Some(address) = table.addresses.get(name).copied() {
            table.touch(address);
            return Some(address);
        }
        if table.entries.len() >= MAX_NAMES && !table.forget_the_oldest() {
            return None;
        }
        Some(table.add(name.clone()))
    }

    /// Returns the name that `address` stands for and keeps the entry until the returned value is
    /// dropped.
    pub(crate) fn name_at(self: &Arc<Self>, address: IpAddr) -> Option<NameInUse> {
        let IpAddr::V4(address) = address else {
            return None;
        };
        let mut table = self.table();
        table.touch(address);
        let entry = table.entries.get_mut(&address)?;
        entry.connections += 1;
        Some(NameInUse {
            names: Arc::clone(self),
            address,
            name: entry.name.clone(),
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Nothing under this lock panics halfway through a change.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NameInUse {
    pub(crate) fn name(&self) -> &HostName {
        &self.name
    }
}

impl Drop for NameInUse {
    fn drop(&mut self) {
        if let Some(entry) = self.names.table().entries.get_mut(&self.address) {
            entry.connections -= 1;
        }
    }
}

#[derive(Default)]
struct Table {
    addresses: HashMap<HostName, Ipv4Addr>,
    entries: HashMap<Ipv4Addr, Entry>,
    /// A counter of uses. A smaller number in an entry means a less recent use.
    uses: u64,
    /// The number of addresses ever assigned.
    given: u32,
}

struct Entry {
    name: HostName,
    last_use: u64,
    connections: usize,
}

impl Table {
    fn touch(&mut self, address: Ipv4Addr) {
        self.uses += 1;
        if let Some(entry) = self.entries.get_mut(&address) {
            entry.last_use = self.uses;
        }
    }

    /// Evicts one name. Scans the whole table, which the limit on queries per second makes cheap
    /// enough.
    fn forget_the_oldest(&mut self) -> bool {
        let unused = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.connections == 0);
        let Some(address) = unused
            .min_by_key(|(_, entry)| entry.last_use)
            .map(|(address, _)| *address)
        else {
            return false;
        };
        if let Some(entry) = self.entries.remove(&address) {
            self.addresses.remove(&entry.name);
        }
        true
    }

    fn add(&mut self, name: HostName) -> Ipv4Addr {
        // Terminates: the range is larger than the table.
        let address = loop {
            let candidate = Ipv4Addr::from(FIRST + self.given % (LAST - FIRST + 1));
            self.given = self.given.wrapping_add(1);
            if !self.entries.contains_key(&candidate) {
                break candidate;
            }
        };
        self.uses += 1;
        self.addresses.insert(name.clone(), address);
        self.entries.insert(
            address,
            Entry {
                name,
                last_use: self.uses,
                connections: 0,
            },
        );
        address
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> HostName {
        HostName::parse(text).unwrap()
    }

    fn numbered(number: usize) -> HostName {
        name(&format!("host{number}.example.com"))
    }

    #[test]
    fn a_name_keeps_its_address_and_two_names_never_share_one() {
        let names = Arc::new(Names::default());
        let first = names.address_of(&name("example.com")).unwrap();
        let second = names.address_of(&name("example.org")).unwrap();
        assert_ne!(first, second);
        assert_eq!(names.address_of(&name("example.com")), Some(first));
        assert_eq!(
            names.name_at(first.into()).unwrap().name(),
            &name("example.com")
        );
        assert_eq!(
            names.name_at(second.into()).unwrap().name(),
            &name("example.org")
        );
    }

    #[test]
    fn an_address_that_stands_for_nothing_has_no_name() {
        let names = Arc::new(Names::default());
        let known = names.address_of(&name("example.com")).unwrap();
        assert!(names.name_at(known.into()).is_some()); // control
        assert!(names.name_at("198.18.77.77".parse().unwrap()).is_none());
        assert!(names.name_at("8.8.8.8".parse().unwrap()).is_none());
        assert!(names.name_at("2001:db8::1".parse().unwrap()).is_none());
    }

    #[test]
    fn all_addresses_are_of_the_benchmark_range() {
        let names = Names::default();
        for number in 0..MAX_NAMES {
            let octets = names.address_of(&numbered(number)).unwrap().octets();
            assert!(octets[0] == 198 && (octets[1] == 18 || octets[1] == 19));
        }
    }

    #[test]
    fn a_full_table_forgets_the_name_that_was_not_used_for_longest() {
        let names = Arc::new(Names::default());
        let first = names.address_of(&numbered(0)).unwrap();
        let second = names.address_of(&numbered(1)).unwrap();
        for number in 2..MAX_NAMES {
            names.address_of(&numbered(number)).unwrap();
        }
        names.address_of(&numbered(0)).unwrap(); // used again, so the second is now the oldest
        names.address_of(&name("one.more.example.com")).unwrap();
        assert!(names.name_at(first.into()).is_some()); // control
        assert!(names.name_at(second.into()).is_none());
        assert_eq!(names.table().entries.len(), MAX_NAMES);
        assert_eq!(names.table().addresses.len(), MAX_NAMES);
    }

    #[test]
    fn an_address_in_use_is_never_given_to_another_name() {
        let names = Arc::new(Names::default());
        let address = names.address_of(&name("held.example.com")).unwrap();
        let held = names.name_at(address.into()).unwrap();
        // One full cycle through the range: the next address would be this one.
        names.table().given = LAST - FIRST + 1;
        for number in 0..2 * MAX_NAMES {
            assert_ne!(names.address_of(&numbered(number)), Some(address));
        }
        assert_eq!(names.name_at(address.into()).unwrap().name(), held.name());
        drop(held);
        for number in 0..MAX_NAMES {
            names.address_of(&numbered(number + 3 * MAX_NAMES)).unwrap();
        }
        assert!(names.name_at(address.into()).is_none()); // control: evicted once unused
    }

    #[test]
    fn a_table_full_of_names_in_use_has_no_place() {
        let names = Arc::new(Names::default());
        let hold = |number| {
            names
                .name_at(names.address_of(&numbered(number)).unwrap().into())
                .unwrap()
        };
        let mut held: Vec<NameInUse> = (0..MAX_NAMES).map(hold).collect();
        assert_eq!(names.address_of(&name("late.example.com")), None);
        held.pop();
        assert!(names.address_of(&name("late.example.com")).is_some()); // control
    }
}
