//! Engines that declare themselves workers by their environment, and others that try to pass for
//! them. Each story has a user of its own, so that the daemons of other stories take no notice.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use lastgasp_protocol::WorkerState;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::{Declaration, Engine};
use lastgasp_tests::matrix;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::{GIVE_UP, Process};
use lastgasp_tests::router::Router;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

/// A daemon without a single worker in its configuration.
pub(crate) struct Node {
    pub(crate) daemon: Daemon,
    pub(crate) discovery: Discovery,
    nats: Nats,
    config: DaemonConfig,
    pub(crate) uid: u32,
    pub(crate) folder: TempDir,
}

impl Node {
    pub(crate) async fn new(ebpf: &'static str) -> Self {
        Self::configured(ebpf, |config| config).await
    }

    pub(crate) async fn configured(ebpf: &'static str, configure: impl FnOnce(DaemonConfig) -> DaemonConfig) -> Self {
        static STORIES: AtomicU32 = AtomicU32::new(0);
        // Above every user that a system gives, and another one in every run.
        let uid = 100_000 + std::process::id() % 100_000 * 16 + STORIES.fetch_add(1, Ordering::Relaxed);
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let nats = Nats::start(folder.path()).await.unwrap();
        let discovery = Discovery::watch(&nats).await.unwrap();
        let config = configure(DaemonConfig::new("node-a", &nats.url(), ebpf, folder.path()).declared_by(uid));
        let daemon = Daemon::start(&config, folder.path()).await.unwrap();
        Self { daemon, discovery, nats, config, uid, folder }
    }

    /// The same node with another daemon, after the first was killed.
    pub(crate) async fn restarted(self) -> Self {
        let Self { mut daemon, discovery, nats, config, uid, folder } = self;
        assert!(daemon.process.identity.signal(Signal::SIGKILL));
        daemon.process.exited().await.unwrap();
        drop(daemon);
        let daemon = Daemon::start(&config, folder.path()).await.unwrap();
        Self { daemon, discovery, nats, config, uid, folder }
    }

    /// Runs a program as the user of this story, in a new PID namespace, whose init it is.
    pub(crate) async fn container(
        &self,
        name: &str,
        unshare: &[&str],
        program: &[&str],
        variables: &[(&str, &str)],
    ) -> Process {
        self.container_of(self.uid, name, None, unshare, program, variables).await
    }

    /// The same in this cgroup.
    pub(crate) async fn container_in(
        &self,
        cgroup: &Path,
        name: &str,
        unshare: &[&str],
        program: &[&str],
        variables: &[(&str, &str)],
    ) -> Process {
        self.container_of(self.uid, name, Some(cgroup), unshare, program, variables).await
    }

    /// The same as another user.
    pub(crate) async fn container_of(
        &self,
        uid: u32,
        name: &str,
        cgroup: Option<&Path>,
        unshare: &[&str],
        program: &[&str],
        variables: &[(&str, &str)],
    ) -> Process {
        // The shell becomes what follows: its pid stays the same.
        let mut command = Command::new("sh");
        command.args(["-c", r#"[ -z "$1" ] || echo $$ > "$1/cgroup.procs"; shift; exec "$@""#, "sh"]);
        command.arg(cgroup.unwrap_or(Path::new(""))).args(["unshare", "--pid", "--fork"]).args(unshare);
        command.args(["setpriv", "--clear-groups", "--reuid", &uid.to_string()]).args(program);
        command.current_dir(self.folder.path()).envs(variables.iter().copied());
        let mut process = Process::spawn(name, command, self.folder.path()).unwrap();
        let pid = process.identity.pid;
        let children = format!("/proc/{pid}/task/{pid}/children");
        let init = async {
            loop {
                if let Ok(init) = std::fs::read_to_string(&children).unwrap_or_default().trim().parse::<u32>() {
                    return init;
                }
                tokio::task::yield_now().await;
            }
        };
        // It ends with the process here, and with it everything in its namespace.
        process.record([tokio::time::timeout(GIVE_UP, init).await.expect("unshare forks")]);
        process
    }

    /// An engine that is a container's init.
    async fn declared_container(&self, declaration: &Declaration, arguments: &[&str]) -> Process {
        let engine = lastgasp_tests::binaries::find("mock-engine").unwrap();
        let (port, grpc_port) = (declaration.port.to_string(), declaration.grpc_port.to_string());
        let program = [engine.to_str().unwrap(), "--port", &port, "--grpc-port", &grpc_port];
        let variables = variables(declaration);
        let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        self.container(&declaration.worker, &[], &[&program, arguments].concat(), &variables).await
    }

    pub(crate) async fn engine(&self, name: &str, declaration: &Declaration, arguments: &[&str]) -> Engine {
        Engine::declare(name, declaration, arguments, self.folder.path()).await.unwrap()
    }

    /// Waits until a declaration of this name was refused for this reason.
    pub(crate) async fn refused(&self, worker: &str, reason: &str) {
        let said = format!("declaration refused ({reason})");
        let is = |event: &Value| event["worker"] == worker && event["summary"].as_str().unwrap().starts_with(&said);
        let what = format!("the refusal of {worker}: {reason}");
        self.daemon.event(&what, |event| event["event"] == "note" && is(event)).await.unwrap();
    }
}

/// What an engine of that declaration has in its environment.
fn variables(declaration: &Declaration) -> [(&'static str, String); 4] {
    [
        ("LASTGASP_WORKER", declaration.worker.clone()),
        ("LASTGASP_ENGINE", "vllm".to_owned()),
        ("LASTGASP_ENDPOINT", declaration.endpoint.clone()),
        ("LASTGASP_GRPC_HEALTH", format!("http://127.0.0.1:{}", declaration.grpc_port)),
    ]
}

async fn life_of_a_declared_worker(ebpf: &'static str) {
    let node = Node::new(ebpf).await;
    assert_eq!(node.daemon.status().await.unwrap()["workers"], json!([]));
    let declaration = Declaration::new(node.uid, "alpha").unwrap();
    let engine = node.engine("alpha", &declaration, &["--orphan-lifetime", "3600"]).await;

    let record = node.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    assert_eq!((record.endpoint.as_str(), record.models), (declaration.endpoint.as_str(), vec!["tiny".to_owned()]));
    let router = Router::start("router-1", &node.nats.url(), 3, node.folder.path()).await.unwrap();
    let body = json!({"model": "tiny", "prompt": "hello", "max_tokens": 5, "ignore_eos": true});
    let answer = router.stream(Endpoint::Completions, &body).await.unwrap().finish().await.unwrap();
    assert_eq!((answer.worker.as_deref(), answer.dones), (Some("node-a/alpha"), 1));
    let serves = |status: &Value| status["workers"][0]["state"] == "serving";
    let status = node.daemon.status_when("it serves", serves).await.unwrap();
    let worker = &status["workers"][0];
    assert_eq!(worker["source"], "declaration");
    assert_eq!(worker["root"]["tgid"], engine.ready.root_pid);
    assert!(worker["container"]["cgroup_path"].as_str().unwrap().starts_with('/'), "{worker:#}");

    engine.signal_root(Signal::SIGKILL);
    node.discovery.removed("alpha").await.unwrap();
    let certificate = node.discovery.certificate("alpha", |_| true).await.unwrap();
    assert_eq!(certificate.incarnation, record.incarnation);
    assert!(certificate.container.is_some());
    // Its engine core was reaped: when nothing of it is alive, it is forgotten.
    node.daemon.status_when("nobody", |status| status["workers"] == json!([])).await.unwrap();
    assert!(!engine.core.is_alive());
    assert_eq!(node.discovery.removals("alpha"), 1);

    let again = node.engine("again", &declaration, &[]).await;
    let second = node.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    assert_ne!(second.incarnation, record.incarnation);
    drop(again);
    node.discovery.removed("alpha").await.unwrap();
}

#[tokio::test]
async fn it_appears_serves_is_killed_and_is_withdrawn() {
    life_of_a_declared_worker("required").await;
}

#[tokio::test]
async fn the_same_without_the_kernels_help() {
    life_of_a_declared_worker("off").await;
}

#[tokio::test]
async fn nobody_gets_anothers_worker_withdrawn() {
    let node = Node::new("required").await;
    let honest = Declaration::new(node.uid, "alpha").unwrap();
    let _alpha = node.engine("alpha", &honest, &[]).await;
    let record = node.discovery.listed("alpha", WorkerState::Serving).await.unwrap();

    // Its name, at another address.
    let impostor = Declaration { worker: "alpha".to_owned(), ..Declaration::new(node.uid, "impostor").unwrap() };
    let impostor = node.engine("impostor", &impostor, &[]).await;
    node.refused("alpha", "name_taken").await;
    // Its address, under another name, with a listener on the same port.
    let squatter = Declaration { port: honest.port, ..Declaration::new(node.uid, "squatter").unwrap() };
    let squatter = Declaration { endpoint: honest.endpoint.clone(), ..squatter };
    let squatter = node.engine("squatter", &squatter, &["--host", "127.0.0.2"]).await;
    node.refused("squatter", "endpoint_taken").await;
    // A user who may declare nothing.
    let stranger = Declaration::new(node.uid + 8, "stranger").unwrap();
    let stranger = node.engine("stranger", &stranger, &[]).await;
    node.refused("stranger", "not_allowed").await;
    // The init of a container, at an address that is not the container's.
    let variables = [("LASTGASP_WORKER", "elsewhere"), ("LASTGASP_ENDPOINT", "http://127.0.0.1:8000")];
    let elsewhere = node.container("elsewhere", &["--net"], &["sleep", "1000"], &variables).await;
    node.refused("elsewhere", "endpoint_elsewhere").await;

    // The same port in a network namespace of its own, which it opens and closes.
    let engine = lastgasp_tests::binaries::find("mock-engine").unwrap();
    let (port, grpc_port) = (honest.port.to_string(), honest.grpc_port.to_string());
    let program = [engine.to_str().unwrap(), "--host", "0.0.0.0", "--port", &port, "--grpc-port", &grpc_port];
    let variables = [("LASTGASP_WORKER", "twin"), ("LASTGASP_ENDPOINT", honest.endpoint.as_str())];
    let twin = node.container("twin", &["--net"], &program, &variables).await;
    node.refused("twin", "endpoint_elsewhere").await;
    listens_in_its_namespace(&twin, honest.port).await;

    drop((impostor, squatter, stranger, elsewhere, twin));
    // What was heard of their deaths was heard before this one was found.
    let omega = Declaration::new(node.uid, "omega").unwrap();
    let _omega = node.engine("omega", &omega, &[]).await;
    node.discovery.listed("omega", WorkerState::Serving).await.unwrap();
    let history = node.discovery.history("alpha");
    assert_eq!(history.len(), 1, "{history:#?}");
    assert_eq!(history[0].record.as_ref().map(|record| &record.incarnation), Some(&record.incarnation));
    for name in ["impostor", "squatter", "stranger", "elsewhere", "twin"] {
        assert!(node.discovery.history(name).is_empty(), "{name}");
    }
    let metrics = node.daemon.metrics().await.unwrap();
    for reason in ["name_taken", "endpoint_taken", "not_allowed", "endpoint_elsewhere"] {
        assert!(metrics.contains(&format!(r#"lastgasp_declarations_total{{outcome="{reason}"}}"#)), "{metrics}");
    }
    matrix::row(
        "A container declares another's worker name, or opens its port",
        "the declaration is refused, the worker stays",
        "refused; the worker stayed listed",
    );
}

/// A set-user-ID program of a user who may declare something, run by one who may not.
#[tokio::test]
async fn nobody_borrows_the_user_of_another() {
    let node = Node::new("off").await;
    let (owner, borrower) = (node.uid, node.uid + 8);
    let program = node.folder.path().join("sleep-as-owner");
    std::fs::copy("/bin/sleep", &program).unwrap();
    std::os::unix::fs::chown(&program, Some(owner), None).unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o4755)).unwrap();
    let borrowed = Declaration::new(owner, "borrowed").unwrap();
    let variables = [("LASTGASP_WORKER", "borrowed"), ("LASTGASP_ENDPOINT", borrowed.endpoint.as_str())];
    let program = [program.to_str().unwrap(), "1000"];
    let container = node.container_of(borrower, "borrowed", None, &[], &program, &variables).await;
    let users = format!("Uid:\t{borrower}\t{owner}\t{owner}\t{owner}\n");
    let status = format!("/proc/{}/status", init_of(&container));
    let deadline = std::time::Instant::now() + GIVE_UP;
    while !std::fs::read_to_string(&status).unwrap().contains(&users) {
        assert!(std::time::Instant::now() < deadline, "it does not act as its owner: {}", container.log_tail());
        tokio::task::yield_now().await;
    }

    // Without kernel events everybody is looked at together, so that one was when this one is found. Its
    // refusal may go untold: other stories have hundreds of workers that this daemon has to refuse.
    let omega = Declaration::new(owner, "omega").unwrap();
    let _omega = node.engine("omega", &omega, &[]).await;
    node.discovery.listed("omega", WorkerState::Serving).await.unwrap();
    let workers = |status: &Value| status["workers"].as_array().is_some_and(|workers| !workers.is_empty());
    let status = node.daemon.status_when("a worker", workers).await.unwrap();
    let names: Vec<&Value> = status["workers"].as_array().unwrap().iter().map(|worker| &worker["worker"]).collect();
    assert_eq!(names, ["omega"], "{status:#}");
}

/// The pid here of the init of a container.
pub(crate) fn init_of(container: &Process) -> u32 {
    let pid = container.identity.pid;
    std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap().trim().parse().unwrap()
}

/// Waits until something listens on the port in the network namespace of a container's init.
async fn listens_in_its_namespace(container: &Process, port: u16) {
    let table = format!("/proc/{}/net/tcp", init_of(container));
    let deadline = std::time::Instant::now() + GIVE_UP;
    let listening = |line: &str| {
        lastgasp::sensors::proc::listeners::listener(line).is_some_and(|listener| listener.address.port() == port)
    };
    while !std::fs::read_to_string(&table).unwrap().lines().any(listening) {
        assert!(std::time::Instant::now() < deadline, "it does not listen: {}", container.log_tail());
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn its_words_reach_no_terminal_and_no_folder() {
    let node = Node::new("off").await;
    let variables = [
        ("LASTGASP_WORKER", "../../\u{1b}]0;owned\u{7}\nroot"),
        ("LASTGASP_ENDPOINT", "http://\u{1b}[2J/../../etc/passwd"),
        ("LASTGASP_MODELS", "\u{9b}31m"),
    ];
    let hostile = node.container("hostile", &[], &["sleep", "1000"], &variables).await;
    node.refused("../../\u{fffd}]0;owned\u{fffd}\u{fffd}root", "malformed").await;
    let said = [node.daemon.says("events").await.unwrap(), node.daemon.says("status").await.unwrap()];
    for text in said.iter().chain([&node.daemon.process.log_tail()]) {
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        assert!(!text.lines().any(|line| line.starts_with("root")), "{text:?}");
    }
    assert!(said[0].contains("owned"), "it was logged: {}", said[0]);
    drop(hostile);
    matrix::row(
        "A declaration is full of escapes and paths",
        "refused or made printable",
        "none reached a terminal or a folder",
    );
}

/// The init of a container is its worker from the start, minutes before it listens; what is
/// executed in the container inherits the variables and means nothing.
#[tokio::test]
async fn the_init_of_a_container_is_known_while_it_loads_and_its_probes_are_nobody() {
    let node = Node::new("required").await;
    let declaration = Declaration::new(node.uid, "alpha").unwrap();
    let arguments = ["--load-ms", "4000", "--orphan-lifetime", "1"];
    let container = node.declared_container(&declaration, &arguments).await;
    let starts = |status: &Value| status["workers"][0]["state"] == "starting";
    let status = node.daemon.status_when("it starts", starts).await.unwrap();
    let root = status["workers"][0]["root"]["tgid"].as_u64().unwrap();
    assert!(node.discovery.history("alpha").is_empty());

    let mut probe = Command::new("nsenter");
    probe.args(["--target", &root.to_string(), "--pid", "setpriv", "--clear-groups", "--reuid", &node.uid.to_string()]);
    probe.args(["sleep", "1000"]).envs(variables(&declaration));
    let probe = Process::spawn("probe", probe, node.folder.path()).unwrap();
    let record = node.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    assert_eq!(record.endpoint, declaration.endpoint);
    drop(probe);

    drop(container);
    node.discovery.removed("alpha").await.unwrap();
    let metrics = node.daemon.metrics().await.unwrap();
    assert!(metrics.contains(r#"lastgasp_declarations_total{outcome="accepted"} 1"#), "{metrics}");
    assert!(!metrics.contains("name_taken"), "{metrics}");
}

/// The next look at all processes is an hour away.
#[tokio::test]
async fn its_exec_is_enough_to_be_known() {
    let node = Node::configured("required", DaemonConfig::without_scans).await;
    let declaration = Declaration::new(node.uid, "alpha").unwrap();
    let container = node.declared_container(&declaration, &["--orphan-lifetime", "1"]).await;
    let record = node.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    assert_eq!(record.endpoint, declaration.endpoint);

    drop(container);
    node.discovery.removed("alpha").await.unwrap();
}

#[tokio::test]
async fn it_stays_listed_while_the_daemon_is_replaced() {
    let mut node = Node::new("required").await;
    let declaration = Declaration::new(node.uid, "alpha").unwrap();
    let engine = node.engine("alpha", &declaration, &[]).await;
    let record = node.discovery.listed("alpha", WorkerState::Serving).await.unwrap();

    assert!(node.daemon.process.identity.signal(Signal::SIGKILL));
    node.daemon.process.exited().await.unwrap();
    node.daemon = Daemon::start(&node.config, node.folder.path()).await.unwrap();
    node.daemon.status_when("it serves", |status| status["workers"][0]["state"] == "serving").await.unwrap();
    assert_eq!(node.discovery.removals("alpha"), 0);

    engine.kill_tree();
    node.discovery.removed("alpha").await.unwrap();
    let history = node.discovery.history("alpha");
    assert!(history.iter().filter_map(|seen| seen.record.as_ref()).all(|seen| seen.incarnation == record.incarnation));
    assert_eq!(node.discovery.removals("alpha"), 1);
}
