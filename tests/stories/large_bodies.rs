//! Clients send bodies that cost more than they weigh, or more of them than there is room for. A router has every
//! stream of its node's clients in it, so that it must not be killed for its memory.

use std::net::SocketAddr;
use std::time::Duration;

use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router as Routes};
use lastgasp_protocol::WORKERS_BUCKET;
use lastgasp_protocol::kv::{Bucket, Expect};
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::GIVE_UP;
use lastgasp_tests::router::Router;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::nats::stage::{ENGINE, SERVING};

const MIB: usize = 1024 * 1024;
/// Bytes of a body that costs much.
const LARGE: usize = 14 * MIB;
/// What else the router's memory may grow by meanwhile: buffers of sockets, heaps of threads.
const BESIDE: usize = 8 * MIB;

/// A worker that reads all that it is sent and keeps nothing of it.
async fn sink() -> SocketAddr {
    async fn swallow(request: Request) -> Response {
        let mut body = request.into_body().into_data_stream();
        while let Some(Ok(_)) = futures_util::StreamExt::next(&mut body).await {}
        let chunk =
            json!({ "choices": [{ "index": 0, "text": "x", "delta": { "content": "x" }, "finish_reason": "stop" }] });
        let events = format!("data: {chunk}\n\ndata: [DONE]\n\n");
        ([("content-type", "text/event-stream")], events).into_response()
    }
    let models = async || Json(json!({ "data": [{ "id": "sink", "owned_by": "vllm" }] }));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let routes = Routes::new().route("/v1/models", get(models)).fallback(post(swallow));
    tokio::spawn(async move { axum::serve(listener, routes).await });
    address
}

struct Stage {
    router: Router,
    _engine: Engine,
    _nats: Nats,
    _folder: TempDir,
}

impl Stage {
    /// A router before an engine with the model `tiny` and a sink with the model `sink`.
    async fn new(arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let nats = Nats::start(folder.path()).await.unwrap();
        let engine = Engine::start("engine", &ENGINE, folder.path()).await.unwrap();
        let workers = Bucket::open(&nats.jetstream().await.unwrap(), WORKERS_BUCKET, 1).await.unwrap();
        for (worker, model, endpoint) in
            [("engine", "tiny", engine.endpoint()), ("sink", "sink", format!("http://{}", sink().await))]
        {
            let record = json!({"schema": 1, "node": "a", "worker": worker, "incarnation": "1", "epoch": 1,
                "lease": "none", "state": "serving", "writer": "daemon", "engine": "vllm", "models": [model],
                "endpoint": endpoint});
            let record = serde_json::to_vec(&record).unwrap();
            workers
                .put(&format!("a.{worker}"), record.into(), Expect::Absent, Duration::from_secs(3600))
                .await
                .unwrap();
        }
        let url = nats.url();
        let arguments = [&["--nats", &url, "--migration-limit", "3"], arguments].concat();
        let router = Router::start_with("router-1", &arguments, folder.path()).await.unwrap();
        router.shows(SERVING, 2.0).await.unwrap();
        Self { router, _engine: engine, _nats: nats, _folder: folder }
    }

    /// A line of `/proc/PID/status`, in bytes.
    fn memory(&self, line: &str) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.router.process.identity.pid)).unwrap();
        let line = status.lines().find_map(|found| found.strip_prefix(line)).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() * 1024
    }

    /// From now on the most memory is counted anew (proc(5), `clear_refs`).
    fn forget_the_most(&self) {
        std::fs::write(format!("/proc/{}/clear_refs", self.router.process.identity.pid), "5").unwrap();
    }
}

/// A body of [`LARGE`] bytes that repeats `piece` between these two texts.
fn repeated(begin: &str, piece: &str, end: &str) -> String {
    let times = (LARGE - begin.len() - end.len()) / (piece.len() + 1);
    format!("{begin}{}{end}", vec![piece; times].join(","))
}

#[tokio::test]
async fn a_body_takes_at_most_three_times_its_bytes_while_it_is_read() {
    let stage = Stage::new(&[]).await;
    let client = reqwest::Client::new();
    // What an earlier body has left behind counts as well.
    let before = stage.memory("VmRSS:");
    let begin = |member: &str| format!(r#"{{"model":"sink","stream":true,"{member}":["#);
    let mut most: f64 = 0.0;
    for (what, endpoint, body) in [
        ("ids", Endpoint::Completions, repeated(&begin("prompt"), "1", "]}")),
        ("lists of ids", Endpoint::Completions, repeated(&begin("prompt"), "[1]", "]}")),
        ("empty lists", Endpoint::Chat, repeated(&begin("messages"), "[]", "]}")),
        ("messages without anything", Endpoint::Chat, repeated(&begin("messages"), "{}", "]}")),
        ("parts of a message", Endpoint::Chat, repeated(&begin(r#"messages":[{"content"#), "0", "]}]}")),
        ("stop strings", Endpoint::Completions, repeated(&begin("stop"), r#""a""#, r#"],"prompt":"x"}"#)),
        ("stop ids", Endpoint::Completions, repeated(&begin("stop_token_ids"), "1", r#"],"prompt":"x"}"#)),
        (
            "what no engine knows",
            Endpoint::Chat,
            repeated(r#"{"model":"sink","stream":true,"x":{"#, r#""a":0"#, r#"},"messages":[]}"#),
        ),
        ("no stream", Endpoint::Completions, repeated(r#"{"model":"sink","prompt":["#, "1", "]}")),
        ("one text", Endpoint::Completions, repeated(r#"{"model":"sink","stream":true,"prompt":""#, "aaaa", r#""}"#)),
    ] {
        // Its length may come first or not; once is enough to see that.
        for announced in if what == "ids" { &[true, false][..] } else { &[true] } {
            stage.forget_the_most();
            let request = client.post(format!("http://{}{}", stage.router.address, endpoint.path()));
            let bytes = body.clone().into_bytes();
            let request = if *announced {
                request.body(bytes)
            } else {
                let pieces: Vec<_> =
                    bytes.chunks(64 * 1024).map(|piece| Ok::<_, std::io::Error>(piece.to_vec())).collect();
                request.body(reqwest::Body::wrap_stream(futures_util::stream::iter(pieces)))
            };
            let response = request.send().await.unwrap();
            let status = response.status();
            let answer = response.text().await.unwrap();
            assert_eq!(status, 200, "{what}: {answer}");
            let grown = stage.memory("VmHWM:").saturating_sub(before);
            most = most.max(grown as f64 / body.len() as f64);
            assert!(grown <= 3 * body.len() + BESIDE, "{what}: {} MiB for {} MiB", grown / MIB, body.len() / MIB);
        }
    }
    // What would cost more than that is refused.
    let members: Vec<String> = (0..LARGE / 12).map(|at| format!("\"m{at:06}\":0")).collect();
    let members = format!("{{{}}}", members.join(","));
    stage.forget_the_most();
    let url = format!("http://{}/v1/completions", stage.router.address);
    let length = members.len();
    let response = client.post(url).body(members).send().await.unwrap();
    assert_eq!(response.status(), 400);
    assert!(response.text().await.unwrap().contains("members"));
    assert!(stage.memory("VmHWM:").saturating_sub(before) <= 3 * length + BESIDE);
    matrix::row(
        "bodies of 14 MiB that are millions of numbers, lists, objects, strings",
        "the router's memory grows by at most 3 times the body",
        &format!("at most {most:.1} times"),
    );
}

/// Sends the head of a request of 1 MiB and three quarters of its body, and waits for what is said to that.
async fn uploads_slowly(address: SocketAddr) -> String {
    let mut connection = TcpStream::connect(address).await.unwrap();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {MIB}\r\n\r\n");
    let mut said = Vec::new();
    // A refused client need not be listened to.
    if connection.write_all(head.as_bytes()).await.is_ok() {
        _ = connection.write_all(&vec![b' '; MIB / 4 * 3]).await;
    }
    let mut piece = [0; 4096];
    while !said.ends_with(b"}") {
        match connection.read(&mut piece).await {
            Ok(read) if read > 0 => said.extend_from_slice(&piece[..read]),
            _ => break,
        }
    }
    String::from_utf8_lossy(&said).into_owned()
}

#[tokio::test]
async fn bodies_beyond_the_room_for_all_of_them_are_refused_and_streams_go_on() {
    const UPLOADS: usize = 8;
    // Five of them fit into 4 MiB.
    const REFUSED: usize = 3;
    let stage = Stage::new(&["--max-bodies", "4194304", "--max-body", "1048576"]).await;
    let question = json!({"model": "tiny", "prompt": "hello", "max_tokens": 400, "ignore_eos": true});
    let mut stream = stage.router.stream(Endpoint::Completions, &question).await.unwrap();
    stream.tokens(10).await.unwrap();

    let (refused, mut refusals) = tokio::sync::mpsc::unbounded_channel();
    let uploads: Vec<_> = (0..UPLOADS)
        .map(|_| {
            let (address, refused) = (stage.router.address, refused.clone());
            tokio::spawn(async move { refused.send(uploads_slowly(address).await) })
        })
        .collect();
    for _ in 0..REFUSED {
        let said = tokio::time::timeout(GIVE_UP, refusals.recv()).await.expect("it is refused").unwrap();
        let lower = said.to_ascii_lowercase();
        assert!(lower.starts_with("http/1.1 503") && lower.contains("\r\nretry-after: "), "{said}");
        assert!(said.contains("too_many_bodies") && said.contains("--max-bodies"), "{said}");
    }
    stage.router.counts("lastgasp_router_bodies_refused_total", REFUSED as f64).await.unwrap();
    let transcript = stream.finish().await.unwrap();
    assert_eq!((transcript.finish_reasons.as_slice(), transcript.dones), (&["length".to_owned()][..], 1));

    // When they have left there is room again.
    uploads.iter().for_each(tokio::task::JoinHandle::abort);
    let whole = format!(r#"{{"model":"sink","stream":true,"prompt":"{}"}}"#, "x".repeat(MIB - 100));
    let url = format!("http://{}/v1/completions", stage.router.address);
    let served = async {
        let client = reqwest::Client::new();
        while client.post(&url).body(whole.clone()).send().await.unwrap().status() != 200 {}
    };
    tokio::time::timeout(GIVE_UP, served).await.expect("there is room again");
    matrix::row(
        "8 clients send bodies of 1 MiB slowly; there is room for 4 MiB",
        "those beyond it get 503 with Retry-After; a stream under way goes on",
        "so it was; there was room when they had left",
    );
}
