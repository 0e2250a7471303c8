//! TLS before the HTTP server: `--tls-cert` and `--tls-key`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};
use tokio_rustls::{TlsAcceptor, rustls};

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
