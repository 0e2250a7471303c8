//! Health over plain HTTP, for engines without `grpc.health.v1`: a GET that answers 2xx or 503.

use std::time::Duration;

use axum::http::{StatusCode, Uri};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Body as _;
use hyper_util::client::legacy;
use hyper_util::rt::TokioExecutor;

use super::Context;
use super::grpc::Reply;
use super::machine::{Answer, Machine, ProbeOutcome};
use crate::config::HealthConfig;
use crate::network::Dialer;

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
pub(super) async fn ask_once(address: &str, timeout: Duration, dialer: Dialer) -> Option<Reply> {
    let (http, url) = client(address, dialer)?;
    Some(match tokio::time::timeout(timeout, http.get(url)).await {
        Ok(Ok(response)) => Reply::Answered(answer(response.status())),
        Ok(Err(error)) if super::is_refused(&error) => Reply::Refused,
        Ok(Err(error)) if super::is_ours(&error) => Reply::NotAsked,
        _ => Reply::Late,
    })
}

/// Neither proxies nor redirects are followed: the engine is on this node, and health that lies elsewhere is
/// not this engine's.
type Http = legacy::Client<Dialer, Empty<Bytes>>;

fn client(address: &str, dialer: Dialer) -> Option<(Http, Uri)> {
    let url = address.parse::<Uri>().ok()?;
    let is_plain = url.scheme_str() == Some("http") && url.host().is_some_and(|host| !host.is_empty());
    is_plain.then(|| (legacy::Client::builder(TokioExecutor::new()).pool_max_idle_per_host(1).build(dialer), url))
}

fn answer(status: StatusCode) -> Answer {
    if status.is_success() {
        Answer::Serving
    } else if status.is_server_error() {
        Answer::NotServing
    } else {
        Answer::Other(status.to_string())
    }
}

struct Client {
    http: Http,
    url: Uri,
    timeout: Duration,
    root: u32,
    port: u16,
}

impl Client {
    /// None if the address is not one of plain-text HTTP.
    fn new(context: &Context, address: &str, timeout: Duration) -> Option<Self> {
        let (http, url) = client(address, context.dialer())?;
        let port = url.port_u16().unwrap_or(80);
        Some(Self { http, url, timeout, root: context.root_tgid(), port })
    }

    async fn get(&self) -> ProbeOutcome {
        tokio::time::timeout(self.timeout, self.answer()).await.unwrap_or(ProbeOutcome::Unanswered)
    }

    async fn answer(&self) -> ProbeOutcome {
        let response = match self.http.get(self.url.clone()).await {
            Ok(response) => response,
            Err(error) if super::is_refused(&error) => {
                return ProbeOutcome::Refused { listening: super::still_listening(self.root, self.port) };
            }
            Err(error) if super::is_ours(&error) => return ProbeOutcome::NotAsked,
            Err(_) => return ProbeOutcome::Unanswered,
        };
        let status = response.status();
        if response.body().size_hint().exact().is_some_and(|length| length <= MAX_BODY) {
            // Only to use the connection again: the status line has said everything.
            let _ = response.into_body().collect().await;
        }
        ProbeOutcome::Answered(answer(status))
    }
}
