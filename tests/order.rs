//! Calls that are sent without waiting for answers run in the order in which they were sent.
//!
//! That holds over stdio and on one HTTP connection: for HTTP/2, whose requests are under way at
//! the same time, and for HTTP/1.1, which answers one request after the other. It holds with and
//! without a daemon, and for calls that bring rules of their own. Requests on different connections
//! have no order.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::future::join_all;
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

use crate::http::client::{Raw, call, head};
use crate::support::server::{MINIMAL, Server};
use crate::support::service::{SESSIONS_INSIDE, SESSIONS_KEPT, Service, SessionDaemon};

const CALLS: usize = 200;
/// A session lets 64 calls wait and refuses further ones, so at least as many run.
const MIN_RUN: usize = 64;
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
        let body = whole(cell(session, code));
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

fn cell(session: &str, code: &str) -> String {
    call(
        "execute_ipython_cell",
        json!({"session_id": session, "code": code}),
    )
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

/// How calls reach the server.
#[derive(Clone, Copy)]
enum Transport {
    Stdio,
    Http1,
    Http2,
}

/// Which calls bring rules about the network. Rules belong to their cell, and cost it nothing of
/// its place.
#[derive(Clone, Copy, PartialEq)]
enum Rules {
    Nowhere,
    EverySecondCall,
}

/// A client with one connection at a time.
enum Client {
    Stdio(Server),
    Http1(Service),
    Http2(Service),
}

impl Client {
    /// Sends calls, none of which waits for an answer, and returns their results in that order.
    async fn send_all(&self, cells: &[Value]) -> Vec<Value> {
        match self {
            Client::Stdio(server) => {
                let begin = |cell: &Value| server.begin("execute_ipython_cell", cell.clone());
                let sent: Vec<_> = cells.iter().map(begin).collect();
                sent.iter().map(|call| call.result().0).collect()
            }
            Client::Http1(service) => pipelined(service, cells).await,
            Client::Http2(service) => {
                let mut caller = Caller::connect(service).await;
                let mut sent = Vec::new();
                for cell in cells {
                    let body = whole(call("execute_ipython_cell", cell.clone()));
                    sent.push(tokio::spawn(caller.send("a", body).await));
                }
                join_all(sent)
                    .await
                    .into_iter()
                    .map(Result::unwrap)
                    .collect()
            }
        }
    }
}

/// Sends calls over one HTTP/1.1 connection before anything is read from it.
async fn pipelined(service: &Service, cells: &[Value]) -> Vec<Value> {
    let mut requests = String::new();
    for (number, cell) in cells.iter().enumerate() {
        let body = call("execute_ipython_cell", cell.clone());
        let is_last = number + 1 == cells.len();
        let lines = format!(
            "content-length: {}\r\nauthorization: Bearer {}\r\nmcp-param-session-id: a\r\n{}",
            body.len(),
            service.key("alice"),
            if is_last { "connection: close\r\n" } else { "" }
        );
        requests += &(head("execute_ipython_cell", &lines) + &body);
    }
    let mut client = Raw::connect(service.address).await;
    client.write(requests).await;
    let answers = client.end().await;
    let bodies = answers.split("HTTP/1.1 200 OK\r\n").skip(1);
    let results = bodies.map(|answer| {
        let body = answer.split_once("\r\n\r\n").expect(answer).1;
        serde_json::from_str::<Value>(body).expect(body)["result"].take()
    });
    results.collect()
}

/// Fires calls at one session, and compares the order in which they ran.
async fn check_order(transport: Transport, flags: &[&str], rules: Rules) {
    let folder = tempfile::tempdir().unwrap();
    // Declared before the client, so that it is dropped after it.
    let daemon = SessionDaemon::new();
    let client = match transport {
        Transport::Stdio => Client::Stdio(Server::start(
            &[MINIMAL, &["--daemon-name", daemon.name()], flags].concat(),
        )),
        // Calls run one by one here, so that all of them run. Checkpoints would take most of the
        // time.
        Transport::Http1 => {
            let flags = [flags, &["--undo", "off"]].concat();
            Client::Http1(Service::with_keys(folder.path(), CALLERS, &flags))
        }
        Transport::Http2 => Client::Http2(Service::with_keys(folder.path(), CALLERS, flags)),
    };
    let cell = |code: &str| json!({"session_id": "a", "code": code});
    check_ran(&client.send_all(&[cell("order = []")]).await[0]);
    let cells = (0..CALLS).map(|number| {
        let mut cell = cell(&format!("order.append({number})"));
        if rules == Rules::EverySecondCall && number % 2 == 1 {
            cell["allowed_domains"] = json!([]);
        }
        cell
    });
    let answers = client.send_all(&cells.collect::<Vec<_>>()).await;
    assert_eq!(answers.len(), CALLS);
    let mut ran = Vec::new();
    for (number, answer) in answers.iter().enumerate() {
        if answer["isError"] != true {
            check_ran(answer);
            ran.push(number);
        } else {
            let text = answer["content"][0]["text"].to_string();
            assert!(text.contains("requests are already waiting"), "{answer}");
        }
    }
    assert!(ran.len() >= MIN_RUN, "{ran:?}");
    let order = client.send_all(&[cell("print(order)")]).await;
    let order = order[0]["structuredContent"]["text"].as_str().unwrap();
    let order: Vec<usize> = serde_json::from_str(order).unwrap();
    assert_eq!(order, ran);
}

/// One test for each way.
macro_rules! ways {
    ($($name:ident: $transport:ident, $flags:expr, $rules:ident;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            check_order(Transport::$transport, $flags, Rules::$rules).await;
        }
    )*};
}

ways! {
    calls_over_stdio_run_in_order_without_a_daemon: Stdio, SESSIONS_INSIDE, Nowhere;
    calls_over_stdio_run_in_order_without_a_daemon_when_some_have_rules:
        Stdio, SESSIONS_INSIDE, EverySecondCall;
    calls_over_stdio_run_in_order_with_a_daemon: Stdio, SESSIONS_KEPT, Nowhere;
    calls_over_stdio_run_in_order_with_a_daemon_when_some_have_rules:
        Stdio, SESSIONS_KEPT, EverySecondCall;
    calls_over_http1_run_in_order_without_a_daemon: Http1, SESSIONS_INSIDE, Nowhere;
    calls_over_http1_run_in_order_without_a_daemon_when_some_have_rules:
        Http1, SESSIONS_INSIDE, EverySecondCall;
    calls_over_http1_run_in_order_with_a_daemon: Http1, &[], Nowhere;
    calls_over_http1_run_in_order_with_a_daemon_when_some_have_rules: Http1, &[], EverySecondCall;
    calls_over_http2_run_in_order_without_a_daemon: Http2, SESSIONS_INSIDE, Nowhere;
    calls_over_http2_run_in_order_without_a_daemon_when_some_have_rules:
        Http2, SESSIONS_INSIDE, EverySecondCall;
    calls_over_http2_run_in_order_with_a_daemon: Http2, &[], Nowhere;
    calls_over_http2_run_in_order_with_a_daemon_when_some_have_rules: Http2, &[], EverySecondCall;
}

fn check_ran(answer: &Value) {
    assert_eq!(answer["structuredContent"]["status"], "ok", "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_whose_body_is_late_keeps_its_place_and_delays_no_other_session() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::with_keys(folder.path(), CALLERS, &[]);
    let mut caller = Caller::connect(&service).await;
    caller.run("a", "order = []").await;
    let (go, body) = withheld(cell("a", "order.append(0)"));
    let mut under_way = vec![Box::pin(caller.send("a", body).await)];
    for number in 1..10 {
        let body = whole(cell("a", &format!("order.append({number})")));
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
        check_ran(&answer.await);
    }
    assert_eq!(
        caller.run("a", "order == list(range(10)) or order").await,
        "True"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_given_up_before_its_body_came_lets_the_next_one_go() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::with_keys(folder.path(), CALLERS, &[]);
    let mut caller = Caller::connect(&service).await;
    let (go, body) = withheld(cell("a", "1"));
    let first = caller.send("a", body).await;
    let second = caller.send("a", whole(cell("a", "2"))).await;
    drop(first);
    check_ran(&second.await);
    drop(go);
}
