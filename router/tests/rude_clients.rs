//! Clients that want more of the router than their share: they are cut off or refused, and the others
//! are served meanwhile.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use lastgasp_router::config::Config;
use lastgasp_router::connections::{self, HANDSHAKE, Limits, MAX_HEAD, MAX_HEADERS};
use lastgasp_router::proxy::Proxy;
use lastgasp_router::server;
use lastgasp_router::threads::Threads;
use lastgasp_router::workers::Workers;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// After so long a test gives up.
const GIVE_UP: Duration = Duration::from_secs(60);

struct Served {
    address: std::net::SocketAddr,
    proxy: Arc<Proxy>,
    _stop: watch::Sender<bool>,
}

async fn serve(config: Config, connections: usize) -> Served {
    let (workers, _arrivals) = Workers::new();
    let limits = Limits { connections, head: config.request_timeout, handshake: HANDSHAKE, unread: UNREAD };
    let proxy = Proxy::new(workers, config).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = watch::channel(false);
    let threads = Threads::start([server::routes(Arc::clone(&proxy))]).unwrap();
    tokio::spawn(connections::serve(listener, None, threads, limits, stopped));
    Served { address, proxy, _stop: stop }
}

/// As [`connections::UNREAD`], for a test that waits for it.
const UNREAD: Duration = Duration::from_secs(1);

fn impatient() -> Config {
    Config { request_timeout: Duration::from_millis(300), ..Config::default() }
}

impl Served {
    /// Sends `head`, then a byte whenever there is room, until the router ends the connection; what it said.
    async fn drip(&self, head: &str) -> String {
        let (mut read, mut write) = TcpStream::connect(self.address).await.unwrap().into_split();
        write.write_all(head.as_bytes()).await.unwrap();
        let drip = tokio::spawn(async move {
            while write.write_all(b"x").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let mut said = Vec::new();
        // A reset ends it as well.
        _ = tokio::time::timeout(GIVE_UP, read.read_to_end(&mut said)).await.expect("the connection is ended");
        drip.abort();
        String::from_utf8_lossy(&said).into_owned()
    }

    async fn ask(&self, request: &str) -> String {
        let mut connection = TcpStream::connect(self.address).await.unwrap();
        _ = connection.write_all(request.as_bytes()).await;
        let mut said = vec![0; 12];
        tokio::time::timeout(GIVE_UP, connection.read_exact(&mut said)).await.expect("an answer").unwrap();
        String::from_utf8_lossy(&said).into_owned()
    }
}

const HEALTH: &str = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";

#[tokio::test]
async fn a_head_that_comes_a_byte_at_a_time_is_cut_off_while_others_are_served() {
    let served = serve(impatient(), 100).await;
    let slow = ["GET /health HTTP/1.1\r\nx-slow: ", ""].map(|head| served.drip(head));
    let [first, second] = slow;
    let (first, second, other) = tokio::join!(first, second, served.ask(HEALTH));
    assert!(other.starts_with("HTTP/1.1 503"), "there are no workers: {other}");
    assert!(!first.contains(" 200 ") && !second.contains(" 200 "), "{first} {second}");
}

#[tokio::test]
async fn a_body_that_comes_a_byte_at_a_time_is_answered_408() {
    let served = serve(impatient(), 100).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\nconnection: close\r\n\r\n";
    let said = served.drip(head).await;
    assert!(said.starts_with("HTTP/1.1 408") && said.contains("request_timeout"), "{said}");
}

#[tokio::test]
async fn connections_beyond_the_limit_wait_until_a_silent_one_was_cut_off() {
    let served = serve(impatient(), 2).await;
    let mut silent =
        [TcpStream::connect(served.address).await.unwrap(), TcpStream::connect(served.address).await.unwrap()];
    assert!(served.ask(HEALTH).await.starts_with("HTTP/1.1 503"));
    for connection in &mut silent {
        let ended = tokio::time::timeout(GIVE_UP, connection.read(&mut [0; 1])).await.expect("it is cut off");
        assert!(!matches!(ended, Ok(1)), "{ended:?}");
    }
}

#[tokio::test]
async fn a_client_that_asks_and_never_reads_is_cut_off() {
    let config = Config { request_timeout: Duration::from_secs(3600), ..Config::default() };
    let served = serve(config, 100).await;
    let mut client = TcpStream::connect(served.address).await.unwrap();
    // When there is no room for answers, no more is read of what is asked, and the client waits with it.
    let asks = async { while client.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await.is_ok() {} };
    tokio::time::timeout(GIVE_UP, asks).await.expect("the connection is ended");
}

#[tokio::test]
async fn a_head_of_too_many_or_too_large_headers_is_answered_431() {
    let served = serve(Config::default(), 100).await;
    let many: String = (0..=MAX_HEADERS).map(|n| format!("x-{n}: 1\r\n")).collect();
    let large = format!("x: {}\r\n", "x".repeat(3 * MAX_HEAD));
    for headers in [many, large] {
        let said = served.ask(&format!("GET /health HTTP/1.1\r\nhost: x\r\n{headers}\r\n")).await;
        assert!(said.starts_with("HTTP/1.1 431"), "{said}");
    }
}

#[tokio::test]
async fn requests_beyond_the_limit_and_bodies_beyond_theirs_are_refused() {
    let served = serve(Config { max_requests: 1, max_body: 100, ..Config::default() }, 100).await;
    let url = format!("http://{}/v1/completions", served.address);
    let post = |body: String| reqwest::Client::new().post(&url).body(body).send();
    let large = post("x".repeat(101)).await.unwrap();
    assert_eq!(large.status(), StatusCode::PAYLOAD_TOO_LARGE);
    let place = Arc::clone(&served.proxy.room).try_acquire_owned().unwrap();
    let refused = post("{}".to_owned()).await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused.headers().contains_key("retry-after"));
    assert!(refused.text().await.unwrap().contains("too_many_requests"));
    drop(place);
    assert_eq!(post("{}".to_owned()).await.unwrap().status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn others_are_answered_while_a_large_body_is_read() {
    let served = serve(Config::default(), 100).await;
    let zeros = "0,".repeat(4 * 1024 * 1024);
    let body = format!(r#"{{"model":"m","prompt":[{zeros}0]}}"#);
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    let mut large = TcpStream::connect(served.address).await.unwrap();
    large.write_all(head.as_bytes()).await.unwrap();
    large.write_all(body.as_bytes()).await.unwrap();
    // It has all of it now, or nearly, and everything is served by one thread.
    let mut other = TcpStream::connect(served.address).await.unwrap();
    let begun = Instant::now();
    let (mut last, mut longest) = (begun, Duration::ZERO);
    let mut said = [0; 12];
    let mut answer = std::pin::pin!(large.read_exact(&mut said));
    loop {
        tokio::select! {
            biased;
            _ = &mut answer => break,
            () = ask_again(&mut other) => {
                longest = longest.max(last.elapsed());
                last = Instant::now();
            }
        }
    }
    longest = longest.max(last.elapsed());
    assert!(said.starts_with(b"HTTP/1.1 404"), "no worker has that model");
    let whole = begun.elapsed();
    assert!(longest < whole / 2, "the other client waited {longest:?} of {whole:?} for one answer");
}

/// One more request on a connection that is kept.
async fn ask_again(connection: &mut TcpStream) {
    connection.write_all(HEALTH.as_bytes()).await.unwrap();
    let mut said = Vec::new();
    while !said.ends_with(b"}") {
        let read = connection.read_buf(&mut said);
        assert!(tokio::time::timeout(GIVE_UP, read).await.expect("an answer").unwrap() > 0);
    }
}
