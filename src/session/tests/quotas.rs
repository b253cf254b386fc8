//! Tests of quotas, with the fake backend and a paused clock. Each refusal is paired with the same
//! request by a principal that is within its quota.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::lifecycle::{Setting, id, owner, request, setting_with, without_undo};
use crate::sandbox::fake::FakeBackend;
use crate::session::*;

const SECOND: Duration = Duration::from_secs(1);
const MIB: u64 = 1024 * 1024;

fn limited(quotas: Quotas) -> Setting {
    setting_with(
        FakeBackend::new(),
        SessionSettings {
            quotas,
            ..without_undo()
        },
    )
}

fn other() -> Principal {
    Principal("somebody else".to_owned())
}

async fn run_as(
    setting: &Setting,
    owner: &Principal,
    session: &str,
    code: &str,
) -> Result<Outcome, Refused> {
    setting
        .sessions
        .execute(owner, &id(session), request(code), CancellationToken::new())
        .await
}

fn quota(result: Result<Outcome, Refused>) -> (Quota, u64, u64, Option<Duration>) {
    match result {
        Err(Refused::Quota {
            which,
            limit,
            used,
            retry_after,
        }) => (which, limit, used, retry_after),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn only_so_many_sessions_exist_of_one_principal() {
    let setting = limited(Quotas {
        sessions: Some(2),
        ..Quotas::default()
    });
    setting.ok("a", "print x").await;
    setting.ok("b", "print x").await;
    assert_eq!(
        quota(setting.run("c", "print x").await),
        (Quota::Sessions, 2, 2, None)
    );
    run_as(&setting, &other(), "c", "print x").await.unwrap();
    let forks = setting
        .sessions
        .fork(&owner(), &id("a"), ForkNames::Count(1))
        .await;
    assert!(matches!(
        forks,
        Err(Refused::Quota {
            which: Quota::Sessions,
            ..
        })
    ));
    setting.sessions.close(&owner(), &id("a")).await.unwrap();
    setting.ok("c", "print x").await;
    assert_eq!(setting.sessions.usage(&owner()).sessions, 2);
}

#[tokio::test(start_paused = true)]
async fn only_so_many_cells_run_per_minute() {
    let setting = limited(Quotas {
        cells_per_minute: Some(3),
        ..Quotas::default()
    });
    for _ in 0..3 {
        setting.ok("a", "print x").await;
    }
    let (which, limit, used, retry_after) = quota(setting.run("a", "print x").await);
    assert_eq!((which, limit, used), (Quota::CellsPerMinute, 3, 3));
    run_as(&setting, &other(), "a", "print x").await.unwrap();
    tokio::time::sleep(retry_after.unwrap()).await;
    setting.ok("a", "print x").await;
    assert_eq!(setting.sessions.usage(&owner()).cells, 1);
}

#[tokio::test(start_paused = true)]
async fn only_so_many_sandboxes_begin_per_minute() {
    let setting = limited(Quotas {
        starts_per_minute: Some(3),
        ..Quotas::default()
    });
    setting.ok("a", "set x 1").await;
    let variant = |name: &str| Variant {
        name: name.to_owned(),
        code: "get x".to_owned(),
    };
    let explore = || ExploreRequest {
        variants: vec![variant("one"), variant("two")],
        keep: Keep::Nothing,
        replace: false,
        recorder: Default::default(),
        timeout: SECOND,
        max_output_chars: 100,
    };
    let explored = async || {
        let news = ProgressChannel::new(String::new());
        setting
            .sessions
            .explore(
                &owner(),
                &id("a"),
                explore(),
                CancellationToken::new(),
                news,
            )
            .await
    };
    explored().await.unwrap();
    let refused = explored().await.unwrap_err();
    assert!(
        matches!(
            refused,
            Refused::Quota {
                which: Quota::StartsPerMinute,
                limit: 3,
                used: 3,
                ..
            }
        ),
        "{refused}"
    );
    let (.., retry_after) = quota(setting.run("b", "print x").await);
    assert!(refused.to_string().contains("Try again in"), "{refused}");
    setting.ok("a", "get x").await;
    tokio::time::sleep(retry_after.unwrap()).await;
    setting.ok("b", "print x").await;
}

#[tokio::test(start_paused = true)]
async fn processor_time_counts_as_the_kernel_tells_also_after_its_session_is_gone() {
    let quotas = Quotas {
        processor_time: Some(10 * SECOND),
        processor_window: 600 * SECOND,
        ..Quotas::default()
    };
    let setting = limited(quotas);
    setting.ok("a", "burn 6").await;
    tokio::time::sleep(2 * SECOND).await;
    setting.ok("a", "burn 6").await;
    setting.sessions.close(&owner(), &id("a")).await.unwrap();
    assert_eq!(setting.sessions.usage(&owner()).processor_time, 12 * SECOND);
    let (which, limit, used, retry_after) = quota(setting.run("b", "print x").await);
    assert_eq!((which, limit, used), (Quota::ProcessorTime, 10, 12));
    run_as(&setting, &other(), "b", "print x").await.unwrap();
    tokio::time::sleep(retry_after.unwrap()).await;
    setting.ok("b", "print x").await;
}

#[tokio::test(start_paused = true)]
async fn processor_time_of_a_running_cell_counts_before_it_ends() {
    let setting = limited(Quotas {
        processor_time: Some(10 * SECOND),
        ..Quotas::default()
    });
    let running = setting
        .begin("a", "burn 11\nsleep 8", CancellationToken::new())
        .await;
    tokio::time::sleep(2 * SECOND).await;
    assert_eq!(
        quota(setting.run("b", "print x").await).0,
        Quota::ProcessorTime
    );
    running.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn nothing_new_begins_while_too_much_memory_is_held() {
    let setting = limited(Quotas {
        memory: Some(100 * MIB),
        ..Quotas::default()
    });
    setting.backend.set_memory_of_interpreter(60 * MIB);
    setting.ok("a", "set x 1").await;
    tokio::time::sleep(2 * SECOND).await;
    setting.ok("b", "set x 1").await;
    tokio::time::sleep(2 * SECOND).await;
    for session in ["a", "c"] {
        assert_eq!(
            quota(setting.run(session, "get x").await),
            (Quota::Memory, 100 * MIB, 120 * MIB, None)
        );
    }
    run_as(&setting, &other(), "a", "print x").await.unwrap();
    setting.sessions.close(&owner(), &id("b")).await.unwrap();
    setting.ok("a", "get x").await;
}

#[tokio::test(start_paused = true)]
async fn no_file_or_session_is_added_while_too_much_is_stored() {
    let setting = limited(Quotas {
        stored: Some(MIB),
        ..Quotas::default()
    });
    setting
        .upload("a", "data", &vec![b'x'; MIB as usize - 100], false)
        .await
        .unwrap();
    tokio::time::sleep(2 * SECOND).await;
    let stored = |result: Result<u64, Refused>| {
        matches!(
            result,
            Err(Refused::Quota {
                which: Quota::Stored,
                ..
            })
        )
    };
    assert!(stored(
        setting.upload("a", "more", &[b'x'; 200], false).await
    ));
    setting
        .upload("a", "more", &[b'x'; 50], false)
        .await
        .unwrap();
    // Printed output counts as stored too.
    setting.ok("a", "flood 100").await;
    assert!(stored(setting.upload("a", "more", &[b'x'; 60], true).await));
    assert_eq!(quota(setting.run("b", "print x").await).0, Quota::Stored);
    run_as(&setting, &other(), "b", "print x").await.unwrap();
    // A cell in an existing session may clean up.
    setting.ok("a", "keep data small").await;
    tokio::time::sleep(2 * SECOND).await;
    setting.ok("b", "print x").await;
}

#[tokio::test(start_paused = true)]
async fn without_quotas_usage_is_told_all_the_same() {
    let setting = limited(Quotas::default());
    setting.backend.set_memory_of_interpreter(7);
    setting.ok("a", "burn 3\nkeep data 12345").await;
    let usage = setting.sessions.usage(&owner());
    assert_eq!(
        usage,
        Usage {
            sessions: 1,
            memory: 12,
            processor_time: 3 * SECOND,
            cells: 1,
            starts: 1,
            stored: usage.stored
        }
    );
    assert!(usage.stored >= 5);
    assert_eq!(setting.sessions.usage(&other()), Usage::default());
}
