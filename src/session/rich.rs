//! Rich output: the one kind of a bundle that is most useful to a model.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use cellblock_json::{Budget, MAX_DEPTH};
use serde_json::Value;

use crate::runner_client::Bundle;

/// Characters shown of sources that are long by nature (drawings, figures, data). The reader learns what it is; the rest costs.
const SOURCE_SHOWN: usize = 4000;

/// Bytes of a page that are looked at for text. A page is the last resort, and much of a long one is style and script.
const HTML_READ: usize = 1024 * 1024;

/// What data and figures may hold to be looked into; this takes some milliseconds. Of larger ones
/// the source is shown.
const LOOKED_INTO: Budget = Budget { depth: MAX_DEPTH, memory: 4 * 1024 * 1024 };

/// What is shown of a bundle.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Shown {
    /// A PNG or JPEG, not checked yet.
    Image(Vec<u8>),
    Text(String),
    Nothing,
}

/// Chooses what is shown. A picture is preferred, and the text beside it (`<Figure size …>`) dropped.
pub(super) fn choose(mut bundle: Bundle) -> Shown {
    for mime in ["image/png", "image/jpeg"] {
        if let Some(place) = bundle.blobs.iter().position(|(found, _)| found == mime) {
            return Shown::Image(bundle.blobs.swap_remove(place).1);
        }
        if let Some(text) = bundle.texts.get(mime) {
            let compact = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect::<Vec<_>>();
            // Bytes that cannot be read become an image that is said to be corrupt.
            return Shown::Image(STANDARD.decode(compact).unwrap_or_default());
        }
    }
    let has_html = bundle.texts.contains_key("text/html");
    let mut take = |mime: &str| bundle.texts.remove(mime).filter(|text| !text.is_empty());
    let text = None
        .or_else(|| take("text/markdown"))
        .or_else(|| take("text/latex"))
        .or_else(|| take("image/svg+xml").map(|source| shortened(&source)))
        .or_else(|| take("application/vnd.plotly.v1+json").map(|figure| plotly(&figure)))
        .or_else(|| take("application/json").map(|json| pretty(&json)))
        .or_else(|| take("text/plain").filter(|text| !has_html || !is_bare_name(text)))
        .or_else(|| take("text/html").map(|html| text_of_html(&html)));
    match text {
        Some(text) => Shown::Text(text),
        None => match bundle.blobs.first() {
            Some((mime, bytes)) => Shown::Text(format!("[{mime}, {} bytes]", bytes.len())),
            None => Shown::Nothing,
        },
    }
}

/// Whether a text says no more than what kind of object it stands for, such as `<IPython.core.display.HTML object>`.
fn is_bare_name(text: &str) -> bool {
    let text = text.trim();
    text.starts_with('<') && text.ends_with('>') && !text.contains('\n') && text.contains(" object")
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(SOURCE_SHOWN) {
        Some((at, _)) => format!("{}… ({} more characters)", &text[..at], text[at..].chars().count()),
        None => text.to_owned(),
    }
}

fn pretty(json: &str) -> String {
    let value: Option<Value> = cellblock_json::read(json.as_bytes(), LOOKED_INTO).ok();
    let laid_out = value.and_then(|value| serde_json::to_string_pretty(&value).ok());
    shortened(laid_out.as_deref().unwrap_or(json))
}

/// Says in a line what a figure shows, then gives its source.
fn plotly(figure: &str) -> String {
    let Ok(value) = cellblock_json::read::<Value>(figure.as_bytes(), LOOKED_INTO) else { return shortened(figure) };
    let traces = value["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    let shown = traces.iter().take(20).map(|trace| {
        let kind = trace["type"].as_str().unwrap_or("scatter");
        let length = ["x", "y", "values", "z", "lat"].into_iter().find_map(|axis| Some(trace[axis].as_array()?.len()));
        let name = trace["name"].as_str().map(|name| format!(" \"{name}\"")).unwrap_or_default();
        match length {
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
    format!("{summary}\n{}", shortened(figure))
}

/// Reads the text of a page: no tags, no scripts, a line for each block.
fn text_of_html(html: &str) -> String {
    let mut text = String::new();
    let html = &html[..html.floor_char_boundary(HTML_READ)];
    let lower = html.to_ascii_lowercase();
    let mut rest = html;
    while let Some(start) = rest.find('<') {
        text.push_str(&rest[..start]);
        let tag = &rest[start..];
        let name = tag[1..]
            .trim_start_matches('/')
            .split(|c: char| !c.is_ascii_alphanumeric())
            .next()
            .unwrap_or_default()
            .to_ascii_lowercase();
        let mut end = tag.find('>').map_or(tag.len(), |at| at + 1);
        if matches!(name.as_str(), "script" | "style") && !tag.starts_with("</") {
            let closing = format!("</{name}");
            end = lower[html.len() - tag.len()..].find(&closing).unwrap_or(tag.len());
        } else if tag.starts_with("<!--") {
            end = tag.find("-->").map_or(tag.len(), |at| at + 3);
        }
        match name.as_str() {
            "br" | "p" | "div" | "tr" | "li" | "ul" | "ol" | "table" | "h1" | "h2" | "h3" | "h4" | "pre" => {
                text.push('\n')
            }
            "td" | "th" => text.push(' '),
            _ => {}
        }
        rest = &tag[end..];
    }
    text.push_str(rest);
    let text = text
        .replace("&nbsp;", " ")
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", "\"")
        .replace("&#39;", "'")
        .replace("&amp;", "&");
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(texts: &[(&str, &str)], blobs: &[(&str, &[u8])]) -> Shown {
        choose(Bundle {
            texts: texts.iter().map(|(mime, text)| (mime.to_string(), text.to_string())).collect(),
            blobs: blobs.iter().map(|(mime, bytes)| (mime.to_string(), bytes.to_vec())).collect(),
        })
    }

    fn text(expected: &str) -> Shown {
        Shown::Text(expected.to_owned())
    }

    #[test]
    fn a_picture_is_shown_instead_of_the_text_beside_it() {
        assert_eq!(
            shown(&[("text/plain", "<Figure size 640x480>")], &[("image/png", b"p")]),
            Shown::Image(b"p".to_vec())
        );
        assert_eq!(shown(&[("text/plain", "x"), ("image/png", "cG\nk=")], &[]), Shown::Image(b"pi".to_vec()));
    }

    #[test]
    fn a_data_frame_is_shown_as_plain_text() {
        assert_eq!(shown(&[("text/plain", "  a\n0 1"), ("text/html", "<table>")], &[]), text("  a\n0 1"));
    }

    #[test]
    fn what_says_more_is_preferred() {
        assert_eq!(
            shown(&[("text/plain", "x"), ("text/markdown", "**x**"), ("text/latex", "$x$")], &[]),
            text("**x**")
        );
        assert_eq!(shown(&[("text/plain", "x"), ("text/latex", "$x$")], &[]), text("$x$"));
        assert_eq!(shown(&[("text/plain", "x"), ("image/svg+xml", "<svg/>")], &[]), text("<svg/>"));
        assert_eq!(shown(&[("text/plain", "x"), ("application/json", "{\"a\":1}")], &[]), text("{\n  \"a\": 1\n}"));
        assert_eq!(shown(&[("text/plain", "<HTML object>"), ("text/html", "<b>x</b>")], &[]), text("x"));
        assert_eq!(shown(&[("text/plain", "a  b"), ("text/html", "<table></table>")], &[]), text("a  b"));
        assert_eq!(shown(&[], &[("application/pdf", b"1234")]), text("[application/pdf, 4 bytes]"));
        assert_eq!(shown(&[], &[]), Shown::Nothing);
    }

    #[test]
    fn long_sources_are_cut() {
        let Shown::Text(cut) = shown(&[("image/svg+xml", &"s".repeat(5000))], &[]) else { panic!("a drawing is text") };
        assert!(cut.ends_with("… (1000 more characters)"));
    }

    #[test]
    fn data_that_would_take_much_memory_is_shown_as_it_is() {
        let many = |count: usize| format!("[{}0]", r#"{"":0},"#.repeat(count));
        for mime in ["application/json", "application/vnd.plotly.v1+json"] {
            let Shown::Text(cut) = shown(&[(mime, &many(100_000))], &[]) else { panic!("data is text") };
            assert!(cut.starts_with(r#"[{"":0},{"#), "{}", &cut[..40]);
        }
        let Shown::Text(laid_out) = shown(&[("application/json", &many(1000))], &[]) else { panic!("data is text") };
        assert!(laid_out.starts_with("[\n"), "the control: less is laid out");
    }

    #[test]
    fn a_plotly_figure_is_summed_up() {
        let figure = r#"{"data":[{"type":"bar","x":[1,2,3]},{"y":[1]}],"layout":{"title":{"text":"T"},"xaxis":{"title":"time"}}}"#;
        let Shown::Text(summary) = shown(&[("application/vnd.plotly.v1+json", figure)], &[]) else {
            panic!("a figure is text")
        };
        assert!(
            summary.starts_with("Plotly figure: bar with 3 points, scatter with 1 points; title: T; x axis: time\n{"),
            "{summary}"
        );
    }

    #[test]
    fn html_becomes_its_text() {
        let html = "<style>b{}</style><h1>A &amp; B</h1><p>one<br>two</p><script>x<y</script><!-- <p>no --> three <b";
        assert_eq!(shown(&[("text/html", html)], &[]), text("A & B\none\ntwo\nthree"));
    }
}
