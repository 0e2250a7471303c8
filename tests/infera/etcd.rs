//! A real etcd, and records in it as Infera's wrappers write them.

use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use lastgasp_tests::process::{GIVE_UP, Process};
use serde_json::{Value, json};
use tokio::process::Command;

/// A running etcd.
pub(crate) struct Etcd {
    process: Option<Process>,
    folder: std::path::PathBuf,
    ports: [u16; 2],
}

impl Etcd {
    pub(crate) async fn start(folder: &Path) -> Self {
        let free = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = free.map(|listener| listener.local_addr().unwrap().port());
        let mut etcd = Self { process: None, folder: folder.to_owned(), ports };
        etcd.resume().await;
        etcd
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports[0])
    }

    pub(crate) fn stop(&mut self) {
        self.process = None;
    }

    pub(crate) async fn resume(&mut self) {
        let program = std::env::var_os("LASTGASP_ETCD").unwrap_or_else(|| "etcd".into());
        let mut command = Command::new(program);
        let peers = format!("http://127.0.0.1:{}", self.ports[1]);
        command.arg("--data-dir").arg(self.folder.join("etcd"));
        command.args(["--listen-client-urls", &self.url(), "--advertise-client-urls", &self.url()]);
        command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        command.args(["--initial-cluster", &format!("default={peers}")]);
        self.process = Some(Process::spawn("etcd", command, &self.folder).unwrap());
        let up = async {
            while self.try_call("kv/range", &json!({"key": STANDARD.encode("x")})).await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(GIVE_UP, up).await.expect("etcd: apt-get install etcd-server, or set LASTGASP_ETCD");
    }

    async fn try_call(&self, call: &str, body: &Value) -> reqwest::Result<Value> {
        let response = reqwest::Client::new().post(format!("{}/v3/{call}", self.url())).json(body).send().await?;
        response.error_for_status()?.json().await
    }

    async fn call(&self, call: &str, body: &Value) -> Value {
        self.try_call(call, body).await.unwrap()
    }

    /// Registers a worker as its wrapper does; its lease.
    pub(crate) async fn register(&self, id: &str) -> String {
        let lease = self.call("lease/grant", &json!({"TTL": 30})).await["ID"].as_str().unwrap().to_owned();
        let value = STANDARD.encode(record(id).to_string());
        self.call("kv/put", &json!({"key": key(id), "value": value, "lease": lease})).await;
        lease
    }

    /// The record of a worker, and the lease that it hangs on.
    pub(crate) async fn record(&self, id: &str) -> Option<(Value, String)> {
        let found = self.call("kv/range", &json!({"key": key(id)})).await;
        let found = found["kvs"].as_array()?.first()?.clone();
        let value = STANDARD.decode(found["value"].as_str().unwrap()).unwrap();
        Some((serde_json::from_slice(&value).unwrap(), found["lease"].as_str().unwrap().to_owned()))
    }

    /// Whether a lease lives.
    pub(crate) async fn lives(&self, lease: &str) -> bool {
        let left = self.call("lease/timetolive", &json!({"ID": lease})).await;
        left["TTL"].as_str().is_some_and(|ttl| ttl != "-1")
    }
}

fn key(id: &str) -> String {
    STANDARD.encode(format!("/infera/workers/{id}"))
}

/// As Infera's registration writes it.
pub(crate) fn record(id: &str) -> Value {
    json!({
        "worker_id": id, "url": format!("http://{id}"), "model_name": "m", "engine": "sglang", "disagg_mode": "mixed",
        "disagg_meta": {}, "kv_events_endpoint": null, "kv_block_size": null, "dp_rank": null, "dp_size": null,
        "request_transport": "nats",
    })
}
