//! Dynamo as it is installed from its packages: a frontend, two workers without a model (`dynamo.mocker`),
//! and its discovery.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lastgasp_tests::etcd::Etcd;
use lastgasp_tests::nats::free_port;
use lastgasp_tests::process::{GIVE_UP, Process};
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::process::Command;
use tokio::sync::OnceCell;

/// Neither asks for what is not at the usual index: what they need of it is named in [`NEEDED`].
const DYNAMO: [&str; 2] = ["ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"];
const NEEDED: [&str; 15] = [
    "pyyaml",
    "transformers",
    "fastapi",
    "uvicorn",
    "uvloop",
    "prometheus_client",
    "pydantic<=2.13.5",
    "pyzmq",
    "msgspec",
    "aiohttp",
    "httpx",
    "numpy",
    "kubernetes<33",
    "redis<9",
    "zstandard",
];
/// A token every 30 ms.
const SPEED: &str = "0.2";

/// A Python that has Dynamo, and a model's folder, under `target/`.
pub(super) async fn python() -> &'static (PathBuf, PathBuf) {
    static PYTHON: OnceCell<(PathBuf, PathBuf)> = OnceCell::const_new();
    PYTHON
        .get_or_init(async || {
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dynamo");
            let (python, model, installed) =
                (folder.join("bin/python"), folder.join("model"), folder.join("installed"));
            let wanted = [&DYNAMO[..], &NEEDED].concat().join("\n");
            if std::fs::read_to_string(&installed).is_ok_and(|there| there == wanted) {
                return (python, model);
            }
            let run = async |command: &mut Command| {
                assert!(command.status().await.unwrap().success(), "{command:?}");
            };
            let pip = || {
                let mut command = Command::new(&python);
                command.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
                command
            };
            run(Command::new("python3").args(["-m", "venv"]).arg(&folder)).await;
            run(pip().arg("--no-deps").args(DYNAMO)).await;
            run(pip().args(NEEDED)).await;
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/dynamo/model.py");
            run(Command::new(&python).arg(script).arg(&model)).await;
            std::fs::write(installed, wanted).unwrap();
            (python, model)
        })
        .await
}

/// Where its discovery is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backend {
    Etcd,
    File,
}

/// A worker.
pub(super) struct Worker {
    pub(super) name: &'static str,
    pub(super) process: Process,
    /// Of its status server.
    pub(super) port: u16,
    /// As in its records.
    pub(super) instance: String,
}

/// All of it.
pub(super) struct Dynamo {
    pub(super) workers: Vec<Worker>,
    pub(super) etcd: Option<Etcd>,
    pub(super) folder: PathBuf,
    port: u16,
    _frontend: Process,
}

impl Dynamo {
    /// Starts it, and waits until both workers have answered.
    pub(super) async fn start(backend: Backend, migration_limit: u32, folder: &Path) -> Self {
        let (python, model) = python().await;
        let etcd = match backend {
            Backend::Etcd => Some(Etcd::start(folder).await.unwrap()),
            Backend::File => None,
        };
        let records = folder.join("records");
        let command = |module: &str| {
            let mut command = Command::new(python);
            command.args(["-m", module]);
            command.env("DYN_DISCOVERY_BACKEND", if etcd.is_some() { "etcd" } else { "file" });
            command.env("ETCD_ENDPOINTS", etcd.as_ref().map(Etcd::url).unwrap_or_default());
            command.env("DYN_FILE_KV", &records).env("HOME", folder);
            for host in ["DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST"]
            {
                command.env(host, "127.0.0.1");
            }
            command.env("HF_HUB_OFFLINE", "1").env("TRANSFORMERS_OFFLINE", "1");
            command
        };
        let mut workers = Vec::new();
        for name in ["alpha", "beta"] {
            let port = free_port().unwrap();
            let mut worker = command("dynamo.mocker");
            worker.arg("--model-path").arg(model).args(["--model-name", "tiny", "--speedup-ratio", SPEED]);
            // The mocker says so at no other time.
            worker.env("DYN_SYSTEM_PORT", port.to_string()).env("DYN_SYSTEM_STARTING_HEALTH_STATUS", "ready");
            let process = Process::spawn(name, worker, folder).unwrap();
            workers.push(Worker { name, process, port, instance: String::new() });
        }
        let port = free_port().unwrap();
        let mut frontend = command("dynamo.frontend");
        frontend.args(["--http-host", "127.0.0.1", "--http-port", &port.to_string()]);
        frontend.args(["--migration-limit", &migration_limit.to_string()]);
        let frontend = Process::spawn("frontend", frontend, folder).unwrap();
        let mut dynamo = Self { workers, etcd, folder: folder.to_owned(), port, _frontend: frontend };
        tokio::time::timeout(GIVE_UP, dynamo.serves()).await.expect("both workers of Dynamo answer");
        dynamo
    }

    async fn serves(&mut self) {
        for worker in &mut self.workers {
            worker.instance = loop {
                let requests = worker.metric("dynamo_component_requests_total").await;
                match requests.as_ref().and_then(|(line, _)| line.split_once("worker_id=\"")?.1.split('"').next()) {
                    Some(id) => break id.to_owned(),
                    None => pause().await,
                }
            };
        }
        // Round-robin.
        loop {
            let _ = self.ask().await;
            let mut have_answered = 0;
            for worker in &self.workers {
                have_answered += usize::from(worker.answered().await > 0.0);
            }
            if have_answered == self.workers.len() {
                return;
            }
            pause().await;
        }
    }

    /// What stands in its discovery of a worker's instance.
    pub(super) async fn records(&self, instance: &str) -> usize {
        let is_of_it = |key: &String| key.contains("instances") && key.ends_with(instance);
        match &self.etcd {
            Some(etcd) => etcd.list("v1/").await.unwrap().iter().filter(|record| is_of_it(&record.key)).count(),
            None => {
                let files = std::fs::read_dir(self.folder.join("records/v1/instances")).into_iter().flatten();
                let names = files.filter_map(|file| Some(file.ok()?.path().to_str()?.to_owned()));
                names.filter(is_of_it).count()
            }
        }
    }

    /// A short request: how long it took, or why it failed.
    pub(super) async fn ask(&self) -> Result<Duration, String> {
        let begin = Instant::now();
        let response = completion(self.port, 3, false).await.map_err(|error| error.to_string())?;
        let status = response.status();
        let text = response.text().await.map_err(|error| error.to_string())?;
        if status.is_success() { Ok(begin.elapsed()) } else { Err(format!("{status}: {text}")) }
    }

    /// Begins to read an answer of so many tokens.
    pub(super) fn stream(&self, tokens: usize) -> Stream {
        let (sender, events) = tokio::sync::mpsc::unbounded_channel();
        let port = self.port;
        let task = tokio::spawn(async move {
            let report = |what| drop(sender.send((Instant::now(), what)));
            let mut response = match completion(port, tokens, true).await {
                Ok(response) => response,
                Err(error) => return report(Reported::Failed(error.to_string())),
            };
            let mut unread = Vec::new();
            loop {
                match response.chunk().await {
                    Ok(Some(chunk)) => unread.extend_from_slice(&chunk),
                    Ok(None) => return report(Reported::Failed("it ends without [DONE]".into())),
                    Err(error) => return report(Reported::Failed(error.to_string())),
                }
                while let Some(end) = unread.iter().position(|byte| *byte == b'\n') {
                    let line: Vec<u8> = unread.drain(..=end).collect();
                    let Some(data) = line.strip_prefix(b"data: ") else { continue };
                    let event = serde_json::from_slice::<Value>(data).unwrap_or_default();
                    match event["choices"][0]["text"].as_str() {
                        Some(text) if !text.is_empty() => report(Reported::Token),
                        Some(_) => {}
                        None if data.starts_with(b"[DONE]") => return report(Reported::Done),
                        None if event["choices"].is_array() => {}
                        None => return report(Reported::Failed(String::from_utf8_lossy(data).into_owned())),
                    }
                }
            }
        });
        Stream { events, task }
    }

    /// The worker that answers the one stream that there is.
    pub(super) async fn serving(&self) -> &Worker {
        let found = async {
            loop {
                for worker in &self.workers {
                    let inflight = worker.metric("dynamo_component_inflight_requests").await;
                    if inflight.is_some_and(|(_, number)| number > 0.0) {
                        return worker;
                    }
                }
            }
        };
        tokio::time::timeout(GIVE_UP, found).await.expect("a worker that answers")
    }
}

async fn completion(port: u16, tokens: usize, stream: bool) -> reqwest::Result<reqwest::Response> {
    let body = serde_json::json!({
        "model": "tiny", "prompt": "Hi", "max_tokens": tokens, "stream": stream, "ignore_eos": true,
    });
    reqwest::Client::new().post(format!("http://127.0.0.1:{port}/v1/completions")).json(&body).send().await
}

/// What came of a stream.
#[derive(Debug)]
pub(super) enum Reported {
    Token,
    Done,
    Failed(String),
}

/// An answer that is being read.
pub(super) struct Stream {
    pub(super) events: tokio::sync::mpsc::UnboundedReceiver<(Instant, Reported)>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Worker {
    pub(super) fn signal(&self, signal: Signal) {
        assert!(self.process.identity.signal(signal), "it was there");
    }

    /// How many requests it was sent.
    pub(super) async fn answered(&self) -> f64 {
        self.metric("dynamo_component_requests_total").await.map_or(0.0, |(_, number)| number)
    }

    /// A line of its metrics about the endpoint that generates, and the number in it.
    async fn metric(&self, name: &str) -> Option<(String, f64)> {
        let response = reqwest::get(format!("http://127.0.0.1:{}/metrics", self.port)).await.ok()?;
        let text = response.text().await.ok()?;
        let is_it = |line: &&str| line.starts_with(name) && line.contains("dynamo_endpoint=\"generate\"");
        let line = text.lines().find(is_it)?;
        Some((line.to_owned(), line.rsplit(' ').next()?.parse().ok()?))
    }
}

async fn pause() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}
