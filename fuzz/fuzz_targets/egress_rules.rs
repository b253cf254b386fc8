//! Any texts as rules, names and authorities; any lists under any ceilings: a text has one meaning
//! or is refused, a longer list never permits less, and what is not beyond a ceiling permits
//! nothing that the ceiling does not.

#![no_main]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;

// The pure part of the egress crate; its files need one another and nothing of the rest.
#[path = "../../egress/src"]
#[allow(dead_code)]
mod egress {
    pub mod address;
    pub mod name;
    pub mod rules;
}

// Under these names the files find each other.
use egress::{address, name, rules};
use name::{Host, HostName, parse_authority};
use rules::{Listens, Rule, Rules};

#[derive(Arbitrary, Debug)]
struct Input {
    texts: Vec<String>,
    list: Vec<Written>,
    ceiling: Vec<Written>,
    asked: Vec<Asked>,
}

/// A rule that is right, out of few parts, so that lists have something in common.
#[derive(Arbitrary, Debug)]
struct Written {
    denies: bool,
    target: WrittenTarget,
    ports: Option<(u8, u8)>,
}

#[derive(Arbitrary, Debug)]
enum WrittenTarget {
    Name { stars: u8, labels: Vec<bool> },
    V4 { address: u32, prefix: u8 },
    V6 { address: Address, prefix: u8 },
}

#[derive(Arbitrary, Debug)]
enum Address {
    Plain(u128),
    V4(u32),
    Mapped(u32),
    Translated(u32),
    SixToFour(u32, u64),
    Teredo(u32, u32),
    Isatap(u64, u32),
}

#[derive(Arbitrary, Debug)]
enum Asked {
    Name(Vec<bool>, u8),
    Address(Address, u8),
}

fuzz_target!(|input: Input| {
    for text in &input.texts {
        one_meaning_or_none(text);
    }

    let list: Vec<String> = input.list.iter().map(written).collect();
    let ceiling: Vec<String> = input.ceiling.iter().map(written).collect();
    let (Ok(list_rules), Ok(ceiling_rules)) = (Rules::parse(&list), Rules::parse(&ceiling)) else {
        return;
    };
    let permits: Vec<&String> = list.iter().filter(|rule| !rule.starts_with('!')).collect();
    let shorter = Rules::parse(&permits[..permits.len() / 2]).expect("all of them were right");
    let longer = Rules::parse(&permits).expect("all of them were right");
    let granted = list_rules.under_denials_of(&ceiling_rules);
    assert_eq!(list_rules.beyond(&list_rules), None);
    assert_eq!(list_rules.beyond(&Rules::everything()), None);

    for asked in &input.asked {
        assert!(!permitted(&Rules::none(), asked));
        assert!(permitted(&Rules::everything(), asked));
        assert!(!permitted(&shorter, asked) || permitted(&longer, asked), "a longer list permits \
             less: {permits:?}");
        assert!(
            !permitted(&list_rules, asked) || permitted(&longer, asked),
            "a denial permits more: {list:?}"
        );
        for inner in [&list_rules, &granted] {
            if inner.beyond(&ceiling_rules).is_none() {
                assert!(
                    !permitted(inner, asked) || permitted(&ceiling_rules, asked),
                    "{list:?} is beyond {ceiling:?}"
                );
            }
        }
        if let Listens::Ports(ports) = list_rules.listens() {
            assert!(!permitted(&list_rules, asked) || ports.contains(&port(asked)));
        }
    }
});

fn one_meaning_or_none(text: &str) {
    if let Ok(rule) = Rule::parse(text) {
        assert_eq!(Rule::parse(&rule.to_string()), Ok(rule));
    }
    if let Ok(name) = HostName::parse(text) {
        assert!(
            name.as_str().len() <= 253
                && name.labels().all(|label| (1..=63).contains(&label.len()))
        );
        assert!(name.as_str().parse::<IpAddr>().is_err());
        assert_eq!(HostName::parse(name.as_str()), Ok(name));
    }
    if let Ok((host, port)) = parse_authority(text) {
        let again = port.map_or_else(|| host.to_string(), |port| format!("{host}:{port}"));
        assert_eq!(parse_authority(&again), Ok((host.clone(), port)));
        assert!(!matches!(host, Host::Name(name) if name.as_str().parse::<IpAddr>().is_ok()));
    }
}

fn permitted(rules: &Rules, asked: &Asked) -> bool {
    match asked {
        Asked::Name(labels, _) => {
            let name = HostName::parse(&name_of(labels)).expect("it is a name");
            let allows = rules.allows_name(&name, port(asked));
            assert!(!allows || rules.lists_name(&name));
            allows
        }
        Asked::Address(address, _) => {
            let allows = rules.allows_address(address_of(address), port(asked));
            assert!(!allows || rules.refuses_answer(address_of(address), port(asked)).is_none());
            allows
        }
    }
}

fn port(asked: &Asked) -> u16 {
    match asked {
        Asked::Name(_, port) | Asked::Address(_, port) => u16::from(*port % 4) + 79,
    }
}

fn written(rule: &Written) -> String {
    let denies = if rule.denies { "!" } else { "" };
    let target = match &rule.target {
        WrittenTarget::Name { stars, labels } => {
            format!("{}{}", ["", "*.", "**."][usize::from(stars % 3)], name_of(labels))
        }
        WrittenTarget::V4 { address, prefix } => {
            range(IpAddr::V4(Ipv4Addr::from_bits(*address)), prefix % 33)
        }
        WrittenTarget::V6 { address, prefix } => range(address_of(address), prefix % 129),
    };
    match rule.ports {
        None => format!("{denies}{target}"),
        Some((first, count)) => {
            let first = u16::from(first % 4) + 79;
            format!("{denies}{target}:{first}-{}", first + u16::from(count % 3))
        }
    }
}

fn range(address: IpAddr, prefix: u8) -> String {
    match address.to_canonical() {
        IpAddr::V4(address) => {
            let prefix = prefix.min(32);
            let bits =
                address.to_bits() & u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
            format!("{}/{prefix}", Ipv4Addr::from_bits(bits))
        }
        IpAddr::V6(address) => {
            let bits =
                address.to_bits() & u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
            format!("[{}/{prefix}]", Ipv6Addr::from_bits(bits))
        }
    }
}

fn name_of(labels: &[bool]) -> String {
    let labels = labels.iter().take(4).map(|label| if *label { "a." } else { "b." });
    labels.chain(["test"]).collect()
}

fn address_of(address: &Address) -> IpAddr {
    let wide = match *address {
        Address::Plain(bits) => bits,
        Address::V4(bits) => return Ipv4Addr::from_bits(bits).into(),
        Address::Mapped(bits) => 0xffff << 32 | u128::from(bits),
        Address::Translated(bits) => 0x64_ff9b << 96 | u128::from(bits),
        Address::SixToFour(bits, rest) => 0x2002 << 112 | u128::from(bits) << 80 | u128::from(rest),
        Address::Teredo(server, client) => {
            0x2001 << 112 | u128::from(server) << 64 | u128::from(client)
        }
        Address::Isatap(prefix, bits) => u128::from(prefix) << 64 | 0x5efe << 32 | u128::from(bits),
    };
    Ipv6Addr::from_bits(wide).into()
}
