//! Other MCP servers, as sessions call them.
