//! The status page: one file in the binary, and a feed of server-sent events that keeps it up to
//! date (WHATWG HTML, 9.2).
//!
//! It shows what `lastgasp status`, `deaths` and `events` tell, and can change nothing. Nothing of
//! it comes from anywhere else, and its Content-Security-Policy allows nothing else: the script and
//! the style by their hashes, and connections to the daemon alone.

use std::collections::HashSet;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::sse::{Event as Message, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use futures_util::{Stream, StreamExt, stream};
use lastgasp_protocol::Certificate;
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_stream::wrappers::{BroadcastStream, IntervalStream, WatchStream};

use super::{Event, StatusHub, story};
use crate::metrics::Metrics;

static PAGE: &str = include_str!("page.html");

/// Pages that are fed at one time. More than look at one node, and few enough that no scanner
/// costs the daemon anything.
const MOST_FEEDS: usize = 32;
/// Events that a page begins with.
const HISTORY: usize = 200;
/// Certificates that a page begins with.
const DEATHS: usize = 64;
/// How often counters are looked at.
const COUNTERS: Duration = Duration::from_secs(2);
/// How often something is sent at the least, so that a connection that is gone is noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// What the page may do. `style-src` and `script-src` hold the hashes of its only style and script.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let policy = format!(
        "default-src 'none'; script-src '{}'; style-src '{}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        hash_of("<script>", "</script>"),
        hash_of("<style>", "</style>"),
    );
    HeaderValue::from_str(&policy).expect("hashes are ASCII")
});

/// The hash of what stands between two tags (CSP Level 3, 2.3.1).
fn hash_of(open: &str, close: &str) -> String {
    let inside = PAGE.split_once(open).and_then(|(_, rest)| rest.split_once(close)).map_or("", |(inside, _)| inside);
    format!("sha256-{}", BASE64_STANDARD.encode(Sha256::digest(inside)))
}

#[derive(Clone)]
struct Shared {
    hub: StatusHub,
    metrics: Metrics,
    feeds: Arc<Semaphore>,
}

/// `/` and `/feed`. `listen` is where the daemon is asked.
pub(super) fn router(hub: StatusHub, metrics: Metrics, listen: SocketAddr) -> Router {
    let shared = Shared { hub, metrics, feeds: Arc::new(Semaphore::new(MOST_FEEDS)) };
    let local_only = middleware::from_fn(move |request: Request, next: Next| async move {
        if listen.ip().is_loopback() && !is_local(request.headers()) {
            return (StatusCode::FORBIDDEN, "ask as localhost, or by this machine's loopback address\n")
                .into_response();
        }
        next.run(request).await
    });
    Router::new().route("/", get(page)).route("/feed", get(feed)).layer(local_only).with_state(shared)
}

/// A page from elsewhere can have a name of its own lead to a loopback address, and so read what
/// is served there as if it were its own ("DNS rebinding"). The name that it used is in `Host`.
fn is_local(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST).and_then(|host| host.to_str().ok()) else { return false };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok()
}

async fn page() -> impl IntoResponse {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, POLICY.clone()),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, PAGE)
}

type Messages = Pin<Box<dyn Stream<Item = Message> + Send>>;

async fn feed(State(shared): State<Shared>) -> Response {
    let Ok(place) = Arc::clone(&shared.feeds).try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many pages are open; close one\n").into_response();
    };
    let Shared { hub, metrics, .. } = shared;
    let (history, live) = hub.events();
    let history: Vec<_> = history[history.len().saturating_sub(HISTORY)..].iter().map(|event| short(event)).collect();
    let live = BroadcastStream::new(live).filter_map(|event| async move {
        // A page that missed some has its status and its deaths all the same.
        event.ok().map(|event| message("event", &short(&event)))
    });
    let status = WatchStream::new(hub.watch()).map(|status| message("status", &*status));
    let mut sent = HashSet::new();
    let versions = WatchStream::new(hub.watch_deaths());
    let deaths = versions.map(move |_| message("deaths", &new_deaths(&hub, &mut sent)));
    let mut last = None;
    let counters = IntervalStream::new(tokio::time::interval(COUNTERS)).filter_map(move |_| {
        let counters = metrics.counters();
        let changed = last.as_ref() != Some(&counters);
        let message = changed.then(|| message("counters", &counters));
        last = Some(counters);
        async move { message }
    });
    let all: [Messages; 4] = [Box::pin(status), Box::pin(deaths), Box::pin(live), Box::pin(counters)];
    let messages = stream::once(async move { message("history", &history) }).chain(stream::select_all(all));
    let messages = messages.map(move |message| with_its_place(&place, message));
    Sse::new(messages).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

/// The place is given back when the stream that holds it is dropped.
fn with_its_place(_: &OwnedSemaphorePermit, message: Message) -> Result<Message, Infallible> {
    Ok(message)
}

fn message(name: &str, data: &impl serde::Serialize) -> Message {
    // JSON has no line breaks of its own, which server-sent events would split at.
    Message::default().event(name).data(serde_json::to_string(data).unwrap_or_else(|_| "null".to_owned()))
}

/// An event without the certificate, which comes by itself.
fn short(event: &Event) -> serde_json::Value {
    let Event { at, kind, worker, summary, certificate_json: _ } = event;
    json!({ "at": at, "kind": kind, "worker": worker, "summary": summary })
}

/// The certificates that a page has not got yet, each with its cause in words.
fn new_deaths(hub: &StatusHub, sent: &mut HashSet<String>) -> Vec<serde_json::Value> {
    let known = hub.deaths();
    let newest = &known[known.len().saturating_sub(DEATHS)..];
    let parsed = newest.iter().filter_map(|json| serde_json::from_str::<Certificate>(json).ok());
    let new = parsed.filter(|certificate| sent.insert(certificate.certificate.clone()));
    new.map(|certificate| json!({ "words": story::in_words(&certificate.cause), "certificate": certificate })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_needs_nothing_but_itself() {
        for foreign in ["http://", "https://", "//cdn", "@import", "url(", " src=", "innerHTML", "style=\"", " onclick"]
        {
            // The name of the SVG format looks like an address and is none.
            let page = PAGE.replace("http://www.w3.org/2000/svg", "");
            assert!(!page.contains(foreign), "{foreign}");
        }
        for once in ["<script>", "</script>", "<style>", "</style>"] {
            assert_eq!(PAGE.matches(once).count(), 1, "{once}");
        }
    }

    #[test]
    fn only_names_of_this_machine_are_local() {
        let host = |host: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_static(host));
            is_local(&headers)
        };
        for local in ["localhost", "LocalHost:9464", "127.0.0.1:9464", "127.0.0.1", "[::1]:9464", "[::1]"] {
            assert!(host(local), "{local}");
        }
        for foreign in ["evil.example:9464", "localhost.evil.example", "127.0.0.1.evil.example", ""] {
            assert!(!host(foreign), "{foreign}");
        }
        assert!(!is_local(&HeaderMap::new()));
    }
}
