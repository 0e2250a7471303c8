//! `/metrics`, `/livez`, `/readyz`, and the status page.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use super::StatusHub;
use crate::metrics::Metrics;

/// What clients may have: descriptors that they hold are missing where processes are watched.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Connections at once; more wait. Who scrapes and who probes need one each.
    pub(super) connections: usize,
    /// How long one may take to ask, and stay idle.
    pub(super) head: Duration,
    /// How long one may last; a status page that is followed connects again.
    pub(super) life: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 64, head: Duration::from_secs(15), life: Duration::from_secs(3600) }
    }
}

/// Answers until it is dropped.
pub(super) async fn serve(listener: TcpListener, routes: Router, limits: Limits) {
    /// How long to wait after the system refused to accept: usually there are no descriptors left.
    const PAUSE: Duration = Duration::from_millis(100);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head);
    let room = Arc::new(Semaphore::new(limits.connections));
    loop {
        let place = Arc::clone(&room).acquire_owned().await.expect("it is never closed");
        let connection = match listener.accept().await {
            Ok((connection, _)) => connection,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to /metrics");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let serving = http.serve_connection(TokioIo::new(connection), TowerToHyperService::new(routes.clone()));
        tokio::spawn(async move {
            // Whoever is cut off connects again.
            let _ = tokio::time::timeout(limits.life, serving).await;
            drop(place);
        });
    }
}

#[derive(Clone)]
struct Shared {
    hub: StatusHub,
    metrics: Metrics,
}

/// Everything that is answered over HTTP. `page` is the address of a status page, where one is wanted.
pub(super) fn router(hub: StatusHub, metrics: Metrics, page: Option<SocketAddr>) -> Router {
    let page = page.map_or_else(Router::new, |listen| super::page::router(hub.clone(), metrics.clone(), listen));
    Router::new()
        .route("/metrics", get(metrics_text))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .with_state(Shared { hub, metrics })
        .merge(page)
}

async fn metrics_text(State(shared): State<Shared>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], shared.metrics.text())
}

/// Whether the supervisor's loop turns. A daemon that is stuck watches nothing and is better restarted.
async fn livez(State(shared): State<Shared>) -> (StatusCode, String) {
    match shared.hub.stuck_for() {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(silent) => {
            (StatusCode::SERVICE_UNAVAILABLE, format!("the supervisor has stood still for {} s\n", silent.as_secs()))
        }
    }
}

/// Whether the sensors are attached and the first scan is over. Not whether NATS is there: a daemon
/// that is restarted because NATS is down would be missing when NATS returns.
async fn readyz(State(shared): State<Shared>) -> (StatusCode, &'static str) {
    if shared.hub.status().ready {
        (StatusCode::OK, "ok\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the sensors are not attached yet\n")
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn clients_that_say_nothing_are_cut_off_and_the_next_one_is_answered() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let limits = Limits { connections: 2, head: Duration::from_millis(100), ..Limits::default() };
        tokio::spawn(serve(listener, Router::new().route("/livez", get(async || "ok")), limits));
        let mut silent = [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("ok"), "{answer}");
        for connection in &mut silent {
            assert!(!matches!(connection.read(&mut [0; 1]).await, Ok(1)));
        }
    }
}
