//! Records in etcd as Infera's wrappers write them.

use lastgasp_tests::etcd::Etcd;
use serde_json::{Value, json};

/// Registers a worker as its wrapper does; its lease.
pub(crate) async fn register(etcd: &Etcd, id: &str) -> i64 {
    let lease = etcd.grant(30).await.unwrap();
    etcd.put(&key(id), &record(id).to_string(), lease).await.unwrap();
    lease
}

/// The record of a worker, and the lease that it hangs on.
pub(crate) async fn registered(etcd: &Etcd, id: &str) -> Option<(Value, i64)> {
    let found = etcd.list(&key(id)).await.unwrap().pop()?;
    Some((serde_json::from_str(&found.value).unwrap(), found.lease))
}

fn key(id: &str) -> String {
    format!("/infera/workers/{id}")
}

/// As Infera's registration writes it.
pub(crate) fn record(id: &str) -> Value {
    json!({
        "worker_id": id, "url": format!("http://{id}"), "model_name": "m", "engine": "sglang", "disagg_mode": "mixed",
        "disagg_meta": {}, "kv_events_endpoint": null, "kv_block_size": null, "dp_rank": null, "dp_size": null,
        "request_transport": "nats",
    })
}
