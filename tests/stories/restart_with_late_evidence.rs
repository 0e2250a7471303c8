//! A worker dies and comes back under its name and addresses while its predecessor is still dying.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::matrix;
use lastgasp_tests::process::GIVE_UP;
use nix::sys::signal::Signal;

use crate::scene::{Question, Scene};

#[tokio::test]
async fn the_successor_is_not_withdrawn_by_evidence_about_its_predecessor() {
    // A core dump keeps the old engine core dying for a while.
    let mut scene = Scene::new(&["--core-mb", "600"]).await;
    let asked = scene.ask_several().await;
    let first_life = scene.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    let old_core = scene.engine("alpha").core;

    scene.engine("alpha").signal_core(Signal::SIGSEGV);
    scene.engine("alpha").signal_root(Signal::SIGKILL);
    scene.discovery.removed("alpha").await.unwrap();
    for asked in asked {
        asked.finish().await;
    }
    scene.engine("alpha").process.exited().await.unwrap();
    scene.restart("alpha", &[]).await;
    let second_life = scene.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    assert_ne!(second_life.incarnation, first_life.incarnation);

    // The last of the predecessor is gone, and the daemon has heard of it …
    let gone = async {
        while old_core.is_alive() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(GIVE_UP, gone).await.expect("the old engine core lives on");
    // … before it hears of another death, which is acted on.
    scene.engine("beta").signal_core(Signal::SIGKILL);
    scene.discovery.removed("beta").await.unwrap();

    let last = scene.discovery.history("alpha").pop().unwrap();
    assert_eq!(last.record.map(|record| record.incarnation), Some(second_life.incarnation));
    assert_eq!(scene.discovery.removals("alpha"), 1);
    scene.new_work_goes_only_to("alpha").await;
    let asked = scene.ask(&Question::chat("and now?")).await;
    assert_eq!(asked.worker, "alpha");
    asked.finish().await;
    matrix::row(
        "A worker is started again while its predecessor is still dying",
        "evidence about the predecessor does not touch the successor",
        "the successor stayed listed and served",
    );
}
