//! Connections to a health address, from the daemon's network namespace or from an engine's own.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::http::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tower_service::Service;

use super::Namespace;
use super::namespace::socket;

/// Connects over TCP. A clone connects to the same place.
#[derive(Debug, Clone, Default)]
pub(crate) struct Dialer {
    namespace: Option<Namespace>,
}

impl Dialer {
    /// From within that namespace; without one from the daemon's own.
    #[must_use]
    pub(crate) const fn from(namespace: Option<Namespace>) -> Self {
        Self { namespace }
    }

    async fn connect(self, uri: Uri) -> io::Result<TokioIo<TcpStream>> {
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let port = uri.port_u16().unwrap_or(80);
        let mut refused = io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address"));
        for address in tokio::net::lookup_host((host, port)).await? {
            match self.connect_to(address).await {
                Ok(stream) => return Ok(TokioIo::new(stream)),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    async fn connect_to(&self, address: SocketAddr) -> io::Result<TcpStream> {
        let socket = match &self.namespace {
            Some(namespace) => namespace.socket(address).await?,
            None => socket(address)?,
        };
        let stream = socket.connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

impl Service<Uri> for Dialer {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}
