//! gRPC health in its characters, as docs/engines.md has them.

use std::time::Duration;

use lastgasp_tests::engine::Engine;
use nix::sys::signal::Signal;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Streaming};
use tonic_health::pb::health_check_response::ServingStatus::{self, NotServing, ServiceUnknown, Serving};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::engine;

async fn client(engine: &Engine) -> HealthClient<Channel> {
    HealthClient::new(Endpoint::from_shared(engine.grpc()).unwrap().connect().await.unwrap())
}

fn service(name: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: name.to_owned() }
}

/// What the stream yields next; nothing once it has ended OK.
async fn next(watch: &mut Streaming<HealthCheckResponse>) -> Option<ServingStatus> {
    watch.message().await.unwrap().map(|message| message.status())
}

#[tokio::test]
async fn python_watch_yields_one_message_and_ends() {
    let (engine, _folder) = engine(&[]).await;
    let mut client = client(&engine).await;
    for (name, status) in [("", Serving), ("vllm.grpc.engine.VllmEngine", Serving), ("nope", ServiceUnknown)] {
        let mut watch = client.watch(service(name)).await.unwrap().into_inner();
        assert_eq!(next(&mut watch).await, Some(status));
        assert_eq!(next(&mut watch).await, None);
    }
    assert_eq!(client.check(service("")).await.unwrap().into_inner().status(), Serving);
    let unknown = client.check(service("nope")).await.unwrap_err();
    assert_eq!((unknown.code(), unknown.message()), (Code::NotFound, "Unknown service: nope"));
}

#[tokio::test]
async fn rust_watch_follows_and_ends_at_shutdown() {
    let (engine, _folder) = engine(&["--frontend", "rust", "--shutdown-timeout", "60"]).await;
    let mut client = client(&engine).await;
    let mut watch = client.watch(service("vllm.Inference")).await.unwrap().into_inner();
    assert_eq!(next(&mut watch).await, Some(Serving));
    engine.control("health?status=not_serving&service=vllm.Inference").await.unwrap();
    assert_eq!(next(&mut watch).await, Some(NotServing));
    assert_eq!(client.check(service("")).await.unwrap().into_inner().status(), Serving);
    assert_eq!(client.check(service("nope")).await.unwrap_err().code(), Code::NotFound);

    let mut watch = client.watch(service("")).await.unwrap().into_inner();
    assert_eq!(next(&mut watch).await, Some(Serving));
    engine.signal_root(Signal::SIGTERM);
    assert_eq!(next(&mut watch).await, Some(NotServing));
    assert_eq!(next(&mut watch).await, None);
}

#[tokio::test]
async fn rust_watch_learns_of_the_death_of_the_core() {
    let (engine, _folder) = engine(&["--frontend", "rust", "--rust-notice-ms", "300"]).await;
    let mut watch = client(&engine).await.watch(service("")).await.unwrap().into_inner();
    assert_eq!(next(&mut watch).await, Some(Serving));
    engine.signal_core(Signal::SIGKILL);
    assert_eq!(next(&mut watch).await, Some(NotServing));
}

#[tokio::test]
async fn a_server_without_the_service_says_so() {
    let (engine, _folder) = engine(&["--health-watch", "unimplemented", "--health-check-unimplemented"]).await;
    let mut client = client(&engine).await;
    assert_eq!(client.watch(service("")).await.unwrap_err().code(), Code::Unimplemented);
    assert_eq!(client.check(service("")).await.unwrap_err().code(), Code::Unimplemented);
}

#[tokio::test]
async fn a_frozen_connection_neither_answers_nor_closes() {
    let (engine, _folder) = engine(&["--frontend", "rust"]).await;
    let mut client = client(&engine).await;
    client.check(service("")).await.unwrap();
    engine.control("freeze?grpc=true").await.unwrap();
    let silent = tokio::time::timeout(Duration::from_millis(300), client.check(service(""))).await;
    assert!(silent.is_err(), "{silent:?}");
    engine.control("freeze?grpc=false").await.unwrap();
    assert_eq!(client.check(service("")).await.unwrap().into_inner().status(), Serving);
}
