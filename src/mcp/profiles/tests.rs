//! Profiles
