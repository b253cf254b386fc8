//! What all profiles say alike: what a cell printed, how it ended, why a session refuses. Pure.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rmcp::model::ContentBlock;

use super::super::duration::Seconds;
use super::super::refusals::{self, ToolWords};
use super::super::render;
use crate::sandbox::Exit;
use crate::session::{Image, Outcome, Part, Refused, StateAfter, Status, Stream};

/// Returns the text of a cell in its order: of these streams, with cuts in their place, and then
/// refused connections.
pub(super) fn text_of(outcome: &Outcome, wanted: impl Fn(Stream) -> bool) -> String {
    let mut page = page_of(outcome, wanted);
    for blocked in &outcome.blocked {
        page.line(&blocked.to_string());
    }
    page.text
}

fn page_of(outcome: &Outcome, wanted: impl Fn(Stream) -> bool) -> render::Page {
    let mut page = render::Page::default();
    for part in &outcome.output.parts {
        match part {
            Part::Text { stream, text } if wanted(*stream) => page.text.push_str(text),
            Part::Cut { chars, lines } => page.line(&render::cut_mark(*chars, *lines, None)),
            Part::Text { .. } | Part::Image(_) => {}
        }
    }
    page
}

/// Returns the text of a cell without its traceback.
pub(super) fn printed(outcome: &Outcome) -> String {
    text_of(outcome, |stream| stream != Stream::Traceback)
}

/// Returns the pictures of a cell in their order.
pub(super) fn images(outcome: &Outcome) -> impl Iterator<Item = &Image> {
    outcome.output.parts.iter().filter_map(|part| match part {
        Part::Image(image) => Some(image),
        _ => None,
    })
}

pub(super) fn image_block(image: &Image) -> ContentBlock {
    ContentBlock::image(STANDARD.encode(&image.bytes), image.kind.mime())
}

/// Says why a cell did not end well, what is lost, and with `way_back` what to do about it; nothing
/// when it ended well or raised.
pub(super) fn ending(status: &Status, way_back: &str) -> Option<String> {
    let lost = || lost(way_back);
    let after = |state: StateAfter| kept_or_lost(state, way_back);
    let text = match status {
        Status::Completed | Status::Raised(_) => return None,
        Status::TimedOut { limit, state } => {
            format!(
                "The code was stopped because it ran longer than {}. \
                     {}",
                Seconds(*limit),
                after(*state)
            )
        }
        Status::Cancelled { state } => format!("The call was cancelled. {}", after(*state)),
        Status::Reset => format!(
            "The code was stopped because the session was reset. {}",
            lost()
        ),
        Status::Closed => {
            "The code was stopped because its session was closed or the server is ending. Its \
             variables and files are gone."
                .to_owned()
        }
        Status::Died {
            exit: exit @ Exit::OutOfMemory {
                files_kept: true, ..
            },
        } => {
            format!(
                "Python was stopped: {}. {}",
                render::exit_text(*exit),
                lost()
            )
        }
        Status::Died { exit } if !exit.files_kept() => format!(
            "The session is lost: {}. Its variables, imports and files are gone. {way_back}",
            render::exit_text(*exit)
        ),
        Status::Died { exit } => format!(
            "Python ended while the code ran: {}. \
                                          {}",
            render::exit_text(*exit),
            lost()
        ),
        Status::ProtocolError { what } => {
            format!(
                "Python was ended because it broke the connection to the server ({what}). \
                     {}",
                lost()
            )
        }
    };
    Some(text.trim_end().to_owned())
}

/// Says what became of the variables after code was stopped.
pub(super) fn kept_or_lost(state: StateAfter, way_back: &str) -> String {
    match state {
        StateAfter::Kept => {
            "Variables and files are kept, with what the code had done until then.".to_owned()
        }
        StateAfter::Lost => format!(
            "The code ignored the interrupt, so Python was killed. {}",
            lost(way_back)
        ),
    }
}

fn lost(way_back: &str) -> String {
    format!("Variables and imports are gone; files in the working folder are kept. {way_back}")
        .trim_end()
        .to_owned()
}

/// Says why a session refuses, without naming tools that a profile does not have.
pub(super) fn refusal(refused: &Refused, way_back: &str) -> String {
    refusals::told(refused, &ToolWords::without_tools(way_back))
}

/// Returns at most so many characters of a text, from its beginning, and whether that is all of it.
pub(super) fn head(text: &str, most: usize) -> (&str, bool) {
    match text.char_indices().nth(most) {
        Some((end, _)) => (&text[..end], false),
        None => (text, true),
    }
}

/// What was printed before a failure and which connections were refused, as the last part of its
/// text; nothing when there is nothing. `cut` shortens what was printed.
pub(super) fn before_the_error(outcome: &Outcome, cut: impl Fn(&str) -> String) -> String {
    let printed = page_of(outcome, |stream| stream != Stream::Traceback).text;
    let mut text = match printed.trim() {
        "" => String::new(),
        printed => format!("\n\nOutput before the error:\n{}", cut(printed)),
    };
    for (number, blocked) in outcome.blocked.iter().enumerate() {
        text.push_str(if number == 0 { "\n\n" } else { "\n" });
        text.push_str(&blocked.to_string());
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::examples::{outcome, raised, text};
    use super::*;
    use crate::sandbox::{Blocked, Reason};

    #[test]
    fn text_is_of_the_wanted_streams_and_cuts_have_lines_of_their_own() {
        let parts = vec![
            text(Stream::Stdout, "a"),
            Part::Cut { chars: 7, lines: 0 },
            text(Stream::Stderr, "b\n"),
            text(Stream::Traceback, "c\n"),
        ];
        let outcome = outcome(Status::Raised(raised()), parts);
        assert_eq!(printed(&outcome), "a\n[… 7 characters cut here …]\nb\n");
        assert_eq!(
            text_of(&outcome, |stream| stream == Stream::Traceback),
            "[… 7 characters cut here …]\nc\n"
        );
    }

    #[test]
    fn refused_connections_are_not_output_before_the_error() {
        let printed = vec![text(Stream::Stdout, "a\n"), text(Stream::Traceback, "c\n")];
        let blocked = Blocked {
            target: "example.org:443".to_owned(),
            reason: Reason::NotListed,
            times: 1,
        };
        let mut failed = outcome(Status::Raised(raised()), printed);
        assert_eq!(
            before_the_error(&failed, str::to_uppercase),
            "\n\nOutput before the error:\nA"
        );
        failed.blocked = vec![blocked.clone()];
        let told = before_the_error(&failed, str::to_owned);
        assert_eq!(
            told,
            format!("\n\nOutput before the error:\na\n\n{blocked}")
        );
        failed.output.parts.clear();
        assert_eq!(
            before_the_error(&failed, str::to_owned),
            format!("\n\n{blocked}")
        );
    }

    #[test]
    fn an_ending_says_what_is_lost_and_what_to_do() {
        let limit = Duration::from_secs(2);
        let out_of_memory = |files_kept| Status::Died {
            exit: Exit::OutOfMemory {
                limit: 1 << 28,
                files_kept,
            },
        };
        for (status, words) in [
            (
                Status::TimedOut {
                    limit,
                    state: StateAfter::Kept,
                },
                &["longer than 2 s", "are kept"][..],
            ),
            (
                Status::TimedOut {
                    limit,
                    state: StateAfter::Lost,
                },
                &["ignored", "gone", "Begin again."],
            ),
            (
                Status::Died {
                    exit: Exit::Code(3),
                },
                &["exit code 3", "gone", "Begin again."],
            ),
            (
                out_of_memory(true),
                &["256 MiB", "are kept", "Begin again."],
            ),
            (
                out_of_memory(false),
                &["256 MiB", "files are gone", "Begin again."],
            ),
            (
                Status::ProtocolError {
                    what: "noise".to_owned(),
                },
                &["noise", "Begin again."],
            ),
            (Status::Closed, &["closed", "gone"]),
            (Status::Reset, &["reset", "gone"]),
            (
                Status::Cancelled {
                    state: StateAfter::Kept,
                },
                &["cancelled", "kept"],
            ),
        ] {
            let text = ending(&status, "Begin again.").unwrap();
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
        assert_eq!(ending(&Status::Completed, ""), None);
        assert_eq!(ending(&Status::Raised(raised()), ""), None);
    }

    #[test]
    fn a_head_is_counted_in_characters() {
        assert_eq!(head("äöü", 3), ("äöü", true));
        assert_eq!(head("äöü", 2), ("äö", false));
        assert_eq!(head("", 1), ("", true));
    }
}
