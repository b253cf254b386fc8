//! The channel to the Python inside a sandbox, as `runner/PROTOCOL.md` describes it.
//!
//! Four steps, from bytes to events. `frame` cuts the channel's bytes into frames. `claim` gives a frame its type and bounds every
//! value in it. `merge` puts the two pipes and the frames into one order. `connection` does the reading and writing.
//!
//! Everything that arrives here was written by a process that the user's code controls, so nothing in this room decides anything: it
//! yields claims and text, or says that the conversation is broken. It never waits for a promise made from inside.

mod claim;
mod connection;
mod frame;
mod merge;

pub use claim::{
    Branched, Bundle, Carried, CarriedFiles, Changes, Claim, ClaimedCommand, ClaimedError,
    ClaimedFile, ClaimedVariable, DoneClaim, MOST_LISTED, Outlets, Question, Trouble,
};
pub use connection::{Connection, ConnectionError, Event};
pub use frame::{FrameError, LARGEST_FRAME, encode};
pub use merge::Pipe;
