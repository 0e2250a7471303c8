//! An operator withdraws a worker whose engine seems well.

use std::process::Stdio;

use lastgasp_protocol::{CauseKind, WorkerState};
use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{DaemonConfig, Said};
use lastgasp_tests::discovery::Seen;
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

use crate::scene::{Scene, only_those_of_are_moved};

const WITHDRAW: [&str; 5] = ["withdraw", "alpha", "--reason", "garbled answers", "--yes"];

#[tokio::test]
async fn its_streams_go_on_elsewhere_and_its_processes_are_left_alone() {
    // What would be done about an engine that was lost by itself.
    let terminate = |mut config: DaemonConfig| {
        for worker in &mut config.worker {
            (worker.on_lost, worker.reap_grace_ms) = ("terminate-root".into(), 0);
        }
        config
    };
    let mut scene = Scene::configured("required", &[], terminate).await;
    let asked = scene.ask_several().await;

    let said = scene.daemon.tell(&WITHDRAW).await.unwrap();

    assert_eq!(said.code, Some(0), "{said:?}");
    only_those_of_are_moved("alpha", asked).await;
    scene.discovery.removed("alpha").await.unwrap();
    let certificate = scene.discovery.certificate("alpha", |c| c.routers_done == 1).await.unwrap();
    assert_eq!(certificate.cause.kind, CauseKind::Commanded, "{certificate:#?}");
    assert_eq!(certificate.cause.reason.as_deref(), Some("garbled answers"));
    assert_eq!(certificate.cause.sender.as_ref().map(|sender| sender.comm.as_str()), Some("lastgasp"));
    assert!(certificate.timeline.iter().any(|moment| moment.what == "commanded"), "{certificate:#?}");
    assert!(certificate.timeline.iter().all(|moment| moment.what != "terminate"), "{certificate:#?}");
    assert!(!scene.engine("alpha").process.has_exited());
}

#[tokio::test]
async fn it_is_not_listed_again_by_a_restarted_daemon_but_in_its_next_life() {
    let mut scene = Scene::new(&[]).await;
    scene.daemon.tell(&WITHDRAW).await.unwrap();
    scene.discovery.removed("alpha").await.unwrap();

    scene.kill_daemon().await;
    scene.start_daemon().await;
    let kept = |status: &Value| {
        let alpha = &status["workers"][0];
        alpha["reason"].as_str().is_some_and(|why| why.ends_with("garbled answers")) && alpha["state"] == "draining"
    };
    scene.daemon.status_when("out of service", kept).await.unwrap();
    // Its tombstone would lapse a day after it was written, and with it what the operator wanted.
    let renewed = |history: &[Seen]| history.iter().filter(|seen| seen.record.is_none()).count() == 2;
    let history = scene.discovery.wait_for("alpha", "the tombstone, renewed", renewed).await.unwrap();
    assert!(history.last().unwrap().record.is_none());

    scene.engine("alpha").signal_root(Signal::SIGKILL);
    scene.restart("alpha", &[]).await;
    let record = scene.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    assert_eq!(record.commanded, None);
}

#[tokio::test]
async fn it_is_asked_whether_that_is_meant() {
    let scene = Scene::new(&[]).await;
    let without_terminal = scene.daemon.tell(&WITHDRAW[..4]).await.unwrap();
    assert_eq!(without_terminal.code, Some(64), "{without_terminal:?}");
    assert!(without_terminal.err.contains("add --yes"), "{without_terminal:?}");

    // `script` of util-linux gives it a terminal.
    let ask = async |answer: &str| {
        let lastgasp = binaries::find("lastgasp").unwrap();
        let socket = scene.daemon.ready.socket.display().to_string();
        let command = format!("{} withdraw alpha --reason r --socket {socket}", lastgasp.display());
        let mut child = Command::new("script")
            .args(["--quiet", "--return", "--command", &command, "/dev/null"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut shown = Vec::new();
        while !String::from_utf8_lossy(&shown).contains("[y/N]") {
            assert_ne!(stdout.read_buf(&mut shown).await.unwrap(), 0, "{}", String::from_utf8_lossy(&shown));
        }
        stdin.write_all(answer.as_bytes()).await.unwrap();
        stdout.read_to_end(&mut shown).await.unwrap();
        let out = String::from_utf8_lossy(&shown).into_owned();
        Said { code: child.wait().await.unwrap().code(), out, err: String::new() }
    };
    let said = ask("n\n").await;
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.out.contains("not confirmed, so the worker stays in service"), "{said:?}");
    assert_eq!(scene.discovery.removals("alpha"), 0);
    let said = ask("y\n").await;
    assert_eq!(said.code, Some(0), "{said:?}");
    scene.discovery.removed("alpha").await.unwrap();
}
