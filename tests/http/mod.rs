//! The HTTP service under clients that are slow, rude, many, or suddenly gone.
//!
//! `faults` has one bad client at a time, on a clock that stands still until nothing else can happen. `load` has many, against the
//! built program, whose memory and descriptors are counted.

pub(crate) mod client;
mod faults;
mod load;
