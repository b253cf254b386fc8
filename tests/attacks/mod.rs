//! Attempts that must fail, each beside a control that shows that the attempt works where nothing
//! forbids it.
//!
//! A test here tries the forbidden operation and checks the exact result; none contains an exploit.
//! Controls run outside of any sandbox (`native::outside`), or in one with a single layer left out.
//!
//! Cases run on every backend, natively and in containers of each engine. Differences of a backend
//! are written beside the expectation, with the reason. Attacks on features of a single backend are
//! tests of that backend alone: `programs`, `warm_interpreter`, half of `branching` and some of
//! `walls` natively, `introductions` in containers. `answers` goes through the whole server.

mod answers;
mod branching;
mod introductions;
mod lies;
mod limits;
mod neighbours;
pub(crate) mod programs;
mod system_calls;
mod twin;
mod walls;
mod warm_interpreter;
