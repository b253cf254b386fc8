//! Layout: breaks expressions over lines in the usual Python style.

/// Maximum line length, unless a single literal is longer.
pub(crate) const WIDTH: usize = 100;

/// A piece of source that may be broken at its brackets or bars.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Code {
    Text(String),
    /// Comma-separated items in brackets.
    List {
        open: String,
        items: Vec<Code>,
        close: &'static str,
    },
    /// Alternatives separated by bars.
    Union(Vec<Code>),
    /// A text that stays in front of the following code, such as `default=`.
    After(String, Box<Code>),
}

impl Code {
    pub(crate) fn text(text: impl Into<String>) -> Code {
        Code::Text(text.into())
    }

    pub(crate) fn list(open: impl Into<String>, items: Vec<Code>, close: &'static str) -> Code {
        Code::List {
            open: open.into(),
            items,
            close,
        }
    }

    /// `name[items]`.
    pub(crate) fn subscript(name: &str, items: Vec<Code>) -> Code {
        Code::list(format!("{name}["), items, "]")
    }

    /// `name(items)`.
    pub(crate) fn call(name: &str, items: Vec<Code>) -> Code {
        Code::list(format!("{name}("), items, ")")
    }

    pub(crate) fn after(text: impl Into<String>, code: Code) -> Code {
        Code::After(text.into(), Box::new(code))
    }

    /// Returns the source on one line.
    pub(crate) fn flat(&self) -> String {
        let join = |items: &[Code], separator: &str| {
            items
                .iter()
                .map(Code::flat)
                .collect::<Vec<_>>()
                .join(separator)
        };
        match self {
            Code::Text(text) => text.clone(),
            Code::List { open, items, close } => format!("{open}{}{close}", join(items, ", ")),
            Code::Union(members) => join(members, " | "),
            Code::After(text, code) => text.clone() + &code.flat(),
        }
    }

    /// Returns the source between `before` and `after`, which share its first and last line,
    /// indented by `indent` spaces. `before` is not indented here.
    pub(crate) fn broken(&self, indent: usize, before: &str, after: &str) -> String {
        let flat = format!("{before}{}{after}", self.flat());
        if fits(indent, &flat) {
            return flat;
        }
        let (inner, margin) = (" ".repeat(indent + 4), " ".repeat(indent));
        match self {
            Code::Text(_) => flat,
            Code::After(text, code) => code.broken(indent, &format!("{before}{text}"), after),
            Code::List { items, .. } if items.is_empty() => flat,
            Code::List { open, items, close } => {
                let lines = items
                    .iter()
                    .map(|item| format!("{inner}{}\n", item.broken(indent + 4, "", ",")));
                format!(
                    "{before}{open}\n{}{margin}{close}{after}",
                    lines.collect::<String>()
                )
            }
            Code::Union(members) => {
                let line = |(at, member): (usize, &Code)| {
                    format!(
                        "{inner}{}\n",
                        member.broken(indent + 4, if at == 0 { "" } else { "| " }, "")
                    )
                };
                let lines = members.iter().enumerate().map(line);
                format!("{before}(\n{}{margin}){after}", lines.collect::<String>())
            }
        }
    }

    fn can_break(&self) -> bool {
        match self {
            Code::Text(_) => false,
            Code::List { items, .. } => !items.is_empty(),
            Code::Union(_) => true,
            Code::After(_, code) => code.can_break(),
        }
    }
}

/// Returns `name: kind = value`, broken in the value if that is sufficient, otherwise in the
/// annotation.
pub(crate) fn annotated(indent: usize, name: &str, kind: &Code, value: Option<&Code>) -> String {
    let margin = " ".repeat(indent);
    let Some(value) = value else {
        return format!(
            "{margin}{}\n",
            kind.broken(indent, &format!("{name}: "), "")
        );
    };
    let before = format!("{name}: {} = ", kind.flat());
    let opening = value.flat().find(['(', '[', '{']).map_or(0, |at| at + 1);
    let text =
        if value.can_break() && fits(indent, &format!("{before}{}", &value.flat()[..opening])) {
            value.broken(indent, &before, "")
        } else {
            kind.broken(
                indent,
                &format!("{name}: "),
                &format!(" = {}", value.flat()),
            )
        };
    format!("{margin}{text}\n")
}

fn fits(indent: usize, text: &str) -> bool {
    indent + text.chars().count() <= WIDTH
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(count: usize) -> Vec<Code> {
        (0..count)
            .map(|number| Code::text(format!("\"word number {number}\"")))
            .collect()
    }

    #[test]
    fn what_fits_stays_on_one_line() {
        let kind = Code::Union(vec![
            Code::subscript("Literal", words(2)),
            Code::text("None"),
        ]);
        let expected = "    x: Literal[\"word number 0\", \"word number 1\"] | None = None\n";
        assert_eq!(
            annotated(4, "x", &kind, Some(&Code::text("None"))),
            expected
        );
    }

    #[test]
    fn what_does_not_fit_is_broken_at_the_outermost_place() {
        let kind = Code::Union(vec![
            Code::subscript("Literal", words(6)),
            Code::text("None"),
        ]);
        let lines: String = (0..6)
            .map(|number| format!("        \"word number {number}\",\n"))
            .collect();
        let expected = format!("x: (\n    Literal[\n{lines}    ]\n    | None\n) = None\n");
        assert_eq!(
            annotated(0, "x", &kind, Some(&Code::text("None"))),
            expected
        );
    }

    #[test]
    fn a_value_is_broken_before_the_annotation() {
        let value = Code::call(
            "Field",
            vec![Code::after("examples=", Code::list("[", words(8), "]"))],
        );
        let lines: String = (0..8)
            .map(|number| format!("        \"word number {number}\",\n"))
            .collect();
        let expected = format!("x: str = Field(\n    examples=[\n{lines}    ],\n)\n");
        assert_eq!(
            annotated(0, "x", &Code::text("str"), Some(&value)),
            expected
        );
    }
}
