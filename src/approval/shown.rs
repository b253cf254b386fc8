//! The text that a person reads before deciding. It shows exactly what will run: nothing is omitted
//! silently, and nothing in it is invisible.
//!
//! A character that moves the cursor, changes the writing direction or has no width is shown by its
//! number. Text of several lines is marked line by line, so that it cannot look like text of ours.
//! Text that is too long is truncated, and its size and digest are shown.

use std::fmt::Write as _;

use cellblock_typed::is_unseen;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::Subject;

/// Minimum number of characters shown per subject, however many are asked about together.
const SHORTEST: usize = 300;

impl Subject {
    /// Describes exactly what is about to happen, in about `most` characters.
    pub fn shown(&self, most: usize) -> String {
        self.rendering(most).shown(most)
    }

    /// Prepares a rendering of at most about `longest` characters. This reads the whole subject;
    /// showing it later does not.
    pub fn rendering(&self, longest: usize) -> Rendering {
        let longest = longest.max(SHORTEST);
        match self {
            Subject::Tool {
                server,
                tool,
                arguments,
                ..
            } => {
                let pairs = arguments
                    .iter()
                    .map(|(key, value)| format!("{}={}", key_word(key), json(value)));
                let pairs = pairs.collect::<Vec<_>>().join(", ");
                let opening = format!("{}.{}(", visible(server), visible(tool));
                Rendering {
                    closing: ")",
                    ..Rendering::new(opening, pairs, longest)
                }
            }
            Subject::Shell { command, kind } => {
                let opening = format!("{}\n   | ", visible(kind));
                Rendering {
                    has_lines: true,
                    ..Rendering::new(opening, visible_lines(command), longest)
                }
            }
            Subject::Install { requirements } => {
                let all = requirements
                    .iter()
                    .map(|requirement| quoted(requirement))
                    .collect::<Vec<_>>();
                Rendering::new("install ".to_owned(), all.join(", "), longest)
            }
            Subject::Domain { name, port } => {
                let text = format!("{} at port {port}", visible(name));
                Rendering::new("connect to ".to_owned(), text, longest)
            }
        }
    }
}

/// The rendering of a subject, available in any length up to the one it was made for.
#[derive(Debug, Clone)]
pub struct Rendering {
    opening: String,
    text: Extract,
    closing: &'static str,
    /// Each line is marked.
    has_lines: bool,
}

impl Rendering {
    fn new(opening: String, text: String, longest: usize) -> Rendering {
        Rendering {
            opening,
            text: Extract::new(text, longest),
            closing: "",
            has_lines: false,
        }
    }

    /// Returns the rendering in about `most` characters.
    pub fn shown(&self, most: usize) -> String {
        let text = self.text.cut(most.max(SHORTEST));
        let text = if self.has_lines {
            text.replace('\n', "\n   | ")
        } else {
            text
        };
        format!("{}{text}{}", self.opening, self.closing)
    }
}

/// The beginning and the end of a text, and the digest of all of it.
#[derive(Debug, Clone)]
struct Extract {
    beginning: String,
    end: String,
    length: usize,
    digest: String,
}

impl Extract {
    fn new(text: String, longest: usize) -> Extract {
        let length = text.chars().count();
        let at = |index: usize| {
            text.char_indices()
                .nth(index)
                .map_or(text.len(), |(at, _)| at)
        };
        let end = text[at(length.saturating_sub(longest))..].to_owned();
        let digest = hexadecimal(text.as_bytes());
        Extract {
            beginning: text[..at(longest)].to_owned(),
            end,
            length,
            digest,
        }
    }

    /// Keeps the beginning and the end of a text that is too long, and adds a note with its digest.
    fn cut(&self, most: usize) -> String {
        let Extract {
            beginning,
            end,
            length,
            digest,
        } = self;
        // The text is complete only if the kept beginning is as long as the text.
        if *length <= most && beginning.chars().count() == *length {
            return beginning.clone();
        }
        let (head, tail) = (most * 3 / 4, most / 4);
        let beginning: String = beginning.chars().take(head).collect();
        let end: String = end
            .chars()
            .skip(end.chars().count().saturating_sub(tail))
            .collect();
        let left_out = length.saturating_sub(beginning.chars().count() + end.chars().count());
        format!(
            "{beginning} [… {left_out} of {length} characters are not shown here; SHA-256 of all \
             of them: {digest} …] {end}"
        )
    }
}

/// The digest of a whole subject, for records and for subjects that are too long to be shown.
pub fn digest(subject: &Subject) -> String {
    let whole = match subject {
        Subject::Tool {
            server,
            tool,
            arguments,
            ..
        } => serde_json::json!(["tool", server, tool, arguments]),
        Subject::Shell { command, kind } => serde_json::json!(["shell", kind, command]),
        Subject::Install { requirements } => serde_json::json!(["packages", requirements]),
        Subject::Domain { name, port } => serde_json::json!(["domain", name, port]),
    };
    hexadecimal(whole.to_string().as_bytes())
}

fn hexadecimal(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

/// Shows a text on one line. Every ambiguous or invisible character, including line ends, is shown
/// by its number.
pub fn visible(text: &str) -> String {
    escaped(text, is_unseen)
}

fn visible_lines(text: &str) -> String {
    escaped(text, |letter| is_unseen(letter) && letter != '\n')
}

fn escaped(text: &str, hides: impl Fn(char) -> bool) -> String {
    text.chars()
        .fold(String::with_capacity(text.len()), |mut shown, letter| {
            if hides(letter) {
                let _ = write!(shown, "\\u{{{:x}}}", u32::from(letter));
            } else {
                shown.push(letter);
            }
            shown
        })
}

/// A text in double quotes, valid in both JSON and YAML. Invisible characters are escaped by
/// number.
pub(super) fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for letter in text.chars() {
        match letter {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            letter if is_unseen(letter) => {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    let _ = write!(quoted, "\\u{unit:04x}");
                }
            }
            letter => quoted.push(letter),
        }
    }
    quoted.push('"');
    quoted
}

/// A value as JSON in which every character is visible.
fn json(value: &Value) -> String {
    match value {
        Value::String(text) => quoted(text),
        Value::Array(items) => format!(
            "[{}]",
            items.iter().map(json).collect::<Vec<_>>().join(", ")
        ),
        Value::Object(members) => {
            let members = members
                .iter()
                .map(|(key, value)| format!("{}: {}", quoted(key), json(value)));
            format!("{{{}}}", members.collect::<Vec<_>>().join(", "))
        }
        plain => plain.to_string(),
    }
}

fn key_word(key: &str) -> String {
    let plain = !key.is_empty()
        && key
            .chars()
            .all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
    if plain { key.to_owned() } else { quoted(key) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn tool(arguments: Value) -> Subject {
        let arguments = arguments.as_object().cloned().unwrap_or_default();
        Subject::Tool {
            server: "github".to_owned(),
            tool: "create_issue".to_owned(),
            arguments,
            fingerprint: None,
        }
    }

    #[test]
    fn a_call_is_shown_with_all_its_arguments() {
        let text =
            tool(json!({"title": "a \"b\"", "labels": ["x", 1, null], "more-of": {"k": true}}))
                .shown(1000);
        assert_eq!(
            text,
            r#"github.create_issue(labels=["x", 1, null], "more-of"={"k": true}, title="a \"b\"")"#
        );
    }

    #[test]
    fn a_command_of_several_lines_cannot_look_like_words_of_ours() {
        let command = "ls\n2. harmless\r\u{1b}[2Kecho".to_owned();
        let shown = Subject::Shell {
            command,
            kind: "%%bash".to_owned(),
        }
        .shown(1000);
        assert_eq!(
            shown,
            "%%bash\n   | ls\n   | 2. harmless\\u{d}\\u{1b}[2Kecho"
        );
    }

    #[test]
    fn packages_and_domains_are_shown_as_they_are() {
        let requirements = vec!["numpy>=2".to_owned(), "a @ https://b/c\u{200b}".to_owned()];
        assert_eq!(
            Subject::Install { requirements }.shown(1000),
            r#"install "numpy>=2", "a @ https://b/c\u200b""#
        );
        let domain = Subject::Domain {
            name: "example.com".to_owned(),
            port: 443,
        };
        assert_eq!(domain.shown(1000), "connect to example.com at port 443");
    }

    #[test]
    fn what_is_too_long_is_cut_with_its_size_and_digest() {
        let long = |end: &str| tool(json!({"text": format!("{}{end}", "x".repeat(10_000))}));
        let shown = long("a").shown(1000);
        assert!(shown.chars().count() < 1300, "{}", shown.len());
        assert!(
            shown.contains("of 10008 characters are not shown here; SHA-256"),
            "{shown}"
        );
        assert!(shown.ends_with("a\")"));
        // Control: a difference that is not shown is in the digest.
        let middle = |letter: &str| {
            tool(json!({"text": format!("{}{letter}{}", "x".repeat(5000), "x".repeat(5000))}))
                .shown(1000)
        };
        assert_ne!(middle("a"), middle("b"));
    }

    #[test]
    fn a_rendering_shows_in_every_length_what_the_subject_shows() {
        let short = tool(json!({"text": "a"}));
        let shell = Subject::Shell {
            command: "line\n".repeat(500),
            kind: "!".to_owned(),
        };
        for subject in [short, shell, tool(json!({"text": "é".repeat(7000)}))] {
            let rendering = subject.rendering(6000);
            for most in [10, 300, 301, 1000, 6000] {
                assert_eq!(rendering.shown(most), subject.shown(most), "{most}");
            }
        }
    }

    #[test]
    fn two_subjects_of_the_same_words_have_two_digests() {
        let shell = Subject::Shell {
            command: "a".to_owned(),
            kind: "b".to_owned(),
        };
        let other = Subject::Shell {
            command: "b".to_owned(),
            kind: "a".to_owned(),
        };
        assert_ne!(digest(&shell), digest(&other));
        assert_eq!(digest(&shell), digest(&shell.clone()));
    }

    proptest! {
        #[test]
        fn nothing_that_is_shown_hides_or_breaks_the_line(text in any::<String>()) {
            let shown = tool(json!({"a": text.clone(), text.clone(): [text.clone()]})).shown(4000);
            prop_assert!(!shown.chars().any(is_unseen), "{:?}", shown);
            prop_assert!(!visible(&text).chars().any(is_unseen));
        }

        #[test]
        fn a_quoted_text_is_json_for_the_same_text(text in any::<String>()) {
            prop_assert_eq!(serde_json::from_str::<String>(&quoted(&text)).unwrap(), text);
        }
    }
}
