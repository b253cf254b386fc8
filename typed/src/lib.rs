//! Generates a typed Python package from the schemas of MCP tools.
//!
//!     generate(server, tools)  →  mcptools/<server>/__init__.py     index of the tools
//!                                 mcptools/<server>/<tool>.py       Params, Result, run, run_async
//!     index(packages)          →  mcptools/__init__.py
//!
//!     name      names of a server → identifiers
//!     schema    JSON Schema → shapes
//!     classes   shapes → classes and their names
//!     literal   text and values → literals, in which they are only ever data
//!     unseen    invisible characters
//!     layout    line breaks in expressions
//!     module, package   the text of the files
//!
//! All data from a server is untrusted. Names become identifiers of plain ASCII, everything else
//! becomes literals, references never leave the document, and depth and size have limits. The same
//! input gives the same text. This crate does not read or write files.
//!
//! The runtime support of the modules is `runner/cellblock_runner/mcptools.py`.

#![forbid(unsafe_code)]

mod classes;
mod layout;
mod literal;
mod module;
mod name;
mod package;
mod schema;
mod shape;
mod unseen;

use std::collections::HashSet;
use std::fmt;

use serde_json::Value;

pub use name::{ServerName, ServerNameError};
pub use schema::SchemaError;
pub use unseen::is_unseen;

use classes::{ModulePlan, ResultKind};
use module::ModuleSubject;
use package::IndexEntry;
use shape::{OtherMembers, Schema, Shape};

/// Limit of tools per server. The largest known servers have some hundreds.
const MAX_TOOLS: usize = 1000;
/// Size limit of all schemas and descriptions of one server together.
const MAX_LIST_BYTES: usize = 16 * 1024 * 1024;
/// Length limit of a tool name. The protocol asks for 128.
const MAX_TOOL_NAME_LENGTH: usize = 256;
/// The member in which servers wrap a result that is not an object.
const WRAPPER: &str = "result";

/// A tool as a server describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolSchema {
    pub name: String,
    pub title: Option<String>,
    pub description: Option<String>,
    pub input: Value,
    pub output: Option<Value>,
}

/// The generated files of one server, and the outcome for its tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    pub server: ServerName,
    /// The first is the index of the server; the others are one per tool, in the order of `tools`.
    pub files: Vec<GeneratedFile>,
    /// Sorted by Python name.
    pub tools: Vec<GeneratedTool>,
    /// Differences from the server's description, with reasons.
    pub notes: Vec<Note>,
}

impl Package {
    /// Returns the package reduced to the tools for whose original names `is_known` returns true,
    /// or `None` if there are none.
    pub fn only(&self, is_known: impl Fn(&str) -> bool) -> Option<Package> {
        let (index, modules) = self.files.split_first()?;
        let kept = self
            .tools
            .iter()
            .zip(modules)
            .filter(|(tool, _)| is_known(&tool.original));
        let (tools, modules): (Vec<GeneratedTool>, Vec<GeneratedFile>) = kept
            .map(|(tool, file)| (tool.clone(), file.clone()))
            .unzip();
        if tools.is_empty() {
            return None;
        }
        let index = GeneratedFile {
            path: index.path.clone(),
            text: server_index(&self.server, &tools),
        };
        let files = std::iter::once(index).chain(modules).collect();
        let named = |note: &&Note| {
            let (Note::LeftOut { tool, .. } | Note::Untyped { tool, .. }) = note;
            is_known(tool)
        };
        let notes = self.notes.iter().filter(named).cloned().collect();
        Some(Package {
            server: self.server.clone(),
            files,
            tools,
            notes,
        })
    }
}

/// A file to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GeneratedFile {
    /// Relative, with `/`. Consists of `mcptools`, the server's Python name and the tool's.
    pub path: String,
    pub text: String,
}

/// A tool that has a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GeneratedTool {
    /// The server's name for the tool.
    pub original: String,
    /// The name of the module.
    pub python: String,
    /// The first sentence of the description.
    pub summary: String,
}

/// A difference between a server's description and the generated package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// The tool has no module.
    LeftOut { tool: String, why: LeftOut },
    /// The tool has a module without `Result`.
    Untyped { tool: String, why: SchemaError },
}

/// Reason why a tool has no module.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LeftOut {
    #[error("its name has {length} characters, and may have {MAX_TOOL_NAME_LENGTH}")]
    LongName { length: usize },
    #[error("the server has two tools of this name")]
    Repeated,
    #[error("its input schema cannot be read: {0}")]
    Schema(#[source] SchemaError),
}

impl fmt::Display for Note {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Note::LeftOut { tool, why } => {
                write!(formatter, "the tool {tool:?} is left out: {why}")
            }
            Note::Untyped { tool, why } => {
                write!(
                    formatter,
                    "the results of the tool {tool:?} have no type, because its output schema \
                     cannot be read: {why}"
                )
            }
        }
    }
}

/// Reason why no package can be generated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GenerateError {
    #[error("the server has {count} tools, and may have {MAX_TOOLS}")]
    TooManyTools { count: usize },
    #[error(
        "the tools of the server are described in {bytes} bytes, and may be in {MAX_LIST_BYTES}"
    )]
    TooLarge { bytes: usize },
}

/// Generates the package of one server. A tool that cannot be generated is left out and noted. It
/// does not affect the others.
pub fn generate(server: &ServerName, tools: &[ToolSchema]) -> Result<Package, GenerateError> {
    if tools.len() > MAX_TOOLS {
        return Err(GenerateError::TooManyTools { count: tools.len() });
    }
    let bytes = tools.iter().map(size).sum();
    if bytes > MAX_LIST_BYTES {
        return Err(GenerateError::TooLarge { bytes });
    }
    let mut notes = Vec::new();
    let named = usable(tools, &mut notes);
    let names: Vec<&str> = named.iter().map(|tool| tool.name.as_str()).collect();
    let modules = name::modules(&names);
    let mut made: Vec<(GeneratedTool, GeneratedFile)> = Vec::new();
    for tool in named {
        let python = &modules[tool.name.as_str()];
        match tool_module(server, tool, python, &mut notes) {
            Ok(text) => {
                let path = format!("mcptools/{}/{python}.py", server.python());
                let summary = literal::summary(description(tool), 200);
                let tool = GeneratedTool {
                    original: tool.name.clone(),
                    python: python.clone(),
                    summary,
                };
                made.push((tool, GeneratedFile { path, text }));
            }
            Err(cause) => notes.push(Note::LeftOut {
                tool: tool.name.clone(),
                why: LeftOut::Schema(cause),
            }),
        }
    }
    made.sort_by(|(first, _), (second, _)| first.python.cmp(&second.python));
    let (tools, mut files): (Vec<GeneratedTool>, Vec<GeneratedFile>) = made.into_iter().unzip();
    let text = server_index(server, &tools);
    files.insert(
        0,
        GeneratedFile {
            path: format!("mcptools/{}/__init__.py", server.python()),
            text,
        },
    );
    Ok(Package {
        server: server.clone(),
        files,
        tools,
        notes,
    })
}

fn server_index(server: &ServerName, tools: &[GeneratedTool]) -> String {
    let entries: Vec<IndexEntry<'_>> = tools
        .iter()
        .map(|tool| IndexEntry {
            name: &tool.python,
            description: &tool.summary,
        })
        .collect();
    package::server(server.as_str(), server.python(), &entries)
}

/// Generates the index of all servers, `mcptools/__init__.py`.
pub fn index(packages: &[&Package]) -> GeneratedFile {
    let described = packages.iter().map(|package| {
        let names: Vec<&str> = package
            .tools
            .iter()
            .map(|tool| tool.python.as_str())
            .collect();
        let count = if names.len() == 1 {
            "1 tool".to_owned()
        } else {
            format!("{} tools", names.len())
        };
        (
            package.server.python(),
            format!("{count}: {}", names.join(", ")),
        )
    });
    let mut described: Vec<(&str, String)> = described.collect();
    described.sort();
    let entries: Vec<IndexEntry<'_>> = described
        .iter()
        .map(|(name, description)| IndexEntry { name, description })
        .collect();
    GeneratedFile {
        path: "mcptools/__init__.py".to_owned(),
        text: package::index(&entries),
    }
}

fn size(tool: &ToolSchema) -> usize {
    let schemas = std::iter::once(&tool.input)
        .chain(&tool.output)
        .map(|schema| schema.to_string().len());
    tool.name.len() + description(tool).len() + schemas.sum::<usize>()
}

/// Returns the tools whose names allow a module.
fn usable<'a>(tools: &'a [ToolSchema], notes: &mut Vec<Note>) -> Vec<&'a ToolSchema> {
    let mut seen = HashSet::new();
    let mut usable = Vec::new();
    for tool in tools {
        let length = tool.name.chars().count();
        let why = match () {
            () if length > MAX_TOOL_NAME_LENGTH => LeftOut::LongName { length },
            () if !seen.insert(tool.name.as_str()) => LeftOut::Repeated,
            () => {
                usable.push(tool);
                continue;
            }
        };
        notes.push(Note::LeftOut {
            tool: tool.name.clone(),
            why,
        });
    }
    usable
}

fn description(tool: &ToolSchema) -> &str {
    tool.description
        .as_deref()
        .or(tool.title.as_deref())
        .unwrap_or_default()
}

fn tool_module(
    server: &ServerName,
    tool: &ToolSchema,
    module: &str,
    notes: &mut Vec<Note>,
) -> Result<String, SchemaError> {
    let mut plan = ModulePlan::new();
    let input = schema::read(&tool.input, "Params")?;
    plan.add_params(
        &input,
        others_at_the_top(&tool.input),
        format!("Arguments of `{}`.", tool.name),
    );
    let output = tool
        .output
        .as_ref()
        .map(|output| schema::read(output, "Result"));
    let output = match output.transpose() {
        Ok(output) => output,
        Err(why) => {
            notes.push(Note::Untyped {
                tool: tool.name.clone(),
                why,
            });
            None
        }
    };
    let is_wrapped = output.as_ref().is_some_and(is_wrapped);
    let result: Option<ResultKind> = output.map(|schema| {
        plan.add_result(
            &schema,
            is_wrapped.then_some(WRAPPER),
            format!("What `{}` returns.", tool.name),
        )
    });
    let subject = ModuleSubject {
        server: server.as_str(),
        package: server.python(),
        tool: &tool.name,
        module,
        description: description(tool),
        result,
        is_wrapped,
    };
    Ok(module::text(&subject, &plan))
}

/// Returns whether a tool without declared arguments accepts others: only if its schema says so.
fn others_at_the_top(schema: &Value) -> OtherMembers {
    let speaks = ["additionalProperties", "patternProperties"]
        .iter()
        .any(|key| schema.get(key).is_some());
    if speaks {
        OtherMembers::Allowed
    } else {
        OtherMembers::Unsaid
    }
}

/// Returns whether an output schema wraps the actual result in an object, as Python servers do for
/// results that are not objects.
fn is_wrapped(schema: &Schema) -> bool {
    match schema.meant(schema.root()) {
        Shape::Record(record) => {
            matches!(
                record.members.as_slice(),
                [member] if member.name == WRAPPER && member.is_required
            )
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_package_of_some_tools_is_the_one_that_a_server_with_only_these_would_have() {
        let tool = |name: &str| ToolSchema {
            name: name.to_owned(),
            title: None,
            description: Some(format!("Does {name}.")),
            input: json!({"type": "object"}),
            output: None,
        };
        let server = ServerName::new("notes").unwrap();
        let all = generate(&server, &[tool("read-note"), tool("write"), tool("list")]).unwrap();
        let some = all.only(|name| name != "write").unwrap();
        assert_eq!(
            some,
            generate(&server, &[tool("read-note"), tool("list")]).unwrap()
        );
        assert_eq!(all.only(|_| true), Some(all.clone()));
        assert_eq!(all.only(|_| false), None);
    }
}
