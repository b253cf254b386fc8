//! Attempts that must fail, each beside a control that shows that the attempt works where nothing
//! forbids it.
//!
//! A test here tries the forbidden operation and looks at the exact answer; none carries an
//! exploit. Controls run outside of any sandbox (`native::outside`), or in one with a single layer
//! left out.
//!
//! Cases run in every place, natively and in containers of each engine. What a place does otherwise
//! is written beside the expectation, with its reason. Attacks on what only one of them has are
//! tests of that place alone: `programs`, `warm_interpreter`, half of `branching` and some of
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
