//! Sets of ports.
//!
//! A set is stored as ascending ranges with gaps between them, so that equal sets are equal values
//! and all 65,535 ports cost no more than one.

use std::fmt;

use super::Effect;
use super::parse::{RuleProblem, shortened};
use crate::name::parse_port;

/// A set of ports: ascending ranges with gaps between them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Ports(Vec<(u16, u16)>);

impl Ports {
    pub(super) fn all() -> Ports {
        Ports(vec![(1, u16::MAX)])
    }

    /// Returns the ports of a rule without ports: HTTP and HTTPS, or all ports for a denial.
    pub(super) fn default_of(effect: Effect) -> Ports {
        match effect {
            Effect::Permit => Ports(vec![(80, 80), (443, 443)]),
            Effect::Deny => Ports::all(),
        }
    }

    pub(super) fn parse(text: &str) -> Result<Ports, RuleProblem> {
        if text == "*" {
            return Ok(Ports::all());
        }
        text.split(',')
            .map(parse_range)
            .collect::<Result<Vec<_>, _>>()
            .map(Ports::of)
    }

    fn of(mut ranges: Vec<(u16, u16)>) -> Ports {
        ranges.sort_unstable();
        let mut joined: Vec<(u16, u16)> = Vec::with_capacity(ranges.len());
        for (first, last) in ranges {
            match joined.last_mut() {
                Some(before) if first <= before.1.saturating_add(1) => {
                    before.1 = before.1.max(last)
                }
                _ => joined.push((first, last)),
            }
        }
        Ports(joined)
    }

    pub(super) fn union<'a>(all: impl Iterator<Item = &'a Ports>) -> Ports {
        Ports::of(all.flat_map(|ports| ports.0.iter().copied()).collect())
    }

    pub(super) fn minus(&self, other: &Ports) -> Ports {
        let mut left = Vec::new();
        for &(first, last) in &self.0 {
            // Wider than a port, so that the number after the last port can be represented.
            let mut next = u32::from(first);
            for &(taken, until) in other
                .0
                .iter()
                .filter(|(taken, until)| *until >= first && *taken <= last)
            {
                if u32::from(taken) > next {
                    left.push((next as u16, taken - 1));
                }
                next = next.max(u32::from(until) + 1);
            }
            if next <= u32::from(last) {
                left.push((next as u16, last));
            }
        }
        Ports(left)
    }

    pub(super) fn common(&self, other: &Ports) -> Ports {
        self.minus(&self.minus(other))
    }

    pub(super) fn contains(&self, port: u16) -> bool {
        self.0
            .iter()
            .any(|(first, last)| (*first..=*last).contains(&port))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn count(&self) -> usize {
        self.0
            .iter()
            .map(|(first, last)| usize::from(last - first) + 1)
            .sum()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = u16> {
        self.0.iter().flat_map(|(first, last)| *first..=*last)
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Ports::all() {
            return formatter.write_str("*");
        }
        for (place, (first, last)) in self.0.iter().enumerate() {
            let comma = if place == 0 { "" } else { "," };
            match first == last {
                true => write!(formatter, "{comma}{first}")?,
                false => write!(formatter, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

fn parse_range(text: &str) -> Result<(u16, u16), RuleProblem> {
    let port = |text: &str| parse_port(text).map_err(|_| RuleProblem::Port(shortened(text)));
    if text.contains('.') {
        return Err(RuleProblem::Several);
    }
    let Some((first, last)) = text.split_once('-') else {
        return port(text).map(|port| (port, port));
    };
    match (port(first)?, port(last)?) {
        (first, last) if first > last => Err(RuleProblem::PortOrder(format!("{last}-{first}"))),
        range => Ok(range),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    fn some_ports() -> impl Strategy<Value = Vec<(u16, u16)>> {
        let edge = select(vec![1, 2, 3, 4, 5, 6, 7, 8, 65530, 65533, 65534, 65535]);
        proptest::collection::vec(
            (edge.clone(), edge).prop_map(|(one, two)| (one.min(two), one.max(two))),
            0..4,
        )
        .prop_filter("a full set is slow", |ranges| {
            ranges.iter().all(|(first, last)| last - first < 100)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn sets_of_ports_behave_like_sets(left in some_ports(), right in some_ports()) {
            let set = |ports: &Ports| ports.iter().collect::<BTreeSet<u16>>();
            let (one, two) = (Ports::of(left), Ports::of(right));
            prop_assert_eq!(set(&one.minus(&two)), &set(&one) - &set(&two));
            prop_assert_eq!(set(&one.common(&two)), &set(&one) & &set(&two));
            let both = Ports::union([&one, &two].into_iter());
            prop_assert_eq!(set(&both), &set(&one) | &set(&two));
            prop_assert_eq!(both.count(), set(&both).len());
            // A set has one representation, so that equal sets are equal values.
            prop_assert_eq!(Ports::of(both.iter().map(|port| (port, port)).collect()), both);
        }
    }
}
