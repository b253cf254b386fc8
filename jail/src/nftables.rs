//! One nftables table, written without their library: redirects all connections of a namespace to
//! one port.

use std::io;
use std::net::Ipv6Addr;

use crate::netlink::{Netlink, NetlinkMessage};

// Attribute numbers from the kernel's header `nf_tables.h`.
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_TYPE: u16 = 7;
const NFTA_HOOK_HOOKNUM: u16 = 1;
const NFTA_HOOK_PRIORITY: u16 = 2;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_EXPRESSIONS: u16 = 4;
const NFTA_LIST_ELEM: u16 = 1;
const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
const NFTA_CMP_SREG: u16 = 1;
const NFTA_CMP_OP: u16 = 2;
const NFTA_CMP_DATA: u16 = 3;
const NFTA_DATA_VALUE: u16 = 1;
const NFTA_DATA_VERDICT: u16 = 2;
const NFTA_VERDICT_CODE: u16 = 1;
const NFTA_META_DREG: u16 = 1;
const NFTA_META_KEY: u16 = 2;
const NFTA_PAYLOAD_DREG: u16 = 1;
const NFTA_PAYLOAD_BASE: u16 = 2;
const NFTA_PAYLOAD_OFFSET: u16 = 3;
const NFTA_PAYLOAD_LEN: u16 = 4;
const NFTA_IMMEDIATE_DREG: u16 = 1;
const NFTA_IMMEDIATE_DATA: u16 = 2;
const NFTA_REDIR_REG_PROTO_MIN: u16 = 1;

/// Redirects connections to any address except loopback to this port.
pub(crate) fn redirect_everything_to(port: u16) -> io::Result<()> {
    const TABLE: &[u8] = b"cellblock\0";
    const CHAIN: &[u8] = b"out\0";
    let new = |kind: i32, flags: i32| {
        let mut message = NetlinkMessage::new(
            (libc::NFNL_SUBSYS_NFTABLES << 8) as u16 | kind as u16,
            flags | libc::NLM_F_CREATE,
        );
        message.bytes(&[libc::NFPROTO_INET as u8, libc::NFNETLINK_V0 as u8, 0, 0]);
        message
    };
    let batch = |kind: u16| {
        let mut message = NetlinkMessage::new(kind, 0);
        message.bytes(&[libc::AF_UNSPEC as u8, libc::NFNETLINK_V0 as u8]);
        message.bytes(&(libc::NFNL_SUBSYS_NFTABLES as u16).to_be_bytes());
        message
    };

    let mut table = new(libc::NFT_MSG_NEWTABLE, 0);
    table.attribute(NFTA_TABLE_NAME, TABLE);

    let mut chain = new(libc::NFT_MSG_NEWCHAIN, 0);
    chain.attribute(NFTA_CHAIN_TABLE, TABLE);
    chain.attribute(NFTA_CHAIN_NAME, CHAIN);
    chain.nested(NFTA_CHAIN_HOOK, |hook| {
        hook.attribute(
            NFTA_HOOK_HOOKNUM,
            &(libc::NF_INET_LOCAL_OUT as u32).to_be_bytes(),
        );
        hook.attribute(NFTA_HOOK_PRIORITY, &libc::NF_IP_PRI_NAT_DST.to_be_bytes());
    });
    chain.attribute(NFTA_CHAIN_TYPE, b"nat\0");

    let rule = |write: &dyn Fn(&mut NetlinkMessage)| {
        let mut rule = new(libc::NFT_MSG_NEWRULE, libc::NLM_F_APPEND);
        rule.attribute(NFTA_RULE_TABLE, TABLE);
        rule.attribute(NFTA_RULE_CHAIN, CHAIN);
        rule.nested(NFTA_RULE_EXPRESSIONS, |expressions| write(expressions));
        rule
    };
    // 127.0.0.0/8 and ::1 belong to the session: offset and length of the destination, or of its
    // first byte.
    let own_v4 = rule(&|rule| {
        same_meta(rule, libc::NFT_META_NFPROTO, &[libc::NFPROTO_IPV4 as u8]);
        same_header(rule, 16, &[127]);
        verdict(rule, libc::NF_ACCEPT);
    });
    let own_v6 = rule(&|rule| {
        same_meta(rule, libc::NFT_META_NFPROTO, &[libc::NFPROTO_IPV6 as u8]);
        same_header(rule, 24, &Ipv6Addr::LOCALHOST.octets());
        verdict(rule, libc::NF_ACCEPT);
    });
    let others = rule(&|rule| {
        same_meta(rule, libc::NFT_META_L4PROTO, &[libc::IPPROTO_TCP as u8]);
        redirect(rule, port);
    });
    let begin = batch(libc::NFNL_MSG_BATCH_BEGIN as u16);
    let end = batch(libc::NFNL_MSG_BATCH_END as u16);
    Netlink::open(libc::NETLINK_NETFILTER)?
        .transact(&[begin, table, chain, own_v4, own_v6, others, end])
}

/// The register that rules load and compare.
const NFT_REG_1: u32 = libc::NFT_REG_1 as u32;

fn expression(rule: &mut NetlinkMessage, name: &[u8], write: impl FnOnce(&mut NetlinkMessage)) {
    rule.nested(NFTA_LIST_ELEM, |element| {
        element.attribute(NFTA_EXPR_NAME, name);
        element.nested(NFTA_EXPR_DATA, write);
    });
}

fn compare(rule: &mut NetlinkMessage, value: &[u8]) {
    expression(rule, b"cmp\0", |data| {
        data.attribute(NFTA_CMP_SREG, &NFT_REG_1.to_be_bytes());
        data.attribute(NFTA_CMP_OP, &(libc::NFT_CMP_EQ as u32).to_be_bytes());
        data.nested(NFTA_CMP_DATA, |inner| {
            inner.attribute(NFTA_DATA_VALUE, value)
        });
    });
}

fn same_meta(rule: &mut NetlinkMessage, key: i32, value: &[u8]) {
    expression(rule, b"meta\0", |data| {
        data.attribute(NFTA_META_DREG, &NFT_REG_1.to_be_bytes());
        data.attribute(NFTA_META_KEY, &(key as u32).to_be_bytes());
    });
    compare(rule, value);
}

fn same_header(rule: &mut NetlinkMessage, offset: u32, value: &[u8]) {
    expression(rule, b"payload\0", |data| {
        data.attribute(NFTA_PAYLOAD_DREG, &NFT_REG_1.to_be_bytes());
        data.attribute(
            NFTA_PAYLOAD_BASE,
            &(libc::NFT_PAYLOAD_NETWORK_HEADER as u32).to_be_bytes(),
        );
        data.attribute(NFTA_PAYLOAD_OFFSET, &offset.to_be_bytes());
        data.attribute(NFTA_PAYLOAD_LEN, &(value.len() as u32).to_be_bytes());
    });
    compare(rule, value);
}

fn verdict(rule: &mut NetlinkMessage, code: i32) {
    expression(rule, b"immediate\0", |data| {
        data.attribute(
            NFTA_IMMEDIATE_DREG,
            &(libc::NFT_REG_VERDICT as u32).to_be_bytes(),
        );
        data.nested(NFTA_IMMEDIATE_DATA, |inner| {
            inner.nested(NFTA_DATA_VERDICT, |verdict| {
                verdict.attribute(NFTA_VERDICT_CODE, &code.to_be_bytes());
            });
        });
    });
}

fn redirect(rule: &mut NetlinkMessage, port: u16) {
    expression(rule, b"immediate\0", |data| {
        data.attribute(NFTA_IMMEDIATE_DREG, &NFT_REG_1.to_be_bytes());
        data.nested(NFTA_IMMEDIATE_DATA, |inner| {
            inner.attribute(NFTA_DATA_VALUE, &port.to_be_bytes());
        });
    });
    expression(rule, b"redir\0", |data| {
        data.attribute(NFTA_REDIR_REG_PROTO_MIN, &NFT_REG_1.to_be_bytes())
    });
}
