//! Variants side by side: the result of `explore`, from several outcomes to one answer. Pure, as
//! `render` is.
//!
//! The text begins with a table, one line for each variant, so that a model can choose without
//! reading on. Then it says what was kept, and then it has the output of each variant under its
//! name. All outputs together have the room that one cell has: a short output gives what it does
//! not need to the long ones. Pictures follow the text, each after a line that names its variant.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rmcp::model::{CallToolResult, ContentBlock};
use serde_json::{Value, json};

use crate::mcp::duration::Seconds;
use crate::mcp::refusals;
use crate::mcp::render::{self, Page, bytes_text, exit_text, image_mark, summary, variable_fields};
use crate::sandbox::Exit;
use crate::session::{
    ExploreReport, Image, Outcome, Part, Refused, SessionId, StateAfter, Status, Stream,
    VariableChanges, VariantReport,
};

/// Pictures in one answer, and their bytes together: as many as a single cell may show.
const MAX_IMAGES: usize = 20;
const MAX_IMAGE_BYTES: usize = 20_000_000;

/// Characters of a value in the table.
const TABLE_VALUE: usize = 60;

/// Characters of a value in the structured content. Longer values are read in the variant's text.
const MAX_VALUE_LENGTH: usize = 500;

/// Names of changed variables in a line of the table.
const TABLE_NAMES: usize = 6;

/// Variants differ by their code only.
const SAME_DRAWS: &str =
    "All variants drew the same random numbers from `random`, numpy and torch.";

/// Renders an exploration. Variants that failed are part of the comparison and no failure of the
/// call.
pub(super) fn comparison(
    source: &SessionId,
    report: &ExploreReport,
    most_chars: usize,
) -> CallToolResult {
    let mut album = Album::default();
    let told: Vec<Told> = report
        .variants
        .iter()
        .map(|variant| told(variant, &mut album))
        .collect();
    let most = fair_share(
        &told.iter().map(Told::chars).collect::<Vec<_>>(),
        most_chars,
    );
    let texts: Vec<String> = told.into_iter().map(|told| told.within(most)).collect();

    let mut page = Page::default();
    page.line(&table(&report.variants));
    page.line("");
    page.line(&what_was_kept(source, report));
    page.line(SAME_DRAWS);
    report.notes.iter().for_each(|note| page.line(note));
    if let Some(lost) = render::not_carried_over(&report.lost) {
        page.line(&lost);
    }
    for (variant, text) in report.variants.iter().zip(&texts) {
        // The table has said it all about a variant that gave nothing but a short value.
        if text != render::NO_OUTPUT && variant.ended.as_ref().ok().map(gist).as_ref() != Some(text)
        {
            page.line(&format!("\n--- {} ---\n{text}", variant.name));
        }
    }

    let fields = report
        .variants
        .iter()
        .zip(&texts)
        .map(|(variant, text)| variant_fields(variant, text));
    let structured = json!({
        "session_id": source.as_str(),
        "variants": fields.collect::<Vec<_>>(),
        "kept": report
            .kept
            .iter()
            .map(|(variant, session)| json!({"variant": variant, "session_id": session.as_str()}))
            .collect::<Vec<_>>(),
        "replaced": report.replaced,
        "images": album
            .shown
            .iter()
            .map(|(variant, image)| {
                json!({
                    "variant": variant,
                    "mime_type": image.kind.mime(),
                    "width": image.width,
                    "height": image.height,
                })
            })
            .collect::<Vec<_>>(),
        "not_carried_over": report.lost,
        "notes": report.notes,
    });
    let mut content = vec![ContentBlock::text(page.finish())];
    for (number, (variant, image)) in album.shown.iter().enumerate() {
        content.push(ContentBlock::text(format!(
            "[image {}, of {variant}]",
            number + 1
        )));
        content.push(ContentBlock::image(
            STANDARD.encode(&image.bytes),
            image.kind.mime(),
        ));
    }
    render::finished(content, structured, false)
}

/// The pictures of all variants within the limits of one cell, in the order of their marks.
#[derive(Default)]
struct Album<'a> {
    shown: Vec<(&'a str, &'a Image)>,
    bytes: usize,
}

impl<'a> Album<'a> {
    /// Takes a picture in and returns the mark for its place in the text.
    fn add(&mut self, variant: &'a str, image: &'a Image) -> String {
        if self.shown.len() >= MAX_IMAGES || self.bytes + image.bytes.len() > MAX_IMAGE_BYTES {
            return format!(
                "[image not shown: one answer has at most {MAX_IMAGES} images of {} MB together]",
                MAX_IMAGE_BYTES / 1_000_000
            );
        }
        self.bytes += image.bytes.len();
        self.shown.push((variant, image));
        image_mark(self.shown.len(), image)
    }
}

/// What a variant has to tell: a head and, after a place where text was cut already, a tail.
#[derive(Debug, Default, Clone, PartialEq)]
struct Told {
    head: String,
    cut: Option<(u64, u64)>,
    tail: String,
}

impl Told {
    fn chars(&self) -> usize {
        self.head.chars().count() + self.tail.chars().count()
    }

    /// Returns at most about `most` characters: the beginning and the end, because an error is told
    /// at the end.
    fn within(self, most: usize) -> String {
        let (head_chars, tail_chars) = (self.head.chars().count(), self.tail.chars().count());
        let excess = (head_chars + tail_chars).saturating_sub(most);
        if excess == 0 {
            return match self.cut {
                Some((chars, lines)) => joined(
                    &self.head,
                    &render::cut_mark(chars, lines, None),
                    &self.tail,
                ),
                None => self.head,
            };
        }
        // What was cut already has its place; an uncut text is cut where its second half begins.
        let hidden = self.cut.map_or(0, |(chars, _)| chars) + excess as u64;
        let (head, tail) = match self.cut {
            Some(_) => (self.head, self.tail),
            None => {
                let (head, tail) = self.head.split_at(byte_at(&self.head, most / 2));
                (head.to_owned(), tail.to_owned())
            }
        };
        let tail_kept = tail
            .chars()
            .count()
            .min(most - head.chars().count().min(most / 2));
        let head_end = byte_at(&head, most - tail_kept);
        let tail_start = byte_at(&tail, tail.chars().count() - tail_kept);
        joined(
            &head[..head_end],
            &render::cut_mark(hidden, 1, None),
            &tail[tail_start..],
        )
    }
}

fn joined(head: &str, mark: &str, tail: &str) -> String {
    let mut page = Page {
        text: head.to_owned(),
    };
    page.line(mark);
    page.text.push_str(tail);
    page.finish()
}

fn byte_at(text: &str, index: usize) -> usize {
    text.char_indices()
        .nth(index)
        .map_or(text.len(), |(at, _)| at)
}

/// Returns the length to which all texts may grow so that together they stay within `most`. What a
/// short one does not need goes to the longer ones.
fn fair_share(lengths: &[usize], most: usize) -> usize {
    let mut sorted = lengths.to_vec();
    sorted.sort_unstable();
    let mut room = most;
    for (index, length) in sorted.iter().enumerate() {
        let share = room / (sorted.len() - index);
        if *length > share {
            return share;
        }
        room -= length;
    }
    usize::MAX
}

fn told<'a>(variant: &'a VariantReport, album: &mut Album<'a>) -> Told {
    let outcome = match &variant.ended {
        Ok(outcome) => outcome,
        Err(refused) => {
            return Told {
                head: format!("It has not run: {}", refusals::error_text(refused)),
                ..Told::default()
            };
        }
    };
    let (mut head, mut cut) = (Page::default(), None);
    let mut page = Page::default();
    for part in &outcome.output.parts {
        match part {
            Part::Text { text, .. } => page.text.push_str(text),
            Part::Cut { chars, lines } => {
                cut = Some((*chars, *lines));
                head = std::mem::take(&mut page);
            }
            Part::Image(image) => page.line(&album.add(&variant.name, image)),
        }
    }
    let ending = match &outcome.status {
        Status::Raised(error) => render::untold(error, &outcome.output),
        _ => why_not_ok(outcome),
    };
    if let Some(ending) = ending {
        page.line(&ending);
    }
    match cut {
        Some(_) => Told {
            head: head.text,
            cut,
            tail: page.text,
        },
        None => Told {
            head: page.finish(),
            ..Told::default()
        },
    }
}

/// Says in one line why a variant did not end well. What to do about it is another question than in
/// a session that goes on: its copy is thrown away.
fn why_not_ok(outcome: &Outcome) -> Option<String> {
    Some(match &outcome.status {
        Status::Completed => return None,
        Status::Raised(error) => match error.line {
            Some(line) => format!("{} (line {line})", summary(error)),
            None => summary(error),
        },
        Status::TimedOut { limit, state } => {
            let how = if *state == StateAfter::Lost {
                "; it ignored the interrupt and was killed"
            } else {
                ""
            };
            format!("stopped at its time-out of {}{how}", Seconds(*limit))
        }
        Status::Cancelled { .. } => "cancelled".to_owned(),
        Status::Died {
            exit: Exit::OutOfMemory { limit, .. },
        } => {
            format!("used more than its {} of memory", bytes_text(*limit))
        }
        Status::Died { exit } => format!("Python ended: {}", exit_text(*exit)),
        Status::ProtocolError { what } => {
            format!("Python broke the connection to the server ({what})")
        }
        Status::Reset => "stopped by a reset".to_owned(),
        Status::Closed => {
            "stopped because its session was closed or the server is ending".to_owned()
        }
    })
}

fn table(variants: &[VariantReport]) -> String {
    let scored = variants.iter().any(|variant| variant.score.is_some());
    let mut lines = vec![match scored {
        true => {
            "variant | status | score | value | time | peak memory | changed variables".to_owned()
        }
        false => "variant | status | value | time | peak memory | changed variables".to_owned(),
    }];
    lines.extend(variants.iter().map(|variant| {
        let mut cells = vec![variant.name.clone(), status_name(&variant.ended).to_owned()];
        if scored {
            cells.push(match &variant.score {
                Some(Ok(score)) => number_text(*score),
                Some(Err(why)) => format!("none ({})", first_line(why, TABLE_VALUE)),
                None => "–".to_owned(),
            });
        }
        match &variant.ended {
            Ok(outcome) => {
                cells.push(gist(outcome));
                cells.push(time_text(outcome.duration));
                cells.push(bytes_text(peak(outcome)));
                cells.push(
                    outcome
                        .variables
                        .as_ref()
                        .map_or("–".to_owned(), changed_names),
                );
            }
            Err(_) => cells.extend(["–"; 4].map(str::to_owned)),
        }
        cells.join(" | ")
    }));
    lines.join("\n")
}

fn what_was_kept(source: &SessionId, report: &ExploreReport) -> String {
    match (report.kept.as_slice(), report.replaced) {
        ([], _) => format!("No copy was kept; session \"{source}\" is as it was."),
        ([(variant, session)], true) => {
            format!("Kept {variant} in the place of session \"{session}\".")
        }
        (kept, _) => {
            let names: Vec<String> = kept
                .iter()
                .map(|(variant, session)| format!("{variant} as session \"{session}\""))
                .collect();
            format!(
                "Kept {}; session \"{source}\" is as it was.",
                names.join(", ")
            )
        }
    }
}

fn variant_fields(variant: &VariantReport, text: &str) -> Value {
    let (score, score_error) = match &variant.score {
        Some(Ok(score)) if score.is_finite() => (Some(*score), None),
        // JSON has no word for it, but it can be said.
        Some(Ok(score)) => (None, Some(format!("it is {score}"))),
        Some(Err(why)) => (None, Some(why.clone())),
        None => (None, None),
    };
    let outcome = variant.ended.as_ref().ok();
    json!({
        "name": variant.name,
        "status": status_name(&variant.ended),
        "value": outcome.and_then(value).map(|value| shortened(&value, MAX_VALUE_LENGTH)),
        "text": text,
        "duration_ms": outcome.map(|outcome| outcome.duration.as_micros() as f64 / 1000.0),
        "memory_bytes": outcome.map(peak),
        "variables": outcome.and_then(|outcome| outcome.variables.as_ref()).map(variable_fields),
        "error": match &variant.ended {
            Ok(outcome) => why_not_ok(outcome),
            Err(refused) => Some(refusals::error_text(refused)),
        },
        "score": score,
        "score_error": score_error,
    })
}

fn status_name(ended: &Result<Outcome, Refused>) -> &'static str {
    match ended {
        Ok(outcome) => outcome.status.name(),
        Err(_) => "refused",
    }
}

/// The value, or else why there is none, in the words of the table.
fn gist(outcome: &Outcome) -> String {
    let told = value(outcome).or_else(|| why_not_ok(outcome));
    told.map_or("–".to_owned(), |text| first_line(&text, TABLE_VALUE))
}

/// The text of the last expression's value, when there is one.
fn value(outcome: &Outcome) -> Option<String> {
    let values = outcome.output.parts.iter().filter_map(|part| match part {
        Part::Text {
            stream: Stream::Value,
            text,
        } => Some(text.as_str()),
        _ => None,
    });
    Some(values.collect::<String>().trim_end().to_owned()).filter(|value| !value.is_empty())
}

/// The most memory a variant held, or what it held at its end where the kernel does not tell the
/// peak.
fn peak(outcome: &Outcome) -> u64 {
    if outcome.memory.peak > 0 {
        outcome.memory.peak
    } else {
        outcome.memory.now
    }
}

/// A number as Python would show it: with an exponent where there would be many zeros.
fn number_text(number: f64) -> String {
    let size = number.abs();
    if size != 0.0 && size.is_finite() && !(1e-4..1e16).contains(&size) {
        format!("{number:e}")
    } else {
        number.to_string()
    }
}

fn time_text(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    if seconds < 1.0 {
        format!("{:.1} ms", seconds * 1000.0)
    } else {
        format!("{seconds:.1} s")
    }
}

fn changed_names(changes: &VariableChanges) -> String {
    let written = changes
        .created
        .iter()
        .chain(&changes.changed)
        .map(|variable| variable.name.clone());
    let deleted = changes.deleted.iter().map(|name| format!("-{name}"));
    let mut names: Vec<String> = written.chain(deleted).collect();
    let more = names.len().saturating_sub(TABLE_NAMES) as u64 + changes.omitted;
    names.truncate(TABLE_NAMES);
    match (names.is_empty(), more) {
        (true, 0) => "none".to_owned(),
        (_, 0) => names.join(", "),
        _ => format!("{} and {more} more", names.join(", ")),
    }
}

fn first_line(text: &str, most: usize) -> String {
    let mut lines = text.lines();
    let first = shortened(lines.next().unwrap_or_default(), most);
    if lines.next().is_some() && !first.ends_with('…') {
        format!("{first} …")
    } else {
        first
    }
}

fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::tools::tests::assert_valid_output;
    use crate::sandbox::{Isolation, MemoryUse};
    use crate::session::{ExecutionId, ImageType, Output, PythonError, Variable};

    fn said(stream: Stream, text: &str) -> Part {
        Part::Text {
            stream,
            text: text.to_owned(),
        }
    }

    fn picture(bytes: usize) -> Part {
        Part::Image(Image {
            kind: ImageType::Png,
            bytes: vec![7; bytes],
            width: 8,
            height: 6,
            scaled_from: None,
            frames: None,
        })
    }

    fn outcome(status: Status, parts: Vec<Part>) -> Outcome {
        Outcome {
            execution: ExecutionId(1),
            status,
            output: Output {
                parts,
                ..Output::default()
            },
            duration: Duration::from_micros(1500),
            memory: MemoryUse {
                now: 1 << 20,
                peak: 3 << 20,
            },
            processor_time: Duration::from_millis(3),
            variables: Some(VariableChanges {
                created: vec![Variable {
                    name: "x".to_owned(),
                    kind: "int".to_owned(),
                    shape: None,
                    size: Some(28),
                }],
                deleted: vec!["y".to_owned()],
                ..VariableChanges::default()
            }),
            files: None,
            isolation: Isolation::default(),
            can_undo: 0,
            tool_calls: Default::default(),
            rulings: Vec::new(),
            blocked: Vec::new(),
            notes: Vec::new(),
            first_line: String::new(),
            others: Default::default(),
        }
    }

    fn variant(name: &str, ended: Result<Outcome, Refused>) -> VariantReport {
        VariantReport {
            name: name.to_owned(),
            ended,
            score: None,
        }
    }

    fn report(variants: Vec<VariantReport>) -> ExploreReport {
        ExploreReport {
            variants,
            kept: Vec::new(),
            replaced: false,
            notes: Vec::new(),
            lost: Vec::new(),
        }
    }

    /// Renders a comparison, checks it against the output schema, and returns it as it goes over
    /// the wire.
    #[track_caller]
    fn rendered(report: &ExploreReport, most_chars: usize) -> Value {
        let result =
            serde_json::to_value(comparison(&"s".parse().unwrap(), report, most_chars)).unwrap();
        assert_valid_output("explore", &result["structuredContent"]);
        assert_eq!(result["isError"], false);
        result
    }

    #[track_caller]
    fn text(report: &ExploreReport, most_chars: usize) -> String {
        rendered(report, most_chars)["content"][0]["text"]
            .as_str()
            .unwrap()
            .to_owned()
    }

    #[test]
    fn the_table_has_a_line_for_each_variant_and_short_values_are_told_once() {
        let error = PythonError {
            name: "ValueError".to_owned(),
            message: "bad".to_owned(),
            traceback: "Traceback …\nValueError: bad".to_owned(),
            line: Some(3),
        };
        let report = report(vec![
            variant(
                "fast",
                Ok(outcome(
                    Status::Completed,
                    vec![said(Stream::Value, "0.91\n")],
                )),
            ),
            variant("quiet", Ok(outcome(Status::Completed, vec![]))),
            variant(
                "broken",
                Ok(outcome(
                    Status::Raised(error),
                    vec![said(Stream::Stdout, "before\n")],
                )),
            ),
            variant("absent", Err(Refused::CancelledWhileWaiting)),
        ]);
        assert_eq!(
            text(&report, 5000),
            "variant | status | value | time | peak memory | changed variables\n\
             fast | ok | 0.91 | 1.5 ms | 3 MiB | x, -y\n\
             quiet | ok | – | 1.5 ms | 3 MiB | x, -y\n\
             broken | error | ValueError: bad (line 3) | 1.5 ms | 3 MiB | x, -y\n\
             absent | refused | – | – | – | –\n\
             \n\
             No copy was kept; session \"s\" is as it was.\n\
             All variants drew the same random numbers from `random`, numpy and torch.\n\
             \n--- broken ---\nbefore\nTraceback …\nValueError: bad\n\
             \n--- absent ---\nIt has not run: the request was cancelled while it waited for its \
             turn. It has not run"
        );
        let variants = &rendered(&report, 5000)["structuredContent"]["variants"];
        assert_eq!(variants[0]["value"], "0.91");
        assert_eq!(variants[0]["memory_bytes"], 3 << 20);
        assert_eq!(variants[0]["variables"]["created"][0]["name"], "x");
        assert_eq!(variants[2]["error"], "ValueError: bad (line 3)");
        assert_eq!(
            (&variants[3]["status"], &variants[3]["duration_ms"]),
            (&json!("refused"), &Value::Null)
        );
    }

    #[test]
    fn every_end_but_a_good_one_is_named_without_advice_for_a_session_that_is_gone() {
        let limit = Duration::from_secs(60);
        let ends = [
            (
                Status::TimedOut {
                    limit,
                    state: StateAfter::Kept,
                },
                "stopped at its time-out of 60 s",
            ),
            (
                Status::TimedOut {
                    limit,
                    state: StateAfter::Lost,
                },
                "was killed",
            ),
            (
                Status::Cancelled {
                    state: StateAfter::Kept,
                },
                "cancelled",
            ),
            (
                Status::Died {
                    exit: Exit::OutOfMemory {
                        limit: 512 << 20,
                        files_kept: true,
                    },
                },
                "used more than its 512 MiB of memory",
            ),
            (
                Status::Died {
                    exit: Exit::Signal(11),
                },
                "SIGSEGV",
            ),
            (
                Status::ProtocolError {
                    what: "a frame of 9 GiB".to_owned(),
                },
                "a frame of 9 GiB",
            ),
            (Status::Reset, "reset"),
            (Status::Closed, "closed"),
        ];
        for (status, words) in ends {
            let name = status.name();
            let told = text(
                &report(vec![variant("v", Ok(outcome(status, vec![])))]),
                5000,
            );
            assert!(
                told.contains(name) && told.contains(words),
                "{words:?} is not in {told:?}"
            );
            assert!(!told.contains("Call `"), "{told}");
        }
    }

    #[test]
    fn scores_decide_and_a_variant_without_one_says_why() {
        let done = || Ok(outcome(Status::Completed, vec![]));
        let scored = |name: &str, score| VariantReport {
            score: Some(score),
            ..variant(name, done())
        };
        let mut report = report(vec![
            scored("a", Ok(0.5)),
            scored("b", Ok(2.0)),
            scored(
                "c",
                Err("NameError: name 'score' is not defined".to_owned()),
            ),
            scored("d", Ok(f64::INFINITY)),
        ]);
        report.kept = vec![("b".to_owned(), "s-b".parse().unwrap())];
        let told = text(&report, 5000);
        assert!(
            told.starts_with("variant | status | score | value"),
            "{told}"
        );
        assert!(
            told.contains("\na | ok | 0.5 |") && told.contains("\nc | ok | none (NameError"),
            "{told}"
        );
        assert!(
            told.contains("Kept b as session \"s-b\"; session \"s\" is as it was."),
            "{told}"
        );
        let structured = rendered(&report, 5000)["structuredContent"].take();
        assert_eq!(structured["variants"][1]["score"], 2.0);
        assert_eq!(
            structured["variants"][2]["score_error"],
            "NameError: name 'score' is not defined"
        );
        assert_eq!(structured["variants"][3]["score"], Value::Null);
        assert_eq!(structured["variants"][3]["score_error"], "it is inf");
        assert_eq!(
            structured["kept"],
            json!([{"variant": "b", "session_id": "s-b"}])
        );
        report.kept = vec![("b".to_owned(), "s".parse().unwrap())];
        report.replaced = true;
        assert!(text(&report, 5000).contains("Kept b in the place of session \"s\"."));
        let shown = [0.0, 15.0, -0.25, 1e-15, -2.5e20, f64::INFINITY].map(number_text);
        assert_eq!(shown, ["0", "15", "-0.25", "1e-15", "-2.5e20", "inf"]);
    }

    #[test]
    fn what_the_copies_lack_and_notes_are_told() {
        let mut report = report(vec![variant("a", Ok(outcome(Status::Completed, vec![])))]);
        report.lost = vec!["2 threads".to_owned()];
        report.notes = vec!["A note.".to_owned()];
        assert!(text(&report, 5000).ends_with("A note.\nNot carried over: 2 threads."));
        let structured = rendered(&report, 5000)["structuredContent"].take();
        assert_eq!(
            (&structured["not_carried_over"][0], &structured["notes"][0]),
            (&json!("2 threads"), &json!("A note."))
        );
    }

    #[test]
    fn short_outputs_give_their_room_to_long_ones() {
        assert_eq!(fair_share(&[10, 20], 100), usize::MAX);
        assert_eq!(fair_share(&[10, 500, 500], 100), 45);
        assert_eq!(fair_share(&[500, 500], 100), 50);
        assert_eq!(fair_share(&[100], 100), usize::MAX);
        assert_eq!(fair_share(&[40, 60], 100), usize::MAX);
        assert_eq!(fair_share(&[], 100), usize::MAX);
    }

    #[test]
    fn long_outputs_keep_their_head_and_their_tail() {
        let long = format!("begin{}end", "ä".repeat(10_000));
        let told = |name: &str, text: &str| {
            variant(
                name,
                Ok(outcome(Status::Completed, vec![said(Stream::Stdout, text)])),
            )
        };
        let result = rendered(
            &report(vec![
                told("long", &long),
                told("short", "brief"),
                told("other", &long),
            ]),
            1000,
        );
        let variants = &result["structuredContent"]["variants"];
        assert_eq!(variants[1]["text"], "brief");
        for cut in [0, 2] {
            let text = variants[cut]["text"].as_str().unwrap();
            assert!(
                text.starts_with("beginä") && text.ends_with("äend"),
                "{text}"
            );
            assert!(
                (497..600).contains(&text.chars().count()),
                "{}",
                text.chars().count()
            );
            assert!(text.contains("[… 9511 characters cut here …]"), "{text}");
        }
        assert!(
            result["content"][0]["text"]
                .as_str()
                .unwrap()
                .chars()
                .count()
                < 1500
        );
    }

    #[test]
    fn what_was_cut_already_is_cut_in_the_same_place() {
        let told = Told {
            head: "h".repeat(60),
            cut: Some((900, 12)),
            tail: "t".repeat(40),
        };
        let whole = format!(
            "{}\n[… 900 characters, 12 lines cut here …]\n{}",
            "h".repeat(60),
            "t".repeat(40)
        );
        assert_eq!(told.clone().within(100), whole);
        let less = format!(
            "{}\n[… 980 characters cut here …]\n{}",
            "h".repeat(10),
            "t".repeat(10)
        );
        assert_eq!(told.clone().within(20), less);
        // A tail that needs less than its half leaves the rest to the head.
        let more = format!(
            "{}\n[… 910 characters cut here …]\n{}",
            "h".repeat(50),
            "t".repeat(40)
        );
        assert_eq!(told.within(90), more);
    }

    #[test]
    fn pictures_follow_the_text_each_with_the_name_of_its_variant() {
        let shows = |name: &str, pictures: usize, bytes: usize| {
            let parts = (0..pictures).map(|_| picture(bytes)).collect();
            variant(name, Ok(outcome(Status::Completed, parts)))
        };
        let result = rendered(&report(vec![shows("a", 1, 3), shows("b", 2, 3)]), 5000);
        let content = result["content"].as_array().unwrap();
        assert_eq!(content.len(), 7);
        assert!(
            content[0]["text"]
                .as_str()
                .unwrap()
                .contains("--- b ---\n[image 2: 8×6 png]\n[image 3: 8×6 png]")
        );
        assert_eq!(content[1]["text"], "[image 1, of a]");
        assert_eq!(content[2]["type"], "image");
        assert_eq!(content[5]["text"], "[image 3, of b]");
        let described = json!({"variant": "b", "mime_type": "image/png", "width": 8, "height": 6});
        assert_eq!(result["structuredContent"]["images"][2], described);
        // More than one cell may show are left out, and their places say so.
        for many in [
            report(vec![shows("a", 15, 3), shows("b", 15, 3)]),
            report(vec![shows("a", 3, 9_000_000)]),
        ] {
            let result = rendered(&many, 5000);
            let images = result["content"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|block| block["type"] == "image")
                .count();
            assert_eq!(
                images,
                result["structuredContent"]["images"]
                    .as_array()
                    .unwrap()
                    .len()
            );
            assert!(images == 20 || images == 2, "{images}");
            assert!(
                result["content"][0]["text"]
                    .as_str()
                    .unwrap()
                    .contains("[image not shown")
            );
        }
    }

    #[test]
    fn a_line_of_the_table_stays_one_line() {
        let value = "a\nb\nc";
        let report = report(vec![variant(
            "v",
            Ok(outcome(Status::Completed, vec![said(Stream::Value, value)])),
        )]);
        let told = text(&report, 5000);
        assert_eq!(
            told.lines().nth(1),
            Some("v | ok | a … | 1.5 ms | 3 MiB | x, -y")
        );
        assert!(told.ends_with("--- v ---\na\nb\nc"), "{told}");
        assert_eq!(first_line(&"x".repeat(100), 60).chars().count(), 61);
        let many = |count: usize| VariableChanges {
            created: (0..count)
                .map(|number| Variable {
                    name: format!("v{number}"),
                    kind: "int".to_owned(),
                    shape: None,
                    size: None,
                })
                .collect(),
            omitted: 2,
            ..VariableChanges::default()
        };
        assert_eq!(changed_names(&many(8)), "v0, v1, v2, v3, v4, v5 and 4 more");
        assert_eq!(changed_names(&VariableChanges::default()), "none");
    }
}
