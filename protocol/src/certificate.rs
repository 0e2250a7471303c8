//! The death certificate: what a person reads afterwards.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{Cause, Counts, Incarnation, Name};

/// One thing that was seen or done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// Microseconds since the first moment of this certificate, on the monotonic clock.
    /// Kernel events carry the kernel's own time and may stand before what was read later.
    pub at_us: i64,
    /// `evidence`, `decision` or `effect`.
    pub kind: String,
    /// The closed name of the evidence, decision or effect.
    pub what: String,
    /// For people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

/// Where a process ran, as far as its cgroup and namespaces tell. Nothing of it was asked of a
/// container runtime, so it needs none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// Its cgroup, as the daemon sees it: of the v2 hierarchy, or of v1's memory controller.
    pub cgroup_path: String,
    /// UID of its Kubernetes pod; of a static pod, the hash of its manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// Container id, 64 hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
    /// `containerd`, `cri-o`, `docker` or `podman`, where the path tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<String>,
    /// Inode number of its PID namespace, as in `/proc/PID/ns/pid`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_namespace: Option<u32>,
    /// Inode number of its network namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_namespace: Option<u32>,
}

/// A process that outlives its worker, as an engine core that still holds the GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orphan {
    /// Its process id in the initial PID namespace.
    pub pid: u32,
    /// Title or command, as `VLLM::EngineCore`.
    pub title: String,
}

/// Who died, of what, and what was done about it. JetStream stream `lastgasp_deaths`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Certificate {
    /// Always [`crate::SCHEMA`].
    pub schema: u32,
    /// A ULID; signals and answers name it.
    pub certificate: String,
    /// Node name.
    pub node: Name,
    /// Worker name.
    pub worker: Name,
    /// Which life ended.
    pub incarnation: Incarnation,
    /// Which listing of that life.
    pub epoch: u64,
    /// Wall-clock time of the first moment.
    pub at: Timestamp,
    /// `CLOCK_MONOTONIC` of the first moment, in nanoseconds: means something on that machine only.
    #[serde(default)]
    pub at_monotonic_ns: u64,
    /// Why it was withdrawn.
    pub cause: Cause,
    /// True in `mode = "observe"`: decided, but nothing was changed.
    #[serde(default)]
    pub observed_only: bool,
    /// What was seen and done, in order.
    pub timeline: Vec<Moment>,
    /// Routers that have said `received`.
    #[serde(default)]
    pub routers_received: u64,
    /// Routers that have said `done`.
    #[serde(default)]
    pub routers_done: u64,
    /// Sums over the routers that are done.
    #[serde(default)]
    pub streams: Counts,
    /// Where the root process ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<Container>,
    /// What of the process tree was still alive when this was written; it may be on its way out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub orphans: Vec<Orphan>,
}

impl Certificate {
    /// The certificate as JSON.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        crate::record::to_json(self)
    }
}
