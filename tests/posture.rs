//! posture
