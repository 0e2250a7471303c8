//! The daemon is killed and started again. What happened meanwhile is made up for, and what did not
//! happen is not.

use lastgasp_protocol::WorkerState;
use nix::sys::signal::Signal;

use crate::scene::{Question, Scene, was_moved};

#[tokio::test]
async fn a_death_in_the_gap_is_found_and_its_streams_go_on() {
    // The engine itself would say nothing for an hour.
    let mut scene = Scene::new(&["--frontend", "rust", "--rust-notice-ms", "3600000"]).await;
    let asked = scene.ask(&Question::completion("gap")).await;
    let worker = asked.worker.clone();

    scene.kill_daemon().await;
    scene.engine(&worker).kill_tree();
    scene.start_daemon().await;

    scene.discovery.removed(&worker).await.unwrap();
    assert!(was_moved(&asked.finish().await));
    assert_eq!(scene.discovery.removals(&worker), 1);
}

#[tokio::test]
async fn living_workers_keep_their_listing_and_are_watched_again() {
    let mut scene = Scene::new(&[]).await;
    let before = scene.discovery.listed("alpha", WorkerState::Serving).await.unwrap();

    scene.kill_daemon().await;
    scene.start_daemon().await;
    let asked = scene.ask(&Question::completion("again")).await;
    let worker = asked.worker.clone();
    let listed = scene.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    assert_eq!((listed.incarnation, listed.epoch), (before.incarnation, before.epoch));
    for worker in ["alpha", "beta"] {
        assert_eq!(scene.discovery.removals(worker), 0);
    }

    scene.engine(&worker).signal_core(Signal::SIGKILL);
    scene.discovery.removed(&worker).await.unwrap();
    assert!(was_moved(&asked.finish().await));
}

#[tokio::test]
async fn a_second_daemon_of_the_same_node_is_refused() {
    let mut scene = Scene::new(&[]).await;
    let second = scene.start_second_daemon().await;
    // It may be ready before NATS has told it, but not for long.
    let status = match second {
        Ok(mut daemon) => daemon.process.exited().await.unwrap().code().map(|code| code.to_string()),
        Err(error) => Some(error.to_string()),
    };
    assert!(status.as_deref().is_some_and(|said| said.contains("69")), "{status:?}");
    assert!(!scene.daemon.process.has_exited());
    for worker in ["alpha", "beta"] {
        assert_eq!(scene.discovery.removals(worker), 0);
    }
}
