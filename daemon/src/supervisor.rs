//! The loop that joins sensors, core and effects.

use std::path::PathBuf;

use crate::config::{Config, Problem};
use crate::metrics::Metrics;
use crate::status::{NodeStatus, StatusError, StatusHub, StatusServer, render};

/// What `lastgasp run` is told beside the configuration.
#[derive(Debug, Clone, Default)]
pub struct RunOptions {
    /// Written once the sensors are attached and the first scan is over.
    pub ready_file: Option<PathBuf>,
    /// What is odd about the configuration.
    pub warnings: Vec<Problem>,
}

/// Why the daemon ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Status cannot be served.
    #[error(transparent)]
    Status(#[from] StatusError),
    /// A live lease of this name.
    #[error("refused: {0}")]
    Refused(String),
    /// The system refused something.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl RunError {
    /// See [`crate::cli::Exit`].
    #[must_use]
    pub const fn exit(&self) -> crate::cli::Exit {
        match self {
            Self::Refused(_) => crate::cli::Exit::Unavailable,
            Self::Status(_) | Self::Io(_) => crate::cli::Exit::Failed,
        }
    }
}

/// Serves status until SIGTERM or SIGINT.
///
/// # Errors
/// Status cannot be served.
pub fn run(config: Config, options: RunOptions) -> Result<(), RunError> {
    let hub = StatusHub::new(NodeStatus {
        node: config.node.to_string(),
        mode: config.mode.as_str().to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started_at: render::now(),
        nats_url: config.nats.url.clone(),
        warnings: options.warnings.iter().map(ToString::to_string).collect(),
        ..NodeStatus::default()
    });
    let server = StatusServer::bind(&config.status, hub, Metrics::new())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        tokio::select! {
            result = server.serve() => Ok(result?),
            _ = terminate.recv() => Ok(()),
            _ = tokio::signal::ctrl_c() => Ok(()),
        }
    })
}
