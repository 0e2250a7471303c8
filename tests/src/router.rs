//! A `lastgasp-router` under a test.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lastgasp_protocol::Incarnation;
use serde::Deserialize;
use serde_json::Value;
use tokio::process::Command;

use crate::HarnessError;
use crate::binaries;
use crate::client::LiveStream;
use crate::model::Endpoint;
use crate::process::{GIVE_UP, Process};

/// A running router.
#[derive(Debug)]
pub struct Router {
    /// The process.
    pub process: Process,
    /// Where it serves.
    pub address: SocketAddr,
}

/// One worker as a router knows it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub struct View {
    /// Node and name.
    pub worker: String,
    /// Which life.
    pub incarnation: Incarnation,
    /// Which listing of that life.
    pub epoch: u64,
    /// New work may go there.
    pub takes_work: bool,
}

#[derive(Deserialize)]
struct Ready {
    listen: SocketAddr,
}

impl Router {
    /// Starts one and waits until it listens and has listed the workers.
    ///
    /// # Errors
    ///
    /// It is not built, or ends before it is ready.
    pub async fn start(name: &str, nats_url: &str, migration_limit: u32, folder: &Path) -> Result<Self, HarnessError> {
        let limit = migration_limit.to_string();
        Self::start_with(name, &["--nats", nats_url, "--migration-limit", &limit], folder).await
    }

    /// As [`Self::start`], with these arguments.
    ///
    /// # Errors
    ///
    /// As for [`Self::start`].
    pub async fn start_with(name: &str, arguments: &[&str], folder: &Path) -> Result<Self, HarnessError> {
        let ready_file = ready_file(name, folder);
        let _ = std::fs::remove_file(&ready_file);
        let mut process = launch(name, arguments, folder)?;
        let ready: Ready = process.ready_file(&ready_file).await?;
        Ok(Self { process, address: ready.listen })
    }

    /// Starts one that will find no NATS that it can use: it is not waited for.
    ///
    /// # Errors
    ///
    /// It is not built.
    pub fn start_unready(name: &str, nats_url: &str, folder: &Path) -> Result<Unready, HarnessError> {
        let process = launch(name, &["--nats", nats_url, "--migration-limit", "0"], folder)?;
        Ok(Unready { process, ready_file: ready_file(name, folder) })
    }

    /// Sends a streaming request.
    ///
    /// # Errors
    ///
    /// The router does not answer.
    pub async fn stream(&self, endpoint: Endpoint, body: &Value) -> Result<LiveStream, HarnessError> {
        LiveStream::open(self.address, endpoint, body).await
    }

    /// What it knows of its workers.
    ///
    /// # Errors
    ///
    /// The router does not answer.
    pub async fn workers(&self) -> Result<Vec<View>, HarnessError> {
        let response = reqwest::get(format!("http://{}/workers", self.address)).await;
        response.map_err(HarnessError::http)?.json().await.map_err(HarnessError::http)
    }

    /// Waits until exactly these workers, as `node/worker` and in order, may have new work.
    ///
    /// # Errors
    ///
    /// The router does not answer, or knows others for [`GIVE_UP`].
    pub async fn offers(&self, expected: &[(&str, &Incarnation)]) -> Result<(), HarnessError> {
        let deadline = Instant::now() + GIVE_UP;
        loop {
            let view = self.workers().await?;
            let working = view.iter().filter(|view| view.takes_work).map(|view| (&*view.worker, &view.incarnation));
            if working.eq(expected.iter().copied()) {
                return Ok(());
            }
            if Instant::now() > deadline {
                let log = self.process.log_tail();
                return Err(HarnessError::GaveUp(format!("{expected:#?} instead of {view:#?}; it said:\n{log}")));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until one line of `/metrics`, named with its labels, has this value.
    ///
    /// # Errors
    ///
    /// It has not, for a long time, or the router does not answer.
    pub async fn shows(&self, line: &str, value: f64) -> Result<(), HarnessError> {
        let deadline = std::time::Instant::now() + GIVE_UP;
        loop {
            let metrics = self.metrics().await?;
            let found = metrics.lines().find_map(|text| text.strip_prefix(line)?.trim().parse::<f64>().ok());
            if found == Some(value) {
                return Ok(());
            }
            if std::time::Instant::now() > deadline {
                return Err(HarnessError::GaveUp(format!("{line} to be {value}; it is {found:?}")));
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }

    /// What `/metrics` says.
    ///
    /// # Errors
    ///
    /// The router does not answer.
    pub async fn metrics(&self) -> Result<String, HarnessError> {
        let response = reqwest::get(format!("http://{}/metrics", self.address)).await;
        response.map_err(HarnessError::http)?.text().await.map_err(HarnessError::http)
    }

    /// Waits until one line of `/metrics`, named with its labels, has reached a value.
    ///
    /// # Errors
    ///
    /// It does not, for a long time, or the router does not answer.
    pub async fn counts(&self, line: &str, at_least: f64) -> Result<(), HarnessError> {
        let deadline = std::time::Instant::now() + GIVE_UP;
        loop {
            let metrics = self.metrics().await?;
            let value = metrics.lines().find_map(|text| text.strip_prefix(line)?.trim().parse::<f64>().ok());
            if value.is_some_and(|value| value >= at_least) {
                return Ok(());
            }
            if std::time::Instant::now() > deadline {
                return Err(HarnessError::GaveUp(format!("{line} at {at_least}; it is at {value:?}")));
            }
            tokio::task::yield_now().await;
        }
    }
}

/// A router that has not listed the workers yet.
#[derive(Debug)]
pub struct Unready {
    /// The process.
    pub process: Process,
    ready_file: PathBuf,
}

impl Unready {
    /// Waits until it has what it lacked.
    ///
    /// # Errors
    ///
    /// It ends before, or does not get it.
    pub async fn ready(mut self) -> Result<Router, HarnessError> {
        let ready: Ready = self.process.ready_file(&self.ready_file).await?;
        Ok(Router { process: self.process, address: ready.listen })
    }

    /// Waits until its log has this text.
    ///
    /// # Errors
    ///
    /// It has not, for a long time.
    pub async fn says(&self, text: &str) -> Result<(), HarnessError> {
        let deadline = std::time::Instant::now() + GIVE_UP;
        while !self.process.log_tail().contains(text) {
            if std::time::Instant::now() > deadline {
                return Err(HarnessError::GaveUp(format!("{text:?} in {}", self.process.log_tail())));
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        Ok(())
    }
}

fn ready_file(name: &str, folder: &Path) -> PathBuf {
    folder.join(format!("{name}.ready.json"))
}

fn launch(name: &str, arguments: &[&str], folder: &Path) -> Result<Process, HarnessError> {
    let mut command = Command::new(binaries::find("lastgasp-router")?);
    command.args(["--listen", "127.0.0.1:0", "--name", name]).args(arguments);
    // What a transcript says of workers and moves, it has from there.
    command.args(["--log", "info,lastgasp_router=debug", "--tell-clients"]);
    command.arg("--ready-file").arg(ready_file(name, folder));
    Process::spawn(name, command, folder)
}
