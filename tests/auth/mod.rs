//! Who may call, with an issuer that is not ours and with the built program.

mod key_server;
mod provider;

use crate::support::server::{finished, program_below};

use cellblock::auth::{AuthSettings, Authenticator, Caller, Denied};
use hyper::HeaderMap;
use hyper::header::{AUTHORIZATION, HeaderValue};

fn bearer(token: &str) -> HeaderMap {
    HeaderMap::from_iter([(
        AUTHORIZATION,
        HeaderValue::from_str(&format!("Bearer {token}")).unwrap(),
    )])
}

async fn authenticate(settings: &AuthSettings, token: &str) -> Result<Caller, Denied> {
    Authenticator::from_settings(settings)
        .await
        .unwrap()
        .authenticate(&bearer(token))
        .await
}

#[tokio::test]
async fn what_key_new_prints_lets_its_owner_in() {
    let folder = tempfile::tempdir().unwrap();
    let (status, output, errors) =
        finished(program_below(folder.path()).args(["key", "new", "ci", "--scope", "admin"]));
    assert_eq!(status, Some(0), "{errors}");
    let (words, yaml) = output.split_at(output.find("auth:\n").unwrap());
    let key = words
        .lines()
        .find(|line| line.starts_with("cellblock_"))
        .unwrap();
    let file = folder.path().join("config.yaml");
    std::fs::write(&file, format!("data_dir: data\n{yaml}")).unwrap();
    let settings = cellblock::config::load(Some(&file), cellblock::config::Flags::default())
        .unwrap()
        .auth;
    let caller = authenticate(&settings, key).await.unwrap();
    assert_eq!(caller.principal, "key:ci");
    assert!(caller.scopes.allow(cellblock::auth::Scope::Admin));
    let other = format!("cellblock_{}", "A".repeat(43));
    assert_eq!(authenticate(&settings, &other).await, Err(Denied::BadToken));
}
