//! What stands in the KV buckets.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::bounds::{self, ContractError};
use crate::{Incarnation, Name, SCHEMA};

/// A worker's state as routers see it. A worker that is not listed has no record.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum WorkerState {
    /// Takes new work.
    #[default]
    Serving,
    /// Asleep, paused or not ready: no new work, streams go on.
    Unready,
    /// Leaving on purpose: no new work, streams go on until the deadline and beyond.
    Draining,
}

/// Who writes a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Writer {
    /// The daemon registers the worker when it begins to serve.
    Daemon,
    /// The worker registers itself; the daemon adopts the record.
    #[default]
    Worker,
}

/// Whose lease a record depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseKind {
    /// The node's, in `lastgasp_nodes`: when it lapses, the worker gets no new work.
    Node,
    /// No lease.
    #[default]
    None,
}

/// The value of `lastgasp_workers`, key `<node>.<worker>`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// Always [`SCHEMA`].
    pub schema: u32,
    /// Node name, as in the key.
    pub node: Name,
    /// Worker name, as in the key.
    pub worker: Name,
    /// Which life of the worker this is.
    pub incarnation: Incarnation,
    /// How often this incarnation was listed.
    #[serde(default)]
    pub epoch: u64,
    /// What routers may do with it.
    #[serde(default)]
    pub state: WorkerState,
    /// While draining: until when streams are left alone. Advisory, `move` is always sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Timestamp>,
    /// Who writes this record.
    #[serde(default)]
    pub writer: Writer,
    /// Whose lease it depends on.
    #[serde(default)]
    pub lease: LeaseKind,
    /// Engine profile: `vllm`, `sglang`, `trtllm`, `generic`, or any other name.
    #[serde(default)]
    pub engine: String,
    /// Models it serves, as clients name them.
    #[serde(default)]
    pub models: Vec<String>,
    /// Base URL for routers, without a path: `http://10.0.0.7:8000`.
    pub endpoint: String,
    /// When this record was first written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registered_at: Option<Timestamp>,
    /// Anything a router may select by.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The critical processes below the worker's root when this was written: a note of the daemon to
    /// the one that takes over from it, which must know what to miss. Nobody else needs it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<RecordedProcess>,
    /// Somebody has taken this life out of service, and why. It goes with `draining`; in a
    /// tombstone it says that this life is not listed again until somebody takes that back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commanded: Option<String>,
}

/// A process whose end is that of its worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedProcess {
    /// Thread group id.
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
    /// Its role, as `VLLM::EngineCore`.
    pub title: String,
}

impl WorkerRecord {
    /// Reads the value found under `key` (without the bucket's prefix).
    ///
    /// # Errors
    /// Anything out of bounds, of another schema, or under a key that is not its own.
    pub fn parse(key: &str, value: &[u8]) -> Result<Self, ContractError> {
        let record: Self = bounds::parse(value)?;
        let Self {
            schema: _,
            node,
            worker,
            incarnation: _,
            epoch: _,
            state: _,
            deadline: _,
            writer: _,
            lease: _,
            engine,
            models,
            endpoint,
            registered_at: _,
            labels,
            processes,
            commanded,
        } = &record;
        let own = crate::worker_key(node, worker);
        if own != key {
            return Err(ContractError::Misplaced { field: "node or worker", inside: own, outside: key.to_owned() });
        }
        bounds::printable("engine", engine)?;
        bounds::printable("endpoint", endpoint)?;
        if let Some(commanded) = commanded {
            bounds::printable("commanded", commanded)?;
        }
        bounds::at_most("models", models.len(), bounds::MAX_MODELS)?;
        for model in models {
            bounds::printable("models", model)?;
        }
        bounds::at_most("labels", labels.len(), bounds::MAX_LABELS)?;
        bounds::at_most("processes", processes.len(), bounds::MAX_PROCESSES)?;
        for process in processes {
            bounds::at_most("processes", process.title.len(), bounds::MAX_TEXT)?;
        }
        for (key, value) in labels {
            bounds::printable("labels", key)?;
            bounds::printable("labels", value)?;
        }
        Ok(record)
    }

    /// The record as JSON.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        to_json(self)
    }
}

/// The value of `lastgasp_nodes`, key `<node>`: who holds the name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeLease {
    /// Always [`SCHEMA`].
    pub schema: u32,
    /// Node name, as in the key.
    pub node: Name,
    /// `/etc/machine-id` (machine-id(5)), or empty where there is none.
    pub machine_id: String,
    /// `/proc/sys/kernel/random/boot_id` (random(4)).
    pub boot_id: String,
    /// The daemon's process id.
    pub pid: u32,
    /// The daemon's start time in clock ticks since boot.
    pub start_ticks: u64,
}

impl NodeLease {
    /// Reads a lease.
    ///
    /// # Errors
    /// Not a lease of this schema.
    pub fn parse(value: &[u8]) -> Result<Self, ContractError> {
        bounds::parse(value)
    }

    /// The lease as JSON.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        to_json(self)
    }
}

/// The value of `lastgasp_routers`, key `<router>`: a router that answers signals.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouterLease {
    /// Always [`SCHEMA`].
    pub schema: u32,
    /// Router name, as in the key.
    pub router: Name,
    /// Its version, for people.
    #[serde(default)]
    pub version: String,
}

impl RouterLease {
    /// A lease for this router.
    #[must_use]
    pub fn new(router: Name, version: impl Into<String>) -> Self {
        Self { schema: SCHEMA, router, version: version.into() }
    }

    /// Reads a lease.
    ///
    /// # Errors
    /// Not a lease of this schema.
    pub fn parse(value: &[u8]) -> Result<Self, ContractError> {
        bounds::parse(value)
    }

    /// The lease as JSON.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        to_json(self)
    }
}

/// Our own types have string keys and no failing serializers, so this cannot fail.
pub(crate) fn to_json<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("a contract type is always JSON")
}

#[cfg(test)]
mod tests {
    use crate::ClosedName as _;

    use super::*;

    const DESIGN: &str = r#"{"schema":1,"node":"gpu-a","worker":"vllm-0","incarnation":"5f0c1d2e-4711-883412","epoch":1,"state":"serving","writer":"daemon","lease":"node","engine":"vllm","models":["Qwen/Qwen3-0.6B"],"endpoint":"http://10.0.0.7:8000","registered_at":"2026-11-29T17:00:00.123Z","labels":{}}"#;

    #[test]
    fn the_record_of_the_design_is_read_and_written_as_it_stands() {
        let record = WorkerRecord::parse("gpu-a.vllm-0", DESIGN.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(record.to_json()).unwrap(), DESIGN);
    }

    #[test]
    fn a_foreign_writer_needs_to_say_little() {
        let record = WorkerRecord::parse(
            "n.w",
            br#"{"schema":1,"node":"n","worker":"w","incarnation":"x","endpoint":"http://h:1","color":"red"}"#,
        )
        .unwrap();
        assert_eq!(
            (record.epoch, record.writer, record.lease, record.state),
            (0, Writer::Worker, LeaseKind::None, WorkerState::Serving)
        );
    }

    #[test]
    fn a_record_under_another_key_is_refused() {
        let error = WorkerRecord::parse("gpu-b.vllm-0", DESIGN.as_bytes()).unwrap_err();
        assert_eq!(error.as_str(), "misplaced");
    }

    #[test]
    fn a_future_schema_is_refused_for_its_schema() {
        let future = DESIGN.replace("\"schema\":1", "\"schema\":2").replace("\"serving\"", "7");
        assert_eq!(WorkerRecord::parse("gpu-a.vllm-0", future.as_bytes()), Err(ContractError::UnknownSchema(2)));
    }

    #[test]
    fn hostile_sizes_are_refused() {
        let long = DESIGN.replace("Qwen/Qwen3-0.6B", &"x".repeat(2000));
        assert_eq!(WorkerRecord::parse("gpu-a.vllm-0", long.as_bytes()).unwrap_err().as_str(), "out_of_bounds");
        let escape = DESIGN.replace("Qwen/Qwen3-0.6B", "\\u001b[2J");
        assert_eq!(WorkerRecord::parse("gpu-a.vllm-0", escape.as_bytes()).unwrap_err().as_str(), "control_character");
        let huge = vec![b' '; bounds::MAX_MESSAGE + 1];
        assert_eq!(WorkerRecord::parse("gpu-a.vllm-0", &huge).unwrap_err().as_str(), "oversized");
        assert_eq!(WorkerRecord::parse("gpu-a.vllm-0", b"\xff\xfe").unwrap_err().as_str(), "malformed");
    }
}
