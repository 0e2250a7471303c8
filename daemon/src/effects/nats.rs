//! The connection to NATS, and what must stand on the server before anything can be written.

use std::time::Duration;

use async_nats::jetstream::{self, stream};
use async_nats::{Client, ConnectOptions, Event};
use lastgasp_protocol::kv::{Bucket, OpenError};
use lastgasp_protocol::login::{LoggedIn, LoginError};
use lastgasp_protocol::{DEATHS_STREAM, NODES_BUCKET, Name, ROUTERS_BUCKET, WORKERS_BUCKET};
use tokio::sync::watch;

use crate::config::NatsConfig;

/// A dead connection is noticed after two pings without an answer.
const PING_INTERVAL: Duration = Duration::from_secs(2);
/// How long a JetStream acknowledgement is awaited before the outcome counts as unknown.
const ACK_TIMEOUT: Duration = Duration::from_secs(2);
/// Pauses between tries to open the buckets.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// How long certificates are kept.
const DEATHS_KEPT: Duration = Duration::from_secs(30 * 24 * 3600);

/// Why a connection cannot even be tried.
#[derive(Debug, thiserror::Error)]
pub enum NatsError {
    /// A file of the login cannot be used.
    #[error("nats: {0}")]
    Login(#[from] LoginError),
    /// An address that async-nats does not take, or for [`connect_once`] a server that
    /// does not answer.
    #[error("nats.url {url}: {source}")]
    Options {
        /// The address.
        url: String,
        /// Why.
        source: async_nats::Error,
    },
}

/// Where the connection stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// No connection yet.
    Connecting,
    /// Up.
    Connected,
    /// It was up; a new one is sought.
    Disconnected,
}

impl Link {
    /// The closed name used in status.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Connected => "connected",
            Self::Disconnected => "disconnected",
        }
    }
}

/// The three buckets.
#[derive(Debug, Clone)]
pub struct Buckets {
    /// Records.
    pub workers: Bucket,
    /// Node leases.
    pub nodes: Bucket,
    /// Routers.
    pub routers: Bucket,
}

/// Connects in the background, for as long as it takes, and keeps connected.
///
/// # Errors
/// Only what waiting cannot heal: an unreadable secret, an address that is none.
pub async fn connect(config: &NatsConfig, node: &Name) -> Result<(Client, watch::Receiver<Link>), NatsError> {
    let (link, state) = watch::channel(Link::Connecting);
    let options = login(config, node)?
        .name(format!("lastgasp {node}"))
        .retry_on_initial_connect()
        .ping_interval(PING_INTERVAL)
        .connection_timeout(Duration::from_secs(3))
        .reconnect_delay_callback(|attempts| {
            let step = Duration::from_millis(50) * u32::try_from(attempts.min(6)).unwrap_or(6).pow(2);
            step + Duration::from_millis(u64::from(std::process::id()) % 50)
        })
        .event_callback(move |event| {
            match &event {
                Event::Connected => drop(link.send_replace(Link::Connected)),
                Event::Disconnected => drop(link.send_replace(Link::Disconnected)),
                _ => {}
            }
            async move { tracing::info!(%event, "NATS") }
        });
    Ok((dial(config, options).await?, state))
}

/// Connects now or not at all.
///
/// # Errors
/// As [`connect`]; or no server answers, or it refuses the login.
pub async fn connect_once(config: &NatsConfig, node: &Name, patience: Duration) -> Result<Client, NatsError> {
    dial(config, login(config, node)?.connection_timeout(patience)).await
}

async fn dial(config: &NatsConfig, options: ConnectOptions) -> Result<Client, NatsError> {
    let servers: Vec<&str> = config.url.split(',').map(str::trim).collect();
    let invalid =
        |source: async_nats::ConnectError| NatsError::Options { url: config.url.clone(), source: source.into() };
    options.connect(servers).await.map_err(invalid)
}

/// Who we are, and whom we trust.
fn login(config: &NatsConfig, node: &Name) -> Result<ConnectOptions, NatsError> {
    let LoggedIn { options, warnings } = config.login.read()?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    Ok(options.custom_inbox_prefix(lastgasp_protocol::node_inbox(node)))
}

/// Opens the buckets, creating what is missing, and tries until that succeeds.
pub async fn open_buckets(client: Client, replicas: usize) -> (jetstream::Context, Buckets) {
    let context = jetstream::context::ContextBuilder::new().ack_timeout(ACK_TIMEOUT).build(client);
    let mut pause = BACKOFF.0;
    let mut said = String::new();
    loop {
        match try_open(&context, replicas).await {
            Ok(buckets) => {
                if let Err(error) = open_deaths(&context, replicas).await {
                    tracing::warn!(%error, stream = DEATHS_STREAM, "death certificates are not kept on the server");
                }
                return (context, buckets);
            }
            Err(error) => {
                let text = error.to_string();
                if text != said {
                    tracing::warn!(error = %text, "JetStream is not usable yet; nothing is listed or withdrawn until it is");
                    said = text;
                }
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(BACKOFF.1);
    }
}

/// Makes what is missing, once: for a user that may, before daemons that may not.
///
/// # Errors
/// The server does not answer or refuses, or something of another shape is there.
pub async fn create(client: Client, replicas: usize) -> Result<(), async_nats::Error> {
    let context = jetstream::context::ContextBuilder::new().ack_timeout(ACK_TIMEOUT).build(client);
    try_open(&context, replicas).await?;
    open_deaths(&context, replicas).await
}

async fn try_open(context: &jetstream::Context, replicas: usize) -> Result<Buckets, OpenError> {
    Ok(Buckets {
        workers: Bucket::open(context, WORKERS_BUCKET, replicas).await?,
        nodes: Bucket::open(context, NODES_BUCKET, replicas).await?,
        routers: Bucket::open(context, ROUTERS_BUCKET, replicas).await?,
    })
}

async fn open_deaths(context: &jetstream::Context, replicas: usize) -> Result<(), async_nats::Error> {
    context
        .get_or_create_stream(stream::Config {
            name: DEATHS_STREAM.to_owned(),
            subjects: vec!["lastgasp.v1.death.>".to_owned()],
            max_age: DEATHS_KEPT,
            max_messages_per_subject: 100,
            num_replicas: replicas,
            ..stream::Config::default()
        })
        .await?;
    Ok(())
}
