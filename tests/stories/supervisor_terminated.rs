//! SIGTERM goes to what supervises the engine, which says nothing to it yet.

use lastgasp_protocol::WorkerState;
use nix::sys::signal::Signal;

use crate::scene::{Question, Scene};

#[tokio::test]
async fn the_worker_drains_before_the_engine_knows() {
    let mut scene = Scene::new(&[]).await;
    let first_life = scene.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    scene.engine("alpha").kill_tree();
    scene.discovery.removed("alpha").await.unwrap();
    scene.engine("alpha").process.exited().await.unwrap();
    scene.restart_supervised("alpha").await;
    let second_life = scene.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    assert_ne!(second_life.incarnation, first_life.incarnation);

    let supervisor = scene.engine("alpha").process.identity;
    assert!(supervisor.signal(Signal::SIGTERM));

    scene.discovery.listed("alpha", WorkerState::Draining).await.unwrap();
    assert!(supervisor.is_alive() && scene.engine("alpha").core.is_alive(), "nobody has left");
    scene.new_work_goes_only_to("beta").await;
    for number in 0..3 {
        let late = scene.ask(&Question::chat(&format!("late {number}"))).await;
        assert_eq!(late.worker, "beta");
    }
    scene.discovery.listed("beta", WorkerState::Serving).await.unwrap();
}
