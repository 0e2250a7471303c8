//! The daemon is killed and started again. What happened meanwhile is made up for, and what did not
//! happen is not.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::{HarnessError, matrix};
use nix::sys::signal::Signal;

use crate::scene::{Question, Scene, only_those_of_are_moved, was_moved};

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
    matrix::row(
        "An engine dies whole while no daemon runs",
        "the next daemon withdraws it, and its stream goes on",
        &format!("withdrawn {} time; stream exact", scene.discovery.removals(&worker)),
    );
}

/// Its root lives on and says nothing of it.
#[tokio::test]
async fn the_death_of_a_child_in_the_gap_is_found_too() {
    let mut scene = Scene::new(&["--frontend", "rust", "--rust-notice-ms", "3600000"]).await;
    let asked = scene.ask(&Question::completion("gap")).await;
    let worker = asked.worker.clone();

    scene.kill_daemon().await;
    scene.engine(&worker).signal_core(Signal::SIGKILL);
    scene.start_daemon().await;

    scene.discovery.removed(&worker).await.unwrap();
    assert!(was_moved(&asked.finish().await));
    let certificate = scene.discovery.certificate(&worker, |_| true).await.unwrap();
    assert_eq!(certificate.cause.process.as_deref(), Some("VLLM::EngineCore"), "{certificate:#?}");
    assert_eq!(scene.discovery.removals(&worker), 1);
    matrix::row(
        "An engine core dies while no daemon runs, and its API server answers as if nothing were wrong",
        "the next daemon misses it, withdraws the worker, and its stream goes on",
        &format!("{}; withdrawn {} time; stream exact", certificate.cause, scene.discovery.removals(&worker)),
    );
}

#[tokio::test]
async fn an_upgrade_under_load_removes_nobody_but_the_dead_of_the_gap() {
    let mut scene = Scene::new(&["--frontend", "rust", "--rust-notice-ms", "3600000"]).await;
    let asked = scene.ask_several().await;
    let before = scene.discovery.listed("beta", WorkerState::Serving).await.unwrap();

    assert!(scene.daemon.process.identity.signal(Signal::SIGTERM));
    assert_eq!(scene.daemon.process.exited().await.unwrap().code(), Some(0));
    scene.engine("alpha").kill_tree();
    scene.start_daemon().await;

    scene.discovery.removed("alpha").await.unwrap();
    only_those_of_are_moved("alpha", asked).await;
    let beta = scene.discovery.listed("beta", WorkerState::Serving).await.unwrap();
    assert_eq!((beta.incarnation, beta.epoch), (before.incarnation, before.epoch));
    assert_eq!((scene.discovery.removals("alpha"), scene.discovery.removals("beta")), (1, 0));
    matrix::row(
        "The daemon is replaced while four streams flow, and an engine dies in between",
        "the dead one is withdrawn, the other keeps its listing, all streams are exact",
        &format!(
            "{} withdrawal of the dead worker, {} of the living one",
            scene.discovery.removals("alpha"),
            scene.discovery.removals("beta")
        ),
    );
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
    // It may be ready before NATS has said so, but not for long.
    let (status, said) = match second {
        Ok(mut daemon) => {
            let status = daemon.process.exited().await.unwrap();
            (status.to_string(), daemon.process.log_tail())
        }
        Err(HarnessError::Ended { status, log, .. }) => (status, log),
        Err(error) => panic!("{error}"),
    };
    assert_eq!(status, "exit status: 69", "{said}");
    let first = format!("another lastgasp daemon (pid {})", scene.daemon.process.identity.pid);
    for part in [first.as_str(), "already watches node \"node-a\"", "stop it, or give one of them another `node` name"]
    {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    assert!(!scene.daemon.process.has_exited());
    for worker in ["alpha", "beta"] {
        assert_eq!(scene.discovery.removals(worker), 0);
    }
    matrix::row(
        "A second daemon is started on a node by mistake",
        "it ends with status 69 and says why; the first one goes on",
        "status 69; it named the first one's pid, the node, and what to do",
    );
}
