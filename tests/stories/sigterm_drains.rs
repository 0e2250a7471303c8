//! SIGTERM: the engine leaves on purpose.

use lastgasp_protocol::WorkerState;
use nix::sys::signal::Signal;

use crate::scene::{Question, Scene, only_those_of_are_moved, was_moved};

/// An engine that drains: nothing is moved, nothing new comes to it, and it leaves.
#[tokio::test]
async fn streams_finish_where_they_are_and_new_ones_go_elsewhere() {
    let arguments = ["--frontend", "rust", "--shutdown-timeout", "60", "--drain-linger-ms", "200"];
    let mut scene = Scene::new(&arguments).await;
    let asked = scene.ask_several().await;

    scene.engine("alpha").signal_root(Signal::SIGTERM);

    scene.discovery.listed("alpha", WorkerState::Draining).await.unwrap();
    scene.new_work_goes_only_to("beta").await;
    for number in 0..3 {
        let late = scene.ask(&Question::chat(&format!("late {number}"))).await;
        assert_eq!(late.worker, "beta");
    }
    for asked in asked {
        assert!(!was_moved(&asked.finish().await));
    }
    let exit = scene.engine("alpha").process.exited().await.unwrap();
    assert_eq!(exit.code(), Some(0));
    scene.discovery.removed("alpha").await.unwrap();
    assert_eq!((scene.discovery.removals("alpha"), scene.discovery.removals("beta")), (1, 0));
}

/// An engine that aborts its streams at once, each with a finish reason and `[DONE]`.
#[tokio::test]
async fn aborted_streams_go_on_elsewhere() {
    let mut scene = Scene::new(&[]).await;
    let asked = scene.ask_several().await;

    scene.engine("alpha").signal_root(Signal::SIGTERM);

    only_those_of_are_moved("alpha", asked).await;
    scene.discovery.removed("alpha").await.unwrap();
    assert_eq!((scene.discovery.removals("alpha"), scene.discovery.removals("beta")), (1, 0));
}
