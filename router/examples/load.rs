//! Many live streams on one worker that is lost: how long until the last is sent elsewhere, what a stream
//! costs in memory, and what the router adds to each chunk's way.
//!
//! ```text
//! nats-server -js -p 4222 &
//! cargo run --release --example load -- target/release/lastgasp-router nats://127.0.0.1:4222 2000
//! ```
//! Workers and clients are in this process, the router is its own. A token's text is its number
//! and the time at which it was sent, so clients see every gap, every repetition and every delay.
#![forbid(unsafe_code)]

use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_nats::jetstream;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use lastgasp_protocol::kv::{Bucket, Expect};
use lastgasp_protocol::{Answer, Phase, WORKERS_BUCKET};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_stream::StreamExt;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Tokens of each stream, and the time between them.
const TOKENS: usize = 40;
const PACE: Duration = Duration::from_secs(1);

struct Worker {
    start: Instant,
    alive: watch::Receiver<bool>,
    /// When each request came.
    asked: Mutex<Vec<Instant>>,
}

async fn serve(State(worker): State<Arc<Worker>>, body: Bytes) -> Response {
    let Ok(request) = serde_json::from_slice::<Value>(&body) else { return "ok".into_response() };
    worker.asked.lock().expect("not poisoned").push(Instant::now());
    let carried = request["prompt"].as_array().map_or(0, |ids| ids.len().saturating_sub(1));
    let (sender, receiver) = tokio::sync::mpsc::channel::<Result<String, std::io::Error>>(4);
    tokio::spawn(async move {
        let mut alive = worker.alive.clone();
        let mut ticks = tokio::time::interval(PACE);
        for number in carried..TOKENS {
            tokio::select! {
                _ = alive.wait_for(|alive| !alive) => return,
                _ = ticks.tick() => {}
            }
            let text = format!("{number}@{} ", worker.start.elapsed().as_micros());
            let last = number + 1 == TOKENS;
            let chunk = json!({ "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [{
                "index": 0, "text": text, "logprobs": null, "finish_reason": if last { json!("length") } else { Value::Null },
                "prompt_token_ids": [7], "token_ids": [number] }] });
            let end = if last { "data: [DONE]\n\n" } else { "" };
            if sender.send(Ok(format!("data: {chunk}\n\n{end}"))).await.is_err() {
                return;
            }
        }
    });
    let stream = tokio_stream::wrappers::ReceiverStream::new(receiver);
    ([("content-type", "text/event-stream")], Body::from_stream(stream)).into_response()
}

async fn worker(start: Instant) -> Result<(Arc<Worker>, watch::Sender<bool>, String), Failure> {
    let (kill, alive) = watch::channel(true);
    let worker = Arc::new(Worker { start, alive, asked: Mutex::default() });
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let app = Router::new().fallback(serve).with_state(Arc::clone(&worker));
    tokio::spawn(axum::serve(listener, app).into_future());
    Ok((worker, kill, url))
}

/// Reads a stream; returns the delays of its tokens in microseconds.
async fn client(
    http: reqwest::Client,
    url: String,
    start: Instant,
    begun: Arc<watch::Sender<usize>>,
) -> Result<Vec<u64>, Failure> {
    let body = json!({ "model": "m", "prompt": "x", "stream": true, "max_tokens": TOKENS });
    let mut response = http.post(format!("{url}/v1/completions")).json(&body).send().await?.error_for_status()?;
    let mut parser = lastgasp_router::continuation::sse::Parser::new();
    let mut delays = Vec::with_capacity(TOKENS);
    let mut done = false;
    while let Some(bytes) = response.chunk().await? {
        let now = u64::try_from(start.elapsed().as_micros())?;
        parser.push(&bytes);
        while let Some(event) = parser.next_event()? {
            let Some(data) = event.data else { continue };
            if data.as_ref() == b"[DONE]" {
                done = true;
                continue;
            }
            let chunk: Value = serde_json::from_slice(&data)?;
            let text = chunk["choices"][0]["text"].as_str().ok_or_else(|| chunk.to_string())?;
            let (number, sent) = text.trim().split_once('@').ok_or("no token")?;
            if number.parse::<usize>()? != delays.len() {
                return Err(format!("token {number} where {} was due", delays.len()).into());
            }
            if delays.is_empty() {
                begun.send_modify(|begun| *begun += 1);
            }
            delays.push(now.saturating_sub(sent.parse()?));
        }
    }
    if !done || delays.len() != TOKENS {
        return Err(format!("ended after {} tokens", delays.len()).into());
    }
    Ok(delays)
}

fn memory(router: &Child) -> Result<u64, Failure> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", router.id()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

fn report(name: &str, mut delays: Vec<u64>) {
    delays.sort_unstable();
    let at = |share: usize| delays[(delays.len() - 1) * share / 1000];
    println!("{name}: p50 {} us, p99 {} us, max {} us, {} chunks", at(500), at(990), at(1000), delays.len());
}

async fn streams(
    url: &str,
    count: usize,
    start: Instant,
    begun: &Arc<watch::Sender<usize>>,
) -> tokio::task::JoinSet<Result<Vec<u64>, Failure>> {
    let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build().expect("a plain client");
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..count {
        tasks.spawn(client(http.clone(), url.to_owned(), start, Arc::clone(begun)));
        // Spread over one period, as real streams are.
        tokio::time::sleep(PACE / u32::try_from(count).expect("few enough")).await;
    }
    tasks
}

async fn delays(mut tasks: tokio::task::JoinSet<Result<Vec<u64>, Failure>>) -> Result<Vec<u64>, Failure> {
    let mut all = Vec::new();
    while let Some(result) = tasks.join_next().await {
        all.extend(result??);
    }
    Ok(all)
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [program, nats, count] = arguments.as_slice() else {
        return Err("load ROUTER-BINARY NATS-URL STREAMS".into());
    };
    let count: usize = count.parse()?;
    let start = Instant::now();
    let (first, kill, first_url) = worker(start).await?;
    let (second, _kept, second_url) = worker(start).await?;

    let ready = std::env::temp_dir().join(format!("lastgasp-load-{}.json", std::process::id()));
    let mut router = Command::new(program)
        .args(["--nats", nats, "--listen", "127.0.0.1:0", "--migration-limit", "1", "--log", "warn", "--ready-file"])
        .arg(&ready)
        .spawn()?;
    let result = measure(&router, &ready, nats, count, start, (&first, kill, &first_url), (&second, &second_url)).await;
    router.kill()?;
    router.wait()?;
    _ = std::fs::remove_file(&ready);
    result
}

async fn measure(
    router: &Child,
    ready: &std::path::Path,
    nats: &str,
    count: usize,
    start: Instant,
    (first, kill, first_url): (&Worker, watch::Sender<bool>, &str),
    (second, second_url): (&Worker, &str),
) -> Result<(), Failure> {
    let client = async_nats::connect(nats).await?;
    let bucket = Bucket::open(&jetstream::new(client.clone()), WORKERS_BUCKET, 1).await?;
    let run = start.elapsed().as_nanos();
    let list = async |name: &str, url: &str| {
        let key = format!("load.{name}");
        let record = json!({ "schema": 1, "node": "load", "worker": name, "incarnation": format!("{run}-{name}"), "epoch": 1,
            "engine": "vllm", "models": ["m"], "endpoint": url });
        let expect = bucket.read(&key).await?.map_or(Expect::Absent, |entry| Expect::Revision(entry.revision));
        bucket.put(&key, record.to_string().into(), expect, Duration::from_secs(3600)).await?;
        Ok::<(), Failure>(())
    };
    while !ready.exists() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let listen: Value = serde_json::from_slice(&std::fs::read(ready)?)?;
    let url = format!("http://{}", listen["listen"].as_str().ok_or("no address")?);

    list("second", second_url).await?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let quiet = Arc::new(watch::Sender::new(0));
    let few = 20;
    report("direct, 20 streams", delays(streams(second_url, few, start, &quiet).await).await?);
    report("routed, 20 streams", delays(streams(&url, few, start, &quiet).await).await?);
    report("direct, all streams", delays(streams(second_url, count, start, &quiet).await).await?);
    // Only the first is left to choose.
    second.asked.lock().expect("not poisoned").clear();
    let key = "load.second";
    let entry = bucket.read(key).await?.ok_or("the record is gone")?;
    bucket.delete(key, entry.payload, Expect::Revision(entry.revision), Duration::from_secs(3600)).await?;
    list("first", first_url).await?;
    tokio::time::sleep(Duration::from_millis(300)).await;

    let before = memory(router)?;
    let begun = Arc::new(watch::Sender::new(0));
    let live = streams(&url, count, start, &begun).await;
    begun.subscribe().wait_for(|begun| *begun == count).await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let after = memory(router)?;
    println!(
        "memory: {} KiB before, {after} KiB with {count} streams: {} KiB a stream",
        before,
        (after - before) / count as u64
    );

    // The second comes back as another life of that worker.
    let record = json!({ "schema": 1, "node": "load", "worker": "second", "incarnation": format!("{run}-again"), "epoch": 1,
        "engine": "vllm", "models": ["m"], "endpoint": second_url });
    let entry = bucket.read(key).await?.ok_or("the tombstone is gone")?;
    bucket.put(key, record.to_string().into(), Expect::Revision(entry.revision), Duration::from_secs(3600)).await?;
    tokio::time::sleep(Duration::from_millis(300)).await;

    let inbox = client.new_inbox();
    let mut answers = client.subscribe(inbox.clone()).await?;
    let signal = json!({ "schema": 1, "node": "load", "action": "move", "mode": "lost", "certificate": "load", "cause": { "kind": "process_killed" },
        "workers": [{ "worker": "first", "incarnation": format!("{run}-first"), "epoch": 1, "revision": 0 }] });
    let told = Instant::now();
    client.publish_with_reply("lastgasp.v1.migrate.load", inbox, signal.to_string().into()).await?;
    client.flush().await?;
    while let Some(message) = answers.next().await {
        let answer = Answer::parse(&message.payload)?;
        println!("{:?} after {:.1} ms: {:?}", answer.phase, told.elapsed().as_secs_f64() * 1000.0, answer.counts);
        if answer.phase == Phase::Done {
            break;
        }
    }
    kill.send_replace(false);
    let routed = delays(live).await?;
    let mut redispatched: Vec<u64> = second
        .asked
        .lock()
        .expect("not poisoned")
        .iter()
        .map(|at| u64::try_from(at.duration_since(told).as_micros()).unwrap_or(u64::MAX))
        .collect();
    redispatched.sort_unstable();
    println!(
        "signal to request at the next worker: first {} us, median {} us, last {} us, {} of {count} streams",
        redispatched[0],
        redispatched[redispatched.len() / 2],
        redispatched[redispatched.len() - 1],
        redispatched.len()
    );
    report("routed, all streams, moved", routed);
    println!(
        "every stream has every token once; {} requests at the first worker",
        first.asked.lock().expect("not poisoned").len()
    );
    Ok(())
}
