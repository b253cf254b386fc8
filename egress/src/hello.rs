//! The ClientHello of a TLS client: the server name it asks for.
//!
//! Reads the records and the ClientHello (RFC 8446 §4.1.2, §5.1; RFC 6066 §3) from the bytes that
//! have arrived so far, without answering and without changing them. The bytes may stop anywhere,
//! and the ClientHello may be spread over several records.
//!
//! The parser is total and strict. A ClientHello that a server could interpret in another way (two
//! server names, a repeated extension, trailing bytes in a message or in its record) is
//! [`Hello::NotTls`], which the gateway refuses: an ambiguous ClientHello never passes as a clear
//! one.
//!
//! Only the first ClientHello is read. Names inside the encrypted part of a connection (HTTP/2
//! `:authority`, for example) are not visible here.

/// Size limit of a whole ClientHello, with record headers. Those with post-quantum keys have less
/// than 3 KiB.
pub(crate) const MAX_HELLO_BYTES: usize = 16 * 1024;

/// The result of parsing the first bytes of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Hello {
    /// The beginning of a ClientHello: more bytes are needed.
    Incomplete,
    /// Not a ClientHello, or one that is malformed, ambiguous or larger than [`MAX_HELLO_BYTES`].
    /// More bytes do not change that.
    NotTls,
    /// A whole ClientHello. More bytes do not change that either.
    Client(ClientHello),
}

/// The relevant parts of a ClientHello.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClientHello {
    /// The host name of the server_name extension, as sent: visible ASCII, but not checked to be a
    /// valid name.
    pub(crate) server_name: Option<String>,
    /// Whether the real name may be in an encrypted ClientHello.
    pub(crate) has_encrypted_hello: bool,
}

/// Reads the ClientHello at the beginning of `bytes`.
pub(crate) fn read(bytes: &[u8]) -> Hello {
    match message(bytes) {
        Ok(message) => match client_hello(&message) {
            Some(hello) => Hello::Client(hello),
            None => Hello::NotTls,
        },
        Err(outcome) => outcome,
    }
}

const HANDSHAKE_RECORD: u8 = 22;
const RECORD_HEADER: usize = 5;
/// The largest payload of one plaintext record (RFC 8446 §5.1).
const MAX_FRAGMENT_BYTES: usize = 1 << 14;

const CLIENT_HELLO: u8 = 1;
const MESSAGE_HEADER: usize = 4;

const SERVER_NAME: u16 = 0;
const HOST_NAME: u8 = 0;

/// Parses the records and returns the body of the first handshake message, which must be a
/// ClientHello.
fn message(bytes: &[u8]) -> Result<Vec<u8>, Hello> {
    let mut gathered = Vec::new();
    let mut rest = bytes.get(..MAX_HELLO_BYTES).unwrap_or(bytes);
    let more = if bytes.len() >= MAX_HELLO_BYTES {
        Hello::NotTls
    } else {
        Hello::Incomplete
    };
    loop {
        // Every available byte is checked, so that bytes that cannot become a ClientHello are
        // rejected at once.
        let header = &rest[..rest.len().min(RECORD_HEADER)];
        let fits = header.first().is_none_or(|kind| *kind == HANDSHAKE_RECORD)
            && header.get(1).is_none_or(|major| *major == 3)
            && header.get(2).is_none_or(|minor| *minor <= 4);
        if !fits {
            return Err(Hello::NotTls);
        }
        let Some((header, behind)) = rest.split_at_checked(RECORD_HEADER) else {
            return Err(more);
        };
        let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if length == 0 || length > MAX_FRAGMENT_BYTES {
            return Err(Hello::NotTls);
        }
        let fragment = &behind[..behind.len().min(length)];
        gathered.extend_from_slice(fragment);
        if gathered.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
            return Err(Hello::NotTls);
        }
        if let Some(size) = gathered.get(1..MESSAGE_HEADER) {
            let size =
                usize::from(size[0]) << 16 | usize::from(size[1]) << 8 | usize::from(size[2]);
            let whole = MESSAGE_HEADER + size;
            // The record that completes the ClientHello must end with it: nothing may follow before
            // the server has answered.
            let announced = gathered.len() - fragment.len() + length;
            if whole > MAX_HELLO_BYTES || announced > whole {
                return Err(Hello::NotTls);
            }
            if gathered.len() == whole {
                gathered.drain(..MESSAGE_HEADER);
                return Ok(gathered);
            }
        }
        if fragment.len() < length {
            return Err(more);
        }
        rest = &behind[length..];
    }
}

/// Parses the body of a ClientHello. Returns `None` if it is malformed.
fn client_hello(body: &[u8]) -> Option<ClientHello> {
    let mut body = Reader(body);
    let [3, _] = body.take(2)? else { return None };
    let _random = body.take(32)?;
    let _session = body.short_vector().filter(|session| session.len() <= 32)?;
    let _suites = body
        .vector()
        .filter(|suites| suites.len() >= 2 && suites.len() % 2 == 0)?;
    let _compression = body.short_vector().filter(|methods| !methods.is_empty())?;
    let mut hello = ClientHello {
        server_name: None,
        has_encrypted_hello: false,
    };
    if body.is_empty() {
        // A client older than TLS 1.3 without extensions.
        return Some(hello);
    }
    let mut extensions = Reader(body.vector()?);
    if !body.is_empty() {
        return None;
    }
    let mut seen = std::collections::HashSet::new();
    while !extensions.is_empty() {
        let kind = extensions.number()?;
        let content = extensions.vector()?;
        if !seen.insert(kind) {
            return None;
        }
        match kind {
            SERVER_NAME => hello.server_name = Some(server_name(content)?),
            kind if is_encrypted_hello(kind) => hello.has_encrypted_hello = true,
            _ => {}
        }
    }
    Some(hello)
}

/// Parses a server_name extension: exactly one entry, which is a host name.
fn server_name(content: &[u8]) -> Option<String> {
    let mut content = Reader(content);
    let mut list = Reader(content.vector()?);
    let [HOST_NAME] = list.take(1)? else {
        return None;
    };
    let name = list.vector()?;
    if !content.is_empty()
        || !list.is_empty()
        || name.is_empty()
        || !name.iter().all(u8::is_ascii_graphic)
    {
        return None;
    }
    String::from_utf8(name.to_vec()).ok()
}

/// Returns whether an extension can contain a name other than the visible one:
/// encrypted_client_hello, its drafts, and encrypted_server_name.
fn is_encrypted_hello(kind: u16) -> bool {
    matches!(kind, 0xfe08..=0xfe0d | 0xffce)
}

/// Reads bytes from the front, never beyond the end.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u16> {
        let bytes = self.take(2)?;
        Some(u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    /// Reads bytes with a one-byte length prefix.
    fn short_vector(&mut self) -> Option<&'a [u8]> {
        let length = self.take(1)?[0];
        self.take(usize::from(length))
    }

    /// Reads bytes with a two-byte length prefix.
    fn vector(&mut self) -> Option<&'a [u8]> {
        let length = self.number()?;
        self.take(usize::from(length))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use rustls::pki_types::ServerName;
    use rustls::server::Acceptor;
    use rustls::{ClientConfig, ClientConnection, RootCertStore};

    use super::*;

    /// A ClientHello of OpenSSL 3.0 for www.example.com, without its padding.
    const OPENSSL: &str = "\
        160301011e0100011a03034c6ded76853de54702c9451d57b6078e6e652252f6f132d746f3f7c756626abd20\
        777b3710bbb951e92114f0892b4b7be3fff705debf4241c9747bbf1eabce5f530024130213031301c02cc030\
        c02bc02fcca9cca8c024c028c023c027009f009e006b006700ff010000ad00000014001200000f7777772e65\
        78616d706c652e636f6d000b000403000102000a00160014001d0017001e0019001801000101010201030104\
        002300000016000000170000000d002a0028040305030603080708080809080a080b08040805080604010501\
        0601030303010302040205020602002b00050403040303002d00020101003300260024001d0020dc18ce50f2\
        d95a028c2b7b5728ac5c3c4c0f1c1fe88b8e8e6ef41f05848fc440";

    /// A ClientHello of rustls, in records of at most `fragment` bytes.
    fn real(
        name: &str,
        versions: &[&'static rustls::SupportedProtocolVersion],
        fragment: Option<usize>,
    ) -> Vec<u8> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .unwrap();
        let mut config = builder
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        config.max_fragment_size = fragment;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        bytes
    }

    fn openssl() -> Vec<u8> {
        let digits: Vec<u8> = OPENSSL.bytes().filter(u8::is_ascii_hexdigit).collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    }

    fn real_ones() -> Vec<Vec<u8>> {
        vec![
            openssl(),
            real("api.example.com", rustls::ALL_VERSIONS, None),
            real("api.example.com", &[&rustls::version::TLS12], None),
            real("api.example.com", &[&rustls::version::TLS13], Some(64)),
            real("192.0.2.7", rustls::ALL_VERSIONS, None),
        ]
    }

    /// The result of a rustls server: whether it accepts the bytes as a whole ClientHello, and for
    /// which name.
    fn second_reading(bytes: &[u8]) -> Option<Option<String>> {
        let mut acceptor = Acceptor::default();
        let mut rest = bytes;
        loop {
            if let Some(accepted) = acceptor.accept().ok()? {
                return Some(accepted.client_hello().server_name().map(str::to_owned));
            }
            if rest.is_empty() || acceptor.read_tls(&mut rest).ok()? == 0 {
                return None;
            }
        }
    }

    fn named(name: &str) -> Hello {
        Hello::Client(ClientHello {
            server_name: Some(name.to_owned()),
            has_encrypted_hello: false,
        })
    }

    fn unnamed() -> Hello {
        Hello::Client(ClientHello {
            server_name: None,
            has_encrypted_hello: false,
        })
    }

    fn vector(content: &[u8]) -> Vec<u8> {
        [
            &u16::try_from(content.len()).unwrap().to_be_bytes()[..],
            content,
        ]
        .concat()
    }

    fn extension(kind: u16, content: &[u8]) -> Vec<u8> {
        [kind.to_be_bytes().to_vec(), vector(content)].concat()
    }

    /// A server_name extension with entries of these types.
    fn names(entries: &[(u8, &[u8])]) -> Vec<u8> {
        let list: Vec<u8> = entries
            .iter()
            .flat_map(|(kind, name)| [vec![*kind], vector(name)].concat())
            .collect();
        extension(SERVER_NAME, &vector(&list))
    }

    fn body(extensions: &[Vec<u8>]) -> Vec<u8> {
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.extend([0, 0, 2, 0x13, 1, 1, 0]);
        body.extend(vector(&extensions.concat()));
        body
    }

    fn message(body: &[u8]) -> Vec<u8> {
        let size = u32::try_from(body.len()).unwrap().to_be_bytes();
        [&[CLIENT_HELLO, size[1], size[2], size[3]], body].concat()
    }

    /// Splits a message into records of at most `fragment` bytes.
    fn records(message: &[u8], fragment: usize) -> Vec<u8> {
        message
            .chunks(fragment)
            .flat_map(|piece| [vec![HANDSHAKE_RECORD, 3, 1], vector(piece)].concat())
            .collect()
    }

    fn hello(extensions: &[Vec<u8>]) -> Vec<u8> {
        records(&message(&body(extensions)), MAX_FRAGMENT_BYTES)
    }

    #[test]
    fn the_name_in_a_real_hello_is_read() {
        assert_eq!(read(&openssl()), named("www.example.com"));
        assert_eq!(
            read(&real("api.example.com", rustls::ALL_VERSIONS, None)),
            named("api.example.com")
        );
        assert_eq!(
            read(&real("api.example.com", &[&rustls::version::TLS12], None)),
            named("api.example.com")
        );
        // A client that connects to an address sends no name.
        assert_eq!(
            read(&real("192.0.2.7", rustls::ALL_VERSIONS, None)),
            unnamed()
        );
    }

    #[test]
    fn a_hello_may_come_in_pieces_and_in_several_records() {
        let whole = read(&openssl());
        for fragment in [32, 64, 100, 16384] {
            let bytes = real(
                "api.example.com",
                rustls::ALL_VERSIONS,
                Some(fragment + RECORD_HEADER),
            );
            assert_eq!(
                read(&bytes),
                named("api.example.com"),
                "records of {fragment} bytes"
            );
        }
        for fragment in [1, 2, 3, 4, 5, 100] {
            let bytes = records(&openssl()[RECORD_HEADER..], fragment);
            assert_eq!(read(&bytes), whole, "records of {fragment} bytes");
            for length in 0..bytes.len() {
                assert_eq!(
                    read(&bytes[..length]),
                    Hello::Incomplete,
                    "the first {length} bytes in records of {fragment} bytes"
                );
            }
        }
    }

    #[test]
    fn what_follows_a_hello_does_not_change_it() {
        let early_data = [
            openssl(),
            vec![20, 3, 3, 0, 1, 1],
            vec![23, 3, 3, 0, 4, 1, 2, 3, 4],
        ]
        .concat();
        assert_eq!(read(&early_data), named("www.example.com"));
        assert_eq!(
            read(&[openssl(), vec![0; 100_000]].concat()),
            named("www.example.com")
        );
    }

    #[test]
    fn an_encrypted_hello_is_noticed() {
        let outer = names(&[(HOST_NAME, b"public.example.com")]);
        for (kind, is_encrypted) in [
            (0xfe0d, true),
            (0xfe0c, true),
            (0xfe08, true),
            (0xffce, true),
            (0xfe0e, false),
            (0x002b, false),
        ] {
            for extensions in [
                [outer.clone(), extension(kind, &[0; 9])],
                [extension(kind, &[]), outer.clone()],
            ] {
                let Hello::Client(client) = read(&hello(&extensions)) else {
                    panic!("it is a hello")
                };
                assert_eq!(client.has_encrypted_hello, is_encrypted, "{kind:#x}");
                assert_eq!(client.server_name.as_deref(), Some("public.example.com"));
            }
        }
    }

    #[test]
    fn a_hello_without_a_name_has_none() {
        assert_eq!(read(&hello(&[])), unnamed());
        assert_eq!(read(&hello(&[extension(0x002b, &[2, 3, 4])])), unnamed());
        // Before TLS 1.3 the extensions could be omitted.
        let short = body(&[]);
        assert_eq!(
            read(&records(&message(&short[..short.len() - 2]), 100)),
            unnamed()
        );
    }

    #[test]
    fn a_server_name_is_exactly_one_host_name() {
        assert_eq!(
            read(&hello(&[names(&[(HOST_NAME, b"a.example")])])),
            named("a.example")
        ); // control
        for extensions in [
            vec![names(&[])],
            vec![names(&[(HOST_NAME, b"")])],
            vec![names(&[
                (HOST_NAME, b"a.example"),
                (HOST_NAME, b"b.example"),
            ])],
            vec![names(&[(HOST_NAME, b"a.example"), (1, b"b.example")])],
            vec![names(&[(1, b"a.example")])],
            vec![
                names(&[(HOST_NAME, b"a.example")]),
                names(&[(HOST_NAME, b"b.example")]),
            ],
            vec![names(&[(HOST_NAME, b"a.example\0.b.example")])],
            vec![names(&[(HOST_NAME, b"a.example ")])],
            vec![names(&[(HOST_NAME, "ä.example".as_bytes())])],
            vec![names(&[(HOST_NAME, b"\xff")])],
            // Lengths that do not match: of the list within its extension, of the name within its
            // list.
            vec![extension(SERVER_NAME, &[])],
            vec![extension(SERVER_NAME, &[0, 5, 0, 0, 1, b'a'])],
            vec![extension(SERVER_NAME, &[0, 4, 0, 0, 1, b'a', 0])],
            vec![extension(SERVER_NAME, &[0, 4, 0, 0, 2, b'a'])],
            vec![extension(SERVER_NAME, &[0, 5, 0, 0, 1, b'a', 0])],
        ] {
            assert_eq!(read(&hello(&extensions)), Hello::NotTls, "{extensions:?}");
        }
    }

    #[test]
    fn an_extension_stands_once() {
        let versions = extension(0x002b, &[2, 3, 4]);
        assert_eq!(read(&hello(std::slice::from_ref(&versions))), unnamed()); // control
        assert_eq!(read(&hello(&[versions.clone(), versions])), Hello::NotTls);
    }

    #[test]
    fn what_is_no_hello_is_not_waited_for() {
        for bytes in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"SSH-2.0-OpenSSH\r\n",
            b"\x80\x2e\x01\x03\x01", // SSL 2
            b"\x16\x02",
            b"\x16\x03\x05",
            b"\x17\x03\x01",
            b"\x15\x03\x01\x00\x02\x02\x28",
            b"\x16\x03\x01\x00\x00",                 // an empty record
            b"\x16\x03\x01\x40\x01",                 // a record above the size limit
            b"\x16\x03\x01\x00\x05\x02",             // a ServerHello
            b"\x16\x03\x01\x10\x00\x01\x01\x00\x00", // a ClientHello of 64 KiB
            b"\x16\x03\x01\x10\x00\x01\x00\x00\x10", // a record that goes on after its ClientHello
        ] {
            assert_eq!(read(bytes), Hello::NotTls, "{bytes:?}");
        }
        assert_eq!(read(b""), Hello::Incomplete);
        assert_eq!(
            read(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"),
            Hello::Incomplete
        ); // control
    }

    #[test]
    fn the_parts_before_the_extensions_keep_their_bounds() {
        let with = |session: usize, suites: &[u8], compression: &[u8]| {
            let mut body = vec![3, 3];
            body.extend([7; 32]);
            body.push(u8::try_from(session).unwrap());
            body.extend(vec![7; session]);
            body.extend(vector(suites));
            body.push(u8::try_from(compression.len()).unwrap());
            body.extend(compression);
            body.extend(vector(&[]));
            read(&records(&message(&body), 16384))
        };
        assert_eq!(with(32, &[0x13, 1], &[0]), unnamed()); // control
        assert_eq!(with(33, &[0x13, 1], &[0]), Hello::NotTls);
        assert_eq!(with(32, &[], &[0]), Hello::NotTls);
        assert_eq!(with(32, &[0x13, 1, 0x13], &[0]), Hello::NotTls);
        assert_eq!(with(32, &[0x13, 1], &[]), Hello::NotTls);
    }

    #[test]
    fn bytes_left_over_spoil_a_hello() {
        let good = body(&[names(&[(HOST_NAME, b"a.example")])]);
        assert_eq!(read(&records(&message(&good), 16384)), named("a.example")); // control
        let longer = [&good[..], &[0]].concat();
        assert_eq!(read(&records(&message(&longer), 16384)), Hello::NotTls);
        let second_message = [message(&good), message(&good)].concat();
        assert_eq!(read(&records(&second_message, 16384)), Hello::NotTls);
        // In a separate record it is not part of the ClientHello.
        let separate = [
            records(&message(&good), 16384),
            records(&message(&good), 16384),
        ]
        .concat();
        assert_eq!(read(&separate), named("a.example"));
    }

    #[test]
    fn another_record_between_the_parts_of_a_hello_spoils_it() {
        let parts = records(&openssl()[RECORD_HEADER..], 100);
        let first = RECORD_HEADER + 100;
        let change_cipher = [20, 3, 3, 0, 1, 1];
        assert_eq!(read(&parts), named("www.example.com")); // control
        assert_eq!(
            read(&[&parts[..first], &change_cipher, &parts[first..]].concat()),
            Hello::NotTls
        );
    }

    #[test]
    fn a_hello_has_at_most_16_kib() {
        let sized = |padding: usize| {
            hello(&[
                names(&[(HOST_NAME, b"a.example")]),
                extension(0x0015, &vec![0; padding]),
            ])
        };
        let overhead = sized(0).len();
        let largest = sized(MAX_HELLO_BYTES - overhead);
        assert_eq!(largest.len(), MAX_HELLO_BYTES);
        assert_eq!(read(&largest), named("a.example"));
        assert_eq!(read(&largest[..MAX_HELLO_BYTES - 1]), Hello::Incomplete);
        assert_eq!(read(&sized(MAX_HELLO_BYTES - overhead + 1)), Hello::NotTls);
        // Spread over tiny records, its headers make it too large. The parser does not wait for
        // more than the limit.
        let spread = records(&largest[RECORD_HEADER..], 1);
        assert_eq!(read(&spread[..MAX_HELLO_BYTES - 1]), Hello::Incomplete);
        assert_eq!(read(&spread[..MAX_HELLO_BYTES]), Hello::NotTls);
    }

    /// One way to corrupt a ClientHello.
    #[derive(Debug, Clone)]
    enum Damage {
        Set(prop::sample::Index, u8),
        Remove(prop::sample::Index),
        Insert(prop::sample::Index, u8),
        Copy(prop::sample::Index, prop::sample::Index, u8),
        Cut(prop::sample::Index),
    }

    fn some_damage() -> impl Strategy<Value = Damage> {
        let value = prop_oneof![any::<u8>(), 0..4u8];
        prop_oneof![
            8 => (any::<prop::sample::Index>(), value.clone())
                .prop_map(|(place, byte)| Damage::Set(place, byte)),
            1 => any::<prop::sample::Index>().prop_map(Damage::Remove),
            1 => (any::<prop::sample::Index>(), value)
                .prop_map(|(place, byte)| Damage::Insert(place, byte)),
            1 => any::<(prop::sample::Index, prop::sample::Index, u8)>()
                .prop_map(|(from, to, count)| Damage::Copy(from, to, count)),
            1 => any::<prop::sample::Index>().prop_map(Damage::Cut),
        ]
    }

    fn damaged(mut bytes: Vec<u8>, damage: &[Damage]) -> Vec<u8> {
        for damage in damage {
            let size = bytes.len();
            if size == 0 {
                break;
            }
            match damage {
                Damage::Set(place, byte) => bytes[place.index(size)] = *byte,
                Damage::Remove(place) => drop(bytes.remove(place.index(size))),
                Damage::Insert(place, byte) => bytes.insert(place.index(size), *byte),
                Damage::Copy(from, to, count) => {
                    let (from, to) = (from.index(size), to.index(size));
                    let count = usize::from(*count).min(size - from.max(to));
                    bytes.copy_within(from..from + count, to);
                }
                Damage::Cut(place) => bytes.truncate(place.index(size)),
            }
        }
        bytes
    }

    /// Checks that a verdict stays the same whatever follows, and that a server that reads the same
    /// bytes does not see another name than we do.
    fn check(bytes: &[u8]) -> Result<(), TestCaseError> {
        let mut verdict = Hello::Incomplete;
        for length in (0..bytes.len())
            .step_by(1 + bytes.len() / 40)
            .chain([bytes.len()])
        {
            let next = read(&bytes[..length]);
            prop_assert!(
                verdict == Hello::Incomplete || verdict == next,
                "{:?} became {:?}",
                verdict,
                next
            );
            verdict = next;
        }
        if let (Hello::Client(client), Some(Some(name))) = (&verdict, second_reading(bytes)) {
            let ours = client.server_name.as_deref().map(str::to_ascii_lowercase);
            prop_assert_eq!(ours, Some(name.to_ascii_lowercase()));
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn a_damaged_hello_is_read_as_a_server_reads_it_or_not_at_all(
            which: prop::sample::Index, damage in proptest::collection::vec(some_damage(), 0..4),
        ) {
            let all = real_ones();
            check(&damaged(all[which.index(all.len())].clone(), &damage))?;
        }

        #[test]
        fn any_bytes_are_read(
            bytes in proptest::collection::vec(any::<u8>(), 0..200), disguised: bool
        ) {
            check(&bytes)?;
            if disguised {
                check(&records(&message(&bytes), 50))?;
            }
        }

        #[test]
        fn any_extensions_are_read(
            extensions in proptest::collection::vec(
                (
                    prop_oneof![Just(0), Just(0xfe0d), any::<u16>()],
                    proptest::collection::vec(prop_oneof![0..16u8, any::<u8>()], 0..20)
                ),
                0..5
            )
        ) {
            let extensions: Vec<_> = extensions
                .iter()
                .map(|(kind, content)| extension(*kind, content))
                .collect();
            check(&hello(&extensions))?;
        }

        #[test]
        fn any_name_is_given_back_unchanged(name in "[!-~]{1,253}", fragment in 1..300usize) {
            let bytes =
                records(&message(&body(&[names(&[(HOST_NAME, name.as_bytes())])])), fragment);
            prop_assert_eq!(read(&bytes), named(&name));
        }
    }

    #[test]
    fn the_second_reader_reads_what_is_whole() {
        // Control for the comparison above: `second_reading` does return names.
        assert_eq!(
            second_reading(&openssl()),
            Some(Some("www.example.com".to_owned()))
        );
        assert_eq!(
            second_reading(&real_ones()[3]),
            Some(Some("api.example.com".to_owned()))
        );
        assert_eq!(second_reading(&openssl()[..100]), None);
    }
}
