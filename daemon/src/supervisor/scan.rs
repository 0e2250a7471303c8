//! Looking at `/proc`: for workers that have no process yet, and for processes of their trees
//! that the kernel did not report (without eBPF, all of them).

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use crate::config::{Find, WorkerConfig};
use crate::core::{Evidence, Exit, Kind, Process, ProcessId, State, WorkerId};
use crate::losses::Loss;
use crate::processes::RoleOf;
use crate::sensors::proc::{self, FindError, Finder, ProcessInfo, reach, tree};

use lastgasp_protocol::{Container, Incarnation, Name};

use super::act::Proof;
use super::{Message, Supervisor, TREE_TICKS};

/// What one worker is looked at for.
enum Look {
    /// Its root process, which is none of these.
    ForRoot(WorkerId, Arc<WorkerConfig>, HashSet<ProcessId>),
    /// The tree below this root.
    AtTree(WorkerId, ProcessId, Arc<WorkerConfig>),
    /// What of lives that are over is still there.
    ForOrphans(WorkerId, Vec<ProcessId>),
    /// The companion, which was this one.
    ForCompanion(WorkerId, Find, Option<ProcessId>),
}

/// What was seen.
pub(super) enum Sighting {
    /// A root process, who owns it, and where it runs.
    Root(WorkerId, ProcessInfo, Option<u32>, Option<Container>),
    /// The tree below a root, without the root, and who owns the worker.
    Tree(WorkerId, ProcessId, Option<u32>, Vec<ProcessLook>),
    /// Those of them that live.
    Orphans(WorkerId, Vec<ProcessInfo>),
    /// The companion now.
    Companion(WorkerId, Option<ProcessId>),
    /// Looking failed, in a way that the operator should know.
    Failed(WorkerId, String),
}

/// A process as `/proc` shows it, beside its parent.
///
/// Read on a blocking thread: a command line cannot be read while its process holds its own
/// `mmap_lock`, which one that is stuck in the kernel may do for long.
pub(super) struct ProcessLook {
    pub(super) info: ProcessInfo,
    /// Real, effective, saved and file system's.
    pub(super) users: Option<[u32; 4]>,
    pub(super) parent: Option<ProcessInfo>,
}

impl ProcessLook {
    pub(super) fn beside_its_parent(info: ProcessInfo) -> Self {
        let parent = tree::describe(info.parent_tgid);
        let users = proc::uids(info.id.tgid);
        Self { info, users, parent }
    }

    /// This very process, if it is still there.
    pub(super) fn at(id: ProcessId) -> Option<Self> {
        tree::describe(id.tgid).filter(|info| info.id == id).map(Self::beside_its_parent)
    }
}

/// What became of a process whose end was announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    /// Gone, or a zombie.
    Gone,
    /// Still writing its core dump.
    Ending,
    /// Alive.
    Alive,
}

impl Sighting {
    const fn worker(&self) -> WorkerId {
        match self {
            Self::Root(worker, ..)
            | Self::Tree(worker, ..)
            | Self::Orphans(worker, _)
            | Self::Companion(worker, _)
            | Self::Failed(worker, _) => *worker,
        }
    }
}

impl Supervisor {
    /// Looks now, if that is wanted; a look that is under way is followed by another one.
    pub(super) fn scan_if_wanted(&mut self) {
        if self.rescan && !self.scanning {
            self.start_scan();
        }
    }

    /// Looks, on a blocking thread, at whatever needs looking at now.
    pub(super) fn start_scan(&mut self) {
        let trees = self.programs.is_none() || self.rescan || self.ticks.is_multiple_of(TREE_TICKS);
        self.rescan = false;
        let looks: Vec<Look> = self
            .workers
            .iter()
            .filter_map(|(worker, slot)| {
                let root = self.processes.root(worker);
                let alive = root.filter(|root| self.processes.get(*root).is_some_and(|tracked| !tracked.exit_seen));
                match alive {
                    Some(root) if trees => Some(Look::AtTree(worker, root, Arc::clone(&slot.config))),
                    Some(_) => None,
                    // It is looked for among the declarations.
                    None if slot.declared.is_some() => None,
                    None => Some(Look::ForRoot(worker, Arc::clone(&slot.config), self.of_former_lives(worker))),
                }
            })
            .chain(self.workers.iter().filter_map(|(worker, slot)| {
                let over = slot.over_since.is_some() || !slot.former.is_empty() || !slot.orphans.is_empty();
                over.then(|| Look::ForOrphans(worker, self.of_ended_lives(worker)))
            }))
            .chain(self.workers.iter().filter_map(|(worker, slot)| {
                let find = slot.config.sever.companion.clone()?;
                Some(Look::ForCompanion(worker, find, slot.companion))
            }))
            .collect();
        if looks.is_empty() {
            return;
        }
        self.scanning = true;
        let messages = self.messages.clone();
        tokio::task::spawn_blocking(move || {
            let finder = Finder::default();
            let sightings = looks.into_iter().filter_map(|one| look(one, &finder)).collect();
            let _ = messages.send(Message::Scanned(sightings));
        });
    }

    /// Every process of the lives of this worker that are over: orphans carry its environment.
    fn of_former_lives(&self, worker: WorkerId) -> HashSet<ProcessId> {
        let mut former = self.workers[worker].former.clone();
        former.extend(self.processes.tree(worker).into_iter().map(|tracked| tracked.id));
        former
    }

    /// The same, without the present life unless that is over too.
    fn of_ended_lives(&self, worker: WorkerId) -> Vec<ProcessId> {
        let ended =
            if self.is_over(worker) { self.of_former_lives(worker) } else { self.workers[worker].former.clone() };
        ended.into_iter().collect()
    }

    /// What of the present life was not seen to end.
    pub(super) fn remaining(&self, worker: WorkerId) -> Vec<(ProcessId, Arc<str>)> {
        let tree = self.processes.tree(worker).into_iter().filter(|tracked| !tracked.exit_seen);
        tree.map(|tracked| (tracked.id, Arc::clone(&tracked.title))).collect()
    }

    fn orphans(&mut self, worker: WorkerId, alive: Vec<ProcessInfo>) {
        let over = self.is_over(worker);
        // A successor may have been started by what its predecessor left.
        let of_a_life =
            |info: &ProcessInfo| self.processes.get(info.id).is_some_and(|tracked| tracked.worker != worker || !over);
        let orphans: Vec<(ProcessId, Arc<str>)> = alive
            .into_iter()
            .filter(|info| !of_a_life(info))
            .map(|info| match self.processes.get(info.id) {
                Some(tracked) => (info.id, Arc::clone(&tracked.title)),
                None => (info.id, info.comm.into()),
            })
            .collect();
        let slot = &mut self.workers[worker];
        slot.former.retain(|former| orphans.iter().any(|(id, _)| id == former));
        if !over && orphans.is_empty() {
            slot.over_since = None;
        }
        slot.orphans.clone_from(&orphans);
        if over {
            self.deaths.remaining(worker, orphans);
        }
    }

    pub(super) fn scanned(&mut self, sightings: Vec<Sighting>) {
        self.scanning = false;
        let mut again = false;
        for sighting in sightings {
            if !self.workers.knows(sighting.worker()) {
                continue;
            }
            match sighting {
                Sighting::Root(worker, info, owner, container) => match self.holder(worker, info.id) {
                    Some(holder) => {
                        let error = format!(
                            "find: {} (pid {}) is the process of worker {holder} already, and no two workers share \
                             one: make find more exact",
                            info.comm, info.id.tgid
                        );
                        self.cannot_look(worker, error);
                    }
                    None => again |= self.bind(worker, &info, owner, container),
                },
                Sighting::Orphans(worker, alive) => self.orphans(worker, alive),
                Sighting::Companion(worker, companion) => {
                    if std::mem::replace(&mut self.workers[worker].companion, companion) != companion {
                        self.notify_lives(worker);
                    }
                }
                Sighting::Tree(worker, root, owner, tree) => {
                    self.processes.owned_by(worker, root, owner);
                    again |= self.tree(worker, root, &tree);
                }
                Sighting::Failed(worker, error) => self.cannot_look(worker, error),
            }
        }
        if again || self.rescan {
            // What was found may have children that were made before it was watched.
            self.rescan = true;
            self.start_scan();
        }
        self.settle_ready();
    }

    /// Who else has this process for a root. A death would be reported of one of them only.
    fn holder(&self, worker: WorkerId, root: ProcessId) -> Option<&Name> {
        let mut others = self.workers.iter().filter(|(other, _)| *other != worker);
        others.find(|(other, _)| self.processes.root(*other) == Some(root)).map(|(_, slot)| &slot.config.name)
    }

    fn cannot_look(&mut self, worker: WorkerId, error: String) {
        let slot = &mut self.workers[worker];
        if slot.reason != error {
            tracing::warn!(worker = %slot.config.name, %error, "cannot look for the worker's process");
            slot.reason = error;
        }
    }

    /// Once the first scans are over, it is known which workers there are.
    pub(super) fn settle_ready(&mut self) {
        if self.scanning || self.ticks == 0 || !self.declarations.first_look_is_over() {
            return;
        }
        self.mark_ready();
        if let Some(inherited) = self.inherited.take() {
            self.inherit(inherited);
        }
    }

    /// A root was found: watch it, then look at its tree, then tell the core.
    pub(super) fn bind(
        &mut self,
        worker: WorkerId,
        info: &ProcessInfo,
        owner: Option<u32>,
        container: Option<Container>,
    ) -> bool {
        let root = info.id;
        if self.processes.root(worker) == Some(root) {
            return false;
        }
        let incarnation = Incarnation::of_process(&self.boot_id, root.tgid, root.start_ticks);
        let incarnation_text = incarnation.to_string();
        let now = proc::monotonic_now();
        // What comes before the beginning is the end of a life that no event has reported. What follows that end is
        // done to its own processes, so these are still the worker's then.
        let mut ended = self.core.found(worker, root, incarnation, now);
        let begun = ended.pop();
        if !ended.is_empty() {
            self.carry_out(ended, now);
            self.send_outgoing();
            self.tell_people();
        }
        let former = self.of_former_lives(worker);
        self.keep_former_tree(worker);
        let config = Arc::clone(&self.workers[worker].config);
        self.watch(worker, root);
        self.watch_supervisor(worker, info);
        self.watch_listener(worker, root);
        let profile = Arc::clone(&config.profile);
        let role_of: RoleOf = Arc::new(move |parent, names| {
            let role = match parent {
                Some(parent) => profile.role_of_child(parent, names),
                None => profile.role(names.comm, names.cmdline),
            };
            role.map(|role| role.title)
        });
        let observation = self.processes.adopt_root(worker, root, &info.comm, owner, role_of);
        let slot = &mut self.workers[worker];
        slot.container = container;
        slot.proof = Proof::default();
        slot.reason.clear();
        slot.commanded.clear();
        slot.taken_back = false;
        slot.former = former.into_iter().filter(|id| proc::is_alive(*id)).collect();
        // Dropped first: the health of the former life must not be taken for that of this one.
        slot.health = None;
        slot.incarnation = incarnation_text;
        self.carry_out(begun.into_iter().collect(), now);
        self.notify_lives(worker);
        self.observed(observation);
        self.prove_claim(worker, false);
        true
    }

    /// The serving port in the network namespace of this root, instead of the former one's.
    fn watch_listener(&mut self, worker: WorkerId, root: ProcessId) {
        let Some(programs) = self.programs.as_mut() else { return };
        let slot = &mut self.workers[worker];
        let config = Arc::clone(&slot.config);
        let port = proc::netns_inum(root.tgid).ok().map(|netns| (netns, config.port));
        if slot.port == port {
            return;
        }
        if let Some((netns, port)) = slot.port.take() {
            // It may be gone with its namespace; there is nothing to do about a failure.
            let _ = programs.unwatch_port(netns, port);
        }
        let Some((netns, number)) = port else { return };
        match programs.watch_port(netns, number, worker.0) {
            Ok(()) => slot.port = port,
            Err(error) => {
                tracing::warn!(%error, worker = %config.name, port = number, "the kernel does not watch the worker's listener");
                self.metrics.lose(Loss::WatchPort, 1);
            }
        }
    }

    fn tree(&mut self, worker: WorkerId, root: ProcessId, tree: &[ProcessLook]) -> bool {
        if self.processes.root(worker) != Some(root) {
            return false;
        }
        let mut new = false;
        for looked in tree {
            if self.processes.get(looked.info.id).is_none() {
                self.watch(worker, looked.info.id);
                new = true;
            }
            self.seen(worker, looked);
        }
        // Not before: what it is listed with says which processes it has.
        if self.workers[worker].health.is_none() {
            self.start_health(worker, root, false);
        }
        new
    }

    fn watch(&mut self, worker: WorkerId, id: ProcessId) {
        if let Some(programs) = self.programs.as_mut()
            && let Err(error) = programs.watch(id.tgid, worker.0, id.start_ticks)
        {
            tracing::error!(%error, tgid = id.tgid, "the kernel does not watch this process; its pidfd does");
            self.metrics.lose(Loss::WatchProcess, 1);
        }
    }

    /// Looks whether a process whose end was announced is there.
    pub(super) fn recheck(&self, worker: WorkerId, root: ProcessId, process: Process) {
        let messages = self.messages.clone();
        let id = self.processes.tree(worker).into_iter().map(|tracked| tracked.id).find(|id| id.tgid == process.tgid);
        tokio::task::spawn_blocking(move || {
            let presence = id.map_or(Presence::Gone, presence);
            let _ = messages.send(Message::Rechecked(worker, root, process, presence));
        });
    }

    pub(super) fn rechecked(&mut self, worker: WorkerId, root: ProcessId, process: Process, presence: Presence) {
        let at = proc::monotonic_now();
        let kind = match presence {
            Presence::Gone => Kind::ProcessGone { process, exit: Exit::Unknown },
            Presence::Alive => {
                tracing::warn!(worker = %self.name(worker), process = %process.title, "process lives on after a fatal signal");
                Kind::StillAlive { process }
            }
            Presence::Ending => {
                self.recheck_later(worker, at);
                return;
            }
        };
        self.evidence(Evidence { worker, root, kind, at });
    }

    /// Whether a worker's life has ended, as far as the core is concerned.
    pub(super) fn is_over(&self, worker: WorkerId) -> bool {
        matches!(self.core.state(worker), Some(State::Left | State::Lost))
    }
}

fn look(look: Look, finder: &Finder) -> Option<Sighting> {
    match look {
        Look::ForRoot(worker, config, former) => match root(&config, &former, finder) {
            Ok(None) => None,
            Ok(Some(id)) => {
                let info = tree::describe(id.tgid).filter(|info| info.id == id)?;
                let owner = proc::effective_user(id.tgid);
                Some(Sighting::Root(worker, info, owner, proc::cgroup::container(id.tgid).ok()))
            }
            Err(error) => Some(Sighting::Failed(worker, error.to_string())),
        },
        Look::ForOrphans(worker, processes) => {
            let alive = |id: ProcessId| tree::describe(id.tgid).filter(|info| info.id == id);
            // Without kernel events no event reports the children of orphans.
            let born_since = processes.iter().flat_map(|id| tree::descendants(*id));
            let all: BTreeMap<ProcessId, ProcessInfo> =
                processes.iter().filter_map(|id| alive(*id)).chain(born_since).map(|info| (info.id, info)).collect();
            Some(Sighting::Orphans(worker, all.into_values().collect()))
        }
        Look::ForCompanion(worker, _, Some(known)) if proc::is_alive(known) => {
            Some(Sighting::Companion(worker, Some(known)))
        }
        Look::ForCompanion(worker, find, _) => Some(match proc::find_root(&find) {
            Ok(companion) => Sighting::Companion(worker, companion),
            Err(error) => Sighting::Failed(worker, format!("sever.companion: {error}")),
        }),
        Look::AtTree(worker, root, config) => {
            let tree: Vec<ProcessLook> =
                tree::descendants(root).into_iter().map(ProcessLook::beside_its_parent).collect();
            let owner = owner(root, &config, &tree);
            Some(Sighting::Tree(worker, root, owner, tree))
        }
    }
}

/// The worker's root. A pid file that seems to be older than its process may have been written before a clock was
/// set: what listens where the worker serves is the worker.
fn root(config: &WorkerConfig, former: &HashSet<ProcessId>, finder: &Finder) -> Result<Option<ProcessId>, FindError> {
    match finder.root(&config.find, former) {
        Err(FindError::OldPidFile { process, .. }) if !former.contains(&process) && serves(process, config) => {
            Ok(Some(process))
        }
        found => found,
    }
}

/// Whether the tree below `root` listens where the worker serves or is asked for its health.
pub(super) fn serves(root: ProcessId, config: &WorkerConfig) -> bool {
    let health = config.health.grpc.iter().chain(&config.health.http);
    reach::serves(root, std::iter::once(&config.endpoint).chain(health))
}

/// The user who owns the worker's listener, else its root. Where all processes are one user's, nobody needs to
/// look for a listener.
fn owner(root: ProcessId, config: &WorkerConfig, tree: &[ProcessLook]) -> Option<u32> {
    let user = proc::effective_user(root.tgid)?;
    if tree.iter().all(|looked| looked.users == Some([user; 4])) {
        return Some(user);
    }
    let pids: Vec<u32> = std::iter::once(root.tgid).chain(tree.iter().map(|looked| looked.info.id.tgid)).collect();
    reach::owner(&pids, config).or(Some(user))
}

fn presence(id: ProcessId) -> Presence {
    if !proc::is_alive(id) {
        Presence::Gone
    } else if proc::is_dumping_core(id.tgid) {
        Presence::Ending
    } else {
        Presence::Alive
    }
}
