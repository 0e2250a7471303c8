//! Workers that declare themselves: taken in, refused, and forgotten when their life is over.
//!
//! A claim is accepted for a name that nobody has, or whose last holder is dead. So no process can
//! have another's worker withdrawn by claiming its name or its address.

use lastgasp_protocol::ClosedName as _;
use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;

use crate::config::{DeclareConfig, Find, SeverConfig, WorkerConfig};
use crate::core::{Nanos, ProcessId, WorkerId};
use crate::metrics::ACCEPTED;
use crate::privileges;
use crate::sensors::health::Place;
use crate::sensors::kubelet::Pods;
use crate::sensors::proc::declare::{Claim, Declared, Refusal, RefusedClaim, Scanner};
use crate::sensors::proc::{self};

pub(super) use crate::sensors::proc::declare::Origin;

use super::{Message, Supervisor, start};

/// Declared workers at one time; more than any node has GPUs.
const MAX_DECLARED: usize = 256;
/// Of them, in one container or cgroup: no container can take all places.
const MAX_IN_ONE_PLACE: usize = 32;
/// Refusals that are logged in a minute: of those who may not declare anything, and as many of others, whom
/// the first cannot drown out. All are counted.
const MAX_LOGGED: usize = 30;
/// Processes of nobody's that are looked at in a second because they have called exec. Of more, as in
/// a storm of short-lived ones, none is reported, and all processes are looked through instead.
const STRANGERS: u16 = 128;
/// How long a declared worker whose life is over is kept at the least, so that what is still alive
/// of it was looked for.
const KEPT: Duration = Duration::from_secs(3);

/// What one look has found.
pub(super) struct ClaimsLook {
    scanner: Scanner,
    at: At,
    claims: io::Result<Vec<Claim>>,
}

/// What was looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    /// Everything.
    Everybody,
    /// Processes that have just called exec.
    Strangers,
}

/// What is kept between two looks.
pub(super) struct Declarations {
    /// Not there while it looks, on another thread, and where declarations are off.
    scanner: Option<Scanner>,
    first_look_is_over: bool,
    /// When everybody was last looked at.
    looked_at: Option<Nanos>,
    /// Processes that have called exec and were not looked at yet.
    strangers: Vec<u32>,
    /// More have called exec than the kernel reported.
    strangers_missed: bool,
    /// Refusals that were logged, so that each is logged once.
    refused: HashMap<(Origin, String), Refusal>,
    logged: RefusalRate,
    hidden_logged: bool,
    /// Processes whose declaration is refused for now, see [`RefusedClaim::is_open`].
    open: HashSet<ProcessId>,
}

impl Declarations {
    pub(super) fn new(config: &DeclareConfig, side: &Handle) -> Self {
        let pods = config.kubelet.clone().filter(|_| config.enabled).map(|kubelet| Pods::follow(side, kubelet));
        Self {
            scanner: config.enabled.then(|| Scanner::new(config, pods)),
            first_look_is_over: !config.enabled,
            looked_at: None,
            strangers: Vec::new(),
            strangers_missed: false,
            refused: HashMap::new(),
            logged: RefusalRate::default(),
            hidden_logged: false,
            open: HashSet::new(),
        }
    }

    pub(super) const fn first_look_is_over(&self) -> bool {
        self.first_look_is_over
    }

    /// Whether it is still to be seen if this process may declare a worker.
    pub(super) fn is_open(&self, process: ProcessId) -> bool {
        self.open.contains(&process)
    }

    /// The kernel reported one; [`Supervisor::look_at_strangers`] follows.
    pub(super) fn stranger_executed(&mut self, tgid: u32) {
        self.strangers.push(tgid);
    }
}

/// When refusals were logged in the last minute.
#[derive(Default)]
struct RefusalRate {
    /// Of those who may not declare anything.
    strangers: VecDeque<Nanos>,
    others: VecDeque<Nanos>,
}

impl RefusalRate {
    fn may_log(&mut self, refusal: Refusal, now: Nanos) -> bool {
        let logged = if refusal == Refusal::NotAllowed { &mut self.strangers } else { &mut self.others };
        while logged.front().is_some_and(|at| now.since(*at) >= Duration::from_secs(60)) {
            logged.pop_front();
        }
        let may = logged.len() < MAX_LOGGED;
        if may {
            logged.push_back(now);
        }
        may
    }
}

/// What to do about a claim.
enum Judgement {
    Accept(Arc<WorkerConfig>, Place),
    Refuse(RefusedClaim),
    /// It is a known worker's, or the configuration looks for it.
    Known,
}

impl Supervisor {
    /// Asks the kernel for those that call exec in the next second.
    pub(super) fn ask_for_strangers(&mut self) {
        if !self.config.declare.enabled {
            return;
        }
        let Some(programs) = self.programs.as_mut() else { return };
        match programs.tell_strangers(STRANGERS) {
            Ok(left) => self.declarations.strangers_missed |= left == 0,
            Err(error) => {
                tracing::debug!(%error, "the kernel does not report calls of exec: the next scan finds processes that declare a worker")
            }
        }
    }

    /// Looks through all processes, if it is time to.
    pub(super) fn look_for_declarations(&mut self) {
        let now = proc::monotonic_now();
        let interval = self.config.declare.scan_interval;
        let Declarations { looked_at, strangers_missed, .. } = &self.declarations;
        if !strangers_missed && looked_at.is_some_and(|at| now.since(at) < interval) {
            return;
        }
        let looks = self.look_in_background(At::Everybody, |scanner, ours| scanner.look(ours));
        if looks {
            self.declarations.looked_at = Some(now);
            self.declarations.strangers_missed = false;
        }
    }

    /// Looks at the processes that have called exec, once everybody was looked at.
    pub(super) fn look_at_strangers(&mut self) {
        if self.declarations.strangers.is_empty() || !self.declarations.first_look_is_over {
            return;
        }
        if self.declarations.scanner.is_some() {
            let strangers = std::mem::take(&mut self.declarations.strangers);
            self.look_in_background(At::Strangers, move |scanner, ours| Ok(scanner.look_at(&strangers, ours)));
        }
    }

    /// On a blocking thread. False while it looks already.
    fn look_in_background(
        &mut self,
        at: At,
        look: impl FnOnce(&mut Scanner, &HashSet<ProcessId>) -> io::Result<Vec<Claim>> + Send + 'static,
    ) -> bool {
        let Some(mut scanner) = self.declarations.scanner.take() else { return false };
        let mut ours: HashSet<ProcessId> = self.processes.all().collect();
        for (_, slot) in self.workers.iter() {
            ours.extend(&slot.former);
        }
        let messages = self.messages.clone();
        tokio::task::spawn_blocking(move || {
            let claims = look(&mut scanner, &ours);
            let _ = messages.send(Message::Declared(ClaimsLook { scanner, at, claims }));
        });
        true
    }

    pub(super) fn declared(&mut self, looked: ClaimsLook) {
        let ClaimsLook { scanner, at, claims } = looked;
        let hidden = scanner.hidden();
        if at == At::Everybody && !self.declarations.first_look_is_over {
            for wide in scanner.too_wide() {
                tracing::warn!("{wide}; {}", wide.fix());
                self.warnings.push(wide.to_string());
            }
        }
        self.declarations.scanner = Some(scanner);
        if hidden > 0
            && !privileges::may_look_into_others()
            && !std::mem::replace(&mut self.declarations.hidden_logged, true)
        {
            let text = format!(
                "declarations of {hidden} processes cannot be read: give lastgasp CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
            );
            tracing::warn!("{text}");
            self.warnings.push(text);
        }
        match claims {
            Err(error) => tracing::warn!(%error, "cannot look for declarations"),
            Ok(claims) => {
                if at == At::Everybody {
                    let claimed = claims.iter().map(|claim| (claim.origin.clone(), claim.name.clone()));
                    let still: HashSet<_> = claimed.collect();
                    self.declarations.refused.retain(|key, _| still.contains(key));
                    let open =
                        claims.iter().filter(|claim| claim.verdict.as_ref().is_err_and(|refused| refused.is_open));
                    self.declarations.open = open.map(|claim| claim.info.id).collect();
                }
                for claim in claims {
                    match self.judge(&claim) {
                        Judgement::Accept(config, place) => self.accept(config, place, claim),
                        // One that has just called exec may be about to do so again, as `env`, `setpriv` and
                        // shells do: refused is what lasts.
                        Judgement::Refuse(_) if at == At::Strangers => {}
                        // Kubelet is asked when it is first needed.
                        Judgement::Refuse(refused) if refused.is_open && !self.declarations.first_look_is_over => {}
                        Judgement::Refuse(refused) => self.refuse(claim, refused),
                        Judgement::Known => {}
                    }
                }
            }
        }
        self.declarations.first_look_is_over |= at == At::Everybody;
        self.look_at_strangers();
        self.scan_if_wanted();
        self.settle_ready();
    }

    fn judge(&self, claim: &Claim) -> Judgement {
        // It became known while it was looked at.
        if self.processes.get(claim.info.id).is_some() {
            return Judgement::Known;
        }
        let mut configured = self.workers.iter().filter(|(_, slot)| slot.declared.is_none());
        let looked_for =
            configured.find(|(_, slot)| matches!(&slot.config.find, Find::Env(value) if *value == claim.name));
        if looked_for.is_some_and(|(worker, _)| self.living_root(worker).is_none()) {
            return Judgement::Known;
        }
        let Declared { worker: config, place, others_listen } = match &claim.verdict {
            Ok(declared) => declared,
            Err(refused) => return Judgement::Refuse(refused.clone()),
        };
        let mut configured = self.workers.iter().filter(|(_, slot)| slot.declared.is_none());
        if looked_for.is_some() || configured.any(|(_, slot)| slot.config.name == config.name) {
            let detail = "the configuration has a worker of this name".to_owned();
            return Judgement::Refuse(RefusedClaim::new(Refusal::NameConfigured, detail));
        }
        let named = self.workers.named(&config.name);
        if let Some(root) = named.and_then(|worker| self.living_root(worker)) {
            let detail = format!("pid {} of {} has it and lives", root.tgid, self.place_of(named));
            return Judgement::Refuse(RefusedClaim::new(Refusal::NameTaken, detail));
        }
        let network = claim.container.network_namespace;
        let other = self.workers.iter().find(|(worker, slot)| {
            let there = slot.container.as_ref().and_then(|container| container.network_namespace);
            let same = slot.config.port == config.port && network.is_some() && network == there;
            Some(*worker) != named
                && (slot.config.endpoint == config.endpoint || (same && self.living_root(*worker).is_some()))
        });
        if let Some((_, slot)) = other {
            let detail = format!("{} serves at {}", slot.config.name, slot.config.endpoint);
            return Judgement::Refuse(RefusedClaim::new(Refusal::EndpointTaken, detail));
        }
        if *others_listen {
            let detail = format!("another process listens on {}", config.endpoint);
            return Judgement::Refuse(RefusedClaim::new(Refusal::EndpointElsewhere, detail));
        }
        let origins: Vec<&Origin> = self.workers.iter().filter_map(|(_, slot)| slot.declared.as_ref()).collect();
        let here = origins.iter().filter(|origin| ***origin == claim.origin).count();
        let everywhere = origins.len();
        if named.is_none() && (everywhere >= MAX_DECLARED || here >= MAX_IN_ONE_PLACE) {
            let detail = format!("{everywhere} workers have declared themselves already, {here} of them here");
            return Judgement::Refuse(RefusedClaim::new(Refusal::TooMany, detail));
        }
        let DeclareConfig { on_lost, reap_grace, sever, .. } = &self.config.declare;
        let config = config.as_ref();
        let config = WorkerConfig {
            on_lost: on_lost.clone(),
            reap_grace: *reap_grace,
            sever: SeverConfig { enabled: *sever, ..config.sever.clone() },
            ..config.clone()
        };
        Judgement::Accept(Arc::new(config), place.clone())
    }

    fn living_root(&self, worker: WorkerId) -> Option<ProcessId> {
        let root = self.processes.root(worker)?;
        self.processes.get(root).filter(|tracked| !tracked.exit_seen).map(|tracked| tracked.id)
    }

    fn place_of(&self, worker: Option<WorkerId>) -> String {
        let origin = worker.and_then(|worker| self.workers[worker].declared.as_ref());
        origin.map(|origin| origin.place.clone()).unwrap_or_default()
    }

    fn accept(&mut self, config: Arc<WorkerConfig>, place: Place, claim: Claim) {
        let Claim { origin, info, owner, container, .. } = claim;
        let text = format!("declared by {} (pid {}) of {}", info.comm, info.id.tgid, origin.place);
        tracing::info!(worker = %config.name, endpoint = config.endpoint, "{text}");
        self.note(&config.name, text);
        for misfit in config.misfits() {
            tracing::warn!(worker = %config.name, "{misfit}; {}", misfit.fix());
            self.note(&config.name, misfit.to_string());
        }
        self.metrics.declarations.with_label_values(&[ACCEPTED]).inc();
        let worker = match self.workers.named(&config.name) {
            None => self.add_worker(config, Some(origin)),
            Some(worker) => {
                self.core.add_worker(worker, start::policy(&config));
                let slot = &mut self.workers[worker];
                (slot.config, slot.declared) = (config, Some(origin));
                worker
            }
        };
        self.workers[worker].place = place;
        self.rescan |= self.bind(worker, &info, owner, Some(container));
        self.scan_if_wanted();
    }

    fn refuse(&mut self, claim: Claim, refused: RefusedClaim) {
        let Claim { name, origin, info, .. } = claim;
        let RefusedClaim { refusal, detail, .. } = refused;
        let known = self.declarations.refused.insert((origin.clone(), name.clone()), refusal);
        if known == Some(refusal) {
            return;
        }
        self.metrics.declarations.with_label_values(&[refusal.as_str()]).inc();
        if !self.declarations.logged.may_log(refusal, proc::monotonic_now()) {
            return;
        }
        let text = format!(
            "declaration refused ({}): {} (pid {}) of {}: {detail}",
            refusal.as_str(),
            info.comm,
            info.id.tgid,
            origin.place
        );
        tracing::warn!(worker = name, "{text}");
        self.note_about(&name, text);
    }

    /// Forgets declared workers whose life is over, once nothing of them is alive and everybody was
    /// notified. A worker of the configuration stays.
    pub(super) fn forget_workers(&mut self) {
        let now = proc::monotonic_now();
        let forgettable = |(worker, slot): &(WorkerId, &super::WorkerSlot)| {
            slot.declared.is_some()
                && self.is_over(*worker)
                && slot.over_since.is_some_and(|over| now.since(over) >= KEPT)
                && self.living_root(*worker).is_none()
                && slot.orphans.is_empty()
                && !slot.listed
                && !slot.withdrawing
                && !self.is_acting_on(*worker)
                && !self.deaths.is_open(*worker)
        };
        let over: Vec<WorkerId> = self.workers.iter().filter(forgettable).map(|(worker, _)| worker).collect();
        for worker in over {
            self.unwatch_port(worker);
            self.processes.forget(worker);
            if let Some(idle) = self.processes.unsupervised(worker) {
                self.unwatch(idle);
            }
            self.core.forget_worker(worker);
            self.deaths.forget(worker);
            self.timers.retain(|(of, _), _| *of != worker);
            if let Some(slot) = self.workers.forget(worker) {
                let name = &slot.config.name;
                self.notifications.forget(worker, name);
                tracing::info!(worker = %name, "declared worker forgotten: its life is over, and no process of it lives");
                self.metrics.forget_worker(name.as_str());
                self.tell_state(name, "forgotten: nothing of it is alive".to_owned());
            }
        }
    }

    /// The kernel does not report its listener any more.
    pub(super) fn unwatch_port(&mut self, worker: WorkerId) {
        let watched = self.workers[worker].port.take();
        if let (Some((netns, port)), Some(programs)) = (watched, self.programs.as_mut())
            && let Err(error) = programs.unwatch_port(netns, port)
        {
            tracing::debug!(%error, port, "cannot unwatch a port");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_of_those_who_may_not_declare_leave_room_for_those_of_others() {
        let mut rate = RefusalRate::default();
        let now = Nanos(1_000_000_000_000);
        let strangers = (0..100).filter(|_| rate.may_log(Refusal::NotAllowed, now)).count();
        assert_eq!(strangers, MAX_LOGGED);
        assert!(rate.may_log(Refusal::EndpointElsewhere, now));
        assert!(rate.may_log(Refusal::NotAllowed, now.plus(Duration::from_secs(60))));
    }
}
