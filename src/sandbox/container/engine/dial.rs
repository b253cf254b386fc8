//! An engine client that makes its own connections.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bollard::{API_DEFAULT_VERSION, BollardRequest, Docker};
use hyper::Uri;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::UnixStream;

/// A connection that is being made.
pub(super) type Dialling = Pin<Box<dyn Future<Output = io::Result<UnixStream>> + Send>>;

/// Makes a client whose connections come from `dial`, as sockets whose other end leads to the
/// engine. Nothing is dialled before the first request.
pub(super) fn client(
    dial: impl Fn() -> Dialling + Send + Sync + 'static,
    seconds: u64,
) -> Result<Docker, bollard::errors::Error> {
    let client = Client::builder(TokioExecutor::new()).build(Dialler(Arc::new(dial)));
    let transport = move |request: BollardRequest| {
        let client = client.clone();
        async move {
            client
                .request(request)
                .await
                .map_err(bollard::errors::Error::from)
        }
    };
    // The name is only for request headers and is never resolved.
    Docker::connect_with_custom_transport(
        transport,
        Some("http://engine"),
        seconds,
        API_DEFAULT_VERSION,
    )
}

#[derive(Clone)]
struct Dialler(Arc<dyn Fn() -> Dialling + Send + Sync>);

impl tower::Service<Uri> for Dialler {
    type Response = TokioIo<UnixStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<UnixStream>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let dialling = (self.0)();
        Box::pin(async move { dialling.await.map(TokioIo::new) })
    }
}
