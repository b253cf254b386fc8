//! stdio
