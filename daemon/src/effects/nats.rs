//! The connection to NATS, and what must stand on the server before anything can be written.

use std::time::Duration;

use async_nats::jetstream::{self, stream};
use async_nats::{Client, ConnectOptions, Event};
use lastgasp_protocol::kv::{Bucket, Fault, OLDEST_SERVER, OpenError, backoff, jittered};
use lastgasp_protocol::login::{LoggedIn, LoginError};
use lastgasp_protocol::{DEATHS_STREAM, NODES_BUCKET, Name, ROUTERS_BUCKET, WORKERS_BUCKET};
use tokio::sync::watch;

use super::troubles::{NOTHING_WRITTEN, Troubles};
use crate::config::NatsConfig;

/// The third ping after one that was not answered ends a connection, so a dead one is noticed within 5 s.
const PING_INTERVAL: Duration = Duration::from_millis(1500);
/// Longest pause between attempts to connect.
const LONGEST_RECONNECT: Duration = Duration::from_secs(2);
/// How long a place is kept for an acknowledgement that nobody waits for any more.
const ACK_TIMEOUT: Duration = Duration::from_secs(2);
/// How long any other answer is awaited. A server of a cluster does not answer who asks for a bucket that
/// another is being given at that moment (measured with nats-server 2.15), and that is when all daemons
/// ask: at the very first start.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// How often it is seen to that the buckets are there and have their shape. It takes four questions, and a
/// thousand daemons that ask them cost the servers more than all leases do.
const INSPECTION: Duration = Duration::from_secs(30);
/// What is worse for a bucket that is not as it was asked for.
const AS_FOUND: &str = "the daemon uses the bucket as it is";
/// What is worse for a bucket that an observer cannot read.
const NOT_READ: &str = "this node does not know what the bucket holds, and changes nothing anyhow (mode = \"observe\")";
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ConnectionState {
    /// No connection yet.
    Connecting,
    /// Up.
    Connected,
    /// It was up; a new one is sought.
    Disconnected,
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
pub async fn connect(
    config: &NatsConfig,
    node: &Name,
    troubles: Troubles,
) -> Result<(Client, watch::Receiver<ConnectionState>), NatsError> {
    let (connection, state) = watch::channel(ConnectionState::Connecting);
    let options = patient_login(config, node)?.event_callback(move |event| {
        match &event {
            Event::Connected => {
                troubles.good("connection");
                troubles.good("permission");
                _ = connection.send_replace(ConnectionState::Connected);
            }
            Event::Disconnected => _ = connection.send_replace(ConnectionState::Disconnected),
            _ => {}
        }
        if let Some(fault) = Fault::of_event(&event) {
            let what = if fault == Fault::NotPermitted { "permission" } else { "connection" };
            troubles.bad(what, fault, event.to_string(), NOTHING_WRITTEN);
        } else {
            tracing::info!(%event, "NATS");
        }
        async {}
    });
    Ok((dial(config, options).await?, state))
}

/// Options to connect with in the background, for as long as it takes.
///
/// # Errors
/// As [`connect`].
pub fn patient_login(config: &NatsConfig, node: &Name) -> Result<ConnectOptions, NatsError> {
    let options = login(config, node)?
        .name(format!("lastgasp {node}"))
        .retry_on_initial_connect()
        .ping_interval(PING_INTERVAL)
        .connection_timeout(Duration::from_secs(3))
        .request_timeout(Some(REQUEST_TIMEOUT))
        .reconnect_delay_callback(|attempts| match attempts {
            0 | 1 => Duration::ZERO,
            attempts => backoff(u32::try_from(attempts - 2).unwrap_or(u32::MAX)).min(LONGEST_RECONNECT),
        });
    Ok(options)
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

/// Opens the buckets, creating what is missing, and tries until that succeeds. From then on it is
/// seen to that they stay: after every reconnect, and every [`INSPECTION`].
pub async fn keep_open(
    client: Client,
    replicas: usize,
    mut connection: watch::Receiver<ConnectionState>,
    troubles: Troubles,
    opened: watch::Sender<Option<(jetstream::Context, Buckets)>>,
) {
    let context = context(client.clone());
    let mut attempts = 0;
    loop {
        if connection.wait_for(|connection| *connection == ConnectionState::Connected).await.is_err() {
            return;
        }
        let pause = match inspect(&client, &context, replicas, &troubles).await {
            Some(buckets) => {
                attempts = 0;
                opened.send_if_modified(|opened| {
                    let first = opened.is_none();
                    opened.get_or_insert((context.clone(), buckets));
                    first
                });
                jittered(INSPECTION)
            }
            None => {
                attempts += 1;
                backoff(attempts - 1)
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // Another server may have other buckets.
            lost = connection.changed() => if lost.is_err() { return },
        }
    }
}

/// For an observer: looks for the two buckets that are read, every [`INSPECTION`], and tells of each once it is
/// there. One that is not there is no fault, and is not made.
pub async fn look_for(
    client: Client,
    mut connection: watch::Receiver<ConnectionState>,
    troubles: Troubles,
    workers: watch::Sender<Option<Bucket>>,
    routers: watch::Sender<Option<Bucket>>,
) {
    let context = context(client);
    loop {
        if connection.wait_for(|connection| *connection == ConnectionState::Connected).await.is_err() {
            return;
        }
        for (name, found) in [(WORKERS_BUCKET, &workers), (ROUTERS_BUCKET, &routers)] {
            let what = format!("bucket {name}");
            match Bucket::existing(&context, name).await {
                Ok(bucket) => {
                    troubles.good(&what);
                    found.send_if_modified(|found| {
                        let first = found.is_none() && bucket.is_some();
                        *found = found.take().or(bucket);
                        first
                    });
                }
                Err(error) => troubles.bad(&what, error.fault(), error.to_string(), NOT_READ),
            }
        }
        tokio::select! {
            () = tokio::time::sleep(jittered(INSPECTION)) => {}
            // Another server may have other buckets.
            lost = connection.changed() => if lost.is_err() { return },
        }
    }
}

/// The buckets, if all of them can be used.
async fn inspect(
    client: &Client,
    context: &jetstream::Context,
    replicas: usize,
    troubles: &Troubles,
) -> Option<Buckets> {
    let (major, minor) = OLDEST_SERVER;
    if !client.is_server_compatible(i64::from(major), i64::from(minor), 0) {
        let version = client.server_info().version;
        let detail = format!("version {version} has no per-message TTL: leases of dead nodes would never lapse");
        troubles.bad("server", Fault::OldServer, detail, NOTHING_WRITTEN);
        return None;
    }
    troubles.good("server");
    let buckets = match try_open(context, replicas).await {
        Ok(buckets) => buckets,
        Err(error) => {
            troubles.bad("buckets", error.fault(), error.to_string(), NOTHING_WRITTEN);
            return None;
        }
    };
    troubles.good("buckets");
    for bucket in [&buckets.workers, &buckets.nodes, &buckets.routers] {
        let what = format!("bucket {}", bucket.name());
        match bucket.remarks().first() {
            None => troubles.good(&what),
            Some(remark) => troubles.bad(&what, remark.fault(), remark.to_string(), AS_FOUND),
        }
    }
    match open_deaths(context, replicas).await {
        Ok(()) => troubles.good(DEATHS_STREAM),
        Err(error) => {
            let cost = "death certificates are not kept on the server";
            troubles.bad(DEATHS_STREAM, Fault::of(&*error), error.to_string(), cost);
        }
    }
    Some(buckets)
}

/// JetStream over this connection.
#[must_use]
pub fn context(client: Client) -> jetstream::Context {
    jetstream::context::ContextBuilder::new().ack_timeout(ACK_TIMEOUT).build(client)
}

/// Makes what is missing, and lets what is there have enough consumers: for a user that may, before daemons that
/// may not.
///
/// # Errors
/// The server does not answer or refuses, or something of another shape is there.
pub async fn create(client: Client, replicas: usize) -> Result<(), async_nats::Error> {
    let context = context(client);
    let Buckets { workers, nodes, routers } = try_open(&context, replicas).await?;
    for bucket in [workers, nodes, routers] {
        bucket.admit_consumers().await?;
    }
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
