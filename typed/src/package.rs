//! The text of the two index files: `mcptools/<server>/__init__.py` and `mcptools/__init__.py`.

use crate::layout::{Code, WIDTH};
use crate::literal;
use crate::module::import;
use crate::name::INDEX_NAMES;

/// Minimum width for the summary of a tool on a line.
const MIN_SUMMARY: usize = 40;

/// The entry of one module in an index.
pub(crate) struct IndexEntry<'a> {
    pub(crate) name: &'a str,
    pub(crate) description: &'a str,
}

/// Returns the index of one server.
pub(crate) fn server(server: &str, package: &str, tools: &[IndexEntry<'_>]) -> String {
    let example = tools.first().map_or("tool", |tool| tool.name);
    let page = format!(
        "The tools of the MCP server `{server}`, each in a module of its own.\n\n    \
         from mcptools.{package}.{example} import Params, run\n    \
         from mcptools.{package} import {example}\n\n{}",
        listed(tools)
    );
    format!("{}\n{}", page_text(&page), lazy(tools))
}

/// Returns the index of all servers. Each entry has the name of its package.
pub(crate) fn index(servers: &[IndexEntry<'_>]) -> String {
    let page = format!(
        "MCP servers as Python packages; `help(mcptools.<server>)` lists the tools of one.\n\n\
         A tool that reports an error raises `ToolError`, a call that could not be made \
         `ToolCallError`.\n\
         `call(server, tool, arguments)` returns everything that a tool returned, typed or \
         not.\n\n{}",
        listed(servers)
    );
    let names: Vec<Code> = INDEX_NAMES.iter().map(|name| Code::text(*name)).collect();
    let names = import("cellblock_runner.mcptools", names);
    let exports = INDEX_NAMES
        .iter()
        .copied()
        .chain(servers.iter().map(|server| server.name));
    format!(
        "{}\n{}",
        page_text(&page),
        lazy_with(&names, exports.collect(), servers)
    )
}

/// Lists have one line per description, so the page as a whole is not wrapped.
fn page_text(page: &str) -> String {
    literal::docstring(page.trim_end(), 0, WIDTH)
}

fn listed(entries: &[IndexEntry<'_>]) -> String {
    let longest = entries
        .iter()
        .map(|entry| entry.name.len())
        .max()
        .unwrap_or(0)
        .min(40);
    // Two spaces separate the columns; docstrings need room for quotation marks.
    let room = WIDTH.saturating_sub(longest + 2 + 3).max(MIN_SUMMARY);
    let line = |entry: &IndexEntry<'_>| {
        let summary = literal::summary(entry.description, room);
        format!("{:longest$}  {summary}", entry.name)
            .trim_end()
            .to_owned()
    };
    entries.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn lazy(entries: &[IndexEntry<'_>]) -> String {
    lazy_with(
        "",
        entries.iter().map(|entry| entry.name).collect(),
        entries,
    )
}

/// Returns source that makes modules lazily imported attributes, visible to type checkers.
fn lazy_with(imports: &str, mut exports: Vec<&str>, entries: &[IndexEntry<'_>]) -> String {
    exports.sort_unstable();
    let exports = exports
        .iter()
        .map(|name| Code::text(literal::string(name)))
        .collect();
    let exports = Code::list("[", exports, "]").broken(0, "__all__ = ", "");
    let mut modules: Vec<&str> = entries.iter().map(|entry| entry.name).collect();
    modules.sort_unstable();
    let checked = match modules.as_slice() {
        [] => String::new(),
        modules => {
            let names = modules
                .iter()
                .map(|name| format!("    from . import {name} as {name}\n"))
                .collect::<String>();
            format!("if TYPE_CHECKING:\n{names}\n")
        }
    };
    let typing = if checked.is_empty() {
        ""
    } else {
        "from typing import TYPE_CHECKING\n\n"
    };
    let listed = modules
        .iter()
        .map(|name| Code::text(literal::string(name)))
        .collect();
    let lazy = Code::call(
        "_modules_when_used",
        vec![Code::text("__name__"), Code::list("[", listed, "]")],
    );
    let lazy = lazy.broken(0, "__getattr__, __dir__ = ", "");
    format!(
        "{typing}{imports}from cellblock_runner.mcptools import modules_when_used as \
         _modules_when_used\n\n{checked}{exports}\n\n{lazy}\n"
    )
}
