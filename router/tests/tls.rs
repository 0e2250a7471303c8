//! HTTPS: a client that trusts the certificate is served; one that never shakes hands holds up nobody.
//!
//! `tests/tls/` holds a certificate for `localhost` that signs itself and its key, made for this test.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use lastgasp_router::connections::{self, Limits, UNREAD};
use lastgasp_router::threads::Threads;
use lastgasp_router::tls::{TlsError, acceptor};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls").join(name)
}

fn trusting() -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(file("cert.pem")).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(config))
}

/// After so long a test gives up. A handshake may take longer.
const GIVE_UP: Duration = Duration::from_secs(60);

struct Served {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

async fn serve() -> Served {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = acceptor(&file("cert.pem"), &file("key.pem")).unwrap();
    let threads = Threads::start([Router::new().route("/", get(async || "hello"))]).unwrap();
    let limits = Limits { connections: 2, head: UNREAD, handshake: 10 * GIVE_UP, unread: UNREAD };
    let (stop, stopped) = watch::channel(false);
    let serving = tokio::spawn(connections::serve(listener, Some(acceptor), threads, limits, stopped));
    Served { address, stop, serving }
}

async fn ask(address: SocketAddr) {
    let connection = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let mut stream = trusting().connect(name, connection).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("hello"), "{answer}");
}

#[tokio::test]
async fn a_client_that_never_shakes_hands_holds_up_neither_another_nor_the_end() {
    let served = serve().await;
    let silent = TcpStream::connect(served.address).await.unwrap();

    ask(served.address).await;

    served.stop.send(true).unwrap();
    tokio::time::timeout(GIVE_UP, served.serving).await.expect("it ends").unwrap();
    drop(silent);
}

#[test]
fn a_file_that_is_no_certificate_is_named() {
    let error = acceptor(&file("key.pem"), &file("key.pem")).err().expect("no certificate");
    assert!(matches!(&error, TlsError::NoCertificate(path) if path.ends_with("key.pem")), "{error}");
    let error = acceptor(&file("absent.pem"), &file("key.pem")).err().expect("no such file");
    assert!(error.to_string().contains("absent.pem"), "{error}");
}
