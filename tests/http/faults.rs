//! One bad client at a time, and what becomes of it.
//!
//! Client and server share a clock that stands still while anything happens and jumps when nothing
//! can: whoever is slow is slow at once, and nobody sleeps. Every case ends with a client that
//! behaves, and is served.

use std::sync::Arc;
use std::time::Duration;

use cellblock::mcp::http::MAX_BODY_BYTES;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ErrorData,
};
use rmcp::service::RequestContext;
use rmcp::{RoleServer, ServerHandler};
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::client::{Raw, call, head};
use crate::support::stack::Stack;

/// More than sockets on both sides hold for a reader that does not read.
const MUCH: usize = 32 * 1024 * 1024;

/// How long the server waits for a client that reads nothing.
const READING_TIME: Duration = Duration::from_secs(30);

/// Connections that the server of a test may have.
const MOST: usize = 4;

/// Answers shortly, at length, or never.
#[derive(Clone)]
struct Handler {
    begun: Arc<Semaphore>,
    cancelled: Arc<Semaphore>,
}

impl Handler {
    fn new() -> Handler {
        Handler {
            begun: Arc::new(Semaphore::new(0)),
            cancelled: Arc::new(Semaphore::new(0)),
        }
    }
}

impl ServerHandler for Handler {
    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let text = match &*request.name {
            "short" => "short".to_owned(),
            "long" => "x".repeat(MUCH),
            _ => {
                self.begun.add_permits(1);
                context.ct.cancelled().await;
                self.cancelled.add_permits(1);
                "cancelled".to_owned()
            }
        };
        Ok(CallToolResult::success(vec![ContentBlock::text(text)]).into())
    }
}

/// Checks that a client that behaves is served.
async fn check_served(stack: &Stack) {
    let mut client = Raw::connect(stack.address).await;
    for _ in 0..2 {
        client.call("short", json!({})).await;
        let answer = client.answer().await;
        assert!(
            answer.status == 200 && answer.body.contains("short"),
            "{answer:?}"
        );
    }
}

/// Waits until every connection is gone.
async fn check_all_gone(stack: &Stack) {
    while stack.open() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_says_nothing_is_let_go() {
    let stack = Stack::serve(Handler::new(), MOST).await;
    check_let_go(&stack, "", Duration::from_secs(10)).await;
    check_served(&stack).await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_stops_within_a_head_is_let_go() {
    let stack = Stack::serve(Handler::new(), MOST).await;
    check_let_go(
        &stack,
        "POST /mcp HTTP/1.1\r\nhost: local",
        Duration::from_secs(10),
    )
    .await;
    check_served(&stack).await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_stops_within_a_body_is_let_go() {
    let stack = Stack::serve(Handler::new(), MOST).await;
    let begun = head("short", "content-length: 1000\r\n") + "{\"jsonrpc\"";
    check_let_go(&stack, &begun, Duration::from_secs(30)).await;
    check_served(&stack).await;
}

/// Checks that a client which writes this and no more loses its connection, after this time and not
/// before.
async fn check_let_go(stack: &Stack, written: &str, after: Duration) {
    let start = Instant::now();
    let mut client = Raw::connect(stack.address).await;
    client.write(written).await;
    client.end().await;
    let waited = start.elapsed();
    assert!(waited >= after && waited < after * 2, "it took {waited:?}");
    check_all_gone(stack).await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_its_answer_is_let_go() {
    let stack = Stack::serve(Handler::new(), MOST).await;
    let mut reader = Raw::connect(stack.address).await;
    reader.call("long", json!({})).await;
    assert_eq!(reader.answer().await.status, 200); // control
    drop(reader);
    let mut sleeper = Raw::connect(stack.address).await;
    sleeper.call("long", json!({})).await;
    // On this clock that is the time that the server gives it, and no time at all.
    tokio::time::sleep(READING_TIME + Duration::from_secs(1)).await;
    check_all_gone(&stack).await;
    assert!(sleeper.end().await.len() < MUCH);
    check_served(&stack).await;
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused_as_soon_as_it_is_known() {
    let stack = Stack::serve(Handler::new(), MOST).await;
    // One byte less is only a call of the wrong shape.
    let mut fitting = Raw::connect(stack.address).await;
    fitting
        .write(head(
            "short",
            &format!("content-length: {MAX_BODY_BYTES}\r\n"),
        ))
        .await;
    fitting.write(" ".repeat(MAX_BODY_BYTES)).await;
    assert_eq!(fitting.answer().await.status, 400); // control

    let mut announced = Raw::connect(stack.address).await;
    announced
        .write(head(
            "short",
            &format!("content-length: {}\r\n", MAX_BODY_BYTES + 1),
        ))
        .await;
    announced
        .write_if_it_can(" ".repeat(MAX_BODY_BYTES + 1))
        .await;
    assert_eq!(announced.answer().await.status, 413);

    let mut endless = Raw::connect(stack.address).await;
    endless
        .write(head("short", "transfer-encoding: chunked\r\n"))
        .await;
    let chunk = format!("{:x}\r\n{}\r\n", 65536, " ".repeat(65536));
    let mut chunks = 0;
    while chunks * 65536 <= MAX_BODY_BYTES && endless.write_if_it_can(&chunk).await {
        chunks += 1;
    }
    assert_eq!(endless.answer().await.status, 413);
    check_served(&stack).await;
}

#[tokio::test]
async fn a_client_that_vanishes_cancels_what_it_asked_for() {
    let handler = Handler::new();
    let stack = Stack::serve(handler.clone(), MOST).await;
    let (mut stays, mut leaves) = (
        Raw::connect(stack.address).await,
        Raw::connect(stack.address).await,
    );
    stays.call("endless", json!({})).await;
    leaves.call("endless", json!({})).await;
    let _both = handler.begun.acquire_many(2).await.unwrap();
    drop(leaves);
    handler.cancelled.acquire().await.unwrap().forget();
    check_served(&stack).await;
    assert_eq!(
        handler.cancelled.available_permits(),
        0,
        "only the call of the client that left is cancelled"
    ); // control
    drop(stays);
    handler.cancelled.acquire().await.unwrap().forget();
    check_all_gone(&stack).await;
}

/// Opens a connection that asks for nothing that needs a token.
async fn idle_connection(stack: &Stack) -> Raw {
    let mut client = Raw::connect(stack.address).await;
    client
        .write("GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        .await;
    assert_eq!(client.answer().await.status, 200);
    client
}

#[tokio::test(start_paused = true)]
async fn idle_connections_give_way_and_cannot_keep_callers_out() {
    let stack = Stack::serve(Handler::new(), MOST).await;
    let mut idle = Vec::new();
    for _ in 0..MOST {
        idle.push(idle_connection(&stack).await);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(stack.open(), MOST); // control
    check_served(&stack).await;
    assert_eq!(
        idle[0].end().await,
        "",
        "the longest idle one has given way"
    );
    idle[1]
        .write("GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        .await;
    assert_eq!(idle[1].answer().await.status, 200, "the others stay");
}

#[tokio::test(start_paused = true)]
async fn a_connection_is_idle_for_half_a_minute_before_a_token_and_for_ten_after() {
    let stack = Stack::serve(Handler::new(), MOST).await;
    let mut known = Raw::connect(stack.address).await;
    known.call("short", json!({})).await;
    assert_eq!(known.answer().await.status, 200);
    for (mut client, seconds) in [(idle_connection(&stack).await, 30), (known, 600)] {
        let start = Instant::now();
        client.end().await;
        let waited = start.elapsed().as_secs();
        assert!(
            waited > seconds / 2 && waited <= seconds + 1,
            "{waited} s of {seconds} s"
        );
    }
    check_all_gone(&stack).await;
}

#[tokio::test]
async fn calls_under_way_are_not_closed_for_a_new_connection() {
    let handler = Handler::new();
    let stack = Stack::serve(handler.clone(), MOST).await;
    let mut clients = Vec::new();
    for _ in 0..MOST {
        let mut client = Raw::connect(stack.address).await;
        client.call("never", json!({})).await;
        handler.begun.acquire().await.unwrap().forget();
        clients.push(client);
    }
    assert_eq!(Raw::connect(stack.address).await.end().await, "");
    assert_eq!(stack.open(), MOST);
    drop(clients);
    check_all_gone(&stack).await;
    check_served(&stack).await; // control
}

#[tokio::test]
async fn nonsense_ends_its_own_connection_only() {
    let stack = Stack::serve(Handler::new(), MOST).await;
    let long_line = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(100_000));
    let many_lines = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(10_000));
    let twice = head("short", "content-length: 5\r\ncontent-length: 6\r\n");
    let both = head(
        "short",
        "content-length: 5\r\ntransfer-encoding: chunked\r\n",
    ) + "zz\r\n\r\n";
    for nonsense in [
        "\0\0\0\0\r\n\r\n",
        "HELO example.com\r\n\r\n",
        &long_line,
        &many_lines,
        &twice,
        &both,
    ] {
        let mut client = Raw::connect(stack.address).await;
        client.write_if_it_can(nonsense).await;
        let said = client.end().await;
        assert!(said.is_empty() || said.starts_with("HTTP/1.1 4"), "{said}");
    }
    check_all_gone(&stack).await;
    check_served(&stack).await;
}

#[tokio::test]
async fn requests_sent_ahead_are_answered_one_by_one() {
    let stack = Stack::serve(Handler::new(), MOST).await;
    let body = call("short", json!({}));
    let request = head("short", &format!("content-length: {}\r\n", body.len())) + &body;
    let mut client = Raw::connect(stack.address).await;
    client.write(request.repeat(20)).await;
    client
        .write(head("short", "connection: close\r\ncontent-length: 2\r\n") + "{}")
        .await;
    let answers = client.end().await;
    assert_eq!(
        (
            answers.matches("HTTP/1.1 200").count(),
            answers.matches("HTTP/1.1 400").count()
        ),
        (20, 1)
    );
}
