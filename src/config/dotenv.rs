//! Files of `KEY=VALUE` lines.
//!
//! ```text
//! # a comment
//! export NAME=value            # a comment after a blank
//! QUOTED="two words\nand a new line"
//! LITERAL='nothing is special $HERE'
//! ```
//!
//! A dollar sign is literal: `${OTHER}` is never replaced. Code in a sandbox can write the `.env`
//! of its workspace, and a replacement would let it read any variable of the server at the next
//! start.

/// Why a file could not be parsed as `KEY=VALUE` lines. It never contains a value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct DotenvError {
    pub line: usize,
    pub why: &'static str,
}

/// Parses all entries in order; of several entries with one name, the last takes precedence.
pub(super) fn parse(text: &str) -> Result<Vec<(String, String)>, DotenvError> {
    text.trim_start_matches('\u{feff}')
        .lines()
        .enumerate()
        .filter_map(|(index, line)| {
            entry(line)
                .map_err(|why| DotenvError {
                    line: index + 1,
                    why,
                })
                .transpose()
        })
        .collect()
}

fn entry(line: &str) -> Result<Option<(String, String)>, &'static str> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return Ok(None);
    }
    let line = line.strip_prefix("export ").map_or(line, str::trim_start);
    let (name, written) = line.split_once('=').ok_or("there is no \"=\"")?;
    let name = name.trim_end();
    if !is_variable_name(name) {
        return Err(
            "the name before \"=\" must be letters, digits and \"_\", and not start with a digit",
        );
    }
    Ok(Some((name.to_owned(), value(written.trim_start())?)))
}

fn value(written: &str) -> Result<String, &'static str> {
    let (value, rest) = match written.chars().next() {
        Some('\'') => written[1..]
            .split_once('\'')
            .map(|(value, rest)| (value.to_owned(), rest))
            .ok_or(UNCLOSED)?,
        Some('"') => double_quoted(&written[1..])?,
        _ => {
            let end = if written.starts_with('#') {
                Some(0)
            } else {
                written.find(" #").or_else(|| written.find("\t#"))
            };
            (
                written[..end.unwrap_or(written.len())]
                    .trim_end()
                    .to_owned(),
                "",
            )
        }
    };
    let rest = rest.trim_start();
    if rest.is_empty() || rest.starts_with('#') {
        Ok(value)
    } else {
        Err("there is text after the closing quote")
    }
}

const UNCLOSED: &str = "the quote is not closed on the same line";

fn double_quoted(written: &str) -> Result<(String, &str), &'static str> {
    let mut value = String::new();
    let mut letters = written.char_indices();
    while let Some((position, letter)) = letters.next() {
        match letter {
            '"' => return Ok((value, &written[position + 1..])),
            '\\' => match letters.next().ok_or(UNCLOSED)?.1 {
                'n' => value.push('\n'),
                'r' => value.push('\r'),
                't' => value.push('\t'),
                escaped @ ('"' | '\\' | '$' | '\'') => value.push(escaped),
                other => value.extend(['\\', other]),
            },
            _ => value.push(letter),
        }
    }
    Err(UNCLOSED)
}

/// Returns whether `name` is a valid name of an environment variable.
pub(super) fn is_variable_name(name: &str) -> bool {
    name.starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '_')
        && name
            .chars()
            .all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, name: &str, value: &str) {
        assert_eq!(
            parse(line),
            Ok(vec![(name.to_owned(), value.to_owned())]),
            "{line:?}"
        );
    }

    #[test]
    fn entries_are_read_as_they_are_written() {
        check("A=1", "A", "1");
        check("  export A=1  ", "A", "1");
        check("A = 1", "A", "1");
        check("A=", "A", "");
        check("A=x=y", "A", "x=y");
        check("A=two words # a comment", "A", "two words");
        check("A=a#b", "A", "a#b");
        check("A=# only a comment", "A", "");
        check("A='x # y' # a comment", "A", "x # y");
        check(r#"A="x\ty\n\"z\" \\ \d""#, "A", "x\ty\n\"z\" \\ \\d");
        check("\u{feff}A=1", "A", "1");
        check("A=1\r\n", "A", "1");
    }

    #[test]
    fn a_dollar_sign_is_never_replaced() {
        // PATH is set wherever tests run, so a replacement would be detected.
        check("A=$PATH", "A", "$PATH");
        check("A=\"${PATH}\"", "A", "${PATH}");
        check("A='${PATH}'", "A", "${PATH}");
    }

    #[test]
    fn comments_and_empty_lines_are_skipped_and_order_is_kept() {
        let entries = parse("# first\n\nA=1\n   # second\nB=2\nA=3\n").unwrap();
        assert_eq!(
            entries
                .iter()
                .map(|(name, value)| format!("{name}{value}"))
                .collect::<Vec<_>>(),
            ["A1", "B2", "A3"]
        );
    }

    #[test]
    fn broken_lines_are_named_by_number_and_without_their_value() {
        for (text, line) in [
            ("A=1\nsecret", 2),
            ("A=\"secret", 1),
            ("\n\nA='secret", 3),
            ("1A=secret", 1),
            ("A='x' secret", 1),
        ] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.line, line, "{text:?}");
            assert!(!error.to_string().contains("secret"));
        }
    }

    proptest::proptest! {
        #[test]
        fn reading_never_panics(text in "(?s).{0,80}") {
            let _ = parse(&text);
        }

        #[test]
        fn a_single_quoted_value_is_read_back(value in "[^'\r\n\0]{0,40}") {
            proptest::prop_assert_eq!(
                parse(&format!("A='{value}'")),
                Ok(vec![("A".to_owned(), value)])
            );
        }
    }
}
