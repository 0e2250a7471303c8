//! The daemon is stopped, for an upgrade, say. Its workers are healthy and stay listed.

use lastgasp_protocol::WorkerState;
use nix::sys::signal::Signal;

use crate::scene::{Question, Scene, was_moved};

#[tokio::test]
async fn healthy_workers_stay_listed_and_streams_go_on() {
    let mut scene = Scene::new(&[]).await;
    let asked = scene.ask_several().await;

    assert!(scene.daemon.process.identity.signal(Signal::SIGTERM));
    assert_eq!(scene.daemon.process.exited().await.unwrap().code(), Some(0));

    for asked in asked {
        assert!(!was_moved(&asked.finish().await));
    }
    for worker in ["alpha", "beta"] {
        scene.discovery.listed(worker, WorkerState::Serving).await.unwrap();
        assert_eq!(scene.discovery.removals(worker), 0);
    }
    let mut late = scene.ask(&Question::completion("late")).await;
    late.tokens(5).await;
    late.finish().await;
}
