//! Words for refusals: adds to the facts of a refusal what the caller can do about it, with the
//! names of the tools that the caller has. Pure.

use crate::runner_client::FileFailure;
use crate::session::{OutcomeNote, Quota, Refused, Remedy, SessionId};

/// The tools and arguments of a profile, as far as refusals name them. `None` if the profile has
/// no such tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ToolWords<'a> {
    pub(super) list_sessions: Option<&'a str>,
    pub(super) close_session: Option<&'a str>,
    pub(super) reset: Option<&'a str>,
    pub(super) undo: Option<&'a str>,
    pub(super) list_checkpoints: Option<&'a str>,
    pub(super) check_execution: Option<&'a str>,
    pub(super) list_servers: Option<&'a str>,
    /// The argument that names a session.
    pub(super) session: Option<&'a str>,
    /// The argument that allows to replace a file, with its value.
    pub(super) overwrite: Option<&'a str>,
    /// A sentence on how to go on after a session ended, for profiles without `reset`. May be
    /// empty.
    pub(super) way_back: &'a str,
}

impl<'a> ToolWords<'a> {
    /// The tools of the default profile.
    pub(super) const DEFAULT: ToolWords<'static> = ToolWords {
        list_sessions: Some("list_sessions"),
        close_session: Some("close_session"),
        reset: Some("reset"),
        undo: Some("undo"),
        list_checkpoints: Some("list_checkpoints"),
        check_execution: Some("check_execution"),
        list_servers: Some("list_mcp_servers"),
        session: Some("session_id"),
        overwrite: Some("overwrite: true"),
        way_back: "",
    };

    /// Returns the words of a profile that has none of these tools.
    pub(super) const fn without_tools(way_back: &'a str) -> ToolWords<'a> {
        ToolWords {
            list_sessions: None,
            close_session: None,
            reset: None,
            undo: None,
            list_checkpoints: None,
            check_execution: None,
            list_servers: None,
            session: None,
            overwrite: None,
            way_back,
        }
    }
}

/// Returns the text of a refusal: what happened, what is lost, and what to do about it.
pub(super) fn told(refused: &Refused, words: &ToolWords) -> String {
    with_causes(refused) + &advice(refused, words).unwrap_or_default()
}

/// Returns the text of a note in an outcome.
pub(super) fn note_told(note: &OutcomeNote, words: &ToolWords) -> String {
    let text = &note.text;
    match (note.remedy, words) {
        (
            Some(Remedy::ListCheckpoints),
            ToolWords {
                list_checkpoints: Some(list),
                ..
            },
        ) => format!("{text} `{list}` tells what can still be undone."),
        (
            Some(Remedy::Undo),
            ToolWords {
                undo: Some(undo), ..
            },
        ) => {
            format!("`{undo}` brings back the state before this cell.")
        }
        _ => text.clone(),
    }
}

/// Returns the text of an error that a caller is shown, in the words of the default profile.
pub(super) fn error_text(error: &(dyn std::error::Error + 'static)) -> String {
    match error.downcast_ref::<Refused>() {
        Some(refused) => told(refused, &ToolWords::DEFAULT),
        None => with_causes(error),
    }
}

/// Returns the text of an error, with the chain of its causes in one sentence.
pub(super) fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(reason) = cause {
        let reason_text = reason.to_string();
        // A transparent error shows its cause as itself.
        if !text.contains(&reason_text) {
            text.push_str(": ");
            text.push_str(&reason_text);
        }
        cause = reason.source();
    }
    text
}

/// Returns the end of the sentence or the further sentences that name the remedies; `None` if
/// there are none, or the profile has no tools for them.
fn advice(refused: &Refused, words: &ToolWords) -> Option<String> {
    Some(match refused {
        Refused::Unknown { .. } => format!(
            ". Run a cell with this {} to create it, or use `{}` to see the existing ones",
            words.session?, words.list_sessions?
        ),
        Refused::Ended { id, undo, .. } => way_back(id, *undo, words)?,
        Refused::Unresponsive { sent: true } => {
            format!("; `{}` tells what became of a cell", words.check_execution?)
        }
        Refused::UnknownExecution => {
            format!("; `{}` shows the sessions that exist", words.list_sessions?)
        }
        Refused::TooManySessions { own: 0, .. } => return None,
        Refused::TooManySessions {
            own, oldest_idle, ..
        } => too_many(*own, oldest_idle, words),
        Refused::Quota {
            which,
            retry_after: None,
            ..
        } => quota(*which, words)?,
        Refused::Busy { .. } => format!(", or use another {}", words.session?),
        Refused::File {
            reason: FileFailure::Exists,
            ..
        } => match words.overwrite {
            Some(overwrite) => format!(". Choose another name, or give `{overwrite}`"),
            None => ". Choose another name".to_owned(),
        },
        Refused::NoServer { .. } => {
            format!(
                "; `{}` names those that are registered",
                words.list_servers?
            )
        }
        _ => return None,
    })
}

fn way_back(id: &SessionId, undo: bool, words: &ToolWords) -> Option<String> {
    let (Some(reset), Some(session)) = (words.reset, words.session) else {
        return (!words.way_back.is_empty()).then(|| format!(". {}", words.way_back));
    };
    Some(match words.undo.filter(|_| undo) {
        Some(undo) => format!(
            ". Call `{undo}` with {session} `{id}` to bring back its last kept state, or `{reset}` \
             to start it anew"
        ),
        None => format!(". Call `{reset}` with {session} `{id}` to start it anew"),
    })
}

fn too_many(own: usize, oldest_idle: &[SessionId], words: &ToolWords) -> String {
    let names = |quote: &str| {
        let names = oldest_idle.iter().map(|id| format!("{quote}{id}{quote}"));
        names.collect::<Vec<_>>().join(", ")
    };
    match (words.close_session, oldest_idle) {
        (Some(close), []) => format!(
            ". {own} of them are yours, and none of yours is idle: wait for a running cell to \
             finish, then close its session with `{close}`"
        ),
        (Some(close), _) => format!(
            ". Close one with `{close}` (idle the longest: {}), or go on in an existing session",
            names("`")
        ),
        (None, []) => "; end one (none of yours is idle)".to_owned(),
        (None, _) => format!("; end one (idle the longest: {})", names("")),
    }
}

fn quota(which: Quota, words: &ToolWords) -> Option<String> {
    let close = match words.close_session {
        Some(close) => format!("lose a session with `{close}`"),
        None => "lose a session".to_owned(),
    };
    Some(match (which, words.reset) {
        (Quota::Sessions, _) => format!(". C{close}, or go on in an existing one"),
        (Quota::Memory, Some(reset)) => {
            format!(". C{close}, or free the memory of one with `{reset}`")
        }
        (Quota::Memory, None) => format!(". C{close}"),
        (Quota::Stored, _) => format!(". Delete files in your sessions, or c{close}"),
        (Quota::ProcessorTime | Quota::CellsPerMinute | Quota::StartsPerMinute, _) => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> SessionId {
        text.parse().unwrap()
    }

    fn too_many(own: usize, oldest_idle: Vec<SessionId>) -> Refused {
        Refused::TooManySessions {
            limit: 3,
            own,
            oldest_idle,
        }
    }

    fn ended(undo: bool) -> Refused {
        Refused::Ended {
            id: id("a"),
            why: "it crashed".to_owned(),
            undo,
        }
    }

    fn quota(which: Quota) -> Refused {
        Refused::Quota {
            which,
            limit: 1,
            used: 1,
            retry_after: None,
        }
    }

    fn with_remedies() -> Vec<Refused> {
        vec![
            Refused::Unknown { id: id("a") },
            ended(true),
            ended(false),
            Refused::Unresponsive { sent: true },
            Refused::UnknownExecution,
            too_many(2, vec![]),
            too_many(2, vec![id("old")]),
            quota(Quota::Sessions),
            quota(Quota::Memory),
            quota(Quota::Stored),
            Refused::Busy { waiting: 3 },
            Refused::File {
                path: "a.txt".parse().unwrap(),
                reason: FileFailure::Exists,
                detail: String::new(),
            },
            Refused::NoServer {
                name: "x".to_owned(),
            },
        ]
    }

    fn tool_of(remedy: Remedy) -> Option<&'static str> {
        let words = ToolWords::DEFAULT;
        match remedy {
            Remedy::ListSessions => words.list_sessions,
            Remedy::CloseSession => words.close_session,
            Remedy::Reset => words.reset,
            Remedy::Undo => words.undo,
            Remedy::ListCheckpoints => words.list_checkpoints,
            Remedy::CheckExecution => words.check_execution,
            Remedy::ListServers => words.list_servers,
            Remedy::OverwriteFile => words.overwrite,
            Remedy::RunCell | Remedy::UseAnotherSession | Remedy::DeleteFiles => None,
        }
    }

    #[test]
    fn the_default_profile_names_the_tools_of_all_remedies() {
        for refused in with_remedies() {
            assert!(!refused.remedies().is_empty(), "{refused}");
            let text = told(&refused, &ToolWords::DEFAULT);
            let facts = refused.to_string();
            assert!(
                text.starts_with(&facts) && text.len() > facts.len(),
                "{text}"
            );
            for tool in refused.remedies().iter().copied().filter_map(tool_of) {
                assert!(text.contains(&format!("`{tool}`")), "{tool}: {text}");
            }
        }
    }

    #[test]
    fn a_profile_without_these_tools_names_none_of_them() {
        for refused in with_remedies() {
            let text = told(&refused, &ToolWords::without_tools(""));
            for tool in refused.remedies().iter().copied().filter_map(tool_of) {
                assert!(!text.contains(&format!("`{tool}`")), "{tool}: {text}");
            }
            assert!(!text.contains("session_id"), "{text}");
        }
        let full = told(
            &too_many(1, vec![id("a")]),
            &ToolWords::without_tools("Begin again."),
        );
        assert!(full.ends_with("end one (idle the longest: a)"), "{full}");
        let text = told(&ended(true), &ToolWords::without_tools("Begin again."));
        assert_eq!(text, "this session ended because it crashed. Begin again.");
    }

    #[test]
    fn a_note_names_the_tool_for_its_remedy() {
        let note = |text: &str, remedy| OutcomeNote {
            text: text.to_owned(),
            remedy,
        };
        let dropped = note("A kept state was given up.", Some(Remedy::ListCheckpoints));
        let (default, without) = (ToolWords::DEFAULT, ToolWords::without_tools(""));
        assert_eq!(
            note_told(&dropped, &default),
            "A kept state was given up. `list_checkpoints` tells what can still be undone."
        );
        assert_eq!(note_told(&dropped, &without), dropped.text);
        let lost = note("The state can be restored.", Some(Remedy::Undo));
        assert_eq!(
            note_told(&lost, &default),
            "`undo` brings back the state before this cell."
        );
        assert_eq!(note_told(&lost, &without), lost.text);
        assert_eq!(note_told(&note("A note.", None), &default), "A note.");
    }

    #[test]
    fn an_ended_session_offers_undo_only_when_there_is_something_to_go_back_to() {
        let text = |undo| told(&ended(undo), &ToolWords::DEFAULT);
        assert!(text(true).contains("`undo`") && text(true).contains("`reset`"));
        assert!(!text(false).contains("`undo`") && text(false).contains("`reset`"));
    }

    #[test]
    fn a_refusal_for_too_many_sessions_names_what_to_close() {
        let text = |own, oldest_idle| told(&too_many(own, oldest_idle), &ToolWords::DEFAULT);
        assert!(text(3, vec![id("old")]).contains("`old`"));
        assert!(text(2, vec![]).contains("2 of them are yours, and none of yours is idle"));
        let others = text(0, vec![]);
        assert!(
            others.contains("None of them is yours") && !others.contains("close_session"),
            "{others}"
        );
    }
}
