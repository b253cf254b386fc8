//! Calls that are sent without waiting for answers run in the order in which they were sent.
//!
//! On one connection that holds for HTTP/2, whose requests are under way at the same time, and for
//! HTTP/1.1, which answers one request after the other. Requests on different connections have no
//! order.

use std::collections::VecDeque;
use std::convert::Infallible;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper::{Request, Response, header};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::client::{Raw, call, head};
use crate::support::service::{Service, stop_keeper_of};

const CALLS: usize = 200;
/// A session lets 64 calls wait.
const UNDER_WAY: usize = 60;
const CALLERS: &[(&str, &[&str])] = &[("alice", &["python:execute"])];

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// A caller with one HTTP/2 connection.
struct Caller {
    connection: SendRequest<Body>,
    address: String,
    key: String,
}

impl Caller {
    async fn connect(service: &Service) -> Caller {
        let stream = TcpStream::connect(service.address).await.unwrap();
        let (connection, driver) = handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(driver);
        Caller {
            connection,
            address: service.address.to_string(),
            key: service.key("alice").to_owned(),
        }
    }

    /// Sends a call, and returns before it is answered.
    async fn send(&mut self, session: &str, body: Body) -> impl Future<Output = Value> + use<> {
        let request = Request::post(format!("http://{}/mcp", self.address))
            .header(header::AUTHORIZATION, format!("Bearer {}", self.key))
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json, text/event-stream")
            .header("mcp-protocol-version", "2026-07-28")
            .header("mcp-method", "tools/call")
            .header("mcp-name", "execute_ipython_cell")
            .header("mcp-param-session-id", session)
            .body(body)
            .unwrap();
        self.connection.ready().await.unwrap();
        let answer = self.connection.send_request(request);
        async move { result(answer.await.unwrap()).await }
    }

    async fn run(&mut self, session: &str, code: &str) -> String {
        let body = whole(cell(session, code, false));
        let answer = self.send(session, body).await.await;
        answer["structuredContent"]["text"]
            .as_str()
            .unwrap_or_else(|| panic!("{answer}"))
            .to_owned()
    }
}

async fn result(response: Response<hyper::body::Incoming>) -> Value {
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let mut message: Value = serde_json::from_slice(&body).unwrap_or_else(|_| panic!("{body:?}"));
    message["result"].take()
}

fn cell(session: &str, code: &str, has_rules: bool) -> String {
    let mut arguments = json!({"session_id": session, "code": code});
    if has_rules {
        arguments["allowed_domains"] = json!([]);
    }
    call("execute_ipython_cell", arguments)
}

fn whole(text: String) -> Body {
    Full::from(text).boxed_unsync()
}

/// A body that is not sent before it is let go.
fn withheld(text: String) -> (oneshot::Sender<()>, Body) {
    let (go, gone) = oneshot::channel();
    let frames = stream::once(async move {
        let _ = gone.await;
        Ok(Frame::data(Bytes::from(text)))
    });
    (go, StreamBody::new(frames).boxed_unsync())
}

/// Sends calls over one HTTP/2 connection, each without waiting for those before, half of them with
/// rules of their own, and compares the order in which they ran.
async fn check_order_over_http2(service: &Service) {
    let mut caller = Caller::connect(service).await;
    caller.run("a", "order = []").await;
    let mut under_way = VecDeque::new();
    for number in 0..CALLS {
        if under_way.len() == UNDER_WAY {
            check_ran(under_way.pop_front().unwrap().await);
        }
        let body = whole(cell(
            "a",
            &format!("order.append({number})"),
            number % 2 == 1,
        ));
        under_way.push_back(Box::pin(caller.send("a", body).await));
    }
    for answer in under_way {
        check_ran(answer.await);
    }
    let order = caller
        .run("a", &format!("order == list(range({CALLS})) or order"))
        .await;
    assert_eq!(order, "True");
}

fn check_ran(answer: Value) {
    assert_eq!(answer["structuredContent"]["status"], "ok", "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_on_one_http2_connection_run_in_the_order_in_which_they_were_sent() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::with_keys(folder.path(), CALLERS, false, &[]);
    check_order_over_http2(&service).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_on_one_http2_connection_run_in_order_with_a_keeper_and_an_audit_log() {
    let folder = tempfile::tempdir().unwrap();
    let audit_file = folder.path().join("audit.jsonl");
    let service = Service::with_keys(
        folder.path(),
        CALLERS,
        true,
        &["--audit-file", &audit_file.display().to_string()],
    );
    check_order_over_http2(&service).await;
    drop(service);
    stop_keeper_of(folder.path());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_whose_body_is_late_keeps_its_place_and_delays_no_other_session() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::with_keys(folder.path(), CALLERS, false, &[]);
    let mut caller = Caller::connect(&service).await;
    caller.run("a", "order = []").await;
    let (go, body) = withheld(cell("a", "order.append(0)", false));
    let mut under_way = vec![Box::pin(caller.send("a", body).await)];
    for number in 1..10 {
        let body = whole(cell("a", &format!("order.append({number})"), false));
        under_way.push(Box::pin(caller.send("a", body).await));
    }
    // Those have been read by now, because these came later on the same connection.
    for number in 0..20 {
        assert_eq!(
            caller.run("b", &number.to_string()).await,
            number.to_string()
        );
    }
    go.send(()).unwrap();
    for answer in under_way {
        check_ran(answer.await);
    }
    assert_eq!(
        caller.run("a", "order == list(range(10)) or order").await,
        "True"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_given_up_before_its_body_came_lets_the_next_one_go() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::with_keys(folder.path(), CALLERS, false, &[]);
    let mut caller = Caller::connect(&service).await;
    let (go, body) = withheld(cell("a", "1", false));
    let first = caller.send("a", body).await;
    let second = caller.send("a", whole(cell("a", "2", false))).await;
    drop(first);
    check_ran(second.await);
    drop(go);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_pipelined_on_one_http1_connection_run_in_the_order_in_which_they_were_sent() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::with_keys(folder.path(), CALLERS, false, &[]);
    let request = |code: &str, more: &str| {
        let body = cell("a", code, false);
        let lines = format!(
            "content-length: {}\r\nauthorization: Bearer {}\r\nmcp-param-session-id: a\r\n{more}",
            body.len(),
            service.key("alice")
        );
        head("execute_ipython_cell", &lines) + &body
    };
    let mut requests = request("order = []", "");
    for number in 0..CALLS {
        requests += &request(&format!("order.append({number})"), "");
    }
    requests += &request(
        &format!("print('in order:', order == list(range({CALLS})))"),
        "connection: close\r\n",
    );
    let mut client = Raw::connect(service.address).await;
    client.write(requests).await;
    let answers = client.end().await;
    assert_eq!(answers.matches("HTTP/1.1 200").count(), CALLS + 2);
    assert!(answers.contains("in order: True"), "{answers}");
}
