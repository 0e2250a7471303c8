//! Two entries of the configuration fit one engine. Its death would be reported of one of them only, so
//! only one of them may have it.

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::scene::Scene;

#[tokio::test]
async fn the_second_one_is_refused_with_the_reason_and_the_first_goes_on() {
    let mut scene = Scene::configured("required", &[], |mut config| {
        let mut twin = config.worker[0].clone();
        twin.name = "twin".to_owned();
        config.worker.push(twin);
        config
    })
    .await;

    let refused = |status: &Value| {
        let workers = status["workers"].as_array().unwrap();
        let twin = workers.iter().find(|worker| worker["worker"] == "twin").unwrap();
        twin["reason"].as_str().is_some_and(|reason| {
            reason.contains("is the process of worker alpha already") && reason.ends_with("make find more exact")
        })
    };
    scene.daemon.status_when("why there is no twin", refused).await.unwrap();

    scene.engine("alpha").signal_core(Signal::SIGKILL);

    scene.discovery.removed("alpha").await.unwrap();
    assert_eq!(scene.discovery.removals("alpha"), 1);
    assert_eq!(scene.discovery.history("twin").len(), 0, "it was never listed");
    assert_eq!(scene.discovery.removals("beta"), 0);
}
