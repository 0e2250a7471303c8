//! The asking side, for the command line.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use tonic::transport::{Channel, Endpoint};

use super::proto::status_client::StatusClient;

/// Why a daemon did not tell.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No socket, or nobody behind it.
    #[error(
        "no daemon answers on {}: {error}; is it running (`lastgasp run`)? If it uses another socket, name it with --socket or LASTGASP_STATUS_SOCKET",
        socket.display()
    )]
    NotThere {
        /// Which socket.
        socket: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The socket is for its owner only.
    #[error("{} may not be opened: {error}; ask as the user that runs the daemon, for instance with sudo", socket.display())]
    NotAllowed {
        /// Which socket.
        socket: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// It went away while it was telling.
    #[error("the daemon ended while it was asked: {0}")]
    Ended(String),
    /// Something answers, but not as a daemon of this version.
    #[error("{} does not answer as lastgasp {}: {error}", socket.display(), env!("CARGO_PKG_VERSION"))]
    Foreign {
        /// Which socket.
        socket: PathBuf,
        /// What it said.
        error: String,
    },
}

impl From<tonic::Status> for ClientError {
    fn from(status: tonic::Status) -> Self {
        Self::Ended(status.message().to_owned())
    }
}

/// Connects to a daemon.
///
/// # Errors
/// Nobody is there, or the socket may not be opened.
pub async fn connect(socket: &Path) -> Result<StatusClient<Channel>, ClientError> {
    let socket = std::path::absolute(socket).unwrap_or_else(|_| socket.to_owned());
    // Asked by hand first: tonic's error does not tell a missing socket from one that is forbidden.
    if let Err(error) = tokio::net::UnixStream::connect(&socket).await {
        return Err(match error.kind() {
            ErrorKind::PermissionDenied => ClientError::NotAllowed { socket, error },
            _ => ClientError::NotThere { socket, error },
        });
    }
    let foreign =
        |error: tonic::transport::Error| ClientError::Foreign { socket: socket.clone(), error: error.to_string() };
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).map_err(foreign)?;
    Ok(StatusClient::new(endpoint.connect().await.map_err(foreign)?))
}
