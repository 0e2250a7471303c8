//! The HTTP surface of the API server.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use lastgasp_tests::model::{Dialect, Endpoint, Frontend, Rejection, Request};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::core_client::{CoreClient, Submission};
use crate::health::Health;
use crate::phase::{InFlight, Phase, Phases};
use crate::wire::{Answer, DONE, Head, engine_dead, event};

/// What all handlers share.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) dialect: Dialect,
    pub(crate) stream_interval: usize,
    pub(crate) core: CoreClient,
    pub(crate) phases: Phases,
    pub(crate) health: Option<Health>,
    pub(crate) last_answer: AtomicU64,
}

type Shared = State<Arc<App>>;

pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/ping", get(health).post(health))
        .route("/version", get(version))
        .route("/load", get(load))
        .route("/metrics", get(metrics))
        .route("/mock/compile", post(compile))
        .route("/mock/health", post(set_health))
        .route("/mock/freeze", post(freeze))
        .route("/mock/hang", post(hang))
        .route("/mock/exec", post(exec))
        .with_state(app)
}

async fn completions(State(app): Shared, body: Bytes) -> Response {
    generate(app, Endpoint::Completions, &body).await
}

async fn chat(State(app): Shared, body: Bytes) -> Response {
    generate(app, Endpoint::Chat, &body).await
}

async fn generate(app: Arc<App>, endpoint: Endpoint, body: &[u8]) -> Response {
    let request = match serde_json::from_slice(body)
        .map_err(|error| Rejection { status: 400, message: error.to_string(), param: None })
        .and_then(|body| Request::parse(endpoint, &body, &app.dialect))
    {
        Ok(request) => Arc::new(request),
        Err(rejection) => return refuse(app.dialect.frontend, &rejection),
    };
    let answer = Answer::new(
        app.dialect.frontend,
        app.head(&request),
        Arc::clone(&request),
        if request.stream { app.stream_interval } else { usize::MAX },
    );
    match app.phases.now() {
        Phase::Serving => {}
        // Measured during a drain: success, and nothing in it.
        Phase::Draining | Phase::Aborting if request.stream => return sse(Body::from(DONE)),
        Phase::Draining | Phase::Aborting => return ended_at_once(answer),
        Phase::Failed => return dead(),
        Phase::Cut | Phase::Silent => return std::future::pending().await,
    }
    let in_flight = app.phases.request();
    if request.limits.iter().all(|limits| limits.max_tokens == 0) {
        return nothing_to_generate(&request, answer);
    }
    let submission = app.core.submit(&request);
    if request.stream {
        let (sender, receiver) = mpsc::channel(64);
        tokio::spawn(stream(app, answer, submission, sender, in_flight));
        sse(Body::from_stream(ReceiverStream::new(receiver)))
    } else {
        unary(&app, answer, submission).await
    }
}

/// Writes the stream of one request until it or the server ends.
async fn stream(
    app: Arc<App>,
    mut answer: Answer,
    mut submission: Submission,
    client: mpsc::Sender<Result<String, std::io::Error>>,
    _in_flight: InFlight,
) {
    let mut phase = app.phases.subscribe();
    loop {
        let chunks = tokio::select! {
            biased;
            () = client.closed() => return,
            _ = phase.changed() => {
                let phase = *phase.borrow_and_update();
                match phase {
                    Phase::Serving | Phase::Draining => continue,
                    Phase::Aborting => answer.abort(),
                    Phase::Failed => {
                        let _ = client.send(Ok(event(&engine_dead()) + DONE)).await;
                        return;
                    }
                    Phase::Cut => {
                        // An error in the body makes the server close the connection without
                        // the chunk that would end it.
                        let _ = client.send(Err(std::io::ErrorKind::BrokenPipe.into())).await;
                        return;
                    }
                    Phase::Silent => return client.closed().await,
                }
            }
            (choice, output) = submission.next() => {
                let chunks = answer.push(choice, output.token, output.finish);
                if answer.is_finished(choice) {
                    submission.end(choice);
                }
                chunks
            }
        };
        let mut text: String = chunks.iter().map(event).collect();
        if answer.is_complete() {
            text.extend(answer.usage_chunk().as_ref().map(event));
            text.push_str(DONE);
        }
        if !text.is_empty() && client.send(Ok(text)).await.is_err() {
            return;
        }
        if answer.is_complete() {
            return;
        }
    }
}

async fn unary(app: &App, mut answer: Answer, mut submission: Submission) -> Response {
    let mut phase = app.phases.subscribe();
    while !answer.is_complete() {
        tokio::select! {
            biased;
            _ = phase.changed() => {
                let phase = *phase.borrow_and_update();
                match phase {
                    Phase::Serving | Phase::Draining => {}
                    Phase::Aborting => drop(answer.abort()),
                    Phase::Failed => return dead(),
                    Phase::Cut | Phase::Silent => std::future::pending().await,
                }
            }
            (choice, output) = submission.next() => {
                answer.push(choice, output.token, output.finish);
                if answer.is_finished(choice) {
                    submission.end(choice);
                }
            }
        }
    }
    json_response(StatusCode::OK, &answer.unary())
}

fn ended_at_once(mut answer: Answer) -> Response {
    answer.end_empty();
    json_response(StatusCode::OK, &answer.unary())
}

/// `echo` with `max_tokens: 0` on the Rust frontend.
fn nothing_to_generate(request: &Request, mut answer: Answer) -> Response {
    if !request.stream {
        return ended_at_once(answer);
    }
    let mut text: String = answer.end_empty().iter().map(event).collect();
    text.extend(answer.usage_chunk().as_ref().map(event));
    text.push_str(DONE);
    sse(Body::from(text))
}

fn sse(body: Body) -> Response {
    ([(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")], body).into_response()
}

fn json_response(status: StatusCode, value: &Value) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

fn dead() -> Response {
    json_response(StatusCode::INTERNAL_SERVER_ERROR, &engine_dead())
}

fn refuse(frontend: Frontend, rejection: &Rejection) -> Response {
    let status = StatusCode::from_u16(rejection.status).unwrap_or(StatusCode::BAD_REQUEST);
    let (kind, code) = match (frontend, status) {
        (Frontend::Python, StatusCode::NOT_FOUND) => ("NotFoundError", json!(404)),
        (Frontend::Python, _) => ("BadRequestError", json!(rejection.status)),
        (Frontend::Rust, StatusCode::NOT_FOUND) => ("invalid_request_error", json!("model_not_found")),
        (Frontend::Rust, _) => ("invalid_request_error", json!("invalid_request_error")),
    };
    json_response(
        status,
        &json!({"error": {
            "message": rejection.message, "type": kind, "param": rejection.param, "code": code
        }}),
    )
}

async fn models(State(app): Shared) -> Response {
    let model = &app.dialect.model;
    let mut entry = json!({
        "id": model, "object": "model", "created": now(), "owned_by": "vllm",
        "root": format!("./{model}"), "parent": null, "max_model_len": app.dialect.max_model_len
    });
    match app.dialect.frontend {
        Frontend::Python => {
            entry["permission"] = json!([{
                "id": format!("modelperm-{:016x}", now()), "object": "model_permission", "created": now(),
                "allow_create_engine": false, "allow_sampling": true, "allow_logprobs": true,
                "allow_search_indices": false, "allow_view": true, "allow_fine_tuning": false,
                "organization": "*", "group": null, "is_blocking": false
            }]);
        }
        Frontend::Rust => entry["owned_by"] = json!("vllm-frontend-rs"),
    }
    json_response(StatusCode::OK, &json!({"object": "list", "data": [entry]}))
}

async fn health(State(app): Shared) -> Response {
    match app.phases.now() {
        Phase::Failed => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        Phase::Silent => std::future::pending().await,
        _ => StatusCode::OK.into_response(),
    }
}

async fn version(State(app): Shared) -> Response {
    json_response(
        StatusCode::OK,
        &match app.dialect.frontend {
            Frontend::Python => json!({"version": "0.32.0"}),
            Frontend::Rust => json!({"version": "0.32.0", "rust_frontend_version": "0.32.0"}),
        },
    )
}

async fn load(State(app): Shared) -> Response {
    let load = json!({"server_load": app.phases.in_flight()});
    json_response(StatusCode::OK, &load)
}

async fn metrics(State(app): Shared) -> String {
    let model = &app.dialect.model;
    format!(
        "# TYPE vllm:num_requests_running gauge\n\
         vllm:num_requests_running{{engine=\"0\",model_name=\"{model}\"}} {}\n\
         # TYPE vllm:generation_tokens_total counter\n\
         vllm:generation_tokens_total{{engine=\"0\",model_name=\"{model}\"}} {}\n",
        app.core.running(),
        app.core.generated(),
    )
}

#[derive(Debug, Deserialize)]
struct CompileQuery {
    #[serde(default = "short")]
    ms: u64,
}

fn short() -> u64 {
    20
}

async fn exec() -> Response {
    use std::os::unix::process::CommandExt as _;
    let error = std::process::Command::new("sleep").arg("3600").exec();
    (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response()
}

async fn compile(State(app): Shared, Query(query): Query<CompileQuery>) -> Response {
    match app.core.compile(query.ms).await {
        Some(pid) => json_response(StatusCode::OK, &json!({"pid": pid})),
        None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum HealthStatus {
    Serving,
    NotServing,
}

#[derive(Debug, Deserialize)]
struct HealthQuery {
    status: HealthStatus,
    /// Only this service; all of them otherwise.
    service: Option<String>,
}

async fn set_health(State(app): Shared, Query(query): Query<HealthQuery>) -> Response {
    let Some(health) = &app.health else {
        return (StatusCode::CONFLICT, "started without --grpc-port\n").into_response();
    };
    let serving = matches!(query.status, HealthStatus::Serving);
    match query.service {
        Some(service) => health.set_service(&service, serving).await,
        None => health.set(serving).await,
    }
    StatusCode::NO_CONTENT.into_response()
}

#[derive(Debug, Deserialize)]
struct FreezeQuery {
    grpc: bool,
}

async fn freeze(State(app): Shared, Query(query): Query<FreezeQuery>) -> Response {
    let Some(health) = &app.health else {
        return (StatusCode::CONFLICT, "started without --grpc-port\n").into_response();
    };
    health.freeze(query.grpc);
    StatusCode::NO_CONTENT.into_response()
}

#[derive(Debug, Deserialize)]
struct HangQuery {
    on: bool,
}

async fn hang(State(app): Shared, Query(query): Query<HangQuery>) -> Result<StatusCode, Infallible> {
    app.core.hang(query.on);
    Ok(StatusCode::NO_CONTENT)
}

impl App {
    /// Ids have 16 hexadecimal digits from the Python frontend and 8 from the Rust frontend.
    fn head(&self, request: &Request) -> Head {
        let prefix = match request.endpoint {
            Endpoint::Completions => "cmpl",
            Endpoint::Chat => "chatcmpl",
        };
        let number = self.last_answer.fetch_add(1, Ordering::Relaxed) + 1;
        let unique = (u64::from(std::process::id()) << 40 | number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
        let unique = match (&request.request_id, self.dialect.frontend) {
            (Some(id), _) => id.clone(),
            (None, Frontend::Python) => format!("{unique:016x}"),
            (None, Frontend::Rust) => format!("{:08x}", unique >> 32),
        };
        Head { id: format!("{prefix}-{unique}"), created: now(), model: self.dialect.model.clone() }
    }
}

fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}
