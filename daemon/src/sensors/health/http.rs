//! Health over plain HTTP, for engines without `grpc.health.v1`: a GET that answers 2xx or 503.

use std::time::Duration;

use super::Context;
use super::grpc::Reply;
use super::machine::{Answer, Machine, Outcome};
use crate::config::HealthConfig;

/// Longest body that is read to keep the connection; a longer one costs a new connection.
const MAX_BODY: u64 = 64 * 1024;

/// Asks for ever. Returns only if the address is none.
pub(super) async fn run(context: &Context, address: &str, config: &HealthConfig) {
    let Some(client) = Client::new(context, address, config.check_timeout) else {
        context.complain(format!("configuration: health.http {address:?} must be http://HOST:PORT/PATH"));
        return;
    };
    let mut machine = Machine::http(address, context.served_before());
    let mut tick = super::in_step(config.check_interval);
    loop {
        context.tell(&machine);
        let aloud = tokio::select! {
            () = context.asked() => true,
            _ = tick.tick() => false,
        };
        let outcome = client.get().await;
        for kind in machine.answered(&machine.round(), vec![outcome], aloud).report {
            context.report(kind);
        }
    }
}

/// One GET, for those who do not watch the engine. None if the address is not one of plain-text HTTP.
pub(super) async fn ask_once(address: &str, timeout: Duration) -> Option<Reply> {
    let (http, url) = client(address, timeout)?;
    Some(match http.get(url).send().await {
        Ok(response) => Reply::Answered(answer(response.status())),
        Err(error) if super::is_refused(&error) => Reply::Refused,
        Err(error) if super::is_ours(&error) => Reply::NotAsked,
        Err(_) => Reply::Late,
    })
}

fn client(address: &str, timeout: Duration) -> Option<(reqwest::Client, reqwest::Url)> {
    let url = reqwest::Url::parse(address).ok().filter(|url| url.scheme() == "http" && url.has_host())?;
    let http = reqwest::Client::builder()
        .timeout(timeout)
        // The engine is on this node, whatever HTTP_PROXY says.
        .no_proxy()
        // Health that lies elsewhere is not this engine's.
        .redirect(reqwest::redirect::Policy::none())
        .build()
        .ok()?;
    Some((http, url))
}

fn answer(status: reqwest::StatusCode) -> Answer {
    if status.is_success() {
        Answer::Serving
    } else if status.is_server_error() {
        Answer::NotServing
    } else {
        Answer::Other(status.to_string())
    }
}

struct Client {
    http: reqwest::Client,
    url: reqwest::Url,
    root: u32,
    port: u16,
}

impl Client {
    /// None if the address is not one of plain-text HTTP.
    fn new(context: &Context, address: &str, timeout: Duration) -> Option<Self> {
        let (http, url) = client(address, timeout)?;
        let port = url.port_or_known_default()?;
        Some(Self { http, url, root: context.root_tgid(), port })
    }

    async fn get(&self) -> Outcome {
        let response = match self.http.get(self.url.clone()).send().await {
            Ok(response) => response,
            Err(error) if super::is_refused(&error) => {
                return Outcome::Refused { listening: super::still_listening(self.root, self.port) };
            }
            Err(error) if super::is_ours(&error) => return Outcome::NotAsked,
            Err(_) => return Outcome::Unanswered,
        };
        let status = response.status();
        if response.content_length().is_some_and(|length| length <= MAX_BODY) {
            // Only to use the connection again: the status line has said everything.
            let _ = response.bytes().await;
        }
        Outcome::Answered(answer(status))
    }
}
