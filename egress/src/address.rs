//! Which addresses are ordinary, and which IPv4 addresses are embedded in IPv6 ones.
//!
//! An address is *special* when it is not an ordinary public one: everything that the IANA
//! special-purpose registries do not call globally reachable, multicast, unallocated ranges, and a
//! few public-looking addresses at which clouds serve credentials. Egress to special addresses is
//! possible only where a rule lists them.
//!
//! Many IPv6 addresses embed an IPv4 one. All forms that can be recognised by their bits are
//! unwrapped before the table lookup, and an address is special if any address that it may stand
//! for is special. A NAT64 prefix chosen by a network looks like any other address and cannot be
//! recognised.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Returns the effective address: the embedded IPv4 address of an IPv6 address that has one, any
/// other address unchanged.
///
/// If a form embeds two addresses (Teredo, or ISATAP within 6to4), this is the endpoint. Use
/// [`special`] for decisions: it checks both.
pub fn unwrap(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(wrapped) => carried(wrapped).next().map_or(address, IpAddr::V4),
    }
}

/// Returns why an address, or one that it stands for, is not an ordinary public address: "a private
/// address", "a loopback address" and so on. Returns `None` for ordinary ones.
pub fn special(address: IpAddr) -> Option<&'static str> {
    meanings(address).find_map(|meaning| match meaning {
        IpAddr::V4(address) => special_v4(address),
        IpAddr::V6(address) => special_v6(address),
    })
}

/// Returns an IPv4-mapped address as the IPv4 address that the kernel uses, and any other
/// unchanged.
pub(crate) fn canonical(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// Returns the address itself and every IPv4 address that it embeds.
pub(crate) fn meanings(address: IpAddr) -> impl Iterator<Item = IpAddr> {
    let address = canonical(address);
    let carried = match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(address) => Some(carried(address)),
    };
    std::iter::once(address).chain(carried.into_iter().flatten().map(IpAddr::V4))
}

/// Returns the IPv4 addresses that an IPv6 address embeds, the endpoint first.
fn carried(address: Ipv6Addr) -> impl Iterator<Item = Ipv4Addr> {
    let bytes = address.octets();
    let at = |place: usize| {
        Ipv4Addr::new(
            bytes[place],
            bytes[place + 1],
            bytes[place + 2],
            bytes[place + 3],
        )
    };
    let mut found = [None; 3];
    match address.segments() {
        // The unspecified and the loopback address are not IPv4 addresses with leading zeros.
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => {}
        // Compatible (RFC 4291 §2.5.5.1), mapped (§2.5.5.2), translated (RFC 2765), NAT64 (RFC
        // 6052).
        [0, 0, 0, 0, 0, 0, _, _]
        | [0, 0, 0, 0, 0, 0xffff, _, _]
        | [0, 0, 0, 0, 0xffff, 0, _, _] => found[0] = Some(at(12)),
        [0x64, 0xff9b, 0, 0, 0, 0, _, _] => found[0] = Some(at(12)),
        // NAT64 for local use (RFC 8215). The prefix length in use is not visible: with 48 bits the
        // IPv4 address surrounds byte 8, which is zero, and zeros follow; with 96 bits it is at the
        // end.
        [0x64, 0xff9b, 1, ..] => {
            let around = Ipv4Addr::new(bytes[6], bytes[7], bytes[9], bytes[10]);
            let is_around = bytes[8] == 0 && bytes[11..] == [0; 5] && !around.is_unspecified();
            found[0] = Some(if is_around { around } else { at(12) });
        }
        // Teredo (RFC 4380): the client with its bits inverted, and its server.
        [0x2001, 0, ..] => {
            found = [
                Some(Ipv4Addr::from_bits(!at(12).to_bits())),
                Some(at(4)),
                None,
            ]
        }
        // 6to4 (RFC 3056).
        [0x2002, ..] => found[1] = Some(at(2)),
        _ => {}
    }
    // ISATAP (RFC 5214) is recognised by the interface identifier alone, so it may be within any
    // prefix.
    if let [_, _, _, _, 0 | 0x0200, 0x5efe, _, _] = address.segments() {
        if found[0].is_some() {
            found[2] = Some(at(12));
        } else {
            found[0] = Some(at(12));
        }
    }
    found.into_iter().flatten()
}

/// The special IPv4 ranges, narrow ones first.
const SPECIAL_V4: [(Ipv4Addr, u32, &str); 19] = [
    (Ipv4Addr::new(169, 254, 169, 254), 32, METADATA),
    (Ipv4Addr::new(100, 100, 100, 200), 32, METADATA),
    // Looks public, but is the host endpoint of every virtual machine in one large cloud.
    (Ipv4Addr::new(168, 63, 129, 16), 32, METADATA),
    (Ipv4Addr::new(0, 0, 0, 0), 32, UNSPECIFIED),
    (
        Ipv4Addr::new(255, 255, 255, 255),
        32,
        "the broadcast address",
    ),
    (Ipv4Addr::new(0, 0, 0, 0), 8, "an address of this network"),
    (Ipv4Addr::new(10, 0, 0, 0), 8, PRIVATE),
    (
        Ipv4Addr::new(100, 64, 0, 0),
        10,
        "an address shared behind a carrier's NAT",
    ),
    (Ipv4Addr::new(127, 0, 0, 0), 8, LOOPBACK),
    (Ipv4Addr::new(169, 254, 0, 0), 16, LINK_LOCAL),
    (Ipv4Addr::new(172, 16, 0, 0), 12, PRIVATE),
    (Ipv4Addr::new(192, 0, 0, 0), 24, PROTOCOL),
    (Ipv4Addr::new(192, 0, 2, 0), 24, DOCUMENTATION),
    (
        Ipv4Addr::new(192, 88, 99, 0),
        24,
        "the address of a 6to4 relay",
    ),
    (Ipv4Addr::new(192, 168, 0, 0), 16, PRIVATE),
    (Ipv4Addr::new(198, 18, 0, 0), 15, BENCHMARKING),
    (Ipv4Addr::new(198, 51, 100, 0), 24, DOCUMENTATION),
    (Ipv4Addr::new(203, 0, 113, 0), 24, DOCUMENTATION),
    // Multicast is 224.0.0.0/4; the rest is reserved.
    (Ipv4Addr::new(240, 0, 0, 0), 4, RESERVED),
];

/// The special IPv6 ranges, narrow ones first. `special_v6` decides about addresses in none of
/// them.
const SPECIAL_V6: [(Ipv6Addr, u32, &str); 16] = [
    (
        Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
        128,
        METADATA,
    ),
    (
        Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
        128,
        METADATA,
    ),
    (Ipv6Addr::UNSPECIFIED, 128, UNSPECIFIED),
    (Ipv6Addr::LOCALHOST, 128, LOOPBACK),
    (
        Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 0),
        48,
        "an address of a local NAT64 translator",
    ),
    (
        Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 0),
        64,
        "an address that discards everything",
    ),
    (Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0), 48, BENCHMARKING),
    (
        Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0),
        32,
        DOCUMENTATION,
    ),
    (
        Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0),
        20,
        DOCUMENTATION,
    ),
    (
        Ipv6Addr::new(0x5f00, 0, 0, 0, 0, 0, 0, 0),
        16,
        "a segment routing identifier",
    ),
    (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7, PRIVATE),
    (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10, LINK_LOCAL),
    (
        Ipv6Addr::new(0xfec0, 0, 0, 0, 0, 0, 0, 0),
        10,
        "a site-local address",
    ),
    (Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8, MULTICAST),
    // Never assigned to hosts, except for the Teredo range, which `special_v6` takes out.
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23, PROTOCOL),
    // Nodes of the former test network.
    (Ipv6Addr::new(0x3ffe, 0, 0, 0, 0, 0, 0, 0), 16, RESERVED),
];

const METADATA: &str = "a cloud metadata address";
const UNSPECIFIED: &str = "the unspecified address";
const LOOPBACK: &str = "a loopback address";
/// The reason that [`special`] returns for the private networks of RFC 1918 and RFC 4193.
pub const PRIVATE: &str = "a private address";
const LINK_LOCAL: &str = "a link-local address";
const MULTICAST: &str = "a multicast address";
const DOCUMENTATION: &str = "an address for documentation";
const BENCHMARKING: &str = "an address for benchmarks";
const PROTOCOL: &str = "an address for protocols";
const RESERVED: &str = "a reserved address";

fn special_v4(address: Ipv4Addr) -> Option<&'static str> {
    if address.is_multicast() {
        return Some(MULTICAST);
    }
    let within =
        |network: Ipv4Addr, bits: u32| (address.to_bits() ^ network.to_bits()) >> (32 - bits) == 0;
    SPECIAL_V4
        .iter()
        .find(|(network, bits, _)| within(*network, *bits))
        .map(|(_, _, reason)| *reason)
}

fn special_v6(address: Ipv6Addr) -> Option<&'static str> {
    let within =
        |network: Ipv6Addr, bits: u32| (address.to_bits() ^ network.to_bits()) >> (128 - bits) == 0;
    let is_ordinary_tunnel = matches!(address.segments(), [0x2001, 0, ..]);
    let listed = SPECIAL_V6
        .iter()
        .find(|(network, bits, _)| within(*network, *bits))
        .map(|(_, _, reason)| *reason);
    match listed {
        Some(_) if is_ordinary_tunnel => None,
        Some(reason) => Some(reason),
        // Only 2000::/3 was ever allocated. Addresses outside it are reserved, but a form that
        // embeds an IPv4 address is judged by that address.
        None if within(Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3) => None,
        None if is_translation(address) => None,
        None => Some(RESERVED),
    }
}

/// Returns whether an address outside of 2000::/3 only embeds an IPv4 address.
fn is_translation(address: Ipv6Addr) -> bool {
    matches!(
        address.segments(),
        [0, 0, 0, 0, 0, 0, _, _]
            | [0, 0, 0, 0, 0, 0xffff, _, _]
            | [0, 0, 0, 0, 0xffff, 0, _, _]
            | [0x64, 0xff9b, 0, 0, 0, 0, _, _]
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse()
            .unwrap_or_else(|_| panic!("{text:?} is no address"))
    }

    /// Every way in which an IPv6 address can embed an IPv4 one.
    fn forms(carried: Ipv4Addr) -> Vec<IpAddr> {
        let [a, b, c, d] = carried.octets();
        let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        [
            Ipv6Addr::new(0, 0, 0, 0, 0, 0, high, low),
            Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, high, low),
            Ipv6Addr::new(0, 0, 0, 0, 0xffff, 0, high, low),
            Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
            Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 0),
            Ipv6Addr::new(0x2002, high, low, 1, 2, 3, 4, 5),
            // Teredo through a public server, and the server itself.
            Ipv6Addr::new(0x2001, 0, 0x0808, 0x0808, 0x8000, 0x1234, !high, !low),
            Ipv6Addr::new(0x2001, 0, high, low, 0x8000, 0x1234, !0x0808, !0x0808),
            Ipv6Addr::new(0x2a00, 1, 2, 3, 0, 0x5efe, high, low),
            Ipv6Addr::new(0x2a00, 1, 2, 3, 0x0200, 0x5efe, high, low),
            // ISATAP within the 6to4 prefix of a public address.
            Ipv6Addr::new(0x2002, 0x0808, 0x0808, 0, 0, 0x5efe, high, low),
        ]
        .map(IpAddr::V6)
        .to_vec()
    }

    const SPECIAL: [(&str, &str); 72] = [
        ("0.0.0.0", UNSPECIFIED),
        ("0.0.0.1", "an address of this network"),
        ("0.255.255.255", "an address of this network"),
        ("10.0.0.0", PRIVATE),
        ("10.255.255.255", PRIVATE),
        ("100.64.0.0", "an address shared behind a carrier's NAT"),
        (
            "100.127.255.255",
            "an address shared behind a carrier's NAT",
        ),
        ("100.100.100.200", METADATA),
        ("127.0.0.0", LOOPBACK),
        ("127.0.0.1", LOOPBACK),
        ("127.255.255.255", LOOPBACK),
        ("168.63.129.16", METADATA),
        ("169.254.0.0", LINK_LOCAL),
        ("169.254.169.254", METADATA),
        ("169.254.170.2", LINK_LOCAL),
        ("169.254.255.255", LINK_LOCAL),
        ("172.16.0.0", PRIVATE),
        ("172.31.255.255", PRIVATE),
        ("192.0.0.0", PROTOCOL),
        ("192.0.0.192", PROTOCOL),
        ("192.0.0.255", PROTOCOL),
        ("192.0.2.0", DOCUMENTATION),
        ("192.0.2.255", DOCUMENTATION),
        ("192.88.99.1", "the address of a 6to4 relay"),
        ("192.168.0.0", PRIVATE),
        ("192.168.255.255", PRIVATE),
        ("198.18.0.0", BENCHMARKING),
        ("198.19.255.255", BENCHMARKING),
        ("198.51.100.7", DOCUMENTATION),
        ("203.0.113.7", DOCUMENTATION),
        ("224.0.0.0", MULTICAST),
        ("239.255.255.255", MULTICAST),
        ("240.0.0.0", RESERVED),
        ("255.255.255.254", RESERVED),
        ("255.255.255.255", "the broadcast address"),
        ("::", UNSPECIFIED),
        ("::1", LOOPBACK),
        ("::2", "an address of this network"),
        ("64:ff9b:1::", "an address of a local NAT64 translator"),
        (
            "64:ff9b:1::8.8.8.8",
            "an address of a local NAT64 translator",
        ),
        (
            "64:ff9b:1:ffff:ffff:ffff:ffff:ffff",
            "an address of a local NAT64 translator",
        ),
        ("64:ff9b:2::1", RESERVED),
        ("64:ff9b::1:8.8.8.8", RESERVED),
        ("::1:0:8.8.8.8", RESERVED),
        ("100::", "an address that discards everything"),
        (
            "100::ffff:ffff:ffff:ffff",
            "an address that discards everything",
        ),
        ("100:0:0:1::1", RESERVED),
        ("200::1", RESERVED),
        ("1fff:ffff::1", RESERVED),
        ("2001:1::1", PROTOCOL),
        ("2001:2::1", BENCHMARKING),
        ("2001:10::1", PROTOCOL),
        ("2001:20::1", PROTOCOL),
        ("2001:1ff:ffff::1", PROTOCOL),
        ("2001:db8::", DOCUMENTATION),
        ("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", DOCUMENTATION),
        ("3ffe::1", RESERVED),
        ("3fff::1", DOCUMENTATION),
        ("3fff:fff:ffff::1", DOCUMENTATION),
        ("4000::1", RESERVED),
        ("5f00::1", "a segment routing identifier"),
        ("fc00::1", PRIVATE),
        ("fd00:ec2::254", METADATA),
        ("fd20:ce::254", METADATA),
        ("fdff:ffff::1", PRIVATE),
        ("fe00::1", RESERVED),
        ("fe80::1", LINK_LOCAL),
        ("febf:ffff::1", LINK_LOCAL),
        ("fec0::1", "a site-local address"),
        ("feff:ffff::1", "a site-local address"),
        ("ff02::1", MULTICAST),
        ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", MULTICAST),
    ];

    /// The control: neighbours of special ranges, and well-known hosts.
    const ORDINARY: [&str; 34] = [
        "1.0.0.0",
        "1.1.1.1",
        "8.8.8.8",
        "9.255.255.255",
        "11.0.0.0",
        "100.63.255.255",
        "100.128.0.0",
        "126.255.255.255",
        "128.0.0.0",
        "168.63.129.15",
        "168.63.129.17",
        "169.253.255.255",
        "169.255.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "191.255.255.255",
        "192.0.1.0",
        "192.0.3.0",
        "192.88.98.255",
        "192.167.255.255",
        "192.169.0.0",
        "198.17.255.255",
        "198.20.0.0",
        "198.51.101.0",
        "203.0.114.0",
        "223.255.255.255",
        "2000::1",
        "2001:200::1",
        "2001:4860:4860::8888",
        "2001:db7:ffff::1",
        "2001:db9::1",
        "2606:4700:4700::1111",
        "2a00:1450:4001:81b::200e",
        "3fff:1000::1",
    ];

    #[test]
    fn every_special_address_is_recognised() {
        for (text, reason) in SPECIAL {
            assert_eq!(special(address(text)), Some(reason), "{text}");
        }
    }

    #[test]
    fn ordinary_addresses_are_not_special() {
        for text in ORDINARY {
            assert_eq!(special(address(text)), None, "{text}");
            assert_eq!(unwrap(address(text)), address(text), "{text}");
        }
    }

    #[test]
    fn a_special_address_is_recognised_in_every_ipv6_form() {
        for (text, _) in SPECIAL {
            let IpAddr::V4(carried) = address(text) else {
                continue;
            };
            for form in forms(carried) {
                assert!(special(form).is_some(), "{text} as {form}");
            }
        }
    }

    #[test]
    fn an_ordinary_address_stays_ordinary_in_every_ipv6_form() {
        for text in ORDINARY {
            let IpAddr::V4(carried) = address(text) else {
                continue;
            };
            for form in forms(carried) {
                assert_eq!(special(form), None, "{text} as {form}");
            }
        }
    }

    #[test]
    fn one_address_is_the_same_in_all_its_spellings() {
        for text in [
            "::ffff:169.254.169.254",
            "::FFFF:a9fe:a9fe",
            "0:0:0:0:0:ffff:a9fe:a9fe",
            "0000:0000:0000:0000:0000:FFFF:A9FE:A9FE",
            "::169.254.169.254",
            "::ffff:0:169.254.169.254",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b::169.254.169.254",
            "64:ff9b:1::169.254.169.254",
            "64:ff9b:1:a9fe:a9:fe00::",
            "2002:a9fe:a9fe::",
            "2002:a9fe:a9fe::1",
            "2001:0:4136:e378:8000:63bf:5601:5601",
            "fe80::5efe:169.254.169.254",
            "fe80::200:5efe:a9fe:a9fe",
        ] {
            assert_eq!(unwrap(address(text)), address("169.254.169.254"), "{text}");
            assert!(special(address(text)).is_some(), "{text}");
        }
    }

    #[test]
    fn what_carries_nothing_is_left_as_it_is() {
        for text in [
            "::",
            "::1",
            "10.0.0.1",
            "2001:db8::1",
            "2a00:1450::5eff:a00:1",
            "fe80::1",
            "64:ff9b:0:1::a00:1",
            "2003:a00:1::",
        ] {
            assert_eq!(unwrap(address(text)), address(text));
        }
    }

    #[test]
    fn both_addresses_in_a_tunnel_are_looked_at() {
        // A private server with a public client; the endpoint is the client.
        let teredo = address("2001:0:a00:1:8000:63bf:f7f7:f7f7");
        assert_eq!(unwrap(teredo), address("8.8.8.8"));
        assert_eq!(special(teredo), Some(PRIVATE));
        // ISATAP with a public endpoint, within the 6to4 prefix of a private router.
        let nested = address("2002:a00:1::5efe:8.8.8.8");
        assert_eq!(unwrap(nested), address("8.8.8.8"));
        assert_eq!(special(nested), Some(PRIVATE));
        // ISATAP within Teredo: the client's bits, read without inversion, are a loopback address.
        let tunnel = address("2001:0:808:808:0:5efe:7f00:1");
        assert_eq!(unwrap(tunnel), address("128.255.255.254"));
        assert_eq!(special(tunnel), Some(LOOPBACK));
        // The control: public on both sides.
        assert_eq!(special(address("2002:808:404::5efe:8.8.8.8")), None);
    }

    fn anywhere_or_in_a_special_range() -> impl Strategy<Value = Ipv4Addr> {
        let within = (0..SPECIAL_V4.len(), any::<u32>()).prop_map(|(place, bits)| {
            let (network, length, _) = SPECIAL_V4[place];
            Ipv4Addr::from_bits(network.to_bits() | bits.checked_shr(length).unwrap_or(0))
        });
        prop_oneof![any::<u32>().prop_map(Ipv4Addr::from_bits), within]
    }

    proptest! {
        #[test]
        fn no_form_hides_what_is_special(carried in anywhere_or_in_a_special_range()) {
            let verdict = special(carried.into());
            for form in forms(carried) {
                prop_assert_eq!(
                    special(form).is_some(), verdict.is_some(), "{} as {}", carried, form
                );
            }
        }

        #[test]
        fn the_table_agrees_with_the_standard_library(bits: u32, wide: u128) {
            let address = Ipv4Addr::from_bits(bits);
            let known = address.is_private() || address.is_loopback() || address.is_link_local()
                || address.is_broadcast() || address.is_documentation() || address.is_multicast()
                || address.is_unspecified();
            prop_assert!(!known || special(address.into()).is_some());
            let address = Ipv6Addr::from_bits(wide);
            let known = address.is_loopback() || address.is_multicast() || address.is_unspecified()
                || address.is_unique_local() || address.is_unicast_link_local();
            prop_assert!(!known || special(address.into()).is_some());
            prop_assert_eq!(unwrap(unwrap(address.into())), unwrap(address.into()));
        }
    }
}
