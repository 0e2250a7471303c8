//! The router's side of the contract on NATS: what it reads, hears and says.
//!
//! NATS being away never stops a stream: the last known workers stay in use, and everything
//! here begins again when it is back.

mod lease;
mod signals;
mod troubles;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use async_nats::{Event, jetstream};
use lastgasp_protocol::Name;
use lastgasp_protocol::kv::{Fault, backoff};
use lastgasp_protocol::login::{self, LoggedIn, Login, LoginError, ServersError};
use tokio::sync::{oneshot, watch as latest};
use tokio::task::JoinSet;
use tracing::{info, warn};

use crate::proxy::Proxy;

use troubles::Troubles;

/// Three pings that go unanswered end a connection, so a dead one is noticed within 5 s.
const PING: Duration = Duration::from_millis(1500);
/// Longest pause between attempts to connect.
const LONGEST_RECONNECT: Duration = Duration::from_secs(2);
/// Longest wait for an answer of the server.
const REQUEST: Duration = Duration::from_secs(3);

/// Where NATS is, and who we are there.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Server URL, or several with commas.
    pub url: String,
    /// Who we are there, and whom we trust.
    pub login: Login,
    /// This router's name.
    pub name: Name,
    /// Replicas of buckets that have to be created.
    pub replicas: usize,
}

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// A file of the login cannot be used.
    #[error(transparent)]
    Login(#[from] LoginError),
    /// The list of servers is none.
    #[error(transparent)]
    Servers(#[from] ServersError),
    /// The URL is not one, or the like. A server that does not answer is no error.
    #[error("{url}: {source}")]
    Url {
        /// The URL.
        url: String,
        /// Why.
        source: async_nats::ConnectError,
    },
    /// The thread cannot be started.
    #[error("no thread for NATS: {0}")]
    Thread(std::io::Error),
}

/// What all tasks here share.
#[derive(Debug, Clone)]
struct NatsClient {
    client: async_nats::Client,
    context: jetstream::Context,
    proxy: Arc<Proxy>,
    settings: Settings,
    /// Counts connections; a change means that everything must be read again.
    connections: latest::Receiver<u64>,
    troubles: Troubles,
}

/// The thread that follows NATS. Dropping it ends that.
#[derive(Debug)]
pub struct Following {
    listed: latest::Receiver<bool>,
    stop: latest::Sender<bool>,
    ended: oneshot::Receiver<()>,
}

impl Following {
    /// Waits until the workers were listed once.
    pub async fn listed(&mut self) {
        // The sender lives as long as the task, which has no end.
        _ = self.listed.wait_for(|listed| *listed).await;
    }

    /// Gives the router's lease back and ends.
    pub async fn stop(self) {
        self.stop.send_replace(true);
        _ = self.ended.await;
    }
}

/// Begins to follow NATS, in a thread of its own: a signal must not queue behind the chunks of
/// thousands of streams. Returns at once, whether a server answers or not.
///
/// # Errors
/// The settings cannot be used.
pub async fn follow(settings: Settings, proxy: Arc<Proxy>) -> Result<Following, ConnectError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(ConnectError::Thread)?;
    let (listing, listed) = latest::channel(false);
    let (stop, stopped) = latest::channel(false);
    let (sender, receiver) = oneshot::channel();
    let (end, ended) = oneshot::channel();
    let body = move || {
        runtime.block_on(async {
            let begun = begin(settings, proxy, listing, stopped.clone()).await;
            let (mut tasks, result) = match begun {
                Ok(tasks) => (tasks, Ok(())),
                Err(error) => (JoinSet::new(), Err(error)),
            };
            _ = sender.send(result);
            // Only the lease ends by itself, when it is given back; then nothing is left to do.
            tasks.join_next().await;
        });
        _ = end.send(());
    };
    std::thread::Builder::new().name("nats".into()).spawn(body).map_err(ConnectError::Thread)?;
    match receiver.await {
        Ok(result) => result?,
        Err(_) => return Err(ConnectError::Thread(std::io::Error::other("it ended"))),
    }
    Ok(Following { listed, stop, ended })
}

async fn begin(
    settings: Settings,
    proxy: Arc<Proxy>,
    listing: latest::Sender<bool>,
    stopped: latest::Receiver<bool>,
) -> Result<JoinSet<()>, ConnectError> {
    let (connected, connections) = latest::channel(0);
    let connected = Arc::new(connected);
    let workers = Arc::clone(&proxy.workers);
    let LoggedIn { options, warnings } = settings.login.read()?;
    for warning in warnings {
        warn!("{warning}");
    }
    let url = settings.url.clone();
    let troubles = Troubles::new(Arc::clone(&proxy));
    let link_troubles = troubles.clone();
    let servers = login::servers(&url)?;
    let client = options
        .name(format!("lastgasp-router {}", settings.name))
        .custom_inbox_prefix(lastgasp_protocol::router_inbox(&settings.name))
        .ping_interval(PING)
        .connection_timeout(REQUEST)
        .request_timeout(Some(REQUEST))
        .retry_on_initial_connect()
        .reconnect_delay_callback(reconnect_delay)
        .event_callback(move |event| {
            match &event {
                Event::Connected => {
                    info!("connected to NATS");
                    troubles.good("connection");
                    troubles.good("permission");
                    workers.connected(std::time::Instant::now());
                    connected.send_modify(|count| *count += 1);
                }
                Event::Disconnected => warn!("NATS is away: the router serves with the workers known last"),
                _ => {}
            }
            match Fault::of_event(&event) {
                Some(fault) if fault == Fault::NotPermitted => troubles.bad("permission", fault, &event),
                Some(fault) => troubles.bad("connection", fault, &event),
                None => {}
            }
            std::future::ready(())
        })
        .connect(servers)
        .await
        .map_err(|source| ConnectError::Url { url: url.clone(), source })?;
    info!(url, "following NATS");
    let context = jetstream::new(client.clone());
    let client = NatsClient { client, context, proxy, settings, connections, troubles: link_troubles };
    let mut tasks = JoinSet::new();
    tasks.spawn(watch::workers(client.clone(), listing));
    tasks.spawn(watch::nodes(client.clone()));
    tasks.spawn(signals::run(client.clone()));
    tasks.spawn(lease::run(client, stopped));
    Ok(tasks)
}

/// How long to wait before this attempt, the first of which may be made at once.
fn reconnect_delay(attempts: usize) -> Duration {
    match attempts {
        0 | 1 => Duration::ZERO,
        attempts => backoff(u32::try_from(attempts - 2).unwrap_or(u32::MAX)).min(LONGEST_RECONNECT),
    }
}
