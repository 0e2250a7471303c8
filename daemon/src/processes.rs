//! Who a kernel event is about: the process trees of this node's workers.
//!
//! Fed with what `/proc` shows and what the kernel reports, it turns a process event into
//! evidence about a worker. A role is given when a title first appears, and kept: at exit the
//! comm may be a thread's and the command line is gone.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use lastgasp_ebpf::{Event, EventFlags, EventKind, NO_SLOT};
use lastgasp_protocol::Sender;

use crate::core::{Addressee, Direction, Evidence, Exit, Kind, Nanos, Process, ProcessId, WorkerId};
use crate::engines::Names;
use crate::sensors::proc::printable;

/// Gives a process its role from its parent's names, if they are known, and its own, and with it
/// the title to call it by. `None`: it may come and go.
pub type RoleOf = Arc<dyn Fn(Option<Names<'_>>, Names<'_>) -> Option<String> + Send + Sync>;

/// A process of a worker's tree.
#[derive(Debug, Clone)]
pub struct Tracked {
    /// Which process.
    pub id: ProcessId,
    /// Whose.
    pub worker: WorkerId,
    /// The root of the life it belongs to.
    pub root: ProcessId,
    /// Title for people; for a critical process that of its role.
    pub title: Arc<str>,
    /// Its end is the worker's end.
    pub critical: bool,
    /// Its end was reported, by the kernel or by its pidfd.
    pub exit_seen: bool,
    /// The file that a critical process runs, where it could be read.
    pub exe: Option<PathBuf>,
}

impl Tracked {
    fn new(id: ProcessId, worker: WorkerId, root: ProcessId, title: Arc<str>) -> Self {
        Self { id, worker, root, title, critical: false, exit_seen: false, exe: None }
    }

    /// What evidence says of it.
    #[must_use]
    pub fn process(&self) -> Process {
        Process { tgid: self.id.tgid, title: Arc::clone(&self.title), root: self.id == self.root }
    }
}

/// What follows from looking at a process or an event.
#[derive(Debug, PartialEq, Eq)]
pub enum Observation {
    /// Evidence for the core.
    Evidence(Evidence),
    /// A critical process is there: open its pidfd, tell the core.
    Critical {
        /// Whose.
        worker: WorkerId,
        /// The root of the life.
        root: ProcessId,
        /// Which process.
        id: ProcessId,
    },
    /// The names of this process have changed and may tell its role: read them, and those of its
    /// parent, and call [`Processes::seen`].
    LookAt(ProcessId),
    /// A critical process runs another program, which may be the same one again.
    Executed(ProcessId),
    /// A process of nobody's runs another program, and with it may have got another environment.
    StrangerExecuted(ProcessId),
    /// A signal was sent to the supervisor of these workers.
    SupervisorSignalled(Vec<Evidence>),
    /// Connections of a serving port were reset.
    TcpReset {
        /// Whose.
        worker: WorkerId,
        /// The root of the life.
        root: ProcessId,
        /// Which way.
        direction: Direction,
        /// The kernel's number for the reason.
        reason: Option<u32>,
        /// The other end of the last one.
        peer: SocketAddr,
        /// How many.
        count: u64,
        /// When.
        at: Nanos,
    },
    /// The kernel could not watch a child: look at the whole tree of this root.
    Rescan(WorkerId),
    /// A listening socket was closed; whether another one is left there is to be looked up.
    ListenerClosed {
        /// Whose.
        worker: WorkerId,
        /// The root of the life.
        root: ProcessId,
        /// The port.
        port: u16,
        /// The closing task was exiting.
        exiting: bool,
        /// When.
        at: Nanos,
    },
}

/// The root of a worker's present life.
struct Root {
    id: ProcessId,
    role_of: RoleOf,
    /// Titles of this user's processes count, and of nobody else's. None: not known.
    owner: Option<u32>,
}

/// All processes of all workers of this node.
#[derive(Default)]
pub struct Processes {
    by_tgid: HashMap<u32, Tracked>,
    roots: HashMap<WorkerId, Root>,
    /// The parents of roots, and whose.
    supervisors: HashMap<ProcessId, Vec<WorkerId>>,
}

impl Processes {
    /// A worker's root was found: its tree begins. Any former tree of the worker is forgotten. `owner` is the
    /// user who owns the worker, see [`Self::owned_by`].
    pub fn adopt_root(
        &mut self,
        worker: WorkerId,
        root: ProcessId,
        title: &str,
        owner: Option<u32>,
        role_of: RoleOf,
    ) -> Observation {
        self.forget(worker);
        self.roots.insert(worker, Root { id: root, role_of, owner });
        let tracked = Tracked { critical: true, ..Tracked::new(root, worker, root, title.into()) };
        self.by_tgid.insert(root.tgid, tracked);
        Observation::Critical { worker, root, id: root }
    }

    /// A worker is this user's: the one who owns its listener, or else its root. A process of another user that
    /// calls itself an engine core is none, so that its end is nobody's loss.
    pub fn owned_by(&mut self, worker: WorkerId, root: ProcessId, owner: Option<u32>) {
        if let Some(known) = self.roots.get_mut(&worker).filter(|known| known.id == root) {
            known.owner = owner;
        }
    }

    /// Forgets a worker's tree.
    pub fn forget(&mut self, worker: WorkerId) {
        self.roots.remove(&worker);
        self.by_tgid.retain(|_, tracked| tracked.worker != worker);
    }

    /// A worker's root has this parent, and none other any more. A signal to it is a word about the
    /// worker.
    pub fn supervised_by(&mut self, worker: WorkerId, supervisor: ProcessId) {
        self.supervisors.entry(supervisor).or_default().push(worker);
    }

    /// Forgets who supervises a worker; a supervisor that is nobody's any more is returned.
    pub fn unsupervised(&mut self, worker: WorkerId) -> Option<ProcessId> {
        for workers in self.supervisors.values_mut() {
            workers.retain(|supervised| *supervised != worker);
        }
        let idle = self.supervisors.iter().find(|(_, workers)| workers.is_empty()).map(|(id, _)| *id)?;
        self.supervisors.remove(&idle);
        Some(idle)
    }

    /// Whether this pid is a process of some worker's tree.
    #[must_use]
    pub fn is_tracked(&self, tgid: u32) -> bool {
        self.by_tgid.contains_key(&tgid)
    }

    /// The process of some worker's tree with this pid, whichever incarnation.
    #[must_use]
    pub fn by_pid(&self, tgid: u32) -> Option<&Tracked> {
        self.by_tgid.get(&tgid)
    }

    /// Notes the file that a critical process runs; the former one.
    pub fn runs(&mut self, id: ProcessId, exe: Option<PathBuf>) -> Option<PathBuf> {
        let tracked = self.by_tgid.get_mut(&id.tgid).filter(|tracked| tracked.id == id)?;
        std::mem::replace(&mut tracked.exe, exe)
    }

    /// Forgets processes that came and went unnoticed, as those of no role do without kernel events.
    pub fn sweep(&mut self, is_alive: impl Fn(ProcessId) -> bool) {
        self.by_tgid.retain(|_, tracked| tracked.critical || is_alive(tracked.id));
    }

    /// Forgets one process.
    pub fn remove(&mut self, id: ProcessId) {
        if self.by_tgid.get(&id.tgid).is_some_and(|tracked| tracked.id == id) {
            self.by_tgid.remove(&id.tgid);
        }
    }

    /// A process of `worker`'s tree was looked at, with its users, its names and its parent's as they are now.
    pub fn seen(
        &mut self,
        worker: WorkerId,
        id: ProcessId,
        users: Option<[u32; 4]>,
        parent: Option<Names<'_>>,
        names: Names<'_>,
    ) -> Option<Observation> {
        let comm = names.comm;
        let Root { id: root, role_of, owner } = self.roots.get(&worker)?;
        let root = *root;
        if id == root {
            return None;
        }
        // All of them: who runs another's set-user-ID program is not that other.
        let is_owners = |owner: u32| users.is_some_and(|users| users == [owner; 4]);
        let role = if owner.is_none_or(is_owners) { role_of(parent, names) } else { None };
        let tracked = self.by_tgid.entry(id.tgid).or_insert_with(|| Tracked::new(id, worker, root, comm.into()));
        if tracked.id != id {
            // The pid was used again before the former process's end was heard of.
            *tracked = Tracked::new(id, worker, root, comm.into());
        }
        if tracked.critical {
            // The rank in the command line may appear after the title in the comm did.
            if let Some(title) = role.filter(|title| title.len() > tracked.title.len()) {
                tracked.title = title.into();
            }
            return None;
        }
        let title = role?;
        tracked.title = title.into();
        tracked.critical = true;
        Some(Observation::Critical { worker, root, id })
    }

    /// The evidence that a critical process is there.
    #[must_use]
    pub fn critical_seen(&self, id: ProcessId, at: Nanos) -> Option<Evidence> {
        let tracked = self.get(id)?;
        let kind = Kind::CriticalSeen { process: tracked.process() };
        Some(Evidence { worker: tracked.worker, root: tracked.root, kind, at })
    }

    /// A pidfd became readable, or the process was found missing.
    pub fn gone(&mut self, id: ProcessId, exit: Exit, at: Nanos) -> Option<Evidence> {
        let tracked = self.by_tgid.get_mut(&id.tgid).filter(|tracked| tracked.id == id)?;
        tracked.exit_seen = true;
        let kind = Kind::ProcessGone { process: tracked.process(), exit };
        tracked.critical.then_some(Evidence { worker: tracked.worker, root: tracked.root, kind, at })
    }

    /// The tracked process with this identity.
    #[must_use]
    pub fn get(&self, id: ProcessId) -> Option<&Tracked> {
        self.by_tgid.get(&id.tgid).filter(|tracked| tracked.id == id)
    }

    /// A worker's root and tree, the root first, then by pid.
    #[must_use]
    pub fn tree(&self, worker: WorkerId) -> Vec<&Tracked> {
        let mut tree: Vec<_> = self.by_tgid.values().filter(|tracked| tracked.worker == worker).collect();
        tree.sort_by_key(|tracked| (tracked.id != tracked.root, tracked.id));
        tree
    }

    /// Every process that belongs to a present life, but not to the one of this root.
    pub fn of_other_roots(&self, root: ProcessId) -> impl Iterator<Item = ProcessId> {
        self.by_tgid.values().filter(move |tracked| tracked.root != root).map(|tracked| tracked.id)
    }

    /// Every process of every worker, as far as it was not seen to end.
    pub fn all(&self) -> impl Iterator<Item = ProcessId> {
        self.by_tgid.values().filter(|tracked| !tracked.exit_seen).map(|tracked| tracked.id)
    }

    /// The root of a worker's present life.
    #[must_use]
    pub fn root(&self, worker: WorkerId) -> Option<ProcessId> {
        self.roots.get(&worker).map(|root| root.id)
    }

    /// What a kernel event means. The hot path: an exit of a critical process becomes evidence here.
    pub fn event(&mut self, event: &Event) -> Option<Observation> {
        let id = ProcessId { tgid: event.tgid, start_ticks: event.start_ticks() };
        let at = Nanos(event.at);
        match event.kind()? {
            EventKind::Exit => {
                let exit = Exit::from_wait_status(event.exit_code.cast_signed());
                let tracked = self.by_tgid.get_mut(&id.tgid).filter(|tracked| tracked.id == id)?;
                tracked.exit_seen = true;
                if tracked.critical {
                    return Some(evidence(tracked, |process| Kind::ProcessExit { process, exit }, at));
                }
                self.by_tgid.remove(&id.tgid);
                None
            }
            EventKind::SignalDeliver => {
                let tracked = self.get(id).filter(|tracked| tracked.critical)?;
                let flags = event.flags;
                let signal = if flags.contains(EventFlags::GROUP_EXIT) && event.exit_code & 0x7f != 0 {
                    event.exit_code & 0x7f
                } else {
                    event.signal
                };
                let certain = signal == libc::SIGKILL.cast_unsigned()
                    || flags.contains(EventFlags::GROUP_EXIT)
                    || !flags.contains(EventFlags::UNKILLABLE);
                let fatal = flags.contains(EventFlags::HANDLER_DEFAULT) || signal == libc::SIGKILL.cast_unsigned();
                let signal = signal.cast_signed();
                if fatal && certain {
                    Some(evidence(tracked, |process| Kind::SignalDelivered { process, signal }, at))
                } else if id == tracked.root && matches!(signal, libc::SIGTERM | libc::SIGINT) {
                    Some(evidence(tracked, |_| Kind::Terminating { signal }, at))
                } else {
                    None
                }
            }
            EventKind::MarkVictim => {
                let tracked = self.get(id).filter(|tracked| tracked.critical)?;
                Some(evidence(tracked, |process| Kind::OomVictim { process }, at))
            }
            EventKind::Fork => {
                let parent = self.by_tgid.get(&event.parent_tgid)?;
                let (worker, root) = (parent.worker, parent.root);
                let title = printable(&String::from_utf8_lossy(event.comm())).into();
                self.by_tgid.insert(id.tgid, Tracked::new(id, worker, root, title));
                event.flags.contains(EventFlags::NOT_WATCHED).then_some(Observation::Rescan(worker))
            }
            EventKind::Exec | EventKind::Rename => {
                let Some(tracked) = self.get(id) else {
                    return (event.slot == NO_SLOT).then_some(Observation::StrangerExecuted(id));
                };
                match (tracked.critical, event.kind()?) {
                    (false, _) => Some(Observation::LookAt(id)),
                    (true, EventKind::Exec) => Some(Observation::Executed(id)),
                    (true, _) => None,
                }
            }
            EventKind::SignalGenerate => self.signal_sent(event, id, at),
            EventKind::TcpResetSent | EventKind::TcpResetReceived => {
                let worker = WorkerId(event.slot);
                let root = self.roots.get(&worker)?.id;
                let direction = match event.kind()? {
                    EventKind::TcpResetSent => Direction::Sent,
                    _ => Direction::Received,
                };
                let address: IpAddr = Ipv6Addr::from(event.peer).to_canonical();
                Some(Observation::TcpReset {
                    worker,
                    root,
                    direction,
                    reason: event.flags.contains(EventFlags::REASON_KNOWN).then_some(event.reason),
                    peer: SocketAddr::new(address, u16::try_from(event.peer_port).unwrap_or_default()),
                    count: event.count.into(),
                    at,
                })
            }
            // Engines listen on many ports of their own (vLLM's gloo on thirteen): only the one that
            // was registered is the serving port.
            EventKind::ListenerClosed if !event.flags.contains(EventFlags::PORT_WATCHED) => None,
            EventKind::ListenerClosed => {
                let worker = WorkerId(event.slot);
                let root = self.roots.get(&worker)?.id;
                Some(Observation::ListenerClosed {
                    worker,
                    root,
                    port: u16::try_from(event.port).ok()?,
                    exiting: event.flags.contains(EventFlags::EXITING),
                    at,
                })
            }
        }
    }
}

impl Processes {
    /// A signal was sent to a process of a worker's tree, or to what supervises it.
    fn signal_sent(&self, event: &Event, id: ProcessId, at: Nanos) -> Option<Observation> {
        let signal = event.signal.cast_signed();
        let ending = event.flags.contains(EventFlags::GROUP_EXIT);
        // Those that a process handles may come often, and say nothing.
        let handled = matches!(signal, libc::SIGHUP | libc::SIGUSR1 | libc::SIGUSR2 | libc::SIGPIPE | libc::SIGXCPU);
        if handled && !ending {
            return None;
        }
        let sent = |to| Kind::SignalSent { to, signal, sender: sender(event), ending };
        if let Some(tracked) = self.get(id) {
            return tracked.critical.then(|| evidence(tracked, |process| sent(Addressee::Process(process)), at));
        }
        let workers = self.supervisors.get(&id)?;
        let to = Addressee::Supervisor { tgid: id.tgid };
        let of = |worker: &WorkerId| {
            let root = self.roots.get(worker)?.id;
            Some(Evidence { worker: *worker, root, kind: sent(to.clone()), at })
        };
        Some(Observation::SupervisorSignalled(workers.iter().filter_map(of).collect()))
    }
}

fn sender(event: &Event) -> Sender {
    if event.flags.contains(EventFlags::FROM_KERNEL) {
        return Sender::kernel();
    }
    // The root cgroup's id, which is what everybody has on a host with cgroup v1.
    const ROOT_CGROUP: u64 = 1;
    let comm = if event.sender_tgid == event.tgid {
        Sender::ITSELF.to_owned()
    } else {
        match printable(&String::from_utf8_lossy(event.comm())) {
            // Whoever calls itself that is not taken for the process that was ended.
            name if name == Sender::ITSELF => format!("{name:?}"),
            name => name,
        }
    };
    Sender { pid: event.sender_tgid, comm, cgroup: (event.cgroup > ROOT_CGROUP).then_some(event.cgroup) }
}

fn evidence(tracked: &Tracked, kind: impl FnOnce(Process) -> Kind, at: Nanos) -> Observation {
    Observation::Evidence(Evidence { worker: tracked.worker, root: tracked.root, kind: kind(tracked.process()), at })
}

#[cfg(test)]
mod tests {
    use super::*;

    const W: WorkerId = WorkerId(0);
    const ROOT: ProcessId = ProcessId { tgid: 100, start_ticks: 7 };

    const CORE: Names<'static> = Names { comm: "VLLM::EngineCor", cmdline: "VLLM::EngineCore" };

    /// The user who owns the root.
    const OWNERS: Option<[u32; 4]> = Some([1000; 4]);

    fn id(tgid: u32) -> ProcessId {
        ProcessId { tgid, start_ticks: 8 }
    }

    fn tree() -> Processes {
        let mut processes = Processes::default();
        let vllm = crate::engines::Profile::find("vllm").expect("a profile");
        let role_of: RoleOf = Arc::new(move |parent, names| match parent {
            Some(parent) => vllm.role_of_child(parent, names).map(|role| role.title),
            None => vllm.role(names.comm, names.cmdline).map(|role| role.title),
        });
        processes.adopt_root(W, ROOT, "vllm", Some(1000), role_of);
        processes
    }

    fn event(kind: EventKind, tgid: u32, start_ticks: u64) -> Event {
        let mut bytes = [0_u8; size_of::<Event>()];
        bytes[24..28].copy_from_slice(&(kind as u32).to_ne_bytes());
        let event = Event::from_bytes(&bytes).expect("an event's size");
        Event { start_boottime: start_ticks * 10_000_000, tgid, ..event }
    }

    fn forked(processes: &mut Processes, child: u32, parent: u32) {
        let fork = Event { parent_tgid: parent, ..event(EventKind::Fork, child, 8) };
        assert_eq!(processes.event(&fork), None);
    }

    fn exit(tgid: u32, start_ticks: u64) -> Event {
        Event { exit_code: 9, ..event(EventKind::Exit, tgid, start_ticks) }
    }

    #[test]
    fn a_child_gets_its_role_when_its_title_appears_and_then_its_exit_is_evidence() {
        let mut processes = tree();
        forked(&mut processes, 200, 100);
        let mut rename = event(EventKind::Rename, 200, 8);
        rename.comm[..15].copy_from_slice(b"VLLM::EngineCor");
        assert_eq!(processes.event(&rename), Some(Observation::LookAt(id(200))));
        let critical = processes.seen(W, id(200), OWNERS, None, CORE);
        assert_eq!(critical, Some(Observation::Critical { worker: W, root: ROOT, id: id(200) }));
        let Some(Observation::Evidence(Evidence { kind: Kind::ProcessExit { process, exit }, root, .. })) =
            processes.event(&exit(200, 8))
        else {
            panic!("no evidence");
        };
        assert_eq!((process.title.as_ref(), process.root, root), ("VLLM::EngineCore", false, ROOT));
        assert_eq!(exit, Exit::Signal { signal: 9, core: false });
    }

    #[test]
    fn a_double_fork_with_setsid_stays_in_the_tree_though_its_parent_is_init() {
        let mut processes = tree();
        forked(&mut processes, 200, 100);
        forked(&mut processes, 201, 200);
        // The one in between ends, and /proc shows the other below init; setsid(2) is no event.
        assert_eq!(processes.event(&exit(200, 8)), None);
        let init = Names { comm: "systemd", cmdline: "/sbin/init" };
        let critical = processes.seen(W, id(201), OWNERS, Some(init), CORE);
        assert_eq!(critical, Some(Observation::Critical { worker: W, root: ROOT, id: id(201) }));
        // The root ends; what it left behind is still its own, and so is what that makes.
        assert!(processes.event(&exit(ROOT.tgid, ROOT.start_ticks)).is_some());
        forked(&mut processes, 202, 201);
        let left: Vec<u32> =
            processes.tree(W).iter().filter(|tracked| !tracked.exit_seen).map(|tracked| tracked.id.tgid).collect();
        assert_eq!(left, [201, 202]);
    }

    #[test]
    fn an_exec_of_a_process_of_nobodys_is_told_until_it_is_somebodys() {
        let mut processes = tree();
        let exec = |tgid| Event { slot: NO_SLOT, ..event(EventKind::Exec, tgid, 8) };
        assert_eq!(processes.event(&exec(300)), Some(Observation::StrangerExecuted(id(300))));
        assert_eq!(processes.event(&event(EventKind::Exec, 300, 8)), None, "one that was watched, and is forgotten");
        forked(&mut processes, 200, 100);
        assert_eq!(processes.event(&exec(200)), Some(Observation::LookAt(id(200))));
    }

    #[test]
    fn a_compiler_or_resource_tracker_may_come_and_go() {
        let mut processes = tree();
        forked(&mut processes, 201, 100);
        let tracker = "python -B -c from multiprocessing.resource_tracker import main;main(32)";
        assert_eq!(processes.seen(W, id(201), OWNERS, None, Names { comm: "python", cmdline: tracker }), None);
        assert_eq!(processes.event(&exit(201, 8)), None);
        assert_eq!(processes.tree(W).len(), 1);
    }

    #[test]
    fn a_fork_that_still_shows_its_parents_names_is_nothing_yet() {
        let mut processes = tree();
        processes.seen(W, id(200), OWNERS, None, CORE);
        forked(&mut processes, 300, 200);
        // It looks for a compiler that is not installed, and ends under its parent's name.
        assert_eq!(processes.seen(W, id(300), OWNERS, Some(CORE), CORE), None);
        assert_eq!(processes.event(&exit(300, 8)), None);
    }

    #[test]
    fn a_title_counts_for_processes_of_the_owner_alone() {
        let mut processes = tree();
        for (child, users) in [(200, Some([65534; 4])), (201, Some([65534, 1000, 1000, 1000])), (202, None)] {
            forked(&mut processes, child, 100);
            assert_eq!(processes.seen(W, id(child), users, None, CORE), None, "{users:?}");
            assert_eq!(processes.event(&exit(child, 8)), None);
        }
        // The engine gave up the root's user before it began to listen.
        processes.owned_by(W, ROOT, Some(65534));
        forked(&mut processes, 203, 100);
        assert!(processes.seen(W, id(203), Some([65534; 4]), None, CORE).is_some());
    }

    #[test]
    fn a_pid_that_is_used_again_is_another_process() {
        let mut processes = tree();
        assert_eq!(processes.event(&exit(100, 6)), None, "the root's pid, but an older process");
        assert_eq!(processes.event(&exit(100, 9)), None, "or a younger one");
        assert!(matches!(processes.event(&exit(100, 7)), Some(Observation::Evidence(_))));
    }

    #[test]
    fn a_grandchild_belongs_to_the_worker_too() {
        let mut processes = tree();
        forked(&mut processes, 200, 100);
        forked(&mut processes, 300, 200);
        forked(&mut processes, 999, 998);
        assert_eq!(processes.tree(W).iter().map(|t| t.id.tgid).collect::<Vec<_>>(), [100, 200, 300]);
    }

    #[test]
    fn the_rank_in_the_command_line_completes_the_title() {
        let mut processes = tree();
        let short = Names { comm: "VLLM::EngineCor", cmdline: "" };
        processes.seen(W, id(200), OWNERS, None, short);
        let ranked = Names { cmdline: "VLLM::EngineCore_DP1", ..short };
        assert_eq!(processes.seen(W, id(200), OWNERS, None, ranked), None, "critical already");
        assert_eq!(processes.get(id(200)).unwrap().title.as_ref(), "VLLM::EngineCore_DP1");
    }

    #[test]
    fn a_signal_that_an_init_may_ignore_is_no_evidence() {
        let mut processes = tree();
        let deliver = |signal, flags| Event { signal, flags, ..event(EventKind::SignalDeliver, 100, 7) };
        let default = EventFlags::HANDLER_DEFAULT;
        let segv = libc::SIGSEGV.cast_unsigned();
        assert_eq!(processes.event(&deliver(segv, default.with(EventFlags::UNKILLABLE))), None);
        assert_eq!(processes.event(&deliver(segv, EventFlags::default())), None, "it has a handler");
        assert!(processes.event(&deliver(segv, default)).is_some());
        assert!(processes.event(&deliver(9, EventFlags::UNKILLABLE)).is_some(), "KILL from outside cannot be ignored");
    }

    #[test]
    fn a_signal_is_told_with_its_sender() {
        let mut processes = tree();
        let sent = |signal, flags| Event { signal, flags, sender_tgid: 7, ..event(EventKind::SignalGenerate, 100, 7) };
        let mut kill = sent(9, EventFlags::GROUP_EXIT);
        kill.comm[..4].copy_from_slice(b"kill");
        let sender_of = |processes: &mut Processes, event: &Event| match processes.event(event) {
            Some(Observation::Evidence(Evidence { kind: Kind::SignalSent { sender, .. }, .. })) => {
                Some(sender.to_string())
            }
            _ => None,
        };
        assert_eq!(sender_of(&mut processes, &kill).as_deref(), Some("kill (pid 7)"));
        let itself = Event { sender_tgid: 100, ..sent(6, EventFlags::default()) };
        assert_eq!(sender_of(&mut processes, &itself).as_deref(), Some("itself"));
        let kernel = Event { sender_tgid: 0, ..sent(9, EventFlags::FROM_KERNEL) };
        assert_eq!(sender_of(&mut processes, &kernel).as_deref(), Some("the kernel"));
        let handled = sent(10, EventFlags::default());
        assert_eq!(sender_of(&mut processes, &handled), None, "SIGUSR1 to one that handles it");
    }

    #[test]
    fn a_signal_to_the_supervisor_is_a_word_about_its_workers() {
        let mut processes = tree();
        let shell = ProcessId { tgid: 50, start_ticks: 3 };
        processes.supervised_by(W, shell);
        let sent = Event { signal: 15, sender_tgid: 7, ..event(EventKind::SignalGenerate, 50, 3) };
        let Some(Observation::SupervisorSignalled(evidence)) = processes.event(&sent) else { panic!("nothing") };
        assert_eq!((evidence[0].worker, evidence[0].root), (W, ROOT));
        assert_eq!(processes.unsupervised(W), Some(shell), "nobody else's");
        assert_eq!(processes.event(&sent), None);
    }

    #[test]
    fn sigterm_to_a_root_that_handles_it_means_that_it_leaves() {
        let mut processes = tree();
        let terminate = Event { signal: 15, ..event(EventKind::SignalDeliver, 100, 7) };
        let Some(Observation::Evidence(Evidence { kind, .. })) = processes.event(&terminate) else { panic!() };
        assert_eq!(kind, Kind::Terminating { signal: 15 });
    }
}
