//! What `mock-engine --ready-file` says once it serves.

use std::net::SocketAddr;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// The content of the ready file. It appears in one piece, when requests are accepted and
/// the engine core has its title.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// The root of the process tree: the API server.
    pub root_pid: u32,
    /// The process that produces the tokens.
    pub engine_core_pid: u32,
    /// A child whose exit means nothing.
    pub resource_tracker_pid: u32,
    /// The launcher between root and engine core (`--frontend rust` only).
    pub launcher_pid: Option<u32>,
    /// Where the OpenAI API is served.
    pub http: SocketAddr,
    /// Where gRPC health is served.
    pub grpc: Option<SocketAddr>,
    /// The model's name.
    pub model: String,
    /// Context length in tokens.
    pub max_model_len: u32,
}

impl Ready {
    /// Every process of the tree, the root last.
    pub fn pids(&self) -> Vec<u32> {
        [Some(self.engine_core_pid), Some(self.resource_tracker_pid), self.launcher_pid, Some(self.root_pid)]
            .into_iter()
            .flatten()
            .collect()
    }

    /// Writes the file so that a reader sees all of it or none.
    ///
    /// # Errors
    ///
    /// Those of creating, writing and renaming a file.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        let unfinished = path.with_extension("tmp");
        std::fs::write(&unfinished, serde_json::to_vec_pretty(self)?)?;
        std::fs::rename(&unfinished, path)
    }
}
