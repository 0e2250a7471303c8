//! A real server, asked as `lastgasp status`, `grpcurl` and Prometheus would.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tonic::transport::Endpoint;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::{ServerReflectionRequest, server_reflection_request, server_reflection_response};

use super::client::{self, ClientError};
use super::hub::HISTORY;
use super::proto::{EventsRequest, GetStatusRequest, WatchStatusRequest};
use super::*;
use crate::config::StatusConfig;
use crate::metrics::Metrics;

/// A daemon's status in a folder of its own.
struct Daemon {
    hub: StatusHub,
    metrics: Metrics,
    socket: PathBuf,
    http: String,
    serving: JoinHandle<Result<(), StatusError>>,
    _folder: TempDir,
}

fn config(socket: &Path) -> StatusConfig {
    StatusConfig { socket: socket.to_owned(), listen: "127.0.0.1:0".parse().unwrap(), page: true }
}

/// Where nobody listens.
fn commands() -> tokio::sync::mpsc::Sender<control::Request> {
    tokio::sync::mpsc::channel(1).0
}

fn bind(socket: &Path) -> Result<StatusServer, StatusError> {
    StatusServer::bind(&config(socket), StatusHub::new(NodeStatus::default()), Metrics::new(), commands())
}

fn daemon() -> Daemon {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("run/lastgasp.sock");
    let hub = StatusHub::new(NodeStatus { node: "gpu-a".into(), ..NodeStatus::default() });
    let metrics = Metrics::new();
    let server = StatusServer::bind(&config(&socket), hub.clone(), metrics.clone(), commands()).unwrap();
    let http = format!("http://{}", server.listen());
    Daemon { hub, metrics, socket, http, serving: tokio::spawn(server.serve()), _folder: folder }
}

fn note(summary: &str) -> Event {
    Event { at: render::now(), kind: "note".into(), summary: summary.into(), ..Event::default() }
}

async fn get(url: String) -> (u16, String) {
    let response = reqwest::get(url).await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

#[tokio::test]
async fn what_is_published_is_told() {
    let daemon = daemon();
    let mut client = client::connect(&daemon.socket).await.unwrap();
    let mut changes = client.watch_status(WatchStatusRequest {}).await.unwrap().into_inner();
    assert_eq!(changes.next().await.unwrap().unwrap().mode, "");
    daemon.hub.publish(NodeStatus { node: "gpu-a".into(), mode: "observe".into(), ..NodeStatus::default() });
    assert_eq!(changes.next().await.unwrap().unwrap().mode, "observe");
    assert_eq!(client.get_status(GetStatusRequest {}).await.unwrap().into_inner(), *daemon.hub.status());
}

#[tokio::test]
async fn a_follower_gets_old_events_and_new_ones_in_order() {
    let daemon = daemon();
    daemon.hub.event(note("before"));
    let mut client = client::connect(&daemon.socket).await.unwrap();
    let mut events = client.events(EventsRequest { follow: true }).await.unwrap().into_inner();
    assert_eq!(events.next().await.unwrap().unwrap().summary, "before");
    daemon.hub.event(note("after"));
    assert_eq!(events.next().await.unwrap().unwrap().summary, "after");

    let past = client.events(EventsRequest { follow: false }).await.unwrap().into_inner();
    let past: Vec<String> = past.map(|event| event.unwrap().summary).collect().await;
    assert_eq!(past, ["before", "after"]);
}

#[tokio::test]
async fn a_follower_that_is_too_slow_is_told_what_it_missed() {
    let daemon = daemon();
    let mut client = client::connect(&daemon.socket).await.unwrap();
    let mut events = client.events(EventsRequest { follow: true }).await.unwrap().into_inner();
    // More than history, channel and the stream's window hold, without giving the server a turn.
    for number in 0..4 * HISTORY {
        daemon.hub.event(note(&number.to_string()));
    }
    let mut missed = false;
    loop {
        let summary = events.next().await.unwrap().unwrap().summary;
        missed |= summary.ends_with("events are missing here: they were not read in time");
        if summary == (4 * HISTORY - 1).to_string() {
            break;
        }
    }
    assert!(missed);
}

#[tokio::test]
async fn health_and_reflection_are_served_beside_it() {
    let daemon = daemon();
    let endpoint = Endpoint::from_shared(format!("unix://{}", daemon.socket.display())).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let request = HealthCheckRequest { service: "lastgasp.v1.Status".into() };
    let health = HealthClient::new(channel.clone()).check(request).await.unwrap().into_inner();
    assert_eq!(health.status(), ServingStatus::Serving);

    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(server_reflection_request::MessageRequest::ListServices(String::new())),
    };
    let mut answers = ServerReflectionClient::new(channel)
        .server_reflection_info(tokio_stream::once(request))
        .await
        .unwrap()
        .into_inner();
    let answer = answers.next().await.unwrap().unwrap().message_response.unwrap();
    let server_reflection_response::MessageResponse::ListServicesResponse(list) = answer else { panic!("{answer:?}") };
    let services: Vec<String> = list.service.into_iter().map(|service| service.name).collect();
    assert!(services.contains(&"lastgasp.v1.Status".to_owned()), "{services:?}");
    assert!(services.contains(&"grpc.health.v1.Health".to_owned()), "{services:?}");
}

#[tokio::test]
async fn ready_means_sensors_and_first_scan_and_not_nats() {
    let daemon = daemon();
    assert_eq!(get(format!("{}/readyz", daemon.http)).await.0, 503);
    daemon.hub.publish(NodeStatus { ready: true, nats: "disconnected".into(), ..NodeStatus::default() });
    assert_eq!(get(format!("{}/readyz", daemon.http)).await.0, 200);
}

#[tokio::test]
async fn a_supervisor_that_stands_still_is_not_alive() {
    let daemon = daemon();
    assert_eq!(get(format!("{}/livez", daemon.http)).await, (200, "ok\n".into()), "it has not begun to beat");
    daemon.hub.pretend_last_beat(Instant::now().checked_sub(Duration::from_secs(31)).unwrap());
    assert_eq!(get(format!("{}/livez", daemon.http)).await.0, 503);
    daemon.hub.beat();
    assert_eq!(get(format!("{}/livez", daemon.http)).await.0, 200);
}

#[tokio::test]
async fn prometheus_finds_its_metrics() {
    let daemon = daemon();
    daemon.metrics.deaths.with_label_values(&["process_killed"]).inc();
    let (status, text) = get(format!("{}/metrics", daemon.http)).await;
    assert_eq!(status, 200);
    assert!(text.contains("lastgasp_deaths_total{cause=\"process_killed\"} 1\n"), "{text}");
}

#[tokio::test]
async fn the_page_is_allowed_its_own_script_and_style_and_nothing_else() {
    let daemon = daemon();
    let response = reqwest::get(format!("{}/", daemon.http)).await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/html; charset=utf-8");
    let policy = response.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
    assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
    assert!(response.text().await.unwrap().contains("new EventSource(\"feed\")"));
}

#[tokio::test]
async fn the_feed_begins_with_what_is_known_and_goes_on() {
    let daemon = daemon();
    daemon.hub.event(note("before"));
    let mut response = reqwest::get(format!("{}/feed", daemon.http)).await.unwrap();
    let mut text = String::new();
    let mut until = async |what: &str| {
        while !text.contains(what) {
            text.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
        }
    };
    until("\"summary\":\"before\"").await;
    until("event: deaths\ndata: []").await;
    until("\"node\":\"gpu-a\"").await;
    daemon.hub.event(note("after\nwith a line break"));
    until("after\\nwith a line break").await;
    daemon.metrics.deaths.with_label_values(&["hung"]).inc();
    until("\"name\":\"deaths\"").await;
}

#[tokio::test]
async fn pages_beyond_the_limit_are_refused_and_their_places_are_given_back() {
    let daemon = daemon();
    let mut open = Vec::new();
    let refused = loop {
        let response = reqwest::get(format!("{}/feed", daemon.http)).await.unwrap();
        if response.status() != 200 {
            break response;
        }
        open.push(response);
    };
    assert_eq!((refused.status().as_u16(), open.len()), (503, 32));
    open.clear();
    while reqwest::get(format!("{}/feed", daemon.http)).await.unwrap().status() != 200 {
        daemon.hub.event(note("somebody is written to, and found gone"));
    }
}

#[tokio::test]
async fn a_page_from_elsewhere_cannot_read_it_by_a_name_of_its_own() {
    let daemon = daemon();
    let client = reqwest::Client::new();
    for (path, status) in [("/", 403), ("/feed", 403), ("/livez", 200)] {
        let request = client.get(format!("{}{path}", daemon.http)).header("host", "evil.example");
        assert_eq!(request.send().await.unwrap().status(), status, "{path}");
    }
}

#[tokio::test]
async fn the_socket_is_its_owners_and_goes_with_the_daemon() {
    let daemon = daemon();
    let mode = std::fs::metadata(&daemon.socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut client = client::connect(&daemon.socket).await.unwrap();
    let mut events = client.events(EventsRequest { follow: true }).await.unwrap().into_inner();
    daemon.serving.abort();
    assert!(daemon.serving.await.unwrap_err().is_cancelled());
    assert!(!daemon.socket.exists());
    assert!(!matches!(events.next().await, Some(Ok(_))), "a follower does not hold up the end");
    let error = client::connect(&daemon.socket).await.unwrap_err();
    assert!(matches!(error, ClientError::NotThere { .. }), "{error}");
    assert!(error.to_string().contains("is it running (`lastgasp run`)?"), "{error}");
}

#[tokio::test]
async fn a_live_daemon_is_not_pushed_aside() {
    let daemon = daemon();
    let error = bind(&daemon.socket).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "another lastgasp answers on {}; end it, or set status.socket to another path",
            daemon.socket.display()
        )
    );
    client::connect(&daemon.socket).await.unwrap();
}

#[tokio::test]
async fn what_a_dead_daemon_left_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("lastgasp.sock");
    // A listener that is dropped leaves its socket behind, as a killed process does.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let server = bind(&socket).unwrap();
    let serving = tokio::spawn(server.serve());
    client::connect(&socket).await.unwrap();
    serving.abort();
}

#[tokio::test]
async fn a_successor_keeps_its_socket_when_the_predecessor_ends() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("lastgasp.sock");
    let predecessor = bind(&socket).unwrap();
    std::fs::remove_file(&socket).unwrap();
    let _successor = bind(&socket).unwrap();
    drop(predecessor);
    assert!(socket.exists());
}

#[test]
fn a_file_in_the_way_is_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lastgasp.sock");
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(bind(&path).unwrap_err(), StatusError::NoSocket(_)));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn an_address_in_use_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap();
    let config = StatusConfig { socket: folder.path().join("s"), listen, page: false };
    let error =
        StatusServer::bind(&config, StatusHub::new(NodeStatus::default()), Metrics::new(), commands()).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "cannot listen on {listen}: Address already in use (os error 98); set status.listen to a free address, or port 0 for any"
        )
    );
    assert!(!config.socket.exists(), "what was already bound is given back");
}
