//! Containers as kubelet would start them, by podman and crun.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lastgasp_tests::nats::free_port;
use lastgasp_tests::process::GIVE_UP;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::render::{environment, words, workspace};

/// What Debian's podman uses: bpf(2) for CAP_SYS_ADMIN alone.
pub(crate) const DEBIANS: &str = "/usr/share/containers/seccomp.json";

/// Images and containers of one test.
pub(crate) struct Store(TempDir);

const IMAGE: &str = "localhost/lastgasp:test";

impl Store {
    /// One with the image of this build.
    pub(crate) fn new() -> Self {
        let store = Self(tempfile::tempdir().unwrap());
        store.build();
        store
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    fn detached(&self, arguments: &[String]) -> String {
        String::from_utf8(succeeds(&mut self.podman(arguments)).stdout).unwrap().trim().to_owned()
    }

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

pub(crate) fn succeeds(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}:\n{}{}", said(&output.stdout), said(&output.stderr));
    output
}

/// What a container has beside its manifest: variables that go over it, and more of podman's flags.
#[derive(Default)]
pub(crate) struct Beside {
    pub(crate) variables: Vec<(&'static str, String)>,
    pub(crate) flags: Vec<String>,
    /// The folder that its volume `config` holds.
    pub(crate) config: Option<PathBuf>,
}

/// A running container.
pub(crate) struct Container<'a> {
    store: &'a Store,
    id: String,
    metrics: String,
}

impl<'a> Container<'a> {
    /// Starts one of a pod's containers with what the manifest gives it, on the test's network.
    pub(crate) fn start(store: &'a Store, pod: &Value, inside: &Value, seccomp: &Path, beside: &Beside) -> Self {
        let of = |key: &str| [&inside["securityContext"][key], &pod["securityContext"][key]];
        let set = |key: &str| of(key).into_iter().find(|value| !value.is_null()).cloned().unwrap_or_default();
        let context = &inside["securityContext"];
        let mut arguments: Vec<String> = vec!["run".into(), "--detach".into(), "--network=host".into()];
        assert_eq!((set("readOnlyRootFilesystem"), set("allowPrivilegeEscalation")), (json!(true), json!(false)));
        assert_ne!(set("privileged"), true);
        assert_eq!(set("seccompProfile")["type"], "RuntimeDefault");
        arguments
            .extend(["--read-only", "--read-only-tmpfs=false", "--security-opt=no-new-privileges"].map(Into::into));
        arguments.push(format!("--security-opt=seccomp={}", seccomp.display()));
        arguments.push(format!("--user={}:{}", set("runAsUser"), set("runAsGroup")));
        if pod["hostPID"] == true {
            arguments.push("--pid=host".into());
        }
        arguments.extend(words(&context["capabilities"]["drop"]).iter().map(|one| format!("--cap-drop={one}")));
        if !context["capabilities"]["add"].is_null() {
            arguments.extend(words(&context["capabilities"]["add"]).iter().map(|one| format!("--cap-add={one}")));
        }
        let memory = inside["resources"]["limits"]["memory"].as_str().unwrap().trim_end_matches('i').to_lowercase();
        arguments.push(format!("--memory={memory}"));
        for mount in inside["volumeMounts"].as_array().into_iter().flatten() {
            let path = mount["mountPath"].as_str().unwrap();
            arguments.push(match (mount["name"].as_str(), &beside.config) {
                (Some("config"), Some(folder)) => format!("--volume={}:{path}:ro", folder.display()),
                // Kubernetes gives an emptyDir to everybody.
                _ => format!("--tmpfs={path}:mode=1777"),
            });
        }
        let (_, limit) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
        // podman would raise them, which takes a capability that not every root has.
        arguments.extend([format!("--ulimit=nofile={limit}:{limit}"), "--ulimit=nproc=4096:4096".to_owned()]);
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port().unwrap()));
        let over = beside.variables.iter().map(|(name, value)| ((*name).to_owned(), value.clone()));
        let listens = if inside["command"].is_null() { "LASTGASP_STATUS_LISTEN" } else { "LASTGASP_ROUTER_LISTEN" };
        let listens = (listens.to_owned(), listen.to_string());
        for (name, value) in environment(inside).into_iter().chain(over).chain([listens]) {
            arguments.push(format!("--env={name}={value}"));
        }
        arguments.extend(beside.flags.iter().cloned());
        if !inside["command"].is_null() {
            arguments.push(format!("--entrypoint={}", inside["command"]));
        }
        arguments.push(IMAGE.to_owned());
        // On the test's network, addresses are the test's.
        let args = words(&inside["args"]).into_iter().map(str::to_owned);
        arguments.extend(args.filter(|arg| !arg.starts_with("--nats=") && !arg.starts_with("--listen=")));
        Self { id: store.detached(&arguments), store, metrics: format!("http://{listen}") }
    }

    /// Starts a program of the test's in a container of the image.
    pub(crate) fn of_program(store: &'a Store, flags: &[String], program: &Path, arguments: &[String]) -> Self {
        let mut all: Vec<String> = ["run", "--detach", "--network=host", "--cap-drop=all"].map(Into::into).into();
        let (_, limit) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
        all.extend([format!("--ulimit=nofile={limit}:{limit}"), "--ulimit=nproc=4096:4096".to_owned()]);
        all.extend([format!("--volume={}:/program:ro", program.display()), "--entrypoint=/program".to_owned()]);
        all.extend(flags.iter().cloned());
        all.push(IMAGE.to_owned());
        all.extend(arguments.iter().cloned());
        Self { id: store.detached(&all), store, metrics: String::new() }
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Its init, as the node sees it.
    pub(crate) fn pid(&self) -> u32 {
        let inspect = ["inspect", "--format={{.State.Pid}}", &self.id].map(str::to_owned);
        String::from_utf8(succeeds(&mut self.store.podman(&inspect)).stdout).unwrap().trim().parse().unwrap()
    }

    /// As kubelet does.
    pub(crate) fn stop(&self) {
        succeeds(&mut self.store.podman(&["kill", "--signal=TERM", &self.id].map(str::to_owned)));
    }

    pub(crate) async fn http_status(&self, path: &str) -> u16 {
        reqwest::get(format!("{}{path}", self.metrics)).await.unwrap().status().as_u16()
    }

    /// Waits until it has ended; its exit code.
    pub(crate) async fn exited(&self) -> i32 {
        let mut wait = tokio::process::Command::from(self.store.podman(&["wait".to_owned(), self.id.clone()]));
        let output = tokio::time::timeout(GIVE_UP, wait.kill_on_drop(true).output()).await;
        let output = output.unwrap_or_else(|_| panic!("it runs on:\n{}", self.log())).unwrap();
        String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
    }

    /// What a program in the container prints.
    pub(crate) fn exec(&self, program: &[&str]) -> Output {
        let arguments = [&["exec", &self.id], program].concat().into_iter().map(str::to_owned);
        self.store.podman(&arguments.collect::<Vec<_>>()).output().unwrap()
    }

    /// What `lastgasp status` says in the container, once it knows of this worker.
    pub(crate) async fn status_with(&self, worker: &str) -> Value {
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
    pub(crate) async fn is_ready(&self, path: &str) {
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

    pub(crate) fn log(&self) -> String {
        let output = self.store.podman(&["logs".to_owned(), self.id.clone()]).output().unwrap();
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the container said:\n{}", self.log());
        }
        let remove = ["rm", "--force", "--time=0", &self.id].map(str::to_owned);
        let _ = self.store.podman(&remove).output();
    }
}

/// The profile of a runtime that knows CAP_BPF and CAP_PERFMON, as containerd's does.
pub(crate) fn newer_profile(folder: &Path) -> PathBuf {
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
