//! Collects the output of a cell within limits.
//!
//! Text takes three paths: all of it into the spool, its size into the totals, and into the buffer
//! (`OutputBuffer`), which keeps the head and the tail when there is more than the caller wants.
//! The buffer may exceed the limit while it is filled, so that cutting is rare; the last cut is
//! exact.
//!
//! The current line stays open until it ends, because a carriage return restarts it: a progress bar
//! leaves its last state. Memory use is bounded regardless of the amount of output. Images are
//! limited in number and size, and are encoded at the end on another thread.

use crate::runner_client::{Bundle, Pipe};

use super::images::BadImage;
use super::rich::{self, Shown};
use super::spool::{FullOutput, Spool};
use super::terminal::{Piece, Terminal};
use super::{Image, Output, Part, Stream};

const MAX_IMAGES: usize = 20;
const MAX_IMAGE_BYTES: usize = 20_000_000;
/// Number of figures kept per execution, and the size limit of one.
const MAX_FIGURES: usize = 20;
const MAX_FIGURE_BYTES: usize = 4 * 1024 * 1024;
/// A line longer than this can no longer be redrawn.
const MAX_OPEN_LINE_LENGTH: usize = 64 * 1024;
/// Characters beyond the limit that are kept before the buffer is cut, to amortize the cost of
/// cutting.
const SLACK: usize = 64 * 1024;

/// Limit in characters for the latest line reported while code runs.
const MAX_TOLD_LINE_LENGTH: usize = 200;

/// Output since the previous look.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct OutputDelta {
    /// The newest part of it.
    pub(super) text: String,
    /// Number of characters that are not in `text`.
    pub(super) omitted: u64,
}

/// Read position in an execution's text.
#[derive(Debug, Default)]
pub(super) struct OutputCursor {
    /// Bytes and characters of the spool.
    bytes: u64,
    chars: u64,
    /// The open line as last seen.
    line: String,
}

/// The collected output of one execution.
pub(super) struct CollectedOutput {
    pub(super) raw: RawOutput,
    pub(super) text: std::io::Result<FullOutput>,
    /// The sources of figures.
    pub(super) figures: Vec<FullOutput>,
}

/// Collects the output of one execution.
pub(super) struct OutputCollector {
    terminals: [Terminal; 2],
    buffer: OutputBuffer,
    figures: Vec<FullOutput>,
}

impl OutputCollector {
    pub(super) fn new(max_chars: usize) -> OutputCollector {
        OutputCollector {
            terminals: Default::default(),
            buffer: OutputBuffer::new(max_chars),
            figures: Vec::new(),
        }
    }

    /// Adds bytes of standard output or standard error.
    pub(super) fn text(&mut self, pipe: Pipe, bytes: &[u8]) {
        let stream = match pipe {
            Pipe::Out => Stream::Stdout,
            Pipe::Err => Stream::Stderr,
        };
        let buffer = &mut self.buffer;
        self.terminals[pipe as usize].read(bytes, |piece| buffer.type_on(stream, piece));
    }

    /// Adds rich output. With `update`, it replaces the output with the same `display_id`.
    pub(super) fn display(&mut self, bundle: Bundle, display_id: Option<String>, update: bool) {
        self.show(Stream::Display, bundle, display_id, update);
    }

    /// Adds the value of the last expression.
    pub(super) fn value(&mut self, bundle: Bundle) {
        self.show(Stream::Value, bundle, None, false);
    }

    /// Adds a traceback.
    pub(super) fn traceback(&mut self, text: &str) {
        let text = without_escapes(text);
        self.buffer.append(Stream::Traceback, &text, None);
    }

    /// Clears the output, now or when new output arrives.
    pub(super) fn clear(&mut self, wait: bool) {
        self.buffer.clear_next = wait;
        if !wait {
            self.buffer.clear();
        }
    }

    /// Returns the newest `max_chars` of the output since `cursor`, and advances `cursor`.
    pub(super) fn delta(&self, cursor: &mut OutputCursor, max_chars: usize) -> OutputDelta {
        self.buffer.delta(cursor, max_chars)
    }

    /// Returns the latest non-blank line, shortened and without control characters.
    pub(super) fn latest_line(&self) -> Option<String> {
        let line = self.buffer.latest_line()?;
        // Only the start of the line is shown, so its length does not matter.
        let shown = line
            .trim_start()
            .chars()
            .filter(|character| !character.is_control());
        Some(shown.take(MAX_TOLD_LINE_LENGTH).collect::<String>())
            .filter(|line| !line.trim().is_empty())
    }

    /// Ends the collection. The images of the result are not encoded yet.
    pub(super) fn finish(mut self) -> CollectedOutput {
        for pipe in Pipe::BOTH {
            let stream = if pipe == Pipe::Out {
                Stream::Stdout
            } else {
                Stream::Stderr
            };
            let buffer = &mut self.buffer;
            self.terminals[pipe as usize].finish(|piece| buffer.type_on(stream, piece));
        }
        let (raw, text) = self.buffer.finish(self.figures.len());
        CollectedOutput {
            raw,
            text,
            figures: self.figures,
        }
    }

    /// Keeps the source of a figure. Without room for it, only the summary of the figure remains.
    fn keep_figure(&mut self, json: &str) {
        if self.figures.len() == MAX_FIGURES || json.len() > MAX_FIGURE_BYTES {
            return;
        }
        let mut spool = Spool::default();
        spool.write(json);
        self.figures
            .extend(spool.finish().ok().filter(|kept| !kept.is_cut()));
    }

    fn show(&mut self, stream: Stream, bundle: Bundle, display_id: Option<String>, update: bool) {
        let shown = rich::choose(bundle);
        self.buffer.clear_if_asked();
        let item = match shown {
            Shown::Nothing => return,
            Shown::Text(text) => Item::text(stream, without_escapes(&text), display_id),
            Shown::Image(bytes) => Item::Image { bytes, display_id },
            Shown::Figure { summary, json } => {
                self.keep_figure(&json);
                Item::text(stream, without_escapes(&summary), display_id)
            }
        };
        if update && self.buffer.replace(&item) {
            return;
        }
        match item {
            Item::Text {
                text, display_id, ..
            } => self.buffer.append(stream, &text, display_id),
            Item::Image { bytes, display_id } => self.buffer.append_image(bytes, display_id),
            Item::Gap => {}
        }
    }
}

/// Returns text without colour codes, reduced to at most this many characters: head and tail, with
/// a line between them.
pub(super) fn bounded_text(text: &str, most: usize) -> String {
    let text = without_escapes(text);
    let all = text.chars().count();
    if all <= most {
        return text;
    }
    let head = most * 3 / 5;
    let at = |index: usize| {
        text.char_indices()
            .nth(index)
            .map_or(text.len(), |(at, _)| at)
    };
    format!(
        "{}\n… {} characters cut …\n{}",
        &text[..at(head)],
        all - most,
        &text[at(all - (most - head))..]
    )
}

fn without_escapes(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut terminal = Terminal::default();
    terminal.read(text.as_bytes(), |piece| {
        if let Piece::Text(text) = piece {
            clean.push_str(text);
        }
    });
    clean
}

/// An item in the buffer.
#[derive(Debug)]
enum Item {
    Text {
        stream: Stream,
        text: String,
        chars: usize,
        display_id: Option<String>,
    },
    Image {
        bytes: Vec<u8>,
        display_id: Option<String>,
    },
    /// Where text was cut.
    Gap,
}

impl Item {
    fn text(stream: Stream, text: String, display_id: Option<String>) -> Item {
        Item::Text {
            stream,
            chars: text.chars().count(),
            text,
            display_id,
        }
    }

    fn display_id(&self) -> Option<&str> {
        match self {
            Item::Text { display_id, .. } | Item::Image { display_id, .. } => display_id.as_deref(),
            Item::Gap => None,
        }
    }
}

struct OutputBuffer {
    limit: usize,
    items: Vec<Item>,
    /// Position of the gap among the items, once there is one.
    gap: Option<usize>,
    gap_chars: u64,
    gap_newlines: u64,
    /// Characters in the buffer: all, and those before the gap.
    kept: usize,
    kept_before_gap: usize,
    total_chars: u64,
    total_newlines: u64,
    /// Whether the last text did not end its line.
    ends_in_line: bool,
    images: usize,
    image_bytes: usize,
    images_dropped: usize,
    line: OpenLine,
    clear_next: bool,
    spool: Spool,
}

#[derive(Default)]
struct OpenLine {
    text: String,
    stream: Option<Stream>,
    returned: bool,
}

impl OutputBuffer {
    fn new(limit: usize) -> OutputBuffer {
        OutputBuffer {
            limit,
            items: Vec::new(),
            gap: None,
            gap_chars: 0,
            gap_newlines: 0,
            kept: 0,
            kept_before_gap: 0,
            total_chars: 0,
            total_newlines: 0,
            ends_in_line: false,
            images: 0,
            image_bytes: 0,
            images_dropped: 0,
            line: OpenLine::default(),
            clear_next: false,
            spool: Spool::default(),
        }
    }

    /// Applies a piece of text to the open line as a terminal would.
    fn type_on(&mut self, stream: Stream, piece: Piece<'_>) {
        self.clear_if_asked();
        if self.line.stream != Some(stream) {
            self.end_line();
            self.line.stream = Some(stream);
        }
        let line = &mut self.line;
        let text = match piece {
            Piece::CarriageReturn => {
                line.returned = true;
                return;
            }
            Piece::Backspace => {
                line.text.pop();
                return;
            }
            Piece::Text(text) => text,
        };
        // Before a newline, a carriage return is only the first half of the line ending.
        if std::mem::take(&mut line.returned) && !text.starts_with('\n') {
            line.text.clear();
        }
        match text.rfind('\n') {
            Some(end) => {
                let mut whole = std::mem::take(&mut line.text);
                let (lines, rest) = text.split_at(end + 1);
                line.text.push_str(rest);
                if whole.is_empty() {
                    self.store(stream, lines, None);
                } else {
                    whole.push_str(lines);
                    self.store(stream, &whole, None);
                }
            }
            None => line.text.push_str(text),
        }
        if self.line.text.len() > MAX_OPEN_LINE_LENGTH {
            let text = std::mem::take(&mut self.line.text);
            self.store(stream, &text, None);
        }
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        if let Some(stream) = line.stream {
            self.store(stream, &line.text, None);
        }
    }

    /// Appends text that is not part of a stream.
    fn append(&mut self, stream: Stream, text: &str, display_id: Option<String>) {
        self.clear_if_asked();
        self.end_line();
        self.store(stream, text, display_id);
    }

    fn append_image(&mut self, bytes: Vec<u8>, display_id: Option<String>) {
        self.end_line();
        if self.images >= MAX_IMAGES || self.image_bytes + bytes.len() > MAX_IMAGE_BYTES {
            self.images_dropped += 1;
            return;
        }
        self.images += 1;
        self.image_bytes += bytes.len();
        self.items.push(Item::Image { bytes, display_id });
    }

    fn store(&mut self, stream: Stream, text: &str, display_id: Option<String>) {
        if text.is_empty() {
            return;
        }
        self.separate(stream);
        let chars = text.chars().count();
        self.total_chars += chars as u64;
        self.total_newlines += newlines(text);
        self.ends_in_line = !text.ends_with('\n');
        self.spool.write(text);
        self.kept += chars;
        match self.items.last_mut() {
            Some(Item::Text {
                stream: last,
                text: known,
                chars: count,
                display_id: None,
            }) if *last == stream && display_id.is_none() => {
                known.push_str(text);
                *count += chars;
            }
            _ => self.items.push(Item::Text {
                stream,
                text: text.to_owned(),
                chars,
                display_id,
            }),
        }
        self.cut(self.limit.max(SLACK));
    }

    /// Ends the last line if the previous or the next item stands on its own: a value never shares
    /// a line with printed text.
    fn separate(&mut self, next: Stream) {
        let is_thing = |stream: Stream| !matches!(stream, Stream::Stdout | Stream::Stderr);
        match self.items.last_mut() {
            Some(Item::Text {
                stream,
                text,
                chars,
                ..
            }) if self.ends_in_line && (is_thing(next) || is_thing(*stream)) => {
                text.push('\n');
                *chars += 1;
            }
            _ => return,
        }
        self.kept += 1;
        self.total_chars += 1;
        self.total_newlines += 1;
        self.spool.write("\n");
    }

    /// Replaces the item that has the same display id. Returns false if the buffer has none.
    fn replace(&mut self, item: &Item) -> bool {
        let Some(id) = item.display_id() else {
            return false;
        };
        let Some(place) = self
            .items
            .iter()
            .rposition(|known| known.display_id() == Some(id))
        else {
            return false;
        };
        let is_last = place + 1 == self.items.len();
        if let (Item::Text { text: new, .. }, Item::Text { text, chars, .. }) =
            (item, &mut self.items[place])
        {
            let mut new = new.clone();
            if !is_last && !new.ends_with('\n') {
                new.push('\n');
            }
            let before_gap = self.gap.is_some_and(|gap| place < gap);
            self.total_chars = self.total_chars - *chars as u64 + new.chars().count() as u64;
            self.total_newlines = self.total_newlines - newlines(text) + newlines(&new);
            self.kept = self.kept - *chars + new.chars().count();
            if before_gap {
                self.kept_before_gap = self.kept_before_gap - *chars + new.chars().count();
            }
            self.spool.write(&new);
            *chars = new.chars().count();
            if is_last {
                self.ends_in_line = !new.ends_with('\n');
            }
            *text = new;
            self.cut(self.limit.max(SLACK));
            return true;
        }
        if let (Item::Image { bytes: new, .. }, Item::Image { bytes, .. }) =
            (item, &mut self.items[place])
            && self.image_bytes - bytes.len() + new.len() <= MAX_IMAGE_BYTES
        {
            self.image_bytes = self.image_bytes - bytes.len() + new.len();
            bytes.clone_from(new);
            return true;
        }
        // A text became an image or the other way round: the new item is appended.
        false
    }

    /// Printed text is in the spool, followed by the open line. Only the added part of that line is
    /// returned, unless the line was rewritten.
    fn delta(&self, cursor: &mut OutputCursor, max_chars: usize) -> OutputDelta {
        let line = self.line.text.as_str();
        let old = if self.goes_on_with(cursor) {
            cursor.line.as_str()
        } else {
            ""
        };
        let old_in_spool = (old.len() as u64).min(self.spool.size() - cursor.bytes);
        let from = cursor.bytes + old_in_spool;
        let line_from = old.len() - usize::try_from(old_in_spool).expect("it is a part of `old`");

        let fresh = self.spool.chars() - cursor.chars + line.chars().count() as u64;
        let fresh = fresh.saturating_sub(old.chars().count() as u64);
        let wanted = max_chars.saturating_mul(4);
        let start = from.max(self.spool.size().saturating_sub(wanted as u64));
        // If the spool cannot be read, there is no text to show, and `omitted` reports that.
        let mut bytes = self.spool.read_range(start, wanted).unwrap_or_default();
        bytes.extend_from_slice(line.get(line_from..).unwrap_or_default().as_bytes());
        let inside_character = bytes
            .iter()
            .take_while(|byte| **byte & 0xC0 == 0x80)
            .count();
        let text = String::from_utf8_lossy(&bytes[inside_character..]);
        let chars = text.chars().count();
        let text = text[byte_of(&text, chars.saturating_sub(max_chars))..].to_owned();

        *cursor = OutputCursor {
            bytes: self.spool.size(),
            chars: self.spool.chars(),
            line: line.to_owned(),
        };
        OutputDelta {
            omitted: fresh.saturating_sub(text.chars().count() as u64),
            text,
        }
    }

    /// Returns whether the rest of the spool, followed by the open line, starts with the line that
    /// was seen.
    fn goes_on_with(&self, cursor: &OutputCursor) -> bool {
        let mut next = self
            .spool
            .read_range(cursor.bytes, cursor.line.len())
            .unwrap_or_default();
        let missing = cursor.line.len() - next.len();
        next.extend_from_slice(&self.line.text.as_bytes()[..missing.min(self.line.text.len())]);
        next == cursor.line.as_bytes()
    }

    fn latest_line(&self) -> Option<&str> {
        if !self.line.text.trim().is_empty() {
            return Some(&self.line.text);
        }
        let Some(Item::Text { text, .. }) = self.items.last() else {
            return None;
        };
        text.trim_end().rsplit('\n').next()
    }

    fn clear_if_asked(&mut self) {
        if std::mem::take(&mut self.clear_next) {
            self.clear();
        }
    }

    /// Clears everything except the spool, which keeps all printed text.
    fn clear(&mut self) {
        let spool = std::mem::take(&mut self.spool);
        *self = OutputBuffer {
            spool,
            ..OutputBuffer::new(self.limit)
        };
    }

    /// Removes the middle when the buffer exceeds the limit plus `slack`.
    fn cut(&mut self, slack: usize) {
        let head = self.limit * 3 / 5;
        let tail = self.limit - head;
        if self.gap.is_none() {
            if self.kept <= self.limit.saturating_add(slack) {
                return;
            }
            self.open_gap(head);
        }
        // An update may have lengthened the head.
        let gap = self.gap.expect("the gap was opened above");
        if self.kept_before_gap > head {
            let excess = self.kept_before_gap - head;
            let taken = self.remove_last(gap, excess);
            self.kept_before_gap -= taken;
        }
        let after = self.kept - self.kept_before_gap;
        if after > tail.saturating_add(slack) {
            self.remove_first(gap + 1, after - tail);
        }
    }

    /// Splits the items after `head` characters.
    fn open_gap(&mut self, head: usize) {
        let mut left = head;
        let mut place = 0;
        for item in &mut self.items {
            if let Item::Text {
                text,
                chars,
                stream,
                display_id,
            } = item
            {
                if *chars > left {
                    let at = byte_of(text, left);
                    // Both halves lose their display id: an update could not replace both.
                    let rest = Item::text(*stream, text.split_off(at), None);
                    *chars = left;
                    *display_id = None;
                    self.items.insert(place + 1, rest);
                    place += 1;
                    break;
                }
                left -= *chars;
            }
            place += 1;
        }
        self.items.insert(place, Item::Gap);
        self.gap = Some(place);
        self.kept_before_gap = head;
    }

    /// Removes `excess` characters from the texts starting at `place`. Images stay.
    fn remove_first(&mut self, place: usize, excess: usize) {
        let mut left = excess;
        let mut kept = Vec::new();
        let mut consumed = place;
        for item in &mut self.items[place..] {
            if left == 0 {
                break;
            }
            consumed += 1;
            match item {
                Item::Text {
                    text,
                    chars,
                    display_id,
                    ..
                } if *chars > left => {
                    let at = byte_of(text, left);
                    self.gap_newlines += newlines(&text[..at]);
                    text.drain(..at);
                    *chars -= left;
                    *display_id = None;
                    left = 0;
                    consumed -= 1;
                }
                Item::Text { text, chars, .. } => {
                    self.gap_newlines += newlines(text);
                    left -= *chars;
                }
                Item::Image { .. } => kept.push(std::mem::replace(item, Item::Gap)),
                Item::Gap => {}
            }
        }
        self.items.splice(place..consumed, kept);
        self.gap_chars += (excess - left) as u64;
        self.kept -= excess - left;
    }

    /// Removes `excess` characters from the texts that end at `place`, and returns the number
    /// removed.
    fn remove_last(&mut self, place: usize, excess: usize) -> usize {
        let mut left = excess;
        for item in self.items[..place].iter_mut().rev() {
            if let Item::Text {
                text,
                chars,
                display_id,
                ..
            } = item
            {
                let taken = left.min(*chars);
                let at = byte_of(text, *chars - taken);
                self.gap_newlines += newlines(&text[at..]);
                text.truncate(at);
                *chars -= taken;
                *display_id = None;
                left -= taken;
            }
        }
        self.gap_chars += (excess - left) as u64;
        self.kept -= excess - left;
        excess - left
    }

    fn finish(mut self, figures: usize) -> (RawOutput, std::io::Result<FullOutput>) {
        self.end_line();
        if self.images_dropped > 0 {
            let text = format!(
                "[{} more images are not shown: an execution may show {MAX_IMAGES} images of {} \
                 MB together. Show fewer in one cell]",
                self.images_dropped,
                MAX_IMAGE_BYTES / 1_000_000
            );
            self.append(Stream::Display, &text, None);
        }
        self.cut(0);
        let raw = RawOutput {
            items: self.items,
            total_chars: self.total_chars,
            total_lines: self.total_newlines + u64::from(self.ends_in_line),
            cut_chars: self.gap_chars,
            cut_lines: self.gap_newlines,
            figures,
        };
        (raw, self.spool.finish())
    }
}

fn newlines(text: &str) -> u64 {
    text.bytes().filter(|byte| *byte == b'\n').count() as u64
}

fn byte_of(text: &str, chars: usize) -> usize {
    text.char_indices()
        .nth(chars)
        .map_or(text.len(), |(at, _)| at)
}

/// Output whose images are not encoded yet.
pub(super) struct RawOutput {
    items: Vec<Item>,
    total_chars: u64,
    total_lines: u64,
    cut_chars: u64,
    cut_lines: u64,
    figures: usize,
}

impl RawOutput {
    /// Takes the images out, in order, so that they can be encoded on another thread.
    pub(super) fn take_images(&mut self) -> Vec<Vec<u8>> {
        let bytes = self.items.iter_mut().filter_map(|item| match item {
            Item::Image { bytes, .. } => Some(std::mem::take(bytes)),
            _ => None,
        });
        bytes.collect()
    }

    /// Returns the output with the encoded images.
    pub(super) fn finish(self, encoded: Vec<Result<Image, BadImage>>) -> Output {
        let mut encoded = encoded.into_iter();
        let part = |item| match item {
            Item::Text { text, .. } if text.is_empty() => None,
            Item::Text { stream, text, .. } => Some(Part::Text { stream, text }),
            Item::Gap => Some(Part::Cut {
                chars: self.cut_chars,
                lines: self.cut_lines,
            }),
            Item::Image { .. } => Some(match encoded.next().unwrap_or(Err(BadImage::Corrupt)) {
                Ok(image) => Part::Image(image),
                Err(why) => Part::Text {
                    stream: Stream::Display,
                    text: format!("[an image is not shown because {why}]"),
                },
            }),
        };
        Output {
            parts: self.items.into_iter().filter_map(part).collect(),
            total_chars: self.total_chars,
            total_lines: self.total_lines,
            cut_chars: self.cut_chars,
            figures: self.figures as u32,
            late: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::session::images::tests::png;

    fn collected(max: usize, collect: impl FnOnce(&mut OutputCollector)) -> (Output, String) {
        let mut collector = OutputCollector::new(max);
        collect(&mut collector);
        let CollectedOutput { mut raw, text, .. } = collector.finish();
        let full = text.unwrap().read_range(0, usize::MAX).unwrap();
        let encoded = raw
            .take_images()
            .into_iter()
            .map(crate::session::images::encode)
            .collect();
        (raw.finish(encoded), String::from_utf8(full).unwrap())
    }

    fn plain(text: &str) -> Bundle {
        Bundle {
            texts: [("text/plain".to_owned(), text.to_owned())].into(),
            blobs: vec![],
        }
    }

    fn picture(bytes: Vec<u8>) -> Bundle {
        Bundle {
            texts: Default::default(),
            blobs: vec![("image/png".to_owned(), bytes)],
        }
    }

    fn text_of(output: &Output) -> String {
        let texts = output.parts.iter().filter_map(|part| match part {
            Part::Text { text, .. } => Some(text.as_str()),
            _ => None,
        });
        texts.collect()
    }

    fn printed(max: usize, chunks: &[&str]) -> Output {
        collected(max, |collector| {
            chunks
                .iter()
                .for_each(|chunk| collector.text(Pipe::Out, chunk.as_bytes()))
        })
        .0
    }

    fn part(stream: Stream, text: &str) -> Part {
        Part::Text {
            stream,
            text: text.to_owned(),
        }
    }

    #[test]
    fn streams_values_and_displays_keep_their_order_and_kind() {
        let (output, full) = collected(100, |collector| {
            collector.text(Pipe::Out, b"a\n");
            collector.text(Pipe::Err, b"warn");
            collector.text(Pipe::Out, b"b");
            collector.display(plain("shown"), None, false);
            collector.value(plain("5"));
        });
        let expected = [
            part(Stream::Stdout, "a\n"),
            part(Stream::Stderr, "warn"),
            part(Stream::Stdout, "b\n"),
            part(Stream::Display, "shown\n"),
            part(Stream::Value, "5"),
        ];
        assert_eq!(output.parts, expected);
        assert_eq!(full, "a\nwarnb\nshown\n5");
        assert_eq!((output.total_chars, output.cut_chars), (15, 0));
    }

    #[test]
    fn sources_of_figures_are_kept_apart_and_bounded() {
        let mut collector = OutputCollector::new(1000);
        let figure = |json: String| Bundle {
            texts: [("application/vnd.plotly.v1+json".to_owned(), json)].into(),
            blobs: vec![],
        };
        collector.value(figure("x".repeat(MAX_FIGURE_BYTES + 1)));
        for number in 0..MAX_FIGURES + 1 {
            collector.display(figure(format!("[{number}]")), None, false);
        }
        let CollectedOutput { raw, figures, .. } = collector.finish();
        let output = raw.finish(Vec::new());
        assert_eq!(
            (output.figures as usize, figures.len()),
            (MAX_FIGURES, MAX_FIGURES)
        );
        assert_eq!(figures[1].read_range(0, 9).unwrap(), b"[1]");
        assert!(
            !text_of(&output).contains("[1]"),
            "the buffer has summaries"
        );
    }

    #[test]
    fn a_progress_bar_leaves_its_last_state() {
        assert_eq!(
            text_of(&printed(100, &["10%\r50%\r", "100%\ndone\n"])),
            "100%\ndone\n"
        );
        assert_eq!(text_of(&printed(100, &["a\r\nb\r", "\nc\r"])), "a\nb\nc");
        assert_eq!(text_of(&printed(100, &["abc\x08\x08x\n"])), "ax\n");
        assert_eq!(text_of(&printed(100, &["\rone\r\r\rtwo"])), "two");
    }

    /// Prints pieces and looks after each one; each look must show the text beside the piece.
    fn check_deltas(max_chars: usize, pieces: &[(&str, &str, u64)]) {
        let mut collector = OutputCollector::new(1000);
        let mut cursor = OutputCursor::default();
        for (piece, text, omitted) in pieces {
            collector.text(Pipe::Out, piece.as_bytes());
            let expected = OutputDelta {
                text: (*text).to_owned(),
                omitted: *omitted,
            };
            assert_eq!(
                collector.delta(&mut cursor, max_chars),
                expected,
                "after {piece:?}"
            );
        }
    }

    #[test]
    fn each_look_shows_what_was_printed_since_the_last() {
        check_deltas(
            100,
            &[
                ("one\n", "one\n", 0),
                ("", "", 0),
                ("two\nthree\n", "two\nthree\n", 0),
            ],
        );
        check_deltas(
            5,
            &[
                ("one\ntwo\n", "\ntwo\n", 3),
                ("äöüß\n", "äöüß\n", 0),
                ("äöüßé\n", "öüßé\n", 1),
            ],
        );
        check_deltas(0, &[("one\n", "", 4), ("two", "", 3), ("\n", "", 1)]);
    }

    #[test]
    fn of_a_line_that_goes_on_only_the_new_part_is_shown() {
        check_deltas(
            100,
            &[
                ("..", "..", 0),
                ("...", "...", 0),
                ("\nend\n", "\nend\n", 0),
            ],
        );
        check_deltas(
            3,
            &[("..", "..", 0), (".....", "...", 2), ("..\n", "..\n", 0)],
        );
        check_deltas(
            100,
            &[
                ("10 %", "10 %", 0),
                ("\r20 %", "20 %", 0),
                ("\r100 %\n", "100 %\n", 0),
            ],
        );
    }

    #[test]
    fn the_latest_line_is_the_last_one_that_says_something() {
        let latest = |text: &str| {
            let mut collector = OutputCollector::new(1000);
            collector.text(Pipe::Out, text.as_bytes());
            collector.latest_line()
        };
        assert_eq!(latest(""), None);
        assert_eq!(latest(" \n\n"), None);
        assert_eq!(latest("one\ntwo\n\n").as_deref(), Some("two"));
        assert_eq!(latest("one\n  two").as_deref(), Some("two"));
        assert_eq!(latest("10 %\r20 %").as_deref(), Some("20 %"));
        assert_eq!(latest("a\tb\u{7}c\u{85}d\n").as_deref(), Some("abcd"));
        assert_eq!(
            latest(&"x".repeat(300)).map(|line| line.len()),
            Some(MAX_TOLD_LINE_LENGTH)
        );
    }

    #[test]
    fn colour_codes_are_removed_everywhere() {
        let (output, _) = collected(100, |collector| {
            collector.text(Pipe::Out, b"\x1b[3");
            collector.text(Pipe::Out, b"1mred\x1b[0m\n");
            collector.traceback("\x1b[31mValueError\x1b[0m: x");
        });
        assert_eq!(text_of(&output), "red\nValueError: x");
    }

    #[test]
    fn exactly_at_the_limit_nothing_is_cut_and_one_more_is() {
        let output = printed(10, &["0123456789"]);
        assert_eq!(
            (output.parts, output.cut_chars),
            (vec![part(Stream::Stdout, "0123456789")], 0)
        );
        let output = printed(10, &["01234", "56789x"]);
        let expected = [
            part(Stream::Stdout, "012345"),
            Part::Cut { chars: 1, lines: 0 },
            part(Stream::Stdout, "789x"),
        ];
        assert_eq!(
            (&output.parts[..], output.cut_chars, output.total_chars),
            (&expected[..], 1, 11)
        );
    }

    #[test]
    fn a_cut_falls_between_characters() {
        let output = printed(5, &["äöü€😀ß1"]);
        assert_eq!(text_of(&output), "äöüß1");
        assert_eq!(output.cut_chars, 2);
    }

    #[test]
    fn tracebacks_are_limited_too() {
        let (output, _) = collected(50, |collector| collector.traceback(&"t".repeat(1000)));
        assert_eq!((text_of(&output).len(), output.cut_chars), (50, 950));
    }

    #[test]
    fn half_a_million_lines_keep_head_and_tail() {
        let mut collector = OutputCollector::new(100);
        for number in 0..500_000 {
            collector.text(Pipe::Out, format!("line {number}\n").as_bytes());
            assert!(collector.buffer.kept < 200_000);
        }
        let CollectedOutput { raw, text, .. } = collector.finish();
        let output = raw.finish(Vec::new());
        assert_eq!(
            (output.total_lines, output.total_chars),
            (500_000, text.unwrap().total_bytes())
        );
        let text = text_of(&output);
        assert_eq!(text.chars().count(), 100);
        assert!(
            text.starts_with("line 0\nline 1\n") && text.ends_with("line 499999\n"),
            "{text}"
        );
        let Part::Cut { chars, lines } = output.parts[1] else {
            panic!("the middle is cut")
        };
        assert_eq!(chars + 100, output.total_chars);
        assert_eq!(lines + newlines(&text), 500_000);
    }

    #[test]
    fn clear_forgets_at_once_or_when_something_new_comes() {
        let clear = |wait: bool, more: &'static [u8]| {
            collected(100, |collector| {
                collector.text(Pipe::Out, b"old\nopen");
                collector.clear(wait);
                collector.text(Pipe::Out, more);
            })
        };
        assert_eq!(text_of(&clear(false, b"").0), "");
        assert_eq!(text_of(&clear(true, b"").0), "old\nopen");
        assert_eq!(text_of(&clear(true, b"new").0), "new");
        assert_eq!(clear(false, b"new").0.total_chars, 3);
    }

    #[test]
    fn an_update_replaces_its_display_in_place() {
        let (output, _) = collected(100, |collector| {
            collector.display(plain("first"), Some("a".to_owned()), false);
            collector.text(Pipe::Out, b"between");
            collector.display(plain("second"), Some("a".to_owned()), true);
            collector.display(plain("other"), Some("unknown".to_owned()), true);
        });
        let expected = [
            part(Stream::Display, "second\n"),
            part(Stream::Stdout, "between\n"),
            part(Stream::Display, "other"),
        ];
        assert_eq!(output.parts, expected);
        assert_eq!(output.total_chars, 20);
    }

    #[test]
    fn images_stay_although_text_around_them_is_cut() {
        let (output, _) = collected(10, |collector| {
            collector.text(Pipe::Out, &[b'a'; 200_000]);
            collector.display(picture(png(4, 4, false)), None, false);
            collector.text(Pipe::Out, &[b'b'; 200_000]);
            collector.display(picture(b"broken".to_vec()), None, false);
        });
        assert_eq!(
            output
                .parts
                .iter()
                .filter(|part| matches!(part, Part::Image(_)))
                .count(),
            1
        );
        let text = text_of(&output);
        assert!(
            text.starts_with("aaaaaabbbb[an image is not shown because"),
            "{text}"
        );
    }

    #[test]
    fn more_than_twenty_images_are_counted_instead_of_shown() {
        let (output, _) = collected(1000, |collector| {
            for _ in 0..23 {
                collector.display(picture(png(2, 2, false)), None, false);
            }
        });
        assert_eq!(output.parts.len(), 21);
        assert!(text_of(&output).starts_with("[3 more images are not shown"));
    }

    #[test]
    fn a_bounded_text_keeps_both_ends() {
        assert_eq!(bounded_text("0123456789", 10), "0123456789");
        assert_eq!(
            bounded_text("0123456789x", 10),
            "012345\n… 1 characters cut …\n789x"
        );
    }

    proptest! {
        #[test]
        fn head_and_tail_are_those_of_the_whole_text(
            chunks in prop::collection::vec(("[a-zä€\n]{0,40}", any::<bool>()), 0..30),
            max in 0usize..200,
        ) {
            let whole = chunks.iter().map(|(text, _)| text.as_str()).collect::<String>();
            let (output, _) = collected(max, |collector| {
                for (text, err) in &chunks {
                    collector.text(if *err { Pipe::Err } else { Pipe::Out }, text.as_bytes());
                }
            });
            let all = whole.chars().count();
            prop_assert_eq!(output.total_chars, all as u64);
            prop_assert_eq!(output.total_lines, whole.lines().count() as u64);
            let text = text_of(&output);
            if all <= max {
                prop_assert_eq!(text, whole);
                prop_assert_eq!(output.cut_chars, 0);
            } else {
                let head = max * 3 / 5;
                let expected = whole
                    .chars()
                    .take(head)
                    .chain(whole.chars().skip(all - (max - head)))
                    .collect::<String>();
                prop_assert_eq!(text, expected);
                prop_assert_eq!(output.cut_chars, (all - max) as u64);
            }
        }
    }
}
