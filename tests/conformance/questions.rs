//! Tools and prompts that ask the client something before they answer.
//!
//! In the new era a question is a result: the client answers by sending its request again. A `Form`
//! has rounds of questions. Where it is between rounds travels in `requestState`, under a seal,
//! because whoever echoes it could change it. In the older era a question is a request of the
//! server's own.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rmcp::RoleServer;
use rmcp::model::{ErrorData, InputRequiredResult, InputResponses, ServerRequest};
use rmcp::service::RequestContext;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::fixture::{from_json, missing};

/// Seals the states of one test process. The suite tampers with states; it does not read our
/// source.
const SEAL_KEY: &str = "the fixture's own key";

/// What a client is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Question {
    /// A form of one field.
    Field {
        message: &'static str,
        name: &'static str,
        kind: &'static str,
    },
    /// A text from the client's model.
    Sample(&'static str),
    Roots,
}

/// Rounds of questions, each with the key of its answer.
pub(super) struct Form {
    name: &'static str,
    rounds: &'static [&'static [(&'static str, Question)]],
    /// Whether each answer must come with the state that was handed out.
    sealed: bool,
}

/// What comes next in a form.
pub(super) enum Step {
    Ask(InputRequiredResult),
    /// Everything was answered; the text tells what.
    Answered(String),
}

const NAME: Question = Question::Field {
    message: "What is your name?",
    name: "name",
    kind: "string",
};
const COLOUR: Question = Question::Field {
    message: "Which colour do you like?",
    name: "color",
    kind: "string",
};
const CONSENT: Question = Question::Field {
    message: "Shall it be done?",
    name: "ok",
    kind: "boolean",
};
const CONTEXT: Question = Question::Field {
    message: "Which context is meant?",
    name: "context",
    kind: "string",
};
const CAPITAL: Question = Question::Sample("What is the capital of France?");

const TOOLS: &[Form] = &[
    Form {
        name: "test_input_required_result_elicitation",
        rounds: &[&[("user_name", NAME)]],
        sealed: false,
    },
    Form {
        name: "test_input_required_result_sampling",
        rounds: &[&[("capital_question", CAPITAL)]],
        sealed: false,
    },
    Form {
        name: "test_input_required_result_list_roots",
        rounds: &[&[("client_roots", Question::Roots)]],
        sealed: false,
    },
    Form {
        name: "test_input_required_result_request_state",
        rounds: &[&[("confirm", CONSENT)]],
        sealed: true,
    },
    Form {
        name: "test_input_required_result_tampered_state",
        rounds: &[&[("confirm", CONSENT)]],
        sealed: true,
    },
    Form {
        name: "test_input_required_result_multiple_inputs",
        rounds: &[&[
            ("user_name", NAME),
            ("greeting", CAPITAL),
            ("client_roots", Question::Roots),
        ]],
        sealed: true,
    },
    Form {
        name: "test_input_required_result_multi_round",
        rounds: &[&[("step1", NAME)], &[("step2", COLOUR)]],
        sealed: true,
    },
    Form {
        name: "test_input_required_result_capabilities",
        rounds: &[&[("user_name", NAME), ("greeting", CAPITAL)]],
        sealed: false,
    },
    Form {
        name: "test_streaming_elicitation",
        rounds: &[&[("user_name", NAME)]],
        sealed: false,
    },
    Form {
        name: "test_tool_with_task",
        rounds: &[&[("user_name", NAME)]],
        sealed: false,
    },
];

const PROMPTS: &[Form] = &[Form {
    name: "test_input_required_result_prompt",
    rounds: &[&[("user_context", CONTEXT)]],
    sealed: false,
}];

/// Returns the form of a tool that has one.
pub(super) fn of_tool(name: &str) -> Option<&'static Form> {
    TOOLS.iter().find(|form| form.name == name)
}

/// Returns the form of a prompt that has one.
pub(super) fn of_prompt(name: &str) -> Option<&'static Form> {
    PROMPTS.iter().find(|form| form.name == name)
}

/// The names of all tools with forms.
pub(super) fn tools() -> impl Iterator<Item = &'static str> {
    TOOLS.iter().map(|form| form.name)
}

impl Form {
    /// Decides what follows from what the client sent along. Missing and senseless answers are
    /// asked for again; extra ones are ignored.
    pub(super) fn next(
        &self,
        answers: Option<&InputResponses>,
        state: Option<&str>,
        context: &RequestContext<RoleServer>,
    ) -> Result<Step, ErrorData> {
        let round = match state {
            Some(state) if self.sealed => self.unsealed(state)?,
            _ => 0,
        };
        let questions = self.askable(round, context)?;
        let answer_to = |key: &str, question: Question| {
            answers?
                .get(key)
                .filter(|answer| question.accepts(answer))
                .map(|answer| format!("{key}: {answer}"))
        };
        let given: Vec<_> = questions
            .iter()
            .filter_map(|(key, question)| answer_to(key, *question))
            .collect();
        let may_count = !self.sealed || state.is_some();
        let next = match given.len() == questions.len() && may_count {
            true if round + 1 == self.rounds.len() => {
                return Ok(Step::Answered(format!("state-ok, {given:?}")));
            }
            true => round + 1,
            false => round,
        };
        let questions = self.askable(next, context)?;
        let requests = questions
            .iter()
            .map(|(key, question)| ((*key).to_owned(), from_json(question.request())));
        let state = self.sealed.then(|| self.seal(next));
        Ok(Step::Ask(InputRequiredResult::new(
            Some(requests.collect()),
            state,
        )))
    }

    /// The questions of a round that this client can be asked.
    fn askable(
        &self,
        round: usize,
        context: &RequestContext<RoleServer>,
    ) -> Result<Vec<(&'static str, Question)>, ErrorData> {
        let declared = json!(context.client_capabilities().unwrap_or_default());
        let all = self.rounds[round].iter().copied();
        let can: Vec<_> = all
            .filter(|(_, question)| declared.get(question.capability()).is_some())
            .collect();
        match can.is_empty() {
            true => Err(missing(Value::Object(Map::from_iter([(
                self.rounds[round][0].1.capability().into(),
                json!({}),
            )])))),
            false => Ok(can),
        }
    }

    fn seal(&self, round: usize) -> String {
        let tag = Sha256::digest(format!("{SEAL_KEY}\n{}\n{round}", self.name));
        format!("{round}.{}", URL_SAFE_NO_PAD.encode(tag))
    }

    fn unsealed(&self, state: &str) -> Result<usize, ErrorData> {
        (0..self.rounds.len())
            .find(|round| self.seal(*round) == state)
            .ok_or_else(|| {
                ErrorData::invalid_params("this requestState is not one that was handed out", None)
            })
    }
}

impl Question {
    fn request(self) -> Value {
        match self {
            Question::Field {
                message,
                name,
                kind,
            } => json!({
                "method": "elicitation/create",
                "params": {"mode": "form", "message": message, "requestedSchema": {
                    "type": "object", "properties": {name: {"type": kind}}, "required": [name],
                }},
            }),
            Question::Sample(prompt) => sampling(prompt),
            Question::Roots => json!({"method": "roots/list", "params": {}}),
        }
    }

    fn capability(self) -> &'static str {
        match self {
            Question::Field { .. } => "elicitation",
            Question::Sample(_) => "sampling",
            Question::Roots => "roots",
        }
    }

    fn accepts(self, answer: &Value) -> bool {
        match self {
            Question::Field { name, .. } => {
                answer["action"] == "accept" && answer["content"].get(name).is_some()
            }
            Question::Sample(_) => answer["content"].is_object(),
            Question::Roots => answer["roots"].is_array(),
        }
    }
}

/// A form of one field, as a task asks for it.
pub(super) fn form_of_one(message: &str, name: &str, kind: &str) -> Value {
    json!({"method": "elicitation/create", "params": {
        "mode": "form",
        "message": message,
        "requestedSchema": {
            "type": "object", "properties": {name: {"type": kind}}, "required": [name],
        },
    }})
}

/// The request of the server's own that a tool of the older era makes.
pub(super) fn of_the_older_era(tool: &str, text: &str) -> Value {
    let fields = match tool {
        "test_sampling" => return sampling(text),
        "test_elicitation" => json!({
            "username": {"type": "string", "description": "What the user is called"},
            "email": {"type": "string", "description": "Where the user gets mail"},
        }),
        "test_elicitation_sep1034_defaults" => json!({
            "name": {"type": "string", "default": "John Doe"},
            "age": {"type": "integer", "default": 30},
            "score": {"type": "number", "default": 95.5},
            "status": {
                "type": "string", "enum": ["active", "inactive", "pending"], "default": "active",
            },
            "verified": {"type": "boolean", "default": true},
        }),
        _ => json!({
            "untitledSingle": {"type": "string", "enum": ["option1", "option2", "option3"]},
            "titledSingle": {"type": "string", "oneOf": titled(&["value1", "value2", "value3"])},
            "legacyEnum": {
                "type": "string", "enum": ["opt1", "opt2", "opt3"],
                "enumNames": ["First", "Second", "Third"],
            },
            "untitledMulti": {
                "type": "array",
                "items": {"type": "string", "enum": ["option1", "option2", "option3"]},
            },
            "titledMulti": {
                "type": "array", "items": {"anyOf": titled(&["value1", "value2", "value3"])},
            },
        }),
    };
    let required: Vec<_> = if tool == "test_elicitation" {
        vec!["username", "email"]
    } else {
        vec![]
    };
    let schema = json!({"type": "object", "properties": fields, "required": required});
    json!({
        "method": "elicitation/create",
        "params": {"mode": "form", "message": text, "requestedSchema": schema},
    })
}

/// Puts a question of the older era to the client and waits for the answer.
pub(super) async fn put(
    question: Value,
    context: &RequestContext<RoleServer>,
) -> Result<Value, ErrorData> {
    let answer = context
        .peer
        .send_request(from_json::<ServerRequest>(question))
        .await;
    let answer = answer.map_err(|error| ErrorData::internal_error(error.to_string(), None))?;
    Ok(json!(answer))
}

fn sampling(prompt: &str) -> Value {
    let message = json!({"role": "user", "content": {"type": "text", "text": prompt}});
    json!({"method": "sampling/createMessage", "params": {"messages": [message], "maxTokens": 100}})
}

fn titled(values: &[&str]) -> Vec<Value> {
    values
        .iter()
        .map(|value| json!({"const": value, "title": format!("The choice {value}")}))
        .collect()
}
