//! What the answers of a health server mean. No sockets and no clock: outcomes go in, evidence and
//! what to ask next come out.
//!
//! No server of `grpc.health.v1` behaves like another (measured on vLLM 0.32, read in SGLang
//! 0.5.23 and tonic-health 0.14.9):
//!
//! * Python servers end every Watch after one message, in good health: they are polled instead.
//! * An unknown service is NOT_FOUND from tonic and SERVICE_UNKNOWN from Python. Before it was ever
//!   SERVING it is a name spelt wrong, afterwards a server that takes its services down.
//! * SGLang's native server has no health service, Triton's has Check but no Watch: UNIMPLEMENTED.
//! * A Watch that breaks says nothing about the engine. A half-open one does not even break, so
//!   Check is asked all the while, within a deadline.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::config::Service;
use crate::core::{HealthRole, Kind};

/// A Watch that was open for so long was a good one; the next may be dialled without waiting.
pub(super) const SETTLED: Duration = Duration::from_secs(2);

/// What a server said about one service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    /// SERVING, or 2xx.
    Serving,
    /// NOT_SERVING, or 5xx.
    NotServing,
    /// UNKNOWN: the service is there and does not know.
    Undecided,
    /// NOT_FOUND, or SERVICE_UNKNOWN.
    NoSuchService,
    /// UNIMPLEMENTED.
    Unimplemented,
    /// Anything else, in its own words: says that somebody is there, and no more.
    Other(String),
}

/// What came of one bounded question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ProbeOutcome {
    /// The server answered.
    Answered(Answer),
    /// Nothing came in time, or the connection broke.
    Unanswered,
    /// It could not be asked, for want of something on our side.
    NotAsked,
    /// ECONNREFUSED.
    Refused {
        /// Somebody listens on the port nevertheless.
        listening: bool,
    },
}

/// How a Watch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// With status OK.
    Clean,
    /// NOT_FOUND.
    NoSuchService,
    /// UNIMPLEMENTED.
    Unimplemented,
    /// By any other status, or with its connection: tonic tells a dead connection as UNKNOWN,
    /// CANCELLED or UNAVAILABLE (golem#3748).
    Broken,
}

/// Whether to ask all services now, and who wants to know.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Ask {
    /// Not now.
    #[default]
    No,
    /// Now, and report what changed.
    Quietly,
    /// Now, and report also that an answer came.
    Aloud,
}

/// What follows from an outcome.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Step {
    /// To be reported, in this order.
    pub(super) report: Vec<Kind>,
    /// Watches to open (again), each with the number of short-lived attempts before it.
    pub(super) watch: Vec<(usize, u32)>,
    /// Whether to ask now.
    pub(super) ask: Ask,
    /// A configured service is not there: find out which ones are.
    pub(super) look: bool,
}

/// The services asked in one round, each with the number of Watch messages seen before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Round(Vec<(usize, u64)>);

impl Round {
    /// The places of the services to ask, in the order in which outcomes are expected.
    pub(super) fn services(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().map(|(service, _)| *service)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Watch, and Check besides.
    Watch,
    /// Only Check: this server's Watch ends after one message.
    WatchOnce,
    /// Only Check: this server has no Watch.
    NoWatch,
    /// HTTP.
    Get,
    /// No health service at all.
    Absent,
}

#[derive(Debug)]
struct Watched {
    name: String,
    role: HealthRole,
    mode: Mode,
    /// A Watch is open, being opened, or about to be.
    open: bool,
    /// Watch messages since it was last opened.
    messages: u32,
    /// Watch messages ever.
    heard: u64,
    /// Short-lived Watches in a row.
    attempts: u32,
    /// The last status given, if any: SERVING or not.
    serving: Option<bool>,
    /// It was SERVING once.
    served: bool,
    /// The server does not know it.
    missing: bool,
    /// The last answer that was no status.
    other: Option<String>,
    /// What Check says against the Watch, and how much the Watch had said before.
    objection: Option<(Answer, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probe {
    Pending,
    Answered,
    Unanswered,
    NotAsked,
    Refused,
}

/// The health of one life of one worker, as its server tells it.
#[derive(Debug)]
pub(super) struct Machine {
    address: String,
    services: Vec<Watched>,
    /// Services that the server does know, if a configured one is missing.
    known: Vec<String>,
    /// Anything was SERVING, now or in this life under an earlier daemon.
    served: bool,
    /// The same for services that mean liveness.
    lived: bool,
    reported: BTreeMap<HealthRole, bool>,
    probe: Probe,
}

impl Machine {
    /// For a server of `grpc.health.v1`. `served` says that this life has been serving before.
    pub(super) fn grpc(address: &str, services: &[Service], served: bool) -> Self {
        Self::new(address, services, Mode::Watch, served)
    }

    /// For a server that answers GET.
    pub(super) fn http(address: &str, served: bool) -> Self {
        let service = Service { name: String::new(), role: HealthRole::Liveness };
        Self::new(address, &[service], Mode::Get, served)
    }

    fn new(address: &str, services: &[Service], mode: Mode, served: bool) -> Self {
        let services = services.iter().map(|service| Watched {
            name: service.name.clone(),
            role: service.role,
            mode,
            open: mode == Mode::Watch,
            messages: 0,
            heard: 0,
            attempts: 0,
            serving: None,
            served: false,
            missing: false,
            other: None,
            objection: None,
        });
        Self {
            address: address.to_owned(),
            services: services.collect(),
            known: Vec::new(),
            served,
            lived: served,
            reported: BTreeMap::new(),
            probe: Probe::Pending,
        }
    }

    /// The names of the services, by their places.
    pub(super) fn name(&self, service: usize) -> &str {
        &self.services[service].name
    }

    /// There is no health service here; asking again would not make one.
    pub(super) fn is_over(&self) -> bool {
        self.services.iter().all(|service| service.mode == Mode::Absent)
    }

    /// A service that the server does not know, and never did: a name spelt wrong, most likely.
    pub(super) fn is_misconfigured(&self) -> bool {
        self.services.iter().any(|service| service.missing && !service.served)
    }

    /// A message came on a Watch.
    pub(super) fn watch_said(&mut self, service: usize, answer: Answer) -> Step {
        let watched = &mut self.services[service];
        watched.messages += 1;
        watched.heard += 1;
        let mut step = Step::default();
        self.take(service, answer, &mut step);
        self.settle(&mut step);
        step
    }

    /// A Watch ended, or could not be opened, `open_for` after its first message.
    pub(super) fn watch_ended(&mut self, service: usize, end: End, open_for: Duration) -> Step {
        let served = self.served;
        let watched = &mut self.services[service];
        let mut step = Step { ask: Ask::Quietly, ..Step::default() };
        watched.open = false;
        match end {
            End::Clean if watched.messages <= 1 => watched.mode = Mode::WatchOnce,
            End::Unimplemented => watched.mode = Mode::NoWatch,
            // Check decides what that means, and notices when the service appears.
            End::NoSuchService => {}
            End::Clean | End::Broken => {
                if watched.messages == 0 {
                    step.ask = Ask::No;
                } else if served {
                    step.report.push(Kind::WatchBroken);
                    step.ask = Ask::Aloud;
                }
                watched.attempts = if open_for >= SETTLED { 0 } else { watched.attempts + 1 };
                watched.watch(service, &mut step);
            }
        }
        step
    }

    /// Which services to ask now. Those that are not there are not asked.
    pub(super) fn round(&self) -> Round {
        let asked = self.services.iter().enumerate().filter(|(_, service)| service.mode != Mode::Absent);
        Round(asked.map(|(place, service)| (place, service.heard)).collect())
    }

    /// The outcomes of a round. `aloud`: somebody asked for this probe and waits for its answer.
    ///
    /// # Panics
    /// If there are not as many outcomes as there were services.
    pub(super) fn answered(&mut self, round: &Round, outcomes: Vec<ProbeOutcome>, aloud: bool) -> Step {
        assert_eq!(round.0.len(), outcomes.len(), "one outcome for each service");
        let mut step = Step::default();
        if let Some(probe) = self.probe(round, &outcomes, aloud) {
            step.report.push(probe);
        }
        for ((service, heard), outcome) in round.0.iter().zip(outcomes) {
            if let ProbeOutcome::Answered(answer) = outcome
                && self.services[*service].believes(&answer, *heard)
            {
                self.take(*service, answer, &mut step);
            }
        }
        self.settle(&mut step);
        step
    }

    /// The services that a server knows among those tried, because a configured one is missing.
    pub(super) fn knows(&mut self, known: Vec<String>) {
        self.known = known;
    }

    /// Whether the server answers at all. Only services that mean liveness count, if there are any:
    /// the others may wait for something that is allowed to be slow.
    fn probe(&mut self, round: &Round, outcomes: &[ProbeOutcome], aloud: bool) -> Option<Kind> {
        let lively = self.services.iter().any(|service| service.role == HealthRole::Liveness);
        let counts = |service: usize| !lively || self.services[service].role == HealthRole::Liveness;
        let counted =
            || round.services().zip(outcomes).filter(|(service, _)| counts(*service)).map(|(_, outcome)| outcome);
        let refused = counted().find_map(|outcome| match outcome {
            ProbeOutcome::Refused { listening } => Some(*listening),
            _ => None,
        });
        let before = self.probe;
        if counted().any(|outcome| *outcome == ProbeOutcome::NotAsked) {
            self.probe = Probe::NotAsked;
            return None;
        }
        let kind = if let Some(listening) = refused {
            self.probe = Probe::Refused;
            Some(Kind::ProbeRefused { listening })
        } else if counted().any(|outcome| *outcome == ProbeOutcome::Unanswered) {
            self.probe = Probe::Unanswered;
            Some(Kind::ProbeUnanswered)
        } else {
            self.probe = Probe::Answered;
            let failed = matches!(before, Probe::Refused | Probe::Unanswered | Probe::NotAsked);
            (aloud || failed).then_some(Kind::ProbeAnswered)
        };
        // Until it serves, an engine loads: it may refuse and be silent as it likes.
        kind.filter(|_| self.served)
    }

    fn take(&mut self, service: usize, answer: Answer, step: &mut Step) {
        let watched = &mut self.services[service];
        watched.other = None;
        match answer {
            Answer::NoSuchService => {
                if watched.served {
                    watched.serving = Some(false);
                } else if !watched.missing {
                    step.look = true;
                }
                watched.missing = true;
                return;
            }
            Answer::Unimplemented => {
                if watched.mode == Mode::NoWatch && !watched.served {
                    watched.mode = Mode::Absent;
                } else {
                    watched.other = Some("UNIMPLEMENTED".to_owned());
                }
                return;
            }
            Answer::Other(what) => {
                watched.other = Some(what);
                return;
            }
            Answer::Undecided => watched.other = Some("UNKNOWN".to_owned()),
            Answer::Serving => {
                watched.serving = Some(true);
                watched.served = true;
            }
            Answer::NotServing => watched.serving = Some(false),
        }
        watched.missing = false;
        if watched.mode == Mode::Watch && !watched.open {
            watched.watch(service, step);
        }
    }

    /// Reports what changed for each role: it is serving if a service says so and none denies it.
    fn settle(&mut self, step: &mut Step) {
        let says = |role| {
            let mut given = self.services.iter().filter(|service| service.role == role).filter_map(|s| s.serving);
            let first = given.next()?;
            Some(given.fold(first, |all, one| all && one))
        };
        let roles = [HealthRole::Liveness, HealthRole::Readiness];
        for role in roles {
            if says(role) == Some(true) && self.reported.insert(role, true) != Some(true) {
                step.report.push(Kind::Serving { role });
                self.served = true;
                self.lived |= role == HealthRole::Liveness;
            }
        }
        for role in roles {
            // Before its first SERVING an engine is starting, whatever it says.
            let begun = if role == HealthRole::Liveness { self.lived } else { self.served };
            if says(role) == Some(false) && begun && self.reported.insert(role, false) != Some(false) {
                step.report.push(Kind::NotServing { role });
            }
        }
    }
}

impl Watched {
    /// Whether what Check answers counts. It goes by another connection than the Watch, so either may
    /// overtake the other, and a status would be taken back that was never given up. What the Watch said
    /// since Check was asked is younger. While a Watch is open, it comes first: Check must say so in
    /// two rounds, without a word on the Watch in between.
    fn believes(&mut self, answer: &Answer, heard: u64) -> bool {
        if self.heard != heard {
            return false;
        }
        let changes = match answer {
            Answer::Serving => self.serving != Some(true),
            Answer::NotServing => self.serving != Some(false),
            Answer::NoSuchService => self.served && self.serving != Some(false),
            Answer::Undecided | Answer::Unimplemented | Answer::Other(_) => false,
        };
        if !(changes && self.open) {
            self.objection = None;
            return true;
        }
        let objection = Some((answer.clone(), heard));
        let again = self.objection == objection;
        self.objection = objection;
        again
    }

    fn watch(&mut self, place: usize, step: &mut Step) {
        self.open = true;
        self.messages = 0;
        step.watch.push((place, self.attempts));
    }
}

/// For people: `watch serving`, `polling Check (watch-once server): serving; probe unanswered`.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_over() {
            return write!(f, "no health service at {}", self.address);
        }
        for (place, service) in self.services.iter().enumerate() {
            if place > 0 {
                f.write_str(", ")?;
            }
            if self.services.len() > 1 {
                write!(f, "{:?}: ", service.name)?;
            }
            service.fmt(f)?;
            if service.missing && !service.served {
                write!(f, " at {}", self.address)?;
                for (place, known) in self.known.iter().enumerate() {
                    write!(f, "{} {known:?}", if place == 0 { ", which knows" } else { "," })?;
                }
            }
        }
        match self.probe {
            Probe::Pending | Probe::Answered => Ok(()),
            Probe::Unanswered => f.write_str("; probe unanswered"),
            Probe::NotAsked => f.write_str("; cannot be asked: this daemon has no descriptor or port left for it"),
            Probe::Refused => f.write_str("; probe refused"),
        }
    }
}

impl fmt::Display for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.missing && !self.served {
            return write!(f, "configuration: no service {:?}", self.name);
        }
        f.write_str(match self.mode {
            Mode::Watch if self.messages > 0 => "watch ",
            Mode::Watch => "watch connecting: ",
            Mode::WatchOnce => "polling Check (watch-once server): ",
            Mode::NoWatch => "polling Check (server without Watch): ",
            Mode::Get => "polling HTTP: ",
            Mode::Absent => return f.write_str("no health service"),
        })?;
        f.write_str(match self.serving {
            Some(true) => "serving",
            Some(false) if self.missing => "withdrawn by its server",
            Some(false) => "not serving",
            None => "starting",
        })?;
        if let Some(other) = &self.other {
            write!(f, ", answers {other:?}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
