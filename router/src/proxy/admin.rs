//! Requests that change engines: sent to every worker, since one that was left out would answer differently.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::future::join_all;
use serde::Serialize;
use tracing::info;

use super::dispatch::chain;
use super::{Inbound, Proxy};
use crate::errors::ApiError;
use crate::workers::Listing;

/// Longest wait for one worker: it may have to fetch gigabytes.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Most of a worker's answer that is passed on, in bytes. An engine says one sentence.
const ANSWER: usize = 4096;

/// What one worker made of it.
#[derive(Debug, Serialize)]
struct WorkerAnswer {
    worker: String,
    /// Its status; none if it gave no answer.
    status: Option<u16>,
    answer: String,
}

/// Sends to every worker that takes work, and answers with what each said: 200 if all of them did it, else 502.
///
/// If the request names a model, only the workers that have it are asked.
pub async fn serve(proxy: Arc<Proxy>, inbound: Inbound) -> Response {
    let model = Some(inbound.model.as_str()).filter(|model| !model.is_empty());
    let workers = proxy.workers.all_serving(model);
    if workers.is_empty() {
        return ApiError::unavailable("no_worker", "No worker takes requests at present.").into_response();
    }
    let outcomes = join_all(workers.iter().map(|listing| ask(&proxy, listing, &inbound))).await;
    let done = |outcome: &WorkerAnswer| outcome.status.is_some_and(|status| (200..300).contains(&status));
    let failed = outcomes.iter().filter(|outcome| !done(outcome)).count();
    let status = if failed == 0 { StatusCode::OK } else { StatusCode::BAD_GATEWAY };
    info!(id = %inbound.id, path = inbound.path, workers = outcomes.len(), failed, "admin request");
    (status, Json(serde_json::json!({ "workers": outcomes }))).into_response()
}

async fn ask(proxy: &Proxy, listing: &Listing, inbound: &Inbound) -> WorkerAnswer {
    let request = proxy.client.request(Method::POST, format!("{}{}", listing.endpoint, inbound.path));
    let request = request.headers(inbound.headers.clone()).body(inbound.body.clone()).timeout(TIMEOUT);
    let (status, answer) = match request.send().await {
        Ok(response) => (Some(response.status().as_u16()), beginning(response).await),
        Err(error) => (None, chain(&error)),
    };
    WorkerAnswer { worker: listing.key.to_string(), status, answer }
}

async fn beginning(mut response: reqwest::Response) -> String {
    let mut answer = Vec::new();
    while answer.len() < ANSWER
        && let Ok(Some(piece)) = response.chunk().await
    {
        answer.extend_from_slice(&piece);
    }
    answer.truncate(ANSWER);
    String::from_utf8_lossy(&answer).into_owned()
}
