//! The cgroup freezer: the engine is not dead. Whether it is hung is for its health to say.

use lastgasp_protocol::{CauseKind, WorkerState};

use crate::cgroup::Cgroup;
use crate::scene::{Scene, details};

#[tokio::test]
async fn a_frozen_engine_is_hung_and_comes_back_when_it_thaws() {
    let cgroup = Cgroup::new("lastgasp-guest-freezer");
    let scene = Scene::new("required", &[]).await;
    for pid in scene.engine.ready.pids() {
        cgroup.add(pid);
    }
    cgroup.write("cgroup.freeze", "1");
    cgroup.wait_for("cgroup.events", "frozen 1");

    let certificate = scene.withdrawn(|_| true).await;
    assert_eq!(certificate.cause.kind, CauseKind::Hung, "{certificate:#?}");
    let states = details(&certificate, "process_state");
    assert!(
        states.iter().any(|state| state.contains("VLLM::EngineCore") && state.contains(" is frozen")),
        "{states:?}"
    );
    assert!(scene.engine.core.is_alive() && scene.engine.process.identity.is_alive());

    cgroup.write("cgroup.freeze", "0");
    let record = scene.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    assert_eq!((record.incarnation, record.epoch), (certificate.incarnation, certificate.epoch + 1));
}
