//! What the kernel tells beside deaths: who supervises, what was executed, resets, and the state of
//! processes that do not answer.

use lastgasp_protocol::ClosedName as _;
use std::net::SocketAddr;
use std::time::Duration;

use crate::core::{Direction, Evidence, Kind, Nanos, Process, ProcessId, State, WorkerId};
use crate::effects::deaths::MomentKind;
use crate::losses::Loss;
use crate::sensors::kmsg::{Fact, LogEntry};
use crate::sensors::proc::{self, ProcessInfo, ProcessState};

use super::{Supervisor, gpu};

/// Resets ask for a worker's health at most this often.
const RESET_PROBE: Duration = Duration::from_secs(1);

/// The kernel's log is read at most this long after the kernel wrote it: later, the pid may be another's.
pub(super) const LOG_LAG: Duration = Duration::from_secs(60);

/// Parents that start an engine and do not supervise it: a signal to them is about themselves. A
/// shim lives as long as its container and is ended after it. Prefixes of a `comm`.
const NO_SUPERVISORS: [&str; 10] =
    ["containerd-shim", "conmon", "runc", "crun", "dockerd", "kubelet", "systemd", "init", "sshd", "lastgasp"];

/// A reset of the serving port, as the kernel reported it.
pub(super) struct Reset {
    pub(super) worker: WorkerId,
    pub(super) root: ProcessId,
    pub(super) direction: Direction,
    pub(super) reason: Option<u32>,
    pub(super) peer: SocketAddr,
    pub(super) count: u64,
    pub(super) at: Nanos,
}

impl Supervisor {
    /// Watches the signals to the root's parent, if that supervises the engine: a container's init
    /// such as tini, a supervisor such as supervisord, a shell script. SIGTERM to it is the first
    /// word of the engine's end. Processes of another worker's tree are watched anyway.
    pub(super) fn watch_supervisor(&mut self, worker: WorkerId, root: &ProcessInfo) {
        if let Some(idle) = self.processes.unsupervised(worker) {
            self.unwatch(idle);
        }
        // Not its command line: a parent that holds its memory locked would stop this thread.
        let parent = proc::tree::named(root.parent_tgid).filter(|(parent, comm)| {
            parent.tgid > 1
                && parent.start_ticks <= root.id.start_ticks
                && !self.processes.is_tracked(parent.tgid)
                && !NO_SUPERVISORS.iter().any(|name| comm.starts_with(name))
        });
        let (Some((parent, comm)), Some(programs)) = (parent, self.programs.as_mut()) else { return };
        match programs.watch_signals(parent.tgid, worker.0, parent.start_ticks) {
            Ok(()) => {
                tracing::debug!(worker = %self.name(worker), tgid = parent.tgid, comm, "supervised by");
                self.processes.supervised_by(worker, parent);
            }
            Err(error) => {
                tracing::warn!(%error, tgid = parent.tgid, "the daemon does not watch signals to the engine's supervisor");
                self.metrics.lose(Loss::WatchSupervisor, 1);
            }
        }
    }

    /// A critical process has run a program. The same one again is nothing, and so is anything while
    /// the engine starts: entry points are scripts.
    pub(super) fn executed(&mut self, id: ProcessId) {
        let exe = proc::exe(id.tgid);
        let Some(former) = self.processes.runs(id, exe.clone()) else { return };
        let (Some(exe), Some(tracked)) = (exe, self.processes.get(id)) else { return };
        let (worker, root, process) = (tracked.worker, tracked.root, tracked.process());
        if exe == former || matches!(self.core.state(worker), None | Some(State::Starting)) {
            return;
        }
        let by = exe.display().to_string();
        tracing::warn!(worker = %self.name(worker), process = %process.title, by, "process called exec: another program runs in its place");
        self.evidence(Evidence { worker, root, kind: Kind::Replaced { process, by }, at: proc::monotonic_now() });
    }

    /// Resets are counted and kept for the certificate; now and then they ask for the worker's health.
    pub(super) fn tcp_reset(&mut self, reset: Reset) {
        let Reset { worker, root, direction, reason, peer, count, at } = reset;
        let reason = reason.map(|number| {
            let name = self.programs.as_ref().and_then(|programs| programs.reset_reason(number));
            name.map_or_else(|| number.to_string(), str::to_owned)
        });
        let kind = Kind::TcpReset { direction, reason, peer, count };
        if !self.workers.knows(worker) {
            return;
        }
        let slot = &mut self.workers[worker];
        let asked_lately = slot.reset_probe.is_some_and(|asked| at.since(asked) < RESET_PROBE);
        if asked_lately {
            self.deaths.evidence(worker, &kind, at);
            self.metrics.evidence.with_label_values(&[kind.as_str()]).inc();
            return;
        }
        slot.reset_probe = Some(at);
        self.evidence(Evidence { worker, root, kind, at });
    }

    /// The kernel's log said something.
    pub(super) fn kmsg(&mut self, entry: LogEntry) {
        let at = proc::monotonic_now();
        match entry {
            LogEntry::Overrun => self.metrics.lose(Loss::KernelLog, 1),
            LogEntry::Fact(Fact::OomKill { tid, scope }) => {
                let tgid = proc::thread_group(tid).unwrap_or(tid);
                let alive = self.processes.by_pid(tgid).map(|tracked| (tracked.worker, tracked.process()));
                let Some((worker, process)) = alive.or_else(|| self.former_oom_victim(tgid, at)) else { return };
                let detail = format!("{} (pid {tgid}): {scope}", process.title);
                tracing::warn!(worker = %self.name(worker), detail, "OOM kill");
                self.deaths.moment(worker, MomentKind::Evidence, "oom_kill", detail, at);
            }
            LogEntry::Fact(Fact::GpuFault { fault, policy, pid, gpu }) => {
                self.gpu_fault(gpu::Fault { fault, policy, at }, pid, gpu);
            }
        }
    }

    /// A process that is gone by now: on a busy machine the log is read after its end.
    fn former_oom_victim(&self, tgid: u32, now: Nanos) -> Option<(WorkerId, Process)> {
        self.workers.iter().find_map(|(worker, slot)| {
            let (process, chosen) = slot.oom_victim.as_ref()?;
            (process.tgid == tgid && now.since(*chosen) < LOG_LAG).then(|| (worker, process.clone()))
        })
    }

    /// The worker does not answer: whether its processes could. Health decides; this is what a person
    /// wants to know.
    pub(super) fn note_process_states(&mut self, worker: WorkerId, at: Nanos) {
        let stuck: Vec<String> = self
            .processes
            .tree(worker)
            .into_iter()
            .filter(|tracked| tracked.critical && !tracked.exit_seen)
            .filter_map(|tracked| match proc::process_state(tracked.id)? {
                ProcessState::Running => None,
                state => Some(format!("{} (pid {}) is {}", tracked.title, tracked.id.tgid, state.as_str())),
            })
            .collect();
        let stuck = stuck.join(", ");
        let slot = &mut self.workers[worker];
        if slot.stuck == stuck {
            return;
        }
        stuck.clone_into(&mut slot.stuck);
        if !stuck.is_empty() {
            tracing::warn!(worker = %self.name(worker), %stuck, "worker does not answer, and processes of it do not run");
            self.deaths.moment(worker, MomentKind::Evidence, "process_state", stuck, at);
        }
    }
}
