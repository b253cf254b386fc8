//! The tool `download_file`: to the caller's computer on stdio, as a resource on HTTP.

use std::error::Error;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock, ResourceContents};
use serde_json::json;
use tokio::io::AsyncWriteExt;

use super::schema::{
    Description, Reach, ToolEffect, object, overwrite_schema, path_schema, session_schema,
    transfer_fields, transfer_schema,
};
use super::{Arguments, SessionArgument, ToolDefinition};
use crate::auth::Scope;
use crate::mcp::arguments::{BadArgument, MAX_PATH_LENGTH};
use crate::mcp::calls::{answer, or_cancelled};
use crate::mcp::host_files::{Overwrite, on_a_thread};
use crate::mcp::render::finished;
use crate::mcp::resources::MAX_INLINE_BYTES;
use crate::mcp::toolbox::{Entry, ToolContext};
use crate::mcp::turns::Extent;
use crate::mcp::{Front, McpSettings, Server, Shared, resources};
use crate::ops::{self, HostExt, Io};
use crate::session::{InsidePath, Principal, SessionId};

pub(super) struct DownloadTool;

#[derive(Debug, PartialEq)]
pub(super) struct DownloadCall {
    session: SessionId,
    relpath: InsidePath,
    target: Target,
}

/// Where a downloaded file goes.
#[derive(Debug, PartialEq)]
enum Target {
    /// A path on the caller's own machine, which is this one.
    Local { path: String, overwrite: Overwrite },
    /// The result itself.
    Inline,
}

impl ToolDefinition for DownloadTool {
    type Call = DownloadCall;

    const ENTRY: Entry = Entry {
        name: "download_file",
        scope: Scope::Read,
        // It opens a file of the host first.
        extent: Extent::Whole,
    };
    const SESSION: SessionArgument = SessionArgument::Existing;

    fn describe(settings: &McpSettings) -> Description {
        let (text, input, effect) = match settings.front {
            Front::Stdio => (
                "Copies a file from a session's working folder to the user's computer, into a \
                 directory the user has allowed; never onto configuration files such as .bashrc, \
                 .git or .ssh.",
                object(
                    json!({
                        "relpath": path_schema("The file to copy, relative to the working folder."),
                        "local_path": path_schema("Where to put it; relative: below the first \
                             allowed directory."),
                        "session_id": session_schema(settings),
                        "overwrite": overwrite_schema(),
                    }),
                    &["relpath", "local_path"],
                ),
                ToolEffect::Changes {
                    destructive: true,
                    idempotent: true,
                },
            ),
            Front::Http => (
                "Returns a file of a session's working folder as a resource. Large files: GET \
                 /sessions/{session_id}/files/{relpath} with the same token.",
                object(
                    json!({
                        "relpath": path_schema("Relative to the working folder."),
                        "session_id": session_schema(settings),
                    }),
                    &["relpath", "session_id"],
                ),
                ToolEffect::ReadsOnly,
            ),
        };
        Description {
            title: "Copy a file out of a session",
            text: text.to_owned(),
            input,
            output: transfer_schema(),
            effect,
            reach: Reach::Nothing,
        }
    }

    fn parse(arguments: &mut Arguments<'_>) -> Result<DownloadCall, BadArgument> {
        Ok(DownloadCall {
            session: arguments.session(),
            relpath: arguments.take("relpath").inside_path()?,
            target: match arguments.defaults.front {
                Front::Stdio => Target::Local {
                    path: arguments.take("local_path").text(MAX_PATH_LENGTH, 1)?,
                    overwrite: match arguments.take("overwrite").flag()? {
                        true => Overwrite::Allowed,
                        false => Overwrite::Refused,
                    },
                },
                Front::Http => Target::Inline,
            },
        })
    }

    async fn run(call: DownloadCall, tool_context: ToolContext<'_>) -> CallToolResponse {
        let DownloadCall {
            session,
            relpath,
            target,
        } = call;
        let ToolContext {
            server,
            owner,
            context,
        } = tool_context;
        let result = match target {
            Target::Local { path, overwrite } => {
                let work = server.download(owner, &session, &relpath, path.clone(), overwrite);
                let done = or_cancelled(context, work).await;
                answer(done, |bytes| {
                    downloaded(&session, relpath.as_str(), &path, bytes)
                })
            }
            Target::Inline => {
                let mut bytes = Vec::new();
                let op = ops::ReadFile {
                    session: session.clone(),
                    path: relpath.clone(),
                    limit: MAX_INLINE_BYTES,
                };
                let read = server
                    .shared
                    .sessions
                    .run_with(owner, op, Io::sink(&mut bytes));
                let done = or_cancelled(context, read).await;
                answer(done, |_| inline_file(&session, &relpath, &bytes))
            }
        };
        result.into()
    }
}

/// A copy between host and sandbox that failed outside the session.
#[derive(Debug, thiserror::Error)]
#[error("the file could not be written completely, and what was written has been removed")]
struct WriteFailed(#[source] std::io::Error);

impl Server {
    /// Copies to the host. Whatever goes wrong on the way, dropping the destination removes what
    /// was written.
    pub(in crate::mcp) async fn download(
        &self,
        owner: &Principal,
        session: &SessionId,
        relpath: &InsidePath,
        local_path: String,
        overwrite: Overwrite,
    ) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let Shared {
            sessions, files, ..
        } = &*self.shared;
        let mut destination =
            on_a_thread(files, move |files| files.create(&local_path, overwrite)).await?;
        let mut sink = tokio::fs::File::from_std(destination.take_file());
        let bytes = sessions
            .run_with(
                owner,
                ops::ReadFile {
                    session: session.clone(),
                    path: relpath.clone(),
                    limit: files.largest(),
                },
                Io::sink(&mut sink),
            )
            .await?;
        // The file's writes happen on another thread; only the flush tells whether they all
        // succeeded.
        sink.flush().await.map_err(WriteFailed)?;
        drop(sink);
        on_a_thread(files, move |_| destination.keep()).await?;
        Ok(bytes)
    }
}

/// Renders a finished copy. The host's path is the caller's own words and is not repeated in the
/// structured part.
fn downloaded(session: &SessionId, relpath: &str, local_path: &str, bytes: u64) -> CallToolResult {
    let text = format!(
        "Copied {bytes} bytes from \"{relpath}\" of session \"{session}\" to \"{local_path}\"."
    );
    let structured = transfer_fields(session, relpath, bytes);
    finished(vec![ContentBlock::text(text)], structured, false)
}

/// Renders a file as content: pictures as such, text as text, the rest as bytes.
fn inline_file(session: &SessionId, relpath: &InsidePath, bytes: &[u8]) -> CallToolResult {
    let uri = resources::file_uri(session, relpath);
    let content = match (image::guess_format(bytes), std::str::from_utf8(bytes)) {
        (Ok(image::ImageFormat::Png), _) => {
            ContentBlock::image(STANDARD.encode(bytes), "image/png")
        }
        (Ok(image::ImageFormat::Jpeg), _) => {
            ContentBlock::image(STANDARD.encode(bytes), "image/jpeg")
        }
        (_, Ok(text)) => ContentBlock::embedded_text(uri, text),
        (_, Err(_)) => ContentBlock::resource(ResourceContents::blob(STANDARD.encode(bytes), uri)),
    };
    let structured = transfer_fields(session, relpath.as_str(), bytes.len() as u64);
    finished(vec![content], structured, false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::tools::tests::{check_accepted, check_refused, parts};

    #[test]
    fn arguments_of_the_wrong_type_are_refused() {
        check_accepted::<DownloadTool>(
            json!({"relpath": "a", "local_path": "b", "overwrite": true}),
        );
        check_refused::<DownloadTool>(
            json!({"relpath": "a", "local_path": "b", "overwrite": "yes"}),
            &["\"overwrite\"", "true or false"],
        );
    }

    #[test]
    fn a_download_says_how_much_went_where() {
        let session = "s".parse().unwrap();
        let (text, structured) = parts::<DownloadTool>(downloaded(&session, "a", "b", 5));
        assert_eq!(text, "Copied 5 bytes from \"a\" of session \"s\" to \"b\".");
        assert_eq!(structured["relpath"], "a");
    }
}
