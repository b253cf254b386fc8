//! The way out of a sandbox.
//!
//! A session's network namespace is a dead end in which every address is local. Sockets that were made inside it listen here, on the host; so
//! whatever a program inside connects to, by whatever means, ends up in this crate, which decides by name.
//!
//! ```text
//!  rules      what may be reached                 name, address   what a name is, which addresses are special
//!  dns        questions from inside               names           addresses that stand for names
//!  hello      what a TLS client says first        http            plain HTTP, request by request
//!  resolve    the true addresses of a name        dial            the one place that opens connections
//!  secrets    values that never go inside         authority, terminate   HTTPS that ends here so that they can be put in place
//!  gateway    one session's way out: all of it together
//! ```
//!
//! Everything that a program inside says is untrusted. The pure parts (rules, names, addresses, the first bytes of TLS) know nothing of sockets.

pub mod address;
pub mod authority;
mod dial;
mod dns;
pub mod gateway;
mod hello;
mod http;
pub mod name;
mod names;
pub mod resolve;
pub mod rules;
pub mod secrets;
mod terminate;
