//! An engine that costs next to nothing: vLLM's wire format from a template, one thread, one write a
//! chunk. The mock of the stories spends more on a token than a router does, and would be what is
//! measured.
//!
//! A token's text is ` <number><letter><time>`: its place in the answer, the engine that wrote it, and
//! CLOCK_MONOTONIC in nanoseconds just before it was written. So a client sees every gap, every
//! repetition, every delay, and which engine it hears. `user` of a request says how fast: the pause
//! between tokens in microseconds, or 0 for as fast as they are taken.

#![forbid(unsafe_code)]

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Parser;
use lastgasp::sensors::proc::monotonic_now;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

/// Most bytes of a request's head and body.
const MAX_REQUEST: usize = 1 << 20;

/// An engine that costs next to nothing, for `cargo xtask bench router`.
#[derive(Debug, Parser)]
#[command(name = "bench-engine")]
struct Arguments {
    /// The letter that its tokens bear.
    letter: char,
    /// Where it writes its address, as JSON.
    ready: PathBuf,
}

#[derive(Debug)]
struct Engine {
    letter: char,
    /// When each request for tokens was read, in nanoseconds.
    asked: Mutex<Vec<u64>>,
}

fn main() -> io::Result<()> {
    let Arguments { letter, ready } = Arguments::parse();
    serve(letter, &ready)
}

/// Serves until it is killed.
fn serve(letter: char, ready: &Path) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
        listener.set_nonblocking(true)?;
        listener.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into())?;
        // As engines have it: a thousand streams that are moved come within milliseconds.
        listener.listen(4096)?;
        let listener = TcpListener::from_std(listener.into())?;
        let url = format!("http://{}", listener.local_addr()?);
        let unfinished = ready.with_extension("unfinished");
        std::fs::write(&unfinished, json!({ "url": url }).to_string())?;
        std::fs::rename(&unfinished, ready)?;
        let engine = Arc::new(Engine { letter, asked: Mutex::default() });
        loop {
            let (connection, _) = listener.accept().await?;
            connection.set_nodelay(true)?;
            let engine = Arc::clone(&engine);
            // Whoever reads no more ends a connection, and that is all there is to say.
            tokio::spawn(async move { _ = engine.connection(connection).await });
        }
    })
}

impl Engine {
    async fn connection(&self, mut connection: TcpStream) -> io::Result<()> {
        let mut unread = Vec::new();
        while let Some((path, body)) = request(&mut connection, &mut unread).await? {
            match path.as_str() {
                "/v1/completions" => self.generate(&mut connection, &body).await?,
                "/asked" => {
                    let asked = std::mem::take(&mut *self.asked.lock().unwrap_or_else(PoisonError::into_inner));
                    answer(&mut connection, "200 OK", &json!(asked)).await?;
                }
                "/v1/models" => {
                    let models = json!({ "object": "list", "data": [{ "id": "m", "object": "model", "max_model_len": 1 << 20 }] });
                    answer(&mut connection, "200 OK", &models).await?;
                }
                "/health" | "/health_generate" | "/server_info" | "/get_server_info" | "/get_model_info"
                | "/model_info" => {
                    answer(&mut connection, "200 OK", &json!({ "model_path": "m" })).await?;
                }
                _ => answer(&mut connection, "404 Not Found", &json!({ "error": "there is no such path" })).await?,
            }
        }
        Ok(())
    }

    async fn generate(&self, connection: &mut TcpStream, body: &[u8]) -> io::Result<()> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).push(monotonic_now().0);
        let Ok(request) = serde_json::from_slice::<Value>(body) else {
            return answer(connection, "400 Bad Request", &json!({ "error": "the body is not JSON" })).await;
        };
        let carried = request["prompt"].as_array().map_or(0, |ids| ids.len().saturating_sub(1));
        let tokens = request["max_tokens"].as_u64().and_then(|tokens| usize::try_from(tokens).ok()).unwrap_or(16);
        let pace =
            request["user"].as_str().and_then(|user| user.parse().ok()).map_or(Duration::ZERO, Duration::from_micros);
        let ids = request["return_token_ids"] == true;
        let mut out = Vec::with_capacity(1024);
        out.extend_from_slice(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n",
        );
        let mut due = Instant::now();
        let mut event = Vec::with_capacity(512);
        for number in carried..carried + tokens {
            event.clear();
            let (letter, now) = (self.letter, monotonic_now().0);
            write!(
                event,
                r#"data: {{"id":"cmpl-b8a73111fcc261db","object":"text_completion","created":1795979016,"model":"m","choices":[{{"index":0,"text":" {number}{letter}{now}","logprobs":null,"finish_reason":"#
            )?;
            event.extend_from_slice(if number + 1 == carried + tokens { br#""length""# } else { b"null" });
            event.extend_from_slice(br#","stop_reason":null,"prompt_token_ids":"#);
            event.extend_from_slice(if ids && number == carried { b"[7]" } else { b"null" });
            if ids {
                write!(event, r#","token_ids":[{number}]}}]}}"#)?;
            } else {
                event.extend_from_slice(br#","token_ids":null}]}"#);
            }
            event.extend_from_slice(b"\n\n");
            write!(out, "{:x}\r\n", event.len())?;
            out.extend_from_slice(&event);
            out.extend_from_slice(b"\r\n");
            connection.write_all(&out).await?;
            out.clear();
            if pace.is_zero() {
                tokio::task::yield_now().await;
            } else {
                due += pace;
                tokio::time::sleep_until(due).await;
            }
        }
        connection.write_all(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n").await
    }
}

/// Path and body of the next request, if there is one.
async fn request(connection: &mut TcpStream, unread: &mut Vec<u8>) -> io::Result<Option<(String, Vec<u8>)>> {
    loop {
        if let Some(end) = unread.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&unread[..end]).to_ascii_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
            let whole = end + 4 + length.unwrap_or(0usize);
            if unread.len() >= whole {
                let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
                let body = unread[end + 4..whole].to_vec();
                unread.drain(..whole);
                return Ok(Some((path, body)));
            }
        }
        if unread.len() > MAX_REQUEST || connection.read_buf(unread).await? == 0 {
            return Ok(None);
        }
    }
}

async fn answer(connection: &mut TcpStream, status: &str, body: &Value) -> io::Result<()> {
    let body = body.to_string();
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
    connection.write_all((head + &body).as_bytes()).await
}
