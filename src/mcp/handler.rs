//! What each message of the protocol means: the library calls these, and they call the rest of the
//! room.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use rmcp::model::{
    CacheScope, CallToolRequestParams, CallToolResponse, CancelTaskParams, CompleteRequestMethod,
    CompleteRequestParams, CompleteResult, CustomRequest, CustomResult, DiscoverResult, ErrorData,
    GetPromptRequestParams, GetPromptResponse, GetTaskParams, GetTaskResult, ListPromptsResult,
    ListResourceTemplatesResult, ListResourcesResult, ListToolsResult, MetaObject,
    PaginatedRequestParams, ProtocolVersion, ReadResourceRequestParams, ReadResourceResponse,
    ServerCapabilities, ServerConfig, Tool, UpdateTaskParams,
};
use rmcp::service::RequestContext;
use rmcp::{RoleServer, ServerHandler};
use serde_json::json;
use tracing::Instrument;

use super::asking::Binding;
use super::resuming::bad_state;
use super::toolbox::{Introduction, ToolContext};
use super::tools::session_as_written;
use super::turns::Turn;
use super::{Server, Shared, custom_request_error, resources};
use crate::ops::{self, HostExt};
use crate::session::Principal;
use crate::telemetry::{Parent, parent_from};

/// How long clients may keep what cannot change while the server runs. Short enough that a new
/// version is soon seen.
const FIXED_FOR: Duration = Duration::from_secs(300);

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        if let Some(introduction) = self.shared.toolbox.introduction() {
            return self.introduced(introduction);
        }
        let undo = if self.shared.can_undo {
            "undo brings the state before the last cell back, "
        } else {
            ""
        };
        ServerConfig::new(
            ServerCapabilities::builder()
                .enable_tools()
                .enable_resources()
                .enable_tasks()
                .build(),
        )
        .with_server_info(self.implementation())
        .with_instructions(format!(
            "Runs Python in private Linux sandboxes {reach}. execute_ipython_cell keeps \
                 variables and \
                 files between calls with the same session_id. The first call may wait while \
                 Python is prepared. \
                 When Python died or a session ended, the result says what is lost; {undo}reset \
                 starts anew. \
                 fork_session copies a live session; explore runs variants of code in copies and \
                 compares them.",
            reach = self.shared.reach,
        ))
    }

    async fn discover(
        &self,
        _context: RequestContext<RoleServer>,
    ) -> Result<DiscoverResult, ErrorData> {
        let versions = self.supported_protocol_versions().into_owned();
        Ok(DiscoverResult::from_server_info(versions, self.get_info())
            .with_ttl_ms(FIXED_FOR.as_millis() as u64)
            .with_cache_scope(CacheScope::Private))
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        refuse_cursor(request)?;
        let mut result = ListToolsResult::with_all_items(self.shared.toolbox.tools().to_vec());
        if let Some(meta) = self.modern_meta(&context) {
            result = result
                .with_ttl_ms(FIXED_FOR.as_millis() as u64)
                .with_cache_scope(CacheScope::Private);
            result.meta = Some(meta);
        }
        Ok(result)
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.shared
            .toolbox
            .tools()
            .iter()
            .find(|tool| tool.name == name)
            .cloned()
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        mut context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let toolbox = &self.shared.toolbox;
        let Some(tool) = toolbox.find(&request.name) else {
            return toolbox.unknown(&request.name);
        };
        let started = Instant::now();
        let owner = &Principal(self.caller(&context)?.principal);
        let span = tracing::info_span!("tool_call", tool = tool.name);
        if let Some(parent) = trace_of(&context) {
            parent.adopt(&span);
        }
        let arguments = request.arguments.unwrap_or_default();
        let binding = Binding::new(owner, tool.name, &arguments);
        // What went out with a form comes back with its answer. Whoever sends something else gets
        // nothing done.
        let resumption = match &request.request_state {
            Some(state) => Some(
                self.shared
                    .seals
                    .open(state, &binding)
                    .map_err(|bad| bad_state(&bad))?,
            ),
            None => None,
        };
        context.extensions.insert(binding);
        let call = async {
            match resumption {
                Some(resumption) => {
                    let unnamed = session_as_written(Some(&arguments))
                        .is_none()
                        .then(|| resumption.session().clone());
                    let response = self
                        .resume(
                            owner,
                            resumption,
                            request.input_responses.as_ref(),
                            &context,
                        )
                        .await;
                    match unnamed {
                        Some(session) => self.naming(owner, &session, response).await,
                        None => response,
                    }
                }
                None => {
                    toolbox
                        .call(
                            ToolContext {
                                server: self,
                                owner,
                                context: &context,
                            },
                            tool,
                            arguments,
                        )
                        .await
                }
            }
        };
        let call = call.instrument(span);
        let response = match turn_of(&context) {
            Some(turn) => turn.run(tool.extent, call).await,
            None => call.await,
        };
        let failed = matches!(
            &response,
            CallToolResponse::Complete(result) if result.is_error == Some(true)
        );
        tracing::info!(
            tool = tool.name,
            failed,
            elapsed_ms = started.elapsed().as_millis(),
            "tool call answered"
        );
        Ok(match response {
            CallToolResponse::Complete(result) => {
                result.with_meta(self.modern_meta(&context)).into()
            }
            other => other,
        })
    }

    async fn list_resources(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        refuse_cursor(request)?;
        let owner = &Principal(self.caller(&context)?.principal);
        let Shared {
            sessions,
            cut_outputs,
            ..
        } = &*self.shared;
        let cut = cut_outputs
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .of(owner);
        let mut listed = Vec::new();
        for (session, execution) in cut {
            if let Ok(Some(size)) = sessions
                .run(
                    owner,
                    ops::OutputSize {
                        session: session.clone(),
                        output: execution.into(),
                    },
                )
                .await
            {
                listed.push(resources::listed(&session, execution, size));
            }
        }
        listed.extend(self.files_of(owner).await);
        let mut result = ListResourcesResult::with_all_items(listed);
        if let Some(meta) = self.modern_meta(&context) {
            // Every execution may change this list.
            result = result.with_ttl_ms(0).with_cache_scope(CacheScope::Private);
            result.meta = Some(meta);
        }
        Ok(result)
    }

    async fn list_resource_templates(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        refuse_cursor(request)?;
        let mut result = ListResourceTemplatesResult::with_all_items(resources::templates());
        if let Some(meta) = self.modern_meta(&context) {
            result = result
                .with_ttl_ms(FIXED_FOR.as_millis() as u64)
                .with_cache_scope(CacheScope::Private);
            result.meta = Some(meta);
        }
        Ok(result)
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let owner = &Principal(self.caller(&context)?.principal);
        let (mut result, fresh_for) = match resources::file_at(&request.uri) {
            // A file can change at any time.
            Some((session, path)) => (
                self.read_session_file(owner, &request.uri, &session, &path)
                    .await?,
                Duration::ZERO,
            ),
            // The output of a finished execution never changes, but it can go.
            None => (self.read_output(owner, &request.uri).await?, FIXED_FOR),
        };
        if let Some(meta) = self.modern_meta(&context) {
            result = result
                .with_ttl_ms(fresh_for.as_millis() as u64)
                .with_cache_scope(CacheScope::Private);
            result.meta = Some(meta);
        }
        Ok(result.into())
    }

    async fn get_task(
        &self,
        request: GetTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetTaskResult, ErrorData> {
        let owner = &Principal(self.caller(&context)?.principal);
        let mut result = self.task(owner, &request.task_id, &context).await?;
        result.meta = self.modern_meta(&context);
        Ok(result)
    }

    async fn update_task(
        &self,
        request: UpdateTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let owner = &Principal(self.caller(&context)?.principal);
        self.answer_task(owner, &request.task_id, &request.input_responses)
            .await
    }

    async fn cancel_task(
        &self,
        request: CancelTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let owner = &Principal(self.caller(&context)?.principal);
        self.stop_task(owner, &request.task_id).await
    }

    // Some clients ask for prompts whatever was declared, and show an error where an empty list
    // would do.

    async fn list_prompts(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        refuse_cursor(request)?;
        let mut result = ListPromptsResult::with_all_items(self.shared.toolbox.prompts());
        if let Some(meta) = self.modern_meta(&context) {
            result = result
                .with_ttl_ms(FIXED_FOR.as_millis() as u64)
                .with_cache_scope(CacheScope::Private);
            result.meta = Some(meta);
        }
        Ok(result)
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        let mut result = self
            .shared
            .toolbox
            .prompt(&request.name, request.arguments.as_ref())?;
        result.meta = self.modern_meta(&context);
        Ok(result.into())
    }

    async fn complete(
        &self,
        _request: CompleteRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        Err(ErrorData::method_not_found::<CompleteRequestMethod>())
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        Err(custom_request_error(&request))
    }
}

/// Returns the trace that a caller is in: the message says so, or else its HTTP request.
fn trace_of(context: &RequestContext<RoleServer>) -> Option<Parent> {
    let said = |name: &str| context.meta.get(name).and_then(|value| value.as_str());
    if let Some(parent) = said("traceparent") {
        return parent_from(parent, said("tracestate").unwrap_or_default());
    }
    let request = context.extensions.get::<axum::http::request::Parts>()?;
    let written = |name: &str| {
        request
            .headers
            .get(name)
            .and_then(|value| value.to_str().ok())
    };
    parent_from(
        written("traceparent")?,
        written("tracestate").unwrap_or_default(),
    )
}

/// Returns the turn that the transport gave to a call, by its message or by its HTTP request.
fn turn_of(context: &RequestContext<RoleServer>) -> Option<Turn> {
    let of_request = || {
        context
            .extensions
            .get::<axum::http::request::Parts>()?
            .extensions
            .get::<Turn>()
    };
    context
        .extensions
        .get::<Turn>()
        .or_else(of_request)
        .cloned()
}

/// All lists fit on one page, so no cursor of ours exists.
fn refuse_cursor(request: Option<PaginatedRequestParams>) -> Result<(), ErrorData> {
    match request.and_then(|request| request.cursor) {
        Some(_) => Err(ErrorData::invalid_params(
            "there is no such page: every list here has one page",
            None,
        )),
        None => Ok(()),
    }
}

impl Server {
    /// Presents the server as the one that its profile stands in for. Cells become tasks in the
    /// default profile only.
    fn introduced(&self, introduction: Introduction) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_resources();
        let capabilities = match self.shared.toolbox.prompts().is_empty() {
            true => capabilities.build(),
            false => capabilities.enable_prompts().build(),
        };
        let config = ServerConfig::new(capabilities).with_server_info(self.implementation());
        match introduction.instructions {
            Some(instructions) => config.with_instructions(instructions),
            None => config,
        }
    }

    /// Returns the metadata every result of the 2026-07-28 protocol should carry, and nothing for
    /// older ones.
    fn modern_meta(&self, context: &RequestContext<RoleServer>) -> Option<MetaObject> {
        let version = context.protocol_version()?;
        (version.as_str() >= ProtocolVersion::V_2026_07_28.as_str()).then(|| {
            let mut meta = MetaObject::new();
            meta.insert(
                "io.modelcontextprotocol/serverInfo".to_owned(),
                json!(self.implementation()),
            );
            meta
        })
    }
}
