//! Processes that declare themselves workers by their environment (see
//! [`crate::config::DECLARATION`]).
//!
//! A variable is inherited, so most processes that carry it mean nothing by it. Per container and
//! name there is at most one [`Claim`]: that of the container's init, or else of the oldest process
//! that holds the listening socket of the endpoint. An ancestor is older than its descendants, so
//! the oldest is also the topmost.
//!
//! Looking costs little because most of it is left out: a process is looked at when its pid is new
//! and for a few turns more, since between fork and exec it still shows its parent's environment;
//! later only every [`ROUND`]th turn, should it have called exec or its pid have been given away.
//! Where the kernel tells of an exec, that process is looked at between two turns.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::Arc;

use lastgasp_protocol::Container;

use super::reach::{Reach, Reached};
use super::{ProcessInfo, cgroup, listeners, memory, tree};
use crate::config::{self, DECLARATION, DeclareConfig, WorkerConfig};
use crate::core::ProcessId;
use crate::sensors::health::Place;
use crate::sensors::kubelet::Pods;

/// Turns in which a new process is looked at again.
const YOUNG: u8 = 3;
/// An older process is looked at every so many turns.
const ROUND: u32 = 10;
/// The variable that makes a process a carrier.
const WORKER: &str = DECLARATION[0].0;
/// Longest value that is looked at, in bytes.
const MAX_VALUE: usize = 4096;
/// As many characters of a name are shown when it is refused. No allowed one is longer.
const MAX_NAME: usize = 256;

/// Why a declaration does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum Refusal {
    /// A variable is missing, or has a value that it may not have.
    Malformed,
    /// The user or the cgroup may not declare anything.
    NotAllowed,
    /// The endpoint is not an address of the process's network namespace; or others listen there; or the
    /// host does not route it into that namespace.
    EndpointElsewhere,
    /// The health address is not an address of the process's network namespace, or cannot be asked from
    /// within that namespace.
    HealthElsewhere,
    /// A worker of the configuration has the name.
    NameConfigured,
    /// Another declared worker of that name is alive.
    NameTaken,
    /// Another worker serves there.
    EndpointTaken,
    /// There are too many declared workers.
    TooMany,
}

/// A refusal, and what a person needs to know to mend it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedClaim {
    /// Why.
    pub refusal: Refusal,
    /// For people.
    pub detail: String,
    /// Who has to vouch for it has not answered: it may count as soon as they do.
    pub is_open: bool,
}

impl RefusedClaim {
    /// One that stands until the process or the configuration changes.
    #[must_use]
    pub const fn new(refusal: Refusal, detail: String) -> Self {
        Self { refusal, detail, is_open: false }
    }
}

/// What a declaration comes from: a container, or where there is none, a cgroup.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Origin {
    /// Container id or cgroup path.
    pub place: String,
    /// Inode number of the PID namespace.
    pub pid_namespace: Option<u32>,
}

/// A process that says it is a worker.
#[derive(Debug, Clone)]
pub struct Claim {
    /// The value of `LASTGASP_WORKER`.
    pub name: String,
    /// Where from.
    pub origin: Origin,
    /// The worker's root.
    pub info: ProcessInfo,
    /// The user as whom it acts.
    pub owner: Option<u32>,
    /// Where it runs.
    pub container: Container,
    /// What it declares, as far as the process alone can tell; names and addresses that others have are the
    /// caller's to refuse.
    pub verdict: Result<Declared, RefusedClaim>,
}

/// A worker that a process has declared.
#[derive(Debug, Clone)]
pub struct Declared {
    /// The worker.
    pub worker: Arc<WorkerConfig>,
    /// Where its health is asked.
    pub place: Place,
    /// Others listen on its endpoint.
    pub others_listen: bool,
}

/// What changes when a process calls exec: its stack and environment lie elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Image {
    stack: u64,
    environment: Option<u64>,
}

struct Known {
    id: ProcessId,
    image: Image,
    looks: u8,
    turn: u32,
}

struct Carrier {
    id: ProcessId,
    name: String,
    origin: Origin,
    container: Container,
    /// It is pid 1 of a PID namespace below ours.
    init: bool,
    worker: Result<Arc<WorkerConfig>, String>,
}

/// Looks for declarations, one turn after the other.
pub struct Scanner {
    uids: Vec<u32>,
    /// None: whichever cgroup it is.
    cgroups: Option<Vec<String>>,
    too_wide: Vec<cgroup::TooWide>,
    pods: Option<Pods>,
    known: HashMap<u32, Known>,
    carriers: HashMap<ProcessId, Carrier>,
    hidden: HashSet<u32>,
    turn: u32,
}

impl Scanner {
    /// Nothing has been looked at yet.
    #[must_use]
    pub fn new(allowed: &DeclareConfig, pods: Option<Pods>) -> Self {
        let (cgroups, too_wide) = cgroup::narrow(&allowed.cgroups, cgroup::own_depth());
        Self {
            uids: allowed.uids.clone(),
            cgroups: (!allowed.cgroups.is_empty()).then_some(cgroups),
            too_wide,
            pods,
            known: HashMap::new(),
            carriers: HashMap::new(),
            hidden: HashSet::new(),
            turn: 0,
        }
    }

    /// Cgroups of the configuration that would let every process of the host declare itself, and count for
    /// none.
    #[must_use]
    pub fn too_wide(&self) -> &[cgroup::TooWide] {
        &self.too_wide
    }

    /// How many processes may not be looked into, for want of CAP_SYS_PTRACE.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.hidden.len()
    }

    /// One turn. `ours` are the processes of workers that are known: they and all below them claim
    /// nothing.
    ///
    /// # Errors
    /// `/proc` cannot be listed.
    pub fn look(&mut self, ours: &HashSet<ProcessId>) -> io::Result<Vec<Claim>> {
        self.turn = self.turn.wrapping_add(1);
        for tgid in super::all()? {
            if let Some(known) = self.known.get_mut(&tgid) {
                known.turn = self.turn;
                if known.looks >= YOUNG && tgid % ROUND != self.turn % ROUND {
                    continue;
                }
            }
            self.look_into(tgid);
        }
        let Self { known, carriers, hidden, turn, .. } = self;
        known.retain(|_, known| known.turn == *turn);
        carriers.retain(|id, _| known.get(&id.tgid).is_some_and(|known| known.id == *id));
        hidden.retain(|tgid| known.contains_key(tgid));
        Ok(self.claims(ours))
    }

    /// Between two turns, at processes that have called exec. Nothing, if none of them carries the
    /// variable.
    pub fn look_at(&mut self, executed: &[u32], ours: &HashSet<ProcessId>) -> Vec<Claim> {
        for tgid in executed {
            // Whatever was there is of another program.
            self.known.remove(tgid);
            self.look_into(*tgid);
        }
        let carries = self.carriers.keys().any(|carrier| executed.contains(&carrier.tgid));
        if carries { self.claims(ours) } else { Vec::new() }
    }

    fn look_into(&mut self, tgid: u32) {
        let Some(stat) = super::stat(tgid) else { return };
        let id = super::id_of(tgid, &stat);
        let image = Image { stack: stat.startstack, environment: stat.env_start };
        match self.known.get_mut(&tgid) {
            Some(known) if known.id == id && known.image == image => {
                known.looks = known.looks.saturating_add(1);
                return;
            }
            _ => _ = self.known.insert(tgid, Known { id, image, looks: 0, turn: self.turn }),
        }
        self.carriers.retain(|carrier, _| carrier.tgid != tgid);
        self.hidden.remove(&tgid);
        if stat.flags & super::find::KERNEL_THREAD != 0 || super::is_dead(&stat) {
            return;
        }
        match super::environ_values(tgid, &DECLARATION.map(|(variable, _)| variable)) {
            Ok(values) => {
                if let Some(carrier) = Carrier::of(id, values) {
                    self.carriers.insert(id, carrier);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => _ = self.hidden.insert(tgid),
            // Looked into at every turn, until it can be.
            Err(error) if memory::is_stuck(&error) => {
                if let Some(known) = self.known.get_mut(&tgid) {
                    (known.image.stack, known.looks) = (0, 0);
                }
            }
            Err(_) => {}
        }
    }

    fn claims(&self, ours: &HashSet<ProcessId>) -> Vec<Claim> {
        let mut groups: BTreeMap<(&Origin, &str), Vec<&Carrier>> = BTreeMap::new();
        for carrier in self.carriers.values() {
            groups.entry((&carrier.origin, &carrier.name)).or_default().push(carrier);
        }
        let ours_tgids: HashSet<u32> = ours.iter().map(|id| id.tgid).collect();
        let reach = Reach::here(self.pods.as_ref());
        let mut claims = Vec::new();
        for carriers in groups.values_mut() {
            carriers.sort_by_key(|carrier| (!carrier.init, carrier.id.start_ticks, carrier.id.tgid));
            let outside = |carrier: &&&Carrier| {
                !ours.contains(&carrier.id)
                    && !tree::ancestors(carrier.id.tgid).iter().any(|parent| ours_tgids.contains(parent))
            };
            // Who may not declare anything cannot stand before somebody who may.
            let root = carriers.iter().filter(|carrier| self.may(carrier) && carrier.is_root()).find(outside);
            let known = carriers.iter().any(|carrier| ours.contains(&carrier.id));
            let refused = || {
                let first = carriers.iter().find(|carrier| carrier.worker.is_err() || !self.may(carrier))?;
                (!known).then_some(first)
            };
            let Some(carrier) = root.or_else(refused) else { continue };
            let Some(info) = tree::describe(carrier.id.tgid).filter(|info| info.id == carrier.id) else { continue };
            claims.push(Claim {
                name: carrier.name.clone(),
                origin: carrier.origin.clone(),
                info,
                owner: super::effective_user(carrier.id.tgid),
                container: carrier.container.clone(),
                verdict: self.verdict(carrier, &reach),
            });
        }
        claims
    }

    fn may(&self, carrier: &Carrier) -> bool {
        self.refusal_of_owner(carrier).is_none()
    }

    fn refusal_of_owner(&self, carrier: &Carrier) -> Option<String> {
        let Self { uids, cgroups, .. } = self;
        if !uids.is_empty() {
            // All of them: who runs another's set-user-ID program has chosen its environment.
            let Some(owners) = super::uids(carrier.id.tgid) else {
                return Some("the process's user is not known".to_owned());
            };
            if let Some(uid) = owners.iter().find(|uid| !uids.contains(uid)) {
                return Some(format!("user {uid} is not among declare.uids"));
            }
        }
        let path = &carrier.container.cgroup_path;
        let within = |allowed: &String| cgroup::is_within(path, allowed);
        if cgroups.as_ref().is_some_and(|cgroups| !cgroups.iter().any(within)) {
            return Some(format!("cgroup {path} is not within any of declare.cgroups"));
        }
        None
    }

    fn verdict(&self, carrier: &Carrier, reach: &Reach<'_>) -> Result<Declared, RefusedClaim> {
        if let Some(detail) = self.refusal_of_owner(carrier) {
            return Err(RefusedClaim::new(Refusal::NotAllowed, detail));
        }
        let worker = carrier.worker.as_ref().map_err(|detail| RefusedClaim::new(Refusal::Malformed, detail.clone()))?;
        let pod_uid = carrier.container.pod_uid.as_deref();
        let Reached { place, others_listen } = reach.place(carrier.id, pod_uid, worker)?;
        Ok(Declared { worker: Arc::clone(worker), place, others_listen })
    }
}

impl Carrier {
    fn of(id: ProcessId, values: Vec<(String, String)>) -> Option<Self> {
        let name = values.iter().find(|(variable, _)| variable == WORKER)?.1.chars().take(MAX_NAME).collect();
        let container = cgroup::container(id.tgid).unwrap_or_default();
        let place = container.container_id.clone().unwrap_or_else(|| container.cgroup_path.clone());
        let origin = Origin { place, pid_namespace: container.pid_namespace };
        let worker = match values.iter().find(|(_, value)| value.len() > MAX_VALUE) {
            Some((variable, value)) => {
                Err(format!("{variable} has {} bytes; {MAX_VALUE} are the most that it may have", value.len()))
            }
            None => config::declared(&values)
                .map(Arc::new)
                .map_err(|problems| problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")),
        };
        let init = id.tgid != 1 && super::innermost_pid(id.tgid) == Some(1);
        Some(Self { id, name, origin, container, init, worker })
    }

    fn is_root(&self) -> bool {
        self.init
            || self.worker.as_ref().is_ok_and(|worker| {
                // A titled process is somebody's child, if perhaps an orphan.
                super::comm(self.id.tgid).is_some_and(|comm| !comm.contains("::"))
                    && listeners::sockets(Some(self.id.tgid), worker.port)
                        .and_then(|inodes| listeners::holds(self.id.tgid, &inodes))
                        .unwrap_or(false)
            })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::net::TcpListener;
    use std::os::fd::{AsRawFd as _, OwnedFd};
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn everybody() -> DeclareConfig {
        DeclareConfig {
            enabled: true,
            uids: vec![nix::unistd::geteuid().as_raw()],
            cgroups: Vec::new(),
            scan_interval: std::time::Duration::from_secs(1),
            on_lost: config::OnLost::None,
            reap_grace: std::time::Duration::ZERO,
            sever: false,
            kubelet: None,
        }
    }

    fn word(test: &str) -> String {
        format!("{test}-{}-{}", std::process::id(), super::super::monotonic_now().0)
    }

    /// A shell that has executed, with these variables, and with `socket` for its standard input.
    fn shell(variables: &[(&str, &str)], socket: Option<OwnedFd>, script: &str) -> (Child, ProcessId) {
        let mut shell = Command::new("sh")
            .args(["-c", script])
            .envs(variables.iter().copied())
            .stdin(socket.map_or_else(Stdio::piped, Stdio::from))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(shell.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let id = super::super::identify(shell.id()).unwrap();
        (shell, id)
    }

    fn claims(scanner: &mut Scanner, name: &str, ours: &[ProcessId]) -> Vec<Claim> {
        let claims = scanner.look(&ours.iter().copied().collect()).unwrap();
        claims.into_iter().filter(|claim| claim.name == name).collect()
    }

    fn end(mut shell: Child) {
        for child in super::super::identify(shell.id()).map(tree::descendants).unwrap_or_default() {
            let pid = nix::unistd::Pid::from_raw(child.id.tgid.cast_signed());
            nix::sys::signal::kill(pid, nix::sys::signal::SIGKILL).unwrap();
        }
        shell.kill().unwrap();
        shell.wait().unwrap();
    }

    fn refusal(claims: &[Claim]) -> Option<Refusal> {
        claims.first().and_then(|claim| claim.verdict.as_ref().err()).map(|refused| refused.refusal)
    }

    const WAIT: &str = "echo up; exec sleep 1000";

    #[test]
    fn the_holder_of_the_endpoints_listener_claims_and_its_children_do_not() {
        let name = word("holder");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let listening = listener.local_addr().unwrap();
        let endpoint = format!("http://{listening}");
        let variables = [("LASTGASP_WORKER", name.as_str()), ("LASTGASP_ENDPOINT", endpoint.as_str())];
        // The child of the shell has its environment and its socket.
        let (holder, id) = shell(&variables, Some(listener.into()), "sh -c 'echo up; exec sleep 1000'; true");
        let (probe, _) = shell(&variables, None, WAIT);
        let mut scanner = Scanner::new(&everybody(), None);
        let claim = claims(&mut scanner, &name, &[]).remove(0);
        assert_eq!(claim.info.id, id);
        let Declared { worker, place, .. } = claim.verdict.unwrap();
        assert_eq!(worker.endpoint, endpoint);
        assert!(
            place.namespace.is_none() && place.listens.is_some_and(|listens| listens.address == listening),
            "{place:?}"
        );
        assert_eq!(claims(&mut scanner, &name, &[]).len(), 1, "every turn again, until it is known");
        assert!(claims(&mut scanner, &name, &[id]).is_empty(), "its child holds the socket, but is its child");
        end(probe);
        end(holder);
        assert!(claims(&mut scanner, &name, &[]).is_empty());
    }

    #[test]
    fn what_holds_no_listener_is_silent_and_what_is_malformed_is_refused_once() {
        let (quiet, broken) = (word("quiet"), word("broken"));
        let quiet_ones = [("LASTGASP_WORKER", quiet.as_str()), ("LASTGASP_ENDPOINT", "http://127.0.0.1:1")];
        let broken_ones = [("LASTGASP_WORKER", broken.as_str()), ("LASTGASP_ENDPOINT", "https://x")];
        let shells = [shell(&quiet_ones, None, WAIT), shell(&broken_ones, None, WAIT), shell(&broken_ones, None, WAIT)];
        let mut scanner = Scanner::new(&everybody(), None);
        assert!(claims(&mut scanner, &quiet, &[]).is_empty());
        let refused = claims(&mut scanner, &broken, &[]);
        assert_eq!((refused.len(), refusal(&refused)), (1, Some(Refusal::Malformed)));
        assert!(refused[0].verdict.as_ref().unwrap_err().detail.contains("LASTGASP_ENDPOINT"));
        shells.into_iter().for_each(|(shell, _)| end(shell));
    }

    #[test]
    fn a_value_without_end_is_refused_with_its_length() {
        let name = word("endless");
        let models = "x".repeat(MAX_VALUE + 1);
        let variables = [
            ("LASTGASP_WORKER", name.as_str()),
            ("LASTGASP_ENDPOINT", "http://127.0.0.1:1"),
            ("LASTGASP_MODELS", models.as_str()),
        ];
        let (endless, _) = shell(&variables, None, WAIT);
        let refused = claims(&mut Scanner::new(&everybody(), None), &name, &[]);
        assert_eq!(refusal(&refused), Some(Refusal::Malformed));
        let detail = &refused[0].verdict.as_ref().unwrap_err().detail;
        assert_eq!(detail, "LASTGASP_MODELS has 4097 bytes; 4096 are the most that it may have");
        end(endless);
    }

    #[test]
    fn who_is_not_allowed_is_refused() {
        let name = word("stranger");
        let variables = [("LASTGASP_WORKER", name.as_str()), ("LASTGASP_ENDPOINT", "http://127.0.0.1:1")];
        let (stranger, id) = shell(&variables, None, WAIT);
        let path = cgroup::container(id.tgid).unwrap().cgroup_path;
        let refused = |uids: Vec<u32>, cgroups: Vec<String>| {
            let mut scanner = Scanner::new(&DeclareConfig { uids, cgroups, ..everybody() }, None);
            refusal(&claims(&mut scanner, &name, &[]))
        };
        assert_eq!(refused(vec![u32::MAX - 7], vec![]), Some(Refusal::NotAllowed));
        assert_eq!(refused(vec![], vec!["/no.slice".to_owned()]), Some(Refusal::NotAllowed));
        if path == "/" {
            assert_eq!(refused(vec![], vec![String::new()]), Some(Refusal::NotAllowed), "the whole host");
        } else {
            assert_eq!(refused(vec![], vec![path.clone()]), None);
            let beginning = path[..path.len() - 1].to_owned();
            assert_eq!(refused(vec![], vec![beginning]), Some(Refusal::NotAllowed), "a part of a name is no parent");
        }
        end(stranger);
    }

    #[test]
    fn a_process_that_gets_the_variable_by_exec_is_found_later() {
        let name = word("exec");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (reader, writer) = nix::unistd::pipe().unwrap();
        let script = format!(
            // By its path: dash takes one digit for a descriptor, and other tests have opened files too.
            "echo up; read line </proc/self/fd/{}; export LASTGASP_WORKER={name} LASTGASP_ENDPOINT={endpoint}; \
             exec sleep 1000",
            reader.as_raw_fd()
        );
        nix::fcntl::fcntl(&reader, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
        let (holder, id) = shell(&[], Some(listener.into()), &script);
        let mut scanner = Scanner::new(&everybody(), None);
        // Old enough to be looked at now and then only.
        let mut notified = Scanner::new(&everybody(), None);
        for _ in 0..=YOUNG {
            assert!(claims(&mut scanner, &name, &[]).is_empty());
            assert!(claims(&mut notified, &name, &[]).is_empty());
        }
        nix::unistd::write(&writer, b"go\n").unwrap();
        while super::super::comm(id.tgid).unwrap() != "sleep" {
            assert!(super::super::is_alive(id), "the shell has ended");
            std::thread::yield_now();
        }
        let found = (0..=ROUND).any(|_| claims(&mut scanner, &name, &[]).iter().any(|claim| claim.info.id == id));
        assert!(found, "within a round");
        let at_once = notified.look_at(&[id.tgid], &HashSet::new());
        assert!(at_once.iter().any(|claim| claim.info.id == id), "if its exec is reported");
        assert!(notified.look_at(&[std::process::id()], &HashSet::new()).is_empty(), "another one's exec");
        end(holder);
    }

    /// What a turn costs: `cargo test -p lastgasp --lib -- --ignored --nocapture cost_of_a_turn`.
    #[test]
    #[ignore = "measures; says nothing about right or wrong"]
    fn cost_of_a_turn() {
        let children: Vec<Child> = (0..1000).map(|_| Command::new("sleep").arg("1000").spawn().unwrap()).collect();
        let mut scanner = Scanner::new(&everybody(), None);
        let begin = std::time::Instant::now();
        scanner.look(&HashSet::new()).unwrap();
        eprintln!("first turn, {} processes: {:?}", scanner.known.len(), begin.elapsed());
        for _ in 0..YOUNG {
            scanner.look(&HashSet::new()).unwrap();
        }
        let begin = std::time::Instant::now();
        for _ in 0..ROUND {
            scanner.look(&HashSet::new()).unwrap();
        }
        eprintln!("later turns, each: {:?}", begin.elapsed() / ROUND);
        children.into_iter().for_each(end);
    }
}
