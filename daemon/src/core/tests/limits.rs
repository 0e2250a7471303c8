//! Two limits, under any order of evidence: how many withdrawals without process evidence a node
//! makes in a minute, and how soon a worker that keeps failing is listed again.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// As of [`Node`].
const LIMIT: usize = 2;
const WORKERS: u32 = 8;
const MINUTE: Duration = Duration::from_secs(60);

/// A node whose timers fire when they are due, as the supervisor's do.
struct Clock {
    node: Node,
    timers: BTreeMap<(WorkerId, Timer), Nanos>,
    /// When and which workers were withdrawn.
    withdrawn: Vec<(Nanos, WorkerId)>,
    listed: BTreeMap<WorkerId, Nanos>,
    /// Workers of which it was said that a verdict is held back.
    said: BTreeSet<WorkerId>,
}

impl Clock {
    fn new(workers: u32, policy: &WorkerPolicy) -> Self {
        let node = Node::of(vec![policy.clone(); workers as usize]);
        let mut this = Self {
            node,
            timers: BTreeMap::new(),
            withdrawn: Vec::new(),
            listed: BTreeMap::new(),
            said: BTreeSet::new(),
        };
        for id in 0..workers {
            this.node.core.found(WorkerId(id), root(id), incarnation(id), this.node.now);
            this.hears(id, SERVING);
        }
        this
    }

    /// Worker and life have the same number.
    fn hears(&mut self, id: u32, kind: Kind) -> Vec<Effect> {
        let effects = self.node.hears_of(WorkerId(id), id, kind);
        self.took(&effects);
        effects
    }

    fn took(&mut self, effects: &[Effect]) {
        for effect in effects {
            match effect {
                Effect::Arm { worker, timer, at } => drop(self.timers.insert((*worker, *timer), *at)),
                Effect::Withdraw(listing) => {
                    self.listed.remove(&listing.worker);
                    self.withdrawn.push((self.node.now, listing.worker));
                }
                Effect::List { listing, .. } => _ = self.listed.entry(listing.worker).or_insert(self.node.now),
                Effect::Held { worker, .. } => _ = self.said.insert(*worker),
                _ => {}
            }
        }
    }

    fn wait(&mut self, time: Duration) {
        let until = self.node.now.plus(time);
        while let Some((&(worker, timer), &at)) =
            self.timers.iter().filter(|(_, at)| **at <= until).min_by_key(|(_, at)| **at)
        {
            self.timers.remove(&(worker, timer));
            self.node.now = self.node.now.max(at);
            let effects = self.node.core.fire(worker, timer, self.node.now);
            self.took(&effects);
        }
        self.node.now = until;
    }

    fn most_withdrawn_in_a_minute(&self) -> usize {
        let within = |from: Nanos| self.withdrawn.iter().filter(move |(at, _)| *at >= from && at.since(from) < MINUTE);
        self.withdrawn.iter().map(|(from, _)| within(*from).count()).max().unwrap_or_default()
    }
}

/// What may end a listing without a word about a process.
fn verdict() -> impl Strategy<Value = Kind> {
    prop_oneof![
        4 => Just(Kind::ProbeRefused { listening: false }),
        2 => Just(Kind::ProbeUnanswered),
        2 => Just(NOT_SERVING),
        1 => Just(Kind::ListenerClosed { exiting: true }),
        1 => Just(Kind::ListenerClosed { exiting: false }),
        1 => Just(Kind::GpuFault { process: None, fault: "xid 79".to_owned(), policy: GpuPolicy::Lost }),
        3 => Just(SERVING),
        1 => Just(Kind::ProbeAnswered),
    ]
}

proptest! {
    #[test]
    fn soft_withdrawals_never_exceed_the_limit_and_what_is_held_back_is_said(
        at_once in any::<bool>(),
        steps in proptest::collection::vec((0..WORKERS, verdict(), 0_u64..15_000), 1..150),
    ) {
        let on_not_serving = if at_once { OnNotServing::Lost } else { OnNotServing::Drain };
        let mut clock = Clock::new(WORKERS, &WorkerPolicy { on_not_serving, ..policy() });
        for (id, kind, millis) in steps {
            clock.wait(Duration::from_millis(millis));
            clock.hears(id, kind);
        }
        clock.wait(MINUTE);
        let most = clock.most_withdrawn_in_a_minute();
        prop_assert!(most <= LIMIT, "{most} within a minute: {:?}", clock.withdrawn);
        for worker in (0..WORKERS).map(WorkerId) {
            prop_assert!(clock.node.core.held_back(worker).is_none() || clock.said.contains(&worker), "{worker:?}");
        }
    }

    #[test]
    fn a_certain_death_is_withdrawn_at_once_however_many_verdicts_are_held_back(
        before in proptest::collection::vec((0..WORKERS, verdict(), 0_u64..5_000), 0..100),
        dying in proptest::sample::subsequence((0..WORKERS).collect::<Vec<_>>(), 1..=WORKERS as usize),
    ) {
        let mut clock = Clock::new(WORKERS, &policy());
        for (id, kind, millis) in before {
            clock.wait(Duration::from_millis(millis));
            clock.hears(id, kind);
        }
        for id in dying {
            let listed = clock.listed.contains_key(&WorkerId(id));
            let effects = clock.hears(id, killed(root_process(id)));
            let withdrawn = effects.iter().any(|effect| matches!(effect, Effect::Withdraw(_)));
            prop_assert_eq!(withdrawn, listed, "worker {}", id);
            prop_assert!(matches!(clock.node.core.state(WorkerId(id)), Some(State::Lost | State::Left)));
        }
    }

    /// A worker that is well again at once, whatever made it fail: the same process, or another one.
    #[test]
    fn a_flapping_worker_is_listed_later_every_time_and_never_later_than_the_cap(
        fails in proptest::collection::vec((any::<bool>(), 0_u64..700), 1..40),
    ) {
        const CAP: u32 = 32;
        let mut clock = Clock::new(1, &policy());
        let (mut life, mut losses) = (0, 0);
        for (dies, served) in fails {
            // The other limit would hold back a third loss within a minute that no process tells of.
            let served = if dies { served } else { served.max(MINUTE.as_secs()) };
            clock.wait(Duration::from_secs(served));
            losses = if served >= 600 { 1 } else { losses + 1 };
            let lost = clock.node.now;
            if dies {
                let effects = clock.node.hears_of(W, life, killed(root_process(life)));
                clock.took(&effects);
                life += 1;
                clock.node.life = life;
                let effects = clock.node.found();
                clock.took(&effects);
            } else {
                for _ in 0..2 {
                    let effects = clock.node.hears_of(W, life, Kind::ProbeRefused { listening: false });
                    clock.took(&effects);
                }
            }
            prop_assert!(clock.listed.is_empty());
            let effects = clock.node.hears_of(W, life, SERVING);
            clock.took(&effects);
            let doublings = if dies { (losses as u32).checked_sub(2) } else { Some(losses as u32 - 1) };
            let hold = doublings.map_or(Duration::ZERO, |times| HOLD_DOWN * 2_u32.pow(times.min(5)));
            prop_assert!(hold <= HOLD_DOWN * CAP);
            let said = effects.iter().any(|effect| matches!(effect, Effect::HeldDown { .. }));
            prop_assert_eq!(said, hold > Duration::ZERO);
            clock.wait(hold);
            prop_assert_eq!(clock.listed.get(&W).copied(), Some(lost.plus(hold)));
        }
    }
}

/// Each of these would end the listing of its worker if the limit let it, and only what contradicts
/// it takes it back.
#[test]
fn a_verdict_that_is_held_back_is_taken_back_only_by_what_refutes_it() {
    let gpu = Kind::GpuFault { process: None, fault: "xid 79".to_owned(), policy: GpuPolicy::Lost };
    let refused = Kind::ProbeRefused { listening: false };
    for (verdict, answered, serves) in [(&refused, true, true), (&NOT_SERVING, false, true), (&gpu, false, false)] {
        for (good, refutes) in [(Kind::ProbeAnswered, answered), (SERVING, serves)] {
            let mut clock = Clock::new(4, &WorkerPolicy { on_not_serving: OnNotServing::Lost, ..policy() });
            for id in 0..3 {
                clock.hears(id, verdict.clone());
                clock.hears(id, verdict.clone());
            }
            let withdrawn: BTreeSet<_> = clock.withdrawn.iter().map(|(_, worker)| *worker).collect();
            assert_eq!(withdrawn.len(), LIMIT);
            assert!(clock.node.core.held_back(WorkerId(2)).is_some());
            clock.hears(2, good.clone());
            assert_eq!(clock.node.core.held_back(WorkerId(2)).is_none(), refutes, "{verdict:?} {good:?}");
            clock.wait(MINUTE + MINUTE);
            let gone = clock.withdrawn.iter().any(|(_, worker)| *worker == WorkerId(2));
            assert_eq!(gone, !refutes, "{verdict:?} {good:?}");
        }
    }
}

#[test]
fn a_handover_without_a_signal_counts_against_the_limit_one_with_a_signal_does_not() {
    for (kind, withdrawn) in [
        (Kind::ListenerClosed { exiting: false }, LIMIT),
        (NOT_SERVING, LIMIT),
        (Kind::Terminating { signal: 15 }, WORKERS as usize),
    ] {
        let mut clock = Clock::new(WORKERS, &policy());
        for id in 0..WORKERS {
            clock.hears(id, kind.clone());
        }
        clock.wait(WINDOW);
        assert_eq!(clock.withdrawn.len(), withdrawn, "{kind:?}");
    }
}

/// Held back at first, and when there is room again most probes fail: then it is about us.
#[test]
fn a_hang_that_was_held_back_is_doubted_again_before_it_is_withdrawn() {
    let mut clock = Clock::new(6, &policy());
    let refused = Kind::ProbeRefused { listening: false };
    for id in 0..2 {
        clock.hears(id, refused.clone());
        clock.hears(id, refused.clone());
    }
    for _ in 0..3 {
        clock.hears(2, Kind::ProbeUnanswered);
        clock.wait(HANG / 2);
    }
    assert_eq!(clock.node.core.held_back(WorkerId(2)).map(|held| held.reason), Some(HeldBack::BlastRadius));
    for id in 3..6 {
        clock.hears(id, Kind::ProbeUnanswered);
    }
    clock.wait(MINUTE);
    assert_eq!(clock.withdrawn.len(), 2);
    assert_eq!(clock.node.core.held_back(WorkerId(2)).map(|held| held.reason), Some(HeldBack::AboutUs));
}

/// A person who drains a node is not held back.
#[test]
fn a_handover_that_a_person_asked_for_does_not_count_against_the_limit() {
    let mut clock = Clock::new(WORKERS, &policy());
    for id in 0..WORKERS {
        let cause = lastgasp_protocol::Cause::of(lastgasp_protocol::CauseKind::Terminated);
        let now = clock.node.now;
        let effects = clock.node.core.command(WorkerId(id), Command::Drain { window: None }, cause, now).unwrap();
        clock.took(&effects);
    }
    clock.wait(WINDOW);
    assert_eq!(clock.withdrawn.len(), WORKERS as usize);
}
