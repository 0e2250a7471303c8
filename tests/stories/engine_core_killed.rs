//! The EngineCore child is killed while its API server lives and answers 200.

use lastgasp_protocol::CauseKind;
use lastgasp_tests::matrix;
use nix::sys::signal::Signal;

use crate::scene::{Scene, only_those_of_are_moved};

/// The frontend that says nothing for seconds; here it would say nothing for an hour.
#[tokio::test]
async fn and_the_frontend_would_never_notice() {
    story(&["--frontend", "rust", "--rust-notice-ms", "3600000"]).await;
}

/// The frontend that soon ends every stream with an error event, `[DONE]` and exit code 0.
#[tokio::test]
async fn and_the_frontend_reports_it_like_a_success() {
    story(&["--frontend", "python"]).await;
}

async fn story(arguments: &[&str]) {
    let mut scene = Scene::new(arguments).await;
    let asked = scene.ask_several().await;

    scene.engine("alpha").signal_core(Signal::SIGKILL);

    only_those_of_are_moved("alpha", asked).await;
    scene.discovery.removed("alpha").await.unwrap();
    let certificate = scene.discovery.certificate("alpha", |c| c.routers_done == 1).await.unwrap();
    assert_eq!(certificate.cause.kind, CauseKind::ProcessKilled, "{certificate:#?}");
    assert_eq!(certificate.cause.signal, Some(9));
    let sender = certificate.cause.sender.as_ref().expect("the kernel reported who it was");
    assert_eq!(sender.pid, std::process::id(), "this very test: {sender}");
    assert!(certificate.cause.process.as_ref().is_some_and(|name| name.contains("EngineCor")));
    assert_eq!((certificate.streams.streams, certificate.streams.moved), (2, 2));
    assert_eq!((scene.discovery.removals("alpha"), scene.discovery.removals("beta")), (1, 0));
    matrix::row(
        "An engine core is killed under an API server that lives",
        "withdrawn once, streams exact, nobody else touched",
        &format!(
            "{}; {} of {} streams moved",
            certificate.cause, certificate.streams.moved, certificate.streams.streams
        ),
    );
}
