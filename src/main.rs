//! The program `cellblock`: the server, and, under arguments of their own, the guardian of its jail, what opens doors in containers, from outside or as a porter, or a server of another maker.

#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    match std::env::args_os().nth(1) {
        // These need a single thread, so they come before any runtime.
        Some(argument) if argument == cellblock_jail::guardian::ARGUMENT => {
            cellblock_jail::guardian::main()
        }
        Some(argument) if argument == cellblock_jail::doors::ARGUMENT => {
            cellblock_jail::doors::main()
        }
        Some(argument) if argument == cellblock_jail::porter::ARGUMENT => {
            cellblock_jail::porter::main()
        }
        // Becomes a server of another maker, which ends with whoever started it.
        Some(argument) if argument == cellblock::app::WRAPPER_ARGUMENT => {
            let error = cellblock_upstream::exec_with_parent(std::env::args_os().skip(2));
            // Standard error may be closed, and then `eprintln!` would panic.
            let _ = writeln!(
                std::io::stderr(),
                "cellblock: the program could not be started: {error}"
            );
            ExitCode::from(127)
        }
        _ => cellblock::app::main(),
    }
}
