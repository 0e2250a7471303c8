//! A mock engine under a test.

use std::path::Path;

use nix::sys::signal::Signal;
use tokio::process::Command;

use crate::HarnessError;
use crate::binaries;
use crate::matrix;
use crate::model::{Dialect, Frontend};
use crate::nats::free_port;
use crate::process::{Identity, Process};
use crate::ready::Ready;

/// What an engine says of itself in its environment.
#[derive(Clone, Debug)]
pub struct Declaration {
    /// The user it runs as.
    pub uid: u32,
    /// `LASTGASP_WORKER`.
    pub worker: String,
    /// `LASTGASP_ENDPOINT`.
    pub endpoint: String,
    /// Where it really listens, HTTP.
    pub port: u16,
    /// Where it really listens, gRPC.
    pub grpc_port: u16,
}

impl Declaration {
    /// An honest one, with free ports.
    ///
    /// # Errors
    ///
    /// There is no free port.
    pub fn new(uid: u32, worker: &str) -> Result<Self, HarnessError> {
        let [port, grpc_port] = [free_port()?, free_port()?];
        let endpoint = format!("http://127.0.0.1:{port}");
        Ok(Self { uid, worker: worker.to_owned(), endpoint, port, grpc_port })
    }
}

/// A `mock-engine` that serves.
#[derive(Debug)]
pub struct Engine {
    /// Its root.
    pub process: Process,
    /// The process that produces the tokens.
    pub core: Identity,
    /// What it said when it was ready.
    pub ready: Ready,
    /// The value of `LASTGASP_WORKER` in its environment, by which a daemon finds it: no other test
    /// has one of the same.
    pub declared: String,
    frontend: Frontend,
}

impl Engine {
    /// Starts one, with free ports and gRPC health, and waits until it serves. `arguments` are
    /// those of `mock-engine`; it runs in `folder`, where a core file of it would go.
    ///
    /// # Errors
    ///
    /// It is not built, or ends before it serves.
    pub async fn start(name: &str, arguments: &[&str], folder: &Path) -> Result<Self, HarnessError> {
        let declared = folder.join(name).display().to_string();
        let mut command = Command::new(binaries::find("mock-engine")?);
        // So that it can be started again there.
        let [http, grpc] = [free_port()?.to_string(), free_port()?.to_string()];
        command.args(["--port", &http, "--grpc-port", &grpc]).args(arguments).env("LASTGASP_WORKER", &declared);
        Self::spawn(name, declared, command, arguments, folder).await
    }

    /// Starts one that declares itself a worker, and waits until it serves. `folder` must be one that
    /// its user may write to.
    ///
    /// # Errors
    ///
    /// As [`Engine::start`]; and this process may not start processes of another user.
    pub async fn declare(
        name: &str,
        declaration: &Declaration,
        arguments: &[&str],
        folder: &Path,
    ) -> Result<Self, HarnessError> {
        let Declaration { uid, worker, endpoint, port, grpc_port } = declaration;
        let mut command = Command::new(binaries::find("mock-engine")?);
        command.args(["--port", &port.to_string(), "--grpc-port", &grpc_port.to_string()]).args(arguments);
        command.uid(*uid).env("LASTGASP_WORKER", worker).env("LASTGASP_ENGINE", "vllm").env("LASTGASP_MODELS", "tiny");
        command.env("LASTGASP_ENDPOINT", endpoint).env("LASTGASP_GRPC_HEALTH", format!("http://127.0.0.1:{grpc_port}"));
        Self::spawn(name, worker.clone(), command, arguments, folder).await
    }

    /// Starts one as the child of a shell that lets SIGTERM pass; [`Engine::process`] is the shell.
    ///
    /// # Errors
    ///
    /// As of [`Engine::start`].
    pub async fn start_supervised(name: &str, arguments: &[&str], folder: &Path) -> Result<Self, HarnessError> {
        // Only the child carries the variable: the root is its topmost carrier.
        const SUPERVISE: &str = r#"declared=$1; shift; trap true TERM; LASTGASP_WORKER=$declared "$@" & wait; wait"#;
        let declared = folder.join(name).display().to_string();
        let mut shell = Command::new("sh");
        shell.args(["-c", SUPERVISE, "sh", &declared]).arg(binaries::find("mock-engine")?);
        shell.args(["--grpc-port", "0"]).args(arguments).env_remove("LASTGASP_WORKER");
        Self::spawn(name, declared, shell, arguments, folder).await
    }

    async fn spawn(
        name: &str,
        declared: String,
        mut command: Command,
        arguments: &[&str],
        folder: &Path,
    ) -> Result<Self, HarnessError> {
        let ready_file = folder.join(format!("{name}.ready.json"));
        let _ = std::fs::remove_file(&ready_file);
        command.current_dir(folder).arg("--ready-file").arg(&ready_file);
        let mut process = Process::spawn(name, command, folder)?;
        let ready: Ready = process.ready_file(&ready_file).await?;
        process.record(ready.pids());
        let core = Identity::of(ready.engine_core_pid)
            .ok_or_else(|| HarnessError::GaveUp(format!("{name}: its engine core is gone already")))?;
        let rust = arguments.windows(2).any(|pair| pair == ["--frontend", "rust"]);
        let frontend = if rust { Frontend::Rust } else { Frontend::Python };
        Ok(Self { process, core, ready, declared, frontend })
    }

    /// Where routers send requests.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.ready.http)
    }

    /// Where its gRPC health is.
    pub fn grpc(&self) -> String {
        self.ready.grpc.map(|address| format!("http://{address}")).unwrap_or_default()
    }

    /// What its answers depend on besides the request.
    pub fn dialect(&self) -> Dialect {
        Dialect { frontend: self.frontend, model: self.ready.model.clone(), max_model_len: self.ready.max_model_len }
    }

    /// Sends a signal to the engine core.
    pub fn signal_core(&self, signal: Signal) {
        assert!(self.core.signal(signal), "the engine core was gone already");
        count(signal);
    }

    /// Sends a signal to the root.
    pub fn signal_root(&self, signal: Signal) {
        assert!(self.process.identity.signal(signal), "the root was gone already");
        count(signal);
    }

    /// Kills every process of the tree, the root first as a supervisor would.
    pub fn kill_tree(&self) {
        count(Signal::SIGKILL);
        for pid in self.ready.pids().into_iter().rev() {
            if let Some(process) = Identity::of(pid) {
                process.signal(Signal::SIGKILL);
            }
        }
    }

    /// Lets the engine core fork a compiler, and returns its pid once it has exited.
    ///
    /// # Errors
    ///
    /// The engine does not answer.
    pub async fn compile(&self) -> Result<u32, HarnessError> {
        #[derive(serde::Deserialize)]
        struct Compiled {
            pid: u32,
        }
        let response = self.control("compile").await?;
        response.json::<Compiled>().await.map(|compiled| compiled.pid).map_err(HarnessError::http)
    }

    /// Posts to one of the mock's control paths, such as `health?status=not_serving`.
    ///
    /// # Errors
    ///
    /// The engine does not answer, or refuses.
    pub async fn control(&self, path: &str) -> Result<reqwest::Response, HarnessError> {
        let url = format!("{}/mock/{path}", self.endpoint());
        let response = reqwest::Client::new().post(url).send().await;
        response.and_then(reqwest::Response::error_for_status).map_err(HarnessError::http)
    }
}

/// For the matrix of faults.
fn count(signal: Signal) {
    match signal {
        Signal::SIGCONT => {}
        Signal::SIGSTOP => matrix::count("engines stopped", 1),
        _ => matrix::count("engines killed", 1),
    }
}
