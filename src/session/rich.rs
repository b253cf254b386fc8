//! Rich output: selects the representation in a bundle that is most useful to a model.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use cellblock_json::{Budget, MAX_DEPTH};
use serde_json::Value;

use super::html;
use crate::runner_client::Bundle;

/// Limit in characters for sources that are inherently long (drawings, figures, data). The reader
/// learns what kind of object it is; more would only add cost.
const SOURCE_SHOWN: usize = 4000;

/// Bytes of a page or drawing that are searched for text. A page is the last resort, and much of a
/// long one is style and script.
pub(super) const HTML_READ: usize = 1024 * 1024;

/// Texts of a drawing that are listed.
const DRAWN_TEXTS: usize = 20;

/// Size limits for analysing data and figures; this takes some milliseconds. For larger ones the
/// source is shown.
const LOOKED_INTO: Budget = Budget {
    depth: MAX_DEPTH,
    memory: 4 * 1024 * 1024,
};

/// The selected representation of a bundle.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Shown {
    /// A PNG, JPEG, GIF or WebP, not checked yet.
    Image(Vec<u8>),
    Text(String),
    /// A figure that a browser would draw.
    Figure {
        summary: String,
        json: String,
    },
    Nothing,
}

/// Selects the representation to show. An image is preferred, and the text beside it (`<Figure size
/// …>`) is dropped.
pub(super) fn choose(mut bundle: Bundle) -> Shown {
    for mime in ["image/png", "image/jpeg", "image/gif", "image/webp"] {
        if let Some(place) = bundle.blobs.iter().position(|(found, _)| found == mime) {
            return Shown::Image(bundle.blobs.swap_remove(place).1);
        }
        if let Some(text) = bundle.texts.get(mime) {
            let compact = text
                .bytes()
                .filter(|byte| !byte.is_ascii_whitespace())
                .collect::<Vec<_>>();
            // Bytes that cannot be decoded become an image that is reported as corrupt.
            return Shown::Image(STANDARD.decode(compact).unwrap_or_default());
        }
    }
    let mut take = |mime: &str| bundle.texts.remove(mime).filter(|text| !text.is_empty());
    let mut plain = take("text/plain");
    let says_little = plain.as_deref().is_none_or(is_bare_name);
    if let Some(json) = take("application/vnd.plotly.v1+json") {
        // The runner's summary is more informative than one derived from the JSON. A plain text by
        // Plotly itself only repeats the figure.
        let summary = plain
            .filter(|text| text.starts_with("Plotly figure"))
            .unwrap_or_else(|| plotly(&json));
        return Shown::Figure { summary, json };
    }
    let text = None
        .or_else(|| take("text/markdown"))
        .or_else(|| take("text/latex"))
        .or_else(|| {
            let summary = drawing(&take("image/svg+xml")?);
            Some(match plain.take().filter(|_| !says_little) {
                Some(plain) => format!("{plain}\n{summary}"),
                None => summary,
            })
        })
        .or_else(|| take("application/json").map(|json| pretty(&json)))
        .or_else(|| {
            let page = take("text/html")
                .filter(|_| says_little)
                .map(|html| html::text_of(&html));
            page.filter(|text| !text.is_empty())
        })
        .or(plain);
    match text {
        Some(text) => Shown::Text(text),
        None => match bundle.blobs.first() {
            Some((mime, bytes)) => Shown::Text(format!("[{mime}, {} bytes]", bytes.len())),
            None => Shown::Nothing,
        },
    }
}

/// Returns whether a text only names the type of an object, such as `<IPython.core.display.HTML
/// object>` or `<pandas.io.formats.style.Styler at 0x7f…>`.
fn is_bare_name(text: &str) -> bool {
    let text = text.trim();
    let is_name = text.starts_with('<') && text.ends_with('>') && !text.contains('\n');
    is_name && (text.contains(" object") || text.contains(" at 0x"))
}

/// Describes the contents of a drawing in a line, for environments that cannot render it. Its
/// source is of no use to a reader.
fn drawing(source: &str) -> String {
    let read = &source[..source.floor_char_boundary(HTML_READ)];
    let start = read.find("<svg").map_or("", |at| &read[at..]);
    let start = &start[..start.find('>').unwrap_or(start.len())];
    let side = |name: &str| html::attribute(start, name).filter(|said| said.len() <= 20);
    let size = match (side("width"), side("height")) {
        (Some(width), Some(height)) => format!(", {width} × {height}"),
        _ => String::new(),
    };
    let elements = read
        .split('<')
        .skip(1)
        .filter(|tag| tag.starts_with(|c: char| c.is_ascii_alphabetic()))
        .count();
    let plural = if elements == 1 { "" } else { "s" };
    let mut summary = format!(
        "[SVG drawing{size}: {elements} element{plural}, {} characters",
        source.chars().count()
    );
    let texts: Vec<String> = ["title", "text"]
        .into_iter()
        .flat_map(|name| html::texts_in(read, name))
        .collect();
    if !texts.is_empty() {
        let told: Vec<&str> = texts.iter().take(DRAWN_TEXTS).map(String::as_str).collect();
        let more = if texts.len() > DRAWN_TEXTS {
            ", …"
        } else {
            ""
        };
        summary.push_str(&format!("; texts: {}{more}", told.join(", ")));
    }
    summary + "]"
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(SOURCE_SHOWN) {
        Some((at, _)) => format!(
            "{}… ({} more characters)",
            &text[..at],
            text[at..].chars().count()
        ),
        None => text.to_owned(),
    }
}

fn pretty(json: &str) -> String {
    let value: Option<Value> = cellblock_json::read(json.as_bytes(), LOOKED_INTO).ok();
    let laid_out = value.and_then(|value| serde_json::to_string_pretty(&value).ok());
    shortened(laid_out.as_deref().unwrap_or(json))
}

/// Describes a figure in a line, if it has no description. For Plotly's own objects, the runner's
/// description is more informative. The source is numbers and a template.
fn plotly(figure: &str) -> String {
    let Ok(value) = cellblock_json::read::<Value>(figure.as_bytes(), LOOKED_INTO) else {
        return format!("[Plotly figure, {} bytes of JSON]", figure.len());
    };
    let traces = value["data"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let shown = traces.iter().take(20).map(|trace| {
        let kind = trace["type"].as_str().unwrap_or("scatter");
        let length = ["x", "y", "values", "z", "lat"]
            .into_iter()
            .find_map(|axis| Some(trace[axis].as_array()?.len()));
        let name = trace["name"].as_str().filter(|name| !name.is_empty());
        let name = name.map(|name| format!(" \"{name}\"")).unwrap_or_default();
        match length {
            Some(1) => format!("{kind}{name} with 1 point"),
            Some(length) => format!("{kind}{name} with {length} points"),
            None => format!("{kind}{name}"),
        }
    });
    let mut summary = format!("Plotly figure: {}", shown.collect::<Vec<_>>().join(", "));
    for (label, place) in [
        ("title", &value["layout"]["title"]),
        ("x axis", &value["layout"]["xaxis"]["title"]),
        ("y axis", &value["layout"]["yaxis"]["title"]),
    ] {
        if let Some(text) = place["text"].as_str().or_else(|| place.as_str()) {
            summary.push_str(&format!("; {label}: {text}"));
        }
    }
    shortened(&summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(texts: &[(&str, &str)], blobs: &[(&str, &[u8])]) -> Shown {
        choose(Bundle {
            texts: texts
                .iter()
                .map(|(mime, text)| (mime.to_string(), text.to_string()))
                .collect(),
            blobs: blobs
                .iter()
                .map(|(mime, bytes)| (mime.to_string(), bytes.to_vec()))
                .collect(),
        })
    }

    fn text(expected: &str) -> Shown {
        Shown::Text(expected.to_owned())
    }

    #[test]
    fn a_picture_is_shown_instead_of_the_text_beside_it() {
        assert_eq!(
            shown(
                &[("text/plain", "<Figure size 640x480>")],
                &[("image/png", b"p")]
            ),
            Shown::Image(b"p".to_vec())
        );
        assert_eq!(
            shown(&[("text/plain", "x"), ("image/png", "cG\nk=")], &[]),
            Shown::Image(b"pi".to_vec())
        );
    }

    #[test]
    fn a_data_frame_is_shown_as_plain_text() {
        assert_eq!(
            shown(&[("text/plain", "  a\n0 1"), ("text/html", "<table>")], &[]),
            text("  a\n0 1")
        );
    }

    #[test]
    fn what_says_more_is_preferred() {
        assert_eq!(
            shown(
                &[
                    ("text/plain", "x"),
                    ("text/markdown", "**x**"),
                    ("text/latex", "$x$")
                ],
                &[]
            ),
            text("**x**")
        );
        assert_eq!(
            shown(&[("text/plain", "x"), ("text/latex", "$x$")], &[]),
            text("$x$")
        );
        assert_eq!(
            shown(
                &[("text/plain", "x"), ("application/json", "{\"a\":1}")],
                &[]
            ),
            text("{\n  \"a\": 1\n}")
        );
        for name in [
            "<HTML object>",
            "<pandas.io.formats.style.Styler at 0x7f01>",
        ] {
            assert_eq!(
                shown(&[("text/plain", name), ("text/html", "<b>x</b>")], &[]),
                text("x")
            );
            assert_eq!(
                shown(
                    &[("text/plain", name), ("text/html", "<iframe></iframe>")],
                    &[]
                ),
                text(name)
            );
        }
        assert_eq!(
            shown(
                &[("text/plain", "a  b"), ("text/html", "<table></table>")],
                &[]
            ),
            text("a  b")
        );
        assert_eq!(
            shown(&[], &[("application/pdf", b"1234")]),
            text("[application/pdf, 4 bytes]")
        );
        assert_eq!(shown(&[], &[]), Shown::Nothing);
    }

    #[test]
    fn long_sources_are_cut() {
        let long = format!("\"{}\"", "s".repeat(5000));
        let Shown::Text(cut) = shown(&[("application/json", &long)], &[]) else {
            panic!("data is text")
        };
        assert!(
            cut.ends_with("… (1002 more characters)"),
            "{}",
            &cut[cut.len() - 40..]
        );
    }

    #[test]
    fn a_drawing_is_named_and_its_source_is_not_shown() {
        let source = "<?xml version='1.0'?><svg width=\"12pt\" \
                      height='9pt'><title>T</title><g><text x='1'>a <tspan>b</tspan></text>\
                      </g><!-- no --></svg>";
        let summary = format!(
            "[SVG drawing, 12pt × 9pt: 5 elements, {} characters; texts: T, a b]",
            source.len()
        );
        assert_eq!(
            shown(
                &[("text/plain", "<x object>"), ("image/svg+xml", source)],
                &[]
            ),
            text(&summary)
        );
        let both = format!("<POINT (0 1)>\n{summary}");
        assert_eq!(
            shown(
                &[("text/plain", "<POINT (0 1)>"), ("image/svg+xml", source)],
                &[]
            ),
            text(&both)
        );
        let drawn = shown(&[("image/svg+xml", source)], &[("image/png", b"p")]);
        assert_eq!(
            drawn,
            Shown::Image(b"p".to_vec()),
            "a picture of it is preferred"
        );
        let Shown::Text(long) = shown(
            &[("image/svg+xml", &"<text>long</text>".repeat(10_000))],
            &[],
        ) else {
            panic!("a drawing is text")
        };
        assert!(
            long.len() < 400 && long.contains("10000 elements"),
            "{long}"
        );
    }

    #[test]
    fn animations_are_pictures_too() {
        for mime in ["image/gif", "image/webp"] {
            let both = shown(
                &[("text/plain", "<IPython.core.display.Image object>")],
                &[(mime, b"g")],
            );
            assert_eq!(both, Shown::Image(b"g".to_vec()));
        }
        assert_eq!(
            shown(&[], &[("image/gif", b"g"), ("image/png", b"p")]),
            Shown::Image(b"p".to_vec())
        );
    }

    #[test]
    fn data_that_would_take_much_memory_is_not_looked_into() {
        let many = |count: usize| format!("[{}0]", r#"{"":0},"#.repeat(count));
        let Shown::Text(cut) = shown(&[("application/json", &many(100_000))], &[]) else {
            panic!("data is text")
        };
        assert!(cut.starts_with(r#"[{"":0},{"#), "{}", &cut[..40]);
        let Shown::Text(laid_out) = shown(&[("application/json", &many(1000))], &[]) else {
            panic!("data is text")
        };
        assert!(laid_out.starts_with("[\n"), "the control: less is laid out");
        let shown = shown(&[("application/vnd.plotly.v1+json", &many(100_000))], &[]);
        assert!(
            matches!(&shown, Shown::Figure { summary, .. }
                if summary == "[Plotly figure, 700003 bytes of JSON]"),
            "{shown:?}"
        );
    }

    #[test]
    fn a_plotly_figure_is_summed_up_and_its_source_is_kept_apart() {
        let figure = r#"{"data":[{"type":"bar","x":[1,2,3]},{"name":"","y":[1]}],"layout":{"title":{"text":"T"},"xaxis":{"title":"time"}}}"#;
        let of_json =
            "Plotly figure: bar with 3 points, scatter with 1 point; title: T; x axis: time";
        for (plain, summary) in [
            ("Figure({…})", of_json),
            ("Plotly figure: T\n  bar", "Plotly figure: T\n  bar"),
        ] {
            let expected = Shown::Figure {
                summary: summary.to_owned(),
                json: figure.to_owned(),
            };
            let bundle = [
                ("text/plain", plain),
                ("application/vnd.plotly.v1+json", figure),
            ];
            assert_eq!(shown(&bundle, &[]), expected);
        }
    }
}
