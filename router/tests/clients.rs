//! Real Python clients read a moved stream and notice nothing; or an error, and notice that.
//!
//! Installs packages into a virtual environment under `target/`, hence ignored:
//! `cargo test -p lastgasp-router --test clients -- --ignored`.
#![forbid(unsafe_code)]

mod fake;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use fake::Client;
use fake::story::{Behaviour, FAKE, Story, Worker};
use lastgasp_router::config::Config;
use lastgasp_router::continuation::Endpoint;
use serde_json::{Value, json};

const PACKAGES: [&str; 2] = ["openai", "langchain-openai"];

/// A Python that has the packages.
fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("clients");
        let python = folder.join("bin/python");
        let done = folder.join("installed");
        if !done.exists() {
            let run = |command: &mut Command| assert!(command.status().unwrap().success(), "{command:?}");
            run(Command::new("python3").args(["-m", "venv"]).arg(&folder));
            run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(PACKAGES));
            std::fs::write(done, "").unwrap();
        }
        python
    })
}

async fn run(client: &'static str, url: String) -> Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/read.py");
    let output = tokio::task::spawn_blocking(move || {
        Command::new(python()).arg(script).arg(client).arg(format!("{url}/v1")).output().unwrap()
    });
    let output = output.await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Reads through a router whose first worker dies in the middle, a second in its place.
async fn moved(client: &'static str) -> Value {
    tokio::task::spawn_blocking(python).await.unwrap();
    let dying = Worker::start("a", Behaviour::Breaks(8)).await;
    let well = Worker::start("b", Behaviour::Well).await;
    // Their decoders take an empty line for an event once they have seen an id.
    dying.number_events();
    well.number_events();
    let config = Config { migration_limit: 1, wait_for_worker: Duration::from_secs(60), ..Config::default() };
    let story = Story::start(config, &[&dying]).await;
    let reading = run(client, story.url.clone());
    let listing = async {
        dying.asked(1).await;
        // Meanwhile the client is kept, by a comment.
        tokio::time::sleep(Duration::from_millis(1500)).await;
        story.list("b", &well.endpoint);
    };
    let (seen, ()) = tokio::join!(reading, listing);
    assert_eq!(well.requests().len(), 1, "it was moved");
    seen
}

fn expected(endpoint: Endpoint, body: &Value) -> Client {
    Client::read(FAKE.answer(endpoint, body).unwrap().concat().as_bytes())
}

fn chat() -> Client {
    let body =
        json!({ "messages": [{ "role": "user", "content": "Hi" }], "stream_options": { "include_usage": true } });
    expected(Endpoint::Chat, &body)
}

fn same(seen: &Value, whole: &Client) {
    let usage = whole.usage.as_ref().unwrap();
    assert_eq!(seen["text"], whole.text);
    assert_eq!(seen["finish"], json!(whole.finish));
    assert_eq!(seen["usage"], json!([usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]]));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "installs Python packages"]
async fn the_openai_package_reads_a_moved_chat() {
    for client in ["openai_chat", "openai_async"] {
        let seen = moved(client).await;
        same(&seen, &chat());
        assert_eq!((seen["ids"].as_array().unwrap().len(), &seen["roles"]), (1, &json!(1)));
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "installs Python packages"]
async fn the_openai_package_reads_a_moved_completion() {
    let body = json!({ "prompt": "Hi", "max_tokens": 30, "stream_options": { "include_usage": true } });
    let seen = moved("openai_completions").await;
    same(&seen, &expected(Endpoint::Completions, &body));
    assert_eq!(seen["ids"].as_array().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "installs Python packages"]
async fn langchain_reads_a_moved_chat() {
    let seen = moved("langchain").await;
    same(&seen, &chat());
    // It joins what differs between chunks.
    assert_eq!(seen["model"], "m");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "installs Python packages"]
async fn the_openai_package_raises_when_a_stream_cannot_be_continued() {
    tokio::task::spawn_blocking(python).await.unwrap();
    let dying = Worker::start("a", Behaviour::Breaks(8)).await;
    let config = Config { migration_limit: 1, ..Config::default() };
    let story = Story::start(config, &[&dying]).await;
    let seen = run("openai_error", story.url.clone()).await;
    assert_eq!(seen["error"], "guided_decoding");
    assert_ne!(seen["text"], "");
}
