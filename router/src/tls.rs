//! TLS before the HTTP server: `--tls-cert` and `--tls-key`.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{TlsAcceptor, rustls};
use tracing::{debug, warn};

use crate::connections;

/// How long a client may take to shake hands. Slower ones keep nobody else waiting.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes under way at once.
const HANDSHAKES: usize = 512;
/// How long to wait after the system refused to accept: usually it has no more file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Why TLS cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or holds no certificate or key.
    #[error("{}: {source}; a PEM file is expected", path.display())]
    Pem {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: pem::Error,
    },
    /// The file of certificates is empty.
    #[error("{}: no certificate in it; a PEM file is expected", .0.display())]
    NoCertificate(PathBuf),
    /// Key and certificate do not belong together, or are of a kind that is not supported.
    #[error("certificate and key: {0}")]
    Rustls(#[from] rustls::Error),
}

/// Reads a certificate chain, the server's first, and its key.
///
/// # Errors
/// See [`TlsError`].
pub fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor, TlsError> {
    let unreadable = |path: &Path| {
        let path = path.to_owned();
        move |source| TlsError::Pem { path, source }
    };
    let chain = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(unreadable(cert))?;
    if chain.is_empty() {
        return Err(TlsError::NoCertificate(cert.to_owned()));
    }
    let key = PrivateKeyDer::from_pem_file(key).map_err(unreadable(key))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Connections on which the handshake is done.
#[derive(Debug)]
pub struct TlsListener {
    shaken: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
    address: SocketAddr,
}

impl TlsListener {
    /// Shakes hands with everybody who connects, each in a task of its own.
    ///
    /// # Errors
    /// The listener does not know its address.
    pub fn new(listener: TcpListener, acceptor: TlsAcceptor) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let (done, shaken) = mpsc::channel(1);
        tokio::spawn(accept(listener, acceptor, done));
        Ok(Self { shaken, address })
    }
}

async fn accept(listener: TcpListener, acceptor: TlsAcceptor, done: mpsc::Sender<(TlsStream<TcpStream>, SocketAddr)>) {
    let room = Arc::new(Semaphore::new(HANDSHAKES));
    loop {
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = done.closed() => return,
        };
        let (connection, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "cannot accept a connection");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        connections::tune(&connection, connections::UNREAD);
        let (acceptor, done) = (acceptor.clone(), done.clone());
        tokio::spawn(async move {
            match tokio::time::timeout(HANDSHAKE, acceptor.accept(connection)).await {
                Ok(Ok(stream)) => {
                    // It fails when the server has ended.
                    _ = done.send((stream, peer)).await;
                }
                Ok(Err(error)) => debug!(%peer, %error, "no TLS"),
                Err(_) => debug!(%peer, "no TLS handshake in time"),
            }
            drop(place);
        });
    }
}

impl axum::serve::Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.shaken.recv().await {
            Some(shaken) => shaken,
            // The accepting task ends after this listener, never before.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}
