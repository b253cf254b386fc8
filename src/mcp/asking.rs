//! Asking the person behind a client: the words and the form that they see, and how their answer
//! comes back.
//!
//! ```text
//! older clients     elicitation/create while the call waits           ─▶ answers
//! since 2026-07-28  the call is answered with `input_required`, the   ─▶ the same call again, with
//!                   form and a sealed state                              `inputResponses` and the
//!                                                                        state; it goes on and
//!                                                                        never runs anything twice
//! tasks             tasks/get shows `input_required` and the form     ─▶ tasks/update
//! ```
//!
//! One form holds all questions that are open. Whatever is not a clear yes is a no: a form that was
//! declined, closed, or filled in with something that it does not offer. What is decided are the
//! questions that the form showed, and no others.
//!
//! Nobody is asked who did not say in the very same request that they can be.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{
    CallToolResponse, ElicitRequest, ElicitRequestParams, ElicitResult, ElicitationAction,
    ElicitationSchema, InputRequest, InputRequests, InputRequiredResult, InputResponses,
    JsonObject, ProtocolVersion, RequestStateCodec, SealOptions,
};
use rmcp::service::RequestContext;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use crate::approval::ApprovalAnswer;
use crate::session::{
    ApprovalId, ApprovalRequest, Approver, Decision, ExecutionHandle, Principal, SessionId,
};

/// The field that answers for all questions of a form.
const DECISION: &str = "decision";
/// What the key of a form begins with; the ids of its questions follow.
const FORM: &str = "approval-";

/// How a client lets a person be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ElicitationMode {
    Elicitation,
    InputRequired,
    Nobody,
}

impl ElicitationMode {
    pub(super) fn of(context: &RequestContext<RoleServer>) -> ElicitationMode {
        // A client that names no kind of elicitation knows forms; one that names only others does
        // not.
        let knows_forms = context
            .client_capabilities()
            .and_then(|capabilities| capabilities.elicitation)
            .is_some_and(|elicitation| elicitation.form.is_some() || elicitation.url.is_none());
        match context.protocol_version() {
            _ if !knows_forms => ElicitationMode::Nobody,
            Some(version) if version.as_str() >= ProtocolVersion::V_2026_07_28.as_str() => {
                ElicitationMode::InputRequired
            }
            _ => ElicitationMode::Elicitation,
        }
    }

    /// Whether a person can be asked while the call waits, for tools that have one answer only.
    pub(super) fn asking_meanwhile(self) -> Approver {
        match self {
            ElicitationMode::Elicitation => Approver::Person,
            ElicitationMode::InputRequired | ElicitationMode::Nobody => Approver::Nobody,
        }
    }

    pub(super) fn asking(self) -> Approver {
        match self {
            ElicitationMode::Elicitation | ElicitationMode::InputRequired => Approver::Person,
            ElicitationMode::Nobody => Approver::Nobody,
        }
    }
}

/// What a sealed state says: where the call goes on when it comes again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Resumption {
    Execution {
        handle: ExecutionHandle,
        session: SessionId,
        asks: Vec<ApprovalId>,
    },
    Install {
        session: SessionId,
        requirements: Vec<String>,
        ask: ApprovalId,
    },
}

impl Resumption {
    pub(super) fn session(&self) -> &SessionId {
        match self {
            Resumption::Execution { session, .. } | Resumption::Install { session, .. } => session,
        }
    }

    /// Questions that were shown.
    pub(super) fn asks(&self) -> Vec<ApprovalId> {
        match self {
            Resumption::Execution { asks, .. } => asks.clone(),
            Resumption::Install { ask, .. } => vec![*ask],
        }
    }
}

/// The key that states are sealed with. It must be the same for all servers that share sessions.
#[derive(Clone)]
pub struct StateKey(Zeroizing<[u8; 32]>);

impl StateKey {
    pub fn new(bytes: [u8; 32]) -> StateKey {
        StateKey(Zeroizing::new(bytes))
    }

    /// A key that no other process has.
    pub fn random() -> StateKey {
        let mut bytes = Zeroizing::new([0; 32]);
        rustix::rand::getrandom(bytes.as_mut_slice(), rustix::rand::GetRandomFlags::empty())
            .expect("the kernel has random bytes");
        StateKey(bytes)
    }
}

impl std::fmt::Debug for StateKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("StateKey")
    }
}

/// Seals states and opens them.
pub(super) struct Seals {
    codec: RequestStateCodec,
}

/// What a state is bound to: whose call of which tool with which arguments. Travels with the
/// request that it describes.
#[derive(Clone)]
pub(super) struct Binding(Vec<u8>);

impl Binding {
    pub(super) fn new(owner: &Principal, tool: &str, arguments: &JsonObject) -> Binding {
        let mut hash = Sha256::new();
        for part in [owner.0.as_bytes(), b"tools/call", tool.as_bytes()] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        // The map is in the order of its keys, so what means the same is written in the same way.
        hash.update(Value::Object(arguments.clone()).to_string().as_bytes());
        Binding(hash.finalize().to_vec())
    }
}

/// A state that is not ours, not for this call, or too old. They look the same to whoever tries.
#[derive(Debug, thiserror::Error)]
#[error(
    "the requestState is not one that this server gave for this call, or it has expired. Nothing \
     was executed; send the call again without it"
)]
pub(super) struct BadState;

impl Seals {
    pub(super) fn new(key: &StateKey) -> Seals {
        Seals {
            codec: RequestStateCodec::try_new(key.0.to_vec())
                .expect("the key has the length that is asked for"),
        }
    }

    pub(super) fn seal(
        &self,
        resumption: &Resumption,
        binding: &Binding,
        life: Duration,
    ) -> String {
        let options = SealOptions::new().associated_data(&binding.0).ttl(life);
        self.codec
            .seal_json_with(resumption, &options)
            .expect("plain values can be written")
    }

    pub(super) fn open(&self, state: &str, binding: &Binding) -> Result<Resumption, BadState> {
        self.codec
            .open_json_with(state, &binding.0)
            .map_err(|_| BadState)
    }

    /// Answers a call of a newer client with the form.
    pub(super) fn input_required(
        &self,
        resumption: &Resumption,
        asked: &[ApprovalRequest],
        binding: &Binding,
        session: &SessionId,
    ) -> CallToolResponse {
        let life = asked
            .iter()
            .map(|asked| asked.timeout)
            .max()
            .unwrap_or_default();
        let state = self.seal(resumption, binding, life);
        let mut result = InputRequiredResult::from_request_state(state);
        result.input_requests = Some(input_requests(session, asked));
        result.into()
    }
}

/// The form under its key, for answers that come back by key.
pub(super) fn input_requests(session: &SessionId, asked: &[ApprovalRequest]) -> InputRequests {
    let ids = asked.iter().map(|asked| asked.id).collect::<Vec<_>>();
    let request = ElicitRequest::new(form(session, asked, Titles::OneOf));
    BTreeMap::from([(key_of(&ids), InputRequest::Elicitation(request))])
}

fn key_of(ids: &[ApprovalId]) -> String {
    let ids = ids
        .iter()
        .map(|ApprovalId(number)| number.to_string())
        .collect::<Vec<_>>();
    format!("{FORM}{}", ids.join("."))
}

/// Finds the answer to the form that showed these questions. `None` when it has not come.
pub(super) fn decisions_for(
    ids: &[ApprovalId],
    responses: Option<&InputResponses>,
) -> Option<Vec<Decision>> {
    let response = responses?.get(&key_of(ids))?;
    Some(decisions(
        ids,
        serde_json::from_value(response.clone()).ok().as_ref(),
    ))
}

/// Finds all answers to forms, whatever questions those showed.
pub(super) fn all_decisions(responses: &InputResponses) -> Vec<Decision> {
    let forms = responses.iter().filter_map(|(key, response)| {
        let ids = key
            .strip_prefix(FORM)?
            .split('.')
            .map(|id| id.parse().map(ApprovalId).ok())
            .collect::<Option<Vec<_>>>()?;
        Some(decisions(
            &ids,
            serde_json::from_value(response.clone()).ok().as_ref(),
        ))
    });
    forms.flatten().collect()
}

/// How the possible answers are written into the schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Titles {
    OneOf,
    /// As revisions before 2025-11-25 know them.
    EnumNames,
}

impl Titles {
    pub(super) fn known_to(context: &RequestContext<RoleServer>) -> Titles {
        match context.protocol_version() {
            Some(version) if version.as_str() >= ProtocolVersion::V_2025_11_25.as_str() => {
                Titles::OneOf
            }
            _ => Titles::EnumNames,
        }
    }
}

/// Makes the form for some questions.
pub(super) fn form(
    session: &SessionId,
    asked: &[ApprovalRequest],
    titles: Titles,
) -> ElicitRequestParams {
    ElicitRequestParams::FormElicitationParams {
        meta: None,
        message: message(session, asked),
        requested_schema: schema(asked, titles),
    }
}

fn message(session: &SessionId, asked: &[ApprovalRequest]) -> String {
    let mut text = match asked.len() {
        1 => format!(
            "Code in the session `{session}` wants to do this, and needs your permission:\n"
        ),
        count => {
            format!(
                "Code in the session `{session}` wants to do these {count} things, and needs your \
                 permission:\n"
            )
        }
    };
    for (number, asked) in (1..).zip(asked) {
        let _ = write!(
            text,
            "\n{number}. {}\n   Asked because of {}\n",
            asked.text, asked.line
        );
        let _ = writeln!(
            text,
            "   \"For this session\" would cover {}.",
            asked.covers
        );
    }
    if asked.iter().any(|asked| asked.can_last) {
        text.push_str("\n\"Always\" covers the same in every later session of yours.\n");
    }
    text
}

fn schema(asked: &[ApprovalRequest], titles: Titles) -> ElicitationSchema {
    let can_last = asked.iter().all(|asked| asked.can_last);
    let choices = choices(can_last);
    let question = if asked.len() == 1 {
        "Your decision"
    } else {
        "Your decision for all of them"
    };
    let mut properties = JsonObject::new();
    properties.insert(DECISION.to_owned(), choice(question, &choices, titles));
    if asked.len() > 1 {
        for number in 1..=asked.len() {
            let title = format!("Only for number {number} (if it differs)");
            properties.insert(
                field_of(number, asked.len()),
                choice(&title, &choices, titles),
            );
        }
    }
    let schema = json!({"type": "object", "properties": properties, "required": [DECISION]});
    serde_json::from_value(schema).expect("it is a schema that the protocol knows")
}

/// The field for one of several questions. Its number is padded, so that fields that are sorted by
/// name are in order.
fn field_of(number: usize, count: usize) -> String {
    let width = count.to_string().len();
    format!("request_{number:0width$}")
}

fn choices(can_last: bool) -> Vec<(ApprovalAnswer, &'static str)> {
    let all = [
        (ApprovalAnswer::Once, "Allow once"),
        (ApprovalAnswer::Session, "Allow for this session"),
        (ApprovalAnswer::Always, "Always allow"),
        (ApprovalAnswer::Deny, "Deny"),
    ];
    all.into_iter()
        .filter(|(answer, _)| can_last || *answer != ApprovalAnswer::Always)
        .collect()
}

fn choice(title: &str, choices: &[(ApprovalAnswer, &'static str)], titles: Titles) -> Value {
    match titles {
        Titles::OneOf => {
            let one_of = choices
                .iter()
                .map(|(answer, title)| json!({"const": answer.name(), "title": title}));
            json!({"type": "string", "title": title, "oneOf": one_of.collect::<Vec<_>>()})
        }
        Titles::EnumNames => {
            let (names, words): (Vec<_>, Vec<_>) = choices
                .iter()
                .map(|(answer, title)| (answer.name(), *title))
                .unzip();
            json!({"type": "string", "title": title, "enum": names, "enumNames": words})
        }
    }
}

/// Reads what a person has answered to a form that showed these questions.
pub(super) fn decisions(ids: &[ApprovalId], result: Option<&ElicitResult>) -> Vec<Decision> {
    let accepted = result.filter(|result| result.action == ElicitationAction::Accept);
    let content = accepted
        .and_then(|result| result.content.as_ref())
        .and_then(Value::as_object);
    let answer = |field: &str| match content.and_then(|content| content.get(field)) {
        // A field that was left empty says nothing.
        None | Some(Value::Null) => None,
        Some(Value::String(word)) if word.is_empty() => None,
        Some(word) => Some(
            word.as_str()
                .and_then(ApprovalAnswer::from_name)
                .unwrap_or(ApprovalAnswer::Deny),
        ),
    };
    let all = answer(DECISION).unwrap_or(ApprovalAnswer::Deny);
    let several = ids.len() > 1;
    let decision = |(number, id): (usize, &ApprovalId)| {
        let own = several
            .then(|| answer(&field_of(number, ids.len())))
            .flatten();
        Decision {
            id: *id,
            answer: own.unwrap_or(all),
        }
    };
    (1..).zip(ids).map(decision).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(number: u64, text: &str) -> ApprovalRequest {
        ApprovalRequest {
            id: ApprovalId(number),
            kind: "tool".to_owned(),
            text: text.to_owned(),
            covers: "every call of it".to_owned(),
            line: "`approve_tools: ask`".to_owned(),
            can_last: false,
            timeout: Duration::from_secs(600),
        }
    }

    fn accept(content: Value) -> ElicitResult {
        ElicitResult::new(ElicitationAction::Accept).with_content(content)
    }

    fn answers(count: u64, result: Option<&ElicitResult>) -> Vec<ApprovalAnswer> {
        let ids = (1..=count).map(ApprovalId).collect::<Vec<_>>();
        decisions(&ids, result)
            .into_iter()
            .map(|decision| decision.answer)
            .collect()
    }

    #[test]
    fn the_form_shows_every_question_and_offers_what_can_be_answered() {
        let session = SessionId::default_session();
        let both = [asked(7, "s.t(a=1)"), asked(9, "s.u(b=2)")];
        let shown = serde_json::to_value(form(&session, &both, Titles::OneOf)).unwrap();
        let message = shown["message"].as_str().unwrap();
        for words in [
            "1. s.t(a=1)",
            "2. s.u(b=2)",
            "approve_tools: ask",
            "every call of it",
            "`default`",
        ] {
            assert!(message.contains(words), "{message}");
        }
        assert!(!message.contains("Always"), "{message}");
        let schema = &shown["requestedSchema"];
        assert_eq!(schema["required"], json!(["decision"]));
        let offered = |field: &str| {
            let one_of = schema["properties"][field]["oneOf"].as_array().unwrap();
            one_of
                .iter()
                .map(|choice| choice["const"].as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        for field in ["decision", "request_1", "request_2"] {
            assert_eq!(offered(field), ["once", "session", "deny"], "{field}");
        }
        let one = serde_json::to_value(form(&session, &both[..1], Titles::EnumNames)).unwrap();
        let properties = one["requestedSchema"]["properties"].as_object().unwrap();
        assert_eq!(properties.keys().collect::<Vec<_>>(), ["decision"]);
        assert_eq!(
            properties["decision"]["enum"],
            json!(["once", "session", "deny"])
        );
        assert_eq!(
            properties["decision"]["enumNames"]
                .as_array()
                .unwrap()
                .len(),
            3
        );
    }

    #[test]
    fn always_is_offered_when_every_question_can_last() {
        let lasting = ApprovalRequest {
            can_last: true,
            ..asked(1, "x")
        };
        let offers = |asked: &[ApprovalRequest]| {
            let shown =
                serde_json::to_string(&form(&SessionId::default_session(), asked, Titles::OneOf))
                    .unwrap();
            shown.contains("\"always\"")
        };
        assert!(offers(std::slice::from_ref(&lasting)));
        assert!(!offers(&[lasting, asked(2, "y")]));
    }

    #[test]
    fn only_a_clear_yes_is_one() {
        assert_eq!(
            answers(1, Some(&accept(json!({"decision": "once"})))),
            [ApprovalAnswer::Once],
            "the control"
        );
        for odd in [
            accept(json!({})),
            accept(json!({"decision": "yes"})),
            accept(json!({"decision": true})),
            accept(json!({"decision": ["once"]})),
            accept(json!("once")),
            accept(json!({"request_1": "once"})),
            ElicitResult::new(ElicitationAction::Accept),
            ElicitResult::new(ElicitationAction::Decline).with_content(json!({"decision": "once"})),
            ElicitResult::new(ElicitationAction::Cancel).with_content(json!({"decision": "once"})),
        ] {
            assert_eq!(answers(1, Some(&odd)), [ApprovalAnswer::Deny], "{odd:?}");
        }
        assert_eq!(
            answers(2, None),
            [ApprovalAnswer::Deny, ApprovalAnswer::Deny]
        );
    }

    #[test]
    fn one_of_several_can_be_answered_otherwise() {
        let result = accept(
            json!({"decision": "session", "request_2": "deny", "request_3": "", "request_4": 5}),
        );
        assert_eq!(
            answers(4, Some(&result)),
            [
                ApprovalAnswer::Session,
                ApprovalAnswer::Deny,
                ApprovalAnswer::Session,
                ApprovalAnswer::Deny
            ]
        );
        let many = accept(json!({"decision": "deny", "request_02": "once"}));
        assert_eq!(
            answers(12, Some(&many))
                .iter()
                .filter(|answer| **answer == ApprovalAnswer::Once)
                .count(),
            1
        );
    }

    #[test]
    fn answers_come_back_under_the_key_of_their_form() {
        let both = [asked(7, "a"), asked(9, "b")];
        let requests = input_requests(&SessionId::default_session(), &both);
        let key = requests.keys().next().unwrap().clone();
        let yes = json!({"action": "accept", "content": {"decision": "once"}});
        let ids = [ApprovalId(7), ApprovalId(9)];
        let responses = BTreeMap::from([(key, yes.clone())]);
        let expected = ids.map(|id| Decision {
            id,
            answer: ApprovalAnswer::Once,
        });
        assert_eq!(decisions_for(&ids, Some(&responses)).unwrap(), expected);
        assert_eq!(all_decisions(&responses), expected);
        assert_eq!(
            decisions_for(&ids[..1], Some(&responses)),
            None,
            "the answer to another form"
        );
        assert_eq!(decisions_for(&ids, None), None);
        for key in ["approval-", "approval-x", "approval-1.", "other"] {
            assert_eq!(
                all_decisions(&BTreeMap::from([(key.to_owned(), yes.clone())])),
                [],
                "{key}"
            );
        }
    }

    #[test]
    fn a_state_is_good_for_its_own_call_and_nothing_else() {
        let seals = Seals::new(&StateKey::random());
        let arguments = |code: &str| {
            json!({"code": code, "session_id": "a"})
                .as_object()
                .unwrap()
                .clone()
        };
        let owner = |name: &str| Principal(name.to_owned());
        let binding =
            |name: &str, tool: &str, code: &str| Binding::new(&owner(name), tool, &arguments(code));
        let resumption = Resumption::Install {
            session: SessionId::default_session(),
            requirements: vec![],
            ask: ApprovalId(5),
        };
        let ours = binding("ann", "install_package", "x");
        let state = seals.seal(&resumption, &ours, Duration::from_secs(60));
        assert_eq!(
            seals.open(&state, &ours).unwrap(),
            resumption,
            "the control"
        );
        for other in [
            binding("ben", "install_package", "x"),
            binding("ann", "execute", "x"),
            binding("ann", "install_package", "y"),
        ] {
            assert!(seals.open(&state, &other).is_err());
        }
        assert!(
            Seals::new(&StateKey::random()).open(&state, &ours).is_err(),
            "the seal of another server"
        );
        for place in 0..state.len() {
            let mut bytes = state.clone().into_bytes();
            bytes[place] ^= 1;
            let forged = String::from_utf8_lossy(&bytes).into_owned();
            assert!(seals.open(&forged, &ours).is_err(), "byte {place}");
        }
        let expired = seals.seal(&resumption, &ours, Duration::ZERO);
        // The clock of states has milliseconds; this one is over when the next begins.
        while seals.open(&expired, &ours).is_ok() {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn what_a_state_is_bound_to_cannot_be_shifted_between_its_parts() {
        let none = JsonObject::new();
        let one = Binding::new(&Principal("ab".to_owned()), "c", &none);
        let other = Binding::new(&Principal("a".to_owned()), "bc", &none);
        assert_ne!(one.0, other.0);
    }
}
