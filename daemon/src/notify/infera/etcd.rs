//! Infera's discovery in etcd, by the HTTP/JSON gateway of its API v3.
//!
//! A key is deleted or written, never its lease: a wrapper that lives writes its record again when
//! the lease is gone (facts: Infera, 1). Every change is bound to the record that was read.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// What a record says of a worker that takes no new work.
const DRAINING: &str = "draining";

/// What became of a worker's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Done {
    /// Its key is gone.
    Deleted,
    /// It says that the worker drains.
    Drained,
    /// It says again that the worker takes work.
    Restored,
    /// There was none, or it says so by itself.
    Absent,
    /// Somebody changed it in between: it is not this life's any more.
    Changed,
}

impl Done {
    /// The closed name used in metrics and certificates.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Deleted => "deleted",
            Self::Drained => "drained",
            Self::Restored => "restored",
            Self::Absent => "absent",
            Self::Changed => "changed",
        }
    }
}

/// Why nothing became of it.
#[derive(Debug, thiserror::Error)]
pub(super) enum EtcdError {
    /// It does not answer.
    #[error("etcd: {0}")]
    Request(#[from] reqwest::Error),
    /// It answers with something else.
    #[error("etcd: {0}")]
    Answer(&'static str),
}

/// The gateway.
#[derive(Debug)]
pub(super) struct Etcd {
    client: reqwest::Client,
    url: String,
    prefix: String,
}

#[derive(Debug, Deserialize)]
struct Range {
    #[serde(default)]
    kvs: Vec<KeyValue>,
}

/// 64-bit numbers are texts in the gateway's JSON.
#[derive(Debug, Deserialize)]
struct KeyValue {
    create_revision: String,
    mod_revision: String,
    value: String,
}

#[derive(Debug, Deserialize)]
struct Txn {
    /// The gateway leaves `false` out.
    #[serde(default)]
    succeeded: bool,
}

impl Etcd {
    /// `url` without a path; `prefix` with or without its last slash.
    pub(super) fn new(url: &str, prefix: &str) -> Self {
        let prefix = format!("{}/", prefix.trim_end_matches('/'));
        Self { client: reqwest::Client::new(), url: url.trim_end_matches('/').to_owned(), prefix }
    }

    /// Whether a worker's record says that it takes work.
    pub(super) async fn is_active(&self, id: &str) -> Result<bool, EtcdError> {
        let Some(found) = self.read(id).await? else { return Ok(false) };
        Ok(is_active(&found.record()?))
    }

    /// Deletes a worker's record, if it is the one that stands now.
    pub(super) async fn delete(&self, id: &str) -> Result<Done, EtcdError> {
        let Some(KeyValue { create_revision, .. }) = self.read(id).await? else { return Ok(Done::Absent) };
        let key = self.key(id);
        // A renewed or drained record is still this life's; one that was created again is not.
        let compare = json!({"target": "CREATE", "result": "EQUAL", "key": key, "create_revision": create_revision});
        self.change(&compare, &json!({"request_delete_range": {"key": key}}), Done::Deleted).await
    }

    /// Makes a worker's record say that it drains.
    pub(super) async fn drain(&self, id: &str) -> Result<Done, EtcdError> {
        let Some(found) = self.read(id).await? else { return Ok(Done::Absent) };
        let mut record = found.record()?;
        if !is_active(&record) {
            return Ok(Done::Absent);
        }
        record.insert("status".to_owned(), DRAINING.into());
        self.write(id, &found, &record, Done::Drained).await
    }

    /// Takes [`Self::drain`] back.
    pub(super) async fn restore(&self, id: &str) -> Result<Done, EtcdError> {
        let Some(found) = self.read(id).await? else { return Ok(Done::Absent) };
        let mut record = found.record()?;
        if record.remove("status").is_none_or(|status| status != DRAINING) {
            return Ok(Done::Absent);
        }
        self.write(id, &found, &record, Done::Restored).await
    }

    /// The record's lease stays the wrapper's.
    async fn write(
        &self,
        id: &str,
        found: &KeyValue,
        record: &Map<String, Value>,
        done: Done,
    ) -> Result<Done, EtcdError> {
        let key = self.key(id);
        let revision = &found.mod_revision;
        let compare = json!({"target": "MOD", "result": "EQUAL", "key": key, "mod_revision": revision});
        let value = STANDARD.encode(serde_json::to_vec(record).expect("it was JSON"));
        self.change(&compare, &json!({"request_put": {"key": key, "value": value, "ignore_lease": true}}), done).await
    }

    async fn read(&self, id: &str) -> Result<Option<KeyValue>, EtcdError> {
        let range: Range = self.post("range", &json!({"key": self.key(id)})).await?;
        Ok(range.kvs.into_iter().next())
    }

    async fn change(&self, compare: &Value, change: &Value, done: Done) -> Result<Done, EtcdError> {
        let Txn { succeeded } = self.post("txn", &json!({"compare": [compare], "success": [change]})).await?;
        Ok(if succeeded { done } else { Done::Changed })
    }

    async fn post<T: serde::de::DeserializeOwned>(&self, call: &str, body: &Value) -> Result<T, EtcdError> {
        let response = self.client.post(format!("{}/v3/kv/{call}", self.url)).json(body).send().await?;
        Ok(response.error_for_status()?.json().await?)
    }

    fn key(&self, id: &str) -> String {
        STANDARD.encode(format!("{}{id}", self.prefix))
    }
}

/// As its readers see it: without a status it is.
fn is_active(record: &Map<String, Value>) -> bool {
    record.get("status").is_none_or(|status| status == "active")
}

impl KeyValue {
    fn record(&self) -> Result<Map<String, Value>, EtcdError> {
        let json = STANDARD.decode(&self.value).map_err(|_| EtcdError::Answer("a value that is no base64"))?;
        serde_json::from_slice(&json).map_err(|_| EtcdError::Answer("a record that is no JSON object"))
    }
}
