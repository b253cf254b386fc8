//! Serialization of this module's types for another process, where it is not derived.
//!
//! A value with a checked constructor (`SessionId::from_str`) is deserialized through it. Values of
//! other modules that are only displayed are serialized as text.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::{BadHandle, BadInsidePath, BadSessionId, ExecutionHandle, InsidePath, SessionId};
use crate::sandbox::{Blocked, Reason, Rules};

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

/// Optional rules.
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

/// Refused connections; their reasons are display text.
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
        ExecutionId, ExecutionRef, Image, ImageType, Outcome, Output, Part, Refused, Retry,
        SessionInfo, SessionState, Status,
    };

    fn there_and_back<T: Serialize + for<'de> Deserialize<'de>>(value: &T) -> Result<T, String> {
        let bytes = rmp_serde::to_vec_named(value).unwrap();
        rmp_serde::from_slice(&bytes).map_err(|error| error.to_string())
    }

    #[test]
    fn an_outcome_arrives_as_it_was_sent() {
        let image = Image {
            kind: ImageType::Png,
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
                figures: 1,
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
            notes: vec!["a note".to_owned().into()],
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
                state: SessionState::Idle,
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
                then: Retry::Undo,
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
        let which = ExecutionRef::InSession(SessionId::default_session());
        assert_eq!(there_and_back(&which).unwrap(), which);
    }
}
