//! Routers, by their own code: what they follow of NATS, without clients.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lastgasp_protocol::{Incarnation, Name};
use lastgasp_router::config::Config;
use lastgasp_router::nats::{self, Following, Settings};
use lastgasp_router::proxy::Proxy;
use lastgasp_router::workers::{Fate, Key, Listing, Workers};
use lastgasp_tests::HarnessError;
use lastgasp_tests::process::{GIVE_UP, Patience};

/// One router.
#[derive(Debug)]
pub(super) struct Router {
    proxy: Arc<Proxy>,
    following: Following,
}

impl Router {
    /// Starts to follow.
    pub(super) async fn start(index: usize, url: &str, replicas: usize) -> Result<Self, HarnessError> {
        let (workers, _) = Workers::new();
        let proxy = Proxy::new(workers, Config::default()).map_err(HarnessError::http)?;
        let settings = Settings {
            url: url.to_owned(),
            login: Default::default(),
            name: Name::new(format!("router-{index}")).expect("letters and digits"),
            replicas,
        };
        let following = nats::follow(settings, Arc::clone(&proxy)).await;
        let following = following.map_err(|error| HarnessError::Nats(error.into()))?;
        Ok(Self { proxy, following })
    }

    /// Ends as after SIGTERM.
    pub(super) async fn stop(self) {
        self.following.stop().await;
    }

    pub(super) fn workers(&self) -> &Arc<Workers> {
        &self.proxy.workers
    }

    /// Waits until so many workers may be chosen, for as long as their number changes.
    pub(super) async fn knows(&mut self, count: usize) -> Result<(), HarnessError> {
        if tokio::time::timeout(GIVE_UP, self.following.listed()).await.is_err() {
            return Err(HarnessError::GaveUp("a router to list the workers".to_owned()));
        }
        let mut changes = self.proxy.workers.changes();
        let mut patience = Patience::new(self.proxy.workers.serving());
        loop {
            let known = self.proxy.workers.serving();
            if known == count {
                return Ok(());
            }
            let deadline = patience.ends(known);
            // A timeout alone is never seen while there is always a change.
            let waited = tokio::time::timeout_at(deadline.into(), changes.changed()).await;
            if waited.is_err() || Instant::now() >= deadline {
                return Err(HarnessError::GaveUp(format!("a router to know {count} workers; it knows {known}")));
            }
        }
    }

    /// The listing of this life of a worker, once the router has it.
    pub(super) async fn listing(&self, key: &Key, life: &Incarnation) -> Result<Arc<Listing>, HarnessError> {
        let mut changes = self.proxy.workers.changes();
        let deadline = tokio::time::Instant::now() + GIVE_UP;
        loop {
            match self.proxy.workers.listing(key) {
                Some(listing) if listing.incarnation == *life => return Ok(listing),
                _ if tokio::time::timeout_at(deadline, changes.changed()).await.is_err() => {
                    return Err(HarnessError::GaveUp(format!("a router to know {key}")));
                }
                _ => {}
            }
        }
    }
}

/// When a listing's streams have to leave.
pub(super) async fn condemned(listing: Arc<Listing>) -> Option<Instant> {
    let mut fate = listing.fate();
    let moved = tokio::time::timeout(GIVE_UP, fate.wait_for(|fate| matches!(fate, Fate::Move(..)))).await;
    moved.is_ok().then(Instant::now)
}

/// How long it takes to choose a worker for a request, in microseconds.
pub(super) fn choice(workers: &Workers) -> Option<f64> {
    let begin = Instant::now();
    let chosen = workers.choose("Qwen/Qwen3-0.6B", &[], true);
    let took = begin.elapsed();
    chosen.is_some().then_some(took.max(Duration::from_nanos(1)).as_secs_f64() * 1e6)
}
