//! `cellblock audit`: verifies logs and prints their records.
//!
//! The printed values came from callers. They are JSON-escaped, so they can neither move the cursor
//! nor start a line.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::cli::{AuditCommand, ShowArguments, VerifyArguments};
use crate::audit::plain_json;
use crate::audit::verify::{Known, Line, Lines, Report, verify};

/// Executes the command. A log that was altered gives exit status 1; a log that cannot be read is
/// an error.
pub(super) fn execute(command: AuditCommand, output: &mut impl Write) -> anyhow::Result<ExitCode> {
    match command {
        AuditCommand::Verify(arguments) => execute_verify(&arguments, output),
        AuditCommand::Show(arguments) => show(&arguments, output).map(|()| ExitCode::SUCCESS),
    }
}

fn execute_verify(
    arguments: &VerifyArguments,
    output: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let known = Known {
        after: arguments.after.clone(),
        last: arguments.last.clone(),
    };
    let report = verify(&arguments.files, &known)?;
    if arguments.json {
        output.write_all(&plain_json(&as_json(&report))?)?;
        output.write_all(b"\n")?;
    } else {
        write_text(&report, output)?;
    }
    Ok(if report.found == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn as_json(report: &Report) -> Value {
    let findings = report.findings.iter().map(|finding| {
        json!({
            "file": finding.file.to_string_lossy(), "line": finding.line, "why": finding.why
        })
    });
    json!({
        "whole": report.found == 0,
        "records": report.records,
        "last": report
            .last
            .as_ref()
            .map(|last| json!({ "sequence": last.sequence, "hash": last.hash })),
        "found": report.found,
        "findings": findings.collect::<Vec<_>>(),
    })
}

fn write_text(report: &Report, output: &mut impl Write) -> anyhow::Result<()> {
    for finding in &report.findings {
        writeln!(
            output,
            "{}:{}: {}",
            finding.file.display(),
            finding.line,
            finding.why
        )?;
    }
    let more = report.found - report.findings.len() as u64;
    if more > 0 {
        writeln!(output, "… and {more} more")?;
    }
    match &report.last {
        Some(last) if report.found == 0 => {
            writeln!(
                output,
                "{} records are as they were written; the last is {}:{}",
                report.records, last.sequence, last.hash
            )?;
        }
        _ => writeln!(output, "The log is not as it was written.")?,
    }
    Ok(())
}

fn show(arguments: &ShowArguments, output: &mut impl Write) -> anyhow::Result<()> {
    for path in &arguments.files {
        show_file(path, arguments, output)?;
    }
    Ok(())
}

fn show_file(
    path: &Path,
    arguments: &ShowArguments,
    output: &mut impl Write,
) -> anyhow::Result<()> {
    let unreadable = || format!("could not read {}", path.display());
    let mut lines = Lines::open(path).with_context(unreadable)?;
    let mut number = 0;
    while let Some(line) = lines.next_line().with_context(unreadable)? {
        number += 1;
        let no_record = || format!("{} line {number} is no record", path.display());
        let Line::Whole(line) = line else {
            bail!(no_record())
        };
        let record: Value = serde_json::from_slice(&line).with_context(no_record)?;
        if !is_wanted(&record, arguments) {
            continue;
        }
        if !arguments.json {
            write_row(&record, output)?;
        } else if std::str::from_utf8(&line).is_ok_and(|line| !line.contains(char::is_control)) {
            output.write_all(&line)?;
        } else {
            output.write_all(&plain_json(&record)?)?;
        }
        output.write_all(b"\n")?;
    }
    Ok(())
}

fn is_wanted(record: &Value, arguments: &ShowArguments) -> bool {
    let is = |name: &str, wanted: &Option<String>| {
        wanted
            .as_ref()
            .is_none_or(|wanted| record[name] == wanted.as_str())
    };
    is("principal", &arguments.principal)
        && is("session", &arguments.session)
        && is("kind", &arguments.kind)
}

/// Writes a record as one row: the most wanted fields first, then the details.
fn write_row(record: &Value, output: &mut impl Write) -> anyhow::Result<()> {
    let bare = |name: &str| {
        record[name]
            .as_str()
            .unwrap_or("-")
            .escape_debug()
            .to_string()
    };
    output.write_all(&plain_json(&record["sequence"])?)?;
    write!(
        output,
        " {} {} {}",
        bare("time"),
        bare("kind"),
        bare("decision")
    )?;
    for name in ["rule", "principal", "session", "request", "details"] {
        if !record[name].is_null() {
            write!(output, " {name}=")?;
            output.write_all(&plain_json(&record[name])?)?;
        }
    }
    Ok(())
}
