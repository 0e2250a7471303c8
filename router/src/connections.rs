//! Connections of clients, and how much of the router one of them may have.
//!
//! A client that sends its request a byte at a time, opens thousands of connections, or never reads
//! its answer costs the others nothing.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tracing::{debug, warn};

/// Most headers of a request. A browser sends about 20.
pub const MAX_HEADERS: usize = 100;
/// Most bytes of a request's head.
pub const MAX_HEAD: usize = 64 * 1024;
/// How long a client may leave what it was sent unacknowledged, or its window shut.
pub const UNREAD: Duration = Duration::from_secs(120);

/// What clients together, and each of them, may have.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at once; more wait in the kernel's queue.
    pub connections: usize,
    /// How long a client may take to send the head of a request, idle time before it included.
    pub head: Duration,
}

/// Prepares a connection that was accepted. It is ended when the client has left what it was sent for
/// so long ([`UNREAD`]).
pub fn tune(connection: &TcpStream, unread: Duration) {
    // A token is smaller than a segment and must not wait for the next one.
    if let Err(error) = connection.set_nodelay(true) {
        warn!(%error, "TCP_NODELAY");
    }
    // tcp(7). Since Linux 5.11 it ends a connection also whose window stays shut.
    if let Err(error) = SockRef::from(connection).set_tcp_user_timeout(Some(unread)) {
        warn!(%error, "TCP_USER_TIMEOUT");
    }
}

/// Answers requests until told to stop; those that are under way then go on to their ends.
pub async fn serve<L: Listener>(mut listener: L, routes: Router, limits: Limits, mut stopped: watch::Receiver<bool>) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head).max_headers(MAX_HEADERS).max_buf_size(MAX_HEAD);
    // A chunk of a stream is some hundred bytes: to copy it behind its length costs less than to hand three
    // pieces to the kernel.
    http.writev(false);
    let room = Arc::new(Semaphore::new(limits.connections));
    let graceful = GracefulShutdown::new();
    loop {
        let accept = async {
            let place = Arc::clone(&room).acquire_owned().await.expect("it is never closed");
            (listener.accept().await.0, place)
        };
        let (connection, place) = tokio::select! {
            accepted = accept => accepted,
            _ = stopped.wait_for(|stop| *stop) => break,
        };
        let service = TowerToHyperService::new(routes.clone());
        let serving = graceful.watch(http.serve_connection(TokioIo::new(connection), service));
        tokio::spawn(async move {
            if let Err(error) = serving.await {
                debug!(%error, "a connection ended");
            }
            drop(place);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}
