//! Requests on their way to workers and back.

pub mod admin;
pub mod dispatch;
pub mod reason;
pub mod stream;
pub mod unary;

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, header};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::Config;
use crate::metrics::Metrics;
use crate::workers::Workers;

/// Longest wait for a connection to a worker. A worker on the same network accepts in
/// milliseconds; a machine that is gone does not answer at all.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A connection to a worker that was idle for so long is not used again. The servers of vLLM and SGLang
/// (uvicorn, `timeout_keep_alive`) close theirs after 5 s, and a request that meets that looks lost.
const IDLE: Duration = Duration::from_secs(4);

/// What every request needs.
#[derive(Debug, Clone)]
pub struct Proxy {
    /// The workers to choose from.
    pub workers: Arc<Workers>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// What the operator chose.
    pub config: Config,
    /// Connections to workers. Those that are kept for the next request belong to the runtime that made
    /// them.
    pub client: reqwest::Client,
    /// Places for requests under way.
    pub room: Arc<Semaphore>,
    /// Bytes that may be held of requests' bodies.
    pub bodies: Arc<Semaphore>,
}

impl Proxy {
    /// A proxy to these workers.
    ///
    /// # Errors
    /// The HTTP client cannot be made.
    pub fn new(workers: Arc<Workers>, config: Config) -> Result<Arc<Self>, reqwest::Error> {
        let room = Arc::new(Semaphore::new(config.max_requests.min(Semaphore::MAX_PERMITS)));
        let bodies = Arc::new(Semaphore::new(config.max_bodies.min(Semaphore::MAX_PERMITS)));
        Ok(Arc::new(Self { workers, metrics: Arc::default(), config, client: client()?, room, bodies }))
    }

    /// The same proxy for another runtime, with connections of its own.
    ///
    /// # Errors
    /// The HTTP client cannot be made.
    pub fn for_another_runtime(&self) -> Result<Arc<Self>, reqwest::Error> {
        Ok(Arc::new(Self { client: client()?, ..self.clone() }))
    }
}

fn client() -> Result<reqwest::Client, reqwest::Error> {
    reqwest::Client::builder()
        .http1_only()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .pool_max_idle_per_host(256)
        .pool_idle_timeout(IDLE)
        .build()
}

/// Bytes of JSON that are worth another thread: some milliseconds of work, in which a serving thread
/// passes on no chunk of any stream.
const LARGE: usize = 64 * 1024;

/// Does what takes long with so much JSON on a thread where it holds up nobody.
pub(crate) async fn aside<T: Send + 'static>(bytes: usize, work: impl FnOnce() -> T + Send + 'static) -> T {
    if bytes < LARGE {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // The runtime ends, and with it whoever waits for this.
        Err(_) => std::future::pending().await,
    }
}

/// What is passed on to a worker: everything but what belongs to one connection, and the
/// client's key where it was the router's.
pub(crate) fn forwarded(headers: &HeaderMap, drop_key: bool) -> HeaderMap {
    const OF_ONE_CONNECTION: [HeaderName; 11] = [
        header::CONNECTION,
        header::HOST,
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
        header::TE,
        header::TRAILER,
        header::UPGRADE,
        header::EXPECT,
        header::PROXY_AUTHORIZATION,
        // What comes back must be readable here.
        header::ACCEPT_ENCODING,
        HeaderName::from_static("keep-alive"),
    ];
    let stays = |name: &HeaderName| OF_ONE_CONNECTION.contains(name) || drop_key && name == header::AUTHORIZATION;
    headers.iter().filter(|(name, _)| !stays(name)).map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// A client's request, read.
#[derive(Debug, Clone)]
pub struct Inbound {
    /// Its id, made up where the client gave none.
    pub id: String,
    /// Path and query on the worker.
    pub path: String,
    /// The model asked for.
    pub model: String,
    /// Headers for the worker.
    pub headers: HeaderMap,
    /// The body as it came.
    pub body: axum::body::Bytes,
    /// What it takes of the room for bodies.
    pub held: Arc<OwnedSemaphorePermit>,
    /// Its place among the requests under way.
    pub place: Arc<OwnedSemaphorePermit>,
}
