//! An operator drains a worker whose engine knows nothing of it, and takes that back.

use lastgasp_protocol::WorkerState;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::scene::{Question, Scene, only_those_of_are_moved, was_moved};

#[tokio::test]
async fn new_work_goes_elsewhere_and_streams_finish() {
    let scene = Scene::new(&[]).await;
    let asked = scene.ask_several().await;

    let said = scene.daemon.tell(&["drain", "alpha", "--reason", "new driver"]).await.unwrap();

    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(said.out.starts_with("alpha: draining: no new work; its streams go on for 60 s"), "{said:?}");
    let record = scene.discovery.listed("alpha", WorkerState::Draining).await.unwrap();
    assert!(record.commanded.as_ref().is_some_and(|why| why.ends_with(": new driver")), "{record:?}");
    scene.new_work_goes_only_to("beta").await;
    for number in 0..3 {
        assert_eq!(scene.ask(&Question::chat(&format!("late {number}"))).await.worker, "beta");
    }
    for asked in asked {
        assert!(!was_moved(&asked.finish().await));
    }

    let said = scene.daemon.tell(&["undrain", "alpha", "--output", "json"]).await.unwrap();
    assert_eq!(said.json().unwrap()["state"], "serving");
    let record = scene.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    assert_eq!((record.epoch, record.commanded), (1, None), "it never left");
    assert_eq!(scene.discovery.removals("alpha"), 0);
}

#[tokio::test]
async fn at_the_deadline_streams_are_moved_and_it_stays_away_until_undrain() {
    let mut scene = Scene::new(&[]).await;
    let asked = scene.ask_several().await;

    let said = scene.daemon.tell(&["drain", "alpha", "--deadline", "0s"]).await.unwrap();

    assert_eq!(said.code, Some(0), "{said:?}");
    only_those_of_are_moved("alpha", asked).await;
    scene.discovery.removed("alpha").await.unwrap();
    // Its health is well all the time. A daemon that starts anew learns it from the tombstone.
    scene.kill_daemon().await;
    scene.start_daemon().await;
    let kept = |status: &Value| {
        let alpha = &status["workers"][0];
        alpha["state"] == "draining"
            && alpha["reason"].as_str().is_some_and(|why| why.starts_with("commanded: drain by"))
    };
    scene.daemon.status_when("out of service", kept).await.unwrap();
    assert_eq!(scene.daemon.status().await.unwrap()["workers"][0]["revision"], 0);

    let said = scene.daemon.tell(&["undrain", "alpha"]).await.unwrap();
    assert_eq!((said.code, said.out.as_str()), (Some(0), "alpha: serving: in service again\n"));
    let record = scene.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    assert_eq!((record.epoch, record.commanded), (2, None));
    assert_eq!(scene.discovery.removals("alpha"), 2, "its tombstone, and the second daemon's renewal of that");
}

#[tokio::test]
async fn a_restarted_daemon_goes_on_draining() {
    let mut scene = Scene::new(&[]).await;
    scene.daemon.tell(&["drain", "alpha"]).await.unwrap();
    let before = scene.discovery.listed("alpha", WorkerState::Draining).await.unwrap();

    scene.kill_daemon().await;
    scene.start_daemon().await;

    let again = |status: &Value| status["workers"][0]["state"] == "draining" && status["workers"][0]["revision"] != 0;
    scene.daemon.status_when("draining", again).await.unwrap();
    let after = scene.discovery.listed("alpha", WorkerState::Draining).await.unwrap();
    assert_eq!(after.commanded, before.commanded);
    let moved = after.deadline.unwrap().duration_since(before.deadline.unwrap());
    assert!(moved.abs().as_secs() < 30, "the window is not begun anew: {moved}");
    let said = scene.daemon.tell(&["undrain", "alpha"]).await.unwrap();
    assert_eq!(said.code, Some(0), "{said:?}");
    scene.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
}

#[tokio::test]
async fn an_engine_that_dies_while_it_is_drained_is_lost() {
    let mut scene = Scene::new(&[]).await;
    let asked = scene.ask_several().await;
    scene.daemon.tell(&["drain", "alpha"]).await.unwrap();
    scene.discovery.listed("alpha", WorkerState::Draining).await.unwrap();

    scene.engine("alpha").signal_core(Signal::SIGKILL);

    only_those_of_are_moved("alpha", asked).await;
    scene.discovery.removed("alpha").await.unwrap();
}
