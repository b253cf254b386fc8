//! The program `cellblock`: the server, and, under an argument of its own, the guardian of its jail.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    // The guardian needs a single thread, so this comes before any runtime.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == cellblock_jail::guardian::ARGUMENT) {
        return cellblock_jail::guardian::main();
    }
    cellblock::app::main()
}
