//! The HTTP side: routes, keys, bounds.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Body as _;
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use crate::config::Config;
use crate::continuation::{Body as Object, Endpoint, Unreadable};
use crate::errors::ApiError;
use crate::paths;
use crate::proxy::unary::Kind;
use crate::proxy::{Inbound, Proxy, admin, aside, forwarded, stream, unary};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// All routes.
pub fn routes(proxy: Arc<Proxy>) -> Router {
    let api = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route(Endpoint::Chat.path(), post(|proxy, request| generate(proxy, Endpoint::Chat, request)))
        .route(Endpoint::Completions.path(), post(|proxy, request| generate(proxy, Endpoint::Completions, request)))
        .route("/v1/{*path}", any(other))
        .route("/workers", get(workers))
        .layer(from_fn_with_state(Arc::clone(&proxy), admit));
    Router::new()
        .merge(api)
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(nothing)
        .with_state(proxy)
}

/// Checks the key, and gives every request an id.
async fn admit(State(proxy): State<Arc<Proxy>>, mut request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).filter(|id| !id.is_empty() && id.len() <= 128).cloned();
    let id = given.unwrap_or_else(|| {
        HeaderValue::try_from(ulid::Ulid::generate().to_string()).expect("a ULID is letters and digits")
    });
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let keys = keys(&proxy.config, request.uri().path());
    let path = match request.uri().path() {
        path @ ("/v1/chat/completions" | "/v1/completions" | "/v1/models" | "/v1/embeddings") => path.to_owned(),
        _ => "other".to_owned(),
    };
    let mut response = if keys.is_empty() || bearer(&request).is_some_and(|key| accepted(keys, key)) {
        next.run(request).await
    } else {
        ApiError::unauthorized().into_response()
    };
    proxy.metrics.requests.with_label_values(&[path.as_str(), response.status().as_str()]).inc();
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// The keys that are good for a path; none means that no key is asked for.
fn keys<'a>(config: &'a Config, path: &str) -> &'a [String] {
    let admin = paths::ADMIN.contains(&path) && !config.admin_keys.is_empty();
    if admin { &config.admin_keys } else { &config.api_keys }
}

fn bearer(request: &Request) -> Option<&str> {
    request.headers().get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

/// Compares in a time that does not tell how much of a key was right.
fn accepted(keys: &[String], given: &str) -> bool {
    keys.iter().fold(false, |found, key| {
        let differing = key.bytes().zip(given.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b));
        found | (key.len() == given.len() && differing == 0)
    })
}

async fn generate(State(proxy): State<Arc<Proxy>>, endpoint: Endpoint, request: Request) -> Response {
    let (inbound, body) = match read(&proxy, request, endpoint.path()).await {
        Ok((inbound, Some(body))) => (inbound, body),
        Ok((_, None)) => return ApiError::invalid(None, Unreadable::NotAnObject.to_string()).into_response(),
        Err(error) => return error.into_response(),
    };
    if body.flag("stream") {
        stream::serve(proxy, endpoint, inbound, body).await
    } else {
        unary::serve(proxy, Kind::Generation, Method::POST, inbound).await
    }
}

/// What is only passed on or changes engines, and what is refused before a worker is chosen.
async fn other(State(proxy): State<Arc<Proxy>>, request: Request) -> Response {
    let method = request.method().clone();
    if let Some(path) = paths::admin(&method, request.uri().path())
        && !proxy.config.admin_keys.is_empty()
    {
        return match receive(&proxy, request, path).await {
            // A client that leaves must not leave half of the workers changed.
            Ok((inbound, _)) => match tokio::spawn(admin::serve(proxy, inbound)).await {
                Ok(response) => response,
                Err(panicked) => std::panic::resume_unwind(panicked.into_panic()),
            },
            Err(error) => error.into_response(),
        };
    }
    let Some(path) = paths::passed_on(&method, request.uri().path()) else {
        return ApiError::no_such_path(request.uri().path()).into_response();
    };
    match read(&proxy, request, &path).await {
        Ok((inbound, _)) => unary::serve(proxy, Kind::Other, method, inbound).await,
        Err(error) => error.into_response(),
    }
}

async fn nothing(State(proxy): State<Arc<Proxy>>, request: Request) -> Response {
    let response = ApiError::no_such_path(request.uri().path()).into_response();
    proxy.metrics.requests.with_label_values(&["other", response.status().as_str()]).inc();
    response
}

/// Reads a request for `path` on a worker, its model empty if it names none; and its body as an object, if it is
/// one.
async fn receive(proxy: &Proxy, request: Request, path: &str) -> Result<(Inbound, Option<Object>), ApiError> {
    let place = Arc::clone(&proxy.room).try_acquire_owned().map_err(|_| ApiError::full(proxy.config.max_requests))?;
    let (parts, body) = request.into_parts();
    let (body, held) = bounded(body, proxy).await?;
    let text = body.clone();
    let object = match aside(body.len(), move || Object::read(text)).await {
        Ok(object) => Some(object),
        Err(Unreadable::NotAnObject) => None,
        Err(error @ Unreadable::TooManyMembers) => return Err(ApiError::invalid(None, error.to_string())),
    };
    let model = match object.as_ref().and_then(|object| object.raw("model")) {
        Some(text) => name(text)?,
        None => String::new(),
    };
    let id = parts.headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).unwrap_or_default().to_owned();
    let path = parts.uri.query().map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"));
    let headers = forwarded(&parts.headers, !keys(&proxy.config, parts.uri.path()).is_empty());
    let inbound = Inbound { id, path, model, headers, body, held: Arc::new(held), place: Arc::new(place) };
    Ok((inbound, object))
}

/// A model's name. Records hold none of more than 1 KiB.
fn name(text: &str) -> Result<String, ApiError> {
    const LONGEST: usize = 8192;
    let name = (text.len() <= LONGEST).then(|| serde_json::from_str(text).ok()).flatten();
    name.ok_or_else(|| ApiError::invalid(Some("model"), "`model` must be a string, and no longer than a name is."))
}

/// Reads a request for a worker of one model.
async fn read(proxy: &Proxy, request: Request, path: &str) -> Result<(Inbound, Option<Object>), ApiError> {
    let (mut inbound, object) = receive(proxy, request, path).await?;
    if inbound.model.is_empty() {
        // With one model there is nothing to choose; engines then take the request without a name.
        match proxy.workers.models().as_slice() {
            [(only, _)] => inbound.model.clone_from(only),
            _ => return Err(ApiError::invalid(Some("model"), "Say which `model`; GET /v1/models lists them.")),
        }
    }
    if !proxy.workers.knows(&inbound.model) {
        return Err(ApiError::unknown_model(&inbound.model));
    }
    Ok((inbound, object))
}

/// Bytes that are set aside for a body before any of it has come, if it is to have so many.
const AT_FIRST: usize = 256 * 1024;
/// A client that is still sending when it is refused is listened to for so long. To it, the end of its connection
/// would be a reset, and the answer lost.
const HEAR_OUT: Duration = Duration::from_secs(5);

/// Reads a body whole, and what it takes of the room for bodies.
async fn bounded(body: Body, proxy: &Proxy) -> Result<(Bytes, OwnedSemaphorePermit), ApiError> {
    let Config { max_body, max_bodies, request_timeout, .. } = proxy.config;
    let mut body = Limited::new(body, max_body);
    let read = async move {
        let mut held = Arc::clone(&proxy.bodies).try_acquire_many_owned(0).expect("it is never closed");
        // What a client only announces gets it no room.
        let announced = usize::try_from(body.size_hint().lower()).unwrap_or_default();
        let mut whole = Vec::with_capacity(announced.min(AT_FIRST));
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| match error.is::<LengthLimitError>() {
                true => ApiError::too_large(max_body),
                false => ApiError::invalid(None, format!("The body did not come whole: {error}")),
            })?;
            let Ok(piece) = frame.into_data() else { continue };
            let more = u32::try_from(piece.len()).ok();
            let Some(more) = more.and_then(|more| Arc::clone(&proxy.bodies).try_acquire_many_owned(more).ok()) else {
                proxy.metrics.bodies_refused.inc();
                let rest = async move { while let Some(Ok(_)) = body.frame().await {} };
                tokio::spawn(tokio::time::timeout(HEAR_OUT, rest));
                return Err(ApiError::no_room(max_bodies));
            };
            held.merge(more);
            whole.extend_from_slice(&piece);
        }
        Ok((Bytes::from(whole), held))
    };
    tokio::time::timeout(request_timeout, read).await.unwrap_or_else(|_| Err(ApiError::too_slow(request_timeout)))
}

async fn models(State(proxy): State<Arc<Proxy>>) -> Response {
    let data: Vec<Value> = proxy.workers.models().into_iter().map(described).collect();
    axum::Json(json!({ "object": "list", "data": data })).into_response()
}

async fn model(State(proxy): State<Arc<Proxy>>, Path(id): Path<String>) -> Response {
    match proxy.workers.models().into_iter().find(|(name, _)| *name == id) {
        Some(model) => axum::Json(described(model)).into_response(),
        None => ApiError::unknown_model(&id).into_response(),
    }
}

fn described((id, length): (String, Option<u64>)) -> Value {
    let mut model = json!({ "id": id, "object": "model", "created": 0, "owned_by": "lastgasp" });
    if let Some(length) = length {
        model["max_model_len"] = length.into();
    }
    model
}

async fn health(State(proxy): State<Arc<Proxy>>) -> Response {
    let serving = proxy.workers.serving();
    let status = if serving == 0 { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    (status, axum::Json(json!({ "workers": serving }))).into_response()
}

/// What this router knows of its workers, for people and tests.
async fn workers(State(proxy): State<Arc<Proxy>>) -> Response {
    axum::Json(proxy.workers.view()).into_response()
}

async fn metrics(State(proxy): State<Arc<Proxy>>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, proxy.metrics.render(&proxy.workers)).into_response()
}
