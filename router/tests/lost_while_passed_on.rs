//! A worker hangs in the middle of an answer that is only passed on, and is declared lost. The client is
//! answered, and its place is free again.
#![forbid(unsafe_code)]

mod fake;

use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use fake::story::Story;
use lastgasp_protocol::{Mode, Name};
use lastgasp_router::config::Config;
use lastgasp_router::workers::Key;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_stream::StreamExt as _;

/// After so long a test gives up.
const GIVE_UP: Duration = Duration::from_secs(60);
const PLACES: u32 = 4;

/// Begins an answer, and never ends it.
async fn begin(uri: Uri) -> Response {
    let status = if uri.query() == Some("bad") { StatusCode::BAD_REQUEST } else { StatusCode::OK };
    let begun = tokio_stream::once(Ok::<_, std::io::Error>(Bytes::from("{"))).chain(tokio_stream::pending());
    let answer = Response::builder().status(status).header("content-type", "application/json");
    answer.body(Body::from_stream(begun)).unwrap()
}

#[tokio::test]
async fn the_body_ends_with_an_error_and_holds_its_place_until_then() {
    for (path, stream) in [
        ("/v1/embeddings", false),
        ("/v1/completions?bad", false),
        ("/v1/completions", true),
        ("/v1/completions?bad", true),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, Router::new().fallback(begin)).await });
        let config = Config { max_requests: PLACES as usize, ..Config::default() };
        let story = Story::start(config, &[]).await;
        story.list("a", &endpoint);
        let mut response = story.post(path, &json!({ "model": "m", "prompt": "Hi", "stream": stream })).await;
        assert_eq!(response.chunk().await.unwrap().as_deref(), Some(b"{".as_slice()), "{path}");
        let name = |name| Name::new(name).unwrap();
        let listing = story.workers.listing(&Key { node: name("n"), worker: name("a") }).unwrap();
        assert_eq!((listing.in_flight(), story.proxy.room.available_permits()), (1, 3), "{path}, stream: {stream}");

        story.signal(Mode::Lost, &["a"]);
        let rest = tokio::time::timeout(GIVE_UP, response.chunk()).await.expect("the body ends");
        assert!(rest.is_err(), "{path}, stream: {stream}: {rest:?}");
        let all = tokio::time::timeout(GIVE_UP, story.proxy.room.acquire_many(PLACES)).await;
        _ = all.expect("the place is given back").unwrap();
        assert_eq!(listing.in_flight(), 0, "{path}, stream: {stream}");
    }
}
