//! A real etcd, spoken to by the HTTP/JSON gateway of its API v3, in which 64-bit numbers are texts and
//! keys and values base64.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::HarnessError;
use crate::nats::free_port;
use crate::process::{GIVE_UP, Process};

/// A running etcd.
#[derive(Debug)]
pub struct Etcd {
    process: Option<Process>,
    folder: PathBuf,
    ports: [u16; 2],
}

/// A record, as a test compares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its key.
    pub key: String,
    /// As it was written.
    pub value: String,
    /// The lease that it ends with.
    pub lease: i64,
    /// When it was last changed.
    pub revision: i64,
}

impl Etcd {
    /// Starts one with its data in `folder`, and waits until it answers. It is `$LASTGASP_ETCD`, else
    /// `etcd` of the search path.
    ///
    /// # Errors
    ///
    /// It cannot be run, or does not answer for a long time.
    pub async fn start(folder: &Path) -> Result<Self, HarnessError> {
        let mut etcd = Self { process: None, folder: folder.to_owned(), ports: [free_port()?, free_port()?] };
        etcd.resume().await?;
        Ok(etcd)
    }

    /// Where its clients reach it.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports[0])
    }

    /// Kills it. Its data stays.
    pub fn stop(&mut self) {
        self.process = None;
    }

    /// Starts it again.
    ///
    /// # Errors
    ///
    /// As for [`Self::start`].
    pub async fn resume(&mut self) -> Result<(), HarnessError> {
        let program = std::env::var_os("LASTGASP_ETCD").unwrap_or_else(|| "etcd".into());
        let mut command = Command::new(program);
        let peers = format!("http://127.0.0.1:{}", self.ports[1]);
        command.arg("--data-dir").arg(self.folder.join("etcd"));
        command.args(["--listen-client-urls", &self.url(), "--advertise-client-urls", &self.url()]);
        command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        command.args(["--initial-cluster", &format!("default={peers}")]);
        self.process = Some(Process::spawn("etcd", command, &self.folder)?);
        let up = async {
            while self.list("x").await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let waited = tokio::time::timeout(GIVE_UP, up).await;
        waited.map_err(|_| HarnessError::GaveUp("etcd: apt-get install etcd-server, or set LASTGASP_ETCD".into()))
    }

    /// One call of the API.
    ///
    /// # Errors
    ///
    /// It does not answer, or refuses.
    pub async fn call(&self, call: &str, body: &Value) -> Result<Value, HarnessError> {
        let sent = reqwest::Client::new().post(format!("{}/v3/{call}", self.url())).json(body).send().await;
        let answer = sent.and_then(reqwest::Response::error_for_status).map_err(HarnessError::http)?;
        answer.json().await.map_err(HarnessError::http)
    }

    /// A new lease of so many seconds.
    ///
    /// # Errors
    ///
    /// As for [`Self::call`].
    pub async fn grant(&self, seconds: u32) -> Result<i64, HarnessError> {
        Ok(number(&self.call("lease/grant", &json!({"TTL": seconds})).await?["ID"]))
    }

    /// Ends a lease, and the records that hang on it.
    ///
    /// # Errors
    ///
    /// As for [`Self::call`].
    pub async fn revoke(&self, lease: i64) -> Result<(), HarnessError> {
        self.call("lease/revoke", &json!({"ID": lease.to_string()})).await.map(drop)
    }

    /// Whether a lease lives.
    ///
    /// # Errors
    ///
    /// As for [`Self::call`].
    pub async fn lives(&self, lease: i64) -> Result<bool, HarnessError> {
        let left = self.call("lease/timetolive", &json!({"ID": lease.to_string()})).await?;
        Ok(left["TTL"].as_str().is_some_and(|ttl| ttl != "-1"))
    }

    /// Writes a record.
    ///
    /// # Errors
    ///
    /// As for [`Self::call`].
    pub async fn put(&self, key: &str, value: &str, lease: i64) -> Result<(), HarnessError> {
        let body = json!({"key": STANDARD.encode(key), "value": STANDARD.encode(value), "lease": lease.to_string()});
        self.call("kv/put", &body).await.map(drop)
    }

    /// Every record whose key begins with this, in ASCII and not empty.
    ///
    /// # Errors
    ///
    /// As for [`Self::call`].
    ///
    /// # Panics
    ///
    /// A key or a value is no text.
    pub async fn list(&self, prefix: &str) -> Result<Vec<Record>, HarnessError> {
        let mut end = prefix.as_bytes().to_vec();
        *end.last_mut().expect("it is not empty") += 1;
        let body = json!({"key": STANDARD.encode(prefix), "range_end": STANDARD.encode(end)});
        let found = self.call("kv/range", &body).await?;
        let text = |value: &Value| {
            let bytes = STANDARD.decode(value.as_str().unwrap_or_default()).expect("base64");
            String::from_utf8(bytes).expect("text")
        };
        let record = |found: &Value| Record {
            key: text(&found["key"]),
            value: text(&found["value"]),
            lease: number(&found["lease"]),
            revision: number(&found["mod_revision"]),
        };
        Ok(found["kvs"].as_array().into_iter().flatten().map(record).collect())
    }
}

/// The gateway leaves out what is zero.
fn number(value: &Value) -> i64 {
    value.as_str().and_then(|text| text.parse().ok()).unwrap_or(0)
}
