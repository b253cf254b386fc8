//! The HTTP service: who may call, what they reach, and clients that are slow, rude, many, or
//! suddenly gone.
//!
//! `callers` are who they say they are and see what is theirs; `files` go in and out; `keeping`
//! kills the server; `ending` asks it to end. `faults` has one bad client at a time, on a clock
//! that stands still until nothing else can happen. `load` has many, against the built program,
//! whose memory and descriptors are counted.

mod callers;
pub(crate) mod client;
mod ending;
mod faults;
mod files;
mod keeping;
mod load;
