//! Server-sent events, with limits.
//!
//! An oversized event is discarded while it is read. If it is the response to a request, an error
//! of ours replaces it. An unreadable response is replaced too, because rmcp would drop it
//! silently.

use std::collections::VecDeque;

use futures_util::stream::{self, BoxStream, StreamExt};
use sse_stream::Sse;

use crate::web::WebError;
use crate::wire::{self, IdFinder};

/// Parses the body of a response into events.
pub(crate) fn of(
    response: reqwest::Response,
    largest: usize,
) -> BoxStream<'static, Result<Sse, WebError>> {
    let state = (response, Decoder::new(largest), VecDeque::new());
    let events = stream::unfold(Some(state), |state| async move {
        let (mut response, mut decoder, mut ready) = state?;
        loop {
            if let Some(event) = ready.pop_front() {
                return Some((Ok(event), Some((response, decoder, ready))));
            }
            match response.chunk().await {
                Ok(Some(chunk)) => decoder.feed(&chunk, &mut ready),
                Ok(None) => return None,
                Err(error) => return Some((Err(WebError::request(error)), None)),
            }
        }
    });
    events.boxed()
}

/// Decodes events from bytes in chunks of any size.
struct Decoder {
    largest: usize,
    line: Vec<u8>,
    /// The previous chunk ended with a carriage return; its line feed may follow.
    is_after_return: bool,
    event: Sse,
    size: usize,
    /// Set while an event is discarded.
    discarded: Option<IdFinder>,
}

impl Decoder {
    fn new(largest: usize) -> Decoder {
        Decoder {
            largest,
            line: Vec::new(),
            is_after_return: false,
            event: Sse::default(),
            size: 0,
            discarded: None,
        }
    }

    fn feed(&mut self, bytes: &[u8], ready: &mut VecDeque<Sse>) {
        for byte in bytes {
            let follows_return = std::mem::replace(&mut self.is_after_return, *byte == b'\r');
            match byte {
                b'\n' if follows_return => {}
                b'\n' | b'\r' => self.end_line(ready),
                byte => self.add(*byte),
            }
        }
    }

    fn add(&mut self, byte: u8) {
        if let Some(finder) = &mut self.discarded {
            finder.feed(&[byte]);
            // Only whether the line is empty matters now.
            if self.line.is_empty() {
                self.line.push(byte);
            }
            return;
        }
        self.line.push(byte);
        self.size += 1;
        if self.size > self.largest {
            let mut finder = IdFinder::default();
            finder.feed(self.event.data.as_deref().unwrap_or_default().as_bytes());
            finder.feed(self.line.strip_prefix(b"data:").unwrap_or(&self.line));
            self.discarded = Some(finder);
            self.event = Sse::default();
            self.line = vec![byte];
        }
    }

    fn end_line(&mut self, ready: &mut VecDeque<Sse>) {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            self.end_event(ready);
        } else if self.discarded.is_none() {
            self.read_field(&String::from_utf8_lossy(&line));
        }
    }

    fn end_event(&mut self, ready: &mut VecDeque<Sse>) {
        self.size = 0;
        let event = std::mem::take(&mut self.event);
        if let Some(finder) = self.discarded.take() {
            tracing::warn!(
                largest = self.largest,
                "an MCP server sent a message that is too large"
            );
            let message = finder
                .found()
                .and_then(|id| serde_json::to_string(&wire::too_large(id, self.largest)).ok());
            ready.extend(message.map(|message| Sse::default().data(message)));
        } else if let Some(refused) = event
            .data
            .as_ref()
            .and_then(|data| wire::excess(data.as_bytes()))
        {
            let message = refused.and_then(|message| serde_json::to_string(&message).ok());
            ready.extend(message.map(|message| Sse::default().data(message)));
        } else if event.data.is_some()
            || event.event.is_some()
            || event.id.is_some()
            || event.retry.is_some()
        {
            ready.push_back(event);
        }
    }

    fn read_field(&mut self, line: &str) {
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => match &mut self.event.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                data => *data = Some(value.to_owned()),
            },
            "event" => self.event.event = Some(value.to_owned()),
            "id" if !value.contains('\0') => self.event.id = Some(value.to_owned()),
            "retry" => self.event.retry = value.parse().ok(),
            // A comment or an unknown field.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(text: &str, largest: usize) -> Vec<Sse> {
        let whole = decode_in_pieces(text, largest, text.len().max(1));
        for size in [1, 2, 7] {
            let pieces = decode_in_pieces(text, largest, size);
            assert_eq!(
                format!("{pieces:?}"),
                format!("{whole:?}"),
                "in pieces of {size}"
            );
        }
        whole
    }

    fn decode_in_pieces(text: &str, largest: usize, size: usize) -> Vec<Sse> {
        let mut decoder = Decoder::new(largest);
        let mut ready = VecDeque::new();
        text.as_bytes()
            .chunks(size)
            .for_each(|piece| decoder.feed(piece, &mut ready));
        assert!(decoder.line.capacity() <= 2 * largest + 8);
        ready.into()
    }

    #[test]
    fn events_are_read_with_every_end_of_line() {
        for end in ["\n", "\r\n", "\r"] {
            let text = [
                ": hello",
                "event: endpoint",
                "data: /post",
                "",
                "data:a",
                "data: b",
                "id: 7",
                "retry: 10",
                "",
                "",
                "data: cut",
            ];
            let events = decode(&text.join(end), 100);
            assert_eq!(events.len(), 2, "{end:?}");
            assert_eq!(
                (events[0].event.as_deref(), events[0].data.as_deref()),
                (Some("endpoint"), Some("/post"))
            );
            assert_eq!(
                (events[1].data.as_deref(), events[1].id.as_deref()),
                (Some("a\nb"), Some("7"))
            );
            assert_eq!(events[1].retry, Some(10));
        }
    }

    #[test]
    fn an_event_that_is_too_large_answers_its_request_and_spoils_no_other() {
        let data = format!("{{\"result\":\"{}\",\"id\":3}}", "x".repeat(500));
        let text = format!("data: {data}\n\ndata: next\n\n");
        let events = decode(&text, 100);
        assert_eq!(events.len(), 2);
        assert!(
            events[0]
                .data
                .as_ref()
                .unwrap()
                .contains("more than 100 bytes"),
            "{events:?}"
        );
        assert!(events[0].data.as_ref().unwrap().contains("\"id\":3"));
        assert_eq!(events[1].data.as_deref(), Some("next"));
        // Control.
        assert_eq!(decode(&text, 1000)[0].data.as_ref(), Some(&data));
        // Depth is limited as well as size.
        let deep = |levels: usize| {
            format!(
                "{{\"id\":3,\"result\":{}1{}}}",
                "[".repeat(levels),
                "]".repeat(levels)
            )
        };
        let deep_event = decode(&format!("data: {}\n\n", deep(127)), 1000);
        assert!(
            deep_event[0]
                .data
                .as_ref()
                .unwrap()
                .contains("cannot be read"),
            "{deep_event:?}"
        );
        assert_eq!(
            decode(&format!("data: {}\n\n", deep(126)), 1000)[0].data,
            Some(deep(126))
        );
        // So is memory use.
        let many = format!("{{\"id\":3,\"result\":[{}0]}}", "{},".repeat(100_000));
        let many_event = decode_in_pieces(&format!("data: {many}\n\n"), 1_000_000, 10_000);
        assert!(
            many_event[0]
                .data
                .as_ref()
                .unwrap()
                .contains("the answer is refused"),
            "{many_event:?}"
        );
        // Many small lines of one event count as much as one large line.
        assert_eq!(
            decode(&format!("{}\n", "data: x\n".repeat(100)), 100).len(),
            0
        );
    }
}
