//! A declaration names an address that the process has given itself: in a network namespace of its own
//! everybody is root enough for that. The daemon must not ask it, and no router must be sent there.
//!
//! Addresses are of 198.18.0.0/15, which is for such tests (RFC 2544).

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lastgasp_protocol::WorkerState;
use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::engine::Declaration;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::Process;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::declared_worker::{Node, init_of};

/// An address that no other test has, in this run.
fn address() -> Ipv4Addr {
    static GIVEN: AtomicUsize = AtomicUsize::new(0);
    let number = std::process::id() % 4096 * 16 + u32::try_from(GIVEN.fetch_add(1, Ordering::Relaxed)).unwrap();
    Ipv4Addr::from(u32::from(Ipv4Addr::new(198, 18, 0, 1)) + number)
}

/// Runs `ip` of iproute2, in the network namespace of a process or here.
fn ip(namespace_of: Option<u32>, arguments: &str) {
    let mut command = Command::new(if namespace_of.is_some() { "nsenter" } else { "ip" });
    if let Some(pid) = namespace_of {
        command.args(["--target", &pid.to_string(), "--net", "ip"]);
    }
    let output = command.args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Something of this host's network, taken away at the end.
struct Undo(String);

impl Drop for Undo {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(self.0.split(' ')).output();
    }
}

/// An address of this host, where connections are counted.
struct Host {
    address: Ipv4Addr,
    port: u16,
    connections: Arc<AtomicUsize>,
    _undo: Undo,
}

impl Host {
    fn new() -> Self {
        let address = address();
        ip(None, &format!("address add {address}/32 dev lo"));
        let undo = Undo(format!("address del {address}/32 dev lo"));
        let listener = TcpListener::bind((address, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&connections);
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                counted.fetch_add(1, Ordering::Relaxed);
                drop(connection);
            }
        });
        Self { address, port, connections, _undo: undo }
    }
}

/// A container with a network namespace of its own, joined to the host as network plugins do it.
struct Pod {
    process: Process,
    address: Ipv4Addr,
    _undo: Vec<Undo>,
}

#[derive(Clone, Copy)]
enum Wiring {
    /// A pair of interfaces, and a route to the address (Calico, Cilium with endpoint routes).
    Pair,
    /// A bridge of the host's (flannel, podman).
    Bridge,
    /// Another way, of which the host's routes say nothing (macvlan, Cilium).
    Other,
}

impl Pod {
    async fn new(node: &Node, name: &str, wiring: Wiring) -> Self {
        Self::with_address(node, name, wiring, address(), None).await
    }

    async fn with_address(node: &Node, name: &str, wiring: Wiring, address: Ipv4Addr, cgroup: Option<&Path>) -> Self {
        let engine = binaries::find("mock-engine").unwrap();
        let program = [engine.to_str().unwrap(), "--host", "0.0.0.0", "--port", "8000", "--grpc-port", "50051"];
        let endpoint = format!("http://{address}:8000");
        // Nobody outside reaches its loopback address.
        let variables = [
            ("LASTGASP_WORKER", name),
            ("LASTGASP_ENGINE", "vllm"),
            ("LASTGASP_ENDPOINT", &endpoint),
            ("LASTGASP_GRPC_HEALTH", "http://127.0.0.1:50051"),
        ];
        let process = match cgroup {
            None => node.container(name, &["--net"], &program, &variables).await,
            Some(cgroup) => node.container_in(cgroup, name, &["--net"], &program, &variables).await,
        };
        let init = init_of(&process);
        let veth = format!("lg{init}");
        ip(None, &format!("link add {veth} type veth peer name eth0 netns {init}"));
        let mut undo = vec![Undo(format!("link del {veth}"))];
        ip(None, &format!("link set {veth} up"));
        match wiring {
            Wiring::Pair => ip(None, &format!("route add {address}/32 dev {veth}")),
            Wiring::Bridge | Wiring::Other => {
                let bridge = format!("br{init}");
                ip(None, &format!("link add {bridge} type bridge"));
                undo.push(Undo(format!("link del {bridge}")));
                if matches!(wiring, Wiring::Bridge) {
                    ip(None, &format!("link set {veth} master {bridge}"));
                }
                ip(None, &format!("link set {bridge} up"));
                ip(None, &format!("route add {address}/32 dev {bridge}"));
            }
        }
        for setting in
            [format!("address add {address}/32 dev eth0"), "link set eth0 up".into(), "link set lo up".into()]
        {
            ip(Some(init), &setting);
        }
        Self { process, address, _undo: undo }
    }
}

/// A process that has made itself a user and a network namespace, in which it is this address.
async fn is_by_itself(node: &Node, name: &str, address: Ipv4Addr, port: u16) -> Process {
    let url = format!("http://{address}:{port}");
    let health = format!("{url}/admin/shutdown");
    let variables = [("LASTGASP_WORKER", name), ("LASTGASP_ENDPOINT", &url), ("LASTGASP_HTTP_HEALTH", &health)];
    let script = format!("ip link set lo up; ip address add {address}/32 dev lo; exec sleep 1000");
    // Not even the capability to make namespaces: this is what every user may do.
    let program = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", &script];
    node.container(name, &[], &program, &variables).await
}

/// A process with a socket for every IPv6 address and no IPv4 address, on the host's port. Once it listens, it declares
/// the host's address.
async fn listens_beside(node: &Node, name: &str, host: &Host, url: &str) -> Process {
    let script = r#"use strict; use Socket qw(:DEFAULT IPPROTO_IPV6 IPV6_V6ONLY inet_pton pack_sockaddr_in6);
        my ($port, $name, $url) = @ARGV;
        $^F = 100;
        socket(my $socket, PF_INET6, SOCK_STREAM, 0) or die;
        setsockopt($socket, IPPROTO_IPV6, IPV6_V6ONLY, 1) or die;
        bind($socket, pack_sockaddr_in6($port, inet_pton(AF_INET6, "::"))) or die;
        listen($socket, 5) or die;
        @ENV{qw(LASTGASP_WORKER LASTGASP_ENDPOINT LASTGASP_HTTP_HEALTH)} = ($name, $url, $url);
        exec "sleep", "1000";"#;
    node.container(name, &[], &["perl", "-e", script, &host.port.to_string(), name, url], &[]).await
}

#[tokio::test]
async fn the_daemon_asks_no_address_of_the_hosts_for_a_stranger() {
    let node = Node::new("required").await;
    let host = Host::new();
    let stranger = is_by_itself(&node, "stranger", host.address, host.port).await;
    node.refused("stranger", "endpoint_elsewhere").await;

    // In the namespace of the host itself an address is everybody's: whoever listens there has it.
    let url = format!("http://{}:{}", host.address, host.port);
    let variables =
        [("LASTGASP_WORKER", "neighbour"), ("LASTGASP_ENDPOINT", url.as_str()), ("LASTGASP_HTTP_HEALTH", url.as_str())];
    let neighbour = node.container("neighbour", &[], &["sleep", "1000"], &variables).await;
    node.refused("neighbour", "endpoint_elsewhere").await;

    // Nor does it help to listen beside whoever is there, for IPv6 alone.
    let squatter = listens_beside(&node, "squatter", &host, &url).await;
    node.refused("squatter", "endpoint_elsewhere").await;

    // What would have been asked was asked before this one is listed.
    let omega = Declaration::new(node.uid, "omega").unwrap();
    let _omega = node.engine("omega", &omega, &[]).await;
    node.discovery.listed("omega", WorkerState::Serving).await.unwrap();
    assert_eq!(host.connections.load(Ordering::Relaxed), 0);
    for name in ["stranger", "neighbour", "squatter"] {
        assert!(node.discovery.history(name).is_empty(), "{name}");
    }
    drop((stranger, neighbour, squatter));
    matrix::row(
        "A declaration names an address of the host as its endpoint and health",
        "it is refused, and the daemon connects nowhere",
        "refused; 0 connections",
    );
}

async fn a_pod_of_ones_own(wiring: Wiring) {
    let node = Node::new("required").await;
    let pod = Pod::new(&node, "alpha", wiring).await;
    let record = node.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    assert_eq!(record.endpoint, format!("http://{}:8000", pod.address));

    // Somebody else gives himself the address of the pod, before it is taken or after.
    let twin = is_by_itself(&node, "twin", pod.address, 8001).await;
    node.refused("twin", "endpoint_elsewhere").await;

    drop(pod.process);
    node.discovery.removed("alpha").await.unwrap();
    assert!(node.discovery.history("twin").is_empty());
    drop(twin);
}

#[tokio::test]
async fn an_address_that_the_host_routes_to_the_pod_is_the_pods_and_its_health_is_asked_inside() {
    a_pod_of_ones_own(Wiring::Pair).await;
}

#[tokio::test]
async fn the_same_over_a_bridge() {
    a_pod_of_ones_own(Wiring::Bridge).await;
}

/// Cgroups of a test, three levels deep, as a Guaranteed pod's container is.
struct Slice(Vec<PathBuf>);

impl Slice {
    fn new(test: &str, pod: &str) -> Self {
        let mounts = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].map(PathBuf::from);
        let root = mounts.into_iter().find(|mount| mount.join("cgroup.procs").exists()).expect("a cgroup hierarchy");
        let mut levels = vec![root.join(format!("lastgasp-{test}-{}", std::process::id()))];
        levels.push(levels[0].join(format!("pod{pod}")));
        levels.push(levels[1].join("container"));
        for level in &levels {
            std::fs::create_dir(level).unwrap();
        }
        Self(levels)
    }

    /// What follows becomes a process of the innermost one, in a cgroup namespace of its own.
    fn command(&self) -> tokio::process::Command {
        let mut command = tokio::process::Command::new("sh");
        let script = r#"echo $$ > "$1"; shift; exec unshare --cgroup "$@""#;
        command.args(["-c", script, "sh"]).arg(self.0[2].join("cgroup.procs")).arg(binaries::find("lastgasp").unwrap());
        command
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        for level in self.0.iter().rev() {
            let _ = std::fs::remove_dir(level);
        }
    }
}

/// A stand-in for kubelet, which answers while `answers` says so. There is no kubelet where this is tested.
async fn kubelet(pods: Value, answers: watch::Receiver<bool>) -> String {
    let get = async move || {
        let mut answers = answers.clone();
        let _ = answers.wait_for(|answers| *answers).await;
        axum::Json(pods.clone())
    };
    let pods = axum::Router::new().route("/pods", axum::routing::get(get));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, pods).await });
    url
}

#[tokio::test]
async fn where_the_hosts_routes_do_not_tell_kubelet_does() {
    let (uid, known, claimed) = ("8f3a2c51-7f0e-4c3b-9d34-0a1b2c3d4e5f", address(), address());
    let pods = json!({"items": [{"metadata": {"uid": uid}, "status": {"podIP": known.to_string()}}]});
    let (answers, answering) = watch::channel(true);
    let url = kubelet(pods, answering).await;
    let slice = Slice::new("kubelet", uid);
    let cgroup = Some(slice.0[2].as_path());
    let node = Node::configured("required", |config| config.asking_kubelet(&url)).await;
    let other = Pod::with_address(&node, "other", Wiring::Other, claimed, cgroup).await;
    node.refused("other", "endpoint_elsewhere").await;
    let alpha = Pod::with_address(&node, "alpha", Wiring::Other, known, cgroup).await;
    node.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    assert!(node.discovery.history("other").is_empty());

    // The next daemon begins while kubelet says nothing: what it inherits lives, and is nobody else's.
    answers.send_replace(false);
    let node = node.restarted().await;
    let omega = Declaration::new(node.uid, "omega").unwrap();
    let _omega = node.engine("omega", &omega, &[]).await;
    // Nothing is listed before everything that was inherited has been judged.
    node.discovery.listed("omega", WorkerState::Serving).await.unwrap();
    answers.send_replace(true);
    let taken_over = |status: &Value| {
        let mut workers = status["workers"].as_array().into_iter().flatten();
        workers.any(|worker| worker["worker"] == "alpha" && worker["state"] == "serving")
    };
    node.daemon.status_when("it is taken over", taken_over).await.unwrap();
    assert_eq!(node.discovery.removals("alpha"), 0);
    drop((other, alpha));
    node.discovery.removed("alpha").await.unwrap();
}

/// `/../../..` is `/kubepods.slice` for a Burstable pod, and the whole host for a Guaranteed one.
#[tokio::test]
async fn a_cgroup_that_turns_out_to_be_the_whole_host_allows_nobody() {
    let slice = Slice::new("whole-host", "");
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let uid = 3_000_000 + std::process::id();
    let config = DaemonConfig::new("node-a", &nats.url(), "off", folder.path()).declared_by(uid);
    let config = config.within_cgroup("/../../..");
    let daemon = Daemon::start_by(slice.command(), &config, folder.path()).await.unwrap();

    let declaration = Declaration::new(uid, "alpha").unwrap();
    let _engine = lastgasp_tests::engine::Engine::declare("alpha", &declaration, &[], folder.path()).await.unwrap();
    let refused =
        |event: &Value| event["worker"] == "alpha" && event["summary"].as_str().unwrap().contains("not_allowed");
    daemon.event("the refusal", refused).await.unwrap();
    let status = daemon.status().await.unwrap();
    assert_eq!(status["workers"], json!([]));
    let warned = status["warnings"].to_string();
    assert!(warned.contains("/../../.. is the root of the host's cgroups"), "{warned}");

    let mut doctor = slice.command();
    doctor.args(["doctor", "--config"]).arg(config.write(folder.path()).unwrap());
    let said = lastgasp_tests::daemon::Said::by(doctor).await.unwrap();
    assert!(said.out.contains("/../../.. is the root of the host's cgroups"), "{}", said.out);
    assert!(said.out.contains("write /../.. for"), "{}", said.out);
    drop(daemon);
}
