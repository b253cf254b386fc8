//! Network egress of a sandbox.
//!
//! A session's network namespace has no route out: every address in it is local. The listening
//! sockets are created inside the namespace and served here, on the host. So every connection that
//! a program inside makes, by whatever means, arrives in this crate, which decides by host name.
//!
//! ```text
//!  rules       which names, addresses and ports are allowed
//!  name        parsed host names
//!  address     which addresses are special
//!  dns         DNS server for the sandbox
//!  names       addresses that stand for names
//!  hello       the ClientHello of a TLS client
//!  http        plain HTTP, checked request by request
//!  resolve     the real addresses of a name
//!  dial        opens every outgoing connection
//!  secrets     values that never enter the sandbox
//!  authority   the CA that sandboxes trust
//!  terminate   terminates HTTPS so that secrets can be inserted
//!  gateway     the egress of one session: all of these together
//! ```
//!
//! All input from inside is untrusted. The pure parts (rules, names, addresses, the ClientHello) do
//! not use sockets.

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
