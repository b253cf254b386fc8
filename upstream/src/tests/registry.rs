//! Tests of the registry: ownership and replacement of servers.

use serde_json::json;

use crate::fixtures::{call, child, is_alive, name, process, settings, until_dead};
use crate::{Owner, RegisterError, Registry, ServerParams};

fn one(owner: &str) -> Owner {
    Owner::One(owner.to_owned())
}

async fn register(
    registry: &Registry,
    owner: &Owner,
    server: &str,
) -> Result<crate::Upstream, RegisterError> {
    registry
        .register(
            owner,
            &name(server),
            &child(json!({"list": "pages"})),
            &settings(),
        )
        .await
}

fn names(registry: &Registry, owner: &str) -> Vec<String> {
    registry
        .list(owner)
        .into_iter()
        .map(|info| info.name.to_string())
        .collect()
}

#[tokio::test]
async fn servers_are_seen_by_their_owner_and_the_operators_by_all() {
    let registry = Registry::new();
    register(&registry, &Owner::Everyone, "shared")
        .await
        .unwrap();
    register(&registry, &one("alice"), "hers").await.unwrap();
    assert_eq!(names(&registry, "alice"), ["hers", "shared"]);
    assert_eq!(names(&registry, "bob"), ["shared"]);
    assert!(registry.find("bob", "hers").is_none());
    assert!(registry.find("alice", "hers").is_some() && registry.find("bob", "shared").is_some());
    assert_eq!(registry.packages_of("alice").len(), 2);
    // Bob's server of the same name is a different one, and only the owner can unregister a server.
    register(&registry, &one("bob"), "hers").await.unwrap();
    assert!(!registry.unregister(&one("carol"), "hers"));
    assert!(!registry.unregister(&one("alice"), "shared"));
    assert!(registry.unregister(&one("bob"), "hers"));
    assert_eq!(names(&registry, "alice"), ["hers", "shared"]);
}

#[tokio::test]
async fn two_servers_with_one_python_name_are_refused() {
    let registry = Registry::new();
    register(&registry, &one("alice"), "my-server")
        .await
        .unwrap();
    let error = register(&registry, &one("alice"), "my.server")
        .await
        .unwrap_err();
    assert!(matches!(error, RegisterError::SameName { .. }), "{error}");
    register(&registry, &Owner::Everyone, "shared")
        .await
        .unwrap();
    let error = register(&registry, &one("alice"), "shared")
        .await
        .unwrap_err();
    assert!(matches!(error, RegisterError::Operators { .. }), "{error}");
    // Controls: the same name again, and the same Python name of another owner.
    assert!(
        register(&registry, &one("alice"), "my-server")
            .await
            .is_ok()
    );
    assert!(register(&registry, &one("bob"), "my.server").await.is_ok());
}

#[tokio::test]
async fn a_new_server_takes_the_place_of_the_old_one_when_it_is_connected() {
    let registry = Registry::new();
    let owner = one("alice");
    let changes = registry.changes();
    let old = registry
        .register(&owner, &name("server"), &child(json!({})), &settings())
        .await
        .unwrap();
    let before = process(&old).await;
    // A failed connection changes nothing.
    let broken = ServerParams::parse(&json!({"command": "no-such-program"})).unwrap();
    let error = registry
        .register(&owner, &name("server"), &broken, &settings())
        .await
        .unwrap_err();
    assert!(matches!(error, RegisterError::Connect { .. }), "{error}");
    assert_eq!(
        process(&registry.find("alice", "server").unwrap()).await,
        before
    );
    assert_eq!(*changes.borrow(), 1);
    // A running call is not interrupted.
    let running = tokio::spawn(async move { call(&old, "progress", json!({"end": true})).await });
    registry
        .register(&owner, &name("server"), &child(json!({})), &settings())
        .await
        .unwrap();
    assert!(running.await.unwrap().is_ok());
    assert_ne!(
        process(&registry.find("alice", "server").unwrap()).await,
        before
    );
    assert_eq!(*changes.borrow(), 2);
    until_dead(before).await;
}

#[tokio::test]
async fn closing_ends_all_programs() {
    let registry = Registry::new();
    let mut processes = Vec::new();
    for server in ["a", "b", "c"] {
        let upstream = registry
            .register(&one("alice"), &name(server), &child(json!({})), &settings())
            .await
            .unwrap();
        processes.push(process(&upstream).await);
    }
    registry.close().await;
    assert!(processes.iter().all(|process| !is_alive(*process)));
    assert!(registry.list("alice").is_empty());
}
