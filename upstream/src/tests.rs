//! Tests with whole servers: programs, HTTP, and the registry.

mod programs;
mod registry;
mod web;
