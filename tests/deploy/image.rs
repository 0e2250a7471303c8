//! The image, in containers that have exactly what the manifests give them. Two things are not their
//! own: the network, because NATS is on the test's loopback, and who may declare workers.

use std::path::Path;
use std::process::Command;

use lastgasp_protocol::{CauseKind, WorkerState};
use lastgasp_tests::binaries;
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::{Declaration, Engine};
use lastgasp_tests::nats::Nats;
use serde_json::Value;

use crate::podman::{Beside, Container, DEBIANS, Store, newer_profile, succeeds};
use crate::render::{Objects, container, kustomize, text, words};

/// An engine of another user is killed outside of the container. It is withdrawn; what is left of it is
/// ended, as the overlay wants it.
async fn a_kill_outside_is_seen(store: &Store, objects: &Objects, seccomp: &Path, sensor: &str) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let config = tempfile::tempdir().unwrap();
    std::fs::write(config.path().join("lastgasp.toml"), text("deploy/kubernetes/overlays/full/lastgasp.toml")).unwrap();
    let uid = 70_000 + std::process::id() % 10_000;
    let beside = Beside {
        config: Some(config.path().to_owned()),
        variables: vec![
            ("LASTGASP_MODE", "enforce".to_owned()),
            ("LASTGASP_NATS_URL", nats.url()),
            // The engine is in no pod: its user has to do.
            ("LASTGASP_DECLARE_CGROUPS", String::new()),
            ("LASTGASP_DECLARE_UIDS", uid.to_string()),
            ("LASTGASP_DECLARE_REAP_GRACE_MS", "0".to_owned()),
        ],
        flags: Vec::new(),
    };
    let daemon = objects.the("DaemonSet");
    let template = &daemon["spec"]["template"]["spec"];
    let pod = Container::start(store, template, container(daemon, "containers"), seccomp, &beside);
    pod.is_ready("/readyz").await;
    pod.is_ready("/livez").await;
    let home = tempfile::tempdir().unwrap();
    succeeds(Command::new("chown").arg(uid.to_string()).arg(home.path()));
    let declaration = Declaration::new(uid, "alpha").unwrap();
    // Its root never notices.
    let mut engine = Engine::declare("alpha", &declaration, &["--grpc-mode"], home.path()).await.unwrap();
    let record = discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    assert_eq!(record.node.as_str(), "gpu-a");
    let status = pod.status_with("alpha").await;
    assert_eq!(status["death_source"], sensor);

    // By a process whose name is in the certificate, where the kernel is asked.
    succeeds(Command::new("kill").args(["-KILL", &engine.core.pid.to_string()]));

    discovery.removed("alpha").await.unwrap();
    let certificate = discovery.certificate("alpha", |_| true).await.unwrap();
    assert_eq!(certificate.incarnation, record.incarnation);
    if sensor == "ebpf" {
        assert_eq!((certificate.cause.kind, certificate.cause.signal), (CauseKind::ProcessKilled, Some(9)));
        assert_eq!(certificate.cause.sender.unwrap().comm, "kill");
    }
    engine.process.exited().await.unwrap();
    assert_eq!(discovery.removals("alpha"), 1);
    // Nothing in the image but what it needs, and nothing of it can be written.
    assert_ne!(pod.exec(&["/bin/sh", "-c", "true"]).status.code(), Some(0));
    status
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root, buildah, podman and crun"]
async fn in_the_daemonsets_container_the_kernel_tells_of_a_kill_outside() {
    let objects = kustomize("deploy/kubernetes/overlays/full");
    let store = Store::new();
    let profile = newer_profile(store.path());
    let status = a_kill_outside_is_seen(&store, &objects, &profile, "ebpf").await;
    let held = &status["privileges"]["held"];
    assert_eq!(words(held), ["CAP_DAC_READ_SEARCH", "CAP_KILL", "CAP_SYS_PTRACE"], "{status:#}");

    // A runtime that knows nothing of CAP_BPF: it says so, and works without.
    let status = a_kill_outside_is_seen(&store, &objects, Path::new(DEBIANS), "pidfd").await;
    let reason = status["death_source_reason"].as_str().unwrap();
    assert!(reason.contains("refused although CAP_BPF is held"), "{reason}");
}

/// The tier without any privilege: another user, no capability, a process namespace that the pod shares.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root, buildah, podman and crun"]
async fn in_the_sidecars_container_a_pidfd_tells_and_it_ends_with_one() {
    const UID: u32 = 2000;
    let objects = kustomize("deploy/kubernetes/overlays/sidecar");
    let store = Store::new();
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let declaration = Declaration::new(UID, "vllm").unwrap();
    // The sandbox's first process, as in every pod: the namespace ends with it.
    let pause = Container::of_program(&store, &[], Path::new("/bin/sleep"), &["1000000".to_owned()]);
    let shared = format!("--pid=container:{}", pause.id());
    let ports =
        ["--port".into(), declaration.port.to_string(), "--grpc-port".into(), declaration.grpc_port.to_string()];
    let engine = binaries::find("mock-engine").unwrap();
    let engine = Container::of_program(&store, &[format!("--user={UID}:{UID}"), shared.clone()], &engine, &ports);

    let workload = objects.of_kind("Deployment").into_iter().find(|one| one["metadata"]["name"] == "vllm").unwrap();
    let sidecar = container(workload, "initContainers");
    let beside = Beside {
        variables: vec![
            ("LASTGASP_MODE", "enforce".to_owned()),
            ("LASTGASP_NATS_URL", nats.url()),
            ("LASTGASP_WORKER_0_FIND_CMDLINE", "/program --port".to_owned()),
            ("LASTGASP_WORKER_0_ENDPOINT", declaration.endpoint.clone()),
            ("LASTGASP_WORKER_0_HEALTH_HTTP", format!("{}/health", declaration.endpoint)),
            ("LASTGASP_WORKER_0_REAP_GRACE_MS", "0".to_owned()),
        ],
        flags: vec![shared],
        config: None,
    };
    let pod = &workload["spec"]["template"]["spec"];
    let sidecar = Container::start(&store, pod, sidecar, Path::new(DEBIANS), &beside);
    sidecar.is_ready("/livez").await;
    let record = discovery.listed("vllm", WorkerState::Serving).await.unwrap();
    assert_eq!(record.node.as_str(), "gpu-a/vllm-7f9c4");
    let status = sidecar.status_with("vllm").await;
    assert_eq!((&status["death_source"], words(&status["privileges"]["held"])), (&Value::from("pidfd"), Vec::new()));
    let core = status["workers"][0]["processes"][0]["tgid"].as_u64().unwrap();

    // In the namespace that they share.
    let enter = format!("/proc/{}/ns/pid", engine.pid());
    succeeds(Command::new("nsenter").args([&format!("--pid={enter}"), "kill", "-KILL", &core.to_string()]));

    assert_eq!(sidecar.exited().await, 1, "{}", sidecar.log());
    discovery.removed("vllm").await.unwrap();
    assert_eq!(discovery.removals("vllm"), 1);
    // terminate-root, by a user who may end only its own: kubelet starts the container again.
    engine.exited().await;
}

/// Nobody in particular, and nothing that can be written.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root, buildah, podman and crun"]
async fn in_the_routers_container_it_listens_and_is_not_ready_without_workers() {
    let objects = kustomize("deploy/kubernetes/overlays/full");
    let store = Store::new();
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let workload = objects.the("Deployment");
    let beside = Beside { variables: vec![("LASTGASP_NATS_URL", nats.url())], ..Beside::default() };
    let pod = &workload["spec"]["template"]["spec"];
    let router = Container::start(&store, pod, container(workload, "containers"), Path::new(DEBIANS), &beside);
    router.is_ready("/metrics").await;
    assert_eq!(router.http_status("/health").await, 503);
    router.stop();
    assert_eq!(router.exited().await, 0, "{}", router.log());
}
