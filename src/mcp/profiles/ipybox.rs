//! `ipybox`: both generations in one table.
//!
//! One session, called `default`. A cell's text is everything it printed and showed, trimmed, cut
//! after `max_output_chars`; pictures are image blocks, and files below the working folder that the
//! text lists. Failures begin with "Error executing tool", as they did, and now end with what was
//! printed before.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock, ErrorData, JsonObject, Tool};
use serde_json::{Value, json};

use super::super::arguments::{
    MAX_CODE_BYTES, MAX_OUTPUT_CHARS, MAX_PATH_LENGTH, MAX_SERVER_NAME_LENGTH,
};
use super::super::calls::or_cancelled;
use super::super::host_files::{HostFileError, Overwrite};
use super::super::toolbox::{Entry, Introduction, ToolContext, Toolbox};
use super::super::tools::UploadSource;
use super::super::turns::Extent;
use super::super::{Front, McpSettings, refusals, render};
use super::{Written, failed, said, schema, telling, unknown_tool};
use crate::auth::Scope;
use crate::ops::{self, HostExt, Io};
use crate::runner_client::FileFailure;
use crate::session::servers::ServerRequest;
use crate::session::{InsidePath, Outcome, Refused, SessionId, Status};

const WAY_BACK: &str = "Call `reset` to start Python anew.";

const EXECUTE: Entry = Entry {
    name: "execute_ipython_cell",
    scope: Scope::Execute,
    extent: Extent::FirstStep,
};
const INSTALL: Entry = Entry {
    name: "install_package",
    scope: Scope::Install,
    extent: Extent::FirstStep,
};
const REGISTER: Entry = Entry {
    name: "register_mcp_server",
    scope: Scope::Register,
    extent: Extent::Whole,
};
const RESET: Entry = Entry {
    name: "reset",
    scope: Scope::Execute,
    extent: Extent::FirstStepSoon,
};
const UPLOAD: Entry = Entry {
    name: "upload_file",
    scope: Scope::Execute,
    extent: Extent::Whole,
};
const DOWNLOAD: Entry = Entry {
    name: "download_file",
    scope: Scope::Read,
    extent: Extent::Whole,
};

pub(super) struct Ipybox {
    tools: Vec<Tool>,
    default_timeout: Duration,
    max_timeout: Duration,
    default_max_output_chars: usize,
    images: InsidePath,
    workspace: Option<PathBuf>,
}

impl Ipybox {
    pub(super) fn new(
        settings: &McpSettings,
        images: InsidePath,
        workspace: Option<PathBuf>,
    ) -> Ipybox {
        Ipybox {
            tools: tools(settings),
            default_timeout: settings.default_timeout,
            max_timeout: settings.max_timeout,
            default_max_output_chars: settings.default_max_output_chars,
            images,
            workspace,
        }
    }

    async fn carry_out(
        &self,
        tool_context: ToolContext<'_>,
        tool: Entry,
        arguments: JsonObject,
    ) -> Result<CallToolResult, Failure> {
        let _slot = tool_context
            .server
            .call_slot(tool_context.owner)
            .map_err(|busy| Failure(busy.to_string()))?;
        let mut written = Written::new(tool.name, &self.tools, arguments).map_err(Failure::of)?;
        match tool.name {
            "execute_ipython_cell" => self.execute(tool_context, written).await,
            "install_package" => {
                let name = written
                    .take("package_name")
                    .text(MAX_PATH_LENGTH, 1)
                    .map_err(Failure::of)?;
                let session = SessionId::default_session();
                let report = tool_context
                    .server
                    .install_to_end(
                        tool_context.owner,
                        &session,
                        vec![name],
                        tool_context.context,
                    )
                    .await?;
                Ok(said(report.text.trim_end()))
            }
            "reset" => {
                let session = SessionId::default_session();
                let reset = tool_context.server.shared.sessions.run(
                    tool_context.owner,
                    ops::Reset {
                        session: session.clone(),
                    },
                );
                match or_cancelled(tool_context.context, reset).await {
                    Ok(_) => Ok(CallToolResult::success(Vec::new())),
                    // Nothing has run yet, so everything is as a reset would leave it.
                    Err(error) if matches!(error.downcast_ref(), Some(Refused::Unknown { .. })) => {
                        Ok(CallToolResult::success(Vec::new()))
                    }
                    Err(error) => Err(Failure(refusals::with_causes(&*error))),
                }
            }
            "register_mcp_server" => register(tool_context, written).await,
            "upload_file" => transfer(tool_context, written, Direction::Upload).await,
            _ => transfer(tool_context, written, Direction::Download).await,
        }
    }

    async fn execute(
        &self,
        tool_context: ToolContext<'_>,
        mut written: Written,
    ) -> Result<CallToolResult, Failure> {
        let code = written
            .take("code")
            .text(MAX_CODE_BYTES, 0)
            .map_err(Failure::of)?;
        let timeout = written.take_leniently("timeout");
        let timeout = timeout
            .timeout(self.default_timeout, self.max_timeout)
            .map_err(Failure::of)?;
        let most = written.take_leniently("max_output_chars");
        let most = most
            .count(1..=MAX_OUTPUT_CHARS, self.default_max_output_chars as u64)
            .map_err(Failure::of)? as usize;
        let session = SessionId::default_session();
        // A page that is cut keeps three fifths of its characters at its head, so that twice as
        // many hold all that is shown.
        let outcome = tool_context.run(&session, code, timeout, 2 * most).await?;
        if let Some(failure) = failure(&outcome, most) {
            return Err(failure);
        }
        let mut text = cut(telling::printed(&outcome).trim(), most);
        let links = self.keep_images(tool_context, &session, &outcome).await;
        if !links.is_empty() {
            let gap = if text.is_empty() { "" } else { "\n\n" };
            text.push_str(&format!("{gap}Generated images:\n\n{}", links.join("\n")));
        }
        let mut result = said(text);
        result
            .content
            .extend(telling::images(&outcome).map(telling::image_block));
        Ok(result)
    }

    /// Puts the pictures of a cell into the session's folder, and returns the lines that say where.
    async fn keep_images(
        &self,
        tool_context: ToolContext<'_>,
        session: &SessionId,
        outcome: &Outcome,
    ) -> Vec<String> {
        let mut lines = Vec::new();
        for image in telling::images(outcome) {
            let name = random_name();
            let ending = image.kind.extension();
            let path: Result<InsidePath, _> = format!("{}/{name}.{ending}", self.images).parse();
            let path = path.expect("a folder and a short name are a path");
            let sessions = &tool_context.server.shared.sessions;
            let kept = sessions
                .run_with(
                    tool_context.owner,
                    ops::WriteFile {
                        session: session.clone(),
                        path: path.clone(),
                        overwrite: true,
                    },
                    Io::source(image.bytes.as_slice()),
                )
                .await;
            lines.push(match (kept, &self.workspace) {
                (Ok(_), Some(workspace)) => {
                    format!("- [{name}]({})", workspace.join(path.as_str()).display())
                }
                (Ok(_), None) => format!("- [{name}]({path})"),
                (Err(refused), _) => format!(
                    "- {name} was not saved: {}",
                    telling::refusal(&refused, WAY_BACK)
                ),
            });
        }
        lines
    }
}

#[async_trait]
impl Toolbox for Ipybox {
    fn tools(&self) -> &[Tool] {
        &self.tools
    }

    fn find(&self, name: &str) -> Option<Entry> {
        let listed = self.tools.iter().any(|tool| tool.name == name);
        [REGISTER, INSTALL, EXECUTE, RESET, UPLOAD, DOWNLOAD]
            .into_iter()
            .find(|entry| listed && entry.name == name)
    }

    async fn call(
        &self,
        tool_context: ToolContext<'_>,
        tool: Entry,
        arguments: JsonObject,
    ) -> CallToolResponse {
        let done = self.carry_out(tool_context, tool, arguments).await;
        done.unwrap_or_else(|Failure(why)| {
            failed(format!("Error executing tool {}: {why}", tool.name))
        })
        .into()
    }

    fn unknown(&self, name: &str) -> Result<CallToolResponse, ErrorData> {
        Ok(unknown_tool(name))
    }

    fn introduction(&self) -> Option<Introduction> {
        Some(Introduction {
            name: "ipybox",
            instructions: None,
        })
    }
}

/// Why a call failed, without the words before it.
struct Failure(String);

impl Failure {
    fn of(error: impl Error + 'static) -> Failure {
        Failure(refusals::with_causes(&error))
    }
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Failure {
        Failure(telling::refusal(&refused, WAY_BACK))
    }
}

/// Says why a cell failed, if it did: what it raised or how it was stopped, then what was printed
/// before.
fn failure(outcome: &Outcome, most: usize) -> Option<Failure> {
    let why = match &outcome.status {
        Status::Raised(error) => {
            let traceback = error.traceback.trim_end();
            cut(&format!("{}\n{traceback}", render::summary(error)), most)
        }
        Status::TimedOut { limit, state } => {
            let after = telling::kept_or_lost(*state, WAY_BACK);
            format!(
                "Code execution exceeded timeout of {:.2}s. {after}",
                limit.as_secs_f64()
            )
        }
        other => telling::ending(other, WAY_BACK)?,
    };
    Some(Failure(
        why + &telling::before_the_error(outcome, |printed| cut(printed, most)),
    ))
}

/// Cuts a text that is longer than a caller wants, and says so.
fn cut(text: &str, most: usize) -> String {
    match telling::head(text, most) {
        (all, true) => all.to_owned(),
        (head, false) => format!("{head}\n\n[Output truncated: exceeded {most} character limit]"),
    }
}

/// Eight hexadecimal digits, as pictures were always called.
fn random_name() -> String {
    let mut bytes = [0; 4];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .expect("the kernel has random bytes");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Registers another MCP server and names its tools, as modules below `mcptools`, one block each.
async fn register(
    tool_context: ToolContext<'_>,
    mut written: Written,
) -> Result<CallToolResult, Failure> {
    let name = written
        .take("server_name")
        .text(MAX_SERVER_NAME_LENGTH, 1)
        .map_err(Failure::of)?;
    let params = match written.take_leniently("server_params").value {
        Some(params @ Value::Object(_)) => params,
        _ => {
            return Err(Failure(
                "server_params must be an object with a \"command\" or a \"url\"".to_owned(),
            ));
        }
    };
    let given = name.clone();
    let request = ServerRequest {
        name,
        params,
        trust: tool_context.server.shared.front.trust(),
    };
    let registered = tool_context
        .server
        .shared
        .sessions
        .run(tool_context.owner, ops::RegisterServer { server: request });
    let report = or_cancelled(tool_context.context, registered)
        .await
        .map_err(|error| match error.downcast::<Refused>() {
            Ok(refused) => Failure::from(*refused),
            Err(error) => Failure(refusals::with_causes(&*error)),
        })?;
    let mut told: Vec<ContentBlock> = report
        .tools
        .iter()
        .map(|tool| ContentBlock::text(tool.module.as_str()))
        .collect();
    // Otherwise the package is called what the server is called, and one block for each tool is all
    // that was ever said.
    if report.package != given {
        told.push(ContentBlock::text(format!(
            "(\"{given}\" is no name of a Python package: import from mcptools.{}.)",
            report.package
        )));
    }
    Ok(CallToolResult::success(told))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Upload,
    Download,
}

async fn transfer(
    tool_context: ToolContext<'_>,
    mut written: Written,
    direction: Direction,
) -> Result<CallToolResult, Failure> {
    let relpath = written
        .take("relpath")
        .text(MAX_PATH_LENGTH, 1)
        .map_err(Failure::of)?;
    let local_path = written
        .take("local_path")
        .text(MAX_PATH_LENGTH, 1)
        .map_err(Failure::of)?;
    let inside: InsidePath =
        tidied(&relpath)
            .parse()
            .map_err(|cause: crate::session::BadInsidePath| {
                Failure(format!("Invalid path: escapes root directory ({cause})"))
            })?;
    let session = SessionId::default_session();
    let ToolContext {
        server,
        owner,
        context,
    } = tool_context;
    let done = match direction {
        Direction::Upload => {
            let source = UploadSource::Local(local_path.clone());
            or_cancelled(
                context,
                server.upload(owner, &session, &inside, source, true),
            )
            .await
        }
        Direction::Download => {
            let path = local_path.clone();
            or_cancelled(
                context,
                server.download(owner, &session, &inside, path, Overwrite::Allowed),
            )
            .await
        }
    };
    match done {
        Ok(_) => Ok(CallToolResult::success(Vec::<ContentBlock>::new())),
        Err(error) => Err(Failure(trouble(&*error, direction, &local_path, &relpath))),
    }
}

/// Drops what a path may hold without meaning anything: `./a//b` is `a/b`.
fn tidied(relpath: &str) -> String {
    let is_absolute = relpath.starts_with('/');
    let parts: Vec<&str> = relpath
        .split('/')
        .filter(|part| !matches!(*part, "" | "."))
        .collect();
    if is_absolute {
        relpath.to_owned()
    } else {
        parts.join("/")
    }
}

fn trouble(
    error: &(dyn Error + Send + Sync + 'static),
    direction: Direction,
    local_path: &str,
    relpath: &str,
) -> String {
    let verb = if direction == Direction::Upload {
        "upload"
    } else {
        "download"
    };
    let outside = |more: &str| {
        format!("Path '{local_path}' is not within allowed directories for {verb}{more}")
    };
    match error.downcast_ref::<HostFileError>() {
        Some(HostFileError::NoDirectories) => {
            return outside(": this server was given none; name some with --allowed-dir");
        }
        Some(HostFileError::NotAllowed { .. }) => return outside(""),
        Some(HostFileError::Link { .. }) => return outside(": links are not followed"),
        Some(HostFileError::NotFound { .. }) => return format!("File not found: {local_path}"),
        Some(HostFileError::NotAFile { .. }) => return format!("Not a file: {local_path}"),
        _ => {}
    }
    match error.downcast_ref::<Refused>() {
        Some(Refused::File {
            reason: FileFailure::Missing,
            ..
        }) => format!("File not found: {relpath}"),
        Some(Refused::File {
            reason: FileFailure::NotAFile,
            ..
        }) => format!("Not a file: {relpath}"),
        // Nothing has run yet, so the folder is empty.
        Some(Refused::Unknown { .. }) => format!("File not found: {relpath}"),
        Some(refused) => telling::refusal(refused, WAY_BACK),
        None => refusals::with_causes(error),
    }
}

fn tools(settings: &McpSettings) -> Vec<Tool> {
    let execute = Tool::new(
        EXECUTE.name,
        "Runs one IPython cell and returns what it printed, the value of its last expression and \
         its images. Variables, imports and \
         definitions stay for the next cell. Magics, `!commands` and top-level `await` work; never \
         call `asyncio.run()`.",
        schema(
            json!({
                "code": {"type": "string", "description": "The cell."},
                "timeout": {
                    "type": "number", "default": settings.default_timeout.as_secs_f64(),
                    "description": "Seconds until the code is interrupted.",
                },
                "max_output_chars": {
                    "type": "integer", "default": settings.default_max_output_chars,
                    "description": "Characters of output after which it is cut.",
                },
            }),
            &["code"],
        ),
    );
    let install = Tool::new(
        INSTALL.name,
        "Installs a Python package, also when code has no network. It can be imported at once and \
         stays after a reset.",
        schema(
            json!({"package_name": {
                "type": "string", "description": "A requirement such as `polars`, `polars>=1` or \
                     `git+https://…`.",
            }}),
            &["package_name"],
        ),
    );
    let reset = Tool::new(
        RESET.name,
        "Starts Python anew. Variables, imports and definitions are lost; files and installed \
         packages are kept.",
        schema(json!({}), &[]),
    );
    let register = Tool::new(
        REGISTER.name,
        "Connects to another MCP server and makes its tools callable from code: `from \
         mcptools.<server_name> import <tool>`, then \
         `<tool>.run(<tool>.Params(...))`. Returns the names of the tools.",
        schema(
            json!({
                "server_name": {"type": "string", "description": "Name of the package; a Python \
                     identifier."},
                "server_params": {
                    "type": "object", "additionalProperties": true,
                    "description": "`command`, `args`, `env`, or `url`, `headers`; `type` if the \
                                    address does not tell it.",
                },
            }),
            &["server_name", "server_params"],
        ),
    );
    let path = |description: &str| json!({"type": "string", "description": description});
    let upload = Tool::new(
        UPLOAD.name,
        "Copies a file of the user's computer, out of an allowed directory, into the working \
         folder of the code.",
        schema(
            json!({
                "relpath": path("Where to put it, relative to the working folder."),
                "local_path": path("Absolute path of the file to copy."),
            }),
            &["relpath", "local_path"],
        ),
    );
    let download = Tool::new(
        DOWNLOAD.name,
        "Copies a file out of the working folder of the code to the user's computer, into an \
         allowed directory.",
        schema(
            json!({
                "relpath": path("The file to copy, relative to the working folder."),
                "local_path": path("Absolute path of where to put it."),
            }),
            &["relpath", "local_path"],
        ),
    );
    let mut tools = vec![register, install, execute, reset];
    // Whoever calls over a network has no path on this machine.
    if settings.front == Front::Stdio {
        tools.extend([upload, download]);
    }
    tools
}

#[cfg(test)]
mod tests {
    use super::super::examples::{outcome, raised, text};
    use super::*;
    use crate::session::{StateAfter, Stream};

    fn failure_of(status: Status, printed: &str, most: usize) -> String {
        let parts = vec![
            text(Stream::Stdout, printed),
            text(Stream::Traceback, "not this one"),
        ];
        failure(&outcome(status, parts), most).unwrap().0
    }

    #[test]
    fn a_text_is_cut_after_exactly_so_many_characters() {
        assert_eq!(cut("äöü", 3), "äöü");
        assert_eq!(
            cut("äöü", 2),
            "äö\n\n[Output truncated: exceeded 2 character limit]"
        );
    }

    #[test]
    fn a_failure_has_name_message_and_traceback_and_then_what_was_printed() {
        let told = failure_of(Status::Raised(raised()), "before\n", 100);
        let expected = "ValueError: bad\nTraceback\n  line 1\nValueError: bad\n\nOutput before the \
                        error:\nbefore";
        assert_eq!(told, expected);
        assert!(!failure_of(Status::Raised(raised()), "", 100).contains("Output before"));
    }

    #[test]
    fn errors_are_limited_too() {
        let told = failure_of(Status::Raised(raised()), &"x".repeat(50), 10);
        assert_eq!(
            told.matches("[Output truncated: exceeded 10 character limit]")
                .count(),
            2,
            "{told}"
        );
    }

    #[test]
    fn a_time_out_tells_its_value() {
        let status = Status::TimedOut {
            limit: Duration::from_millis(1500),
            state: StateAfter::Kept,
        };
        let told = failure_of(status, "", 100);
        assert!(
            told.starts_with(
                "Code execution exceeded timeout of 1.50s. Variables and files are kept"
            ),
            "{told}"
        );
    }

    #[test]
    fn a_path_may_be_written_carelessly_and_must_stay_inside() {
        assert_eq!(tidied("./a//b/./c"), "a/b/c");
        for outside in ["/etc/passwd", "../a", "a/../../b"] {
            assert!(tidied(outside).parse::<InsidePath>().is_err(), "{outside}");
        }
    }

    #[test]
    fn whoever_calls_over_a_network_has_no_tools_for_local_files() {
        let names = |front| {
            let settings = McpSettings {
                front,
                ..McpSettings::default()
            };
            let toolbox = Ipybox::new(&settings, "images".parse().unwrap(), None);
            let found = toolbox.find("upload_file").is_some();
            (
                toolbox
                    .tools()
                    .iter()
                    .map(|tool| tool.name.to_string())
                    .collect::<Vec<_>>(),
                found,
            )
        };
        let (all, found) = names(Front::Stdio);
        let before = [
            "register_mcp_server",
            "install_package",
            "execute_ipython_cell",
            "reset",
        ];
        assert_eq!(
            (&all[..4], &all[4..]),
            (
                &before.map(str::to_owned)[..],
                &["upload_file", "download_file"].map(str::to_owned)[..]
            )
        );
        assert!(found);
        assert_eq!(names(Front::Http), (all[..4].to_vec(), false));
    }

    #[test]
    fn names_of_pictures_are_eight_digits_and_come_once() {
        let names: std::collections::HashSet<String> = (0..100).map(|_| random_name()).collect();
        assert_eq!(names.len(), 100);
        assert!(
            names.iter().all(
                |name| name.len() == 8 && name.chars().all(|letter| letter.is_ascii_hexdigit())
            )
        );
    }
}
