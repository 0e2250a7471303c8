//! Engines fork compilers, linkers and trackers. Those come and go, and it means nothing.

use nix::sys::signal::Signal;

use lastgasp_protocol::CauseKind;
use lastgasp_tests::matrix;
use lastgasp_tests::process::Identity;

use crate::scene::{Scene, was_moved};

#[tokio::test]
async fn nothing_happens() {
    let mut scene = Scene::new(&[]).await;
    let asked = scene.ask_several().await;

    for _ in 0..5 {
        scene.engine("alpha").compile().await.unwrap();
    }
    let tracker = scene.engine("alpha").ready.resource_tracker_pid;
    assert!(Identity::of(tracker).unwrap().signal(Signal::SIGKILL));

    for asked in asked {
        assert!(!was_moved(&asked.finish().await));
    }
    assert_eq!(scene.discovery.history("alpha").len(), 1, "listed, and nothing since");

    // What comes next has been seen after all of that: the daemon was not deaf.
    scene.engine("alpha").signal_core(Signal::SIGKILL);
    scene.discovery.removed("alpha").await.unwrap();
    let certificate = scene.discovery.certificate("alpha", |_| true).await.unwrap();
    assert_eq!(certificate.cause.kind, CauseKind::ProcessKilled);
    assert!(certificate.cause.process.as_ref().is_some_and(|name| name.contains("EngineCor")), "{certificate:#?}");
    assert_eq!(scene.discovery.removals("alpha"), 1);
    matrix::row(
        "Compilers and the resource tracker of an engine end",
        "nothing is withdrawn or moved; the next real death is",
        "nothing was; the engine core's death was seen",
    );
}
