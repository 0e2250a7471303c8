//! Machines that are gone, and do not even refuse a connection. A request is not sent to all of them in
//! turn: `--wait-for-worker` bounds its search.
#![forbid(unsafe_code)]

mod fake;

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use axum::http::StatusCode;
use fake::story::Story;
use lastgasp_router::config::Config;
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use tokio::time::Instant;

/// It drops every SYN: the one place in its queue is taken (listen(2), `tcp_abort_on_overflow` is 0).
struct Mute {
    endpoint: String,
    _socket: Socket,
    _queued: TcpStream,
}

fn mute() -> Mute {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    socket.listen(0).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    let queued = TcpStream::connect(address).unwrap();
    Mute { endpoint: format!("http://{address}"), _socket: socket, _queued: queued }
}

#[tokio::test(start_paused = true)]
async fn the_search_ends_after_the_wait_and_the_connection_that_was_under_way() {
    let machines = [mute(), mute(), mute(), mute()];
    for stream in [false, true] {
        let story = Story::start(Config { wait_for_worker: Duration::from_secs(3), ..Config::default() }, &[]).await;
        for (name, machine) in ["a", "b", "c", "d"].into_iter().zip(&machines) {
            story.list(name, &machine.endpoint);
        }
        let began = Instant::now();
        let body = json!({ "model": "m", "prompt": "Hi", "stream": stream });
        let response = story.post("/v1/completions", &body).await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "no_worker");
        // Two of 2 s each, of a clock that only goes on where everybody waits for it.
        let seconds = began.elapsed().as_secs();
        assert_eq!(seconds, 4, "stream: {stream}");
    }
}
