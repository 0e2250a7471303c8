//! What holds for any order, repetition and subset of evidence.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

fn any_kind() -> impl Strategy<Value = Kind> {
    let exits = prop_oneof![
        Just(Exit::Status(0)),
        Just(Exit::Status(1)),
        Just(Exit::Signal { signal: 9, core: false }),
        Just(Exit::Signal { signal: 15, core: false }),
        Just(Exit::Signal { signal: 11, core: true }),
        Just(Exit::Unknown)
    ];
    let process = prop_oneof![Just(engine_core()), Just(root_process(0))];
    let role = prop_oneof![Just(HealthRole::Liveness), Just(HealthRole::Readiness)];
    prop_oneof![
        2 => (process.clone(), exits.clone()).prop_map(|(process, exit)| Kind::ProcessExit { process, exit }),
        2 => (process.clone(), exits).prop_map(|(process, exit)| Kind::ProcessGone { process, exit }),
        1 => process.clone().prop_map(|process| Kind::SignalDelivered { process, signal: 9 }),
        1 => process.clone().prop_map(|process| Kind::OomVictim { process }),
        1 => process.clone().prop_map(|process| Kind::StillAlive { process }),
        1 => process.prop_map(|process| Kind::CriticalSeen { process }),
        4 => role.clone().prop_map(|role| Kind::Serving { role }),
        2 => role.prop_map(|role| Kind::NotServing { role }),
        6 => soft_kind(),
        1 => any::<bool>().prop_map(|exiting| Kind::ListenerClosed { exiting }),
        1 => Just(Kind::Terminating { signal: 15 }),
        1 => Just(super::kernel::sent(Addressee::Supervisor { tgid: 50 }, 15)),
        1 => Just(Kind::Replaced { process: engine_core(), by: "/bin/sleep".to_owned() }),
        1 => Just(Kind::Listening),
    ]
}

fn soft_kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        Just(Kind::WatchBroken),
        Just(Kind::ProbeUnanswered),
        Just(Kind::ProbeAnswered),
        Just(Kind::ProbeRefused { listening: true }),
        Just(super::kernel::reset()),
        Just(super::kernel::sent(Addressee::Process(engine_core()), 9)),
    ]
}

#[derive(Debug, Clone)]
enum Step {
    Hear(u32, Kind),
    Fire(Timer),
    Wait(u64),
    NextLife,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (0_u32..4, any_kind()).prop_map(|(life, kind)| Step::Hear(life, kind)),
        2 => prop_oneof![Just(Timer::DrainWindow), Just(Timer::Recheck), Just(Timer::HoldDown), Just(Timer::Held)].prop_map(Step::Fire),
        2 => (0_u64..30_000).prop_map(Step::Wait),
        1 => Just(Step::NextLife),
    ]
}

/// Follows what a router and the bucket see, and checks it against the promises.
#[derive(Default)]
struct Observer {
    listed: HashMap<Incarnation, u64>,
    ended: HashMap<(Incarnation, u64), u32>,
    withdrawn: HashMap<(Incarnation, u64), u32>,
}

impl Observer {
    fn sees(&mut self, effects: &[Effect]) -> Result<(), TestCaseError> {
        for effect in effects {
            match effect {
                Effect::List { listing, .. } => {
                    let key = (listing.incarnation.clone(), listing.epoch);
                    prop_assert!(!self.withdrawn.contains_key(&key), "listed again under the same epoch: {key:?}");
                    prop_assert!(listing.epoch > 0);
                    self.listed.insert(key.0, key.1);
                }
                Effect::Withdraw(listing) => {
                    let key = (listing.incarnation.clone(), listing.epoch);
                    prop_assert_eq!(self.listed.get(&key.0), Some(&key.1), "withdrawn though not listed");
                    let times = self.withdrawn.entry(key).or_default();
                    *times += 1;
                    prop_assert_eq!(*times, 1, "withdrawn twice");
                }
                Effect::Signal { listing, action: Action::Move, mode: Some(Mode::Lost), .. } => {
                    let times = self.ended.entry((listing.incarnation.clone(), listing.epoch)).or_default();
                    *times += 1;
                    prop_assert_eq!(*times, 1, "reported twice");
                }
                _ => {}
            }
        }
        Ok(())
    }
}

proptest! {
    /// Promises 1 and 2: once per (incarnation, epoch), and never again under the same one.
    #[test]
    fn every_listing_ends_at_most_once(steps in proptest::collection::vec(any_step(), 1..80)) {
        let mut node = Node::of(vec![policy()]);
        let mut observer = Observer::default();
        observer.sees(&node.found())?;
        for step in steps {
            let effects = match step {
                Step::Hear(life, kind) => node.hears_of(W, life, kind),
                Step::Fire(timer) => node.fires(timer),
                Step::Wait(millis) => { node.after(Duration::from_millis(millis)); vec![] }
                Step::NextLife => { node.life += 1; node.found() }
            };
            observer.sees(&effects)?;
        }
    }

    /// Promise 1: whatever arrives before, between and after, a death of the root withdraws.
    #[test]
    fn a_death_always_withdraws(
        before in proptest::collection::vec(any_kind(), 0..20),
        after in proptest::collection::vec(any_kind(), 0..20),
        exit_first in any::<bool>(),
    ) {
        let mut node = Node::serving();
        let mut observer = Observer::default();
        observer.listed.insert(incarnation(0), 1);
        for kind in before {
            let effects = node.hears(kind);
            observer.sees(&effects)?;
        }
        let gone = Kind::ProcessGone { process: root_process(0), exit: Exit::Unknown };
        let mut deaths = [killed(root_process(0)), gone];
        if !exit_first { deaths.reverse(); }
        for kind in deaths.into_iter().chain(after) {
            let effects = node.hears(kind);
            observer.sees(&effects)?;
        }
        prop_assert!(matches!(node.state(), State::Lost | State::Left));
        let last = observer.listed[&incarnation(0)];
        prop_assert!(observer.withdrawn.contains_key(&(incarnation(0), last)), "the last listing was withdrawn");
    }

    /// Promise 2: a successor is never withdrawn by evidence about its predecessor.
    #[test]
    fn evidence_about_another_life_changes_nothing(kinds in proptest::collection::vec(any_kind(), 1..40)) {
        let mut node = Node::serving();
        node.life = 1;
        node.found();
        node.hears(SERVING);
        for kind in kinds {
            prop_assert_eq!(node.hears_of(W, 0, kind), vec![]);
        }
        prop_assert_eq!(node.state(), State::Serving);
    }

    /// Promise 3: soft kinds never add up to a verdict by themselves, short of the hang window.
    #[test]
    fn soft_evidence_alone_never_withdraws(kinds in proptest::collection::vec(soft_kind(), 1..200)) {
        let mut node = Node::serving();
        let step = (HANG - Duration::from_millis(1)) / 200;
        for kind in kinds {
            let effects = node.after(step).hears(kind);
            prop_assert_eq!(seen(&effects), vec![]);
        }
        prop_assert_eq!(node.state(), State::Serving);
    }
}
