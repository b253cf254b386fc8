//! Decodes untrusted JSON within limits.
//!
//!     budget    cost of a text once decoded, computed before anything is decoded
//!     strict    decoding within a budget; values without repeated keys
//!     peek      members of a message of which only the beginning has arrived
//!     worker    decoding of large texts away from the async workers, a few at a time
//!
//! A limit on bytes alone does not bound memory: `{"":0},` is seven bytes on the wire and some 650
//! in memory. So the structure of every text is scanned first (`Budget::check`). The scan allocates
//! nothing, and its result holds for any decoder of the text afterwards: our own types,
//! `serde_json::Value`, or a library.
//!
//! A leaf crate: it does not depend on any protocol. It never panics, whatever the bytes are.

#![forbid(unsafe_code)]

mod budget;
mod peek;
mod strict;
mod worker;

pub use budget::{Budget, Excess, MAX_DEPTH};
pub use peek::{Peeked, peek};
pub use strict::{ReadError, read, read_strict};
pub use worker::{Decoding, decode_now, decoding, is_small};
