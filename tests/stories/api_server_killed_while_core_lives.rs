//! The API server is killed, and the EngineCore lives on as an orphan that holds its memory
//! (vllm#55510).

use lastgasp_tests::matrix;
use nix::sys::signal::Signal;

use crate::scene::{Scene, only_those_of_are_moved};

#[tokio::test]
async fn the_worker_is_lost_though_its_engine_core_lives() {
    let mut scene = Scene::new(&["--orphan-lifetime", "3600"]).await;
    let asked = scene.ask_several().await;

    scene.engine("alpha").signal_root(Signal::SIGKILL);

    only_those_of_are_moved("alpha", asked).await;
    scene.discovery.removed("alpha").await.unwrap();
    let certificate = scene.discovery.certificate("alpha", |_| true).await.unwrap();
    assert_eq!(certificate.cause.signal, Some(9), "{certificate:#?}");
    assert!(scene.engine("alpha").core.is_alive(), "nobody asked for orphans to be reaped");
    assert_eq!(scene.discovery.removals("alpha"), 1);
    matrix::row(
        "An API server is killed, its engine core lives on",
        "withdrawn once, streams exact",
        "withdrawn 1 time; streams exact",
    );
}
