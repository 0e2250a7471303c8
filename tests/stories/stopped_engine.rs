//! SIGSTOP: the engine is not dead. Whether it is hung is for its health to say.

use lastgasp_protocol::CauseKind;
use lastgasp_tests::matrix;
use nix::sys::signal::Signal;

use crate::scene::{Question, Scene, was_moved};

/// Nobody answers any more, and the certificate says what keeps it from answering.
#[tokio::test]
async fn a_stopped_root_is_hung_when_its_health_was_silent_for_long_enough() {
    let mut scene = Scene::new(&[]).await;

    scene.engine("alpha").signal_root(Signal::SIGSTOP);

    scene.discovery.removed("alpha").await.unwrap();
    let certificate = scene.discovery.certificate("alpha", |_| true).await.unwrap();
    assert_eq!(certificate.cause.kind, CauseKind::Hung, "{certificate:#?}");
    let moment = |what: &str| certificate.timeline.iter().find(|moment| moment.what == what);
    let sent = moment("signal_sent").expect("it was seen who did it");
    assert!(sent.detail.starts_with("signal 19 to "), "{sent:?}");
    let state = moment("process_state").expect("it was looked at");
    assert!(state.detail.ends_with(" is stopped"), "{state:?}");
    assert!(scene.engine("alpha").process.identity.is_alive());
    assert_eq!((scene.discovery.removals("alpha"), scene.discovery.removals("beta")), (1, 0));
    matrix::row(
        "An API server is stopped and answers no probe",
        "hung after the hang window, withdrawn once, nobody else",
        "withdrawn as hung, with who sent the SIGSTOP; the other worker stayed listed",
    );
}

/// The engine core stops for a moment, and its health goes on saying SERVING.
#[tokio::test]
async fn a_stopped_engine_core_whose_health_is_good_stays() {
    let mut scene = Scene::new(&[]).await;
    let asked = scene.ask(&Question::chat("one")).await;
    let worker = asked.worker.clone();

    scene.engine(&worker).signal_core(Signal::SIGSTOP);
    let sent = "lastgasp_evidence_total{kind=\"signal_sent\"}";
    scene.daemon.counts(sent, 1.0).await.unwrap();
    scene.engine(&worker).signal_core(Signal::SIGCONT);

    assert!(!was_moved(&asked.finish().await));
    assert_eq!(scene.discovery.history(&worker).len(), 1, "listed as it was");
    matrix::row(
        "An engine core is stopped for a moment, its health says SERVING all along",
        "nothing is withdrawn or moved",
        "listed as it was; the stream was not moved",
    );
}
