//! The server that the public conformance suite wants to meet: its tools, prompts and resources, on
//! our own transport.
//!
//! `catalogue` lists and holds what never changes, `questions` asks clients back, `long` runs as
//! tasks. This file decides which of them answers a request. Nothing of this is in the program:
//! what is tested is everything between the socket and a handler.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use rmcp::model::{
    CacheScope, CallToolRequestParams, CallToolResponse, CallToolResult, CancelTaskParams,
    ClientCapabilities, CompleteRequestParams, CompleteResult, CompletionInfo, DiscoverResult,
    ErrorData, GetPromptRequestParams, GetPromptResponse, GetTaskParams, GetTaskResult,
    Implementation, ListPromptsResult, ListResourceTemplatesResult, ListResourcesResult,
    ListToolsResult, PaginatedRequestParams, ProgressNotificationParam, ProtocolVersion,
    ReadResourceRequestParams, ReadResourceResponse, ServerConfig, SubscribeRequestParams,
    SubscriptionFilter, Tool, UnsubscribeRequestParams, UpdateTaskParams,
};
use rmcp::service::{RequestContext, SubscriptionContext};
use rmcp::task_manager::TaskManager;
use rmcp::{RoleServer, ServerHandler};
use serde_json::{Value, json};
use tokio::sync::broadcast;

use super::questions::{self, Step};
use super::{catalogue, long};

/// How long clients may keep what never changes here.
const FIXED_FOR: u64 = 60_000;

/// Changes that a stream may be behind before it misses one; the suite makes one at a time.
const CHANGES_KEPT: usize = 16;

/// The handler. Clones share everything, so that requests which stand alone find the tasks of
/// others.
#[derive(Clone)]
pub(super) struct Fixture {
    shared: Arc<Shared>,
}

struct Shared {
    tasks: TaskManager,
    changes: broadcast::Sender<Change>,
    watched: Mutex<BTreeSet<String>>,
    /// Whether a client of the older era wants to hear what is less than a warning.
    chatty: Mutex<bool>,
}

/// A list that is said to have changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Tools,
    Prompts,
}

impl Fixture {
    pub(super) fn new() -> Fixture {
        let changes = broadcast::channel(CHANGES_KEPT).0;
        let (watched, chatty) = (Mutex::default(), Mutex::new(true));
        Fixture {
            shared: Arc::new(Shared {
                tasks: TaskManager::new(),
                changes,
                watched,
                chatty,
            }),
        }
    }

    async fn answer(
        &self,
        request: &CallToolRequestParams,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        if let Some(fixed) = catalogue::fixed_result(&request.name) {
            return Ok(fixed.into());
        }
        if let Some(form) = questions::of_tool(&request.name) {
            return match form.next(
                request.input_responses.as_ref(),
                request.request_state.as_deref(),
                context,
            )? {
                Step::Ask(questions) => Ok(questions.into()),
                Step::Answered(text) if request.name == long::AFTER_QUESTIONS => {
                    long::after_questions(&self.shared.tasks, text, context)
                }
                Step::Answered(text) => Ok(catalogue::text(&text).into()),
            };
        }
        if let Some(response) = long::call(&self.shared.tasks, request, context).await {
            return response;
        }
        self.act(request, context).await.map(CallToolResponse::from)
    }

    /// Carries out the tools that do something before they answer.
    async fn act(
        &self,
        request: &CallToolRequestParams,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        match &*request.name {
            "test_tool_with_progress" => {
                if let Some(token) = context.meta.get_progress_token() {
                    for done in [0.0, 50.0, 100.0] {
                        let report =
                            ProgressNotificationParam::new(token.clone(), done).with_total(100.0);
                        sent(context.peer.notify_progress(report).await)?;
                    }
                }
                Ok(catalogue::text("all steps are done"))
            }
            "test_tool_with_logging" | "test_logging_tool" => {
                for step in ["the tool begins", "the tool works", "the tool has finished"] {
                    self.log(step, context).await?;
                }
                Ok(catalogue::text(
                    "what was done has been logged, for who wanted it",
                ))
            }
            "test_missing_capability" => {
                let declared = context.client_capabilities().unwrap_or_default();
                match declared.sampling {
                    Some(_) => Ok(catalogue::text("the client lets servers ask its model")),
                    None => Err(missing(json!({"sampling": {}}))),
                }
            }
            "test_trigger_tool_change" => Ok(self.change(Change::Tools)),
            "test_trigger_prompt_change" => Ok(self.change(Change::Prompts)),
            "test_sampling"
            | "test_elicitation"
            | "test_elicitation_sep1034_defaults"
            | "test_elicitation_sep1330_enums" => {
                let question = questions::of_the_older_era(
                    &request.name,
                    argument(request, &["prompt", "message"]),
                );
                let answer = questions::put(question, context).await?;
                Ok(catalogue::text(&format!("the client answered {answer}")))
            }
            "greet" => Ok(catalogue::text(&format!(
                "Hello, {}!",
                argument(request, &["name"])
            ))),
            "test_routed" => Ok(catalogue::text(&format!(
                "sent to {}",
                argument(request, &["region"])
            ))),
            other => Err(ErrorData::invalid_params(
                format!("there is no tool {other:?}"),
                None,
            )),
        }
    }

    fn change(&self, change: Change) -> CallToolResult {
        // Nobody may be listening.
        let _ = self.shared.changes.send(change);
        catalogue::text("whoever listens is told that the list changed")
    }

    /// Sends a message to the client's log: in the new era only if this very request asks for it,
    /// in the older one as agreed before.
    #[expect(
        deprecated,
        reason = "the suite tests logging for as long as the protocol has it"
    )]
    async fn log(&self, text: &str, context: &RequestContext<RoleServer>) -> Result<(), ErrorData> {
        use rmcp::model::{LoggingLevel, LoggingMessageNotificationParam};
        let wanted = if is_modern(context) {
            context.meta.log_level().is_some()
        } else {
            *lock(&self.shared.chatty)
        };
        if wanted {
            let message = LoggingMessageNotificationParam::new(LoggingLevel::Info, json!(text));
            sent(context.peer.notify_logging_message(message).await)?;
        }
        Ok(())
    }
}

impl ServerHandler for Fixture {
    fn get_info(&self) -> ServerConfig {
        let capabilities = from_json(json!({
            "tools": {"listChanged": true},
            "prompts": {"listChanged": true},
            "resources": {"subscribe": true},
            "completions": {},
            "logging": {},
            "extensions": {"io.modelcontextprotocol/tasks": {}},
        }));
        ServerConfig::new(capabilities)
            .with_server_info(Implementation::new("cellblock-fixture", "1"))
    }

    async fn discover(
        &self,
        _context: RequestContext<RoleServer>,
    ) -> Result<DiscoverResult, ErrorData> {
        let versions = self.supported_protocol_versions().into_owned();
        let result = DiscoverResult::from_server_info(versions, self.get_info());
        Ok(result
            .with_ttl_ms(FIXED_FOR)
            .with_cache_scope(CacheScope::Public))
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let result = ListToolsResult::with_all_items(catalogue::tools());
        Ok(result
            .with_ttl_ms(FIXED_FOR)
            .with_cache_scope(CacheScope::Public))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        catalogue::tools()
            .into_iter()
            .find(|tool| tool.name == name)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        self.answer(&request, &context).await
    }

    async fn list_prompts(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        let result = ListPromptsResult::with_all_items(catalogue::prompts());
        Ok(result
            .with_ttl_ms(FIXED_FOR)
            .with_cache_scope(CacheScope::Public))
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        if let Some(form) = questions::of_prompt(&request.name) {
            return match form.next(
                request.input_responses.as_ref(),
                request.request_state.as_deref(),
                &context,
            )? {
                Step::Ask(questions) => Ok(questions.into()),
                Step::Answered(text) => Ok(catalogue::prompt_of(&text).into()),
            };
        }
        let arguments = request.arguments.unwrap_or_default();
        let prompt = catalogue::prompt(&request.name, &Value::Object(arguments));
        prompt.map(GetPromptResponse::from).ok_or_else(|| {
            ErrorData::invalid_params(format!("there is no prompt {:?}", request.name), None)
        })
    }

    async fn complete(
        &self,
        request: CompleteRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        let known = ["test", "testing", "tested"].map(str::to_owned);
        let begun = known
            .into_iter()
            .filter(|word| word.starts_with(&request.argument.value))
            .collect();
        let values =
            CompletionInfo::new(begun).map_err(|error| ErrorData::internal_error(error, None))?;
        Ok(CompleteResult::new(values))
    }

    async fn list_resources(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let result = ListResourcesResult::with_all_items(catalogue::resources());
        Ok(result
            .with_ttl_ms(FIXED_FOR)
            .with_cache_scope(CacheScope::Public))
    }

    async fn list_resource_templates(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let result = ListResourceTemplatesResult::with_all_items(catalogue::templates());
        Ok(result
            .with_ttl_ms(FIXED_FOR)
            .with_cache_scope(CacheScope::Public))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let contents = catalogue::contents(&request.uri).ok_or_else(|| {
            ErrorData::resource_not_found(
                "there is no such resource",
                Some(json!({"uri": request.uri})),
            )
        })?;
        Ok(contents
            .with_ttl_ms(FIXED_FOR)
            .with_cache_scope(CacheScope::Public)
            .into())
    }

    async fn subscribe(
        &self,
        request: SubscribeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        lock(&self.shared.watched).insert(request.uri);
        Ok(())
    }

    async fn unsubscribe(
        &self,
        request: UnsubscribeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        lock(&self.shared.watched).remove(&request.uri);
        Ok(())
    }

    #[expect(
        deprecated,
        reason = "the suite tests logging for as long as the protocol has it"
    )]
    async fn set_level(
        &self,
        request: rmcp::model::SetLevelRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        use rmcp::model::LoggingLevel;
        *lock(&self.shared.chatty) = matches!(
            request.level,
            LoggingLevel::Debug | LoggingLevel::Info | LoggingLevel::Notice
        );
        Ok(())
    }

    fn accepted_subscription_filter(
        &self,
        requested: &SubscriptionFilter,
    ) -> Option<SubscriptionFilter> {
        Some(requested.clone())
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        let mut changes = self.shared.changes.subscribe();
        loop {
            let change = tokio::select! {
                change = changes.recv() => change,
                () = context.cancelled() => return Ok(()),
            };
            // What this stream did not ask for is refused by its sink, which is what the suite
            // looks at.
            let _ = match change {
                Ok(Change::Tools) => context.sink().notify_tool_list_changed().await,
                Ok(Change::Prompts) => context.sink().notify_prompt_list_changed().await,
                Err(_) => return Ok(()),
            };
        }
    }

    async fn get_task(
        &self,
        request: GetTaskParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<GetTaskResult, ErrorData> {
        self.shared
            .tasks
            .get_task(&request.task_id)
            .map(GetTaskResult::new)
    }

    async fn update_task(
        &self,
        request: UpdateTaskParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.shared
            .tasks
            .update_task(&request.task_id, request.input_responses)
    }

    async fn cancel_task(
        &self,
        request: CancelTaskParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.shared.tasks.cancel_task(&request.task_id)
    }
}

/// Tells whether a request belongs to the era in which every request stands alone.
pub(super) fn is_modern(context: &RequestContext<RoleServer>) -> bool {
    context
        .protocol_version()
        .is_some_and(|version| version.as_str() >= ProtocolVersion::V_2026_07_28.as_str())
}

/// The error of a request that needs something its client did not declare.
pub(super) fn missing(capabilities: Value) -> ErrorData {
    ErrorData::missing_required_client_capability(from_json::<ClientCapabilities>(capabilities))
}

/// Reads what this fixture itself has written down as JSON, the notation of the suite's
/// requirements.
pub(super) fn from_json<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("the fixture knows the protocol's shapes")
}

/// The first of these arguments that was given as text.
fn argument<'a>(request: &'a CallToolRequestParams, names: &[&str]) -> &'a str {
    let arguments = request.arguments.as_ref();
    names
        .iter()
        .find_map(|name| arguments?.get(*name)?.as_str())
        .unwrap_or("nobody")
}

fn sent(result: Result<(), rmcp::ServiceError>) -> Result<(), ErrorData> {
    result.map_err(|error| ErrorData::internal_error(error.to_string(), None))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
