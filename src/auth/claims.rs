//! What a token claims, once its signature is known to be good: pure.
//!
//! Every claim that decides something must be there and of its own type. A claim of another type is refused, never taken for absent: a
//! reader that skips what it does not understand lets the strangest tokens in.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};

use super::caller::{Caller, Scope, Scopes};
use super::token::Fault;

/// How far ahead of ours an issuer's clock may be.
const EARLY: Duration = Duration::from_secs(60);

/// How long a token is good after its end. Clocks differ by moments; more would only lengthen the life of a stolen token.
const LATE: Duration = Duration::from_secs(5);

/// The end of the year 9999. A later time is a mistake, such as milliseconds instead of seconds, and would make a token that never ends.
const LAST_SECOND: f64 = 253_402_300_799.0;

/// Names of people are shorter; they are kept with every session.
const LONGEST_SUBJECT: usize = 256;

/// What a token must say.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected<'a> {
    pub issuer: &'a str,
    /// Our own names, of which the token must be meant for at least one.
    pub audiences: &'a [String],
    /// The claim that says who is calling, if the operator chose one.
    pub principal: Option<&'a str>,
}

/// Says who is calling, or why the claims are refused.
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

/// Returns when the token stops being good.
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

/// Names the caller for ever, and nobody else: the issuer, which holds no space, then the claim, then its value. Two issuers may each have
/// an "alice", and so may the people and the programs of one issuer.
fn principal(claims: &Map<String, Value>, expected: Expected<'_>) -> Result<String, Fault> {
    let claim = match expected.principal {
        Some(chosen) => chosen,
        // People who use the same program have its `client_id` in common, so it names the caller only where there is no person.
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
    !value.trim().is_empty() && value.len() <= LONGEST_SUBJECT && !value.contains(char::is_control)
}

/// Reads the scopes that are ours; others mean something to somebody else.
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
