//! The program `cellblock`: the server, and, under arguments of their own, the guardian of its jail and what opens doors in containers.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    // Both need a single thread, so this comes before any runtime.
    match std::env::args_os().nth(1) {
        Some(argument) if argument == cellblock_jail::guardian::ARGUMENT => cellblock_jail::guardian::main(),
        Some(argument) if argument == cellblock_jail::doors::ARGUMENT => cellblock_jail::doors::main(),
        _ => cellblock::app::main(),
    }
}
