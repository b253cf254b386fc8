//! The tool `upload_file`: from the caller's computer on stdio, as content on HTTP.

use std::error::Error;

use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock};
use serde_json::{Value, json};

use super::schema::{
    Description, Reach, ToolEffect, object, overwrite_schema, path_schema, session_schema,
    transfer_fields, transfer_schema,
};
use super::{Arguments, SessionArgument, ToolDefinition};
use crate::auth::Scope;
use crate::mcp::arguments::{BadArgument, Given, MAX_PATH_LENGTH, at_odds, decoded, shown, wrong};
use crate::mcp::calls::{answer, or_cancelled};
use crate::mcp::host_files::{Capped, on_a_thread};
use crate::mcp::render::finished;
use crate::mcp::toolbox::{Entry, ToolContext};
use crate::mcp::turns::Extent;
use crate::mcp::{Front, McpSettings, Server, Shared};
use crate::ops::{self, HostExt, Io};
use crate::session::{InsidePath, Principal, SessionId};

pub(super) struct UploadTool;

#[derive(Debug, PartialEq)]
pub(super) struct UploadCall {
    session: SessionId,
    relpath: InsidePath,
    source: UploadSource,
    overwrite: bool,
}

/// Where an uploaded file comes from.
#[derive(Debug, PartialEq)]
pub(in crate::mcp) enum UploadSource {
    /// A path on the caller's own machine, which is this one.
    Local(String),
    Content(Vec<u8>),
}

impl ToolDefinition for UploadTool {
    type Call = UploadCall;

    const ENTRY: Entry = Entry {
        name: "upload_file",
        scope: Scope::Execute,
        // It opens a file of the host first.
        extent: Extent::Whole,
    };
    const SESSION: SessionArgument = SessionArgument::MayBegin;

    fn describe(settings: &McpSettings) -> Description {
        let relpath = path_schema("Where to put it, relative to the working folder.");
        let (text, input) = match settings.front {
            Front::Stdio => (
                "Copies a file from the user's computer, out of a directory the user has allowed, \
                 into a session's working folder.",
                object(
                    json!({
                        "relpath": relpath,
                        "local_path": path_schema("The file to copy; relative: below the first \
                             allowed directory."),
                        "session_id": session_schema(settings),
                        "overwrite": overwrite_schema(),
                    }),
                    &["relpath", "local_path"],
                ),
            ),
            Front::Http => (
                "Writes a file into a session's working folder; folders on the way are made. \
                 Large files: PUT /sessions/{session_id}/files/{relpath} with the same token.",
                object(
                    json!({
                        "relpath": relpath,
                        "text": path_schema("The content; or one of the next two."),
                        "base64": {"type": "string"},
                        "resource": {"type": "object", "description": "As in a result: text or \
                             blob."},
                        "session_id": session_schema(settings),
                        "overwrite": overwrite_schema(),
                    }),
                    &["relpath"],
                ),
            ),
        };
        Description {
            title: "Copy a file into a session",
            text: text.to_owned(),
            input,
            output: transfer_schema(),
            effect: ToolEffect::Changes {
                destructive: true,
                idempotent: true,
            },
            reach: Reach::Nothing,
        }
    }

    fn parse(arguments: &mut Arguments<'_>) -> Result<UploadCall, BadArgument> {
        Ok(UploadCall {
            session: arguments.session(),
            relpath: arguments.take("relpath").inside_path()?,
            source: match arguments.defaults.front {
                Front::Stdio => {
                    UploadSource::Local(arguments.take("local_path").text(MAX_PATH_LENGTH, 1)?)
                }
                Front::Http => UploadSource::Content(content(
                    arguments.take("text"),
                    arguments.take("base64"),
                    arguments.take("resource"),
                )?),
            },
            overwrite: arguments.take("overwrite").flag()?,
        })
    }

    async fn run(call: UploadCall, tool_context: ToolContext<'_>) -> CallToolResponse {
        let UploadCall {
            session,
            relpath,
            source,
            overwrite,
        } = call;
        let work =
            tool_context
                .server
                .upload(tool_context.owner, &session, &relpath, source, overwrite);
        let done = or_cancelled(tool_context.context, work).await;
        answer(done, |bytes| uploaded(&session, relpath.as_str(), bytes)).into()
    }
}

/// Reads the content of a file in the one way in which it was given.
fn content(text: Given, base64: Given, resource: Given) -> Result<Vec<u8>, BadArgument> {
    let tool = text.tool;
    match (text.value, base64.value, resource.value) {
        (Some(Value::String(text)), None, None) => Ok(text.into_bytes()),
        (Some(other), None, None) => Err(wrong(tool, "text", shown(&other), "a string".to_owned())),
        (None, Some(encoded), None) => decoded(tool, "base64", &encoded),
        (None, None, Some(resource)) => match (resource.get("text"), resource.get("blob")) {
            (Some(Value::String(text)), None) => Ok(text.clone().into_bytes()),
            (None, Some(blob)) => decoded(tool, "resource", blob),
            _ => Err(wrong(
                tool,
                "resource",
                shown(&resource),
                "an object with \"text\" or \"blob\" (base64)".to_owned(),
            )),
        },
        (None, None, None) => {
            let expected = "or \"base64\" or \"resource\": the content of the file".to_owned();
            Err(BadArgument::Missing {
                tool,
                name: "text",
                expected,
            })
        }
        _ => Err(at_odds(
            tool,
            "text",
            "is one of three ways to give the content; give only one of them".to_owned(),
        )),
    }
}

impl Server {
    pub(in crate::mcp) async fn upload(
        &self,
        owner: &Principal,
        session: &SessionId,
        relpath: &InsidePath,
        source: UploadSource,
        overwrite: bool,
    ) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let Shared {
            sessions, files, ..
        } = &*self.shared;
        match source {
            UploadSource::Local(path) => {
                let file = on_a_thread(files, move |files| files.open(&path)).await?;
                let mut source = Capped::new(tokio::fs::File::from_std(file), files.largest());
                Ok(sessions
                    .run_with(
                        owner,
                        ops::WriteFile {
                            session: session.clone(),
                            path: relpath.clone(),
                            overwrite,
                        },
                        Io::source(&mut source),
                    )
                    .await?)
            }
            UploadSource::Content(bytes) => Ok(sessions
                .run_with(
                    owner,
                    ops::WriteFile {
                        session: session.clone(),
                        path: relpath.clone(),
                        overwrite,
                    },
                    Io::source(bytes.as_slice()),
                )
                .await?),
        }
    }
}

fn uploaded(session: &SessionId, relpath: &str, bytes: u64) -> CallToolResult {
    let text = format!(
        "Copied {bytes} bytes to \"{relpath}\" in the working folder of session \"{session}\"."
    );
    finished(
        vec![ContentBlock::text(text)],
        transfer_fields(session, relpath, bytes),
        false,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::tools::tests::{check_refused, parse, parts};

    #[test]
    fn every_argument_is_used_when_it_is_given() {
        let arguments =
            json!({"relpath": "a/b", "local_path": "c", "session_id": "s", "overwrite": true});
        assert_eq!(
            parse::<UploadTool>(arguments).unwrap(),
            UploadCall {
                session: "s".parse().unwrap(),
                relpath: "a/b".parse().unwrap(),
                source: UploadSource::Local("c".to_owned()),
                overwrite: true
            }
        );
    }

    #[test]
    fn bad_paths_are_refused() {
        check_refused::<UploadTool>(
            json!({"relpath": "../a", "local_path": "b"}),
            &["\"relpath\"", "\"../a\""],
        );
        check_refused::<UploadTool>(
            json!({"relpath": "a", "local_path": ""}),
            &["\"local_path\"", "0 bytes"],
        );
    }

    #[test]
    fn an_upload_says_how_much_went_where() {
        let (text, structured) = parts::<UploadTool>(uploaded(&"s".parse().unwrap(), "a", 5));
        assert_eq!(
            text,
            "Copied 5 bytes to \"a\" in the working folder of session \"s\"."
        );
        assert_eq!(structured["bytes"], 5);
    }
}
