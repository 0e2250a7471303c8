//! What the engine says of itself: `grpc.health.v1`, else HTTP, else that it listens.
//!
//! One task for each life of a worker. It reports what changes, never what stays, with one
//! exception: every probe that is not answered, because the core counts those.

mod grpc;
mod http;
mod machine;
mod once;

use lastgasp_protocol::ClosedName as _;
use std::error::Error;
use std::io;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

use self::machine::Machine;
pub use self::once::{Asked, ask};
use super::proc::listeners::Held;
use super::proc::reach::Listens;
use super::proc::{self, listeners, tree};
use crate::config::HealthConfig;
use crate::core::{Evidence, Kind, ProcessId, WorkerId};
use crate::network::{Dialer, Namespace};

/// Where a worker's health is asked, and what has to be seen before an answer counts.
#[derive(Debug, Clone, Default)]
pub struct Place {
    /// The network namespace from which the address is asked. None: the daemon's own.
    pub namespace: Option<Namespace>,
    /// The worker's tree has to listen here first: in a namespace that it shares with others, an address says
    /// nothing about whose it is.
    pub listens: Option<Listens>,
}

/// The life of a worker whose health is asked.
#[derive(Debug, Clone)]
pub struct Life {
    /// Which worker.
    pub worker: WorkerId,
    /// Its root process.
    pub root: ProcessId,
    /// Its serving port.
    pub port: u16,
    /// It is known to have been serving already: an earlier daemon listed it. Then it is not given
    /// the patience of a starting engine, and one that hangs since before this daemon is noticed.
    pub served_before: bool,
    /// Where it is asked.
    pub place: Place,
}

/// Begins to ask, on the given runtime. Evidence goes to `evidence`, until the handle is dropped.
#[must_use = "dropping the handle ends the sensor"]
pub fn spawn(
    runtime: &Handle,
    life: Life,
    config: HealthConfig,
    evidence: mpsc::UnboundedSender<Evidence>,
) -> HealthHandle {
    let asked = Arc::new(Notify::new());
    let (summary, summaries) = watch::channel("starting".to_owned());
    let context = Context { life, evidence, asked: Arc::clone(&asked), summary };
    let task = runtime.spawn(async move { context.run(&config).await }).abort_handle();
    HealthHandle { task, asked, summary: summaries }
}

/// The running sensor of one life. Dropping it ends the sensor.
#[derive(Debug)]
pub struct HealthHandle {
    task: AbortHandle,
    asked: Arc<Notify>,
    summary: watch::Receiver<String>,
}

impl HealthHandle {
    /// Asks the engine now, within the configured deadline, and reports also that it answered.
    /// Requests that come before the question is put are one. Nothing is reported of an engine that
    /// has not begun to serve, or that has no health service.
    pub fn probe(&self) {
        self.asked.notify_one();
    }

    /// The state of the sensor in a few words, for people: `watch serving`.
    #[must_use]
    pub fn summary(&self) -> String {
        self.summary.borrow().clone()
    }

    /// The same, to be awaited.
    #[must_use]
    pub fn summaries(&self) -> watch::Receiver<String> {
        self.summary.clone()
    }
}

impl Drop for HealthHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What every source of health needs of the life that it speaks for.
struct Context {
    life: Life,
    evidence: mpsc::UnboundedSender<Evidence>,
    asked: Arc<Notify>,
    summary: watch::Sender<String>,
}

impl Context {
    async fn run(self, config: &HealthConfig) {
        self.proven(config.check_interval).await;
        if let Some(address) = &config.grpc {
            grpc::run(&self, address, config).await;
        }
        if let Some(address) = &config.http {
            http::run(&self, address, config).await;
        }
        self.listening(config.check_interval).await;
    }

    /// Waits until the worker itself listens where it has to be seen to listen. An earlier daemon has seen
    /// it of a life that it listed.
    async fn proven(&self, every: Duration) {
        let Some(listens) = self.life.place.listens.filter(|_| !self.life.served_before) else { return };
        let root = self.life.root;
        let mut tick = in_step(every);
        loop {
            tick.tick().await;
            if matches!(listens.held_by(&tree::with_descendants(root)), Ok(Held::ByTree)) {
                return;
            }
            self.say(format!("waits until processes of the worker alone listen on {}", listens.address));
        }
    }

    /// An engine without a health service serves once it listens. A listener of somebody else's, such
    /// as its predecessor's, does not count if that can be seen.
    async fn listening(&self, every: Duration) {
        let Life { root, port, .. } = &self.life;
        let (root, port) = (*root, *port);
        let why = self.summary.borrow().clone();
        let say = |what: &str| self.say(format!("{why}; {what} port {port}"));
        let mut tick = in_step(every);
        loop {
            tokio::select! {
                () = self.asked.notified() => {}
                _ = tick.tick() => {}
            }
            if !listeners::listening(Some(root.tgid), port).unwrap_or(false) {
                say("waits for a listener on");
                continue;
            }
            if listeners::owns_listener(&tree::with_descendants(root), port).unwrap_or(true) {
                say("listens on");
                self.report(Kind::Listening);
                return;
            }
            say("another process listens on");
        }
    }

    fn report(&self, kind: Kind) {
        let Life { worker, root, .. } = &self.life;
        let (worker, root) = (*worker, *root);
        tracing::debug!(worker = worker.0, %root, kind = kind.as_str(), "health evidence");
        // The receiver is the supervisor: if it is gone, so is the daemon.
        let _ = self.evidence.send(Evidence { worker, root, kind, at: proc::monotonic_now() });
    }

    /// Shows the summary, and logs it once: one that stays is not repeated.
    fn say(&self, summary: String) {
        if let Some(summary) = self.show(summary) {
            let Life { worker, root, .. } = &self.life;
            let (worker, root) = (*worker, *root);
            tracing::info!(worker = worker.0, %root, "health: {summary}");
        }
    }

    /// The same for what a person has to put right in the configuration.
    fn complain(&self, summary: String) {
        if let Some(summary) = self.show(summary) {
            let Life { worker, root, .. } = &self.life;
            let (worker, root) = (*worker, *root);
            tracing::warn!(worker = worker.0, %root, "health: {summary}");
        }
    }

    fn show(&self, summary: String) -> Option<String> {
        let changed = self.summary.send_if_modified(|shown| {
            let changed = *shown != summary;
            shown.clone_from(&summary);
            changed
        });
        changed.then_some(summary)
    }

    fn tell(&self, machine: &Machine) {
        if machine.is_misconfigured() {
            self.complain(machine.to_string());
        } else {
            self.say(machine.to_string());
        }
    }

    async fn asked(&self) {
        self.asked.notified().await;
    }

    fn dialer(&self) -> Dialer {
        Dialer::from(self.life.place.namespace.clone())
    }

    const fn root_tgid(&self) -> u32 {
        self.life.root.tgid
    }

    const fn served_before(&self) -> bool {
        self.life.served_before
    }
}

/// Ticks at once, and then at the moments at which all with this period tick: one wake-up of the thread
/// asks all workers, and few read what they answer.
fn in_step(period: Duration) -> Interval {
    static BEGIN: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
    let into = BEGIN.elapsed().as_nanos() % period.as_nanos().max(1);
    let now = Instant::now();
    let last = now.checked_sub(Duration::from_nanos(u64::try_from(into).unwrap_or(0))).unwrap_or(now);
    let mut tick = interval_at(last, period);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    tick
}

/// ECONNREFUSED.
fn is_refused(error: &(dyn Error + 'static)) -> bool {
    is_caused_by(error, |error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// What a connection needs on our side is not to be had (socket(2), connect(2)). That says nothing about
/// the engine.
fn is_ours(error: &(dyn Error + 'static)) -> bool {
    const WANTING: [i32; 5] = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EADDRNOTAVAIL];
    is_caused_by(error, |error| error.raw_os_error().is_some_and(|number| WANTING.contains(&number)))
}

/// Looks wherever in the chain of causes the HTTP stack has wrapped it.
fn is_caused_by(error: &(dyn Error + 'static), is: impl Fn(&io::Error) -> bool) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.downcast_ref::<io::Error>().is_some_and(&is) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Whether anybody listens on the port that refused us, seen from the engine's network namespace.
/// Where that cannot be seen it is taken to be so: a refusal alone is no verdict then.
fn still_listening(root: u32, port: u16) -> bool {
    match listeners::listening(Some(root), port) {
        Ok(listening) => listening,
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}
