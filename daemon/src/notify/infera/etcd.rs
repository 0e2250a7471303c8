//! Infera's discovery in etcd.
//!
//! A key is deleted or written, never its lease: a wrapper that lives writes its record again when
//! the lease is gone (docs/infera.md). Every change is bound to the record that was read.

use serde_json::{Map, Value, json};

use crate::notify::etcd::{EtcdError, Gateway, KeyValue, coded};

/// What a record says of a worker that takes no new work.
const DRAINING: &str = "draining";

/// What became of a worker's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum EtcdChange {
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

/// Its records.
#[derive(Debug)]
pub(super) struct Etcd {
    gateway: Gateway,
    prefix: String,
}

impl Etcd {
    /// `url` without a path; `prefix` with or without its last slash.
    pub(super) fn new(url: &str, prefix: &str) -> Self {
        let prefix = format!("{}/", prefix.trim_end_matches('/'));
        Self { gateway: Gateway::new(url), prefix }
    }

    /// Whether a worker's record says that it takes work.
    pub(super) async fn is_active(&self, id: &str) -> Result<bool, EtcdError> {
        let Some(found) = self.read(id).await? else { return Ok(false) };
        Ok(is_active(&record(&found)?))
    }

    /// Deletes a worker's record, if it is the one that stands now.
    pub(super) async fn delete(&self, id: &str) -> Result<EtcdChange, EtcdError> {
        let Some(KeyValue { create_revision, .. }) = self.read(id).await? else { return Ok(EtcdChange::Absent) };
        let key = coded(self.key(id));
        // A renewed or drained record is still this life's; one that was created again is not.
        let compare =
            json!({"target": "CREATE", "result": "EQUAL", "key": key, "create_revision": create_revision.to_string()});
        self.change(&compare, &json!({"request_delete_range": {"key": key}}), EtcdChange::Deleted).await
    }

    /// Makes a worker's record say that it drains.
    pub(super) async fn drain(&self, id: &str) -> Result<EtcdChange, EtcdError> {
        let Some(found) = self.read(id).await? else { return Ok(EtcdChange::Absent) };
        let mut record = record(&found)?;
        if !is_active(&record) {
            return Ok(EtcdChange::Absent);
        }
        record.insert("status".to_owned(), DRAINING.into());
        self.write(id, &found, &record, EtcdChange::Drained).await
    }

    /// Takes [`Self::drain`] back.
    pub(super) async fn restore(&self, id: &str) -> Result<EtcdChange, EtcdError> {
        let Some(found) = self.read(id).await? else { return Ok(EtcdChange::Absent) };
        let mut record = record(&found)?;
        if record.remove("status").is_none_or(|status| status != DRAINING) {
            return Ok(EtcdChange::Absent);
        }
        self.write(id, &found, &record, EtcdChange::Restored).await
    }

    /// The record's lease stays the wrapper's.
    async fn write(
        &self,
        id: &str,
        found: &KeyValue,
        record: &Map<String, Value>,
        done: EtcdChange,
    ) -> Result<EtcdChange, EtcdError> {
        let key = coded(self.key(id));
        let revision = found.mod_revision.to_string();
        let compare = json!({"target": "MOD", "result": "EQUAL", "key": key, "mod_revision": revision});
        let value = coded(serde_json::to_vec(record).expect("it was JSON"));
        self.change(&compare, &json!({"request_put": {"key": key, "value": value, "ignore_lease": true}}), done).await
    }

    async fn read(&self, id: &str) -> Result<Option<KeyValue>, EtcdError> {
        self.gateway.read(&self.key(id)).await
    }

    async fn change(&self, compare: &Value, change: &Value, done: EtcdChange) -> Result<EtcdChange, EtcdError> {
        let changed = self.gateway.change(std::slice::from_ref(compare), std::slice::from_ref(change)).await?;
        Ok(if changed.is_some() { done } else { EtcdChange::Changed })
    }

    fn key(&self, id: &str) -> String {
        format!("{}{id}", self.prefix)
    }
}

/// As its readers see it: without a status it is.
fn is_active(record: &Map<String, Value>) -> bool {
    record.get("status").is_none_or(|status| status == "active")
}

fn record(found: &KeyValue) -> Result<Map<String, Value>, EtcdError> {
    serde_json::from_slice(&found.value).map_err(|_| EtcdError::Answer("a record that is no JSON object"))
}
