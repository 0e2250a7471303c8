//! Every process of the engine is killed, as by an OOM killer or the end of a cgroup.

use crate::scene::{Scene, only_those_of_are_moved};
use lastgasp_tests::matrix;

#[tokio::test]
async fn its_streams_go_on_elsewhere() {
    let mut scene = Scene::new(&[]).await;
    let asked = scene.ask_several().await;

    scene.engine("beta").kill_tree();

    only_those_of_are_moved("beta", asked).await;
    scene.discovery.removed("beta").await.unwrap();
    scene.discovery.certificate("beta", |c| c.cause.signal == Some(9)).await.unwrap();
    assert_eq!((scene.discovery.removals("alpha"), scene.discovery.removals("beta")), (0, 1), "one death, not four");
    matrix::row(
        "All processes of an engine are killed at once",
        "one death, one withdrawal, streams exact",
        &format!("withdrawn {} time", scene.discovery.removals("beta")),
    );
}
