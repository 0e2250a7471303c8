//! Infera itself, from a checkout and unchanged: its router, its wrappers of vLLM, and its discovery in
//! etcd. Only what the wrapper starts is the mock engine, by `infera/vllm/` in vLLM's place.
//!
//! `LASTGASP_INFERA_SRC=/src/Infera cargo xtask systems infera` runs it. Names of modules, flags and
//! variables are Infera's at 5890f7f.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use lastgasp_protocol::WorkerState;
use lastgasp_tests::binaries;
use lastgasp_tests::client::{LiveStream, Transcript};
use lastgasp_tests::daemon::{Daemon, DaemonConfig, HealthConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::etcd::Etcd;
use lastgasp_tests::model::{Dialect, Endpoint, Frontend};
use lastgasp_tests::nats::{Nats, free_port};
use lastgasp_tests::process::{GIVE_UP, Identity, Process};
use lastgasp_tests::ready::Ready;
use lastgasp_tests::reference::Reference;
use lastgasp_tests::systems::{self, Cell, Run};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

/// Names a checkout of Infera.
const SOURCE: &str = "LASTGASP_INFERA_SRC";
/// How long a silent stream is waited for. The lease of a dead wrapper has lapsed by then (30 s).
const WAIT: Duration = Duration::from_secs(40);
/// Between two looks at something that cannot be waited for.
const MOMENT: Duration = Duration::from_millis(20);
/// Tokens of an answer, and how many of them come before the fault.
const LENGTH: usize = 200;
const BEFORE: usize = 40;

/// What is done to the worker that serves.
struct Fault {
    name: &'static str,
    signal: Signal,
    wrapper: bool,
    engine: bool,
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a checkout of Infera; cargo xtask test --peers runs it"]
async fn a_stream_outlives_its_wrapper() {
    let name = "SIGKILL of the wrapper; its engine lives";
    measure(&Fault { name, signal: Signal::SIGKILL, wrapper: true, engine: false }).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a checkout of Infera; cargo xtask test --peers runs it"]
async fn a_stream_outlives_its_wrapper_and_its_engine() {
    let name = "SIGKILL of wrapper and engine";
    measure(&Fault { name, signal: Signal::SIGKILL, wrapper: true, engine: true }).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a checkout of Infera; cargo xtask test --peers runs it"]
async fn a_stream_leaves_a_wrapper_and_an_engine_that_hang() {
    let name = "SIGSTOP of wrapper and engine";
    measure(&Fault { name, signal: Signal::SIGSTOP, wrapper: true, engine: true }).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a checkout of Infera; cargo xtask test --peers runs it"]
async fn a_stream_leaves_an_engine_that_hangs() {
    let name = "SIGSTOP of the engine; its wrapper lives";
    measure(&Fault { name, signal: Signal::SIGSTOP, wrapper: false, engine: true }).await;
}

/// Both cells of a fault, in turns.
async fn measure(fault: &Fault) {
    let Some(infera) = Infera::checked_out().await else {
        lastgasp_tests::skip!("LASTGASP_INFERA_SRC names no checkout of Infera");
    };
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..systems::runs() {
        without.push(infera.suffers(fault, false).await);
        with.push(infera.suffers(fault, true).await);
    }
    let system = format!("Infera {}, etcd, NATS, migration limit 1", infera.revision);
    for (lastgasp, runs) in [(false, without), (true, with)] {
        Cell { system: &system, fault: fault.name, lastgasp, waited: WAIT, runs: &runs, remark: "mock engine" }
            .record();
    }
}

/// A checkout and a Python with what it needs.
struct Infera {
    source: PathBuf,
    revision: String,
    python: PathBuf,
}

impl Infera {
    async fn checked_out() -> Option<Self> {
        let source = std::path::absolute(std::env::var_os(SOURCE)?).unwrap();
        assert!(source.join("infera/server").is_dir(), "{SOURCE}: no infera/server in {}", source.display());
        let mut git = Command::new("git");
        // It may belong to another user.
        git.args(["-c", "safe.directory=*", "-C"]).arg(&source).args(["describe", "--always", "--dirty"]);
        let said = git.output().await.unwrap();
        assert!(said.status.success(), "{SOURCE}: {}", String::from_utf8_lossy(&said.stderr));
        let revision = String::from_utf8(said.stdout).unwrap().trim().to_owned();
        let python = python(&source).await;
        Some(Self { source, revision, python })
    }

    /// One of its modules, with the stand-in for vLLM and without a way out of this machine.
    fn module(&self, name: &str, folder: &Path) -> Command {
        let shim = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/infera");
        let mut command = Command::new(&self.python);
        // A wrapper whose engine does not start ends its whole process group, which must not be the tests'.
        command.args(["-m", name]).current_dir(folder).process_group(0);
        command.env("PYTHONPATH", std::env::join_paths([&shim, &self.source]).unwrap());
        // Nothing is written into the checkout.
        command.env("PYTHONPYCACHEPREFIX", Path::new(env!("CARGO_TARGET_TMPDIR")).join("infera-pycache"));
        command.envs([("INFERA_NO_USAGE_STATS", "1"), ("HF_HUB_OFFLINE", "1"), ("NO_PROXY", "127.0.0.1")]);
        command
    }

    /// Breaks the worker that serves a stream in the middle of it.
    async fn suffers(&self, fault: &Fault, lastgasp: bool) -> Run {
        let scene = Scene::start(self).await;
        let daemon = if lastgasp { Some(scene.watched().await) } else { None };
        let (body, reference) = question(LENGTH);
        let mut stream = LiveStream::open(scene.address, Endpoint::Completions, &body).await.unwrap();
        stream.tokens(BEFORE).await.unwrap();
        let lost = scene.serving().await;

        let began = Instant::now();
        scene.workers[lost].suffer(fault);

        let read = async {
            while stream.transcript.ending.is_none() {
                stream.tokens(1).await.unwrap();
            }
        };
        let safe = async {
            while lists(&scene.client, scene.address, &scene.workers[lost].id).await.unwrap() {
                tokio::time::sleep(MOMENT).await;
            }
            began.elapsed()
        };
        let (_, safe) = tokio::join!(tokio::time::timeout(WAIT, read), tokio::time::timeout(WAIT, safe));
        let gap = gap(&stream.transcript, began);
        let complete = is_whole(&stream.transcript, &reference);
        if let Some(daemon) = daemon {
            let last = stream.transcript.events.last().map(|event| event.raw.as_str());
            let said = || format!("it ends with {last:?}\n{}\n{}", scene.router_log(), daemon.process.log_tail());
            assert!(complete, "not every token once: {}", said());
            assert!(gap.is_some() && safe.is_ok(), "gap {gap:?}, safe {safe:?}: {}", said());
            scene.is_as_promised(fault, lost).await;
        }
        Run::new(gap, complete, safe.ok())
    }
}

/// A virtual environment with what this checkout says that it needs.
async fn python(source: &Path) -> PathBuf {
    let project = std::fs::read_to_string(source.join("pyproject.toml")).unwrap();
    let project: toml::Table = project.parse().unwrap();
    let needed = project["project"]["dependencies"].as_array().expect("a list of dependencies");
    let needed: Vec<&str> = needed.iter().filter_map(toml::Value::as_str).collect();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("infera");
    let (python, installed) = (folder.join("bin/python"), folder.join("installed"));
    if std::fs::read_to_string(&installed).ok() != Some(needed.join("\n")) {
        let run = async |command: &mut Command| {
            assert!(command.status().await.unwrap().success(), "{command:?}");
        };
        run(Command::new("python3").args(["-m", "venv"]).arg(&folder)).await;
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(&needed)).await;
        std::fs::write(installed, needed.join("\n")).unwrap();
    }
    python
}

/// A completion of so many tokens, and what has to come of it.
fn question(tokens: usize) -> (Value, Reference) {
    let body = json!({
        "model": "tiny", "prompt": "What is a last gasp?", "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
    });
    let dialect = Dialect { frontend: Frontend::Python, model: "tiny".into(), max_model_len: 4096 };
    let reference = Reference::of(Endpoint::Completions, &body, &dialect).unwrap();
    (body, reference)
}

/// Every token once, and a good end. (The ids of the answer may differ: Infera gives a moved one a new one.)
fn is_whole(transcript: &Transcript, reference: &Reference) -> bool {
    let finish = std::slice::from_ref(&reference.finish_reason);
    let ended = transcript.finish_reasons == finish && transcript.dones == 1 && transcript.error.is_none();
    ended && transcript.text == reference.text
}

/// How long after the fault the first token of another worker came, which Infera shows under another id.
fn gap(transcript: &Transcript, began: Instant) -> Option<Duration> {
    let first = transcript.answer_ids.first()?;
    let next = transcript.events.iter().find(|event| !event.text.is_empty() && !event.raw.contains(first))?;
    Some(next.at - began)
}

/// Waits for what a program does as it starts, for as long as it runs.
async fn starts(process: &mut Process, what: &str, done: impl AsyncFn() -> bool) {
    let begin = Instant::now();
    while !done().await {
        let waits = !process.has_exited() && begin.elapsed() < GIVE_UP;
        assert!(waits, "{} {what}: in vain; it said: {}", process.name(), process.log_tail());
        tokio::time::sleep(MOMENT).await;
    }
}

/// Where a wrapper keeps its record.
fn key(id: &str) -> String {
    format!("/infera/workers/{id}")
}

/// Whether a router sends new requests to this worker.
async fn lists(client: &reqwest::Client, router: SocketAddr, id: &str) -> reqwest::Result<bool> {
    let said: Value = client.get(format!("http://{router}/v1/workers")).send().await?.json().await?;
    let mut workers = said["workers"].as_array().expect("a list of workers").iter();
    Ok(workers.any(|worker| worker["worker_id"] == id && worker["status"] == "active"))
}

/// A wrapper and its engine.
struct Worker {
    wrapper: Process,
    engine: Vec<Identity>,
    /// Where the engine listens, which is the worker's id in Infera too.
    id: String,
    declared: String,
}

impl Worker {
    async fn start(infera: &Infera, name: &str, nats: &Nats, etcd: &Etcd, folder: &Path) -> Self {
        let (port, declared) = (free_port().unwrap(), folder.join(name).display().to_string());
        let ready_file = folder.join(format!("{name}.ready.json"));
        let engine = json!([binaries::find("mock-engine").unwrap(), "--ready-file", ready_file]);
        let mut command = infera.module("infera.engine.vllm", folder);
        command.args(["--model", "tiny", "--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["--discovery-backend", "etcd", "--etcd-endpoint", &etcd.url()]);
        command.args(["--request-transport", "nats", "--nats-server", &nats.url()]);
        command.args(["--no-enable-kv-events", "--kv-events", "off", "--kv-event-transport", "zmq"]);
        command.env("MOCK_ENGINE", engine.to_string()).env("LASTGASP_WORKER", &declared);
        let mut wrapper = Process::spawn(name, command, folder).unwrap();
        let ready: Ready = wrapper.ready_file(&ready_file).await.unwrap();
        wrapper.record(ready.pids());
        let engine = ready.pids().into_iter().filter_map(Identity::of).collect();
        let id = format!("127.0.0.1:{port}");
        let registered = async || !etcd.list(&key(&id)).await.unwrap().is_empty();
        starts(&mut wrapper, "registers", registered).await;
        Self { wrapper, engine, id, declared }
    }

    /// The wrapper first: it would tell its router of an engine that dies.
    fn suffer(&self, fault: &Fault) {
        let wrapper = fault.wrapper.then_some(&self.wrapper.identity);
        let engine = if fault.engine { self.engine.as_slice() } else { &[] };
        for process in wrapper.into_iter().chain(engine) {
            assert!(process.signal(fault.signal), "it was gone already");
        }
    }
}

/// Two workers behind one router. The fields are dropped from first to last.
struct Scene {
    _router: Process,
    address: SocketAddr,
    workers: [Worker; 2],
    etcd: Etcd,
    nats: Nats,
    client: reqwest::Client,
    folder: TempDir,
}

impl Scene {
    async fn start(infera: &Infera) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let (nats, etcd) = (Nats::start(path).await.unwrap(), Etcd::start(path).await.unwrap());
        let worker = |name| Worker::start(infera, name, &nats, &etcd, path);
        // A worker that registers as the router starts may never be seen by it: they come first.
        let (alpha, beta) = tokio::join!(worker("alpha"), worker("beta"));
        let address = SocketAddr::from(([127, 0, 0, 1], free_port().unwrap()));
        let mut command = infera.module("infera.server", path);
        command.args(["--host", "127.0.0.1", "--port", &address.port().to_string()]);
        command.args(["--discovery-backend", "etcd", "--etcd-endpoint", &etcd.url()]);
        command.args(["--request-transport", "nats", "--nats-server", &nats.url(), "--migration-limit", "1"]);
        command.args(["--router-policy", "round-robin", "--kv-event-transport", "zmq"]);
        // It is asked for, and only looked into by another policy.
        command.arg("--router-tokenizer-path").arg(path);
        let mut router = Process::spawn("router", command, path).unwrap();
        let client = reqwest::Client::new();
        for worker in [&alpha, &beta] {
            let listed = async || lists(&client, address, &worker.id).await.unwrap_or(false);
            starts(&mut router, "lists its workers", listed).await;
        }
        Self { _router: router, address, workers: [alpha, beta], etcd, nats, client, folder }
    }

    /// Starts the daemon and waits until it knows the workers and hears what they are asked.
    async fn watched(&self) -> Daemon {
        let path = self.folder.path();
        let discovery = Discovery::watch(&self.nats).await.unwrap();
        let mut config = DaemonConfig::new("peers", &self.nats.url(), "auto", path);
        for worker in &self.workers {
            let endpoint = format!("http://{}", worker.id);
            let health = HealthConfig::http(format!("{endpoint}/health"));
            config = config.with_vllm(worker.wrapper.name(), &worker.declared, endpoint, health);
        }
        let mut sink = toml::toml! { kind = "infera" };
        sink.insert("nats".into(), toml::toml! { url = (self.nats.url()) }.into());
        sink.insert("etcd".into(), toml::toml! { url = (self.etcd.url()) }.into());
        config.notify = vec![sink];
        let daemon = Daemon::start(&config, path).await.unwrap();
        let client = self.nats.client().await.unwrap();
        for worker in &self.workers {
            let name = worker.wrapper.name();
            discovery.listed(name, WorkerState::Serving).await.unwrap();
            let remembered = format!("lastgasp_infera_remembered_requests{{worker=\"{name}\"}}");
            // A router takes back what is answered, and then it is forgotten. We do not.
            let request = json!({"path": "/v1/models", "stream": false, "headers": null, "body": {}}).to_string();
            let subject = format!("infera.req.{}", URL_SAFE_NO_PAD.encode(&worker.id));
            let heard = async {
                while daemon.counted(&remembered).await.unwrap() < 1.0 {
                    let inbox = client.new_inbox();
                    client.publish_with_reply(subject.clone(), inbox, request.clone().into()).await.unwrap();
                    tokio::time::sleep(MOMENT).await;
                }
            };
            tokio::time::timeout(GIVE_UP, heard).await.expect("the daemon to hear what its workers are asked");
        }
        daemon
    }

    /// Which worker has a request.
    async fn serving(&self) -> usize {
        let mut loads = Vec::new();
        for worker in &self.workers {
            let load = self.client.get(format!("http://{}/load", worker.id)).send().await.unwrap();
            loads.push(load.json::<Value>().await.unwrap()["server_load"].as_u64().unwrap());
        }
        loads.iter().position(|&load| load == 1).unwrap_or_else(|| panic!("nobody serves: {loads:?}"))
    }

    /// What docs/infera.md says, beside the stream.
    async fn is_as_promised(&self, fault: &Fault, lost: usize) {
        let records = self.etcd.list(&key(&self.workers[lost].id)).await.unwrap();
        if fault.signal == Signal::SIGKILL {
            assert_eq!(records, [], "that life can never serve again");
        } else {
            for record in &records {
                let record: Value = serde_json::from_str(&record.value).unwrap();
                assert_eq!(record["status"], "draining", "it may recover");
            }
            assert!(fault.wrapper || records.len() == 1, "a wrapper that lives keeps its lease");
        }
        let metrics = self.client.get(format!("http://{}/metrics", self.address)).send().await.unwrap();
        let metrics = metrics.text().await.unwrap();
        assert!(metrics.contains("infera_migrations_total{reason=\"stream_broken\"} 1.0\n"), "{metrics}");
        let (body, reference) = question(5);
        for number in 0..4 {
            let next = LiveStream::open(self.address, Endpoint::Completions, &body).await.unwrap();
            let next = next.finish().await.unwrap();
            assert!(is_whole(&next, &reference), "new request {number}: {next:#?}");
        }
    }

    /// What the router said, without our own looking.
    fn router_log(&self) -> String {
        let log = std::fs::read_to_string(self.folder.path().join("router.log")).unwrap_or_default();
        log.lines().filter(|line| !line.contains("/v1/workers")).collect::<Vec<_>>().join("\n")
    }
}
