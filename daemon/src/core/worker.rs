//! One worker's state machine.

use std::time::Duration;

use lastgasp_protocol::{Action, Cause, CauseKind, Incarnation, Mode, Sender, WorkerState};

use super::brake::{Brake, Held, Unbraked};
use super::flapping::Flaps;
use super::ladder::{self, Meaning};
use super::{
    Addressee, Effect, Evidence, HealthRole, HeldBack, Listing, Nanos, Process, ProcessId, State, Timer, WorkerId,
};

/// Unanswered probes that a hang takes at the least, however short its window.
const MIN_UNANSWERED: u32 = 3;
/// Refused probes that make a verdict.
const REFUSED_VERDICT: u32 = 2;
/// How long a verdict that was held back waits before it is looked at again.
const RETRY_HELD: Duration = Duration::from_secs(5);

/// What follows when the liveness service says NOT_SERVING while the processes live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnNotServing {
    /// Drain, then hand over when the window is past.
    #[default]
    Drain,
    /// Lost, at once.
    Lost,
    /// No new work until it says SERVING again.
    Unready,
}

/// What is configured for one worker, as far as decisions depend on it.
#[derive(Debug, Clone)]
pub(crate) struct WorkerPolicy {
    /// How long streams are left alone when the worker leaves on purpose.
    pub drain_window: Duration,
    /// How long probes go unanswered before the worker is hung.
    pub hang_window: Duration,
    /// The operator's choice.
    pub on_not_serving: OnNotServing,
    /// The worker registers itself: it serves when its record was adopted, not when health says so.
    pub registers_itself: bool,
    /// Some health service speaks for liveness; without one, readiness alone begins to serve.
    pub has_liveness: bool,
}

#[derive(Debug)]
pub(super) struct Worker {
    id: WorkerId,
    pub(super) policy: WorkerPolicy,
    pub(super) life: Option<Life>,
    flaps: Flaps,
}

/// One life of a worker, from the sight of its root process on.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) root: ProcessId,
    incarnation: Incarnation,
    epoch: u64,
    pub(super) state: State,
    /// A record of this (incarnation, epoch) is wanted.
    pub(super) listed: bool,
    pub(super) cause: Option<Cause>,
    /// SIGTERM was seen: whatever health says, it is not listed again by itself.
    pub(super) terminating: bool,
    /// SIGTERM was sent to what supervises it, which may have kept it to itself.
    pub(super) dismissed: bool,
    /// Somebody took it out of service: it is not listed again until that is taken back.
    pub(super) out_of_service: bool,
    /// A verdict on other than process evidence that the node's brake holds back.
    pub(super) held: Option<Held>,
    pub(super) root_dead: bool,
    pub(super) dead: Vec<Dead>,
    pub(super) live: Option<bool>,
    pub(super) ready: Option<bool>,
    listening: bool,
    refused: u32,
    pub(super) unanswered: u32,
    first_unanswered: Nanos,
    /// Who sent signals lately, the latest last.
    sent: Vec<Sent>,
}

/// A signal that was sent to a process of the worker, or to its supervisor.
#[derive(Debug)]
struct Sent {
    tgid: u32,
    signal: i32,
    sender: Sender,
}

/// Signals whose senders are remembered.
const MAX_SENT: usize = 8;

/// A critical process that is dead, or as good as dead.
#[derive(Debug)]
pub(super) struct Dead {
    process: Process,
    /// Seen to be gone, not only announced by a signal.
    confirmed: bool,
}

impl Life {
    fn listing(&self, worker: WorkerId) -> Listing {
        Listing { worker, incarnation: self.incarnation.clone(), epoch: self.epoch }
    }

    /// Completes a cause by who sent the signal, if that is known.
    fn with_sender(&self, mut cause: Cause, tgid: u32) -> Cause {
        let sent = self.sent.iter().rev().find(|sent| sent.tgid == tgid && Some(sent.signal) == cause.signal);
        cause.sender = cause.sender.or_else(|| sent.map(|sent| sent.sender.clone()));
        cause
    }

    /// The worker answers. That takes back a verdict that it does not; and if its liveness service
    /// is content, one that it was not.
    fn refute_held(&mut self, live: bool) {
        self.held.take_if(|held| match held.cause.kind {
            CauseKind::Hung | CauseKind::ConnectionRefused | CauseKind::ListenerClosed => true,
            CauseKind::NotServing => live,
            _ => false,
        });
    }

    pub(super) fn is(&self, incarnation: &Incarnation) -> bool {
        self.incarnation == *incarnation
    }

    pub(super) const fn is_listed_under(&self, epoch: u64) -> bool {
        self.listed && self.epoch == epoch
    }

    /// Somebody has taken it out of service.
    pub(super) const fn is_out_of_service(&self) -> bool {
        self.out_of_service
    }

    fn is_listed_state(&self) -> bool {
        matches!(self.state, State::Serving | State::Unready)
    }

    /// The worker is one whose probes count.
    pub(super) fn is_probed(&self) -> bool {
        matches!(self.state, State::Serving | State::Unready | State::Draining)
    }
}

impl Worker {
    pub(super) const fn id(&self) -> WorkerId {
        self.id
    }

    pub(super) fn new(id: WorkerId, policy: WorkerPolicy) -> Self {
        Self { id, policy, life: None, flaps: Flaps::default() }
    }

    pub(super) fn serving(&self) -> Option<Listing> {
        self.life.as_ref().filter(|life| life.state == State::Serving).map(|life| life.listing(self.id))
    }

    /// A root process was found. Another one than before means that the former is gone.
    pub(super) fn found(
        &mut self,
        root: ProcessId,
        incarnation: Incarnation,
        now: Nanos,
        hold_down: Duration,
        out: &mut Vec<Effect>,
    ) {
        match &self.life {
            Some(life) if life.root == root => return,
            Some(life) if !life.root_dead => {
                let process = Process { tgid: life.root.tgid, title: "root".into(), root: true };
                let gone = super::Kind::ProcessGone { process, exit: super::Exit::Unknown };
                let evidence = Evidence { worker: self.id, root: life.root, kind: gone, at: now };
                self.evidence(&evidence, now, hold_down, Duration::ZERO, &mut Unbraked, out);
            }
            _ => {}
        }
        let from = self.life.as_ref().map_or(State::Starting, |life| life.state);
        self.life = Some(Life {
            root,
            incarnation,
            epoch: 0,
            state: State::Starting,
            listed: false,
            cause: None,
            terminating: false,
            dismissed: false,
            out_of_service: false,
            held: None,
            root_dead: false,
            dead: Vec::new(),
            live: None,
            ready: None,
            listening: false,
            refused: 0,
            unanswered: 0,
            first_unanswered: now,
            sent: Vec::new(),
        });
        out.push(Effect::Changed { worker: self.id, from, to: State::Starting, cause: None });
    }

    /// The record of a worker that registers itself was found and proven to be its own.
    pub(super) fn adopted(&mut self, root: ProcessId, incarnation: Incarnation, epoch: u64, out: &mut Vec<Effect>) {
        let Some(life) = self.life.as_mut().filter(|life| life.root == root) else { return };
        if life.state != State::Starting {
            return;
        }
        life.incarnation = incarnation;
        life.epoch = epoch;
        life.listed = true;
        life.state = State::Serving;
        // Nobody knows since when; it may have been long.
        self.flaps.listed(Nanos::default());
        out.push(Effect::Changed { worker: self.id, from: State::Starting, to: State::Serving, cause: None });
    }

    /// The record was written under another epoch than wanted: this life had been listed before
    /// the daemon was started.
    pub(super) fn resumed(&mut self, incarnation: &Incarnation, epoch: u64) {
        if let Some(life) = self.life.as_mut().filter(|life| life.incarnation == *incarnation) {
            life.epoch = life.epoch.max(epoch);
        }
    }

    pub(super) fn evidence(
        &mut self,
        evidence: &Evidence,
        now: Nanos,
        hold_down: Duration,
        recheck_after: Duration,
        brake: &mut dyn Brake,
        out: &mut Vec<Effect>,
    ) {
        let Some(life) = self.life.as_mut().filter(|life| life.root == evidence.root) else { return };
        match ladder::meaning(&evidence.kind) {
            Meaning::Dead { process, cause, recheck, orderly } => {
                self.dead(process, cause, recheck.then_some(recheck_after), orderly, now, out);
            }
            Meaning::Replaced(cause) => {
                if life.is_probed() {
                    self.lost(cause, now, None, out);
                }
            }
            Meaning::Unreachable(cause) => {
                if life.is_listed_state() {
                    self.lost(cause, now, Some(brake), out);
                }
            }
            Meaning::Leaving(cause) => {
                life.terminating |= cause.signal.is_some();
                if life.is_listed_state() {
                    let cause = life.with_sender(cause, life.root.tgid);
                    self.drain(cause, now, out);
                }
            }
            Meaning::Sent { to, signal, sender, asks, stops } => {
                let tgid = match &to {
                    Addressee::Process(process) => process.tgid,
                    Addressee::Supervisor { tgid } => *tgid,
                };
                if life.sent.len() == MAX_SENT {
                    life.sent.remove(0);
                }
                life.sent.push(Sent { tgid, signal, sender: sender.clone() });
                if asks {
                    match to {
                        Addressee::Process(_) => life.terminating = true,
                        Addressee::Supervisor { .. } => life.dismissed = true,
                    }
                    if life.is_listed_state() {
                        let sender = Some(sender);
                        self.drain(
                            Cause { signal: Some(signal), sender, ..Cause::of(CauseKind::Terminated) },
                            now,
                            out,
                        );
                    }
                } else if stops && life.is_probed() {
                    out.push(Effect::Probe(self.id));
                } else if let Addressee::Process(process) = to {
                    self.explain(&process, signal, &sender, out);
                }
            }
            Meaning::Nothing => {}
            Meaning::NotLive => {
                life.live = Some(false);
                if life.is_listed_state() {
                    let cause = Cause::of(CauseKind::NotServing);
                    match self.policy.on_not_serving {
                        OnNotServing::Drain => self.drain(cause, now, out),
                        OnNotServing::Lost => self.lost(cause, now, Some(brake), out),
                        OnNotServing::Unready => self.relist(State::Unready, Some(cause), now, out),
                    }
                }
            }
            Meaning::NotReady => {
                life.ready = Some(false);
                if life.state == State::Serving {
                    self.relist(State::Unready, Some(Cause::of(CauseKind::NotReady)), now, out);
                }
            }
            Meaning::Healthy(role) => {
                match role {
                    HealthRole::Liveness => life.live = Some(true),
                    HealthRole::Readiness => life.ready = Some(true),
                }
                (life.refused, life.unanswered) = (0, 0);
                life.refute_held(role == HealthRole::Liveness);
                self.healthy(now, hold_down, out);
            }
            Meaning::Listening => {
                life.listening = true;
                self.healthy(now, hold_down, out);
            }
            Meaning::Answered => {
                (life.refused, life.unanswered) = (0, 0);
                life.refute_held(false);
                self.healthy(now, hold_down, out);
            }
            Meaning::Refused => {
                life.refused += 1;
                if life.is_listed_state() {
                    if life.refused >= REFUSED_VERDICT {
                        self.lost(Cause::of(CauseKind::ConnectionRefused), now, Some(brake), out);
                    } else {
                        out.push(Effect::Probe(self.id));
                    }
                }
            }
            Meaning::Unanswered => self.unanswered(now, brake, out),
            Meaning::Suspicion => {
                if life.is_probed() {
                    out.push(Effect::Probe(self.id));
                }
            }
            Meaning::Revived(process) => {
                if let Some(at) = life.dead.iter().position(|dead| dead.process.title == process.title) {
                    life.dead.swap_remove(at);
                    self.healthy(now, hold_down, out);
                }
            }
            Meaning::FalseAlarm(process) => {
                // Only what a signal announced can be taken back; an exit cannot.
                life.dead.retain(|dead| dead.confirmed || dead.process.tgid != process.tgid);
                self.healthy(now, hold_down, out);
            }
        }
    }

    /// Who ended a process is known only now: the victim was faster than its murderer's report.
    fn explain(&mut self, process: &Process, signal: i32, sender: &Sender, out: &mut Vec<Effect>) {
        let Some(life) = self.life.as_mut() else { return };
        let Some(cause) = life.cause.as_mut().filter(|_| matches!(life.state, State::Left | State::Lost)) else {
            return;
        };
        let same = cause.process.as_deref() == Some(&process.title) && cause.signal == Some(signal);
        if same && cause.sender.is_none() {
            cause.sender = Some(sender.clone());
            out.push(Effect::Refined { worker: self.id, cause: cause.clone() });
        }
    }

    fn dead(
        &mut self,
        process: Process,
        cause: Cause,
        recheck: Option<Duration>,
        orderly: bool,
        now: Nanos,
        out: &mut Vec<Effect>,
    ) {
        let Some(life) = self.life.as_mut() else { return };
        let confirmed = recheck.is_none();
        let cause = life.with_sender(cause, process.tgid);
        life.root_dead |= process.root && confirmed;
        match life.dead.iter_mut().find(|dead| dead.process.tgid == process.tgid) {
            Some(dead) => dead.confirmed |= confirmed,
            None => life.dead.push(Dead { process, confirmed }),
        }
        match life.state {
            State::Starting | State::Serving | State::Unready => {
                if let Some(after) = recheck {
                    out.push(Effect::Arm { worker: self.id, timer: Timer::Recheck, at: now.plus(after) });
                }
                self.lost(cause, now, None, out);
            }
            State::Draining if orderly => self.left(cause, out),
            State::Draining => self.lost(cause, now, None, out),
            State::Left => {}
            State::Lost => {
                if let Some(better) = life.cause.as_ref().and_then(|former| ladder::refine(former, &cause)) {
                    life.cause = Some(better.clone());
                    out.push(Effect::Refined { worker: self.id, cause: better });
                }
            }
        }
    }

    fn unanswered(&mut self, now: Nanos, brake: &mut dyn Brake, out: &mut Vec<Effect>) {
        let Some(life) = self.life.as_mut() else { return };
        if life.unanswered == 0 {
            life.first_unanswered = now;
        }
        life.unanswered += 1;
        let hung = life.unanswered >= MIN_UNANSWERED && now.since(life.first_unanswered) >= self.policy.hang_window;
        if !life.is_probed() || !hung {
            return;
        }
        let cause = Cause::of(CauseKind::Hung);
        self.hung(cause, now, brake, out);
    }

    fn hung(&mut self, cause: Cause, now: Nanos, brake: &mut dyn Brake, out: &mut Vec<Effect>) {
        if brake.about_us() {
            let Some(life) = self.life.as_mut() else { return };
            life.held = Some(Held { reason: HeldBack::AboutUs, cause: cause.clone() });
            out.push(Effect::Held { worker: self.id, reason: HeldBack::AboutUs, cause });
        } else {
            self.lost(cause, now, Some(brake), out);
        }
    }

    /// Lost: the record goes, streams move, what cannot move ends visibly.
    pub(super) fn lost(&mut self, cause: Cause, now: Nanos, brake: Option<&mut dyn Brake>, out: &mut Vec<Effect>) {
        if let Some(reason) = brake.and_then(|brake| brake.admit_soft(now)) {
            // The evidence may come only once, so the verdict is kept.
            if let Some(life) = self.life.as_mut() {
                life.held = Some(Held { reason, cause: cause.clone() });
            }
            out.push(Effect::Held { worker: self.id, reason, cause });
            out.push(Effect::Arm { worker: self.id, timer: Timer::Held, at: now.plus(RETRY_HELD) });
            return;
        }
        let Some(life) = self.life.as_mut() else { return };
        life.held = None;
        let from = std::mem::replace(&mut life.state, State::Lost);
        let was_listed = std::mem::take(&mut life.listed);
        life.cause = Some(cause.clone());
        self.flaps.lost(now);
        // A worker that was handed over has lost its record before; its last streams are signalled all the same.
        if was_listed || from == State::Draining {
            let listing = life.listing(self.id);
            if was_listed {
                out.push(Effect::Withdraw(listing.clone()));
            }
            out.push(Effect::Signal { listing, action: Action::Move, mode: Some(Mode::Lost), cause: cause.clone() });
        }
        out.push(Effect::Changed { worker: self.id, from, to: State::Lost, cause: Some(cause) });
    }

    /// Left: as planned. Streams that are still there can only be moved now, so `move` is sent too.
    fn left(&mut self, cause: Cause, out: &mut Vec<Effect>) {
        let Some(life) = self.life.as_mut() else { return };
        let from = std::mem::replace(&mut life.state, State::Left);
        let was_listed = std::mem::take(&mut life.listed);
        self.flaps.left();
        (life.cause, life.held) = (Some(cause.clone()), None);
        let listing = life.listing(self.id);
        if was_listed {
            out.push(Effect::Withdraw(listing.clone()));
        }
        out.push(Effect::Signal { listing, action: Action::Move, mode: Some(Mode::Lost), cause: cause.clone() });
        out.push(Effect::Changed { worker: self.id, from, to: State::Left, cause: Some(cause) });
    }

    fn drain(&mut self, cause: Cause, now: Nanos, out: &mut Vec<Effect>) {
        self.drain_for(self.policy.drain_window, cause, now, out);
    }

    pub(super) fn drain_for(&mut self, window: Duration, cause: Cause, now: Nanos, out: &mut Vec<Effect>) {
        let Some(life) = self.life.as_mut() else { return };
        let from = std::mem::replace(&mut life.state, State::Draining);
        life.cause = Some(cause.clone());
        let listing = life.listing(self.id);
        out.push(Effect::List { listing: listing.clone(), state: WorkerState::Draining, drain_for: Some(window) });
        out.push(Effect::Signal { listing, action: Action::Drain, mode: None, cause: cause.clone() });
        out.push(Effect::Arm { worker: self.id, timer: Timer::DrainWindow, at: now.plus(window) });
        out.push(Effect::Changed { worker: self.id, from, to: State::Draining, cause: Some(cause) });
    }

    /// Serving or unready: the record says so.
    pub(super) fn relist(&mut self, to: State, cause: Option<Cause>, now: Nanos, out: &mut Vec<Effect>) {
        let Some(life) = self.life.as_mut() else { return };
        let from = std::mem::replace(&mut life.state, to);
        life.dismissed = false;
        if matches!(from, State::Draining | State::Lost) {
            life.held = None;
        }
        if !life.listed {
            life.epoch += 1;
            life.listed = true;
            self.flaps.listed(now);
        }
        life.cause.clone_from(&cause);
        let state = if to == State::Unready { WorkerState::Unready } else { WorkerState::Serving };
        let listing = life.listing(self.id);
        out.push(Effect::List { listing, state, drain_for: None });
        out.push(Effect::Changed { worker: self.id, from, to, cause });
    }

    /// Something good was heard. What it changes depends on where the life stands.
    pub(super) fn healthy(&mut self, now: Nanos, hold_down: Duration, out: &mut Vec<Effect>) {
        let Some(life) = self.life.as_ref() else { return };
        let heard =
            life.live == Some(true) || life.listening || (!self.policy.has_liveness && life.ready == Some(true));
        let content = heard
            && life.live != Some(false)
            && life.ready != Some(false)
            && life.dead.is_empty()
            && (life.refused, life.unanswered) == (0, 0);
        if !content || life.root_dead || life.out_of_service {
            return;
        }
        match life.state {
            State::Starting if self.policy.registers_itself => {}
            State::Starting => self.list_from(self.flaps.next_life_from(hold_down), now, out),
            State::Unready => self.relist(State::Serving, None, now, out),
            State::Serving | State::Left => {}
            // The record still stands: it never left.
            State::Draining if life.listed && !life.terminating && !life.dismissed => {
                self.relist(State::Serving, None, now, out);
            }
            State::Draining if life.listed => {}
            // A draining engine goes on answering its health checks (vLLM 0.32 with
            // --shutdown-timeout says 200 to the end), so that proves nothing.
            State::Draining | State::Lost if life.terminating => {}
            State::Draining | State::Lost => self.list_from(self.flaps.same_life_from(hold_down), now, out),
        }
    }

    /// Lists it, at the end of its hold-down.
    fn list_from(&mut self, until: Nanos, now: Nanos, out: &mut Vec<Effect>) {
        if now >= until {
            return self.relist(State::Serving, None, now, out);
        }
        out.push(Effect::Arm { worker: self.id, timer: Timer::HoldDown, at: until });
        if self.flaps.is_news(until) {
            out.push(Effect::HeldDown { worker: self.id, losses: self.flaps.losses(), until });
        }
    }

    pub(super) fn fire(
        &mut self,
        timer: Timer,
        now: Nanos,
        hold_down: Duration,
        brake: &mut dyn Brake,
        out: &mut Vec<Effect>,
    ) {
        let Some(life) = self.life.as_ref() else { return };
        match timer {
            Timer::DrainWindow if life.state == State::Draining && life.listed => {
                self.handover(now, hold_down, brake, out)
            }
            Timer::Recheck => {
                let announced = life.dead.iter().filter(|dead| !dead.confirmed);
                out.extend(announced.map(|dead| Effect::Recheck {
                    worker: self.id,
                    root: life.root,
                    process: dead.process.clone(),
                }));
            }
            Timer::Held if life.is_listed_state() => match life.held.clone() {
                Some(Held { reason: HeldBack::BlastRadius, cause }) if cause.kind == CauseKind::Hung => {
                    self.hung(cause, now, brake, out);
                }
                Some(Held { reason: HeldBack::BlastRadius, cause }) => self.lost(cause, now, Some(brake), out),
                Some(Held { reason: HeldBack::AboutUs, .. }) | None => {}
            },
            Timer::HoldDown if matches!(life.state, State::Starting | State::Lost | State::Draining) => {
                self.healthy(now, hold_down, out);
            }
            _ => {}
        }
    }

    /// The window is over and it still runs: the record goes, streams that can be moved are moved.
    fn handover(&mut self, now: Nanos, hold_down: Duration, brake: &mut dyn Brake, out: &mut Vec<Effect>) {
        let Some(life) = self.life.as_mut() else { return };
        let cause = life.cause.clone().unwrap_or_else(|| Cause::of(CauseKind::Terminated));
        let asked_for = life.terminating || life.dismissed || life.out_of_service;
        if !asked_for && let Some(reason) = brake.admit_soft(now) {
            life.held = Some(Held { reason, cause: cause.clone() });
            out.push(Effect::Held { worker: self.id, reason, cause });
            out.push(Effect::Arm { worker: self.id, timer: Timer::DrainWindow, at: now.plus(RETRY_HELD) });
            return;
        }
        (life.listed, life.held) = (false, None);
        self.flaps.lost(now);
        let listing = life.listing(self.id);
        out.push(Effect::Withdraw(listing.clone()));
        out.push(Effect::Signal { listing, action: Action::Move, mode: Some(Mode::Handover), cause });
        if !life.terminating {
            // It may have been asked to leave and have stayed.
            let at = self.flaps.same_life_from(hold_down);
            out.push(Effect::Arm { worker: self.id, timer: Timer::HoldDown, at });
        }
    }
}
