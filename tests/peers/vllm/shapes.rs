//! The mock engine beside the real one: both are asked the same, and answer in the same shapes.

use std::collections::BTreeSet;
use std::path::PathBuf;

use lastgasp_tests::client::LiveStream;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::process::GIVE_UP;
use lastgasp_tests::shape::shapes;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::server::{Addresses, Frontend, Role, Server};

#[tokio::test]
#[ignore = "installs vLLM, 6 GB; cargo xtask test --peers runs it"]
async fn the_mock_answers_as_the_python_frontend_does() {
    compare(Frontend::Python, "python").await;
}

#[tokio::test]
#[ignore = "installs vLLM, 6 GB; cargo xtask test --peers runs it"]
async fn the_mock_answers_as_the_rust_frontend_does() {
    compare(Frontend::Rust, "rust").await;
}

async fn compare(frontend: Frontend, name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let real = Server::start("real", Addresses::free(frontend), &[], folder.path()).await;
    let arguments = ["--frontend", name, "--tokens-per-second", "500", "--max-model-len", "2048"];
    let mock = Engine::start("mock", &arguments, folder.path()).await.unwrap();

    let mut differences = Vec::new();
    for path in ["/health", "/ping", "/version", "/v1/models", "/is_sleeping", "/v1/nothing"] {
        let answers = [get(real.http, path).await, get(mock.ready.http, path).await];
        note(&mut differences, path, &json!(null), answers);
    }
    for (path, body) in requests(name) {
        let answers = [post(real.http, &path, &body).await, post(mock.ready.http, &path, &body).await];
        note(&mut differences, &path, &body, answers);
    }
    assert!(differences.is_empty(), "{}", differences.join("\n\n"));

    // Whoever leaves is generated for no longer.
    for address in [real.http, mock.ready.http] {
        let mut stream = LiveStream::open(address, Endpoint::Completions, &long()).await.unwrap();
        stream.tokens(5).await.unwrap();
        let seen_and_gone = async {
            while running(address).await < 1.0 {
                tokio::task::yield_now().await;
            }
            drop(stream);
            while running(address).await > 0.0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(GIVE_UP, seen_and_gone).await.expect("it is left");
    }

    // SIGTERM. The mock aborts. The real one aborts, or goes silent (3 of 5, measured), or sends an error and
    // `[DONE]`, or its connection breaks when the frontend has waited 5 s for its engine (Rust). What it never does is
    // end an answer as if it were whole.
    let mut streams = Vec::new();
    for address in [real.http, mock.ready.http] {
        let mut stream = LiveStream::open(address, Endpoint::Completions, &long()).await.unwrap();
        stream.tokens(5).await.unwrap();
        streams.push(stream);
    }
    real.signal(Role::Root, Signal::SIGTERM);
    mock.signal_root(Signal::SIGTERM);
    let mock = streams.pop().unwrap().finish().await.unwrap();
    let patience = std::time::Duration::from_secs(15);
    assert_eq!((mock.finish_reasons.as_slice(), mock.dones), (["abort".to_owned()].as_slice(), 1));
    match tokio::time::timeout(patience, streams.pop().unwrap().finish()).await {
        Ok(real) => {
            let real = real.unwrap();
            assert!(real.finish_reasons.iter().all(|reason| reason == "abort"), "{real:#?}");
            let ends = (real.finish_reasons, real.error.is_some(), real.dones);
            eprintln!("the {frontend:?} frontend after SIGTERM: {ends:?}, {:?}", real.ending);
        }
        Err(_) => eprintln!("the {frontend:?} frontend was silent after SIGTERM for {patience:?}"),
    }
}

fn long() -> Value {
    json!({ "model": "tiny", "prompt": "Hi", "max_tokens": 1500, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true })
}

/// Requests that were recorded, and those that are refused.
fn requests(frontend: &str) -> Vec<(String, Value)> {
    let folder: PathBuf = [env!("CARGO_MANIFEST_DIR"), "fixtures", "vllm-0.32", frontend].iter().collect();
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.to_string_lossy().ends_with(".req.json"));
    files.sort();
    let recorded = files.into_iter().map(|file| {
        let mut request: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        if request["body"].get("stop").is_some() {
            // One that comes, whatever the model says.
            request["body"]["stop"] = json!([" ", "e", "s", "t"]);
        }
        (request["path"].as_str().unwrap().to_owned(), request["body"].clone())
    });
    let chat = json!([{ "role": "user", "content": "Hi" }]);
    let refused = [
        (Endpoint::Completions, json!({ "model": "tiny", "prompt": "Hi", "max_tokens": 0 })),
        (Endpoint::Completions, json!({ "model": "tiny", "prompt": "Hi", "max_tokens": 3, "min_tokens": 9 })),
        (Endpoint::Completions, json!({ "model": "tiny", "prompt": [999_999], "max_tokens": 3 })),
        (Endpoint::Completions, json!({ "model": "tiny", "prompt": vec![70; 2048], "max_tokens": 3 })),
        (Endpoint::Completions, json!({ "model": "tiny", "prompt": "Hi", "max_tokens": 3, "n": 2 })),
        (Endpoint::Chat, json!({ "model": "tiny", "messages": [] })),
        (Endpoint::Chat, json!({ "model": "other", "messages": chat })),
        (Endpoint::Chat, json!({ "model": "tiny", "messages": chat, "max_tokens": 3, "continue_final_message": true })),
        (
            Endpoint::Chat,
            json!({ "model": "tiny", "messages": chat, "max_tokens": 3, "stream": true,
            "return_token_ids": true, "kv_transfer_params": { "prompt_token_ids": [72, 101] } }),
        ),
    ];
    recorded.chain(refused.map(|(endpoint, body)| (endpoint.path().to_owned(), body))).collect()
}

/// An answer without what it says: status, type, shapes, and of an error its type and code.
#[derive(Debug, PartialEq)]
struct Answer {
    status: u16,
    content: String,
    shapes: BTreeSet<String>,
    error: Option<(Value, Value)>,
}

async fn answer(response: reqwest::Response) -> (Answer, String) {
    let content = response.headers().get("content-type").map(|value| value.to_str().unwrap().to_owned());
    let status = response.status().as_u16();
    let body = response.text().await.unwrap();
    let error = serde_json::from_str::<Value>(&body).ok().and_then(|value| {
        let error = value.get("error")?;
        Some((error["type"].clone(), error["code"].clone()))
    });
    let shapes = shapes(&body).into_iter().filter_map(|shape| {
        // Whether a token has text depends on the model.
        let without_text = shape.contains("delta:{}") && shape.contains("token_ids:[number]");
        (!without_text).then(|| shape.replace("bytes:[]", "bytes:[number]"))
    });
    let shapes = shapes.collect();
    (Answer { status, content: content.unwrap_or_default(), shapes, error }, body)
}

async fn get(address: std::net::SocketAddr, path: &str) -> (Answer, String) {
    answer(reqwest::get(format!("http://{address}{path}")).await.unwrap()).await
}

async fn post(address: std::net::SocketAddr, path: &str, body: &Value) -> (Answer, String) {
    let client = reqwest::Client::new();
    answer(client.post(format!("http://{address}{path}")).json(body).send().await.unwrap()).await
}

/// Requests that it generates for.
async fn running(address: std::net::SocketAddr) -> f64 {
    let (_, body) = get(address, "/metrics").await;
    let line = body.lines().find(|line| line.starts_with("vllm:num_requests_running{"));
    line.unwrap().rsplit(' ').next().unwrap().parse().unwrap()
}

fn note(differences: &mut Vec<String>, path: &str, body: &Value, [real, mock]: [(Answer, String); 2]) {
    if real.0 != mock.0 {
        let only =
            |one: &Answer, other: &Answer| -> Vec<String> { one.shapes.difference(&other.shapes).cloned().collect() };
        differences.push(format!(
            "{path} {body}\nreal: {} {} {:?} only: {:#?}\n{}\nmock: {} {} {:?} only: {:#?}\n{}",
            real.0.status,
            real.0.content,
            real.0.error,
            only(&real.0, &mock.0),
            real.1,
            mock.0.status,
            mock.0.content,
            mock.0.error,
            only(&mock.0, &real.0),
            mock.1,
        ));
    }
}
