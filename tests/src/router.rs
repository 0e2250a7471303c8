//! A `lastgasp-router` under a test.

use std::net::SocketAddr;
use std::path::Path;
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
        let ready_file = folder.join(format!("{name}.ready.json"));
        let _ = std::fs::remove_file(&ready_file);
        let mut command = Command::new(binaries::find("lastgasp-router")?);
        command.args(["--nats", nats_url, "--listen", "127.0.0.1:0", "--name", name]);
        command.args(["--migration-limit", &migration_limit.to_string()]);
        command.args(["--log", "info,lastgasp_router=debug"]).arg("--ready-file").arg(&ready_file);
        let mut process = Process::spawn(name, command, folder)?;
        let ready: Ready = process.ready_file(&ready_file).await?;
        Ok(Self { process, address: ready.listen })
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
}
