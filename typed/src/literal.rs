//! Literals: text from a schema as Python source, in which it is only ever data.
//!
//! Every character that is not plainly visible is written as an escape (`unseen` has the list). So
//! the source means what it looks like.

use serde_json::Value;

use crate::layout::Code;
use crate::unseen::is_unseen;

/// Length limit of a description. The rest is cut off, because an agent reads it.
const MAX_DESCRIPTION_LENGTH: usize = 8 * 1024;

/// Returns `text` as a string literal on one line.
pub(crate) fn string(text: &str) -> String {
    let mut literal = String::with_capacity(text.len() + 2);
    literal.push('"');
    for character in text.chars() {
        match character {
            '"' => literal.push_str("\\\""),
            '\n' => literal.push_str("\\n"),
            '\t' => literal.push_str("\\t"),
            _ => push_escaped(&mut literal, character),
        }
    }
    literal.push('"');
    literal
}

/// Returns a JSON value as an expression.
pub(crate) fn value(value: &Value) -> Code {
    match value {
        Value::Null => Code::text("None"),
        Value::Bool(true) => Code::text("True"),
        Value::Bool(false) => Code::text("False"),
        // JSON numbers are valid Python numbers.
        Value::Number(number) => Code::text(number.to_string()),
        Value::String(text) => Code::text(string(text)),
        Value::Array(items) => Code::list("[", items.iter().map(self::value).collect(), "]"),
        Value::Object(members) => {
            let member = |(key, member): (&String, &Value)| {
                Code::after(format!("{}: ", string(key)), self::value(member))
            };
            Code::list("{", members.iter().map(member).collect(), "}")
        }
    }
}

/// Returns a description as a docstring in the usual form.
pub(crate) fn described(text: &str, indent: usize, width: usize) -> String {
    docstring(&cleaned(text), indent, width)
}

/// Returns the source lines of a docstring, indented by `indent` spaces and wrapped before column
/// `width`.
///
/// Words are not changed. Lines that are too long are broken at spaces.
pub(crate) fn docstring(text: &str, indent: usize, width: usize) -> String {
    // The first line begins with quotation marks.
    let lines = wrapped(text, width.saturating_sub(indent + 3));
    let margin = " ".repeat(indent);
    let body: Vec<String> = lines.iter().map(|line| escaped_line(line)).collect();
    match body.as_slice() {
        [] => format!("{margin}\"\"\"\"\"\"\n"),
        [only] if indent + only.chars().count() + 6 <= width => {
            format!("{margin}\"\"\"{only}\"\"\"\n")
        }
        [first, rest @ ..] => {
            let mut text = format!("{margin}\"\"\"{first}\n");
            for line in rest {
                text += &if line.is_empty() {
                    "\n".to_owned()
                } else {
                    format!("{margin}{line}\n")
                };
            }
            text + &format!("{margin}\"\"\"\n")
        }
    }
}

/// Returns a description in the usual form of a docstring: without margins, trailing spaces, and
/// blank lines at its ends, and within the length limit.
pub(crate) fn cleaned(text: &str) -> String {
    let cut: String = text.chars().take(MAX_DESCRIPTION_LENGTH).collect();
    let cut = if cut.len() < text.len() {
        cut + " …"
    } else {
        cut
    };
    let cut = cut.replace("\r\n", "\n").replace('\t', "    ");
    let lines: Vec<&str> = cut.split('\n').map(str::trim_end).collect();
    let margin_of = |line: &&str| line.len() - line.trim_start_matches(' ').len();
    let margin = lines
        .iter()
        .skip(1)
        .filter(|line| !line.is_empty())
        .map(margin_of)
        .min()
        .unwrap_or(0);
    let without_margin = |(at, line): (usize, &&str)| match at {
        0 => line.trim_start().to_owned(),
        _ => line.get(margin..).unwrap_or_default().to_owned(),
    };
    let lines: Vec<String> = lines.iter().enumerate().map(without_margin).collect();
    lines
        .join("\n")
        .trim_matches('\n')
        .trim_start()
        .trim_end()
        .to_owned()
}

/// Returns a summary from the beginning of a description: its first sentence or line, within `most`
/// characters.
pub(crate) fn summary(text: &str, most: usize) -> String {
    let cleaned = cleaned(text);
    let line = cleaned.lines().next().unwrap_or_default();
    let sentence = line
        .split_inclusive(". ")
        .next()
        .unwrap_or_default()
        .trim_end();
    if sentence.chars().count() <= most {
        return sentence.to_owned();
    }
    let cut: String = sentence.chars().take(most.saturating_sub(1)).collect();
    let at_a_word = cut.rfind(' ').map_or(cut.as_str(), |space| &cut[..space]);
    format!("{}…", at_a_word.trim_end_matches([',', ' ', ';', ':']))
}

/// Breaks lines at spaces so that they fit, where possible. The continuation of a list item is
/// indented under its text.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for line in text.split('\n') {
        if line.chars().count() <= width {
            lines.push(line.to_owned());
            continue;
        }
        let words = line.trim_start_matches(' ');
        let item = if words.starts_with("- ") || words.starts_with("* ") {
            2
        } else {
            0
        };
        let margin = " ".repeat((line.len() - words.len() + item).min(width / 2));
        let mut current = line[..line.len() - words.len()].to_owned();
        let mut is_empty = true;
        for word in words.split(' ') {
            if !is_empty && current.chars().count() + 1 + word.chars().count() > width {
                lines.push(current.trim_end().to_owned());
                current = margin.clone();
                is_empty = true;
            }
            if !is_empty {
                current.push(' ');
            }
            current.push_str(word);
            is_empty = false;
        }
        lines.push(current.trim_end().to_owned());
    }
    lines
}

/// Escapes one line of a docstring. A quotation mark stays unescaped only between two other
/// characters.
fn escaped_line(line: &str) -> String {
    let letters: Vec<char> = line.chars().collect();
    let is_other = |place: Option<usize>| {
        place
            .and_then(|place| letters.get(place))
            .is_some_and(|letter| *letter != '"')
    };
    let mut text = String::with_capacity(line.len());
    for (place, letter) in letters.iter().enumerate() {
        if *letter == '"' && !(is_other(place.checked_sub(1)) && is_other(Some(place + 1))) {
            text.push('\\');
        }
        push_escaped(&mut text, *letter);
    }
    text
}

fn push_escaped(text: &mut String, character: char) {
    match character {
        '\\' => text.push_str("\\\\"),
        '\r' => text.push_str("\\r"),
        _ if !is_unseen(character) => text.push(character),
        _ => {
            let number = u32::from(character);
            text.push_str(&match number {
                0..=0xff => format!("\\x{number:02x}"),
                0x100..=0xffff => format!("\\u{number:04x}"),
                _ => format!("\\U{number:08x}"),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_string_is_one_literal_whatever_it_holds() {
        assert_eq!(string("a\"b\\c\nd\te\rf\0"), r#""a\"b\\c\nd\te\rf\x00""#);
        assert_eq!(string("zażółć 🐍"), "\"zażółć 🐍\""); // Control: visible text stays readable.
    }

    #[test]
    fn what_cannot_be_seen_is_written_as_an_escape() {
        assert_eq!(
            string("a\u{202e}b\u{200b}\u{feff}\u{e0041}"),
            r#""a\u202eb\u200b\ufeff\U000e0041""#
        );
    }

    #[test]
    fn no_text_ends_a_docstring() {
        for (text, expected) in [
            ("plain", "\"\"\"plain\"\"\"\n"),
            ("a \"word\" here", "\"\"\"a \"word\" here\"\"\"\n"),
            (
                "ends with a \"quote\"",
                "\"\"\"ends with a \"quote\\\"\"\"\"\n",
            ),
            ("\"begins", "\"\"\"\\\"begins\"\"\"\n"),
            (
                "x\"\"\"\nimport os",
                "\"\"\"x\\\"\\\"\\\"\nimport os\n\"\"\"\n",
            ),
            ("back\\", "\"\"\"back\\\\\"\"\"\n"),
            ("\"", "\"\"\"\\\"\"\"\"\n"),
            ("\\\"", "\"\"\"\\\\\\\"\"\"\"\n"),
        ] {
            assert_eq!(docstring(text, 0, 100), expected, "{text}");
        }
    }

    #[test]
    fn long_lines_are_broken_at_spaces_and_short_ones_stay() {
        let text = "one two three four\n- five six seven eight\nnine";
        assert_eq!(
            wrapped(text, 12),
            [
                "one two",
                "three four",
                "- five six",
                "  seven",
                "  eight",
                "nine"
            ]
        );
    }

    #[test]
    fn a_description_loses_its_margin_and_blank_ends() {
        assert_eq!(
            cleaned("\n  First.\n\n    Args:\n      x: one  \n  \n"),
            "First.\n\n  Args:\n    x: one"
        );
    }

    #[test]
    fn a_summary_is_the_first_sentence() {
        assert_eq!(summary("Reads a file. It must exist.", 60), "Reads a file.");
        assert_eq!(
            summary("Reads a file of any size whatsoever", 20),
            "Reads a file of…"
        );
    }
}
