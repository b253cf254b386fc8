//! Converts HTML to text: no tags, no scripts, one line per block, tables in columns.
//!
//! The input comes from inside and may be anything. A single pass reads at most `HTML_READ` bytes,
//! and the size of the output is bounded by the input read.

use super::rich::HTML_READ;

/// Marks the start of a cell in the text of a table row. It is removed from the input.
const CELL: char = '\u{1f}';
/// Follows `CELL` and marks a data cell, as opposed to a heading cell.
const DATA: char = '\u{1e}';

/// Follows these, once for each further row that a cell spans.
const FURTHER_ROW: char = '\u{1d}';

/// Limit in characters for a table cell, the same as for printed data frames.
const MAX_CELL_LENGTH: usize = 60;
/// Columns or rows that one cell may span.
const WIDEST_SPAN: usize = 100;

/// Returns the text of a page.
pub(super) fn text_of(html: &str) -> String {
    let html = &html[..html.floor_char_boundary(HTML_READ)];
    let mut text = String::new();
    let lower = html.to_ascii_lowercase();
    let mut rest = html;
    // Of the most recent cell.
    let mut further_columns = 0;
    let mut preformatted = false;
    while let Some(start) = rest.find('<') {
        push(&mut text, &rest[..start], preformatted);
        let tag = &rest[start..];
        let name = tag_name(tag);
        let closes = tag.starts_with("</");
        let mut end = tag.find('>').map_or(tag.len(), |at| at + 1);
        if matches!(name.as_str(), "script" | "style") && !closes {
            let closing = format!("</{name}");
            end = lower[html.len() - tag.len()..]
                .find(&closing)
                .unwrap_or(tag.len());
        } else if tag.starts_with("<!--") {
            end = tag.find("-->").map_or(tag.len(), |at| at + 3);
        }
        if matches!(name.as_str(), "td" | "th" | "tr" | "table") {
            // A heading over several columns is placed above the first of them.
            text.extend(std::iter::repeat_n(
                CELL,
                std::mem::take(&mut further_columns),
            ));
        }
        if name == "pre" {
            preformatted = !closes;
        }
        match name.as_str() {
            "br" | "p" | "div" | "tr" | "li" | "ul" | "ol" | "table" | "h1" | "h2" | "h3"
            | "h4" | "pre" => text.push('\n'),
            "td" | "th" if !closes => {
                text.push(CELL);
                if name == "td" {
                    text.push(DATA);
                }
                let further = |name: &str| {
                    let span =
                        attribute(&tag[..end], name).and_then(|span| span.parse::<usize>().ok());
                    span.unwrap_or(1).clamp(1, WIDEST_SPAN) - 1
                };
                text.extend(std::iter::repeat_n(FURTHER_ROW, further("rowspan")));
                further_columns = further("colspan");
            }
            _ => {}
        }
        rest = &tag[end..];
    }
    push(&mut text, rest, preformatted);
    let lines: Vec<String> = decoded(&text)
        .lines()
        .map(in_one_line)
        .filter(|line| !line.is_empty())
        .collect();
    let mut written = Vec::new();
    for part in lines.chunk_by(|one, next| one.contains(CELL) == next.contains(CELL)) {
        if part[0].contains(CELL) {
            written.extend(columns(part));
        } else {
            written.extend_from_slice(part);
        }
    }
    written.join("\n")
}

/// Returns the texts between tags of this name.
pub(super) fn texts_in(html: &str, name: &str) -> Vec<String> {
    let (opening, closing) = (format!("<{name}"), format!("</{name}"));
    let mut found = Vec::new();
    let mut rest = html;
    while let Some(at) = rest.find(&opening) {
        rest = &rest[at + opening.len()..];
        if !rest.starts_with(|next: char| next == '>' || next.is_ascii_whitespace()) {
            continue;
        }
        let end = rest.find(&closing).unwrap_or(rest.len());
        let inner = rest[..end].split_once('>').map_or("", |(_, inner)| inner);
        let text = text_of(inner).replace('\n', " ");
        if !text.is_empty() {
            found.push(text);
        }
        rest = &rest[end..];
    }
    found
}

/// Returns the value of a quoted attribute.
pub(super) fn attribute<'a>(tag: &'a str, name: &str) -> Option<&'a str> {
    let mut rest = tag;
    loop {
        let at = rest.find(name)?;
        let before = rest[..at].chars().next_back();
        rest = &rest[at + name.len()..];
        let value = rest.trim_start().strip_prefix('=').map(str::trim_start);
        let quoted = value.and_then(|value| {
            Some((
                value,
                value.chars().next().filter(|mark| "\"'".contains(*mark))?,
            ))
        });
        if let (Some((value, mark)), true) = (quoted, before.is_some_and(char::is_whitespace)) {
            return value[1..].split(mark).next();
        }
    }
}

fn tag_name(tag: &str) -> String {
    let name = tag[1..]
        .trim_start_matches('/')
        .split(|c: char| !c.is_ascii_alphanumeric())
        .next();
    name.unwrap_or_default().to_ascii_lowercase()
}

/// Adds text between tags. A newline becomes a space, unless the text is `preformatted`.
fn push(text: &mut String, inner: &str, preformatted: bool) {
    let kept = inner
        .chars()
        .filter(|character| !matches!(*character, CELL | DATA | FURTHER_ROW));
    text.extend(kept.map(|character| {
        if character == '\n' && !preformatted {
            ' '
        } else {
            character
        }
    }));
}

fn in_one_line(line: &str) -> String {
    let words = |part: &str| part.split_whitespace().collect::<Vec<_>>().join(" ");
    // A row starts with a cell, possibly after spaces.
    match line.trim_start().strip_prefix(CELL) {
        Some(row) => row.split(CELL).fold(String::new(), |mut row, cell| {
            row.push(CELL);
            row.push_str(&words(cell));
            row
        }),
        None => words(&line.replace([CELL, DATA, FURTHER_ROW], " ")),
    }
}

/// Lays out rows in columns. Columns of numbers are right-aligned.
fn columns(rows: &[String]) -> Vec<String> {
    // For each column, the number of further rows that belong to a cell above.
    let mut taken: Vec<usize> = Vec::new();
    let rows: Vec<Vec<(String, bool)>> = rows
        .iter()
        .map(|row| {
            let mut cells = Vec::new();
            for text in row.split(CELL).skip(1) {
                while let Some(rows_left) = taken
                    .get_mut(cells.len())
                    .filter(|rows_left| **rows_left > 0)
                {
                    *rows_left -= 1;
                    cells.push((String::new(), false));
                }
                let (text, is_data) = text
                    .strip_prefix(DATA)
                    .map_or((text, false), |text| (text, true));
                let inner = text.trim_start_matches(FURTHER_ROW);
                taken.resize(taken.len().max(cells.len() + 1), 0);
                taken[cells.len()] = text.len() - inner.len();
                let inner = inner.trim_start();
                cells.push(match inner.char_indices().nth(MAX_CELL_LENGTH) {
                    Some((at, _)) => (format!("{}…", &inner[..at]), is_data),
                    None => (inner.to_owned(), is_data),
                });
            }
            cells
        })
        .collect();
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let mut widths = vec![0; count];
    let mut numeric = vec![true; count];
    for row in &rows {
        for (column, (text, is_data)) in row.iter().enumerate() {
            widths[column] = widths[column].max(text.chars().count());
            let is_number = || {
                text.trim_end_matches('%')
                    .replace(',', "")
                    .parse::<f64>()
                    .is_ok()
            };
            numeric[column] &= !is_data || text.is_empty() || is_number();
        }
    }
    let cells: usize = rows.iter().map(Vec::len).sum();
    if cells.saturating_mul(widths.iter().sum::<usize>() / count.max(1)) > HTML_READ {
        widths.fill(0);
    }
    let line = |row: &Vec<(String, bool)>| {
        let mut line = String::new();
        for (column, (text, _)) in row.iter().enumerate() {
            let room = " ".repeat(widths[column].saturating_sub(text.chars().count()));
            let (before, behind) = if numeric[column] {
                (room.as_str(), "")
            } else {
                ("", room.as_str())
            };
            line.push_str(&format!("{before}{text}{behind}  "));
        }
        line.trim_end().to_owned()
    };
    rows.iter()
        .map(line)
        .filter(|line| !line.is_empty())
        .collect()
}

/// Replaces character references.
fn decoded(text: &str) -> String {
    let mut decoded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        decoded.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = rest.bytes().take(12).position(|byte| byte == b';');
        match end.and_then(|end| Some((end, character(&rest[1..end])?))) {
            Some((end, character)) => {
                decoded.push(character);
                rest = &rest[end + 1..];
            }
            None => {
                decoded.push('&');
                rest = &rest[1..];
            }
        }
    }
    decoded.push_str(rest);
    decoded
}

fn character(name: &str) -> Option<char> {
    if let Some(number) = name.strip_prefix('#') {
        let code = match number.strip_prefix(['x', 'X']) {
            Some(digits) => u32::from_str_radix(digits, 16),
            None => number.parse(),
        };
        return code
            .ok()
            .and_then(char::from_u32)
            .filter(|character| !character.is_control());
    }
    const NAMES: [(&str, char); 18] = [
        ("nbsp", ' '),
        ("lt", '<'),
        ("gt", '>'),
        ("quot", '"'),
        ("apos", '\''),
        ("amp", '&'),
        ("hellip", '…'),
        ("ndash", '–'),
        ("mdash", '—'),
        ("times", '×'),
        ("middot", '·'),
        ("plusmn", '±'),
        ("deg", '°'),
        ("euro", '€'),
        ("le", '≤'),
        ("ge", '≥'),
        ("larr", '←'),
        ("rarr", '→'),
    ];
    NAMES
        .into_iter()
        .find(|(known, _)| *known == name)
        .map(|(_, character)| character)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn html_becomes_its_text() {
        let html = "<style>b{}</style><h1>A &amp; B</h1><p>one<br>two</p><script>x<y</script><!-- \
                    <p>no --> three <b";
        assert_eq!(text_of(html), "A & B\none\ntwo\nthree");
        assert_eq!(
            text_of("&#8364;&#x41;&hellip;&nope;&#0;&&lt;"),
            "€A…&nope;&#0;&<"
        );
        assert_eq!(text_of("<img src=x>"), "");
        assert_eq!(
            text_of("one\nline<pre>two\nlines</pre>of\ntext"),
            "one line\ntwo\nlines\nof text"
        );
    }

    #[test]
    fn a_table_has_columns() {
        let styled = r#"<style type="text/css"></style>
            <table id="T_1"><thead>
            <tr><th class="blank level0" >&nbsp;</th>
              <th id="a" >name</th>
              <th>share</th></tr></thead>
            <tbody><tr>
              <th>0</th><td id="x" class="data" >north east</td><td>1.50</td></tr>
            <tr><th>1</th><td>south</td><td>-20.25%</td></tr></tbody></table><p>end</p>"#;
        assert_eq!(
            text_of(styled),
            "   name          share\n0  north east     1.50\n1  south       -20.25%\nend"
        );
    }

    #[test]
    fn headings_over_several_columns_stand_over_the_first() {
        let table = "<table><tr><th colspan='2'>both</th><th>c</th></tr>\
                     <tr><td>1</td><td>2</td><td>3</td></tr></table>";
        assert_eq!(text_of(table), "both     c\n   1  2  3");
    }

    #[test]
    fn a_cell_over_several_rows_keeps_its_column() {
        let table = "<table><tr><th rowspan='2'>a</th><th>x</th><td>1</td></tr>\
                     <tr><th>y</th><td>22</td></tr>\
                     <tr><th>b</th><th>z</th><td>3</td></tr></table>";
        assert_eq!(text_of(table), "a  x   1\n   y  22\nb  z   3");
    }

    #[test]
    fn cells_are_bounded_and_odd_tables_stay_readable() {
        let long = format!("<tr><td>{}</td><td>b</td></tr>", "a".repeat(500));
        assert_eq!(text_of(&long), format!("{}…  b", "a".repeat(60)));
        assert_eq!(text_of("<table><tr></tr><tr><td></td></tr></table>"), "");
        assert_eq!(text_of("a<td>b</td>"), "a b");
        assert_eq!(text_of("<td colspan='99999999999'>b"), "b");
        assert_eq!(text_of("x\u{1f}y\u{1e}z"), "xyz");
        let hostile = "<tr>".to_owned() + &"<td>".repeat(100_000) + &"<tr><td>x".repeat(50_000);
        assert!(text_of(&hostile).len() <= 2 * HTML_READ);
    }

    #[test]
    fn attributes_and_inner_texts_are_found() {
        assert_eq!(
            attribute("<svg data-width='1' width = \"12pt\"", "width"),
            Some("12pt")
        );
        assert_eq!(attribute("<svg stroke-width='1' width=3", "width"), None);
        assert_eq!(
            texts_in(
                "<text>a</text><textPath>no</textPath><text x='1'>b<c/>d</text><text>",
                "text"
            ),
            ["a", "bd"]
        );
    }
}
