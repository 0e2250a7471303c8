//! Binds the unix socket and the HTTP address, and serves both.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use futures_util::StreamExt as _;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnixListenerStream;

use super::control::{ControlService, Request};
use super::proto::control_server::ControlServer as ControlRpc;
use super::proto::status_server::StatusServer as StatusRpc;
use super::service::StatusService;
use super::{StatusHub, http, proto};
use crate::config::StatusConfig;
use crate::metrics::Metrics;

/// Why the daemon cannot be asked. Said at the start, before anything is watched.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// A daemon answers on this socket.
    #[error("another lastgasp answers on {}; end it, or set status.socket to another path", .0.display())]
    SocketTaken(PathBuf),
    /// A file that is no socket stands in the way.
    #[error("{} is there and is no socket; remove it, or set status.socket to another path", .0.display())]
    NoSocket(PathBuf),
    /// The socket cannot be made.
    #[error("cannot make the socket {}: {error}; set status.socket to a path in a folder that can be written", path.display())]
    Socket {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The HTTP address cannot be bound.
    #[error("cannot listen on {listen}: {error}; set status.listen to a free address, or port 0 for any")]
    Listen {
        /// Which.
        listen: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// Serving ended.
    #[error("serving status ended: {0}")]
    Serve(String),
}

/// Both listeners, bound and not yet served.
#[derive(Debug)]
pub(crate) struct StatusServer {
    socket: Socket,
    http: std::net::TcpListener,
    listen: SocketAddr,
    hub: StatusHub,
    metrics: Metrics,
    commands: mpsc::Sender<Request>,
    page: bool,
}

impl StatusServer {
    /// Binds the socket (mode 0600; one that a dead daemon left is replaced) and the HTTP address.
    ///
    /// # Errors
    /// Another daemon is there, or one of them cannot be bound.
    pub(crate) fn bind(
        config: &StatusConfig,
        hub: StatusHub,
        metrics: Metrics,
        commands: mpsc::Sender<Request>,
    ) -> Result<Self, StatusError> {
        let socket = Socket::bind(&config.socket)?;
        let refuse = |error| StatusError::Listen { listen: config.listen, error };
        let http = std::net::TcpListener::bind(config.listen).map_err(refuse)?;
        http.set_nonblocking(true).map_err(refuse)?;
        let listen = http.local_addr().map_err(refuse)?;
        Ok(Self { socket, http, listen, hub, metrics, commands, page: config.page })
    }

    /// The HTTP address, with the port that was taken for port 0.
    #[must_use]
    pub(crate) const fn listen(&self) -> SocketAddr {
        self.listen
    }

    /// Serves until it is dropped; then open streams end, since a follower would otherwise hold up
    /// the end of the daemon, and the socket is removed. Runs on the runtime that polls it.
    ///
    /// # Errors
    /// Serving ended by itself.
    pub(crate) async fn serve(self) -> Result<(), StatusError> {
        let Self { socket, http, listen, hub, metrics, commands, page } = self;
        let ended = |what: &dyn std::fmt::Display| StatusError::Serve(what.to_string());
        let Socket { listener: unix, file } = socket;
        let unix = tokio::net::UnixListener::from_std(unix).map_err(|error| ended(&error))?;
        let http = tokio::net::TcpListener::from_std(http).map_err(|error| ended(&error))?;

        let (reporter, health) = tonic_health::server::health_reporter();
        reporter.set_serving::<StatusRpc<StatusService>>().await;
        reporter.set_serving::<ControlRpc<ControlService>>().await;
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .build_v1()
            .map_err(|error| ended(&error))?;
        let (_end, serving) = tokio::sync::watch::channel(());
        let rpc = tonic::transport::Server::builder()
            .add_service(StatusRpc::new(StatusService { hub: hub.clone(), metrics: metrics.clone(), serving }))
            .add_service(ControlRpc::new(ControlService { commands }))
            .add_service(health)
            .add_service(reflection)
            .serve_with_incoming(UnixListenerStream::new(unix).filter(|peer| std::future::ready(is_ours(peer))));
        tracing::info!(%listen, socket = %file.path.display(), "status server listens");
        tokio::select! {
            result = rpc => result.map_err(|error| ended(&error)),
            () = http::serve(http, http::router(hub, metrics, page.then_some(listen)), http::Limits::default()) => Ok(()),
        }
    }
}

/// Whether a client may ask: our own user, or root. The socket's mode says so too, but a mode can be
/// changed by mistake.
fn is_ours(peer: &io::Result<UnixStream>) -> bool {
    let Ok(peer) = peer else { return true };
    let own = nix::unistd::geteuid().as_raw();
    match peer.peer_cred() {
        Ok(peer) if peer.uid() == own || peer.uid() == 0 => true,
        Ok(peer) => {
            tracing::warn!(uid = peer.uid(), pid = peer.pid(), "status socket refused another user");
            false
        }
        Err(error) => {
            tracing::warn!(%error, "status socket refused a client that it cannot identify");
            false
        }
    }
}

#[derive(Debug)]
struct Socket {
    listener: std::os::unix::net::UnixListener,
    file: SocketFile,
}

impl Socket {
    fn bind(path: &Path) -> Result<Self, StatusError> {
        let refuse = |error| StatusError::Socket { path: path.to_owned(), error };
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(refuse)?;
        }
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => return Err(StatusError::NoSocket(path.to_owned())),
            Ok(_) => match std::os::unix::net::UnixStream::connect(path) {
                Ok(_) => return Err(StatusError::SocketTaken(path.to_owned())),
                // Nobody listens: a dead daemon left it (connect(2), ECONNREFUSED).
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(error) => return Err(refuse(error)),
            },
            Err(_) => {}
        }
        // Bound under another name and moved into place: it never stands there with other rights
        // than its last ones, and a dead daemon's socket is replaced in one step.
        let mut aside = path.as_os_str().to_owned();
        aside.push(format!(".{:x}", std::process::id()));
        let aside = PathBuf::from(aside);
        let _ = std::fs::remove_file(&aside);
        let listener = std::os::unix::net::UnixListener::bind(&aside).map_err(refuse)?;
        let moved = std::fs::set_permissions(&aside, std::fs::Permissions::from_mode(0o600))
            .and_then(|()| listener.set_nonblocking(true))
            .and_then(|()| std::fs::rename(&aside, path))
            .and_then(|()| std::fs::symlink_metadata(path));
        match moved {
            Ok(metadata) => Ok(Self { listener, file: SocketFile { path: path.to_owned(), inode: metadata.ino() } }),
            Err(error) => {
                let _ = std::fs::remove_file(&aside);
                Err(refuse(error))
            }
        }
    }
}

/// Removes the socket in the end, unless a successor has put its own there.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if std::fs::symlink_metadata(&self.path).is_ok_and(|metadata| metadata.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
