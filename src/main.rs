//! The program `cellblock`: the server, and, under an argument of its own, the guardian of its jail or a server of another maker.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    // The guardian needs a single thread, so this comes before any runtime.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == cellblock_jail::guardian::ARGUMENT) {
        return cellblock_jail::guardian::main();
    }
    // Becomes a server of another maker, which ends with whoever started it.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == cellblock::app::WRAPPER_ARGUMENT) {
        let error = cellblock_upstream::exec_with_parent(std::env::args_os().skip(2));
        eprintln!("cellblock: the program could not be started: {error}");
        return ExitCode::from(127);
    }
    cellblock::app::main()
}
