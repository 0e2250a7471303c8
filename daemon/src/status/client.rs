//! The asking side, for the command line.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use super::proto::control_client::ControlClient;
use super::proto::status_client::StatusClient;

/// Why a daemon did not tell.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
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
    #[error("the daemon ended during this command: {0}")]
    Ended(String),
    /// There is no such worker.
    #[error("{0}")]
    NoSuchWorker(String),
    /// It understood and did not do it.
    #[error("{0}")]
    Refused(String),
    /// It does not know this question.
    #[error("the daemon does not know this command: it is older than this lastgasp {}; restart it with this one", env!("CARGO_PKG_VERSION"))]
    TooOld,
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
        let text = status.message().to_owned();
        match status.code() {
            Code::NotFound => Self::NoSuchWorker(text),
            Code::FailedPrecondition | Code::InvalidArgument => Self::Refused(text),
            Code::Unimplemented => Self::TooOld,
            _ => Self::Ended(text),
        }
    }
}

/// Connects to a daemon, to ask.
///
/// # Errors
/// Nobody is there, or the socket may not be opened.
pub(crate) async fn connect(socket: &Path) -> Result<StatusClient<Channel>, ClientError> {
    Ok(StatusClient::new(channel(socket).await?))
}

/// Connects to a daemon, to have something done.
///
/// # Errors
/// Nobody is there, or the socket may not be opened.
pub(crate) async fn connect_control(socket: &Path) -> Result<ControlClient<Channel>, ClientError> {
    Ok(ControlClient::new(channel(socket).await?))
}

async fn channel(socket: &Path) -> Result<Channel, ClientError> {
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
    endpoint.connect().await.map_err(foreign)
}
