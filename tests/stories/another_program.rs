//! The root runs another program in its own place. Its pid lives on, and so does its pidfd.

use lastgasp_protocol::CauseKind;

use crate::scene::{Scene, only_those_of_are_moved};

#[tokio::test]
async fn the_engine_is_lost_though_its_process_lives() {
    let mut scene = Scene::new(&[]).await;
    let asked = scene.ask_several().await;

    let answer = scene.engine("alpha").control("exec").await;
    assert!(answer.is_err(), "the one who would answer is gone");

    only_those_of_are_moved("alpha", asked).await;
    scene.discovery.removed("alpha").await.unwrap();
    let certificate = scene.discovery.certificate("alpha", |_| true).await.unwrap();
    assert_eq!(certificate.cause.kind, CauseKind::Replaced, "{certificate:#?}");
    let replaced = certificate.timeline.iter().find(|moment| moment.what == "replaced").expect("it was seen");
    assert!(replaced.detail.ends_with("/sleep"), "{replaced:?}");
    assert!(scene.engine("alpha").process.identity.is_alive());
    assert_eq!((scene.discovery.removals("alpha"), scene.discovery.removals("beta")), (1, 0));
}
