//! A client that reads slowly has not been sent all that its worker has produced when the worker is
//! lost. What it was not sent yet must reach it all the same, before what the next worker sends.
#![forbid(unsafe_code)]

mod fake;

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use fake::story::Story;
use lastgasp_protocol::Mode;
use lastgasp_router::config::Config;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_stream::StreamExt;

/// Tokens of the answer, each with so much text that a few hundred fill every buffer on the way.
const TOKENS: u64 = 600;
const PADDING: usize = 32 * 1024;

/// A worker whose next token is the number of tokens so far, and how many it has handed over.
async fn worker(sent: watch::Sender<u64>) -> String {
    async fn complete(State(sent): State<watch::Sender<u64>>, Json(body): Json<Value>) -> Body {
        let prompt: Vec<Value> = body["prompt"].as_array().cloned().unwrap_or_else(|| vec![json!(0)]);
        let first = prompt.len() as u64 - 1;
        let events = tokio_stream::iter(first..TOKENS).map(move |token| {
            sent.send_modify(|sent| *sent += 1);
            let finish = (token + 1 == TOKENS).then_some("length");
            let mut choice = json!({
                "index": 0, "text": format!("<{token}>{}", ".".repeat(PADDING)), "finish_reason": finish,
                "token_ids": [token + 1],
            });
            if token == first {
                choice["prompt_token_ids"] = json!(prompt);
            }
            let event =
                json!({ "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice] });
            let done = if finish.is_some() { "data: [DONE]\n\n" } else { "" };
            Ok::<_, Infallible>(Bytes::from(format!("data: {event}\n\n{done}")))
        });
        Body::from_stream(events)
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let models = Json(json!({ "data": [{ "id": "m", "max_model_len": 100_000 }] }));
    let routes = Router::new().route("/v1/completions", post(complete)).with_state(sent);
    let routes = routes.route("/v1/models", get(async || models));
    tokio::spawn(async move { axum::serve(listener, routes).await });
    endpoint
}

/// Waits until nothing more fits into the buffers between the worker and the client.
async fn stalled(mut sent: watch::Receiver<u64>) {
    while tokio::time::timeout(Duration::from_millis(500), sent.changed()).await.is_ok() {}
}

#[tokio::test]
async fn nothing_is_lost_between_the_two_workers() {
    let config = Config { migration_limit: 1, wait_for_worker: Duration::from_secs(60), ..Config::default() };
    let story = Story::start(config, &[]).await;
    let (first, second) = (watch::Sender::new(0), watch::Sender::new(0));
    story.list("a", &worker(first.clone()).await);

    let body = json!({ "model": "m", "prompt": "Hi", "stream": true, "max_tokens": TOKENS }).to_string();
    let address = story.url.strip_prefix("http://").unwrap().to_owned();
    let mut client = TcpStream::connect(&address).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.0\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.write_all(head.as_bytes()).await.unwrap();
    client.write_all(body.as_bytes()).await.unwrap();
    stalled(first.subscribe()).await;
    assert!(*first.borrow() < TOKENS, "the buffers hold it all, so this shows nothing");

    story.list("b", &worker(second.clone()).await);
    story.signal(Mode::Lost, &["a"]);
    second.subscribe().wait_for(|sent| *sent > 0).await.unwrap();

    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    let tokens: Vec<u64> =
        answer.split('<').skip(1).filter_map(|piece| piece.split_once('>')?.0.parse().ok()).collect();
    assert_eq!(tokens, (0..TOKENS).collect::<Vec<_>>());
    assert_eq!(answer.matches("[DONE]").count(), 1);
}
