//! Checks the claims of a token whose signature is valid. Pure.
//!
//! Every claim that affects the decision must be present and of its own type. A claim of another
//! type is rejected, never treated as absent: a parser that skips unknown forms accepts the
//! strangest tokens.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};

use super::caller::{Caller, Scope, Scopes};
use super::token::Fault;

/// How far ahead of ours an issuer's clock may be.
const EARLY: Duration = Duration::from_secs(60);

/// How long a token is accepted after its expiry. Clocks differ by moments; more would only extend
/// the life of a stolen token.
const LATE: Duration = Duration::from_secs(5);

/// The end of the year 9999. A later time is a mistake, such as milliseconds instead of seconds,
/// and would make a token that never expires.
const LAST_SECOND: f64 = 253_402_300_799.0;

/// Names of people are shorter; they are stored with every session.
const MAX_SUBJECT_LENGTH: usize = 256;

/// The required claims.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected<'a> {
    pub issuer: &'a str,
    /// Our own names; `aud` must contain at least one of them.
    pub audiences: &'a [String],
    /// The claim that identifies the caller, if the operator chose one.
    pub principal: Option<&'a str>,
}

/// Returns the caller, or why the claims are rejected.
pub(super) fn judge(
    claims: &Map<String, Value>,
    expected: Expected<'_>,
    now: SystemTime,
) -> Result<Caller, Fault> {
    if claims.get("iss").and_then(Value::as_str) != Some(expected.issuer) {
        return Err(Fault::Issuer);
    }
    judge_audience(claims.get("aud"), expected.audiences)?;
    let expires = judge_times(claims, now)?;
    Ok(Caller {
        principal: principal(claims, expected)?,
        scopes: scopes(claims)?,
        expires: Some(expires),
    })
}

fn judge_audience(claim: Option<&Value>, ours: &[String]) -> Result<(), Fault> {
    let is_ours = match claim {
        Some(Value::String(name)) => ours.contains(name),
        Some(Value::Array(names)) => {
            if !names.iter().all(Value::is_string) {
                return Err(Fault::Audience);
            }
            names
                .iter()
                .filter_map(Value::as_str)
                .any(|name| ours.iter().any(|our| our == name))
        }
        _ => false,
    };
    if is_ours {
        Ok(())
    } else {
        Err(Fault::Audience)
    }
}

/// Returns when the token expires.
fn judge_times(claims: &Map<String, Value>, now: SystemTime) -> Result<SystemTime, Fault> {
    let expires = time(claims, "exp")?.ok_or(Fault::Time)? + LATE;
    if now >= expires {
        return Err(Fault::Expired);
    }
    for name in ["nbf", "iat"] {
        if time(claims, name)?.is_some_and(|begin| begin > now + EARLY) {
            return Err(Fault::Early);
        }
    }
    Ok(expires)
}

fn time(claims: &Map<String, Value>, name: &str) -> Result<Option<SystemTime>, Fault> {
    let Some(claim) = claims.get(name) else {
        return Ok(None);
    };
    match claim.as_f64() {
        Some(seconds) if (0.0..=LAST_SECOND).contains(&seconds) => {
            Ok(Some(UNIX_EPOCH + Duration::from_secs_f64(seconds)))
        }
        _ => Err(Fault::Time),
    }
}

/// Identifies the caller permanently and uniquely: the issuer, which contains no space, then the
/// claim, then its value. Two issuers may each have an "alice", and so may the people and the
/// programs of one issuer.
fn principal(claims: &Map<String, Value>, expected: Expected<'_>) -> Result<String, Fault> {
    let claim = match expected.principal {
        Some(chosen) => chosen,
        // People who use the same program share its `client_id`, so it identifies the caller only
        // where there is no person.
        None if claims.contains_key("sub") => "sub",
        None => "client_id",
    };
    match claims.get(claim) {
        Some(Value::String(value)) if is_subject(value) => {
            Ok(format!("{} {claim}:{value}", expected.issuer))
        }
        _ => Err(Fault::Subject),
    }
}

fn is_subject(value: &str) -> bool {
    !value.trim().is_empty()
        && value.len() <= MAX_SUBJECT_LENGTH
        && !value.contains(char::is_control)
}

/// Returns our scopes; others are meant for other resources and are ignored.
fn scopes(claims: &Map<String, Value>) -> Result<Scopes, Fault> {
    let Some(claim) = claims.get("scope").or_else(|| claims.get("scp")) else {
        return Ok(Scopes::default());
    };
    match claim {
        Value::String(text) => Ok(text.split(' ').filter_map(Scope::from_name).collect()),
        Value::Array(names) if names.iter().all(Value::is_string) => Ok(names
            .iter()
            .filter_map(Value::as_str)
            .filter_map(Scope::from_name)
            .collect()),
        _ => Err(Fault::Scope),
    }
}
