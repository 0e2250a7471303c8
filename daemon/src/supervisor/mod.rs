//! The loop that joins sensors, core and effects.
//!
//! One task on one thread, together with the connection to NATS: from the ring buffer to the
//! published signal nothing changes threads and nothing waits. Health checks, status and metrics
//! run on a second thread; `/proc` is read on blocking threads.

mod act;
mod adopt;
mod carry_out;
mod command;
mod declare;
mod degraded;
mod gpu;
mod hints;
mod looks;
mod notifications;
mod report;
mod scan;
mod sidecar;
mod slots;
mod start;
mod systemd;

use lastgasp_protocol::ClosedName as _;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use lastgasp_ebpf::EventFlags;
use lastgasp_protocol::kv::Bucket;
use lastgasp_protocol::{Container, Incarnation, Name, WorkerRecord, WorkerState, Writer};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};

use crate::config::{Config, WorkerConfig};
use crate::core::{Core, Effect, Evidence, Exit, Kind, Nanos, Process, ProcessId, Timer, WorkerId};
use crate::effects::actions::ActionReport;
use crate::effects::deaths::{Archive, Deaths};
use crate::effects::discovery::{Ledger, Registrar, WriteOutcome};
use crate::effects::lease::LeaseEvent;
use crate::effects::nats::ConnectionState;
use crate::effects::signals::{Answered, Signals};
use crate::effects::troubles::Troubles;
use crate::engines::Names;
use crate::losses::Loss;
use crate::metrics::Metrics;
use crate::metrics::OUTDATED;
use crate::notify::BridgeReport;
use crate::open_files::OpenFiles;
use crate::privileges::Reduced;
use crate::processes::{Observation, Processes};
use crate::sensors::ebpf::{Events, KernelPrograms};
use crate::sensors::health::{HealthHandle, Place};
use crate::sensors::kmsg;
use crate::sensors::pidfd::{PidFd, PidfdError};
use crate::sensors::proc::{self, listeners};
use crate::status::StatusHub;
use crate::status::control::Request;

use looks::{Begin, Looks};
use scan::ProcessLook;
pub use sidecar::{SidecarError, SidecarOptions};
use slots::Slots;
pub use start::{RunError, RunOptions, run};

/// How often the ring buffer is read without a wake-up, losses are counted, workers without a
/// process are looked for, and status is published.
const TICK: Duration = Duration::from_secs(1);
/// How long after a change the status is published: what comes together is published together.
const SETTLE_STATUS: Duration = Duration::from_millis(20);
/// Events that are taken from the ring before anything else has its turn.
const EVENTS_A_TURN: usize = 512;
/// Other inputs that have their turn before the ring has its next one.
const OTHERS_A_TURN: usize = 64;
/// With kernel events the tree is only reconciled every so many ticks.
const TREE_TICKS: u64 = 10;

/// What the supervisor keeps of one worker, beside what the core decides about it.
struct WorkerSlot {
    config: Arc<WorkerConfig>,
    /// It was declared by its own process, from this container.
    declared: Option<declare::Origin>,
    /// Where its root runs.
    container: Option<Container>,
    /// Where its health is asked.
    place: Place,
    /// What is known of whether its root's tree is the worker.
    proof: act::Proof,
    /// The process whose connections are destroyed with the worker's own.
    companion: Option<ProcessId>,
    /// What of lives that are over is still there, as last looked at.
    orphans: Vec<(ProcessId, Arc<str>)>,
    /// Since when there has been no life of it that is not over.
    over_since: Option<Nanos>,
    /// The record is to go, and that is not acknowledged yet.
    withdrawing: bool,
    registrar: Registrar,
    health: Option<HealthHandle>,
    /// The record as its worker wrote it, for a worker that registers itself.
    claimed: Option<WorkerRecord>,
    /// Processes of lives that are over. What is left of them is no successor.
    former: HashSet<ProcessId>,
    /// Network namespace and port of the listener that the kernel watches.
    port: Option<(u32, u16)>,
    /// Of the record, as last acknowledged.
    revision: u64,
    epoch: u64,
    listed: bool,
    /// Why it was taken out of service, by whom, as its record says it.
    commanded: String,
    /// Its present life was taken out of service and into it again.
    taken_back: bool,
    /// The certificate under which it is being withdrawn.
    death: Option<String>,
    incarnation: String,
    evidence: Option<(&'static str, Nanos)>,
    /// The life and the listing of it that routers were signalled to move from last.
    signalled: Option<(Incarnation, u64)>,
    ending: Option<carry_out::Ending>,
    reason: String,
    /// What keeps its processes while it does not answer.
    stuck: String,
    /// Its process that the OOM killer chose first, and when.
    oom_victim: Option<(Process, Nanos)>,
    /// When a reset of its port has last asked for its health.
    reset_probe: Option<Nanos>,
    since: jiff::Timestamp,
}

/// What other tasks tell the supervisor.
enum Message {
    /// A scan of `/proc` is complete.
    Scanned(Vec<scan::Sighting>),
    /// A process whose names have changed was looked at, or is gone.
    LookedAt(WorkerId, ProcessId, Option<ProcessLook>),
    /// The pause before the next look at a process is over.
    LookAgain(ProcessId),
    /// The port of a closed listener was looked at. With evidence, if nobody listens there any more.
    ListenerLookedAt(WorkerId, Option<Evidence>),
    /// The pause before the next look at a worker's port is over.
    ListenerAgain(WorkerId),
    /// The kernel's log said something.
    Kmsg(kmsg::LogEntry),
    /// It was looked who holds the GPU of a fault that names no process.
    GpuHeld(gpu::Fault, Option<Vec<(WorkerId, ProcessId)>>),
    /// A process whose end was announced was looked at.
    Rechecked(WorkerId, ProcessId, Process, scan::Presence),
    /// What an earlier daemon left was read.
    Inherited(Box<adopt::Inherited>),
    /// Something was done about the processes of a life that was lost, known by its root.
    Acted(WorkerId, ProcessId, Vec<ActionReport>),
    /// A bridge reports what it did about a worker.
    Bridge(BridgeReport),
    /// Declarations were looked for.
    Declared(declare::ClaimsLook),
    /// It was looked whether a process of a root's tree listens where the worker does.
    Served(WorkerId, ProcessId, bool),
    /// A worker's own record was read.
    Claimed(WorkerRecord),
    /// Something that is no record was found under the key of this worker.
    Defaced(Name),
    /// Something was lost on its way here.
    Lost(Loss),
    /// A claim was checked against the process that should have made it.
    Proven(WorkerId, ProcessId, WorkerRecord),
}

struct Supervisor {
    config: Arc<Config>,
    boot_id: String,
    core: Core,
    processes: Processes,
    programs: Option<KernelPrograms>,
    events: Option<Events>,
    workers: Slots,
    timers: HashMap<(WorkerId, Timer), Nanos>,
    deaths: Deaths,
    actions: Vec<act::Pending>,
    declarations: declare::Declarations,
    signals: Signals,
    notifications: notifications::Notifications,
    archive: Archive,
    ledger: Ledger,
    troubles: Troubles,
    /// What an earlier daemon left, until the first scan is over.
    inherited: Option<adopt::Inherited>,
    /// Lets the registrars begin.
    registrars: WorkersBucket,
    connection: watch::Receiver<ConnectionState>,
    lease: LeaseEvent,
    routers: watch::Receiver<HashSet<Name>>,
    hub: StatusHub,
    metrics: Metrics,
    side: tokio::runtime::Handle,
    messages: mpsc::UnboundedSender<Message>,
    outcomes: mpsc::UnboundedSender<(WorkerId, WriteOutcome)>,
    health_tx: mpsc::UnboundedSender<Evidence>,
    /// What this turn of the loop decided, sent together at its end.
    outgoing: Vec<carry_out::Outgoing>,
    /// Notes that are written once that has left, with the time of each decision.
    due_notes: Vec<(Effect, Nanos)>,
    observations: Vec<Observation>,
    /// Looks at processes whose names change.
    process_looks: Looks<ProcessId, ()>,
    /// Looks at the ports of workers whose listeners close, and what the last event was evidence of.
    listener_looks: Looks<WorkerId, (u16, Evidence)>,
    /// Where pidfds report.
    exits: mpsc::UnboundedSender<(ProcessId, Exit)>,
    /// Critical processes that have no pidfd.
    without_pidfd: Vec<ProcessId>,
    open_files: OpenFiles,
    /// When a change is to be seen in the status.
    publish_at: Option<Instant>,
    scanning: bool,
    rescan: bool,
    ticks: u64,
    dropped: HashMap<&'static str, u64>,
    started_at: jiff::Timestamp,
    no_ebpf: Option<degraded::NoEbpf>,
    reduced: Reduced,
    /// Why the kernel's log is not read, if so.
    kmsg_off: Option<String>,
    /// Taken when the first scan is over.
    ready: Option<report::Ready>,
    /// Its ready file, as long as it could not be written.
    unwritten: Option<report::Unwritten>,
    warnings: Vec<String>,
    /// Set in the pod of one engine.
    sidecar: Option<sidecar::Sidecar>,
    /// Certificates on their way to the server.
    publications: tokio::task::JoinSet<()>,
    service_manager: systemd::ServiceManager,
}

/// What comes in from tasks that the supervisor started.
struct Inputs {
    messages: mpsc::UnboundedReceiver<Message>,
    health: mpsc::UnboundedReceiver<Evidence>,
    outcomes: mpsc::UnboundedReceiver<(WorkerId, WriteOutcome)>,
    answers: mpsc::UnboundedReceiver<Answered>,
    commands: mpsc::Receiver<Request>,
    leases: mpsc::UnboundedReceiver<LeaseEvent>,
    /// Processes whose pidfd became readable.
    exits: mpsc::UnboundedReceiver<(ProcessId, Exit)>,
}

impl Supervisor {
    /// Runs until `shutdown` resolves, or somebody else turns out to hold this node's name.
    async fn run(mut self, mut inputs: Inputs, mut shutdown: start::Shutdown) -> Result<(), RunError> {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // How many others have their turn before the ring, which had its own and still holds events.
        let mut others = 0_usize;
        loop {
            let due = self.next_timer();
            others = others.saturating_sub(1);
            tokio::select! {
                biased;
                readable = ring_readable(self.events.as_ref()), if others == 0 => {
                    if !readable {
                        self.lose_ring();
                    } else if self.drain_ring() {
                        others = OTHERS_A_TURN;
                    }
                }
                Some((id, exit)) = inputs.exits.recv() => self.exited(id, exit),
                Some(evidence) = inputs.health.recv() => self.evidence(evidence),
                Some(message) = inputs.messages.recv() => self.message(message),
                Some((worker, outcome)) = inputs.outcomes.recv() => self.outcome(worker, outcome),
                Some(answered) = inputs.answers.recv() => self.answered(&answered),
                Some(lease) = inputs.leases.recv() => self.leased(lease)?,
                Some(request) = inputs.commands.recv() => self.command(request),
                () = tokio::time::sleep_until(due) => self.fire_timers(),
                _ = tick.tick() => self.tick(),
                () = tokio::time::sleep_until(self.publish_at.unwrap_or(due)), if self.publish_at.is_some() => {
                    self.publish_status();
                }
                // Nothing else is due.
                () = tokio::task::yield_now(), if others > 0 => others = 0,
                signal = shutdown.asked() => {
                    self.service_manager.stopping();
                    if !self.leave() {
                        tracing::info!("{signal}: ending; healthy workers stay listed");
                        break;
                    }
                    tracing::info!("{signal}: ending when the engine has left");
                }
            }
            self.send_outgoing();
            if !self.due_notes.is_empty() {
                // Registrars and the connection to NATS run first.
                tokio::task::yield_now().await;
                self.tell_people();
                self.publish_soon();
            }
            self.settle_certificates();
            if let Some(end) = self.sidecar_end() {
                self.publish_status();
                return end;
            }
        }
        self.publish_status();
        self.notifications.end();
        Ok(())
    }

    /// From the ring buffer to what the core wants done. True: there may be more.
    fn drain_ring(&mut self) -> bool {
        let Some(events) = self.events.as_mut() else { return false };
        let (processes, observations) = (&mut self.processes, &mut self.observations);
        let mut unwatched = 0;
        let drained = events.drain(EVENTS_A_TURN, |event| {
            unwatched += u64::from(event.flags.contains(EventFlags::NOT_WATCHED));
            observations.extend(processes.event(event));
        });
        if unwatched > 0 {
            self.metrics.lose(Loss::WatchFork, unwatched);
        }
        if drained.undecodable > 0 {
            self.metrics.lose(Loss::Event, drained.undecodable as u64);
        }
        let mut observations = std::mem::take(&mut self.observations);
        for one in observations.drain(..) {
            self.observed(one);
        }
        // The buffer is kept, so that the next burst finds its room.
        self.observations = observations;
        self.look_at_strangers();
        drained.more
    }

    fn lose_ring(&mut self) {
        self.events = None;
        for (program, _) in self.programs.take().iter().flat_map(|programs| programs.states()) {
            self.metrics.kernel_program_attached.with_label_values(&[program.as_str()]).set(0);
        }
        let no_ebpf = degraded::NoEbpf::broken("the ring buffer cannot be polled any more".to_owned());
        no_ebpf.log();
        self.no_ebpf = Some(no_ebpf);
    }

    fn observed(&mut self, observation: Observation) {
        match observation {
            Observation::Evidence(evidence) => self.evidence(evidence),
            Observation::Critical { worker: _, root: _, id } => self.watch_critical(id),
            Observation::LookAt(id) => {
                let Some(worker) = self.processes.get(id).map(|tracked| tracked.worker) else { return };
                let begin = self.process_looks.ask(id, worker, ());
                self.look_at_processes(begin);
            }
            Observation::Executed(id) => self.executed(id),
            Observation::StrangerExecuted(id) => self.declarations.stranger_executed(id.tgid),
            Observation::SupervisorSignalled(evidence) => {
                for evidence in evidence {
                    self.evidence(evidence);
                }
            }
            Observation::TcpReset { worker, root, direction, reason, peer, count, at } => {
                self.tcp_reset(hints::Reset { worker, root, direction, reason, peer, count, at });
            }
            Observation::Rescan(_) => self.rescan = true,
            Observation::ListenerClosed { worker, root, port, exiting, at } => {
                let evidence = Evidence { worker, root, kind: Kind::ListenerClosed { exiting }, at };
                let begin = self.listener_looks.ask(worker, worker, (port, evidence));
                self.look_at_listeners(begin);
            }
        }
    }

    /// Looks, on blocking threads, at a process whose names have changed, and at those that had to wait.
    fn look_at_processes(&mut self, begin: Option<Begin<ProcessId, ()>>) {
        let mut next = begin;
        while let Some(Begin { key: id, worker, what: () }) = next.or_else(|| self.process_looks.next()) {
            let messages = self.messages.clone();
            tokio::task::spawn_blocking(move || {
                let _ = messages.send(Message::LookedAt(worker, id, ProcessLook::at(id)));
            });
            next = None;
        }
    }

    /// The same at the port of a worker one of whose listeners was closed.
    fn look_at_listeners(&mut self, begin: Option<Begin<WorkerId, (u16, Evidence)>>) {
        let mut next = begin;
        while let Some(Begin { key: worker, what: (port, evidence), .. }) = next.or_else(|| self.listener_looks.next())
        {
            let messages = self.messages.clone();
            tokio::task::spawn_blocking(move || {
                // Where it cannot be looked up, the process evidence has to do.
                let none_left = listeners::listening(Some(evidence.root.tgid), port).is_ok_and(|listening| !listening);
                let _ = messages.send(Message::ListenerLookedAt(worker, none_left.then_some(evidence)));
            });
            next = None;
        }
    }

    /// Sends a message once a pause is over.
    fn send_after(&self, pause: Option<Duration>, message: Message) {
        if let Some(pause) = pause {
            let messages = self.messages.clone();
            tokio::spawn(async move {
                tokio::time::sleep(pause).await;
                let _ = messages.send(message);
            });
        }
    }

    /// A process of a worker's tree was looked at; its parent's names tell whether it has its own.
    fn seen(&mut self, worker: WorkerId, looked: &ProcessLook) {
        let ProcessLook { info, users, parent } = looked;
        let parent = parent.as_ref().map(|parent| Names { comm: &parent.comm, cmdline: &parent.cmdline });
        let names = Names { comm: &info.comm, cmdline: &info.cmdline };
        if let Some(observation) = self.processes.seen(worker, info.id, *users, parent, names) {
            self.observed(observation);
        }
    }

    /// Evidence goes to the core, and what it wants is carried out.
    fn evidence(&mut self, evidence: Evidence) {
        let Evidence { worker, root, kind, at } = &evidence;
        if self.processes.root(*worker) != Some(*root) {
            self.metrics.evidence.with_label_values(&[OUTDATED]).inc();
            return;
        }
        let effects = self.core.evidence(&evidence, proc::monotonic_now());
        self.carry_out(effects, *at);
        self.metrics.evidence.with_label_values(&[kind.as_str()]).inc();
        self.workers[*worker].evidence = Some((kind.as_str(), *at));
        self.deaths.evidence(*worker, kind, *at);
        match kind {
            Kind::ProbeUnanswered => self.note_process_states(*worker, *at),
            Kind::OomVictim { process } => {
                // The first: others of the tree may follow it.
                let chosen = &mut self.workers[*worker].oom_victim;
                if chosen.as_ref().is_none_or(|(_, then)| at.since(*then) > hints::LOG_LAG) {
                    *chosen = Some((process.clone(), *at));
                }
            }
            Kind::ProbeAnswered => self.workers[*worker].stuck.clear(),
            Kind::Serving { .. } => {
                self.workers[*worker].stuck.clear();
                // All of its processes are there now, and no event has named those that came since the last look.
                if self.programs.is_none() {
                    self.rescan = true;
                    self.scan_if_wanted();
                }
            }
            _ => {}
        }
    }

    /// A critical process is there: its pidfd is the cross-check, and the fallback.
    fn watch_critical(&mut self, id: ProcessId) {
        let Some(tracked) = self.processes.get(id) else { return };
        let (worker, root) = (tracked.worker, tracked.root);
        tracing::info!(worker = %self.name(worker), tgid = id.tgid, title = %tracked.title, "critical process");
        if id != root {
            self.titled(worker, root);
        }
        if let Err(error) = self.watch_by_pidfd(id) {
            tracing::error!(
                %error, worker = %self.name(worker), tgid = id.tgid,
                "no pidfd for a critical process: the daemon looks at it every second until it has one"
            );
            self.metrics.lose(Loss::Pidfd, 1);
            self.without_pidfd.push(id);
        }
        self.processes.runs(id, proc::exe(id.tgid));
        if self.workers[worker].config.writer == Writer::Daemon
            && let Some(listing) = self.core.serving(worker)
        {
            // Its record says which processes it has.
            let list = Effect::List { listing, state: WorkerState::Serving, drain_for: None };
            self.carry_out(vec![list], proc::monotonic_now());
        }
        if let Some(evidence) = self.processes.critical_seen(id, proc::monotonic_now()) {
            self.evidence(evidence);
        }
    }

    /// Fails where there is no descriptor for it; that it is gone already is no failure.
    fn watch_by_pidfd(&self, id: ProcessId) -> Result<(), PidfdError> {
        let place = self.open_files.place(self.workers.len()).ok_or(PidfdError::TooManyFiles(id))?;
        match PidFd::open(id) {
            Ok(pidfd) => {
                let exits = self.exits.clone();
                tokio::spawn(async move {
                    let exit = pidfd.exited().await;
                    drop((pidfd, place));
                    let _ = exits.send((id, exit));
                });
            }
            Err(PidfdError::Gone(_)) => drop(self.exits.send((id, Exit::Unknown))),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Critical processes that there was no descriptor for: there may be one by now, or they may be gone.
    fn retry_pidfds(&mut self) {
        for id in std::mem::take(&mut self.without_pidfd) {
            let watched = self.processes.get(id).is_some_and(|tracked| tracked.critical && !tracked.exit_seen);
            if !watched || self.watch_by_pidfd(id).is_ok() {
                continue;
            }
            if proc::is_alive(id) {
                self.without_pidfd.push(id);
            } else {
                let exit = proc::zombie_wait_status(id).map_or(Exit::Unknown, Exit::from_wait_status);
                let _ = self.exits.send((id, exit));
            }
        }
    }

    /// A pidfd became readable.
    fn exited(&mut self, id: ProcessId, exit: Exit) {
        let at = proc::monotonic_now();
        if let Some(tracked) = self.processes.get(id)
            && !tracked.exit_seen
            && self.programs.is_some()
        {
            self.metrics.deaths_seen_only_by_pidfd.inc();
            // The ring may have been full.
            self.count_losses();
        }
        if let Some(evidence) = self.processes.gone(id, exit, at) {
            self.evidence(evidence);
        }
        self.unwatch(id);
        if self.processes.get(id).is_some_and(|tracked| tracked.id != tracked.root) {
            self.processes.remove(id);
        }
        self.rescan = true;
    }

    fn message(&mut self, message: Message) {
        match message {
            Message::Scanned(sightings) => self.scanned(sightings),
            Message::LookedAt(worker, id, looked) => {
                let pause = self.process_looks.ended(id);
                self.send_after(pause, Message::LookAgain(id));
                if let Some(looked) = looked {
                    self.seen(worker, &looked);
                }
                self.look_at_processes(None);
            }
            Message::LookAgain(id) => {
                self.process_looks.resume(id);
                self.look_at_processes(None);
            }
            Message::Served(worker, root, serves) => self.served(worker, root, serves),
            Message::ListenerLookedAt(worker, evidence) => {
                let pause = self.listener_looks.ended(worker);
                self.send_after(pause, Message::ListenerAgain(worker));
                if let Some(evidence) = evidence {
                    self.evidence(evidence);
                }
                self.look_at_listeners(None);
            }
            Message::ListenerAgain(worker) => {
                self.listener_looks.resume(worker);
                self.look_at_listeners(None);
            }
            Message::Kmsg(entry) => self.kmsg(entry),
            Message::GpuHeld(fault, holders) => self.gpu_held(&fault, holders),
            Message::Rechecked(worker, root, process, presence) => {
                if self.workers.knows(worker) {
                    self.rechecked(worker, root, process, presence);
                }
            }
            Message::Acted(worker, root, done) => self.action_done(worker, root, &done),
            Message::Bridge(report) => self.bridge_reported(report),
            Message::Declared(looked) => self.declared(looked),
            Message::Inherited(inherited) => self.inherit(*inherited),
            Message::Defaced(worker) => self.defaced(&worker),
            Message::Lost(loss) => self.metrics.lose(loss, 1),
            Message::Claimed(record) => self.claimed(record),
            Message::Proven(worker, root, record) => self.proven(worker, root, record),
        }
    }

    fn unwatch(&mut self, id: ProcessId) {
        if let Some(programs) = self.programs.as_mut()
            && let Err(error) = programs.unwatch(id.tgid, id.start_ticks)
        {
            tracing::debug!(%error, tgid = id.tgid, "cannot unwatch");
        }
    }

    /// A process that died before it was watched leaves an entry in the kernel's map, which no exit
    /// will remove any more.
    fn sweep_watched(&mut self) {
        self.processes.sweep(proc::is_alive);
        let Some(programs) = self.programs.as_ref() else { return };
        let watched = programs.watched_processes();
        let ids = watched.map(|(tgid, watched)| ProcessId { tgid, start_ticks: watched.start_ticks });
        let stale: Vec<_> = ids.filter(|id| !proc::is_alive(*id)).collect();
        for id in stale {
            self.unwatch(id);
        }
    }

    fn next_timer(&self) -> Instant {
        let now = proc::monotonic_now();
        let due = self.timers.values().copied().chain(self.next_action()).chain(self.next_spared());
        let wait = due.map(|at| at.since(now)).min().unwrap_or(Duration::from_secs(3600));
        Instant::now() + wait
    }

    fn fire_timers(&mut self) {
        let now = proc::monotonic_now();
        let due: Vec<_> = self.timers.iter().filter(|(_, at)| **at <= now).map(|(key, _)| *key).collect();
        for (worker, timer) in due {
            self.timers.remove(&(worker, timer));
            let effects = self.core.fire(worker, timer, now);
            self.carry_out(effects, now);
        }
        self.follow_overdue(now);
        self.begin_actions(now);
    }

    fn tick(&mut self) {
        self.ticks += 1;
        self.service_manager.alive();
        // Belt and braces: a record that was committed without a wake-up.
        let _ = self.drain_ring();
        self.count_losses();
        if self.ticks.is_multiple_of(TREE_TICKS) {
            self.sweep_watched();
        }
        if !self.scanning {
            self.start_scan();
        }
        self.retry_pidfds();
        self.prove_claims();
        self.prove_trees();
        self.ask_for_strangers();
        self.look_for_declarations();
        self.hasten_actions();
        self.forget_workers();
        self.settle_ready();
        let _ = self.write_ready_file();
        self.publish_status();
    }

    fn leased(&mut self, lease: LeaseEvent) -> Result<(), RunError> {
        if let LeaseEvent::Refused(why) = lease {
            return Err(RunError::Refused(why));
        }
        if self.lease != lease {
            tracing::info!(?lease, "node lease");
        }
        self.lease = lease;
        Ok(())
    }

    fn name(&self, worker: WorkerId) -> &Name {
        &self.workers[worker].config.name
    }
}

/// Waits for the ring buffer; for ever if there is none. `false`: it cannot be polled.
async fn ring_readable(events: Option<&Events>) -> bool {
    match events {
        Some(events) => events.readable().await.is_ok(),
        None => std::future::pending().await,
    }
}

/// Where the workers' bucket is passed to registrars: once it is open, the node's name is ours, and what an
/// earlier daemon left there was seen to.
type WorkersBucket = watch::Sender<Option<Bucket>>;
