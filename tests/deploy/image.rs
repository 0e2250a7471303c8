//! The image, in a container that has exactly what the DaemonSet gives it. Two things are not its own:
//! the network, because NATS is on the test's loopback, and who may declare workers.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lastgasp_protocol::{CauseKind, WorkerState};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::{Declaration, Engine};
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::GIVE_UP;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::render::{Objects, container, environment, kustomize, text, words, workspace};

/// What Debian's podman uses: bpf(2) for CAP_SYS_ADMIN alone.
const DEBIANS: &str = "/usr/share/containers/seccomp.json";

/// Images and containers of one test.
struct Store(TempDir);

impl Store {
    fn options(&self) -> [String; 6] {
        let folder = |name: &str| self.0.path().join(name).display().to_string();
        ["--root".into(), folder("root"), "--runroot".into(), folder("run"), "--storage-driver".into(), "vfs".into()]
    }

    /// Builds the image from the binaries of this build.
    fn build(&self) {
        let profile = lastgasp_tests::binaries::find("lastgasp").unwrap();
        let profile = profile.parent().unwrap().file_name().unwrap();
        let mut build = Command::new(workspace().join("deploy/image/build.sh"));
        build.arg("lastgasp:test").env("PROFILE", profile);
        build.env("BUILDAH", format!("buildah {}", self.options().join(" ")));
        succeeds(&mut build);
    }

    fn podman(&self, arguments: &[String]) -> Command {
        // crun refuses cgroup v1 with a v2 hierarchy beside it, which some machines have.
        const WITHOUT_HYBRID: &str = "umount /sys/fs/cgroup/unified 2>/dev/null; exec podman \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", WITHOUT_HYBRID, "sh"]).args(self.options()).args(arguments);
        command
    }
}

fn succeeds(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}:\n{}{}", said(&output.stdout), said(&output.stderr));
    output
}

/// A running container.
struct Pod<'a> {
    store: &'a Store,
    id: String,
    metrics: String,
}

impl<'a> Pod<'a> {
    /// Starts one as kubelet would, with these variables over the manifest's.
    fn start(store: &'a Store, objects: &Objects, seccomp: &Path, config: &Path, over: &[(&str, String)]) -> Self {
        let daemon = objects.the("DaemonSet");
        let (pod, inside) = (&daemon["spec"]["template"]["spec"], container(daemon, "containers"));
        let context = &inside["securityContext"];
        let mut arguments = vec!["run".to_owned(), "--detach".to_owned(), "--network=host".to_owned()];
        assert_eq!((&pod["hostPID"], &context["readOnlyRootFilesystem"]), (&json!(true), &json!(true)));
        assert_eq!((&context["allowPrivilegeEscalation"], &context["privileged"]), (&json!(false), &json!(false)));
        assert_eq!(context["seccompProfile"]["type"], "RuntimeDefault");
        arguments.extend(["--pid=host", "--read-only", "--read-only-tmpfs=false"].map(str::to_owned));
        arguments.push("--security-opt=no-new-privileges".to_owned());
        arguments.push(format!("--security-opt=seccomp={}", seccomp.display()));
        arguments.push(format!("--user={}:{}", context["runAsUser"], context["runAsGroup"]));
        for (flag, list) in [("drop", &context["capabilities"]["drop"]), ("add", &context["capabilities"]["add"])] {
            arguments.extend(words(list).into_iter().map(|one| format!("--cap-{flag}={one}")));
        }
        let memory = inside["resources"]["limits"]["memory"].as_str().unwrap().replace("Mi", "m");
        arguments.push(format!("--memory={memory}"));
        for mount in inside["volumeMounts"].as_array().unwrap() {
            let path = mount["mountPath"].as_str().unwrap();
            arguments.push(match mount["name"].as_str().unwrap() {
                "config" => format!("--volume={}:{path}:ro", config.display()),
                _ => format!("--tmpfs={path}"),
            });
        }
        let (_, limit) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
        // podman would raise them, which takes a capability that not every root has.
        arguments.extend([format!("--ulimit=nofile={limit}:{limit}"), "--ulimit=nproc=4096:4096".to_owned()]);
        let listen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let over = over.iter().map(|(name, value)| ((*name).to_owned(), value.clone()));
        let listens = ("LASTGASP_STATUS_LISTEN".to_owned(), listen.to_string());
        for (name, value) in environment(inside).into_iter().chain(over).chain([listens]) {
            arguments.push(format!("--env={name}={value}"));
        }
        arguments.push("localhost/lastgasp:test".to_owned());
        arguments.extend(words(&inside["args"]).into_iter().map(str::to_owned));
        let output = succeeds(&mut store.podman(&arguments));
        let id = String::from_utf8(output.stdout).unwrap().trim().to_owned();
        Self { store, id, metrics: format!("http://{listen}") }
    }

    /// What a program in the container prints.
    fn exec(&self, program: &[&str]) -> Output {
        let arguments = [&["exec", &self.id], program].concat().into_iter().map(str::to_owned);
        self.store.podman(&arguments.collect::<Vec<_>>()).output().unwrap()
    }

    /// What `lastgasp status` says in the container, once it knows of this worker.
    async fn status_with(&self, worker: &str) -> Value {
        let asked = std::time::Instant::now();
        loop {
            let output = self.exec(&["/usr/bin/lastgasp", "status", "--json"]);
            let status: Value = serde_json::from_slice(&output.stdout)
                .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
            if status["workers"][0]["worker"] == worker {
                return status;
            }
            assert!(asked.elapsed() < GIVE_UP, "{status:#}");
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }

    /// Waits for kubelet's startup probe.
    async fn is_ready(&self, path: &str) {
        let url = format!("{}{path}", self.metrics);
        let ready = async {
            while !reqwest::get(&url).await.is_ok_and(|response| response.status().is_success()) {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        if tokio::time::timeout(GIVE_UP, ready).await.is_err() {
            panic!("{url} is not ready:\n{}", self.log());
        }
    }

    fn log(&self) -> String {
        let output = self.store.podman(&["logs".to_owned(), self.id.clone()]).output().unwrap();
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    }
}

impl Drop for Pod<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the container said:\n{}", self.log());
        }
        let remove = ["rm", "--force", "--time=0", &self.id].map(str::to_owned);
        let _ = self.store.podman(&remove).output();
    }
}

/// The profile of a runtime that knows CAP_BPF and CAP_PERFMON, as containerd's does.
fn newer_profile(folder: &Path) -> PathBuf {
    let mut profile: Value = serde_json::from_str(&std::fs::read_to_string(DEBIANS).unwrap()).unwrap();
    let rules = profile["syscalls"].as_array_mut().unwrap();
    for (capability, call) in [("CAP_BPF", "bpf"), ("CAP_PERFMON", "perf_event_open")] {
        for rule in rules.iter_mut().filter(|rule| rule["action"] == "SCMP_ACT_ERRNO") {
            rule["names"].as_array_mut().unwrap().retain(|name| name != call);
        }
        rules.push(json!({
            "names": [call], "action": "SCMP_ACT_ALLOW", "args": [], "includes": {"caps": [capability]}, "excludes": {}
        }));
    }
    let path = folder.join("seccomp.json");
    std::fs::write(&path, profile.to_string()).unwrap();
    path
}

/// An engine of another user is killed outside of the container. It is withdrawn; what is left of it is
/// ended, as the overlay wants it.
async fn a_kill_outside_is_seen(store: &Store, objects: &Objects, seccomp: &Path, sensor: &str) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let config = tempfile::tempdir().unwrap();
    std::fs::write(config.path().join("lastgasp.toml"), text("deploy/kubernetes/overlays/full/lastgasp.toml")).unwrap();
    let uid = 70_000 + std::process::id() % 10_000;
    let pod = Pod::start(
        store,
        objects,
        seccomp,
        config.path(),
        &[
            ("LASTGASP_MODE", "enforce".to_owned()),
            ("LASTGASP_NATS_URL", nats.url()),
            // These are not in /kubepods.slice.
            ("LASTGASP_DECLARE_CGROUPS", "/,/..,/../..,/../../..".to_owned()),
            ("LASTGASP_DECLARE_UIDS", uid.to_string()),
            ("LASTGASP_DECLARE_REAP_GRACE_MS", "0".to_owned()),
        ],
    );
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
    assert_eq!(status["sensor"], sensor);

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
    let store = Store(tempfile::tempdir().unwrap());
    store.build();
    let profile = newer_profile(store.0.path());
    let status = a_kill_outside_is_seen(&store, &objects, &profile, "ebpf").await;
    let held = &status["privileges"]["held"];
    assert_eq!(words(held), ["CAP_DAC_READ_SEARCH", "CAP_KILL", "CAP_SYS_PTRACE"], "{status:#}");

    // A runtime that knows nothing of CAP_BPF: it says so, and works without.
    let status = a_kill_outside_is_seen(&store, &objects, Path::new(DEBIANS), "pidfd").await;
    let reason = status["sensor_reason"].as_str().unwrap();
    assert!(reason.contains("refused although CAP_BPF is held"), "{reason}");
}
