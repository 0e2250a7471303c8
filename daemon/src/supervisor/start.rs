//! Start-up, in the order that loses nothing: attach to the kernel, look at `/proc`, open pidfds,
//! and only then write to NATS. And the end.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lastgasp_process::priority;
use tokio::sync::{mpsc, watch};

use crate::config::{Config, EbpfMode, Mode, WorkerConfig};
use crate::core::{Core, Policy, ProcessId, WorkerId, WorkerPolicy};
use crate::effects::deaths::{self, Archive, Deaths};
use crate::effects::discovery::{Ledger, Present, Registrar};
use crate::effects::lease::{self, LeaseEvent};
use crate::effects::nats::{self, Buckets, ConnectionState, NatsError};
use crate::effects::signals::{self, Signals};
use crate::effects::troubles::Troubles;
use crate::metrics::Metrics;
use crate::notify::Notifier;
use crate::notify::dynamo::Dynamo;
use crate::notify::infera::Infera;
use crate::open_files::{OpenFiles, TooFew};
use crate::privileges::{self, Needs, Reduced};
use crate::processes::Processes;
use crate::sensors::ebpf::{EbpfError, Events, KernelPrograms, LoadOptions, Ring};
use crate::sensors::health::{self, Life, Place};
use crate::sensors::kmsg::{Facilities, KMSG, Kmsg};
use crate::sensors::proc;
use crate::status::{NodeStatus, StatusError, StatusHub, StatusServer};

use super::declare::{Declarations, Origin};
use super::degraded::NoEbpf;
use super::looks::Looks;
use super::notifications::Notifications;
use super::report::Ready;
use super::sidecar::{Sidecar, SidecarOptions};
use super::slots::Slots;
use super::systemd::ServiceManager;
use super::{Inputs, Message, Supervisor, WorkerSlot, WorkersBucket, act, adopt};

/// How long the end may take.
const SHUTDOWN: Duration = Duration::from_millis(500);

/// Commands that wait for the supervisor. Who sends more of them waits too.
const COMMANDS: usize = 16;

/// What is chosen for one run, beside the configuration.
#[derive(Debug, Clone, Default)]
pub struct RunOptions {
    /// Written, atomically, once the sensors are attached and the first scan is over.
    pub ready_file: Option<PathBuf>,
    /// What is odd about the configuration, and what cannot be done as it asks.
    pub warnings: Vec<String>,
    /// Set in the pod of one engine.
    pub sidecar: Option<SidecarOptions>,
}

/// Why the daemon ends, or cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// `ebpf.enabled = "required"`, and it cannot be had.
    #[error("ebpf.enabled is \"required\", but {0}")]
    Ebpf(#[from] EbpfError),
    /// The connection cannot even be tried.
    #[error(transparent)]
    Nats(#[from] NatsError),
    /// `RLIMIT_NOFILE`.
    #[error(transparent)]
    OpenFiles(#[from] TooFew),
    /// Another daemon holds this node's name.
    #[error("refused: {0}")]
    Refused(String),
    /// The status socket or the metrics address cannot be had.
    #[error(transparent)]
    Status(#[from] StatusError),
    /// A sidecar's engine was lost, and it is withdrawn: kubelet restarts both.
    #[error("the engine was lost ({0}), and its worker is withdrawn")]
    EngineLost(String),
    /// A sidecar's engine did not begin to serve in time.
    #[error(
        "the engine did not serve within {} s; look at its log, or raise --startup-deadline", .0.as_secs_f64()
    )]
    NeverServed(Duration),
    /// A runtime, a thread, a signal handler or the ready file.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
}

impl RunError {
    /// See [`crate::cli::Exit`].
    #[must_use]
    pub const fn exit(&self) -> crate::cli::Exit {
        match self {
            Self::Refused(_) => crate::cli::Exit::Unavailable,
            Self::Nats(NatsError::Login(_)) | Self::OpenFiles(_) => crate::cli::Exit::Config,
            Self::NeverServed(_) => crate::cli::Exit::NotYet,
            Self::Ebpf(_) | Self::Nats(_) | Self::Status(_) | Self::EngineLost(_) | Self::Io { .. } => {
                crate::cli::Exit::Failed
            }
        }
    }
}

fn io(what: &'static str) -> impl FnOnce(std::io::Error) -> RunError {
    move |source| RunError::Io { what, source }
}

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// See [`RunError`]. NATS that is not there is no error: it is waited for.
pub fn run(config: Config, mut options: RunOptions) -> Result<(), RunError> {
    let open_files = OpenFiles::raise(config.workers.len())?;
    // Loading needs capabilities, which are per thread: before there are others.
    let load = || KernelPrograms::load(&LoadOptions::of(&config.ebpf));
    let mut ebpf = match config.ebpf.enabled {
        EbpfMode::Off => Err(NoEbpf::switched_off()),
        EbpfMode::Auto => load().map_err(NoEbpf::from),
        EbpfMode::Required => Ok(load()?),
    };
    if let Err(error) = priority::short_slice() {
        tracing::debug!(%error, "the kernel does not give a short scheduler slice");
    }
    if config.realtime
        && let Err(error) = priority::realtime()
    {
        let text = format!(
            "priority is \"realtime\", but that is not permitted ({error}): give lastgasp CAP_SYS_NICE, or LimitRTPRIO=1"
        );
        tracing::warn!("{text}");
        options.warnings.push(text);
    }
    // Opening it may take a capability, reading it then takes none.
    let kmsg = match options.sidecar {
        Some(_) => Err(std::io::Error::other("a sidecar does not read it")),
        None => Kmsg::open(Facilities::Kernel),
    };
    let severing = config.declare.sever || config.workers.iter().any(|worker| worker.sever.enabled);
    let needs = Needs { severing, declarations: config.declare.enabled };
    let reduced = give_up_privileges(needs, ebpf.as_mut().ok().map(|(programs, _)| programs))?;
    let side = Side::start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io("the main runtime"))?;
    let outcome =
        runtime.block_on(main(Arc::new(config), options, open_files, ebpf, kmsg, reduced, side.handle.clone()));
    runtime.shutdown_timeout(SHUTDOWN);
    outcome
}

/// Down to what the rest of the run needs. Threads that come later have no more.
fn give_up_privileges(needs: Needs, programs: Option<&mut KernelPrograms>) -> Result<Reduced, RunError> {
    let maps_work = || match programs.map(KernelPrograms::check_access) {
        Some(Err(error)) => {
            tracing::debug!(%error, "maps cannot be changed without CAP_BPF");
            false
        }
        Some(Ok(())) | None => true,
    };
    let reduced = privileges::reduce(needs, maps_work)
        .map_err(|error| io("giving up capabilities")(std::io::Error::other(error.to_string())))?;
    let names = |list: &[caps::Capability]| list.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    tracing::info!(held = names(&reduced.held), dropped = names(&reduced.dropped), "capabilities");
    Ok(reduced)
}

/// The second thread: health checks, status and metrics.
struct Side {
    handle: tokio::runtime::Handle,
    /// Dropped, the thread ends and everything on it.
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl Side {
    fn start() -> Result<Self, RunError> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io("the side runtime"))?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        std::thread::Builder::new()
            .name("lastgasp-side".to_owned())
            .spawn(move || {
                let _ = runtime.block_on(stopped);
                runtime.shutdown_background();
            })
            .map_err(io("the side thread"))?;
        Ok(Self { handle, _stop: stop })
    }
}

async fn main(
    config: Arc<Config>,
    options: RunOptions,
    open_files: OpenFiles,
    ebpf: Result<(KernelPrograms, Ring), NoEbpf>,
    kmsg: std::io::Result<Kmsg>,
    reduced: Reduced,
    side: tokio::runtime::Handle,
) -> Result<(), RunError> {
    let shutdown = Shutdown::new()?;
    let metrics = Metrics::new();
    let hub = StatusHub::new(NodeStatus { node: config.node.to_string(), ..NodeStatus::default() });
    let (commands_tx, commands) = mpsc::channel(COMMANDS);
    let server = StatusServer::bind(&config.status, hub.clone(), metrics.clone(), commands_tx)?;
    let listen = server.listen();
    side.spawn(async move {
        if let Err(error) = server.serve().await {
            tracing::error!(%error, "status server ended: `lastgasp status` and /metrics get no answer");
        }
    });

    let troubles = Troubles::default();
    let (client, connection) = nats::connect(&config.nats, &config.node, troubles.clone()).await?;
    let (workers_bucket, workers_opened) = watch::channel(None);
    let (registrars, registrars_opened): (WorkersBucket, _) = watch::channel(None);
    let (nodes_bucket, nodes_opened) = watch::channel(None);
    let (context_tx, context) = watch::channel(None);
    let (opened_tx, mut opened) = watch::channel(None);
    let unknown = Present { asked: tokio::time::Instant::now(), keys: HashSet::new() };
    let (present_tx, present) = watch::channel(Arc::new(unknown));
    let (routers_tx, routers) = watch::channel(HashSet::new());
    let (lease_tx, mut lease_events) = mpsc::unbounded_channel();
    let (leases_tx, leases) = mpsc::unbounded_channel();
    let (messages, message_inbox) = mpsc::unbounded_channel();
    let (exits_tx, exits) = mpsc::unbounded_channel();
    let (outcomes_tx, outcomes) = mpsc::unbounded_channel();
    let (answers_tx, answers) = mpsc::unbounded_channel();
    let (health_tx, health) = mpsc::unbounded_channel();

    let recalled = {
        let (side, node, hub) = (side.clone(), config.node.clone(), hub.clone());
        move |context| side.spawn(deaths::recall(context, node, move |id, json| hub.death(id, json)))
    };
    match config.mode {
        Mode::Enforce => {
            let own_lease = lease::own_lease(config.node.clone()).map_err(io("/proc/sys/kernel/random/boot_id"))?;
            tokio::spawn(lease::keep(own_lease, config.lease_ttl, nodes_opened, troubles.clone(), lease_tx));
            tokio::spawn(nats::keep_open(
                client.clone(),
                config.replicas,
                connection.clone(),
                troubles.clone(),
                opened_tx,
            ));
            tokio::spawn(async move {
                let Ok(found) = opened.wait_for(Option::is_some).await.map(|opened| opened.clone()) else { return };
                let Some((context, Buckets { workers, nodes, routers })) = found else { return };
                recalled(context.clone());
                context_tx.send_replace(Some(context));
                nodes_bucket.send_replace(Some(nodes));
                tokio::spawn(signals::follow_routers(routers, routers_tx));
                // Records are touched once the node's name is ours, not before.
                while let Some(event) = lease_events.recv().await {
                    if event == LeaseEvent::Held && workers_bucket.borrow().is_none() {
                        workers_bucket.send_replace(Some(workers.clone()));
                    }
                    if leases_tx.send(event).is_err() {
                        return;
                    }
                }
            });
        }
        // Nothing is made and nothing is written; what is there is read.
        Mode::Observe => {
            let (routers_bucket, mut routers_opened) = watch::channel(None);
            let (troubles, up) = (troubles.clone(), connection.clone());
            tokio::spawn(nats::look_for(client.clone(), up, troubles, workers_bucket, routers_bucket));
            tokio::spawn(async move {
                let Ok(found) = routers_opened.wait_for(Option::is_some).await.map(|found| found.clone()) else {
                    return;
                };
                if let Some(routers) = found {
                    signals::follow_routers(routers, routers_tx).await;
                }
            });
            let (context, mut connection) = (nats::context(client.clone()), connection.clone());
            tokio::spawn(async move {
                if connection.wait_for(|connection| *connection == ConnectionState::Connected).await.is_ok() {
                    recalled(context.clone());
                    context_tx.send_replace(Some(context));
                }
            });
        }
    }
    let own_records = adopt::OwnRecords {
        node: config.node.clone(),
        bucket: workers_opened,
        connection: connection.clone(),
        troubles: troubles.clone(),
        present: present_tx,
        messages: messages.clone(),
    };
    tokio::spawn(own_records.follow());
    let signals = Signals::new(client, routers.clone(), answers_tx, metrics.clone())
        .await
        .map_err(|error| io("subscribing to answers")(std::io::Error::other(error)))?;

    let (programs, events, no_ebpf) = match ebpf {
        Ok((programs, ring)) => match Events::new(ring) {
            Ok(events) => (Some(programs), Some(events), None),
            Err(error) => (None, None, Some(NoEbpf::broken(format!("the ring buffer cannot be polled: {error}")))),
        },
        Err(no_ebpf) => (None, None, Some(no_ebpf)),
    };
    if let Some(no_ebpf) = &no_ebpf {
        no_ebpf.log();
    }
    let kmsg_off = follow_kmsg(kmsg, &side, messages.clone());
    let config_workers = config.workers.clone();
    let inferas = inferas(&config, &side, &metrics, &messages)?;
    let dynamos = dynamos(&config, &side, &metrics, &messages);
    let mut supervisor = Supervisor {
        boot_id: proc::boot_id().map_err(io("/proc/sys/kernel/random/boot_id"))?,
        core: Core::new(Policy {
            hold_down: config.policy.hold_down,
            recheck_after: config.policy.near_certain_recheck,
            soft_withdrawals_per_minute: config.policy.soft_withdrawals_per_minute,
        }),
        processes: Processes::default(),
        programs,
        events,
        workers: Slots::new(),
        outcomes: outcomes_tx,
        timers: HashMap::new(),
        deaths: Deaths::new(config.node.clone()),
        actions: Vec::new(),
        declarations: Declarations::new(&config.declare, &side),
        signals,
        notifications: Notifications::new(Notifier::start(&config.notify, inferas, dynamos, &side, &metrics)),
        archive: Archive::new(context, config.mode == Mode::Observe, metrics.clone()),
        ledger: Ledger { bucket: registrars_opened, connection: connection.clone(), present },
        troubles,
        inherited: None,
        registrars,
        connection,
        lease: match config.mode {
            Mode::Enforce => LeaseEvent::Waiting("not connected yet".to_owned()),
            Mode::Observe => LeaseEvent::NotTaken,
        },
        routers,
        hub,
        metrics,
        side,
        messages,
        health_tx,
        outgoing: Vec::new(),
        due_notes: Vec::new(),
        observations: Vec::with_capacity(64),
        process_looks: Looks::default(),
        listener_looks: Looks::default(),
        exits: exits_tx,
        without_pidfd: Vec::new(),
        open_files,
        publish_at: None,
        scanning: false,
        rescan: false,
        ticks: 0,
        dropped: HashMap::new(),
        started_at: jiff::Timestamp::now(),
        no_ebpf,
        reduced,
        kmsg_off,
        ready: Some(Ready { file: options.ready_file, listen }),
        unwritten: None,
        warnings: options.warnings,
        sidecar: options.sidecar.map(|options| Sidecar::new(options, proc::monotonic_now())),
        publications: tokio::task::JoinSet::new(),
        service_manager: ServiceManager::new(),
        config,
    };
    let inputs = Inputs { messages: message_inbox, health, outcomes, answers, commands, leases, exits };
    for worker in config_workers {
        supervisor.add_worker(Arc::new(worker), None);
    }
    supervisor.describe_probes();
    supervisor.run(inputs, shutdown).await
}

/// One task for each Infera; in observe mode it sends nothing and receives nothing.
fn inferas(
    config: &Config,
    side: &tokio::runtime::Handle,
    metrics: &Metrics,
    messages: &mpsc::UnboundedSender<Message>,
) -> Result<Vec<Infera>, RunError> {
    if config.mode == Mode::Observe {
        return Ok(Vec::new());
    }
    let start = |infera| {
        let messages = messages.clone();
        let report = Arc::new(move |report| drop(messages.send(Message::Bridge(report))));
        Infera::start(infera, &config.node, side, metrics, report)
    };
    Ok(config.infera.iter().map(start).collect::<Result<_, _>>()?)
}

/// One task for each Dynamo whose discovery is changed; in observe mode it is not even read.
fn dynamos(
    config: &Config,
    side: &tokio::runtime::Handle,
    metrics: &Metrics,
    messages: &mpsc::UnboundedSender<Message>,
) -> Vec<Dynamo> {
    let start = |dynamo| {
        let messages = messages.clone();
        let report = Arc::new(move |report| drop(messages.send(Message::Bridge(report))));
        Dynamo::start(dynamo, side, metrics, report)
    };
    config.dynamo.iter().filter(|_| config.mode == Mode::Enforce).map(start).collect()
}

/// Reads the kernel's log on the side runtime: it may be noisy. Returns why not, if it cannot be read.
fn follow_kmsg(
    kmsg: std::io::Result<Kmsg>,
    side: &tokio::runtime::Handle,
    messages: mpsc::UnboundedSender<Message>,
) -> Option<String> {
    match kmsg {
        Ok(log) => {
            side.spawn(async move {
                if let Err(error) = log.follow(|entry| messages.send(Message::Kmsg(entry)).is_ok()).await {
                    tracing::error!(%error, "the daemon no longer reads the kernel's log: GPU faults go unseen");
                }
            });
            None
        }
        Err(error) => {
            tracing::warn!(%error, "the daemon cannot read {KMSG}: GPU faults go unseen, and a certificate does not say what ran out of memory");
            Some(format!("{KMSG}: {error}"))
        }
    }
}

pub(super) fn policy(worker: &WorkerConfig) -> WorkerPolicy {
    WorkerPolicy {
        drain_window: worker.drain_window,
        hang_window: worker.health.hang_window,
        on_not_serving: worker.on_not_serving,
        registers_itself: worker.writer == lastgasp_protocol::Writer::Worker,
        has_liveness: worker.health.has_liveness(),
    }
}

impl Supervisor {
    /// A worker becomes known: by the configuration, or by a declaration.
    pub(super) fn add_worker(&mut self, config: Arc<WorkerConfig>, declared: Option<Origin>) -> WorkerId {
        let worker = self.workers.next();
        let registrar = Registrar::spawn(
            worker,
            lastgasp_protocol::worker_key(&self.config.node, &config.name),
            self.ledger.clone(),
            self.outcomes.clone(),
        );
        self.core.add_worker(worker, policy(&config));
        self.notifications.known(&config);
        self.workers.add(WorkerSlot {
            stuck: String::new(),
            oom_victim: None,
            reset_probe: None,
            config,
            declared,
            container: None,
            place: Place::default(),
            proof: act::Proof::default(),
            companion: None,
            orphans: Vec::new(),
            over_since: None,
            port: None,
            withdrawing: false,
            registrar,
            health: None,
            claimed: None,
            former: HashSet::new(),
            revision: 0,
            epoch: 0,
            listed: false,
            commanded: String::new(),
            taken_back: false,
            death: None,
            incarnation: String::new(),
            evidence: None,
            signalled: None,
            ending: None,
            reason: String::new(),
            since: jiff::Timestamp::now(),
        })
    }

    /// Begins to ask a worker's health source about this life.
    pub(super) fn start_health(&mut self, worker: WorkerId, root: ProcessId, served_before: bool) {
        let WorkerSlot { config, place, .. } = &self.workers[worker];
        let life = Life { worker, root, port: config.port, served_before, place: place.clone() };
        let handle = health::spawn(&self.side, life, config.health.clone(), self.health_tx.clone());
        self.workers[worker].health = Some(handle);
    }
}

/// The signals that ask the daemon to end.
pub(super) struct Shutdown {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Shutdown {
    fn new() -> Result<Self, RunError> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            terminate: signal(SignalKind::terminate()).map_err(io("the SIGTERM handler"))?,
            interrupt: signal(SignalKind::interrupt()).map_err(io("the SIGINT handler"))?,
        })
    }

    /// Waits for the next one; its name.
    pub(super) async fn asked(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
