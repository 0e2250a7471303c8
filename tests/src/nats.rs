//! A real nats-server with JetStream, on a loopback port and in a folder of its own.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::process::Command;

use crate::HarnessError;
use crate::binaries;
use crate::matrix;
use crate::process::{GIVE_UP, Process};

/// A running nats-server; it can be stopped and started again with what it had stored.
#[derive(Debug)]
pub struct Nats {
    process: Option<Process>,
    address: SocketAddr,
    folder: PathBuf,
}

impl Nats {
    /// Starts one that stores below `folder`.
    ///
    /// # Errors
    ///
    /// There is no nats-server, or it does not accept connections.
    pub async fn start(folder: &Path) -> Result<Self, HarnessError> {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
        let address = free.map_err(|source| HarnessError::Io { what: "a free port".into(), source })?;
        let mut nats = Self { process: None, address, folder: folder.to_owned() };
        nats.resume().await?;
        Ok(nats)
    }

    /// `nats://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("nats://{}", self.address)
    }

    /// A client of it.
    ///
    /// # Errors
    ///
    /// It is stopped or refuses.
    pub async fn client(&self) -> Result<async_nats::Client, HarnessError> {
        async_nats::connect(self.url()).await.map_err(|error| HarnessError::Nats(error.into()))
    }

    /// Where it listens.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sends it a signal, if it runs.
    pub fn signal(&self, signal: Signal) {
        if let Some(process) = &self.process {
            process.identity.signal(signal);
            if signal == Signal::SIGSTOP {
                matrix::count("nats-server killed or stopped", 1);
            }
        }
    }

    /// Kills it, as a crash would.
    pub fn stop(&mut self) {
        matrix::count("nats-server killed or stopped", 1);
        self.process = None;
    }

    /// Starts it again, on the same port and with what was stored.
    ///
    /// # Errors
    ///
    /// As for [`Self::start`].
    pub async fn resume(&mut self) -> Result<(), HarnessError> {
        let mut command = Command::new(binaries::nats_server()?);
        command.args(["--addr", "127.0.0.1", "--port", &self.address.port().to_string(), "--jetstream"]);
        command.arg("--store_dir").arg(self.folder.join("jetstream"));
        let mut process = Process::spawn("nats-server", command, &self.folder)?;
        let deadline = Instant::now() + GIVE_UP;
        while tokio::net::TcpStream::connect(self.address).await.is_err() {
            if process.has_exited() || Instant::now() > deadline {
                let log = process.log_tail();
                return Err(HarnessError::Ended { name: "nats-server".into(), status: "while it started".into(), log });
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.process = Some(process);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_stored_is_there_after_a_restart_on_the_same_port() {
        let folder = tempfile::tempdir().unwrap();
        let mut nats = Nats::start(folder.path()).await.unwrap();
        let url = nats.url();
        let context = async_nats::jetstream::new(nats.client().await.unwrap());
        let config = async_nats::jetstream::kv::Config { bucket: "kept".into(), ..Default::default() };
        let bucket = context.create_key_value(config).await.unwrap();
        bucket.put("key", "value".into()).await.unwrap();

        nats.stop();
        assert!(nats.client().await.is_err());
        nats.resume().await.unwrap();

        assert_eq!(nats.url(), url);
        let context = async_nats::jetstream::new(nats.client().await.unwrap());
        let bucket = context.get_key_value("kept").await.unwrap();
        assert_eq!(bucket.get("key").await.unwrap().unwrap(), "value");
    }
}
