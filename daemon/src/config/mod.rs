//! Configuration.

use std::path::PathBuf;
use std::time::Duration;

use crate::core::HealthRole;

/// How a worker's root process is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Find {
    /// By process id.
    Pid(u32),
    /// By a file that holds the process id.
    PidFile(PathBuf),
    /// By the TCP port that it listens on.
    Port(u16),
    /// By a part of its command line.
    Cmdline(String),
    /// By the value of `LASTGASP_WORKER` in its environment.
    Env(String),
}

/// One service of `grpc.health.v1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Its name; empty means the whole server.
    pub name: String,
    /// What it speaks for.
    pub role: HealthRole,
}

/// How a worker's health is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthConfig {
    /// Address of a server of `grpc.health.v1`.
    pub grpc: Option<String>,
    /// The services to watch there.
    pub services: Vec<Service>,
    /// An address that answers GET with 2xx or 503, where there is no gRPC health.
    pub http: Option<String>,
    /// Time between two questions.
    pub check_interval: Duration,
    /// Time an answer may take.
    pub check_timeout: Duration,
    /// How long no answer must have come before an engine hangs.
    pub hang_window: Duration,
    /// Time between two HTTP/2 pings on an idle connection.
    pub keepalive: Duration,
}
