//! Shell commands of sessions whose code may not start programs: the request, how it is shown, and
//! the program that runs.
//!
//! All of this is one value, `ShellCommand`. It is made once from the claims of the code and never
//! changes. The decision is made about its texts, and the program is launched from the same value.
//! Changes that the code makes meanwhile, to its memory or to its variables, have no effect.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::time::Duration;

use crate::runner_client::ClaimedCommand;

/// Limit in bytes for a line, or for all words together. The kernel accepts no line longer than 128
/// KiB.
const MAX_COMMAND_LENGTH: usize = 100_000;
/// Limit in bytes for the input of a command.
const MAX_INPUT_LENGTH: usize = 1024 * 1024;
/// Limits for changed variables: their number, and their bytes.
const MAX_VARIABLES: usize = 256;
const MAX_VARIABLES_LENGTH: usize = 64 * 1024;
/// Limit in bytes for a folder; the kernel accepts no longer ones.
const MAX_FOLDER_LENGTH: usize = 4096;
/// A longer timeout is ignored.
const MAX_TIMEOUT: f64 = 30.0 * 24.0 * 3600.0;

/// Shells for command lines; the first one that exists is used. Absolute paths, because a variable
/// of the session must not choose the shell.
const SHELLS: [&str; 2] = ["/bin/bash", "/bin/sh"];

/// A complete command.
#[derive(Debug, Clone, PartialEq)]
pub struct ShellCommand {
    form: Form,
    input: Option<String>,
    folder: String,
    /// Whether that is the default folder of commands, which is not shown.
    is_usual_folder: bool,
    environment: Vec<(String, Option<String>)>,
    pub timeout: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Form {
    /// For the shell.
    Line(String),
    Words(Vec<String>),
}

/// An invalid command, which can neither be decided about nor run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnfitCommand {
    #[error("there is nothing to run")]
    Empty,
    #[error("the {what} of the command is longer than {most} bytes")]
    TooLong { what: &'static str, most: usize },
    #[error("the {what} of the command holds a NUL character")]
    Nul { what: &'static str },
    #[error("a variable has no proper name")]
    VariableName,
}

impl ShellCommand {
    /// Accepts the claims of the code, if they are within limits. `usual_folder` is the default
    /// folder of commands in its session.
    pub fn new(claimed: ClaimedCommand, usual_folder: &str) -> Result<ShellCommand, UnfitCommand> {
        let ClaimedCommand {
            line,
            words,
            input,
            folder,
            environment,
            timeout,
            ..
        } = claimed;
        let form = match line {
            Some(line) => Form::Line(line),
            None => Form::Words(words),
        };
        let texts: Vec<&str> = match &form {
            Form::Line(line) => vec![line],
            Form::Words(words) => words.iter().map(String::as_str).collect(),
        };
        if texts.first().is_none_or(|first| first.trim().is_empty()) {
            return Err(UnfitCommand::Empty);
        }
        check("text", texts.into_iter(), MAX_COMMAND_LENGTH)?;
        check("input", input.as_deref().into_iter(), MAX_INPUT_LENGTH)?;
        check(
            "folder",
            std::iter::once(folder.as_str()),
            MAX_FOLDER_LENGTH,
        )?;
        let variables = || {
            environment
                .iter()
                .flat_map(|(name, value)| [name.as_str(), value.as_deref().unwrap_or("")])
        };
        check("environment", variables(), MAX_VARIABLES_LENGTH)?;
        if environment.len() > MAX_VARIABLES {
            return Err(UnfitCommand::TooLong {
                what: "environment",
                most: MAX_VARIABLES_LENGTH,
            });
        }
        if environment
            .keys()
            .any(|name| name.is_empty() || name.contains('='))
        {
            return Err(UnfitCommand::VariableName);
        }
        let timeout = timeout.filter(|seconds| seconds.is_finite() && *seconds < MAX_TIMEOUT);
        let timeout = timeout.map(|seconds| Duration::from_secs_f64(seconds.max(0.0)));
        let is_usual_folder = folder == usual_folder;
        let environment = environment.into_iter().collect();
        Ok(ShellCommand {
            form,
            input,
            folder,
            is_usual_folder,
            environment,
            timeout,
        })
    }

    /// Returns how the code made the request, for policy rules: `!`, `%%bash`, `%%perl -w`,
    /// `subprocess`.
    pub fn kind(&self) -> String {
        match (&self.form, &self.input) {
            (Form::Line(_), _) => "!".to_owned(),
            (Form::Words(words), Some(_)) => format!("%%{}", quoted(words)),
            (Form::Words(_), None) => "subprocess".to_owned(),
        }
    }

    /// Returns the complete command as one text: the line, the words or the script.
    ///
    /// If it starts outside the working folder, or with other variables than a fresh session has,
    /// the text is an equivalent command that states this. Two commands have the same kind and text
    /// only if they do the same.
    pub fn text(&self) -> String {
        let differs = !self.is_usual_folder || !self.environment.is_empty();
        match (&self.form, &self.input) {
            (Form::Line(line), None) if !differs => line.clone(),
            (Form::Words(words), None) if !differs => quoted(words),
            (Form::Words(_), Some(input)) if !differs => input.clone(),
            (form, input) => {
                let mut text = self.circumstances();
                match form {
                    Form::Line(line) => text.push_str(&quoted(&[
                        SHELLS[0].to_owned(),
                        "-c".to_owned(),
                        line.clone(),
                    ])),
                    Form::Words(words) => text.push_str(&quoted(words)),
                }
                if let Some(input) = input {
                    let end = unused_word(input);
                    let _ = write!(
                        text,
                        " <<'{end}'\n{input}{}{end}",
                        if input.ends_with('\n') { "" } else { "\n" }
                    );
                }
                text
            }
        }
    }

    /// Returns folder and variables as an `env` command.
    fn circumstances(&self) -> String {
        let mut words = vec!["env".to_owned()];
        if !self.is_usual_folder {
            words.extend(["-C".to_owned(), self.folder.clone()]);
        }
        words.extend(
            self.environment
                .iter()
                .filter(|(_, value)| value.is_none())
                .map(|(name, _)| format!("-u{name}")),
        );
        let set = self
            .environment
            .iter()
            .filter_map(|(name, value)| Some((name, value.as_ref()?)));
        words.extend(set.map(|(name, value)| format!("{name}={value}")));
        if words.len() == 1 {
            String::new()
        } else {
            quoted(&words) + " "
        }
    }

    /// Returns the programs to try in order, until one exists.
    pub(super) fn programs(&self) -> Vec<Vec<String>> {
        match &self.form {
            Form::Line(line) => SHELLS
                .map(|shell| vec![shell.to_owned(), "-c".to_owned(), line.clone()])
                .into(),
            Form::Words(words) => vec![words.clone()],
        }
    }

    pub(super) fn input(&self) -> Option<&[u8]> {
        self.input.as_deref().map(str::as_bytes)
    }

    pub(super) fn folder(&self) -> &str {
        &self.folder
    }

    pub(super) fn environment(&self) -> &[(String, Option<String>)] {
        &self.environment
    }
}

fn check<'a>(
    what: &'static str,
    texts: impl Iterator<Item = &'a str>,
    most: usize,
) -> Result<(), UnfitCommand> {
    let mut total = 0;
    for text in texts {
        total += text.len() + 1;
        if total > most {
            return Err(UnfitCommand::TooLong { what, most });
        }
        if text.contains('\0') {
            return Err(UnfitCommand::Nul { what });
        }
    }
    Ok(())
}

/// Returns words quoted for a shell.
fn quoted(words: &[String]) -> String {
    let plain = |text: &str| {
        !text.is_empty()
            && text
                .chars()
                .all(|sign| sign.is_ascii_alphanumeric() || "_-./=:,@%+".contains(sign))
    };
    let words = words.iter().map(|word| match word.as_str() {
        word if plain(word) => word.to_owned(),
        word => format!("'{}'", word.replace('\'', r"'\''")),
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Returns a word that is not a line of the text: `END` with the smallest number of underscores
/// that is unused.
fn unused_word(text: &str) -> String {
    let underscores = |line: &str| {
        let rest = line.strip_prefix("END")?;
        rest.bytes().all(|byte| byte == b'_').then_some(rest.len())
    };
    let used: HashSet<usize> = text.lines().filter_map(underscores).collect();
    let unused = (0..)
        .find(|count| !used.contains(count))
        .expect("a text has fewer lines than there are numbers");
    format!("END{}", "_".repeat(unused))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const USUAL_FOLDER: &str = "/work";

    fn made(claimed: ClaimedCommand) -> Result<ShellCommand, UnfitCommand> {
        ShellCommand::new(claimed, USUAL_FOLDER)
    }

    fn line(text: &str) -> ClaimedCommand {
        ClaimedCommand {
            line: Some(text.to_owned()),
            folder: USUAL_FOLDER.to_owned(),
            ..ClaimedCommand::default()
        }
    }

    fn script(words: &[&str], body: &str) -> ClaimedCommand {
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        ClaimedCommand {
            words,
            input: Some(body.to_owned()),
            folder: USUAL_FOLDER.to_owned(),
            ..ClaimedCommand::default()
        }
    }

    fn with(
        mut claimed: ClaimedCommand,
        folder: &str,
        variables: &[(&str, Option<&str>)],
    ) -> ClaimedCommand {
        claimed.folder = folder.to_owned();
        let variables = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.map(str::to_owned)));
        claimed.environment = variables.collect::<BTreeMap<_, _>>();
        claimed
    }

    fn shown(claimed: ClaimedCommand) -> (String, String) {
        let command = made(claimed).unwrap();
        (command.kind(), command.text())
    }

    #[test]
    fn a_command_is_shown_as_it_was_written() {
        assert_eq!(
            shown(line("ls -l | wc")),
            ("!".to_owned(), "ls -l | wc".to_owned())
        );
        assert_eq!(
            shown(script(&["bash"], "ls\n")),
            ("%%bash".to_owned(), "ls\n".to_owned())
        );
        assert_eq!(
            shown(script(&["perl", "-w"], "1;\n")),
            ("%%perl -w".to_owned(), "1;\n".to_owned())
        );
        let list = ClaimedCommand {
            input: None,
            ..script(&["git", "log", "-n 1"], "")
        };
        assert_eq!(
            shown(list),
            ("subprocess".to_owned(), "git log '-n 1'".to_owned())
        );
    }

    #[test]
    fn another_folder_and_other_variables_are_part_of_what_is_shown() {
        let changed = &[("PATH", Some("/tmp/my bin")), ("HOME", None)];
        let (kind, text) = shown(with(line("ls"), "/tmp", changed));
        assert_eq!(
            (kind.as_str(), text.as_str()),
            ("!", "env -C /tmp -uHOME 'PATH=/tmp/my bin' /bin/bash -c ls")
        );
        let (_, text) = shown(with(line("it's"), "/tmp", &[]));
        assert_eq!(text, r"env -C /tmp /bin/bash -c 'it'\''s'");
        let (kind, text) = shown(with(
            script(&["bash"], "ls\nEND\n"),
            USUAL_FOLDER,
            &[("A", Some("1"))],
        ));
        assert_eq!(
            (kind.as_str(), text.as_str()),
            ("%%bash", "env A=1 bash <<'END_'\nls\nEND\nEND_")
        );
    }

    #[test]
    fn the_word_that_ends_a_script_is_no_line_of_it() {
        for (text, word) in [
            ("", "END"),
            ("END", "END_"),
            ("ENDE\nEND_x\n END", "END"),
            ("END__\nEND\n", "END_"),
            ("END_\r\nEND\n", "END__"),
        ] {
            assert_eq!(unused_word(text), word, "{text:?}");
        }
        // As many as fit into the largest input. One pass finds the word; a pass for each word
        // would take a second.
        let all = |count: usize| {
            (0..count)
                .map(|count| format!("END{}\n", "_".repeat(count)))
                .collect::<String>()
        };
        let text = all(1400);
        assert!(text.len() < MAX_INPUT_LENGTH);
        assert_eq!(unused_word(&text), format!("END{}", "_".repeat(1400)));
    }

    #[test]
    fn the_usual_folder_is_that_of_the_session() {
        let shown = |usual: &str| {
            ShellCommand::new(with(line("ls"), "/forks/2", &[]), usual)
                .unwrap()
                .text()
        };
        assert_eq!(shown("/forks/2"), "ls");
        assert_eq!(shown(USUAL_FOLDER), "env -C /forks/2 /bin/bash -c ls");
    }

    #[test]
    fn what_runs_is_what_is_shown() {
        let command = made(with(line("ls"), "/tmp", &[("A", Some("1")), ("B", None)])).unwrap();
        let shells = [["/bin/bash", "-c", "ls"], ["/bin/sh", "-c", "ls"]];
        assert_eq!(command.programs(), shells);
        assert_eq!((command.folder(), command.input()), ("/tmp", None));
        let variables = [
            ("A".to_owned(), Some("1".to_owned())),
            ("B".to_owned(), None),
        ];
        assert_eq!(command.environment(), variables);
        let command = made(script(&["perl", "-w"], "1;")).unwrap();
        assert_eq!(
            (command.programs(), command.input()),
            (vec![vec!["perl".into(), "-w".into()]], Some(&b"1;"[..]))
        );
    }

    #[test]
    fn what_is_too_long_or_cannot_be_run_is_refused_whole() {
        let refused = |claimed| made(claimed).unwrap_err();
        let long = "x".repeat(MAX_COMMAND_LENGTH);
        assert!(matches!(
            refused(line(&long)),
            UnfitCommand::TooLong { what: "text", .. }
        ));
        assert!(made(line(&long[1..])).is_ok(), "control");
        assert_eq!(refused(line("a\0b")), UnfitCommand::Nul { what: "text" });
        assert_eq!(refused(line(" ")), UnfitCommand::Empty);
        assert_eq!(refused(script(&[], "ls")), UnfitCommand::Empty);
        assert!(matches!(
            refused(script(&["sh"], &"x".repeat(MAX_INPUT_LENGTH))),
            UnfitCommand::TooLong { what: "input", .. }
        ));
        assert_eq!(
            refused(with(line("ls"), "/a\0", &[])),
            UnfitCommand::Nul { what: "folder" }
        );
        assert_eq!(
            refused(with(line("ls"), "/", &[("A=B", Some("1"))])),
            UnfitCommand::VariableName
        );
        assert_eq!(
            refused(with(line("ls"), "/", &[("", None)])),
            UnfitCommand::VariableName
        );
        let names: Vec<String> = (0..=MAX_VARIABLES)
            .map(|number| format!("V{number}"))
            .collect();
        let many: Vec<_> = names.iter().map(|name| (name.as_str(), None)).collect();
        assert!(matches!(
            refused(with(line("ls"), "/", &many)),
            UnfitCommand::TooLong {
                what: "environment",
                ..
            }
        ));
        assert!(made(with(line("ls"), "/", &many[1..])).is_ok(), "control");
    }

    #[test]
    fn a_senseless_time_limit_is_none() {
        let limit = |timeout| {
            made(ClaimedCommand {
                timeout: Some(timeout),
                ..line("ls")
            })
            .unwrap()
            .timeout
        };
        assert_eq!(limit(1.5), Some(Duration::from_millis(1500)));
        assert_eq!(limit(-1.0), Some(Duration::ZERO));
        for senseless in [f64::NAN, f64::INFINITY, 1e300] {
            assert_eq!(limit(senseless), None);
        }
    }
}
