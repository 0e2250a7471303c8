//! Two engines, one daemon, one router, and the clients of them.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::HarnessError;
use lastgasp_tests::binaries;
use lastgasp_tests::client::{LiveStream, Transcript};
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::reference::Reference;
use lastgasp_tests::router::Router;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

const NODE: &str = "node-a";

/// How fast the engines are, tokens a second. An answer takes seconds, so that there is a middle.
const RATE: [&str; 2] = ["--tokens-per-second", "100"];

/// Everything that a story needs. The fields are dropped from first to last.
pub(crate) struct Scene {
    pub(crate) router: Router,
    pub(crate) daemon: Daemon,
    config: DaemonConfig,
    engines: Vec<Engine>,
    pub(crate) discovery: Discovery,
    pub(crate) nats: Nats,
    pub(crate) folder: TempDir,
}

impl Scene {
    /// Two engines started with `arguments`, listed and known to the router. The kernel hooks are
    /// attached, or the story fails.
    pub(crate) async fn new(arguments: &[&str]) -> Self {
        Self::with_ebpf("required", arguments).await
    }

    pub(crate) async fn with_ebpf(ebpf: &'static str, arguments: &[&str]) -> Self {
        Self::configured(ebpf, arguments, |config| config).await
    }

    /// As [`Scene::new`], with something changed in the daemon's configuration.
    pub(crate) async fn configured(
        ebpf: &'static str,
        arguments: &[&str],
        change: impl FnOnce(DaemonConfig) -> DaemonConfig,
    ) -> Self {
        Self::made(ebpf, arguments, change, Command::new(binaries::find("lastgasp").unwrap())).await
    }

    /// As [`Scene::new`], with a daemon that is started by this command.
    pub(crate) async fn started_by(command: Command) -> Self {
        Self::made("required", &[], |config| config, command).await
    }

    /// As [`Scene::started_by`], with something changed in the daemon's configuration.
    pub(crate) async fn configured_and_started_by(
        change: impl FnOnce(DaemonConfig) -> DaemonConfig,
        command: Command,
    ) -> Self {
        Self::made("required", &[], change, command).await
    }

    async fn made(
        ebpf: &'static str,
        arguments: &[&str],
        change: impl FnOnce(DaemonConfig) -> DaemonConfig,
        command: Command,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let nats = Nats::start(path).await.unwrap();
        let discovery = Discovery::watch(&nats).await.unwrap();
        let arguments = [&RATE, arguments].concat();
        let mut engines = Vec::new();
        let mut config = DaemonConfig::new(NODE, &nats.url(), ebpf, path);
        for name in ["alpha", "beta"] {
            let engine = Engine::start(name, &arguments, path).await.unwrap();
            config = config.with(&engine);
            engines.push(engine);
        }
        let config = change(config);
        let daemon = Daemon::start_by(command, &config, path).await.unwrap();
        if config.mode == "enforce" {
            for engine in &engines {
                discovery.listed(engine.process.name(), WorkerState::Serving).await.unwrap();
            }
        }
        let router = Router::start("router-1", &nats.url(), 3, path).await.unwrap();
        Self { router, daemon, config, engines, discovery, nats, folder }
    }

    /// Kills the daemon as an upgrade that went wrong would: no handler runs.
    pub(crate) async fn kill_daemon(&mut self) {
        assert!(self.daemon.process.identity.signal(Signal::SIGKILL));
        matrix::count("daemons killed", 1);
        self.daemon.process.exited().await.unwrap();
    }

    /// Starts the daemon again, with the configuration that it had.
    pub(crate) async fn start_daemon(&mut self) {
        self.daemon = Daemon::start(&self.config, self.folder.path()).await.unwrap();
    }

    /// Tries to start a second daemon for the same node, with a status socket of its own.
    pub(crate) async fn start_second_daemon(&self) -> Result<Daemon, HarnessError> {
        let folder = self.folder.path().join("second");
        std::fs::create_dir(&folder).unwrap();
        let config = DaemonConfig::new(NODE, &self.nats.url(), "auto", &folder);
        Daemon::start(&config, &folder).await
    }

    /// The engine of this name.
    pub(crate) fn engine(&mut self, name: &str) -> &mut Engine {
        self.engines.iter_mut().find(|engine| engine.process.name() == name).expect("alpha or beta")
    }

    /// Starts the engine of this name again, at the addresses that it had.
    pub(crate) async fn restart(&mut self, name: &str, arguments: &[&str]) {
        let old = self.engine(name);
        let http = old.ready.http.port().to_string();
        let grpc = old.ready.grpc.expect("the harness asks for it").port().to_string();
        let addresses = ["--port", &http, "--grpc-port", &grpc];
        let arguments = [&RATE, &addresses[..], arguments].concat();
        let new = Engine::start(name, &arguments, self.folder.path()).await.unwrap();
        *self.engine(name) = new;
    }

    /// The same under a supervisor that takes no notice of SIGTERM. The engine's process is then the
    /// supervisor.
    pub(crate) async fn restart_supervised(&mut self, name: &str) {
        let old = self.engine(name);
        let http = old.ready.http.port().to_string();
        let grpc = old.ready.grpc.expect("the harness asks for it").port().to_string();
        let addresses = ["--port", &http, "--grpc-port", &grpc];
        let arguments = [&RATE, &addresses[..]].concat();
        let new = Engine::start_supervised(name, &arguments, self.folder.path()).await.unwrap();
        *self.engine(name) = new;
    }

    /// Waits until the router, which hears of changes when we do, sends new work to this worker alone.
    pub(crate) async fn new_work_goes_only_to(&self, name: &str) {
        let record = self.discovery.listed(name, WorkerState::Serving).await.unwrap();
        self.router.offers(&[(&format!("{NODE}/{name}"), &record.incarnation)]).await.unwrap();
    }

    /// Asks for an answer and reads its first tokens.
    pub(crate) async fn ask(&self, question: &Question) -> Asked {
        let mut stream = self.router.stream(question.endpoint, &question.body).await.unwrap();
        assert_eq!(stream.transcript.status, 200);
        stream.tokens(10).await.unwrap();
        let worker = stream.transcript.worker.clone().expect("the router says which worker it chose");
        let worker = worker.strip_prefix(&format!("{NODE}/")).expect("<node>/<worker>").to_owned();
        let dialect = self.engines[0].dialect();
        let reference = Reference::of(question.endpoint, &question.body, &dialect).unwrap();
        Asked { worker, stream, reference }
    }

    /// Asks for two chats and two completions; least in flight spreads them over both workers.
    pub(crate) async fn ask_several(&self) -> Vec<Asked> {
        let mut asked = Vec::new();
        for question in
            [Question::chat("one"), Question::completion("two"), Question::chat("three"), Question::completion("four")]
        {
            asked.push(self.ask(&question).await);
        }
        let on = |worker: &str| asked.iter().filter(|asked| asked.worker == worker).count();
        assert_eq!((on("alpha"), on("beta")), (2, 2), "least in flight");
        asked
    }
}

/// A request for an answer of 400 tokens.
pub(crate) struct Question {
    pub(crate) endpoint: Endpoint,
    pub(crate) body: Value,
}

impl Question {
    pub(crate) fn chat(content: &str) -> Self {
        let body = json!({"model": "tiny", "messages": [{"role": "user", "content": content}]});
        Self { endpoint: Endpoint::Chat, body: with_length(body) }
    }

    pub(crate) fn completion(prompt: &str) -> Self {
        Self { endpoint: Endpoint::Completions, body: with_length(json!({"model": "tiny", "prompt": prompt})) }
    }
}

fn with_length(mut body: Value) -> Value {
    body["max_tokens"] = json!(400);
    body["temperature"] = json!(0);
    body["ignore_eos"] = json!(true);
    body["return_token_ids"] = json!(true);
    body
}

/// Reads all answers to their ends: those that this worker began were moved, the others were not.
pub(crate) async fn only_those_of_are_moved(worker: &str, asked: Vec<Asked>) {
    for asked in asked {
        let moved = asked.worker == worker;
        assert_eq!(was_moved(&asked.finish().await), moved);
    }
}

/// An answer that is coming.
pub(crate) struct Asked {
    /// The worker that began it.
    pub(crate) worker: String,
    stream: LiveStream,
    reference: Reference,
}

impl Asked {
    /// Reads more of it.
    pub(crate) async fn tokens(&mut self, count: usize) {
        self.stream.tokens(count).await.unwrap();
    }

    /// Reads it to its end and holds it against the uninterrupted answer.
    pub(crate) async fn finish(self) -> Transcript {
        let transcript = self.stream.finish().await.unwrap();
        self.reference.assert_equals(&transcript);
        transcript
    }
}

/// Whether a stream was moved, as its comments say.
pub(crate) fn was_moved(transcript: &Transcript) -> bool {
    transcript.comments.iter().any(|comment| comment.starts_with("lastgasp moved"))
}
