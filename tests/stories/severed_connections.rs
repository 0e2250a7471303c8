//! Routers that do not know of us watch nothing but their connections. These break when a worker is
//! lost, where the operator wants it.

use std::io::{ErrorKind, Read as _};
use std::net::{TcpListener, TcpStream};

use lastgasp_protocol::Certificate;
use lastgasp_tests::client::{Ending, LiveStream};
use lastgasp_tests::daemon::DaemonConfig;
use lastgasp_tests::process::{GIVE_UP, Process};
use nix::sys::signal::Signal;
use tokio::process::Command;

use crate::scene::{Question, Scene};

fn severing(setting: toml::Table) -> impl FnOnce(DaemonConfig) -> DaemonConfig {
    move |mut config| {
        for worker in &mut config.worker {
            worker.sever = setting.clone();
        }
        config
    }
}

fn severed(certificate: &Certificate) -> Vec<&str> {
    let effects = certificate.timeline.iter().filter(|moment| moment.kind == "effect" && moment.what == "sever");
    effects.map(|moment| moment.detail.as_str()).collect()
}

/// Its kernel acknowledges every byte, and nothing ever comes: without an end to the connection
/// this client would wait for ever (docs/dynamo.md).
#[tokio::test]
async fn a_client_of_a_hung_engine_sees_its_stream_break() {
    let mut scene = Scene::configured("required", &[], severing(toml::toml! { enabled = true })).await;
    let question = Question::chat("one");
    let direct = scene.engine("alpha").ready.http;
    let mut cut = LiveStream::open(direct, question.endpoint, &question.body).await.unwrap();
    cut.tokens(5).await.unwrap();
    let direct = scene.engine("beta").ready.http;
    let whole = LiveStream::open(direct, question.endpoint, &question.body).await.unwrap();

    scene.engine("alpha").signal_root(Signal::SIGSTOP);

    let cut = cut.finish().await.unwrap();
    assert!(matches!(cut.ending, Some(Ending::Broken(_))), "{cut:#?}");
    assert_eq!(whole.finish().await.unwrap().ending, Some(Ending::Whole), "beta is healthy");
    let certificate = scene.discovery.certificate("alpha", |certificate| !severed(certificate).is_empty()).await;
    let certificate = certificate.unwrap();
    assert!(severed(&certificate).iter().any(|detail| detail.contains(" of vllm (pid ")), "{certificate:#?}");
    let metrics = scene.daemon.metrics().await.unwrap();
    assert!(metrics.contains(r#"lastgasp_actions_total{action="sever",outcome="done"} "#), "{metrics}");
    assert!(scene.engine("alpha").process.identity.is_alive(), "it is hung, not killed");
}

/// A sidecar outlives its engine. What it tells its own router is too late.
#[tokio::test]
async fn a_companion_loses_its_streams_with_the_engine_but_not_its_ties_to_discovery() {
    let router = TcpListener::bind("127.0.0.1:0").unwrap();
    let discovery = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
    let script = format!(
        "exec 3<>/dev/tcp/127.0.0.1/{} 4<>/dev/tcp/127.0.0.1/{}; exec sleep 3600",
        port(&router),
        port(&discovery)
    );
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("bash");
    command.args(["-c", &script]);
    let companion = Process::spawn("companion", command, folder.path()).unwrap();
    let accept = |listener: &TcpListener| -> TcpStream { listener.accept().unwrap().0 };
    let (mut stream, mut tie) = (accept(&router), accept(&discovery));
    let setting = toml::toml! {
        enabled = true
        companion = { pid = (companion.identity.pid) }
        spare_ports = [(port(&discovery))]
    };
    let mut scene = Scene::configured("required", &[], severing(setting)).await;

    scene.engine("alpha").signal_core(Signal::SIGKILL);

    stream.set_read_timeout(Some(GIVE_UP)).unwrap();
    let broken = tokio::task::spawn_blocking(move || stream.read(&mut [0]).unwrap_err().kind()).await.unwrap();
    assert_eq!(broken, ErrorKind::ConnectionReset);
    let certificate = scene.discovery.certificate("alpha", |certificate| !severed(certificate).is_empty()).await;
    let certificate = certificate.unwrap();
    let cut = format!("1 connection of companion (pid {})", companion.identity.pid);
    assert!(severed(&certificate).iter().any(|detail| detail.contains(&cut)), "{certificate:#?}");
    tie.set_nonblocking(true).unwrap();
    assert_eq!(tie.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock, "its tie to discovery");
    assert!(companion.identity.is_alive());
}
