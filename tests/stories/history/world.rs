//! The processes, what is done to them, and what is known of it.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lastgasp_protocol::kv::{Bucket, Expect};
use lastgasp_protocol::{Incarnation, LeaseKind, Name, SCHEMA, WORKERS_BUCKET, WorkerRecord, WorkerState, Writer};
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::model::Dialect;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::GIVE_UP;
use lastgasp_tests::proxy::{Proxy, Weather};
use lastgasp_tests::router::{Router, View};
use nix::sys::signal::Signal;
use tempfile::TempDir;
use tokio::task::{JoinHandle, JoinSet};

use super::plan::{Cast, Fault, Planned};
use super::streams::{Request, StreamOutcome};

const NODES: [&str; 2] = ["node-a", "node-b"];
const ROUTERS: [&str; 2] = ["router-1", "router-2"];
/// Name, node, and whether it registers itself.
const WORKERS: [(&str, usize, bool); 4] =
    [("alpha", 0, false), ("beta", 0, false), ("gamma", 1, false), ("delta", 1, true)];

struct Node {
    wire: Proxy,
    config: DaemonConfig,
    daemon: Option<Daemon>,
}

/// A router and its way to NATS.
struct Gate {
    wire: Proxy,
    router: Option<Router>,
}

struct Worker {
    name: &'static str,
    node: usize,
    registers: bool,
    engine: Engine,
    /// The last one is that of `engine`.
    lives: Vec<Life>,
}

/// One process, under one record.
struct Life {
    incarnation: Incarnation,
    /// It was killed.
    dead: bool,
    /// It was stopped for a while: it may be taken for dead.
    disturbed: bool,
}

/// What the sampler of the routers' views needs, and has found.
#[derive(Default)]
struct Watched {
    routers: Vec<Option<SocketAddr>>,
    /// Dead, and gone from every view.
    buried: HashSet<Incarnation>,
    samples: usize,
    wrong: Vec<String>,
}

/// Everything. The fields are dropped from first to last.
pub(crate) struct World {
    sampler: JoinHandle<()>,
    watched: Arc<Mutex<Watched>>,
    gates: Vec<Gate>,
    nodes: Vec<Node>,
    workers: Vec<Worker>,
    bucket: Bucket,
    discovery: Discovery,
    nats: Nats,
    boot_id: String,
    folder: TempDir,
}

impl Drop for World {
    fn drop(&mut self) {
        self.sampler.abort();
    }
}

/// An engine whose end nobody tells of but the daemon.
const ENGINE: [&str; 6] = ["--frontend", "rust", "--rust-notice-ms", "3600000", "--tokens-per-second", "200"];

impl World {
    pub(crate) async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let nats = Nats::start(path).await.unwrap();
        let discovery = Discovery::watch(&nats).await.unwrap();
        let context = async_nats::jetstream::new(nats.client().await.unwrap());
        let bucket = Bucket::open(&context, WORKERS_BUCKET, 1).await.unwrap();
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned();
        let mut nodes = Vec::new();
        for name in NODES {
            let wire = Proxy::start(nats.address()).await.unwrap();
            let config = DaemonConfig::new(name, &wire.url(), "required", path).with_hold_down_ms(100);
            nodes.push(Node { wire, config, daemon: None });
        }
        let mut workers = Vec::new();
        for (name, node, registers) in WORKERS {
            let engine = Engine::start(name, &ENGINE, path).await.unwrap();
            let node_config = &mut nodes[node].config;
            *node_config = node_config.clone().with(&engine);
            let worker = node_config.worker.last_mut().unwrap();
            worker.health.hang_window_ms = Some(3000);
            worker.writer = if registers { "worker" } else { "daemon" };
            workers.push(Worker { name, node, registers, engine, lives: Vec::new() });
        }
        for node in &mut nodes {
            node.daemon = Some(Daemon::start(&node.config, path).await.unwrap());
        }
        let mut gates = Vec::new();
        for _ in ROUTERS {
            gates.push(Gate { wire: Proxy::start(nats.address()).await.unwrap(), router: None });
        }
        let watched = Arc::new(Mutex::new(Watched { routers: vec![None; ROUTERS.len()], ..Watched::default() }));
        let sampler = tokio::spawn(sample(Arc::clone(&watched)));
        let mut world = Self { sampler, watched, gates, nodes, workers, bucket, discovery, nats, boot_id, folder };
        for worker in 0..world.workers.len() {
            world.begin_life(worker).await;
        }
        for router in 0..world.gates.len() {
            world.start_router(router).await;
        }
        world.converge().await;
        world
    }

    pub(crate) fn cast(&self) -> Cast {
        Cast { workers: self.workers.len(), nodes: self.nodes.len(), routers: self.gates.len() }
    }

    fn watched(&self) -> std::sync::MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The engine of this worker has just begun to serve.
    async fn begin_life(&mut self, number: usize) {
        let worker = &mut self.workers[number];
        let process = worker.engine.process.identity;
        let incarnation = if worker.registers {
            let incarnation = Incarnation::new(format!("{}-{}", worker.name, worker.lives.len())).unwrap();
            let record = WorkerRecord {
                schema: SCHEMA,
                node: Name::new(NODES[worker.node]).unwrap(),
                worker: Name::new(worker.name).unwrap(),
                incarnation: incarnation.clone(),
                epoch: 1,
                state: WorkerState::Serving,
                deadline: None,
                writer: Writer::Worker,
                lease: LeaseKind::Node,
                engine: "vllm".to_owned(),
                models: vec![worker.engine.ready.model.clone()],
                endpoint: worker.engine.endpoint(),
                registered_at: None,
                labels: Default::default(),
                processes: Vec::new(),
                commanded: None,
            };
            register(&self.bucket, &record).await;
            incarnation
        } else {
            Incarnation::of_process(&self.boot_id, process.pid, process.start_ticks)
        };
        worker.lives.push(Life { incarnation, dead: false, disturbed: false });
    }

    async fn start_router(&mut self, number: usize) {
        let url = self.gates[number].wire.url();
        let router = Router::start(ROUTERS[number], &url, 3, self.folder.path()).await.unwrap();
        self.watched().routers[number] = Some(router.address);
        self.gates[number].router = Some(router);
    }

    /// Asks, each at its time; none where its router is down by then.
    pub(crate) fn ask(&self, requests: Vec<Request>) -> JoinSet<Option<StreamOutcome>> {
        let dialect: Dialect = self.workers[0].engine.dialect();
        let mut asked = JoinSet::new();
        for request in requests {
            let (watched, dialect) = (Arc::clone(&self.watched), dialect.clone());
            asked.spawn(async move {
                tokio::time::sleep(request.after).await;
                let address = watched.lock().unwrap_or_else(PoisonError::into_inner).routers[request.router]?;
                Some(request.ask(address, dialect).await)
            });
        }
        asked
    }

    /// Carries out a plan.
    pub(crate) async fn suffer(&mut self, plan: &[Planned]) {
        let mut steps: Vec<_> =
            plan.iter().flat_map(|one| [(one.from, one.fault, true), (one.until, one.fault, false)]).collect();
        steps.sort_by_key(|(at, ..)| *at);
        let begin = tokio::time::Instant::now();
        for (at, fault, begins) in steps {
            tokio::time::sleep_until(begin + at).await;
            if begins {
                self.break_it(fault).await;
            } else {
                self.mend(fault).await;
            }
        }
    }

    async fn break_it(&mut self, fault: Fault) {
        match fault {
            Fault::KillCore(worker) => self.hit(worker, true).engine.signal_core(Signal::SIGKILL),
            Fault::KillRoot(worker) => self.hit(worker, true).engine.signal_root(Signal::SIGKILL),
            Fault::KillTree(worker) => self.hit(worker, true).engine.kill_tree(),
            Fault::Dismiss(worker) => self.hit(worker, true).engine.signal_root(Signal::SIGTERM),
            Fault::FreezeCore(worker) => self.hit(worker, false).engine.signal_core(Signal::SIGSTOP),
            Fault::FreezeRoot(worker) => self.hit(worker, false).engine.signal_root(Signal::SIGSTOP),
            Fault::KillDaemon(node) => self.end_daemon(node, Signal::SIGKILL).await,
            Fault::EndDaemon(node) => self.end_daemon(node, Signal::SIGTERM).await,
            Fault::CutNode(node) => cut(&self.nodes[node].wire),
            Fault::CutRouter(router) => cut(&self.gates[router].wire),
            Fault::KillRouter(router) => {
                self.watched().routers[router] = None;
                self.gates[router].router = None;
                matrix::count("routers killed", 1);
            }
            Fault::KillNats => self.nats.stop(),
            Fault::FreezeNats => self.nats.signal(Signal::SIGSTOP),
        }
    }

    async fn mend(&mut self, fault: Fault) {
        match fault {
            // Nobody brings these back before the round is over.
            Fault::KillCore(_) | Fault::KillRoot(_) | Fault::KillTree(_) | Fault::Dismiss(_) => {}
            Fault::FreezeCore(worker) => self.workers[worker].engine.signal_core(Signal::SIGCONT),
            Fault::FreezeRoot(worker) => self.workers[worker].engine.signal_root(Signal::SIGCONT),
            Fault::KillDaemon(node) | Fault::EndDaemon(node) => {
                let daemon = Daemon::start(&self.nodes[node].config, self.folder.path()).await.unwrap();
                self.nodes[node].daemon = Some(daemon);
            }
            Fault::CutNode(node) => self.nodes[node].wire.set(Weather::Fair),
            Fault::CutRouter(router) => self.gates[router].wire.set(Weather::Fair),
            // It says that it is ready when it has listed the workers, so after NATS is back.
            Fault::KillRouter(_) => {}
            Fault::KillNats => self.nats.resume().await.unwrap(),
            Fault::FreezeNats => self.nats.signal(Signal::SIGCONT),
        }
    }

    /// Notes that this is going to be done to a worker.
    fn hit(&mut self, worker: usize, dies: bool) -> &Worker {
        let worker = &mut self.workers[worker];
        let life = worker.lives.last_mut().expect("begun");
        if dies {
            life.dead = true;
        } else {
            life.disturbed = true;
        }
        worker
    }

    async fn end_daemon(&mut self, node: usize, signal: Signal) {
        let mut daemon = self.nodes[node].daemon.take().expect("running");
        assert!(daemon.process.identity.signal(signal), "the daemon had ended: {}", daemon.process.log_tail());
        daemon.process.exited().await.unwrap();
        matrix::count("daemons killed", 1);
    }

    /// Starts again what is gone, as supervisors do.
    pub(crate) async fn heal(&mut self) {
        for router in 0..self.gates.len() {
            if self.gates[router].router.is_none() {
                self.start_router(router).await;
            }
        }
        for number in 0..self.workers.len() {
            let worker = &mut self.workers[number];
            if worker.lives.last().is_some_and(|life| life.dead) {
                let http = worker.engine.ready.http.port().to_string();
                let grpc = worker.engine.ready.grpc.expect("asked for").port().to_string();
                worker.engine.process.end();
                let arguments = [&ENGINE[..], &["--port", &http, "--grpc-port", &grpc]].concat();
                worker.engine = Engine::start(worker.name, &arguments, self.folder.path()).await.unwrap();
                self.begin_life(number).await;
            }
        }
    }

    /// Waits until discovery and every router say what is so.
    pub(crate) async fn converge(&mut self) {
        for node in &mut self.nodes {
            let daemon = node.daemon.as_mut().expect("running");
            assert!(!daemon.process.has_exited(), "{}", daemon.process.log_tail());
        }
        for worker in &self.workers {
            let life = worker.lives.last().expect("begun");
            let what = format!("listed as {}", life.incarnation);
            let is =
                |record: &WorkerRecord| record.incarnation == life.incarnation && record.state == WorkerState::Serving;
            let listed = self.discovery.wait_for(worker.name, &what, |history| {
                history.last().and_then(|seen| seen.record.as_ref()).is_some_and(is)
            });
            if let Err(error) = listed.await {
                let status = self.nodes[worker.node].daemon.as_ref().expect("running").status().await;
                panic!("{error:?}\n{status:#?}");
            }
        }
        let mut expected: Vec<_> = self
            .workers
            .iter()
            .map(|worker| (format!("{}/{}", NODES[worker.node], worker.name), worker.lives.last().expect("begun")))
            .map(|(name, life)| (name, life.incarnation.clone()))
            .collect();
        expected.sort();
        for gate in &self.gates {
            let expected: Vec<_> = expected.iter().map(|(name, life)| (name.as_str(), life)).collect();
            gate.router.as_ref().expect("started").offers(&expected).await.unwrap();
        }
        let dead: Vec<_> = self.lives().filter(|life| life.dead).map(|life| life.incarnation.clone()).collect();
        self.watched().buried.extend(dead);
    }

    fn lives(&self) -> impl Iterator<Item = &Life> {
        self.workers.iter().flat_map(|worker| &worker.lives)
    }

    /// Holds all that discovery has said, and all that routers have shown, against what happened.
    pub(crate) fn check_history(&self) {
        for worker in &self.workers {
            let history = self.discovery.history(worker.name);
            let mut ended = HashSet::new();
            for pair in history.windows(2) {
                let Some(before) = &pair[0].record else { continue };
                let life = worker.lives.iter().find(|life| life.incarnation == before.incarnation);
                let life = life.unwrap_or_else(|| panic!("nobody's record: {before:#?}"));
                if pair[1].record.is_none() {
                    assert!(life.dead || life.disturbed, "a living worker was withdrawn: {pair:#?}");
                    ended.insert((before.incarnation.clone(), before.epoch));
                }
                if let Some(after) = &pair[1].record {
                    let again = ended.contains(&(after.incarnation.clone(), after.epoch));
                    assert!(!again, "listed again under an epoch that had ended: {history:#?}");
                }
            }
        }
        let watched = self.watched();
        assert!(watched.wrong.is_empty(), "{:#?}", watched.wrong);
        assert!(watched.samples > 0);
    }

    /// How many lives have ended, and how many withdrawals were seen.
    pub(crate) fn deaths_and_removals(&self) -> (usize, usize) {
        let removals = self.workers.iter().map(|worker| self.discovery.removals(worker.name)).sum();
        (self.lives().filter(|life| life.dead).count(), removals)
    }
}

/// Nothing passes any more, and neither end learns of it.
fn cut(wire: &Proxy) {
    matrix::count("partitions", 1);
    wire.set(Weather::Still);
}

/// Writes a worker's own record, as the worker itself would at its start.
async fn register(bucket: &Bucket, record: &WorkerRecord) {
    let key = lastgasp_protocol::worker_key(&record.node, &record.worker);
    let deadline = Instant::now() + GIVE_UP;
    loop {
        let expect = match bucket.read(&key).await {
            Ok(None) => Some(Expect::Absent),
            Ok(Some(entry)) => Some(Expect::Revision(entry.revision)),
            Err(_) => None,
        };
        if let Some(expect) = expect {
            let ttl = Duration::from_secs(24 * 3600);
            if bucket.put(&key, record.to_json().into(), expect, ttl).await.is_ok() {
                return;
            }
        }
        assert!(Instant::now() < deadline, "{key} cannot be registered");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Looks at the routers' views all the while: who is dead and gone must not come back.
async fn sample(watched: Arc<Mutex<Watched>>) {
    let client = reqwest::Client::new();
    loop {
        let lock = || watched.lock().unwrap_or_else(PoisonError::into_inner);
        let routers = lock().routers.clone();
        for address in routers.into_iter().flatten() {
            // Before the view is asked for: who is buried later may still stand in it.
            let buried = lock().buried.clone();
            // A router that is killed meanwhile does not answer.
            let Ok(response) = client.get(format!("http://{address}/workers")).send().await else { continue };
            let Ok(view) = response.json::<Vec<View>>().await else { continue };
            let mut watched = lock();
            watched.samples += 1;
            let risen = view.into_iter().filter(|view| view.takes_work && buried.contains(&view.incarnation));
            watched.wrong.extend(risen.map(|view| format!("{address} lists the dead: {view:?}")));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
