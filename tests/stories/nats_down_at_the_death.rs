//! NATS is down when the engine dies, and comes back.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::matrix;
use nix::sys::signal::Signal;

use crate::scene::{Scene, only_those_of_are_moved};

#[tokio::test]
async fn the_withdrawal_is_made_up_for_and_nobody_else_is_withdrawn() {
    let mut scene = Scene::new(&["--frontend", "rust", "--rust-notice-ms", "3600000"]).await;
    let asked = scene.ask_several().await;

    scene.nats.stop();
    scene.engine("alpha").signal_core(Signal::SIGKILL);
    scene.nats.resume().await.unwrap();

    scene.discovery.removed("alpha").await.unwrap();
    only_those_of_are_moved("alpha", asked).await;
    scene.discovery.listed("beta", WorkerState::Serving).await.unwrap();
    assert_eq!((scene.discovery.removals("alpha"), scene.discovery.removals("beta")), (1, 0));
    matrix::row(
        "nats-server is down at the moment of a death",
        "withdrawn once after the reconnect, streams exact, nobody else withdrawn",
        "withdrawn once, the other worker stayed listed",
    );
}
