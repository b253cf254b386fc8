//! Entry point of `cellblock`. Runs the server or, selected by a hidden first argument, a helper
//! process: the guardian of the jail, a process that opens listeners in a container's network (from
//! outside, or from a helper container), or a wrapper that becomes an upstream MCP server.

#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    match std::env::args_os().nth(1) {
        // These require a single thread, so they run before any runtime starts.
        Some(argument) if argument == cellblock_jail::guardian::ARGUMENT => {
            cellblock_jail::guardian::main()
        }
        Some(argument) if argument == cellblock_jail::netns_listeners::ARGUMENT => {
            cellblock_jail::netns_listeners::main()
        }
        Some(argument) if argument == cellblock_jail::netns_helper::ARGUMENT => {
            cellblock_jail::netns_helper::main()
        }
        // Becomes an upstream server, which ends together with its parent process.
        Some(argument) if argument == cellblock::app::WRAPPER_ARGUMENT => {
            let error = cellblock_upstream::exec_with_parent(std::env::args_os().skip(2));
            // Standard error may be closed, in which case `eprintln!` would panic.
            let _ = writeln!(
                std::io::stderr(),
                "cellblock: the program could not be started: {error}"
            );
            ExitCode::from(127)
        }
        _ => cellblock::app::main(),
    }
}
