//! Many clients of the built program: what they cost, and that nobody else notices.

use std::time::{Duration, Instant};

use serde_json::json;

use super::client::{Raw, head};
use crate::support::server::{MINIMAL, TEST_TIMEOUT};
use crate::support::service::Service;

const MIB: u64 = 1024 * 1024;
const CONNECTIONS: usize = 1_000;

/// What a connection without a request under way may cost the server, in the unoptimised build too.
const COST_OF_ONE: u64 = 40 * 1024;

/// Descriptors that come and go by themselves: timers, a file being read.
const FEW: usize = 16;

/// An answer as somebody gets it whom the load does not concern.
const PROMPT: Duration = Duration::from_secs(20);

/// Checks that a cell of somebody else is answered, and soon.
async fn check_served(service: &Service) {
    let start = Instant::now();
    let mut client = Raw::with_token(service).await;
    client
        .call(
            "execute_ipython_cell",
            json!({"code": "print(6 * 7)", "session_id": "bystander"}),
        )
        .await;
    let answer = client.answer().await;
    assert!(
        answer.status == 200 && answer.body.contains("42"),
        "{answer:?}"
    );
    assert!(start.elapsed() < PROMPT, "it took {:?}", start.elapsed());
}

/// A service whose first session is there, because making it costs descriptors and memory of its
/// own.
async fn warm_service() -> Service {
    let service = Service::start(&[MINIMAL, &["--max-connections", "2000"]].concat());
    let mut client = Raw::with_token(&service).await;
    client
        .call(
            "execute_ipython_cell",
            json!({"code": "pass", "session_id": "bystander"}),
        )
        .await;
    assert_eq!(client.answer().await.status, 200);
    drop(client);
    check_served(&service).await;
    service
}

/// Waits until the server and its daemon have no more descriptors than this, each.
async fn check_descriptors(service: &Service, most: [usize; 2]) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        let open = service.descriptors();
        if open
            .iter()
            .zip(most)
            .all(|(open, most)| *open <= most + FEW)
        {
            return;
        }
        assert!(Instant::now() < deadline, "{open:?} of {most:?} are open");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_idle_connections_cost_little_and_leave_nothing() {
    let service = warm_service().await;
    let (memory, descriptors) = (service.resident_bytes(), service.descriptors());
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut client = Raw::connect(service.address).await;
        client
            .write("GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            .await;
        assert_eq!(client.answer().await.status, 200);
        clients.push(client);
    }
    // Of the others some may have been closed meanwhile: the server still prepares sandboxes.
    assert!(service.descriptors()[0] > CONNECTIONS, "all are open"); // control
    let cost = service.resident_bytes().saturating_sub(memory);
    assert!(
        cost < CONNECTIONS as u64 * COST_OF_ONE,
        "they cost {} KiB",
        cost / 1024
    );
    check_served(&service).await;
    drop(clients);
    check_descriptors(&service, descriptors).await;
    check_served(&service).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_large_bodies_is_refused_within_bounded_memory() {
    const FLOODERS: usize = 16;
    const BODIES: usize = 12;
    let service = warm_service().await;
    let (memory, descriptors) = (service.resident_bytes(), service.descriptors());
    let body = " ".repeat(7 * MIB as usize);
    let more = format!(
        "authorization: Bearer {}\r\ncontent-length: {}\r\n",
        service.token,
        body.len()
    );
    let request = std::sync::Arc::new(head("execute_ipython_cell", &more) + &body);
    let floods = (0..FLOODERS).map(|_| {
        let (request, address) = (request.clone(), service.address);
        tokio::spawn(async move {
            let mut client = Raw::connect(address).await;
            for _ in 0..BODIES {
                client.write(request.as_bytes()).await;
                // It is no message, or too many bytes of this caller are under way.
                let status = client.answer().await.status;
                assert!(matches!(status, 400 | 429), "{status}");
            }
        })
    });
    let floods: Vec<_> = floods.collect();
    check_served(&service).await;
    for flood in floods {
        flood.await.unwrap();
    }
    let most = FLOODERS as u64 * 2 * 8 * MIB;
    let grown = service.resident_bytes().saturating_sub(memory);
    assert!(
        grown < most,
        "{} MiB stay of {} MiB",
        grown / MIB,
        FLOODERS * BODIES * 7
    );
    check_descriptors(&service, descriptors).await;
    check_served(&service).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cells_of_clients_that_vanish_are_stopped_and_their_sessions_are_free() {
    const CLIENTS: usize = 8;
    let service = warm_service().await;
    let descriptors = service.descriptors();
    for number in 0..CLIENTS {
        let session = format!("v{number}");
        let mut client = Raw::with_token(&service).await;
        client
            .call(
                "execute_ipython_cell",
                json!({"code": "x = 1", "session_id": session}),
            )
            .await;
        assert_eq!(client.answer().await.status, 200);
        client
            .call(
                "execute_ipython_cell",
                json!({"code": "while True: x += 1", "session_id": session}),
            )
            .await;
        // Dropping it closes the connection, whether or not the cell has begun by then.
        drop(client);
    }
    check_served(&service).await;
    for number in 0..CLIENTS {
        let session = format!("v{number}");
        let mut client = Raw::with_token(&service).await;
        client
            .call(
                "execute_ipython_cell",
                json!({"code": "print(x > 0)", "session_id": session}),
            )
            .await;
        let answer = client.answer().await;
        assert!(answer.body.contains("True"), "{answer:?}");
        client
            .call("close_session", json!({"session_id": session}))
            .await;
        assert_eq!(client.answer().await.status, 200);
    }
    check_descriptors(&service, descriptors).await;
    let log = service.finish();
    assert!(
        !log.contains("while True") && !log.contains("Bearer"),
        "nothing of it is in the log"
    ); // it tells no code and no token
}
