//! The health sensor against real servers over loopback.

#[path = "support/health.rs"]
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use axum::http::StatusCode;
use lastgasp::config::{HealthConfig, Service};
use lastgasp::core::{HealthRole, Kind};
use support::{Case, Network, Sensor, Server, config, grpc};
use tokio::net::TcpListener;
use tonic::service::Routes;
use tonic_health::ServingStatus;

const SERVING: Kind = Kind::Serving { role: HealthRole::Liveness };
const NOT_SERVING: Kind = Kind::NotServing { role: HealthRole::Liveness };

/// A tonic-health server as vllm-rs has one, with `""` SERVING.
fn engine(address: &str) -> (Server, tonic_health::server::HealthReporter) {
    let (reporter, service) = tonic_health::server::health_reporter();
    (Server::grpc(address, Routes::new(service)), reporter)
}

fn named(config: HealthConfig, name: &str) -> HealthConfig {
    HealthConfig { services: vec![Service { name: name.to_owned(), role: HealthRole::Liveness }], ..config }
}

mod cases {
    use super::*;

    #[tokio::test]
    async fn blip() {
        let (server, calls) = Case::read("blip").server();
        let mut sensor = Sensor::of(grpc(server.address));
        sensor.expect(&[SERVING]).await;
        calls.go_on.store(true, Ordering::Relaxed);
        sensor.expect(&[Kind::ProbeUnanswered, Kind::ProbeAnswered]).await;
        sensor.expect_nothing_more().await;
    }

    #[tokio::test]
    async fn half_open() {
        let (server, _) = Case::read("half-open").server();
        let network = Network::before(server.address).await;
        let config = HealthConfig { keepalive: Duration::from_millis(100), ..grpc(network.address) };
        let mut sensor = Sensor::of(config);
        sensor.expect(&[SERVING]).await;
        sensor.says("watch serving").await;
        network.cut(true);
        let (mut unanswered, mut broken) = (false, false);
        while !(unanswered && broken) {
            match sensor.next().await {
                Kind::ProbeUnanswered => unanswered = true,
                Kind::WatchBroken => broken = true,
                other => panic!("{other:?} from a network that is cut"),
            }
        }
        // The engine was well all the time. A new connection finds that out: the old ones never do.
        network.cut(false);
        sensor.skip_to(Kind::ProbeAnswered, &[Kind::ProbeUnanswered]).await;
    }

    #[tokio::test]
    async fn not_serving_then_closed() {
        let (server, calls) = Case::read("not-serving-then-closed").server();
        let mut sensor = Sensor::of(grpc(server.address));
        sensor.expect(&[SERVING, NOT_SERVING, Kind::WatchBroken, Kind::ProbeAnswered]).await;
        sensor.says("withdrawn by its server").await;
        let checks = *calls.check.borrow();
        calls.checks(checks + 5).await;
        sensor.expect_nothing_more().await;
    }

    #[tokio::test]
    async fn unimplemented() {
        let (server, calls) = Case::read("unimplemented").server();
        let mut sensor = Sensor::of_life(grpc(server.address), server.address.port(), false);
        // Nothing but the listening socket tells that it serves.
        sensor.expect(&[Kind::Listening]).await;
        let said = sensor.handle.summary();
        assert!(said.starts_with("no health service at http://127.0.0.1:"), "{said}");
        assert!(sensor.next_or_end().await.is_none(), "there is nothing left to ask");
        assert_eq!(*calls.watch.borrow(), 1);
    }

    #[tokio::test]
    async fn watch_once_healthy() {
        let (server, calls) = Case::read("watch-once-healthy").server();
        let mut sensor = Sensor::of(grpc(server.address));
        sensor.expect(&[SERVING]).await;
        sensor.says("polling Check (watch-once server): serving").await;
        calls.checks(10).await;
        sensor.expect_nothing_more().await;
        assert_eq!(*calls.watch.borrow(), 1, "no busy loop");
    }

    #[tokio::test]
    async fn wrong_service_name() {
        let case = Case::read("wrong-service-name");
        let (server, reporter) = engine("127.0.0.1:0");
        reporter.set_service_status("vllm.Inference", ServingStatus::Serving).await;
        let mut sensor = Sensor::of(named(grpc(server.address), case.service()));
        let said = sensor.says("which knows").await;
        let address = server.address;
        let wanted =
            format!("configuration: no service \"nope\" at http://{address}, which knows \"\", \"vllm.Inference\"");
        assert_eq!(said, wanted);
        // It was never a death: the service begins to serve when it is registered.
        reporter.set_service_status("nope", ServingStatus::Serving).await;
        sensor.expect(&[SERVING]).await;
        sensor.says("watch serving").await;
        sensor.expect_nothing_more().await;
    }
}

#[tokio::test]
async fn the_watch_tells_every_change() {
    let (server, reporter) = engine("127.0.0.1:0");
    // Nobody asks within this test: what comes, comes from the Watch.
    let config = HealthConfig { check_interval: Duration::from_secs(3600), ..grpc(server.address) };
    let mut sensor = Sensor::of(config);
    sensor.expect(&[SERVING]).await;
    sensor.says("watch serving").await;
    for _ in 0..3 {
        reporter.set_service_status("", ServingStatus::NotServing).await;
        sensor.expect(&[NOT_SERVING]).await;
        reporter.set_service_status("", ServingStatus::Serving).await;
        sensor.expect(&[SERVING]).await;
    }
    sensor.expect_nothing_more().await;
}

#[tokio::test]
async fn a_service_that_is_taken_down_without_a_word_does_not_serve() {
    let (server, mut reporter) = engine("127.0.0.1:0");
    let mut sensor = Sensor::of(grpc(server.address));
    sensor.expect(&[SERVING]).await;
    sensor.says("watch serving").await;
    reporter.clear_service_status("").await;
    sensor.expect(&[NOT_SERVING]).await;
}

#[tokio::test]
async fn a_server_that_is_gone_refuses_and_one_that_returns_is_watched_again() {
    let (server, _) = engine("127.0.0.1:0");
    let address = server.address;
    let mut sensor = Sensor::of(grpc(address));
    sensor.expect(&[SERVING]).await;
    sensor.says("watch serving").await;
    drop(server);
    let gone = Kind::ProbeRefused { listening: false };
    // It may begin or cease to listen between the refusal and the look at who listens.
    let going = Kind::ProbeRefused { listening: true };
    sensor.skip_to(gone.clone(), &[Kind::WatchBroken, Kind::ProbeUnanswered, going.clone()]).await;

    let (_server, reporter) = engine(&address.to_string());
    sensor.skip_to(Kind::ProbeAnswered, &[Kind::WatchBroken, gone, going]).await;
    sensor.says("watch serving").await;
    reporter.set_service_status("", ServingStatus::NotServing).await;
    sensor.skip_to(NOT_SERVING, &[Kind::WatchBroken, Kind::ProbeAnswered]).await;
}

#[tokio::test]
async fn a_server_that_accepts_and_never_answers_is_told_each_time_once_it_served() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = HealthConfig { check_timeout: Duration::from_millis(50), ..grpc(silent.local_addr().unwrap()) };

    let starting = Sensor::of(config.clone());
    starting.says("probe unanswered").await;
    let mut served = Sensor::of_life(config, 1, true);
    served.expect(&[Kind::ProbeUnanswered, Kind::ProbeUnanswered, Kind::ProbeUnanswered]).await;

    // The one that is taken to be loading has said nothing all the while.
    starting.end().await;
}

#[tokio::test]
async fn readiness_is_told_apart_from_liveness() {
    let (server, reporter) = engine("127.0.0.1:0");
    reporter.set_service_status("vllm.Inference", ServingStatus::NotServing).await;
    let mut config = grpc(server.address);
    config.services.push(Service { name: "vllm.Inference".to_owned(), role: HealthRole::Readiness });
    let mut sensor = Sensor::of(config);
    sensor.expect(&[SERVING, Kind::NotServing { role: HealthRole::Readiness }]).await;
    reporter.set_service_status("vllm.Inference", ServingStatus::Serving).await;
    sensor.expect(&[Kind::Serving { role: HealthRole::Readiness }]).await;
}

#[tokio::test]
async fn http_health_begins_with_200_and_knows_503_silence_and_refusal() {
    let code = Arc::new(AtomicU16::new(503));
    let answers = Arc::clone(&code);
    let health = async move || match answers.load(Ordering::Relaxed) {
        0 => std::future::pending().await,
        code => StatusCode::from_u16(code).unwrap(),
    };
    let server = Server::http(axum::Router::new().route("/health", axum::routing::get(health)));
    let http = Some(format!("http://{}/health", server.address));
    let mut sensor = Sensor::of(HealthConfig { http, ..config() });
    sensor.says("polling HTTP: not serving").await;
    code.store(200, Ordering::Relaxed);
    sensor.expect(&[SERVING]).await;
    sensor.expect_nothing_more().await;
    code.store(404, Ordering::Relaxed);
    sensor.says("answers \"404 Not Found\"").await;
    code.store(503, Ordering::Relaxed);
    sensor.expect(&[NOT_SERVING]).await;
    code.store(0, Ordering::Relaxed);
    sensor.expect(&[Kind::ProbeUnanswered]).await;
    code.store(200, Ordering::Relaxed);
    sensor.skip_to(SERVING, &[Kind::ProbeUnanswered, Kind::ProbeAnswered]).await;
    drop(server);
    sensor.skip_to(Kind::ProbeRefused { listening: false }, &[Kind::ProbeUnanswered]).await;
}

#[tokio::test]
async fn an_engine_without_health_serves_once_it_listens() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let mut sensor = Sensor::of_life(config(), port, false);
    sensor.says(&format!("waits for a listener on port {port}")).await;
    let _listener = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    sensor.expect(&[Kind::Listening]).await;
    assert!(sensor.next_or_end().await.is_none());
}

#[tokio::test]
async fn a_wrong_address_is_a_complaint_about_the_configuration() {
    for (grpc, http) in [
        (Some("not an address"), None),
        (Some("localhost:50051"), None),
        (Some("https://localhost:50051"), None),
        (None, Some("127.0.0.1:8000/health")),
        (None, Some("https://127.0.0.1:8000/health")),
    ] {
        let (grpc, http) = (grpc.map(str::to_owned), http.map(str::to_owned));
        let sensor = Sensor::of(HealthConfig { grpc, http, ..config() });
        let said = sensor.says("waits for a listener").await;
        assert!(said.starts_with("configuration: health.") && said.contains("must be http://HOST:PORT"), "{said}");
    }
}

#[tokio::test]
async fn a_dropped_handle_ends_the_sensor() {
    let (server, _) = engine("127.0.0.1:0");
    let mut sensor = Sensor::of(grpc(server.address));
    sensor.expect(&[SERVING]).await;
    sensor.end().await;
}
