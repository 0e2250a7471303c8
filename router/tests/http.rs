//! Stories over real HTTP: a router, workers in this process, and clients. No NATS: the worker set is told directly.
#![forbid(unsafe_code)]

mod fake;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use fake::{CONTEXT, Client, Fake, Frontend};
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

/// What a worker does with a generation.
#[derive(Debug, Clone, Copy)]
enum Behaviour {
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
struct Worker {
    name: &'static str,
    endpoint: String,
    seen: Arc<Seen>,
    steps: watch::Sender<usize>,
}

struct Seen {
    behaviour: Behaviour,
    fake: Fake,
    requests: Mutex<Vec<(String, HeaderMap, Value)>>,
    /// Answers that were dropped before their end.
    dropped: watch::Sender<usize>,
    steps: watch::Receiver<usize>,
    asked: watch::Sender<usize>,
    ill: AtomicBool,
}

const FAKE: Fake = Fake { frontend: Frontend::Python, interval: 1, salt: 7, ids: true };

impl Worker {
    async fn start(name: &'static str, behaviour: Behaviour) -> Self {
        let (steps, stepped) = watch::channel(0);
        let seen = Arc::new(Seen {
            behaviour,
            fake: FAKE,
            requests: Mutex::default(),
            dropped: watch::Sender::new(0),
            steps: stepped,
            asked: watch::Sender::new(0),
            ill: AtomicBool::new(false),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let app = Router::new().fallback(answer).with_state(Arc::clone(&seen));
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { name, endpoint, seen, steps }
    }

    fn requests(&self) -> Vec<Value> {
        self.seen.requests.lock().unwrap().iter().map(|(_, _, body)| body.clone()).collect()
    }

    async fn asked(&self, times: usize) {
        self.seen.asked.subscribe().wait_for(|asked| *asked >= times).await.unwrap();
    }

    async fn dropped(&self, times: usize) {
        self.seen.dropped.subscribe().wait_for(|dropped| *dropped >= times).await.unwrap();
    }

    fn make_ill(&self) {
        self.seen.ill.store(true, Ordering::Relaxed);
    }

    fn step(&self, events: usize) {
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
struct Story {
    workers: Arc<Workers>,
    proxy: Arc<Proxy>,
    url: String,
    client: reqwest::Client,
    revision: AtomicUsize,
}

impl Story {
    async fn start(config: Config, workers: &[&Worker]) -> Self {
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

    fn list(&self, name: &str, endpoint: &str) {
        let record = json!({
            "schema": 1, "node": "n", "worker": name, "incarnation": "1", "epoch": 1,
            "engine": "vllm", "models": ["m"], "endpoint": endpoint,
        });
        let record = WorkerRecord::parse(&format!("n.{name}"), record.to_string().as_bytes()).unwrap();
        self.workers.put(&record, self.revision.fetch_add(1, Ordering::Relaxed) as u64 + 1);
    }

    fn signal(&self, mode: Mode, names: &[&str]) -> Vec<Arc<Listing>> {
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

    async fn post(&self, path: &str, body: &Value) -> reqwest::Response {
        self.client.post(format!("{}{path}", self.url)).json(body).send().await.unwrap()
    }

    /// A whole stream.
    async fn stream(&self, path: &str, body: &Value) -> (Client, String) {
        read(self.post(path, body).await).await
    }

    fn metric(&self, line: &str) -> bool {
        self.proxy.metrics.render(&self.workers).lines().any(|have| have == line)
    }
}

/// A stream of which the client has read some text.
struct Begun {
    response: reqwest::Response,
    bytes: Vec<u8>,
}

impl Begun {
    async fn after(mut response: reqwest::Response) -> Self {
        let mut bytes = Vec::new();
        while Client::read(&bytes).text.is_empty() {
            bytes.extend(response.chunk().await.unwrap().expect("more is to come"));
        }
        Self { response, bytes }
    }

    async fn rest(mut self) -> Client {
        while let Some(piece) = self.response.chunk().await.unwrap() {
            self.bytes.extend(piece);
        }
        Client::read(&self.bytes)
    }
}

async fn read(response: reqwest::Response) -> (Client, String) {
    assert_eq!(response.status(), StatusCode::OK);
    let bytes = response.bytes().await.unwrap();
    (Client::read(&bytes), String::from_utf8(bytes.to_vec()).unwrap())
}

fn moving() -> Config {
    Config { migration_limit: 2, wait_for_worker: Duration::from_secs(20), ..Config::default() }
}

fn completion() -> Value {
    json!({ "model": "m", "prompt": "Hi", "stream": true, "max_tokens": 30, "stream_options": { "include_usage": true } })
}

fn chat() -> Value {
    json!({ "model": "m", "messages": [{ "role": "user", "content": "Hi" }], "stream": true })
}

fn direct(path: &str, body: &Value) -> Client {
    let mut client = Client::read(FAKE.answer(Endpoint::of_path(path).unwrap(), body).unwrap().concat().as_bytes());
    client.names.clear();
    client
}

fn same(mut moved: Client, path: &str, body: &Value) {
    assert_eq!(moved.names.len(), 1, "{:?}", moved.names);
    moved.names.clear();
    assert_eq!(moved, direct(path, body));
}

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_stream_whose_connection_breaks_goes_on_elsewhere() {
    for (path, body) in [(COMPLETIONS, completion()), (CHAT, chat())] {
        let dying = Worker::start("a", Behaviour::Breaks(6)).await;
        let story = Story::start(moving(), &[&dying]).await;
        let response = story.post(path, &body).await;
        assert_eq!(response.headers()["x-lastgasp-worker"], "n/a");
        let well = Worker::start("b", Behaviour::Well).await;
        story.list("b", &well.endpoint);
        let (client, text) = read(response).await;
        assert!(text.contains(": lastgasp moved n/a -> n/b\n\n"), "{text}");
        same(client, path, &body);
        assert!(
            story.metric(r#"lastgasp_router_migrations_total{exactness="exact",reason="connection_broken"} 1"#),
            "{}",
            story.proxy.metrics.render(&story.workers)
        );
    }
}

#[tokio::test]
async fn a_signal_moves_a_silent_stream_at_once_and_closes_the_old_one_first() {
    let hung = Worker::start("a", Behaviour::Hangs(5)).await;
    let story = Story::start(moving(), &[&hung]).await;
    let begun = Begun::after(story.post(COMPLETIONS, &completion()).await).await;
    let well = Worker::start("b", Behaviour::Well).await;
    story.list("b", &well.endpoint);
    story.signal(Mode::Lost, &["a"]);
    hung.dropped(1).await;
    same(begun.rest().await, COMPLETIONS, &completion());
    let continued = &well.requests()[0];
    assert!(continued["prompt"].is_array(), "{continued}");
}

#[tokio::test]
async fn a_deleted_record_moves_streams_as_well() {
    let hung = Worker::start("a", Behaviour::Hangs(5)).await;
    let well = Worker::start("b", Behaviour::Well).await;
    let story = Story::start(moving(), &[&hung]).await;
    let begun = Begun::after(story.post(CHAT, &chat()).await).await;
    story.list("b", &well.endpoint);
    story.workers.deleted("n.a", 99);
    same(begun.rest().await, CHAT, &chat());
}

#[tokio::test]
async fn at_a_handover_what_cannot_be_moved_stays_to_its_end() {
    let leaving = Worker::start("a", Behaviour::Paced).await;
    let story = Story::start(moving(), &[&leaving]).await;
    let mut body = completion();
    body["guided_regex"] = "x".into();
    leaving.step(6);
    let begun = Begun::after(story.post(COMPLETIONS, &body).await).await;
    let well = Worker::start("b", Behaviour::Well).await;
    story.list("b", &well.endpoint);
    story.signal(Mode::Handover, &["a"]);
    leaving.step(1000);
    same(begun.rest().await, COMPLETIONS, &body);
    assert!(well.requests().is_empty());
}

#[tokio::test]
async fn when_the_worker_is_lost_what_cannot_be_moved_ends_visibly() {
    let hung = Worker::start("a", Behaviour::Hangs(4)).await;
    let story = Story::start(moving(), &[&hung]).await;
    let mut body = completion();
    body["response_format"] = json!({ "type": "json_object" });
    let begun = Begun::after(story.post(COMPLETIONS, &body).await).await;
    story.signal(Mode::Handover, &["a"]);
    story.signal(Mode::Lost, &["a"]);
    let client = begun.rest().await;
    assert_eq!(client.ended().unwrap_err()["code"], "guided_decoding");
    assert!(story.metric(r#"lastgasp_router_migrations_failed_total{reason="guided_decoding"} 1"#));
}

#[tokio::test]
async fn nothing_is_added_and_nothing_is_moved_with_migration_off() {
    let dying = Worker::start("a", Behaviour::Breaks(6)).await;
    let story = Story::start(Config::default(), &[&dying]).await;
    let (client, _) = story.stream(COMPLETIONS, &completion()).await;
    assert_eq!(client.ended().unwrap_err()["code"], "migration_off");
    assert_eq!(dying.requests(), [completion()]);
}

#[tokio::test]
async fn a_worker_that_dies_before_a_byte_does_not_use_up_the_limit() {
    let dying = Worker::start("a", Behaviour::Breaks(6)).await;
    let story = Story::start(Config { migration_limit: 1, ..moving() }, &[&dying]).await;
    let response = story.post(COMPLETIONS, &completion()).await;
    let stillborn = Worker::start("b", Behaviour::Breaks(0)).await;
    story.list("b", &stillborn.endpoint);
    stillborn.asked(1).await;
    let well = Worker::start("c", Behaviour::Well).await;
    story.list("c", &well.endpoint);
    let (client, _) = read(response).await;
    same(client, COMPLETIONS, &completion());
}

#[tokio::test]
async fn the_limit_is_kept_and_its_end_is_visible() {
    let first = Worker::start("a", Behaviour::Breaks(4)).await;
    let second = Worker::start("b", Behaviour::Breaks(4)).await;
    let story = Story::start(Config { migration_limit: 1, ..moving() }, &[&first, &second]).await;
    let (client, _) = story.stream(COMPLETIONS, &completion()).await;
    assert_eq!(client.ended().unwrap_err()["code"], "limit_reached");
}

#[tokio::test]
async fn three_deaths_in_a_row_leave_no_seam() {
    let workers = [
        Worker::start("a", Behaviour::Breaks(5)).await,
        Worker::start("b", Behaviour::Breaks(5)).await,
        Worker::start("c", Behaviour::Breaks(5)).await,
    ];
    let well = Worker::start("d", Behaviour::Well).await;
    let story = Story::start(Config { migration_limit: 3, ..moving() }, &workers.each_ref()).await;
    let response = story.post(CHAT, &chat()).await;
    for worker in &workers {
        worker.asked(1).await;
    }
    story.list("d", &well.endpoint);
    let (client, _) = read(response).await;
    same(client, CHAT, &chat());
}

#[tokio::test]
async fn before_the_first_token_the_request_is_sent_elsewhere() {
    for behaviour in [Behaviour::Says(503), Behaviour::Breaks(0)] {
        let bad = Worker::start("a", behaviour).await;
        let story = Story::start(moving(), &[&bad]).await;
        let (body, asked) = (chat(), bad.asked(1));
        let answer = story.post(CHAT, &body);
        let well = Worker::start("b", Behaviour::Well).await;
        if matches!(behaviour, Behaviour::Says(_)) {
            // A worker that says no is only left for one that is there.
            story.list("b", &well.endpoint);
            let (client, _) = read(answer.await).await;
            same(client, CHAT, &body);
        } else {
            let list = async {
                asked.await;
                story.list("b", &well.endpoint);
            };
            let (response, ()) = tokio::join!(answer, list);
            let (client, _) = read(response).await;
            same(client, CHAT, &body);
        }
    }
}

#[tokio::test]
async fn a_listed_worker_that_is_not_there_costs_nothing() {
    let well = Worker::start("b", Behaviour::Well).await;
    let story = Story::start(Config { max_retries: 0, ..moving() }, &[&well]).await;
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    for name in ["x", "y", "z"] {
        story.list(name, &format!("http://{free}"));
    }
    for _ in 0..10 {
        let (client, _) = story.stream(COMPLETIONS, &completion()).await;
        same(client, COMPLETIONS, &completion());
    }
}

#[tokio::test]
async fn the_clients_own_mistake_is_answered_by_the_worker() {
    let refusing = Worker::start("a", Behaviour::Says(400)).await;
    let story = Story::start(moving(), &[&refusing]).await;
    let response = story.post(COMPLETIONS, &completion()).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["message"], "no");
    assert_eq!(refusing.requests().len(), 1);
}

#[tokio::test]
async fn without_a_worker_the_client_is_kept_and_then_told() {
    let dying = Worker::start("a", Behaviour::Breaks(6)).await;
    let config = Config { wait_for_worker: Duration::from_millis(1500), ..moving() };
    let story = Story::start(config, &[&dying]).await;
    let (client, text) = story.stream(COMPLETIONS, &completion()).await;
    assert!(text.contains(": lastgasp seeks a worker\n\n"), "{text}");
    assert_eq!(client.ended().unwrap_err()["code"], "no_worker");
    story.signal(Mode::Lost, &["a"]);
    let response = story.post(COMPLETIONS, &completion()).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "no_worker");
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_generation() {
    let hung = Worker::start("a", Behaviour::Hangs(3)).await;
    let story = Story::start(moving(), &[&hung]).await;
    let response = story.post(COMPLETIONS, &completion()).await;
    drop(response);
    hung.dropped(1).await;
}

#[tokio::test]
async fn an_answer_that_comes_whole_is_had_elsewhere_if_the_worker_gives_up() {
    let aborting = Worker::start("a", Behaviour::Aborts).await;
    let story = Story::start(moving(), &[&aborting]).await;
    let body = json!({ "model": "m", "prompt": "Hi" });
    let well = Worker::start("b", Behaviour::Well).await;
    let list = async {
        aborting.asked(1).await;
        story.list("b", &well.endpoint);
    };
    let (response, ()) = tokio::join!(story.post(COMPLETIONS, &body), list);
    assert_eq!(response.json::<Value>().await.unwrap()["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn a_signal_is_answered_with_what_became_of_every_stream() {
    let hung = Worker::start("a", Behaviour::Hangs(5)).await;
    let well = Worker::start("b", Behaviour::Well).await;
    let story = Story::start(moving(), &[&hung]).await;
    let mut guided = completion();
    guided["grammar"] = "x".into();
    let mut begun = Vec::new();
    for (path, body) in [(COMPLETIONS, completion()), (CHAT, chat()), (COMPLETIONS, guided)] {
        begun.push(Begun::after(story.post(path, &body).await).await);
    }
    story.list("b", &well.endpoint);
    let listings = story.signal(Mode::Lost, &["a"]);
    let counts = listings[0].settled().await;
    assert_eq!((counts.streams, counts.moved, counts.unmovable, counts.failed), (3, 2, 1, 0));
    for begun in begun {
        begun.rest().await;
    }
}

#[tokio::test]
async fn a_handover_without_another_worker_leaves_the_stream_where_it_is_until_there_is_one() {
    let leaving = Worker::start("a", Behaviour::Paced).await;
    let story = Story::start(moving(), &[&leaving]).await;
    leaving.step(6);
    let begun = Begun::after(story.post(CHAT, &chat()).await).await;
    story.signal(Mode::Handover, &["a"]);
    leaving.step(2);
    let well = Worker::start("b", Behaviour::Well).await;
    story.list("b", &well.endpoint);
    leaving.dropped(1).await;
    same(begun.rest().await, CHAT, &chat());
}

#[tokio::test]
async fn a_silent_worker_that_does_not_answer_is_left_after_the_stall_timeout() {
    let hung = Worker::start("a", Behaviour::Hangs(5)).await;
    let well = Worker::start("b", Behaviour::Well).await;
    let config = Config { stall_timeout: Some(Duration::from_millis(300)), ..moving() };
    let story = Story::start(config, &[&hung]).await;
    let begun = Begun::after(story.post(CHAT, &chat()).await).await;
    story.list("b", &well.endpoint);
    hung.make_ill();
    same(begun.rest().await, CHAT, &chat());
}

#[tokio::test]
async fn other_paths_are_passed_on_and_ids_go_with_the_request() {
    let worker = Worker::start("a", Behaviour::Well).await;
    let story = Story::start(moving(), &[&worker]).await;
    let request = story
        .client
        .post(format!("{}/v1/embeddings?x=1", story.url))
        .header("x-request-id", "mine")
        .json(&json!({ "model": "m", "input": "hello" }));
    let response = request.send().await.unwrap();
    assert_eq!(response.headers()["x-request-id"], "mine");
    assert_eq!(response.json::<Value>().await.unwrap()["path"], "/v1/embeddings");
    assert_eq!(worker.seen.requests.lock().unwrap()[0].1["x-request-id"], "mine");
    let models = story.client.get(format!("{}/v1/models", story.url)).send().await.unwrap();
    assert_eq!(models.json::<Value>().await.unwrap()["data"][0]["id"], "m");
}

#[tokio::test]
async fn what_a_client_does_wrong_is_said_in_openais_words() {
    let worker = Worker::start("a", Behaviour::Well).await;
    let config = Config { api_keys: vec!["key".into()], max_body: 1000, ..moving() };
    let story = Story::start(config, &[&worker]).await;
    let post = |body: Value| story.client.post(format!("{}{COMPLETIONS}", story.url)).json(&body);
    let long = json!({ "model": "m", "prompt": "x".repeat(2000) });
    for (request, status, code) in [
        (post(completion()), 401, "invalid_api_key"),
        (post(completion()).bearer_auth("kex"), 401, "invalid_api_key"),
        (post(json!({ "model": "other", "prompt": "" })).bearer_auth("key"), 404, "model_not_found"),
        (post(json!({ "model": 7 })).bearer_auth("key"), 400, "invalid_request"),
        (post(long).bearer_auth("key"), 413, "request_too_large"),
        (story.client.get(format!("{}/nothing", story.url)), 404, "not_found"),
    ] {
        let response = request.send().await.unwrap();
        assert_eq!(response.status().as_u16(), status);
        assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], code);
    }
    let (client, _) = read(post(completion()).bearer_auth("key").send().await.unwrap()).await;
    assert!(client.ended().is_ok());
    // The router's key is not the worker's to see.
    assert!(!worker.seen.requests.lock().unwrap()[0].1.contains_key("authorization"));
}
