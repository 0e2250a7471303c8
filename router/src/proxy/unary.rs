//! Requests whose answer comes whole, and everything that is only passed on.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use lastgasp_protocol::Mode;
use serde_json::Value;
use tracing::info;

use super::dispatch::{Declined, Tried, Upstream, chain};
use super::reason::{Leaving, Seen};
use super::{Inbound, Proxy, aside};
use crate::errors::ApiError;
use crate::workers::{Fate, Ticket};

/// Names the worker that began the answer, with --tell-clients.
const WORKER_HEADER: HeaderName = HeaderName::from_static("x-lastgasp-worker");

/// A generation's answer, or anything else's?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Read whole before it is passed on, so that it can be had elsewhere instead.
    Generation,
    /// Passed on as it comes.
    Other,
}

/// Serves a request that is not a stream that can be continued.
pub async fn serve(proxy: Arc<Proxy>, kind: Kind, method: Method, inbound: Inbound) -> Response {
    let started = Instant::now();
    let mut tried = Tried::default();
    let mut retries = 0;
    let began = tokio::time::Instant::now();
    let deadline = began + proxy.config.wait_for_worker;
    let mut answer: Option<Response> = None;
    let none = || {
        let message = format!("No worker takes requests for the model `{}` at present.", inbound.model);
        ApiError::unavailable("no_worker", message).into_response()
    };
    let response = loop {
        let deadline = if answer.is_some() { tokio::time::Instant::now() } else { deadline };
        let Some(ticket) = proxy.reserve(&inbound.model, &mut tried, false, deadline).await else {
            break answer.unwrap_or_else(none);
        };
        let listing = Arc::clone(ticket.listing());
        let sent = proxy.send(ticket, &inbound, method.clone(), &inbound.path, inbound.body.clone(), is_lost).await;
        let reason = match sent {
            Ok(upstream) if kind == Kind::Other || !upstream.response.status().is_success() => {
                break pass_on(&proxy, &inbound, upstream.ticket, upstream.response);
            }
            Ok(upstream) => match whole(&proxy, upstream).await {
                Ok(response) => break response,
                Err(reason) => reason,
            },
            Err((ticket, Declined::Status(response))) => {
                answer = Some(pass_on(&proxy, &inbound, ticket, response));
                "status".to_owned()
            }
            // It never had the request.
            Err((_, Declined::Unreachable(error))) => {
                info!(id = %inbound.id, worker = %listing.key, error, "worker not reached");
                tried.unreachable.push(listing);
                if proxy.sought_long_enough(began) {
                    break answer.unwrap_or_else(none);
                }
                continue;
            }
            Err((_, Declined::Lost(leaving, error))) => {
                info!(id = %inbound.id, worker = %listing.key, error, "worker lost");
                leaving.as_str().to_owned()
            }
        };
        info!(id = %inbound.id, worker = %listing.key, reason, "request failed before its answer began");
        tried.failed.push(listing);
        if retries == proxy.config.max_retries {
            let message = format!("The worker was lost ({reason}), and so were {retries} others before it.");
            break answer.unwrap_or_else(|| ApiError::unavailable("retries_exhausted", message).into_response());
        }
        retries += 1;
        proxy.metrics.retries.with_label_values(&[Leaving::Seen(Seen::Unary).as_str()]).inc();
    };
    info!(
        id = %inbound.id,
        path = %inbound.path,
        model = inbound.model,
        status = response.status().as_u16(),
        retries,
        ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        "request"
    );
    response
}

/// Its worker will say no more.
const fn is_lost(fate: &Fate) -> bool {
    matches!(fate, Fate::Move(Mode::Lost, _))
}

/// Reads an answer whole; says why if it is not one.
async fn whole(proxy: &Proxy, upstream: Upstream) -> Result<Response, String> {
    let Upstream { ticket, mut fate, response } = upstream;
    let head = head(proxy, &response, &ticket);
    let body = tokio::select! {
        biased;
        _ = fate.wait_for(is_lost) => return Err("lost".into()),
        body = response.bytes() => body.map_err(|error| chain(&error))?,
        leaving = proxy.silent(ticket.listing()) => return Err(leaving.as_str().into()),
    };
    let answer = body.clone();
    if let Some(reason) = aside(body.len(), move || silent_failure(&answer)).await {
        return Err(reason.into());
    }
    let mut response = head;
    *response.body_mut() = Body::from(body);
    Ok(response)
}

/// A 200 that is none: what vLLM answers while it shuts down (measured on 0.32).
fn silent_failure(body: &Bytes) -> Option<&'static str> {
    let answer: Value = serde_json::from_slice(body).ok()?;
    let choices = answer.get("choices")?.as_array()?;
    let reason = |choice: &Value| choice.get("finish_reason").and_then(Value::as_str).map(str::to_owned);
    if choices.iter().any(|choice| reason(choice).as_deref() == Some("abort")) {
        return Some("aborted");
    }
    let text = |choice: &Value| {
        let text = choice.get("text").or_else(|| choice.get("message").and_then(|message| message.get("content")));
        text.and_then(Value::as_str).is_some_and(|text| !text.is_empty())
    };
    let produced = answer.get("usage").and_then(|usage| usage.get("completion_tokens")).and_then(Value::as_u64);
    // Even an answer that is empty has the token that ended it.
    (produced == Some(0) && !choices.iter().any(text)).then_some("produced_nothing")
}

/// A worker's answer as the client's, passed on as it comes, until the worker is lost. The ticket and the
/// place among the requests under way are held until it ends.
pub(crate) fn pass_on(proxy: &Proxy, inbound: &Inbound, ticket: Ticket, response: reqwest::Response) -> Response {
    let mut answer = head(proxy, &response, &ticket);
    let fate = ticket.listing().fate();
    let held = (ticket, Arc::clone(&inbound.place));
    let body = stream::unfold((response, fate, held), async |(mut response, mut fate, held)| {
        let piece = tokio::select! {
            biased;
            piece = response.chunk() => piece.map_err(io::Error::other).transpose()?,
            _ = fate.wait_for(is_lost) => Err(io::Error::other("the worker was lost")),
        };
        Some((piece, (response, fate, held)))
    });
    *answer.body_mut() = Body::from_stream(body);
    answer
}

fn head(proxy: &Proxy, response: &reqwest::Response, ticket: &Ticket) -> Response {
    let mut answer = Response::new(Body::empty());
    *answer.status_mut() = StatusCode::from_u16(response.status().as_u16()).unwrap_or(StatusCode::BAD_GATEWAY);
    for name in [header::CONTENT_TYPE, header::RETRY_AFTER, header::CONTENT_DISPOSITION] {
        if let Some(value) = response.headers().get(&name) {
            answer.headers_mut().insert(name, value.clone());
        }
    }
    tell_worker(proxy, ticket, &mut answer);
    answer
}

/// Names the worker that answers, with --tell-clients.
pub(crate) fn tell_worker(proxy: &Proxy, ticket: &Ticket, answer: &mut Response) {
    if proxy.config.tell_clients
        && let Ok(worker) = HeaderValue::try_from(ticket.listing().key.to_string())
    {
        answer.headers_mut().insert(WORKER_HEADER, worker);
    }
}
