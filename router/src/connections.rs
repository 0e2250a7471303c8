//! Connections of clients, and how much of the router one of them may have.
//!
//! A client that sends its request a byte at a time, opens thousands of connections, or never reads
//! its answer costs the others nothing.

use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::{debug, warn};

use crate::threads::Threads;

/// Most headers of a request. A browser sends about 20.
pub const MAX_HEADERS: usize = 100;
/// Most bytes of a request's head.
pub const MAX_HEAD: usize = 64 * 1024;
/// How long to wait after the system refused to accept: usually it has no more file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// What clients together, and each of them, may have.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at once; more wait in the kernel's queue.
    pub connections: usize,
    /// How long a client may take to send the head of a request, idle time before it included.
    pub head: Duration,
    /// How long a client may take to shake hands for TLS.
    pub handshake: Duration,
    /// How long a client may leave what it was sent unacknowledged, or its window shut; then its connection
    /// is ended.
    pub unread: Duration,
}

/// [`Limits::handshake`] of a router that serves people.
pub const HANDSHAKE: Duration = Duration::from_secs(10);
/// [`Limits::unread`] of a router that serves people.
pub const UNREAD: Duration = Duration::from_secs(120);

/// Prepares a connection that was accepted.
fn tune(connection: &TcpStream, unread: Duration) {
    // A token is smaller than a segment and must not wait for the next one.
    if let Err(error) = connection.set_nodelay(true) {
        warn!(%error, "cannot set TCP_NODELAY");
    }
    // tcp(7). Since Linux 5.11 it ends a connection also whose window stays shut.
    if let Err(error) = SockRef::from(connection).set_tcp_user_timeout(Some(unread)) {
        warn!(%error, "cannot set TCP_USER_TIMEOUT");
    }
}

/// Answers requests on `threads`, over TLS where there is an acceptor, until asked to stop; those that are
/// under way then go on to their ends.
pub async fn serve(
    listener: TcpListener,
    acceptor: Option<TlsAcceptor>,
    threads: Threads<Router>,
    limits: Limits,
    mut stopped: watch::Receiver<bool>,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head).max_headers(MAX_HEADERS).max_buf_size(MAX_HEAD);
    // A chunk of a stream is some hundred bytes: to copy it behind its length costs less than to hand three
    // pieces to the kernel.
    http.writev(false);
    let room = Arc::new(Semaphore::new(limits.connections));
    let graceful = GracefulShutdown::new();
    let mut accepting = true;
    loop {
        let accept = async {
            let place = Arc::clone(&room).acquire_owned().await.expect("it is never closed");
            // The runtime of the thread that is to have it must watch it.
            (listener.accept().await.and_then(|(connection, _)| connection.into_std()), place)
        };
        let (accepted, place) = tokio::select! {
            accepted = accept => accepted,
            _ = stopped.wait_for(|stop| *stop) => break,
        };
        let connection = match accepted {
            Ok(connection) => connection,
            // The client has left before it was its turn (accept(2)).
            Err(error) if matches!(error.kind(), ConnectionAborted | ConnectionReset | ConnectionRefused) => continue,
            Err(error) => {
                if std::mem::take(&mut accepting) {
                    warn!(%error, "cannot accept a connection: the router waits until it has room");
                }
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        accepting = true;
        let (http, acceptor, watcher, stopped) = (http.clone(), acceptor.clone(), graceful.watcher(), stopped.clone());
        threads.spawn(async move |routes| {
            let _place = place;
            let connection = match TcpStream::from_std(connection) {
                Ok(connection) => connection,
                Err(error) => return warn!(%error, "cannot watch a connection"),
            };
            tune(&connection, limits.unread);
            let service = TowerToHyperService::new(routes);
            let served = match acceptor {
                None => watcher.watch(http.serve_connection(TokioIo::new(connection), service)).await,
                Some(acceptor) => {
                    let Some(secured) = shake(connection, &acceptor, limits.handshake, stopped).await else { return };
                    watcher.watch(http.serve_connection(TokioIo::new(secured), service)).await
                }
            };
            if let Err(error) = served {
                debug!(%error, "connection ended");
            }
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

/// A connection secured by TLS; none if the client does not shake hands in time, or everything ends before: it
/// has not asked for anything yet.
async fn shake(
    connection: TcpStream,
    acceptor: &TlsAcceptor,
    within: Duration,
    mut stopped: watch::Receiver<bool>,
) -> Option<TlsStream<TcpStream>> {
    let shaken = tokio::select! {
        shaken = tokio::time::timeout(within, acceptor.accept(connection)) => shaken,
        _ = stopped.wait_for(|stop| *stop) => return None,
    };
    match shaken {
        Ok(Ok(secured)) => return Some(secured),
        Ok(Err(error)) => debug!(%error, "TLS handshake failed"),
        Err(_) => debug!("TLS handshake timed out"),
    }
    None
}
