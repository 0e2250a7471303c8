//! A request that kills whichever worker reads it. It must not take the whole fleet with it.
#![forbid(unsafe_code)]

mod fake;

use axum::http::StatusCode;
use fake::story::{Begun, Behaviour, Story, Worker};
use lastgasp_router::config::Config;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

const COMPLETIONS: &str = "/v1/completions";

/// When a worker dies of a generation.
#[derive(Debug, Clone, Copy)]
enum Dies {
    /// Once it was read.
    BeforeTheHead,
    /// Once its answer has begun, without an event.
    AfterTheHead,
}

/// Three workers that die of any generation, and how often they together did.
struct Fleet {
    endpoints: Vec<String>,
    deaths: watch::Receiver<u32>,
}

impl Fleet {
    async fn start(dies: Dies) -> Self {
        let (died, deaths) = watch::channel(0);
        let mut endpoints = Vec::new();
        for _ in 0..3 {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            endpoints.push(format!("http://{}", listener.local_addr().unwrap()));
            let died = died.clone();
            tokio::spawn(async move {
                while let Ok((connection, _)) = listener.accept().await {
                    tokio::spawn(serve(connection, dies, died.clone()));
                }
            });
        }
        Self { endpoints, deaths }
    }

    fn list(&self, story: &Story) {
        for (name, endpoint) in ["x", "y", "z"].into_iter().zip(&self.endpoints) {
            story.list(name, endpoint);
        }
    }

    fn deaths(&self) -> u32 {
        *self.deaths.borrow()
    }
}

async fn serve(mut connection: TcpStream, dies: Dies, died: watch::Sender<u32>) {
    let mut request = Vec::new();
    // The bodies here are objects, and heads have no brace.
    while !request.ends_with(b"}") {
        if connection.read_buf(&mut request).await.unwrap_or(0) == 0 || request.starts_with(b"GET") {
            return;
        }
    }
    died.send_modify(|deaths| *deaths += 1);
    if matches!(dies, Dies::AfterTheHead) {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        _ = connection.write_all(head.as_bytes()).await;
    }
}

fn one_retry() -> Config {
    Config { migration_limit: 9, max_retries: 1, ..Config::default() }
}

#[tokio::test]
async fn one_that_has_produced_nothing_is_tried_as_often_as_max_retries_says() {
    for stream in [false, true] {
        let fleet = Fleet::start(Dies::BeforeTheHead).await;
        let story = Story::start(one_retry(), &[]).await;
        fleet.list(&story);
        let body = json!({ "model": "m", "prompt": "Hi", "stream": stream });
        let response = story.post(COMPLETIONS, &body).await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "retries_exhausted");
        assert_eq!(fleet.deaths(), 2, "stream: {stream}");
        let reason = if stream { "connection_broken" } else { "unary" };
        assert!(story.metric(&format!("lastgasp_router_retries_total{{reason=\"{reason}\"}} 1")));
    }
}

#[tokio::test]
async fn a_stream_that_is_moved_is_tried_as_often_as_well() {
    for dies in [Dies::BeforeTheHead, Dies::AfterTheHead] {
        let fleet = Fleet::start(dies).await;
        let first = Worker::start("a", Behaviour::Paced).await;
        let story = Story::start(one_retry(), &[&first]).await;
        first.step(6);
        let body = json!({ "model": "m", "prompt": "Hi", "stream": true, "max_tokens": 30 });
        let begun = Begun::after(story.post(COMPLETIONS, &body).await).await;
        fleet.list(&story);
        story.signal(lastgasp_protocol::Mode::Lost, &["a"]);
        let client = begun.rest().await;
        assert_eq!(client.ended().unwrap_err()["code"], "retries_exhausted", "{dies:?}");
        assert_eq!(fleet.deaths(), 2, "{dies:?}");
    }
}
