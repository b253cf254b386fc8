//! How the words of this room travel to another process, where that is not plain.
//!
//! A value that has a door (`SessionId::from_str`) comes in through it again. What is only shown, and belongs to another room, travels as its text.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::{BadHandle, BadInsidePath, BadSessionId, ExecutionHandle, InsidePath, SessionId};
use crate::sandbox::{Blocked, Reason, Rules};

/// A text that the program itself holds, such as the name of a state.
pub type Word = &'static str;

/// The program has fewer words. More of them would be a peer's invention, and their memory would never be given back.
const MOST_WORDS: usize = 1_000;
/// Bytes of the longest word.
const LONGEST_WORD: usize = 200;

impl TryFrom<String> for SessionId {
    type Error = BadSessionId;

    fn try_from(text: String) -> Result<SessionId, BadSessionId> {
        text.parse()
    }
}

impl TryFrom<String> for InsidePath {
    type Error = BadInsidePath;

    fn try_from(text: String) -> Result<InsidePath, BadInsidePath> {
        text.parse()
    }
}

impl TryFrom<String> for ExecutionHandle {
    type Error = BadHandle;

    fn try_from(text: String) -> Result<ExecutionHandle, BadHandle> {
        text.parse()
    }
}

/// Words, each of which is kept once for as long as the process lives.
pub(super) mod word {
    use super::*;

    pub(in crate::session) fn serialize<S: Serializer>(
        word: &Word,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(word)
    }

    pub(in crate::session) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Word, D::Error> {
        let text = String::deserialize(deserializer)?;
        kept(text).ok_or_else(|| de::Error::custom("too many words, or too long a word"))
    }
}

fn kept(text: String) -> Option<Word> {
    static WORDS: Mutex<Option<HashSet<Word>>> = Mutex::new(None);
    let mut words = WORDS.lock().unwrap_or_else(PoisonError::into_inner);
    let words = words.get_or_insert_default();
    if let Some(word) = words.get(text.as_str()) {
        return Some(word);
    }
    if words.len() == MOST_WORDS || text.len() > LONGEST_WORD {
        return None;
    }
    let word: Word = String::leak(text);
    words.insert(word);
    Some(word)
}

/// Rules as their canonical texts.
pub(super) mod rules {
    use super::*;

    pub(in crate::session) fn serialize<S: Serializer>(
        rules: &Rules,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(rules.iter().map(ToString::to_string))
    }

    pub(in crate::session) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Rules, D::Error> {
        Rules::from_texts(&Vec::<String>::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

/// Rules, where there may be none.
pub(super) mod optional_rules {
    use super::*;

    pub(in crate::session) fn serialize<S: Serializer>(
        rules: &Option<Rules>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let texts = rules
            .as_ref()
            .map(|rules| rules.iter().map(ToString::to_string).collect::<Vec<_>>());
        texts.serialize(serializer)
    }

    pub(in crate::session) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Rules>, D::Error> {
        let texts = Option::<Vec<String>>::deserialize(deserializer)?;
        texts
            .map(|texts| Rules::from_texts(&texts).map_err(de::Error::custom))
            .transpose()
    }
}

/// Refused connections, whose reasons are for readers.
pub(super) mod blocked {
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Told {
        target: String,
        reason: String,
        times: u32,
    }

    pub(in crate::session) fn serialize<S: Serializer>(
        blocked: &[Blocked],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(blocked.iter().map(|blocked| Told {
            target: blocked.target.clone(),
            reason: blocked.reason.to_string(),
            times: blocked.times,
        }))
    }

    pub(in crate::session) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<Blocked>, D::Error> {
        let told = Vec::<Told>::deserialize(deserializer)?;
        let blocked = |Told {
                           target,
                           reason,
                           times,
                       }| Blocked {
            target,
            reason: Reason::Told(reason),
            times,
        };
        Ok(told.into_iter().map(blocked).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::{
        ExecutionId, Image, Outcome, Output, Part, Refused, SessionInfo, Status, Which,
    };

    fn there_and_back<T: Serialize + for<'de> Deserialize<'de>>(value: &T) -> Result<T, String> {
        let bytes = rmp_serde::to_vec_named(value).unwrap();
        rmp_serde::from_slice(&bytes).map_err(|error| error.to_string())
    }

    #[test]
    fn an_outcome_arrives_as_it_was_sent() {
        let image = Image {
            mime: "image/png",
            bytes: vec![0, 255, 7],
            width: 2,
            height: 1,
            scaled_from: Some((4, 2)),
            frames: Some(2),
        };
        let refused = Blocked {
            target: "example.org:443".to_owned(),
            reason: Reason::NotListed,
            times: 2,
        };
        let outcome = Outcome {
            execution: ExecutionId(7),
            status: Status::Completed,
            output: Output {
                parts: vec![Part::Image(image)],
                total_chars: 3,
                total_lines: 1,
                cut_chars: 0,
                late: None,
            },
            duration: std::time::Duration::from_micros(1500),
            memory: Default::default(),
            processor_time: std::time::Duration::from_millis(3),
            variables: None,
            files: Some(Default::default()),
            isolation: Default::default(),
            can_undo: 2,
            tool_calls: Default::default(),
            rulings: Vec::new(),
            blocked: vec![refused.clone()],
            notes: vec!["a note".to_owned()],
            first_line: String::new(),
            others: Default::default(),
        };
        let back = there_and_back(&outcome).unwrap();
        assert_eq!(back.output.parts, outcome.output.parts);
        assert_eq!(
            (back.execution, back.status, back.duration),
            (ExecutionId(7), Status::Completed, outcome.duration)
        );
        assert_eq!(
            back.blocked[0].to_string(),
            refused.to_string(),
            "a reason keeps its words"
        );
    }

    #[test]
    fn rules_keep_their_meaning_also_the_choice_of_everything() {
        let listed = Rules::parse(&[
            "*.example.com:8000-8010",
            "192.0.2.0/24",
            "!ads.example.com",
        ])
        .unwrap();
        let everything = Rules::everything().deny(&["ads.example.com"]).unwrap();
        for rules in [Rules::none(), listed, Rules::everything(), everything] {
            let info = SessionInfo {
                id: SessionId::default_session(),
                state: "idle",
                ended: None,
                executions: 1,
                age: Default::default(),
                idle: Default::default(),
                memory: None,
                rules: rules.clone(),
                requested: vec!["polars>=1".to_owned()],
            };
            assert_eq!(there_and_back(&info).unwrap().rules, rules);
        }
    }

    #[test]
    fn every_refusal_keeps_its_words() {
        let id = SessionId::default_session();
        for refused in [
            Refused::CellRunning {
                id: id.clone(),
                then: "undo",
            },
            Refused::Unknown { id: id.clone() },
            Refused::Launch(crate::sandbox::LaunchError::TimedOut(
                std::time::Duration::from_secs(3),
            )),
        ] {
            assert_eq!(
                there_and_back(&refused).unwrap().to_string(),
                refused.to_string()
            );
        }
    }

    #[test]
    fn what_could_not_be_written_cannot_arrive() {
        let arrives = |text: &str| {
            let bytes = rmp_serde::to_vec_named(text).unwrap();
            let id = rmp_serde::from_slice::<SessionId>(&bytes).is_ok();
            let path = rmp_serde::from_slice::<InsidePath>(&bytes).is_ok();
            (
                id,
                path,
                rmp_serde::from_slice::<ExecutionHandle>(&bytes).is_ok(),
            )
        };
        assert_eq!(arrives("../x"), (false, false, false));
        assert_eq!(
            arrives("0123456789abcdef0123456789abcdef"),
            (true, true, true)
        ); // control
        let which = Which::Of(SessionId::default_session());
        assert_eq!(there_and_back(&which).unwrap(), which);
    }

    #[test]
    fn a_word_is_kept_once_and_a_text_is_none() {
        let first = kept("a word of this test".to_owned()).unwrap();
        let second = kept("a word of this test".to_owned()).unwrap();
        assert!(std::ptr::eq(first, second));
        assert_eq!(kept("x".repeat(LONGEST_WORD + 1)), None);
    }
}
