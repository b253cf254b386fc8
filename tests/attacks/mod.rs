//! Attempts that must fail, each beside a control that shows that the attempt works where nothing forbids it.
//!
//! A test here tries the forbidden operation and looks at the exact answer; none carries an exploit. Controls run outside of any sandbox
//! (`native::outside`), or in one with a single layer left out.

mod answers;
mod branching;
mod lies;
mod limits;
mod neighbours;
pub(crate) mod programs;
mod system_calls;
mod walls;
mod warm_interpreter;
