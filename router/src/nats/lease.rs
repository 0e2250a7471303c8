//! This router's own key in `lastgasp_routers`: it says whose answers a daemon may wait for.

use std::time::Duration;

use lastgasp_protocol::kv::{Bucket, Content, Expect, Fault, ReadError, WriteError, backoff, jittered};
use lastgasp_protocol::{ROUTERS_BUCKET, RouterLease};
use tokio::sync::watch;
use tracing::info;

use super::NatsClient;

/// How long the key stays without being renewed. A daemon only waits a second longer for the answer of a
/// router that is gone, and every renewal goes to every daemon.
const TTL: Duration = Duration::from_secs(15);
/// Longest wait for it to be deleted.
const GIVE_BACK: Duration = Duration::from_secs(1);
/// Three chances to renew it.
const RENEWAL: Duration = Duration::from_secs(5);

/// Keeps the key until the router is stopped, then gives it back.
pub(super) async fn run(mut client: NatsClient, mut stopped: watch::Receiver<bool>) {
    let lease = RouterLease::new(client.settings.name.clone(), env!("CARGO_PKG_VERSION"));
    let mut attempts = 0;
    let keep = async {
        loop {
            _ = client.connections.wait_for(|count| *count > 0).await;
            if let Err(error) = hold(&client, &lease, &mut attempts).await {
                client.troubles.bad("lease", Fault::of(&*error), format!("the router's lease is not held: {error}"));
            }
            tokio::time::sleep(backoff(attempts)).await;
            attempts += 1;
        }
    };
    tokio::select! {
        () = keep => {}
        _ = stopped.wait_for(|stopped| *stopped) => {}
    }
    // Daemons need not wait for an answer of a router that is gone. If this fails, the TTL says it.
    _ = tokio::time::timeout(GIVE_BACK, give_back(&client, &lease)).await;
}

async fn give_back(client: &NatsClient, lease: &RouterLease) -> Result<(), async_nats::Error> {
    if *client.connections.borrow() == 0 {
        return Ok(());
    }
    let bucket = Bucket::open(&client.context, ROUTERS_BUCKET, client.settings.replicas).await?;
    let key = lease.router.token();
    if let Some(entry) = bucket.read(&key).await?
        && matches!(entry.value, Content::Put(_))
    {
        bucket.delete(&key, entry.payload, Expect::Revision(entry.revision), TTL).await?;
    }
    Ok(())
}

async fn hold(client: &NatsClient, lease: &RouterLease, attempts: &mut u32) -> Result<(), async_nats::Error> {
    let bucket = Bucket::open(&client.context, ROUTERS_BUCKET, client.settings.replicas).await?;
    let key = lease.router.token();
    let mut expect = expected(&bucket, &key).await?;
    let mut held = false;
    loop {
        match bucket.put(&key, lease.to_json().into(), expect, TTL).await {
            Ok(revision) => {
                client.troubles.good("lease");
                if !std::mem::replace(&mut held, true) {
                    info!(router = %lease.router, revision, "router holds its lease");
                }
                *attempts = 0;
                expect = Expect::Revision(revision);
                tokio::time::sleep(jittered(RENEWAL)).await;
            }
            // It lapsed, or the router that had this name before wrote it last.
            Err(WriteError::Mismatch) => expect = expected(&bucket, &key).await?,
            Err(error) => return Err(error.into()),
        }
    }
}

async fn expected(bucket: &Bucket, key: &str) -> Result<Expect, ReadError> {
    Ok(bucket.read(key).await?.map_or(Expect::Absent, |entry| Expect::Revision(entry.revision)))
}
