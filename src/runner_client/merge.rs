//! The merger: one order for three streams.
//!
//! Text arrives in two pipes, frames on the channel. Markers in the pipes define their order: the
//! bytes before marker *n* come before frame *n* and before everything after marker *n* in either
//! pipe. The runner writes a marker into both pipes before it continues. When bytes behind a marker
//! have arrived, the copy of the marker in the other pipe (its counterpart) can therefore be read
//! without waiting. Hence these rules:
//!
//! 1. A pipe stops at a marker. Its bytes behind the marker are held.
//! 2. `need` names the stream that must be checked before they can be released. The caller reads it
//!    without blocking and feeds the bytes, or reports that it is empty.
//! 3. A pipe that is empty, or that has yielded more bytes than a pipe can hold without the marker,
//!    will not show it: the marker was forged, or its counterpart was consumed inside. The bytes
//!    are then released without it.
//!
//! Forged, missing, repeated and reordered markers can therefore spoil the order of the text, but
//! never lose a byte, cause a wait, or fill the memory. This module does no I/O.

use std::collections::VecDeque;

/// Length of a marker without its seq and the bytes after it: two bytes that no text contains, our
/// name, the session's own bytes.
const PREFIX: usize = 20;
const MARKER: usize = PREFIX + 6;
/// The largest pipe that an unprivileged process can make. A marker that was written before we
/// looked is within this distance.
const SEARCH: usize = 1024 * 1024;
/// Bytes that may be held behind a marker per pipe. Both pipes together stay below one MiB.
const MAX_HELD: usize = 400 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pipe {
    Out,
    Err,
}

impl Pipe {
    pub const BOTH: [Pipe; 2] = [Pipe::Out, Pipe::Err];

    fn other(self) -> Pipe {
        match self {
            Pipe::Out => Pipe::Err,
            Pipe::Err => Pipe::Out,
        }
    }
}

/// The stream that must be checked, without blocking, before anything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    Pipe(Pipe),
    Channel,
}

#[derive(Debug)]
pub(super) struct Merger {
    prefix: [u8; PREFIX],
    streams: [TextStream; 2],
    /// The frame that waits for its position.
    expected: Option<u32>,
    /// The last frame that reached its position.
    passed: Option<u32>,
    ready: VecDeque<(Pipe, Vec<u8>)>,
}

#[derive(Debug, Default)]
struct TextStream {
    held: Vec<u8>,
    from: usize,
    stop: Option<Stop>,
    /// Bytes fed since the current search started.
    searched: usize,
    /// A search ended without the marker. No other search starts until a marker has found its
    /// counterpart again, so that markers without counterparts do not each cause a search.
    given_up: bool,
    empty: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stop {
    seq: u32,
    frame_follows: bool,
}

impl Merger {
    pub(super) fn new(marker: [u8; 16]) -> Merger {
        let mut prefix = [0; PREFIX];
        prefix[..4].copy_from_slice(b"\0\x1bCB");
        prefix[4..].copy_from_slice(&marker);
        Merger {
            prefix,
            streams: Default::default(),
            expected: None,
            passed: None,
            ready: VecDeque::new(),
        }
    }

    /// Adds bytes read from a pipe.
    pub(super) fn feed(&mut self, pipe: Pipe, bytes: &[u8]) {
        let stream = self.stream(pipe);
        stream.held.extend_from_slice(bytes);
        stream.searched = stream.searched.saturating_add(bytes.len());
        self.settle();
    }

    /// Records that a needed stream has no more bytes now.
    pub(super) fn report_empty(&mut self, need: Need) {
        match need {
            Need::Pipe(pipe) => {
                self.stream(pipe).empty = true;
                self.settle();
                // Bytes that can no longer become a marker are text: markers are written whole.
                self.emit_partial(pipe);
                if self.expected.is_none() {
                    self.stream(pipe).empty = false;
                }
            }
            Need::Channel => {
                for stream in &mut self.streams {
                    if stream.stop.is_some_and(|stop| stop.frame_follows) && stream.has_bytes() {
                        stream.stop = None;
                    }
                }
                self.settle();
            }
        }
    }

    /// Announces a frame that arrived on the channel. It has reached its position once `need`
    /// returns nothing.
    pub(super) fn expect(&mut self, seq: u32) {
        self.expected = Some(seq);
        self.begin_search();
        self.settle();
    }

    /// Lets the expected frame pass; bytes held behind its marker follow.
    pub(super) fn pass(&mut self) {
        let Some(seq) = self.expected.take() else {
            return;
        };
        self.passed = Some(seq);
        for stream in &mut self.streams {
            if stream.stop
                == Some(Stop {
                    seq,
                    frame_follows: true,
                })
            {
                stream.stop = None;
            }
        }
        self.begin_search();
        self.settle();
    }

    /// Discards the old pipes: two new ones replace them, and the rest of the old ones belongs to
    /// no cell.
    pub(super) fn rotate(&mut self) {
        self.streams = Default::default();
        self.ready.clear();
    }

    /// Returns bytes without their markers, for text that has no position in the order.
    pub(super) fn without_markers(&self, mut bytes: &[u8]) -> Vec<u8> {
        let mut text = Vec::with_capacity(bytes.len());
        loop {
            let (length, marker) = next_marker(&self.prefix, bytes);
            text.extend_from_slice(&bytes[..length]);
            bytes = &bytes[length..];
            match marker {
                Some(_) => bytes = &bytes[MARKER..],
                None => {
                    // Half a marker: markers are written whole, so this is text.
                    text.extend_from_slice(bytes);
                    return text;
                }
            }
        }
    }

    /// Releases all held bytes. The interpreter is gone, and nothing more will determine the order.
    pub(super) fn finish(&mut self) {
        for pipe in Pipe::BOTH {
            while self.stream(pipe).stop.take().is_some() || self.stream(pipe).has_bytes() {
                self.advance(pipe);
                if self.stream(pipe).stop.is_none() {
                    self.emit_partial(pipe);
                }
            }
        }
    }

    /// Returns text whose position is known.
    pub(super) fn pop(&mut self) -> Option<(Pipe, Vec<u8>)> {
        self.ready.pop_front()
    }

    /// Returns the stream that must be checked before held bytes or the expected frame can proceed.
    pub(super) fn need(&self) -> Option<Need> {
        for pipe in Pipe::BOTH {
            let (stream, other) = (
                &self.streams[pipe as usize],
                &self.streams[pipe.other() as usize],
            );
            match stream.stop {
                Some(Stop {
                    frame_follows: true,
                    ..
                }) if self.expected.is_none() && stream.has_bytes() => {
                    return Some(Need::Channel);
                }
                Some(Stop {
                    frame_follows: false,
                    ..
                }) if stream.has_bytes() && other.stop.is_none() && !other.will_not_match() => {
                    return Some(Need::Pipe(pipe.other()));
                }
                None if self.expected.is_some() && !stream.will_not_match() => {
                    return Some(Need::Pipe(pipe));
                }
                _ => {}
            }
        }
        None
    }

    fn stream(&mut self, pipe: Pipe) -> &mut TextStream {
        &mut self.streams[pipe as usize]
    }

    fn begin_search(&mut self) {
        for stream in &mut self.streams {
            stream.empty = false;
            stream.searched = 0;
            stream.given_up = false;
        }
    }

    /// Advances both pipes as far as the rules allow.
    fn settle(&mut self) {
        loop {
            for pipe in Pipe::BOTH {
                self.advance(pipe);
            }
            let released = self.release_matching()
                || Pipe::BOTH.into_iter().any(|pipe| self.release_alone(pipe));
            if !released {
                return;
            }
        }
    }

    /// Releases two stops that match, or the earlier one of two that contradict each other.
    fn release_matching(&mut self) -> bool {
        let [
            TextStream {
                stop: Some(out), ..
            },
            TextStream {
                stop: Some(err), ..
            },
        ] = &self.streams
        else {
            return false;
        };
        let (out, err) = (*out, *err);
        if out.frame_follows && err.frame_follows {
            return false;
        }
        // The runner writes the same markers into both pipes, so two different ones cannot both be
        // genuine.
        let awaited = |stop: Stop| stop.frame_follows && self.expected == Some(stop.seq);
        let (keep_out, keep_err) = match (awaited(out), awaited(err)) {
            (false, false) => (out.seq > err.seq, err.seq > out.seq),
            awaited => awaited,
        };
        if !keep_out {
            self.streams[0].stop = None;
        }
        if !keep_err {
            self.streams[1].stop = None;
        }
        if out == err {
            self.streams
                .iter_mut()
                .for_each(|stream| stream.given_up = false);
        }
        true
    }

    /// Releases a stop for which the other streams will show no match.
    fn release_alone(&mut self, pipe: Pipe) -> bool {
        let other = &self.streams[pipe.other() as usize];
        let unexplained = other.stop.is_none() && other.will_not_match();
        let expected = self.expected;
        let stream = self.stream(pipe);
        let Some(stop) = stream.stop else {
            return false;
        };
        let another_frame = stop.frame_follows && expected.is_some_and(|seq| seq != stop.seq);
        let too_much = stream.held.len() - stream.from > MAX_HELD;
        // Without bytes behind it and without a frame to place, a stop does no harm and may still
        // find its counterpart.
        let matters = stream.has_bytes() || expected.is_some();
        if another_frame || too_much || (!stop.frame_follows && unexplained && matters) {
            stream.stop = None;
            let other = self.stream(pipe.other());
            other.given_up |= other.searched > SEARCH;
            return true;
        }
        false
    }

    /// Emits a stream's bytes up to its next marker and stops there.
    fn advance(&mut self, pipe: Pipe) {
        let stream = &mut self.streams[pipe as usize];
        while stream.stop.is_none() && stream.has_bytes() {
            let bytes = &stream.held[stream.from..];
            let (text, marker) = next_marker(&self.prefix, bytes);
            let partial = marker.is_none() && text < bytes.len();
            if text > 0 {
                push(&mut self.ready, pipe, &bytes[..text]);
                stream.from += text;
            }
            if let Some(stop) = marker {
                stream.from += MARKER;
                if !(stop.frame_follows && self.passed == Some(stop.seq)) {
                    stream.stop = Some(stop);
                    let other = &mut self.streams[pipe.other() as usize];
                    if self.expected.is_none() && !other.given_up {
                        other.searched = 0;
                    }
                    break;
                }
            } else if partial {
                break;
            }
        }
        self.streams[pipe as usize].compact();
    }

    fn emit_partial(&mut self, pipe: Pipe) {
        let stream = &mut self.streams[pipe as usize];
        if stream.stop.is_none() && stream.has_bytes() {
            push(&mut self.ready, pipe, &stream.held[stream.from..]);
            stream.from = stream.held.len();
            stream.compact();
        }
    }
}

impl TextStream {
    fn has_bytes(&self) -> bool {
        self.from < self.held.len()
    }

    fn will_not_match(&self) -> bool {
        self.empty || self.searched > SEARCH
    }

    fn compact(&mut self) {
        if self.from == self.held.len() {
            self.held.clear();
            self.from = 0;
        } else if self.from > MAX_HELD {
            self.held.drain(..self.from);
            self.from = 0;
        }
    }
}

fn push(ready: &mut VecDeque<(Pipe, Vec<u8>)>, pipe: Pipe, bytes: &[u8]) {
    match ready.back_mut() {
        Some((last, text)) if *last == pipe => text.extend_from_slice(bytes),
        _ => ready.push_back((pipe, bytes.to_vec())),
    }
}

/// Returns the number of bytes that are text, and the marker behind them. Without a marker, the
/// bytes after the text may be the start of one.
fn next_marker(prefix: &[u8; PREFIX], bytes: &[u8]) -> (usize, Option<Stop>) {
    let mut from = 0;
    while let Some(offset) = bytes[from..].iter().position(|byte| *byte == 0) {
        let at = from + offset;
        let candidate = &bytes[at..];
        let known = candidate.len().min(PREFIX);
        if candidate[..known] == prefix[..known] {
            let Some(marker) = candidate.get(..MARKER) else {
                // Of the bytes after the prefix only the last two have a fixed form.
                if candidate
                    .get(PREFIX + 4)
                    .is_none_or(|kind| matches!(kind, b'F' | b'P'))
                {
                    return (at, None);
                }
                from = at + 1;
                continue;
            };
            if matches!(marker[PREFIX + 4], b'F' | b'P') && marker[PREFIX + 5] == b'\n' {
                let seq = marker[PREFIX..]
                    .first_chunk::<4>()
                    .expect("a marker has room for its seq");
                let stop = Stop {
                    seq: u32::from_be_bytes(*seq),
                    frame_follows: marker[PREFIX + 4] == b'F',
                };
                return (at, Some(stop));
            }
        }
        from = at + 1;
    }
    (bytes.len(), None)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECRET: [u8; 16] = *b"0123456789abcdef";

    fn marker(seq: u32, kind: u8) -> Vec<u8> {
        [b"\0\x1bCB", &SECRET[..], &seq.to_be_bytes(), &[kind, b'\n']].concat()
    }

    #[derive(Debug, Clone, PartialEq, Eq)]
    enum Seen {
        Text(Pipe, Vec<u8>),
        Frame(u32),
    }

    /// Three streams with all data already written, read in pieces of varying size.
    struct Streams {
        merger: Merger,
        pipes: [VecDeque<u8>; 2],
        frames: VecDeque<u32>,
        pending: Option<u32>,
        most_held: usize,
    }

    impl Streams {
        fn new(out: &[u8], err: &[u8], frames: &[u32]) -> Streams {
            Streams {
                merger: Merger::new(SECRET),
                pipes: [out.iter().copied().collect(), err.iter().copied().collect()],
                frames: frames.iter().copied().collect(),
                pending: None,
                most_held: 0,
            }
        }

        fn supply(&mut self, need: Need, size: usize) {
            match need {
                Need::Pipe(pipe) if self.pipes[pipe as usize].is_empty() => {
                    self.merger.report_empty(need)
                }
                Need::Pipe(pipe) => {
                    let stream = &mut self.pipes[pipe as usize];
                    let bytes = stream.drain(..size.min(stream.len())).collect::<Vec<_>>();
                    self.merger.feed(pipe, &bytes);
                }
                Need::Channel => match self.frames.pop_front() {
                    Some(seq) => {
                        self.pending = Some(seq);
                        self.merger.expect(seq);
                    }
                    None => self.merger.report_empty(need),
                },
            }
        }

        fn collect(&mut self, seen: &mut Vec<Seen>) {
            while let Some((pipe, bytes)) = self.merger.pop() {
                match seen.last_mut() {
                    Some(Seen::Text(last, text)) if *last == pipe => text.extend(bytes),
                    _ => seen.push(Seen::Text(pipe, bytes)),
                }
            }
        }

        fn run(mut self, choices: &[(u8, usize)]) -> (Vec<Seen>, usize) {
            let mut seen = Vec::new();
            let mut choices = choices.iter().cycle();
            loop {
                self.collect(&mut seen);
                let held = self
                    .merger
                    .streams
                    .iter()
                    .map(|stream| stream.held.len())
                    .sum();
                self.most_held = self.most_held.max(held);
                let (choice, size) = *choices.next().unwrap();
                if let Some(need) = self.merger.need() {
                    self.supply(need, size);
                } else if let Some(seq) = self.pending.take() {
                    seen.push(Seen::Frame(seq));
                    self.merger.pass();
                } else {
                    let all = [Need::Pipe(Pipe::Out), Need::Pipe(Pipe::Err), Need::Channel];
                    let some = |need: &Need| match need {
                        Need::Pipe(pipe) => !self.pipes[*pipe as usize].is_empty(),
                        Need::Channel => !self.frames.is_empty(),
                    };
                    let open = all.into_iter().filter(some).collect::<Vec<_>>();
                    if open.is_empty() {
                        break;
                    }
                    self.supply(open[choice as usize % open.len()], size);
                }
            }
            self.merger.finish();
            self.collect(&mut seen);
            (seen, self.most_held)
        }
    }

    /// Checks every order of reading: pipes first, channel first, whole or byte by byte.
    fn check(out: &[&[u8]], err: &[&[u8]], frames: &[u32], expected: &[Seen]) {
        for choice in 0..3 {
            for size in [1, 7, 26, 4096] {
                let (seen, _) =
                    Streams::new(&out.concat(), &err.concat(), frames).run(&[(choice, size)]);
                assert_eq!(seen, expected, "choice {choice}, size {size}");
            }
        }
    }

    fn out(text: &str) -> Seen {
        Seen::Text(Pipe::Out, text.as_bytes().to_vec())
    }

    fn err(text: &str) -> Seen {
        Seen::Text(Pipe::Err, text.as_bytes().to_vec())
    }

    #[test]
    fn text_before_a_marker_comes_before_its_frame_and_text_after_it_after() {
        let mark = marker(1, b'F');
        check(
            &[b"before", &mark, b"after"],
            &[&mark],
            &[1],
            &[out("before"), Seen::Frame(1), out("after")],
        );
    }

    #[test]
    fn streams_keep_their_order_when_python_changes_between_them() {
        let (one, two, three) = (marker(1, b'P'), marker(2, b'P'), marker(3, b'F'));
        check(
            &[b"a", &one, &two, b"c", &three],
            &[&one, b"b", &two, &three],
            &[3],
            &[out("a"), err("b"), out("c"), Seen::Frame(3)],
        );
    }

    #[test]
    fn frames_between_texts_keep_their_places() {
        let marks = [1, 2, 3].map(|seq| marker(seq, b'F'));
        check(
            &[&marks[0], b"a", &marks[1], b"b", &marks[2], b"late"],
            &[&marks[0], &marks[1], &marks[2]],
            &[1, 2, 3],
            &[
                Seen::Frame(1),
                out("a"),
                Seen::Frame(2),
                out("b"),
                Seen::Frame(3),
                out("late"),
            ],
        );
    }

    #[test]
    fn a_frame_whose_markers_never_come_still_comes_after_what_was_written() {
        check(&[b"text"], &[], &[9], &[out("text"), Seen::Frame(9)]);
    }

    #[test]
    fn a_forged_marker_that_no_frame_follows_loses_nothing() {
        let (seen, _) =
            Streams::new(&[b"a", &marker(7, b'F')[..], b"b"].concat(), b"", &[]).run(&[(0, 4096)]);
        assert_eq!(seen, [out("ab")]);
    }

    #[test]
    fn a_forged_marker_from_the_future_does_not_move_text_behind_the_end_of_its_cell() {
        let real = marker(5, b'F');
        let forged = marker(u32::MAX, b'F');
        let (seen, _) =
            Streams::new(&[&forged, &b"text"[..], &real].concat(), &real, &[5]).run(&[(2, 4096)]);
        assert_eq!(seen, [out("text"), Seen::Frame(5)]);
    }

    #[test]
    fn bytes_that_only_begin_like_a_marker_are_text() {
        let mark = marker(1, b'F');
        let almost = [&mark[..24], b"X\n"].concat();
        check(
            &[&mark[..9]],
            &[],
            &[],
            &[Seen::Text(Pipe::Out, mark[..9].to_vec())],
        );
        check(
            &[&almost],
            &[],
            &[],
            &[Seen::Text(Pipe::Out, almost.clone())],
        );
        check(
            &[b"\0\0\0\x1bC"],
            &[],
            &[],
            &[Seen::Text(Pipe::Out, b"\0\0\0\x1bC".to_vec())],
        );
    }

    #[test]
    fn a_flood_without_the_marker_ends_the_search() {
        let mut merger = Merger::new(SECRET);
        merger.expect(1);
        let mut fed = 0;
        while merger.need() == Some(Need::Pipe(Pipe::Out)) {
            merger.feed(Pipe::Out, &[b'x'; 65536]);
            while merger.pop().is_some() {}
            fed += 65536;
            assert!(fed <= 2 * SEARCH);
        }
        assert_eq!(merger.need(), Some(Need::Pipe(Pipe::Err)));
        merger.report_empty(Need::Pipe(Pipe::Err));
        assert_eq!(merger.need(), None);
    }

    /// Feeds markers that contradict each other for as long as the merger asks for more of a pipe,
    /// and returns the number of bytes fed.
    fn fed_with_contradictions(merger: &mut Merger, most: usize) -> usize {
        let flood = [1, 5].map(|seq| marker(seq, b'P').repeat(65536 / MARKER));
        let mut fed = 0;
        merger.feed(Pipe::Err, &flood[1]);
        merger.feed(Pipe::Out, &flood[0]);
        while let Some(Need::Pipe(pipe)) = merger.need()
            && fed < most
        {
            merger.feed(pipe, &flood[pipe as usize]);
            fed += flood[pipe as usize].len();
        }
        fed
    }

    #[test]
    fn a_search_that_was_given_up_does_not_begin_anew_at_every_marker() {
        let mut merger = Merger::new(SECRET);
        let fed = fed_with_contradictions(&mut merger, 64 * SEARCH);
        assert!(
            fed <= 2 * SEARCH,
            "{fed} bytes were read for markers without counterparts"
        );
        // Markers with counterparts put the text in order again.
        while merger.pop().is_some() {}
        merger.report_empty(Need::Pipe(Pipe::Out));
        merger.report_empty(Need::Pipe(Pipe::Err));
        let mut seen_texts = Vec::new();
        for seq in [10, 11, 12] {
            merger.feed(Pipe::Out, &[&marker(seq, b'P')[..], b"out"].concat());
            while merger.need() == Some(Need::Pipe(Pipe::Err)) {
                merger.feed(Pipe::Err, &[b"err", &marker(seq, b'P')[..]].concat());
            }
            seen_texts.extend(std::iter::from_fn(|| merger.pop()));
        }
        let one = [(Pipe::Err, b"err".to_vec()), (Pipe::Out, b"out".to_vec())];
        assert_eq!(seen_texts, [one.clone(), one.clone(), one].concat());
    }

    #[test]
    fn a_lane_that_is_fed_although_it_is_stopped_holds_a_bounded_amount() {
        let mut merger = Merger::new(SECRET);
        merger.feed(Pipe::Out, &marker(1, b'P'));
        let mut kept = 0;
        for _ in 0..100 {
            merger.feed(Pipe::Out, &[b'x'; 65536]);
            kept += std::iter::from_fn(|| merger.pop())
                .map(|(_, bytes)| bytes.len())
                .sum::<usize>();
            assert!(merger.streams[0].held.len() <= MAX_HELD + 65536);
        }
        merger.finish();
        kept += std::iter::from_fn(|| merger.pop())
            .map(|(_, bytes)| bytes.len())
            .sum::<usize>();
        assert_eq!(kept, 100 * 65536);
    }

    #[test]
    fn markers_are_taken_out_of_text_that_has_no_place() {
        let merger = Merger::new(SECRET);
        let bytes = [
            b"a",
            &marker(1, b'P')[..],
            &marker(2, b'F'),
            b"b\0",
            &marker(3, b'P')[..9],
        ]
        .concat();
        assert_eq!(
            merger.without_markers(&bytes),
            [b"ab\0", &marker(3, b'P')[..9]].concat()
        );
        assert_eq!(merger.without_markers(b""), b"");
    }

    #[test]
    fn new_pipes_begin_with_nothing_of_the_old() {
        let mut merger = Merger::new(SECRET);
        merger.feed(Pipe::Out, &[&marker(1, b'P')[..], b"old"].concat());
        merger.rotate();
        merger.feed(Pipe::Out, b"new");
        assert_eq!(merger.pop(), Some((Pipe::Out, b"new".to_vec())));
        assert_eq!(merger.pop(), None);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Print(Pipe, Vec<u8>),
        Frame,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let text = prop::collection::vec(
            prop_oneof![Just(0u8), Just(0x1b), Just(b'C'), any::<u8>()],
            1..40,
        );
        let step = prop_oneof![
            (prop_oneof![Just(Pipe::Out), Just(Pipe::Err)], text)
                .prop_map(|(pipe, text)| Step::Print(pipe, text)),
            Just(Step::Frame),
        ];
        prop::collection::vec(step, 0..30)
    }

    /// Encodes the steps as the runner would.
    fn write(steps: &[Step]) -> (Vec<u8>, Vec<u8>, Vec<u32>, Vec<Seen>) {
        let (mut streams, mut frames, mut expected) =
            ([Vec::new(), Vec::new()], Vec::new(), Vec::<Seen>::new());
        let (mut seq, mut last) = (0, None);
        let mut mark = |streams: &mut [Vec<u8>; 2], kind| {
            seq += 1;
            streams
                .iter_mut()
                .for_each(|stream| stream.extend(marker(seq, kind)));
            seq
        };
        for step in steps {
            match step {
                Step::Print(pipe, text) => {
                    if last.is_some_and(|last| last != *pipe) {
                        mark(&mut streams, b'P');
                    }
                    last = Some(*pipe);
                    streams[*pipe as usize].extend(text);
                    match expected.last_mut() {
                        Some(Seen::Text(last, known)) if last == pipe => known.extend(text),
                        _ => expected.push(Seen::Text(*pipe, text.clone())),
                    }
                }
                Step::Frame => {
                    let seq = mark(&mut streams, b'F');
                    frames.push(seq);
                    expected.push(Seen::Frame(seq));
                }
            }
        }
        let [out, err] = streams;
        (out, err, frames, expected)
    }

    proptest! {
        #[test]
        fn what_an_honest_runner_wrote_comes_out_in_the_order_of_writing(
            steps in steps(), choices in prop::collection::vec((any::<u8>(), 1usize..60), 1..20),
        ) {
            let (out, err, frames, expected) = write(&steps);
            let (seen, _) = Streams::new(&out, &err, &frames).run(&choices);
            prop_assert_eq!(seen, expected);
        }

        #[test]
        fn whatever_a_liar_writes_no_byte_and_no_frame_is_lost(
            pieces in prop::collection::vec(
                (any::<bool>(), prop_oneof![
                    prop::collection::vec(1u8..255, 0..30).prop_map(|text| (text, None)),
                    (0u32..6, any::<bool>())
                        .prop_map(|(seq, follows)| (Vec::new(), Some((seq, follows)))),
                ]), 0..40),
            frames in prop::collection::vec(0u32..6, 0..6),
            choices in prop::collection::vec((any::<u8>(), 1usize..60), 1..20),
        ) {
            let mut streams = [Vec::<u8>::new(), Vec::new()];
            let mut texts = streams.clone();
            for (first, (text, mark)) in &pieces {
                let stream = usize::from(*first);
                streams[stream].extend(text);
                texts[stream].extend(text);
                if let Some((seq, follows)) = mark {
                    streams[stream].extend(marker(*seq, if *follows { b'F' } else { b'P' }));
                }
            }
            let (seen, most_held) = Streams::new(&streams[0], &streams[1], &frames).run(&choices);
            let mut seen_texts = [Vec::<u8>::new(), Vec::new()];
            let mut passed = Vec::new();
            for event in seen {
                match event {
                    Seen::Text(pipe, text) => seen_texts[pipe as usize].extend(text),
                    Seen::Frame(seq) => passed.push(seq),
                }
            }
            prop_assert_eq!(seen_texts, texts);
            prop_assert_eq!(passed, frames);
            prop_assert!(most_held < SEARCH);
        }
    }
}
