//! What people and programs read: status, events, metrics, certificates, the ready file.

use lastgasp_protocol::ClosedName as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use jiff::{SignedDuration, Timestamp};
use lastgasp_protocol::{Certificate, Container, Name};
use tokio::time::Instant;

use crate::core::{Nanos, ProcessId, State};
use crate::effects::lease::LeaseEvent;
use crate::effects::nats::ConnectionState;
use crate::losses::Loss;
use crate::metrics::DeathSource;
use crate::sensors::ebpf::ProgramState;
use crate::sensors::health::HealthHandle;
use crate::sensors::proc;
use crate::status::{ContainerStatus, Event, NodeStatus, ProcessStatus, ProgramStatus, RouterStatus, WorkerStatus};

use super::notifications::Notifications;
use super::{SETTLE_STATUS, Supervisor};

/// What is written once the sensors are attached and the first scan is over.
pub(super) struct Ready {
    pub(super) file: Option<PathBuf>,
    pub(super) listen: SocketAddr,
}

/// What the ready file is to say, and could not be made to say yet.
pub(super) struct Unwritten {
    file: PathBuf,
    content: String,
}

impl Supervisor {
    pub(super) fn publish_soon(&mut self) {
        self.publish_at.get_or_insert_with(|| Instant::now() + SETTLE_STATUS);
    }

    pub(super) fn publish_status(&mut self) {
        self.publish_at = None;
        self.hub.beat();
        let connection = *self.connection.borrow();
        self.metrics.nats_connected.set(i64::from(connection == ConnectionState::Connected));
        let faults: Vec<_> = self.troubles.troubles().iter().map(|(_, trouble)| trouble.fault).collect();
        self.metrics.set_nats_faults(&faults);
        self.metrics.set_death_source(self.death_source());
        self.metrics.stuck_processes.set(i64::try_from(proc::memory::stuck().len()).unwrap_or(i64::MAX));
        let now = proc::monotonic_now();
        for (_, slot) in self.workers.iter() {
            let since = slot.over_since.filter(|_| !slot.orphans.is_empty());
            let seconds = since.map_or(0.0, |since| now.since(since).as_secs_f64());
            self.metrics.lost_alive_seconds.with_label_values(&[slot.config.name.as_str()]).set(seconds);
        }
        let status = self.status(connection);
        self.hub.publish(status);
    }

    fn status(&self, connection: ConnectionState) -> NodeStatus {
        let now = proc::monotonic_now();
        let stuck = proc::memory::stuck().into_iter().map(|stuck| stuck.to_string());
        let programs = self.programs.as_ref().map(|programs| programs.states()).unwrap_or_default();
        let routers = self.routers.borrow();
        let mut routers: Vec<_> = routers
            .iter()
            .map(|router| RouterStatus { router: router.to_string(), ..RouterStatus::default() })
            .collect();
        routers.sort_by(|a, b| a.router.cmp(&b.router));
        NodeStatus {
            node: self.config.node.to_string(),
            mode: self.config.mode.as_str().to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            death_source: self.death_source().as_str().to_owned(),
            death_source_reason: self.no_ebpf.as_ref().map(|no_ebpf| no_ebpf.reason.clone()).unwrap_or_default(),
            nats: connection.as_str().to_owned(),
            nats_url: self.config.nats.url.clone(),
            lease: match &self.lease {
                LeaseEvent::Held => "held".to_owned(),
                LeaseEvent::Waiting(why) => format!("waiting: {why}"),
                LeaseEvent::Refused(why) => format!("refused: {why}"),
                LeaseEvent::NotTaken => "not taken: mode is \"observe\"".to_owned(),
            },
            started_at: self.started_at.to_string(),
            ready: self.ready.is_none(),
            workers: self.workers_status(now),
            kernel_programs: programs
                .iter()
                .map(|(program, state)| ProgramStatus {
                    name: program.as_str().to_owned(),
                    on: matches!(state, ProgramState::On),
                    reason: match state {
                        ProgramState::On => String::new(),
                        ProgramState::Off(reason) => reason.to_string(),
                    },
                })
                .chain([ProgramStatus {
                    name: "kmsg".to_owned(),
                    on: self.kmsg_off.is_none(),
                    reason: self.kmsg_off.clone().unwrap_or_default(),
                }])
                .collect(),
            losses: self.metrics.losses(),
            routers,
            warnings: self.warnings.iter().cloned().chain(proc::memory::bound_reached()).chain(stuck).collect(),
            degraded: self.degraded(),
            privileges: Some(self.privileges()),
        }
    }

    fn workers_status(&self, now: Nanos) -> Vec<WorkerStatus> {
        self.workers
            .iter()
            .map(|(worker, slot)| {
                let config = &slot.config;
                let root = self.processes.root(worker);
                let mut processes: Vec<_> = self
                    .processes
                    .tree(worker)
                    .into_iter()
                    .map(|tracked| {
                        let status = ProcessStatus {
                            tgid: tracked.id.tgid,
                            title: tracked.title.to_string(),
                            critical: tracked.critical,
                            alive: !tracked.exit_seen,
                        };
                        (tracked.id, status)
                    })
                    .collect();
                let root_at = processes.iter().position(|(id, _)| Some(*id) == root);
                let root_status = root_at.map(|at| processes.remove(at).1);
                processes.retain(|(_, process)| process.critical);
                WorkerStatus {
                    worker: config.name.to_string(),
                    engine: config.engine.clone(),
                    state: self.core.state(worker).unwrap_or(State::Starting).as_str().to_owned(),
                    since: slot.since.to_string(),
                    reason: match (root, self.core.held_back(worker)) {
                        (_, Some(held)) => format!("withdrawal held back ({}): {}", held.reason.as_str(), held.cause),
                        (None, _) if slot.reason.is_empty() => "no process found yet".to_owned(),
                        (Some(_), _) if !slot.stuck.is_empty() => format!("no answer: {}", slot.stuck),
                        _ => slot.reason.clone(),
                    },
                    incarnation: slot.incarnation.clone(),
                    epoch: slot.epoch,
                    revision: if slot.listed { slot.revision } else { 0 },
                    endpoint: config.endpoint.clone(),
                    models: config.models.clone(),
                    root: root_status,
                    processes: processes.into_iter().map(|(_, process)| process).collect(),
                    health: slot.health.as_ref().map(HealthHandle::summary).unwrap_or_default(),
                    last_evidence: slot.evidence.map(|(name, _)| name.to_owned()).unwrap_or_default(),
                    source: if slot.declared.is_some() { "declaration" } else { "configuration" }.to_owned(),
                    container: slot.container.as_ref().map(container_status),
                    orphans: slot.orphans.iter().map(|(id, title)| self.orphan_status(*id, title)).collect(),
                    last_evidence_at: slot.evidence.map(|(_, at)| wall(at, now).to_string()).unwrap_or_default(),
                }
            })
            .collect()
    }

    fn orphan_status(&self, id: ProcessId, title: &str) -> ProcessStatus {
        let critical = self.processes.get(id).is_some_and(|tracked| tracked.critical);
        ProcessStatus { tgid: id.tgid, title: title.to_owned(), critical, alive: true }
    }

    fn death_source(&self) -> DeathSource {
        if self.programs.is_some() { DeathSource::Ebpf } else { DeathSource::Pidfd }
    }

    pub(super) fn tell_state(&self, worker: &Name, summary: String) {
        self.tell("state", worker.as_str(), summary, None);
    }

    pub(super) fn note(&self, worker: &Name, summary: String) {
        self.tell("note", worker.as_str(), summary, None);
    }

    /// As [`Self::note`], about something that may not even be a name.
    pub(super) fn note_about(&self, worker: &str, summary: String) {
        self.tell("note", worker, summary, None);
    }

    fn tell(&self, kind: &str, worker: &str, summary: String, certificate_json: Option<String>) {
        let at = Timestamp::now().to_string();
        self.hub.event(Event { at, kind: kind.to_owned(), worker: worker.to_string(), summary, certificate_json });
    }

    /// Takes out certificates that are complete, keeps them on the server and tells of them.
    pub(super) fn settle_certificates(&mut self) {
        while self.publications.try_join_next().is_some() {}
        if !self.deaths.is_settling() {
            return;
        }
        let routers = self.routers.borrow().len();
        let actions = &self.actions;
        let telling = self.notifications.telling();
        let acting = |worker, incarnation: &_| {
            Self::is_acting(actions, worker, incarnation) || Notifications::is_telling(telling, worker, incarnation)
        };
        for certificate in self.deaths.settled(routers, acting, proc::monotonic_now()) {
            let Certificate { certificate: id, worker, cause, streams, timeline, .. } = &certificate;
            tracing::info!(
                %worker, certificate = id, %cause, moved = streams.moved, failed = streams.failed,
                moments = timeline.len(), "death certificate"
            );
            let summary = format!("{cause}; {} of {} streams moved", streams.moved, streams.streams);
            let json = String::from_utf8_lossy(&certificate.to_json()).into_owned();
            self.hub.death(id, &json);
            self.tell("certificate", worker.as_str(), summary, Some(json));
            self.notify_certificate(&certificate);
            if let Some(kept) = self.archive.keep(&certificate) {
                self.publications.spawn(kept);
            }
        }
        self.metrics.lose(Loss::Moment, self.deaths.take_left_out());
    }

    /// Events that the kernel could not hand over, by kind.
    pub(super) fn count_losses(&mut self) {
        self.metrics.lose(Loss::Log, crate::log::take_lost());
        let Some(programs) = self.programs.as_ref() else { return };
        let Ok(dropped) = programs.dropped() else { return };
        for (kind, total) in dropped {
            let known = self.dropped.entry(kind.as_str()).or_default();
            if total > *known {
                tracing::error!(
                    kind = kind.as_str(),
                    lost = total - *known,
                    "the ring buffer was full and events are lost: the daemon looks at all process trees again"
                );
                self.metrics.lose(Loss::Ring(kind), total - *known);
                *known = total;
                // What was lost may have been a fork or an exit.
                self.rescan = true;
            }
        }
    }

    /// The first scan is over: ready, whatever NATS says.
    pub(super) fn mark_ready(&mut self) {
        let Some(Ready { file, listen }) = self.ready.take() else { return };
        tracing::info!(death_source = self.death_source().as_str(), workers = self.workers.len(), %listen, "ready");
        if let Some(file) = file {
            let content = serde_json::json!({
                "pid": std::process::id(),
                "metrics": listen.to_string(),
                "socket": self.config.status.socket.display().to_string(),
                "death_source": self.death_source().as_str(),
            });
            self.unwritten = Some(Unwritten { file, content: content.to_string() });
            if let Err(error) = self.write_ready_file() {
                tracing::error!(%error, "ready file not written: the daemon tries again every second");
            }
        }
        self.service_manager.ready(&format!(
            "watching {} workers by {}",
            self.workers.len(),
            self.death_source().as_str()
        ));
        self.publish_status();
    }

    /// Whoever waits for it must not wait for ever because a descriptor was lacking once.
    pub(super) fn write_ready_file(&mut self) -> std::io::Result<()> {
        if let Some(Unwritten { file, content }) = &self.unwritten {
            write_atomically(file, content.as_bytes())?;
            self.unwritten = None;
        }
        Ok(())
    }

    /// Sets the gauges that do not change while the daemon runs.
    pub(super) fn describe_probes(&self) {
        for (program, state) in self.programs.as_ref().map(|programs| programs.states()).unwrap_or_default() {
            let on = matches!(state, ProgramState::On);
            self.metrics.kernel_program_attached.with_label_values(&[program.as_str()]).set(i64::from(on));
            if let ProgramState::Off(reason) = state {
                tracing::warn!(program = program.as_str(), %reason, cost = program.cost(), "kernel program off");
            }
        }
    }
}

fn container_status(container: &Container) -> ContainerStatus {
    let Container { cgroup_path, pod_uid, container_id, runtime, pid_namespace, network_namespace } = container;
    ContainerStatus {
        cgroup_path: cgroup_path.clone(),
        pod_uid: pod_uid.clone().unwrap_or_default(),
        container_id: container_id.clone().unwrap_or_default(),
        runtime: runtime.clone().unwrap_or_default(),
        pid_namespace: pid_namespace.unwrap_or_default(),
        network_namespace: network_namespace.unwrap_or_default(),
    }
}

fn wall(at: Nanos, now: Nanos) -> Timestamp {
    let age = SignedDuration::try_from(now.since(at)).unwrap_or_default();
    Timestamp::now().checked_sub(age).unwrap_or_default()
}

fn write_atomically(file: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut beside = file.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    std::fs::File::create(&beside)?.write_all(bytes)?;
    std::fs::rename(&beside, file)
}
