//! The channel to the Python inside a sandbox, as `runner/PROTOCOL.md` describes it.
//!
//! Bytes become events in four steps. `frame` splits the channel's bytes into frames. `claim`
//! parses a frame into a typed value and bounds every field in it. `merge` puts the two pipes and
//! the frames into one order. `connection` reads and writes. Messages from the host are `request`s.
//!
//! All input here comes from a process that the user's code controls. This module therefore makes
//! no decisions: it yields claims and text, or reports a protocol error. It never waits for an
//! action that the inside has promised.

mod claim;
mod connection;
mod frame;
mod merge;
mod request;

pub use claim::{
    Branched, Bundle, Changes, Claim, ClaimedCommand, ClaimedError, ClaimedFile, ClaimedLate,
    ClaimedVariable, CopiedFiles, CopyReport, DoneClaim, FileFailure, HostCall, MAX_LISTED,
    OutputPipes,
};
pub use connection::{Connection, ConnectionError, RunnerEvent};
pub use frame::{FrameError, MAX_FRAME_BYTES, encode};
pub use merge::Pipe;
pub use request::{HostCallAnswer, ModuleFile, Request};
