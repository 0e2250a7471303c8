//! `/metrics`, `/livez`, `/readyz`, and the status page.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;

use super::StatusHub;
use crate::metrics::Metrics;

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
