//! A router and workers in this process, over real HTTP.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use lastgasp_protocol::{
    Action, Cause, CauseKind, Incarnation, MigrateSignal, Mode, Name, SCHEMA, WorkerRecord, WorkerRef,
};
use lastgasp_router::config::Config;
use lastgasp_router::continuation::Endpoint;
use lastgasp_router::proxy::Proxy;
use lastgasp_router::workers::{Listing, Workers};
use lastgasp_router::{introspect, server};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use super::{CONTEXT, Client, Fake, Frontend};

/// What a worker does with a generation.
#[derive(Debug, Clone, Copy)]
pub enum Behaviour {
    Well,
    /// Sends so many events, then the connection breaks.
    Breaks(usize),
    /// Sends so many events, then nothing.
    Hangs(usize),
    /// Sends one event at each call of [`Worker::step`].
    Paced,
    /// Answers with this status.
    Says(u16),
    /// `finish_reason: "abort"`, with status 200.
    Aborts,
}

/// A worker in this process.
pub struct Worker {
    pub name: &'static str,
    pub endpoint: String,
    pub seen: Arc<Seen>,
    pub steps: watch::Sender<usize>,
    accepts: AbortHandle,
}

pub struct Seen {
    pub behaviour: Behaviour,
    pub fake: Fake,
    pub requests: Mutex<Vec<(String, HeaderMap, Value)>>,
    /// Answers that were dropped before their end.
    pub dropped: watch::Sender<usize>,
    pub steps: watch::Receiver<usize>,
    pub asked: watch::Sender<usize>,
    /// Probes that came.
    pub probed: watch::Sender<usize>,
    pub ill: AtomicBool,
    /// Its events have numbers, in `id:`.
    pub numbers: AtomicBool,
}

pub const FAKE: Fake = Fake { frontend: Frontend::Python, interval: 1, salt: 7, ids: true };

impl Worker {
    pub async fn start(name: &'static str, behaviour: Behaviour) -> Self {
        let (steps, stepped) = watch::channel(0);
        let seen = Arc::new(Seen {
            behaviour,
            fake: FAKE,
            requests: Mutex::default(),
            dropped: watch::Sender::new(0),
            steps: stepped,
            asked: watch::Sender::new(0),
            probed: watch::Sender::new(0),
            ill: AtomicBool::new(false),
            numbers: AtomicBool::new(false),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let app = Router::new().fallback(answer).with_state(Arc::clone(&seen));
        let accepts = tokio::spawn(async move { axum::serve(listener, app).await }).abort_handle();
        Self { name, endpoint, seen, steps, accepts }
    }

    pub fn requests(&self) -> Vec<Value> {
        self.seen.requests.lock().unwrap().iter().map(|(_, _, body)| body.clone()).collect()
    }

    pub async fn asked(&self, times: usize) {
        self.seen.asked.subscribe().wait_for(|asked| *asked >= times).await.unwrap();
    }

    pub async fn dropped(&self, times: usize) {
        self.seen.dropped.subscribe().wait_for(|dropped| *dropped >= times).await.unwrap();
    }

    pub async fn probed(&self, times: usize) {
        self.seen.probed.subscribe().wait_for(|probed| *probed >= times).await.unwrap();
    }

    /// Takes no more connections. Streams under way stay open, as when a machine loses its power.
    pub fn vanish(&self) {
        self.accepts.abort();
    }

    pub fn make_ill(&self) {
        self.seen.ill.store(true, Ordering::Relaxed);
    }

    pub fn number_events(&self) {
        self.seen.numbers.store(true, Ordering::Relaxed);
    }

    pub fn step(&self, events: usize) {
        self.steps.send_modify(|steps| *steps += events);
    }
}

/// Tells when an answer is let go before its end.
struct Watched(Arc<Seen>, bool);

impl Drop for Watched {
    fn drop(&mut self) {
        if !self.1 {
            self.0.dropped.send_modify(|dropped| *dropped += 1);
        }
    }
}

async fn answer(State(seen): State<Arc<Seen>>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let path = uri.path().to_owned();
    if path == "/health" {
        seen.probed.send_modify(|probed| *probed += 1);
    }
    match path.as_str() {
        "/health" if seen.ill.load(Ordering::Relaxed) => return StatusCode::SERVICE_UNAVAILABLE.into_response(),
        "/health" => return "ok".into_response(),
        "/v1/models" => {
            return axum::Json(json!({ "data": [{ "id": "m", "max_model_len": CONTEXT }] })).into_response();
        }
        _ => {}
    }
    let request: Value = serde_json::from_slice(&body).unwrap_or_default();
    seen.requests.lock().unwrap().push((path.clone(), headers, request.clone()));
    seen.asked.send_modify(|asked| *asked += 1);
    if let Behaviour::Says(status) = seen.behaviour {
        let status = StatusCode::from_u16(status).unwrap();
        return (status, axum::Json(json!({ "error": { "message": "no", "code": status.as_u16() } }))).into_response();
    }
    let Some(endpoint) = Endpoint::of_path(&path) else {
        return axum::Json(json!({ "object": "list", "path": path, "echo": request })).into_response();
    };
    if request["stream"] != true {
        let reason = if matches!(seen.behaviour, Behaviour::Aborts) { "abort" } else { "stop" };
        let choice = json!({ "index": 0, "text": "hello", "finish_reason": reason });
        return axum::Json(json!({ "choices": [choice], "usage": { "completion_tokens": 1 } })).into_response();
    }
    let events = seen.fake.answer(endpoint, &request).unwrap();
    let (sender, body) = mpsc::channel::<Result<String, std::io::Error>>(1);
    tokio::spawn(async move {
        let mut watched = Watched(Arc::clone(&seen), false);
        let mut steps = seen.steps.clone();
        for (at, event) in events.into_iter().enumerate() {
            match seen.behaviour {
                Behaviour::Breaks(after) if at == after => {
                    watched.1 = true;
                    _ = sender.send(Err(std::io::Error::other("killed"))).await;
                    return;
                }
                Behaviour::Hangs(after) if at == after => return sender.closed().await,
                Behaviour::Paced => {
                    tokio::select! {
                        () = sender.closed() => return,
                        _ = steps.wait_for(|steps| *steps > at) => {}
                    }
                }
                _ => {}
            }
            let numbers = seen.numbers.load(Ordering::Relaxed);
            let event = if numbers { format!("id: {at}\n{event}") } else { event };
            if sender.send(Ok(event)).await.is_err() {
                return;
            }
        }
        watched.1 = true;
    });
    Response::builder()
        .header("content-type", "text/event-stream")
        .body(Body::from_stream(tokio_stream::wrappers::ReceiverStream::new(body)))
        .unwrap()
}

/// A router before some workers.
pub struct Story {
    pub workers: Arc<Workers>,
    pub proxy: Arc<Proxy>,
    pub url: String,
    pub client: reqwest::Client,
    pub revision: AtomicUsize,
}

impl Story {
    pub async fn start(config: Config, workers: &[&Worker]) -> Self {
        let (set, arrivals) = Workers::new();
        let proxy = Proxy::new(Arc::clone(&set), config).unwrap();
        tokio::spawn(introspect::run(arrivals, proxy.client.clone()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let app = server::routes(Arc::clone(&proxy));
        tokio::spawn(async move { axum::serve(listener, app).await });
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let story = Self { workers: set, proxy, url, client, revision: AtomicUsize::new(0) };
        for worker in workers {
            story.list(worker.name, &worker.endpoint);
        }
        story
    }

    pub fn list(&self, name: &str, endpoint: &str) {
        self.put("n", name, endpoint, "none");
    }

    /// Lists a worker that depends on its node's lease.
    pub fn list_leased(&self, node: &str, name: &str, endpoint: &str) {
        self.put(node, name, endpoint, "node");
    }

    fn put(&self, node: &str, name: &str, endpoint: &str, lease: &str) {
        let record = json!({
            "schema": 1, "node": node, "worker": name, "incarnation": "1", "epoch": 1,
            "engine": "vllm", "models": ["m"], "endpoint": endpoint, "lease": lease,
        });
        let record = WorkerRecord::parse(&format!("{node}.{name}"), record.to_string().as_bytes()).unwrap();
        self.workers.put(&record, self.revision.fetch_add(1, Ordering::Relaxed) as u64 + 1);
    }

    pub fn signal(&self, mode: Mode, names: &[&str]) -> Vec<Arc<Listing>> {
        let worker = |name: &&str| WorkerRef {
            worker: Name::new(*name).unwrap(),
            incarnation: Incarnation::new("1").unwrap(),
            epoch: 1,
            revision: 0,
        };
        let signal = MigrateSignal {
            schema: SCHEMA,
            node: Name::new("n").unwrap(),
            action: Action::Move,
            mode: Some(mode),
            certificate: "01K".into(),
            workers: names.iter().map(worker).collect(),
            cause: Cause::of(CauseKind::ProcessKilled),
        };
        self.workers.signal(&signal).0
    }

    pub async fn post(&self, path: &str, body: &Value) -> reqwest::Response {
        self.client.post(format!("{}{path}", self.url)).json(body).send().await.unwrap()
    }

    /// A whole stream.
    pub async fn stream(&self, path: &str, body: &Value) -> (Client, String) {
        read(self.post(path, body).await).await
    }

    pub fn metric(&self, line: &str) -> bool {
        self.proxy.metrics.render(&self.workers).lines().any(|have| have == line)
    }
}
/// A stream of which the client has read some text.
pub struct Begun {
    pub response: reqwest::Response,
    pub bytes: Vec<u8>,
}

impl Begun {
    pub async fn after(mut response: reqwest::Response) -> Self {
        let mut bytes = Vec::new();
        while Client::read(&bytes).text.is_empty() {
            bytes.extend(response.chunk().await.unwrap().expect("more is to come"));
        }
        Self { response, bytes }
    }

    pub async fn rest(mut self) -> Client {
        while let Some(piece) = self.response.chunk().await.unwrap() {
            self.bytes.extend(piece);
        }
        Client::read(&self.bytes)
    }
}

pub async fn read(response: reqwest::Response) -> (Client, String) {
    assert_eq!(response.status(), StatusCode::OK);
    let bytes = response.bytes().await.unwrap();
    (Client::read(&bytes), String::from_utf8(bytes.to_vec()).unwrap())
}
