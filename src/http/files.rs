//! Session files over plain HTTP: listing, ranged reads, and whole or partial writes.
//!
//! ```text
//! GET  /sessions/{id}/files               the list
//! GET  /sessions/{id}/files/{path}        the file, or a part of it (Range, If-Range,
//!                                         If-None-Match)
//! HEAD /sessions/{id}/files/{path}        its size and version; the offset of an unfinished
//!                                         upload
//! PUT  /sessions/{id}/files/{path}        the file, or a part of it (Content-Range: bytes
//!                                         FIRST-LAST/SIZE)
//! ```
//!
//! A path is opened on the session's side, below its working folder, without following links; this
//! module does not access the disk. The size and version that the session reports are claims: a
//! response whose content differs from them is aborted.

use std::io;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::any;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame};
use serde_json::json;
use tokio::io::{AsyncRead, DuplexStream, ReadBuf};
use tokio::sync::oneshot;

use super::routes::json;
use crate::auth::{Caller, Scope, require};
use crate::mcp::percent_decoded;
use crate::ops::{self, Host, HostExt, Io};
use crate::session::{FileRange, InsidePath, Principal, Refused, SessionId, UploadPart, Uploaded};

/// Bytes buffered for a slow reader.
const BUFFER: usize = 256 * 1024;

/// The offset of an unfinished upload.
const UPLOAD_OFFSET: &str = "upload-offset";

/// Creates the routes. Each checks the scope of its caller.
pub fn routes(sessions: Arc<dyn Host>) -> Router {
    Router::new()
        .route("/sessions/{id}/files", any(list))
        .route("/sessions/{id}/files/{*path}", any(file))
        .with_state(sessions)
}

type Sessions = Arc<dyn Host>;

/// Why a file request was rejected.
enum No {
    Denied(Box<Response<Body>>),
    Status(StatusCode, String),
    Refused(Refused),
    /// The requested range starts beyond the end.
    OutOfRange(u64),
}

impl From<Refused> for No {
    fn from(refused: Refused) -> No {
        No::Refused(refused)
    }
}

impl IntoResponse for No {
    fn into_response(self) -> Response<Body> {
        let said = |status: StatusCode, text: String| json(status, &json!({"error": text}));
        match self {
            No::Denied(response) => *response,
            No::Status(status, text) => said(status, text),
            No::OutOfRange(total) => {
                let mut response = said(
                    StatusCode::RANGE_NOT_SATISFIABLE,
                    "the file is shorter than that".to_owned(),
                );
                response
                    .headers_mut()
                    .insert(header::CONTENT_RANGE, value(format!("bytes */{total}")));
                response
            }
            No::Refused(refused) => {
                let mut response = said(status_of(&refused), refused.to_string());
                match refused {
                    Refused::UploadOffset { expected } => {
                        response
                            .headers_mut()
                            .insert(UPLOAD_OFFSET, HeaderValue::from(expected));
                    }
                    Refused::Quota {
                        retry_after: Some(wait),
                        ..
                    } => {
                        response.headers_mut().insert(
                            header::RETRY_AFTER,
                            HeaderValue::from(wait.as_secs().max(1)),
                        );
                    }
                    _ => {}
                }
                response
            }
        }
    }
}

fn status_of(refused: &Refused) -> StatusCode {
    use crate::runner_client::FileFailure;
    match refused {
        // An unknown session and another owner's are indistinguishable.
        Refused::Unknown { .. }
        | Refused::File {
            reason: FileFailure::Missing,
            ..
        } => StatusCode::NOT_FOUND,
        Refused::Ended { .. } => StatusCode::GONE,
        Refused::File {
            reason: FileFailure::Exists,
            ..
        } => StatusCode::PRECONDITION_FAILED,
        Refused::File {
            reason: FileFailure::TooLarge,
            ..
        }
        | Refused::UploadTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        Refused::File {
            reason: FileFailure::NoSpace,
            ..
        } => StatusCode::INSUFFICIENT_STORAGE,
        Refused::File { .. } | Refused::UploadOffset { .. } => StatusCode::CONFLICT,
        Refused::CellRunning { .. } | Refused::Occupied { .. } => StatusCode::CONFLICT,
        Refused::Quota { .. }
        | Refused::Busy { .. }
        | Refused::TooManySessions { .. }
        | Refused::TooManyUploads { .. } => StatusCode::TOO_MANY_REQUESTS,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// The caller, session and path of a request whose scope was checked.
struct About {
    owner: Principal,
    session: SessionId,
}

fn about(request: &Request, scope: Scope) -> Result<About, No> {
    let unknown = |status, text: String| No::Status(status, text);
    let caller = request.extensions().get::<Caller>();
    let caller = caller.ok_or_else(|| {
        unknown(
            StatusCode::INTERNAL_SERVER_ERROR,
            "it is not known who is calling".to_owned(),
        )
    })?;
    require(caller, scope).map_err(|denied| No::Denied(Box::new(denied.into_response())))?;
    let written = request.uri().path().split('/').nth(2).unwrap_or_default();
    let session = SessionId::from_str(written)
        .map_err(|bad| unknown(StatusCode::BAD_REQUEST, bad.to_string()))?;
    Ok(About {
        owner: Principal(caller.principal.clone()),
        session,
    })
}

async fn list(State(sessions): State<Sessions>, request: Request) -> Response<Body> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return not_allowed("GET, HEAD");
    }
    let about = about(&request, Scope::Read);
    drop(request);
    let listed = async {
        let About { owner, session } = about?;
        Ok::<_, No>((
            sessions
                .run(
                    &owner,
                    ops::ListFiles {
                        session: session.clone(),
                    },
                )
                .await?,
            session,
        ))
    };
    match listed.await {
        Ok((list, session)) => {
            let file =
                |note: &crate::session::FileNote| json!({"path": note.path, "size": note.size});
            let files: Vec<_> = list.files.iter().map(file).collect();
            json(
                StatusCode::OK,
                &json!({"session_id": session.as_str(), "files": files, "omitted": list.omitted}),
            )
        }
        Err(no) => no.into_response(),
    }
}

async fn file(State(sessions): State<Sessions>, request: Request) -> Response<Body> {
    let done = match *request.method() {
        Method::GET => get(sessions, request).await,
        Method::HEAD => head(sessions, request).await,
        Method::PUT => put(sessions, request).await,
        _ => return not_allowed("GET, HEAD, PUT"),
    };
    done.unwrap_or_else(IntoResponse::into_response)
}

fn not_allowed(methods: &'static str) -> Response<Body> {
    (StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, methods)]).into_response()
}

fn path_of(request: &Request) -> Result<InsidePath, No> {
    let bad = |text: String| No::Status(StatusCode::BAD_REQUEST, text);
    let written = request
        .uri()
        .path()
        .splitn(5, '/')
        .nth(4)
        .unwrap_or_default();
    let decoded = percent_decoded(written)
        .ok_or_else(|| bad("the path is not percent-encoded UTF-8".to_owned()))?;
    InsidePath::from_str(&decoded).map_err(|cause| bad(cause.to_string()))
}

async fn get(sessions: Sessions, request: Request) -> Result<Response<Body>, No> {
    let (About { owner, session }, path) = (about(&request, Scope::Read)?, path_of(&request)?);
    let (request, _) = request.into_parts();
    let known = sessions
        .run_with(
            &owner,
            ops::ReadFileRange {
                session: session.clone(),
                path: path.clone(),
                offset: 0,
                length: Some(0),
            },
            Io::default(),
        )
        .await?;
    let tag = tag_of(&known);
    if request
        .headers
        .get(header::IF_NONE_MATCH)
        .is_some_and(|given| *given == tag)
    {
        return Ok((StatusCode::NOT_MODIFIED, [(header::ETAG, tag)]).into_response());
    }
    let wanted = wanted_range(&request.headers, &tag, known.total)?;
    let (offset, length) = wanted.unwrap_or((0, known.total));
    let (mut sink, source) = tokio::io::duplex(BUFFER);
    let (finish, finished) = oneshot::channel();
    tokio::spawn(async move {
        let read = sessions
            .run_with(
                &owner,
                ops::ReadFileRange {
                    session: session.clone(),
                    path: path.clone(),
                    offset,
                    length: Some(length),
                },
                Io::sink(&mut sink),
            )
            .await;
        // The requester may have disconnected.
        let _ = finish
            .send(read.is_ok_and(|range| range.version == known.version && range.sent == length));
    });
    let status = if wanted.is_some() {
        StatusCode::PARTIAL_CONTENT
    } else {
        StatusCode::OK
    };
    let mut response = Response::new(Body::new(Content {
        source,
        finished: Some(finished),
        left: length,
    }));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    // Content from a session is never rendered as a page of this server.
    headers.insert(
        header::CONTENT_DISPOSITION,
        HeaderValue::from_static("attachment"),
    );
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(header::ETAG, tag);
    if wanted.is_some() {
        let last = offset + length.saturating_sub(1);
        headers.insert(
            header::CONTENT_RANGE,
            value(format!("bytes {offset}-{last}/{}", known.total)),
        );
    }
    Ok(response)
}

async fn head(sessions: Sessions, request: Request) -> Result<Response<Body>, No> {
    let (About { owner, session }, path) = (about(&request, Scope::Read)?, path_of(&request)?);
    drop(request);
    let arrived = sessions
        .run(
            &owner,
            ops::UploadSize {
                session: session.clone(),
                path: path.clone(),
            },
        )
        .await
        .unwrap_or_default();
    let known = sessions
        .run_with(
            &owner,
            ops::ReadFileRange {
                session: session.clone(),
                path: path.clone(),
                offset: 0,
                length: Some(0),
            },
            Io::default(),
        )
        .await;
    let mut response = match (known, arrived) {
        (Ok(known), _) => {
            let mut response = StatusCode::OK.into_response();
            let headers = response.headers_mut();
            headers.insert(header::CONTENT_LENGTH, HeaderValue::from(known.total));
            headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
            headers.insert(header::ETAG, tag_of(&known));
            response
        }
        // The file does not exist yet; the offset of its upload is the answer.
        (Err(_), Some(_)) => StatusCode::NO_CONTENT.into_response(),
        (Err(refused), None) => return Err(refused.into()),
    };
    if let Some(arrived) = arrived {
        response
            .headers_mut()
            .insert(UPLOAD_OFFSET, HeaderValue::from(arrived));
    }
    Ok(response)
}

async fn put(sessions: Sessions, request: Request) -> Result<Response<Body>, No> {
    let (About { owner, session }, path) = (about(&request, Scope::Execute)?, path_of(&request)?);
    let overwrite = request
        .headers()
        .get(header::IF_NONE_MATCH)
        .is_none_or(|given| given != "*");
    let part = match request.headers().get(header::CONTENT_RANGE) {
        None => UploadPart {
            offset: 0,
            last: true,
            overwrite,
        },
        Some(written) => {
            let bad = || {
                No::Status(
                    StatusCode::BAD_REQUEST,
                    "Content-Range must be: bytes FIRST-LAST/SIZE".to_owned(),
                )
            };
            let (first, last, size) = written
                .to_str()
                .ok()
                .and_then(content_range)
                .ok_or_else(bad)?;
            UploadPart {
                offset: first,
                last: last + 1 == size,
                overwrite,
            }
        }
    };
    let mut source = Incoming::new(request.into_body());
    let Uploaded { size, finished } = sessions
        .run_with(
            &owner,
            ops::Upload {
                session: session.clone(),
                path: path.clone(),
                part,
            },
            Io::source(&mut source),
        )
        .await?;
    let status = if finished {
        StatusCode::CREATED
    } else {
        StatusCode::ACCEPTED
    };
    let mut response = json(
        status,
        &json!({"session_id": session.as_str(), "path": path.as_str(), "bytes": size}),
    );
    if !finished {
        response
            .headers_mut()
            .insert(UPLOAD_OFFSET, HeaderValue::from(size));
    }
    Ok(response)
}

fn tag_of(known: &FileRange) -> HeaderValue {
    let plain: String = known
        .version
        .chars()
        .filter(|letter| letter.is_ascii_alphanumeric() || "-_.".contains(*letter))
        .collect();
    value(format!("\"{plain}\""))
}

/// Makes a header of a text that has only printable characters.
fn value(text: String) -> HeaderValue {
    HeaderValue::from_str(&text).expect("digits, letters and a few signs")
}

/// Parses the requested range: a single one, or `None` for the whole file. A client whose copy has
/// another version gets the whole.
fn wanted_range(
    headers: &HeaderMap,
    tag: &HeaderValue,
    total: u64,
) -> Result<Option<(u64, u64)>, No> {
    let Some(range) = headers
        .get(header::RANGE)
        .and_then(|range| range.to_str().ok())
    else {
        return Ok(None);
    };
    if headers
        .get(header::IF_RANGE)
        .is_some_and(|known| known != tag)
    {
        return Ok(None);
    }
    // Several ranges or another unit may be ignored.
    let Some((first, last)) = range
        .strip_prefix("bytes=")
        .and_then(|range| range.split_once('-'))
    else {
        return Ok(None);
    };
    let (first, last) = match (first.trim().parse::<u64>(), last.trim().parse::<u64>()) {
        (Ok(first), Ok(last)) if first <= last => (first, last),
        (Ok(first), Err(_)) if last.trim().is_empty() => (first, u64::MAX),
        (Err(_), Ok(tail)) if first.trim().is_empty() && tail > 0 => {
            (total.saturating_sub(tail), u64::MAX)
        }
        _ => return Ok(None),
    };
    if first >= total {
        return Err(No::OutOfRange(total));
    }
    Ok(Some((first, last.min(total - 1) - first + 1)))
}

fn content_range(text: &str) -> Option<(u64, u64, u64)> {
    let (range, size) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last, size) = (
        first.parse::<u64>().ok()?,
        last.parse::<u64>().ok()?,
        size.parse::<u64>().ok()?,
    );
    (first <= last && last < size).then_some((first, last, size))
}

/// The content of a file being sent. It fails, and the connection with it, when the file differs
/// from the response head.
struct Content {
    source: DuplexStream,
    finished: Option<oneshot::Receiver<bool>>,
    left: u64,
}

#[derive(Debug, thiserror::Error)]
#[error("the file changed while it was read")]
struct Changed;

impl HttpBody for Content {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        if self.left > 0 {
            let mut bytes = vec![0; BUFFER.min(self.left as usize)];
            let mut buffer = ReadBuf::new(&mut bytes);
            return match Pin::new(&mut self.source).poll_read(context, &mut buffer) {
                Poll::Pending => Poll::Pending,
                Poll::Ready(Err(error)) => Poll::Ready(Some(Err(error.into()))),
                Poll::Ready(Ok(())) if buffer.filled().is_empty() => {
                    Poll::Ready(Some(Err(Changed.into())))
                }
                Poll::Ready(Ok(())) => {
                    let size = buffer.filled().len();
                    bytes.truncate(size);
                    self.left -= size as u64;
                    Poll::Ready(Some(Ok(Frame::data(Bytes::from(bytes)))))
                }
            };
        }
        let Some(finished) = &mut self.finished else {
            return Poll::Ready(None);
        };
        let ended = std::task::ready!(Pin::new(finished).poll(context));
        self.finished = None;
        match ended {
            Ok(true) => Poll::Ready(None),
            _ => Poll::Ready(Some(Err(Changed.into()))),
        }
    }
}

/// A body as a stream of bytes.
struct Incoming {
    body: Body,
    rest: Bytes,
}

impl Incoming {
    fn new(body: Body) -> Incoming {
        Incoming {
            body,
            rest: Bytes::new(),
        }
    }
}

impl AsyncRead for Incoming {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.rest.is_empty() {
            let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(context));
            match frame {
                None => return Poll::Ready(Ok(())),
                Some(Err(error)) => return Poll::Ready(Err(io::Error::other(error))),
                Some(Ok(frame)) => self.rest = frame.into_data().unwrap_or_default(),
            }
        }
        let size = self.rest.len().min(buffer.remaining());
        buffer.put_slice(&self.rest.split_to(size));
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use tokio::io::AsyncReadExt;

    use super::*;

    fn range(text: &str, total: u64) -> Option<Option<(u64, u64)>> {
        let mut headers = HeaderMap::new();
        headers.insert(header::RANGE, text.parse().unwrap());
        wanted_range(&headers, &HeaderValue::from_static("\"v\""), total).ok()
    }

    #[test]
    fn parts_are_read_as_http_writes_them() {
        for (text, meant) in [
            ("bytes=0-9", Some(Some((0, 10)))),
            ("bytes=5-", Some(Some((5, 95)))),
            ("bytes=-7", Some(Some((93, 7)))),
            ("bytes=-700", Some(Some((0, 100)))),
            ("bytes=90-1000", Some(Some((90, 10)))),
            ("bytes=99-99", Some(Some((99, 1)))),
            ("bytes=100-", None),
            ("bytes=9-0", Some(None)),
            ("bytes=-0", Some(None)),
            ("bytes=0-1,5-6", Some(None)),
            ("lines=0-1", Some(None)),
            ("bytes=", Some(None)),
        ] {
            assert_eq!(range(text, 100), meant, "{text}");
        }
    }

    #[test]
    fn a_part_of_another_version_is_answered_with_the_whole() {
        let mut headers = HeaderMap::new();
        headers.insert(header::RANGE, HeaderValue::from_static("bytes=5-"));
        let tag = HeaderValue::from_static("\"new\"");
        headers.insert(header::IF_RANGE, HeaderValue::from_static("\"old\""));
        assert!(matches!(wanted_range(&headers, &tag, 10), Ok(None)));
        headers.insert(header::IF_RANGE, tag.clone());
        assert!(matches!(wanted_range(&headers, &tag, 10), Ok(Some((5, 5)))));
    }

    #[test]
    fn parts_of_uploads_are_read_strictly() {
        assert_eq!(content_range("bytes 0-9/100"), Some((0, 9, 100)));
        assert_eq!(content_range("bytes 90-99/100"), Some((90, 99, 100)));
        for bad in [
            "bytes 0-100/100",
            "bytes 9-0/100",
            "bytes 0-9/*",
            "0-9/100",
            "bytes */100",
            "bytes 0-/100",
            "",
        ] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }

    #[tokio::test]
    async fn a_body_is_read_to_its_end() {
        let mut incoming = Incoming::new(Body::from("0123456789"));
        let mut first = [0; 4];
        incoming.read_exact(&mut first).await.unwrap();
        let mut rest = String::new();
        incoming.read_to_string(&mut rest).await.unwrap();
        assert_eq!((&first, rest.as_str()), (b"0123", "456789"));
    }

    async fn sent(bytes: &'static [u8], left: u64, good: bool) -> Result<Bytes, axum::BoxError> {
        let (mut sink, source) = tokio::io::duplex(BUFFER);
        tokio::io::AsyncWriteExt::write_all(&mut sink, bytes)
            .await
            .unwrap();
        drop(sink);
        let (finish, finished) = oneshot::channel();
        finish.send(good).unwrap();
        Content {
            source,
            finished: Some(finished),
            left,
        }
        .collect()
        .await
        .map(|all| all.to_bytes())
    }

    #[tokio::test]
    async fn a_file_that_is_not_what_its_head_said_is_broken_off() {
        assert_eq!(sent(b"hello", 5, true).await.unwrap(), "hello");
        assert!(sent(b"hell", 5, true).await.is_err(), "too short");
        assert!(sent(b"hello", 5, false).await.is_err(), "another version");
    }
}
