//! Any bytes as the first of a TLS client, in any pieces and records: the reader never fails, a
//! verdict stays, and where records are cut does not matter.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;

// The reader is private to its crate; its file needs nothing of the rest.
#[path = "../../egress/src/hello.rs"]
#[allow(dead_code)]
mod hello;

use hello::{Hello, MAX_HELLO_BYTES, read};

#[derive(Arbitrary, Debug)]
struct Input {
    bytes: Vec<u8>,
    /// Extensions of a hello that is otherwise right.
    extensions: Vec<(Kind, Vec<u8>)>,
    fragments: (u8, u8),
    name: Vec<u8>,
}

#[derive(Arbitrary, Debug)]
enum Kind {
    ServerName,
    EncryptedHello,
    Other(u16),
}

fuzz_target!(|input: Input| {
    stays(&input.bytes);

    let extensions: Vec<u8> = input
        .extensions
        .iter()
        .flat_map(|(kind, content)| extension(kind, content))
        .collect();
    let Some(message) = client_hello(&extensions) else { return };
    let (one, two) = (records(&message, input.fragments.0), records(&message, input.fragments.1));
    stays(&one);
    if one.len() <= MAX_HELLO_BYTES && two.len() <= MAX_HELLO_BYTES {
        assert_eq!(read(&one), read(&two));
        assert_ne!(read(&one), Hello::Incomplete);
    }

    // A name that was put in comes out.
    let name: Vec<u8> = input.name.iter().take(255).map(|byte| b'!' + byte % 94).collect();
    if !name.is_empty() {
        let length = |extra: usize| {
            u16::try_from(name.len() + extra).expect("it is short").to_be_bytes()
        };
        let content = [&length(3)[..], &[0], &length(0), &name].concat();
        let message = client_hello(&extension(&Kind::ServerName, &content)).expect("it is short");
        let Hello::Client(client) = read(&records(&message, input.fragments.0)) else {
            panic!("a good hello is refused")
        };
        assert_eq!(client.server_name.map(String::into_bytes), Some(name));
        assert!(!client.has_encrypted_hello);
    }
});

/// Reads every beginning of the bytes. Once there is a verdict, it is the last one.
fn stays(bytes: &[u8]) {
    let mut verdict = Hello::Incomplete;
    for length in 0..=bytes.len() {
        let next = read(&bytes[..length]);
        assert!(verdict == Hello::Incomplete || verdict == next, "{verdict:?} became {next:?}");
        verdict = next;
        if let Hello::Client(client) = &verdict {
            assert!(
                client.server_name.iter().all(
                    |name| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic())
                )
            );
        }
    }
    assert!(bytes.len() < MAX_HELLO_BYTES || verdict != Hello::Incomplete);
}

fn extension(kind: &Kind, content: &[u8]) -> Vec<u8> {
    let kind = match kind {
        Kind::ServerName => 0,
        Kind::EncryptedHello => 0xfe0d,
        Kind::Other(kind) => *kind,
    };
    let content = &content[..content.len().min(300)];
    let length = u16::try_from(content.len()).expect("it is short");
    [&kind.to_be_bytes()[..], &length.to_be_bytes(), content].concat()
}

/// A handshake message with these extensions, unless they are too long for one.
fn client_hello(extensions: &[u8]) -> Option<Vec<u8>> {
    let length = u16::try_from(extensions.len()).ok().filter(|length| *length < 8_000)?;
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 1, 1, 0]);
    body.extend(length.to_be_bytes());
    body.extend(extensions);
    let size = u32::try_from(body.len()).ok()?.to_be_bytes();
    Some([&[1, size[1], size[2], size[3]], &body[..]].concat())
}

fn records(message: &[u8], fragment: u8) -> Vec<u8> {
    let piece = |piece: &[u8]| [&[22, 3, 1, 0][..], &[piece.len() as u8], piece].concat();
    message.chunks(usize::from(fragment.max(1))).flat_map(piece).collect()
}
