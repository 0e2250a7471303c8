//! A real nats-server with JetStream, on a loopback port and in a folder of its own.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::process::Command;

use crate::HarnessError;
use crate::binaries;
use crate::process::{GIVE_UP, Process};

/// A running nats-server; it can be stopped and started again with what it had stored.
#[derive(Debug)]
pub struct Nats {
    process: Option<Process>,
    address: SocketAddr,
    folder: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Nats {
    /// Starts one that stores below `folder`.
    ///
    /// # Errors
    ///
    /// There is no nats-server, or it does not accept connections.
    pub async fn start(folder: &Path) -> Result<Self, HarnessError> {
        Self::start_with(folder, &[], &[]).await
    }

    /// As [`Self::start`], with more arguments and variables, as for a configuration.
    ///
    /// # Errors
    ///
    /// As for [`Self::start`].
    pub async fn start_with(
        folder: &Path,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Self, HarnessError> {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
        let address = free.map_err(|source| HarnessError::Io { what: "a free port".into(), source })?;
        let mut nats = Self {
            process: None,
            address,
            folder: folder.to_owned(),
            arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
            environment: environment.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
        };
        nats.resume().await?;
        Ok(nats)
    }

    /// `nats://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("nats://{}", self.address)
    }

    /// `127.0.0.1:PORT`, for a URL of another scheme.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        self.process.as_ref().map(Process::log_tail).unwrap_or_default()
    }

    /// A client of it.
    ///
    /// # Errors
    ///
    /// It is stopped or refuses.
    pub async fn client(&self) -> Result<async_nats::Client, HarnessError> {
        async_nats::connect(self.url()).await.map_err(|error| HarnessError::Nats(error.into()))
    }

    /// Kills it, as a crash would.
    pub fn stop(&mut self) {
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
        command.args(&self.arguments).envs(self.environment.iter().map(|(name, value)| (name, value)));
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
