//! All tests that need the real program, in one binary so that it is linked once.
//!
//! `support` holds the mechanics. `contract` runs the same cases on every backend; `posture` and `attacks` look at a session from inside and
//! out; `branching` copies sessions; `stdio`, `cli` and `leaks` use the built program as its users do; `tidy` reads the tree.

mod attacks;
mod branching;
mod cli;
mod contract;
mod leaks;
mod posture;
mod runner;
mod stdio;
mod support;
mod tidy;
