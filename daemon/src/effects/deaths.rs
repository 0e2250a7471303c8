//! Death certificates: from the first evidence to the last router's answer, in order.

use lastgasp_protocol::ClosedName as _;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream;
use async_nats::jetstream::stream::LastRawMessageErrorKind;
use bytes::Bytes;
use futures_util::TryStreamExt;
use jiff::{SignedDuration, Timestamp};
use lastgasp_protocol::kv::is_missing;
use lastgasp_protocol::{
    Answer, Cause, Certificate, Container, Counts, Incarnation, Moment, Name, Orphan, Phase, SCHEMA,
};
use tokio::sync::{Semaphore, watch};
use ulid::Ulid;

use crate::core::{Addressee, Kind, Nanos, ProcessId, WorkerId};
use crate::fault;
use crate::losses::Loss;
use crate::metrics::Metrics;
use crate::sensors::proc;

/// Moments before the verdict that a certificate begins with.
const TRAIL: usize = 32;
/// How long a signal to a worker that seems well is remembered. What a check said arrives some time after
/// it was asked for, and on a busy machine after the signal that came in between.
const SIGNAL_REMEMBERED: Duration = Duration::from_secs(5);
/// Moments in one certificate.
const MAX_MOMENTS: usize = 256;
/// Certificates of earlier daemons that are read at the start.
const MAX_RECALLED: usize = 2048;
/// How long after the end of a life its certificate waits for what is still to come: the
/// acknowledgement, the routers' answers, the pidfd (which a core dump delays).
const SETTLE: Duration = Duration::from_secs(5);

/// What kind of thing a moment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum MomentKind {
    /// A sensor reported.
    Evidence,
    /// The core decided.
    Decision,
    /// Something was carried out.
    Effect,
}

#[derive(Debug, Clone)]
struct Entry {
    at: Nanos,
    kind: MomentKind,
    what: &'static str,
    detail: String,
    /// How often; more than once for what is reported together.
    count: u64,
}

impl Entry {
    const fn new(at: Nanos, kind: MomentKind, what: &'static str, detail: String) -> Self {
        Self { at, kind, what, detail, count: 1 }
    }
}

/// A certificate that is being written.
#[derive(Debug, Clone)]
struct Draft {
    worker: WorkerId,
    name: Name,
    incarnation: Incarnation,
    epoch: u64,
    certificate: String,
    cause: Cause,
    observed_only: bool,
    entries: Vec<Entry>,
    received: BTreeSet<Name>,
    done: BTreeSet<Name>,
    streams: Counts,
    /// The end of the life was decided, at this time.
    over: Option<Nanos>,
    withdrawn: bool,
    process_gone: bool,
    container: Option<Container>,
    /// Of the process tree, as last looked at.
    remaining: Vec<(ProcessId, Arc<str>)>,
}

/// All certificates: those being written, and what was seen of workers that seem well.
#[derive(Debug)]
pub(crate) struct Deaths {
    node: Name,
    trails: HashMap<WorkerId, VecDeque<Entry>>,
    drafts: Vec<Draft>,
    /// Moments that did not fit.
    left_out: u64,
}

impl Deaths {
    /// Certificates of this node.
    #[must_use]
    pub(crate) fn new(node: Name) -> Self {
        // The first id seeds this thread's random numbers, which takes longer than a death may.
        let _ = Self::new_id();
        Self { node, trails: HashMap::new(), drafts: Vec::new(), left_out: 0 }
    }

    /// A new certificate id.
    #[must_use]
    pub(crate) fn new_id() -> String {
        Ulid::generate().to_string()
    }

    /// Notes evidence about the present life of a worker. While it seems well, only what may turn
    /// out to be the beginning of its end is kept.
    pub(crate) fn evidence(&mut self, worker: WorkerId, kind: &Kind, at: Nanos) {
        let good =
            matches!(kind, Kind::Serving { .. } | Kind::ProbeAnswered | Kind::Listening | Kind::CriticalSeen { .. });
        if good && !self.is_open(worker) {
            if let Some(trail) = self.trails.get_mut(&worker) {
                trail.retain(|entry| entry.what == "signal_sent" && at.since(entry.at) < SIGNAL_REMEMBERED);
            }
            return;
        }
        let detail = match kind {
            Kind::ProcessExit { process, exit } | Kind::ProcessGone { process, exit } => {
                format!("{} (pid {}) {exit}", process.title, process.tgid)
            }
            Kind::SignalDelivered { process, signal } => {
                format!("{} (pid {}) signal {signal}", process.title, process.tgid)
            }
            Kind::OomVictim { process } | Kind::StillAlive { process } | Kind::CriticalSeen { process } => {
                format!("{} (pid {})", process.title, process.tgid)
            }
            Kind::SignalSent { to, signal, sender, ending: _ } => {
                let to = match to {
                    Addressee::Process(process) => format!("{} (pid {})", process.title, process.tgid),
                    Addressee::Supervisor { tgid } => format!("the supervisor (pid {tgid})"),
                };
                format!("signal {signal} to {to} from {sender}")
            }
            Kind::Replaced { process, by } => format!("{} (pid {}) runs {by}", process.title, process.tgid),
            Kind::TcpReset { .. } => return self.reset(worker, kind, at),
            Kind::GpuFault { process, fault, policy: _ } => match process {
                Some(process) => format!("{fault}: {} (pid {})", process.title, process.tgid),
                None => fault.clone(),
            },
            Kind::ListenerClosed { exiting } => format!("by {} task", if *exiting { "an exiting" } else { "a living" }),
            Kind::Terminating { signal } => format!("signal {signal}"),
            Kind::Serving { role } | Kind::NotServing { role } => format!("{role:?}").to_lowercase(),
            Kind::ProbeRefused { listening } => format!("listening: {listening}"),
            Kind::Listening | Kind::WatchBroken | Kind::ProbeUnanswered | Kind::ProbeAnswered => String::new(),
        };
        let gone = matches!(kind, Kind::ProcessGone { .. });
        self.push(worker, None, Entry::new(at, MomentKind::Evidence, kind.as_str(), detail));
        if gone && let Some(draft) = self.drafts.iter_mut().rev().find(|draft| draft.worker == worker) {
            draft.process_gone = true;
        }
    }

    /// Notes a decision or an effect about a worker.
    pub(crate) fn moment(&mut self, worker: WorkerId, kind: MomentKind, what: &'static str, detail: String, at: Nanos) {
        self.push(worker, None, Entry::new(at, kind, what, detail));
    }

    /// The same, about a life whose certificate may not be the last that was opened.
    pub(crate) fn moment_of(
        &mut self,
        worker: WorkerId,
        life: Option<&Incarnation>,
        kind: MomentKind,
        what: &'static str,
        detail: String,
        at: Nanos,
    ) {
        self.push(worker, life, Entry::new(at, kind, what, detail));
    }

    /// Resets of one direction and reason are one moment, or a port scan would push out all others.
    fn reset(&mut self, worker: WorkerId, kind: &Kind, at: Nanos) {
        let Kind::TcpReset { direction, reason, peer, count } = kind else { return };
        let sort = match reason {
            Some(reason) => format!("{} {reason}", direction.as_str()),
            None => direction.as_str().to_owned(),
        };
        let what = kind.as_str();
        let same = |entry: &&mut Entry| {
            entry.what == what && entry.detail.strip_prefix(&sort).is_some_and(|rest| rest.starts_with(':'))
        };
        let draft = self.drafts.iter_mut().rev().find(|draft| draft.worker == worker);
        let known = match draft {
            Some(draft) => draft.entries.iter_mut().find(same),
            None => self.trails.get_mut(&worker).and_then(|trail| trail.iter_mut().find(same)),
        };
        let says = |count: u64| format!("{sort}: {count}, the last with {peer}");
        match known {
            Some(entry) => {
                entry.count += count;
                (entry.at, entry.detail) = (at, says(entry.count));
            }
            None => {
                let entry = Entry { count: *count, ..Entry::new(at, MomentKind::Evidence, what, says(*count)) };
                self.push(worker, None, entry);
            }
        }
    }

    fn push(&mut self, worker: WorkerId, life: Option<&Incarnation>, entry: Entry) {
        let of_life = |draft: &Draft| draft.worker == worker && life.is_some_and(|life| draft.incarnation == *life);
        let of_worker = |draft: &Draft| draft.worker == worker;
        let its = self.drafts.iter().rposition(of_life).or_else(|| self.drafts.iter().rposition(of_worker));
        if let Some(draft) = its.and_then(|its| self.drafts.get_mut(its)) {
            if draft.entries.len() < MAX_MOMENTS {
                draft.entries.push(entry);
            } else {
                self.left_out += 1;
            }
            return;
        }
        let trail = self.trails.entry(worker).or_default();
        if trail.len() == TRAIL {
            trail.pop_front();
        }
        trail.push_back(entry);
    }

    /// A worker is leaving or lost: its certificate is opened, or goes on under a new id, since
    /// answers to a `drain` and to the `move` after it are counted apart.
    #[expect(clippy::too_many_arguments, reason = "what a certificate begins with")]
    pub(crate) fn open(
        &mut self,
        worker: WorkerId,
        name: &Name,
        incarnation: &Incarnation,
        epoch: u64,
        certificate: &str,
        cause: &Cause,
        observed_only: bool,
        container: Option<Container>,
    ) {
        let known = self.drafts.iter_mut().find(|draft| draft.worker == worker && draft.incarnation == *incarnation);
        if let Some(draft) = known {
            certificate.clone_into(&mut draft.certificate);
            draft.cause = cause.clone();
            draft.epoch = epoch;
            return;
        }
        let entries = self.trails.remove(&worker).map(Vec::from).unwrap_or_default();
        self.drafts.push(Draft {
            worker,
            name: name.clone(),
            incarnation: incarnation.clone(),
            epoch,
            certificate: certificate.to_owned(),
            cause: cause.clone(),
            observed_only,
            entries,
            received: BTreeSet::new(),
            done: BTreeSet::new(),
            streams: Counts::default(),
            over: None,
            withdrawn: false,
            process_gone: false,
            container,
            remaining: Vec::new(),
        });
    }

    /// The life is over; the certificate settles from here on.
    pub(crate) fn over(&mut self, worker: WorkerId, cause: &Cause, at: Nanos) {
        if let Some(draft) = self.drafts.iter_mut().rev().find(|draft| draft.worker == worker) {
            draft.over.get_or_insert(at);
            draft.cause = cause.clone();
        }
    }

    /// What of a life that is over is still there.
    pub(crate) fn remaining(&mut self, worker: WorkerId, remaining: Vec<(ProcessId, Arc<str>)>) {
        if let Some(draft) = self.drafts.iter_mut().rev().find(|draft| draft.worker == worker) {
            draft.remaining = remaining;
        }
    }

    /// The certificate as far as it is written.
    #[must_use]
    pub(crate) fn so_far(&self, worker: WorkerId, now: Nanos) -> Option<Certificate> {
        let draft = self.drafts.iter().rev().find(|draft| draft.worker == worker)?;
        Some(draft.clone().finish(&self.node, now))
    }

    /// Whether a certificate of this worker is being written.
    #[must_use]
    pub(crate) fn is_open(&self, worker: WorkerId) -> bool {
        self.drafts.iter().any(|draft| draft.worker == worker)
    }

    /// A worker will not be heard of again.
    pub(crate) fn forget(&mut self, worker: WorkerId) {
        self.trails.remove(&worker);
    }

    /// The worker came back before its end: no death, no certificate.
    pub(crate) fn recovered(&mut self, worker: WorkerId) {
        self.drafts.retain(|draft| draft.worker != worker || draft.over.is_some());
        self.trails.remove(&worker);
    }

    /// The record is gone, acknowledged.
    pub(crate) fn withdrawn(&mut self, worker: WorkerId, incarnation: &Incarnation, detail: String, at: Nanos) {
        let draft = self.drafts.iter_mut().find(|draft| draft.worker == worker && draft.incarnation == *incarnation);
        if let Some(draft) = draft {
            draft.withdrawn = true;
            draft.entries.push(Entry::new(at, MomentKind::Effect, "withdrawn", detail));
        }
    }

    /// Counts an answer, once per router and phase.
    pub(crate) fn answered(&mut self, answer: &Answer, at: Nanos) {
        for draft in self.drafts.iter_mut().filter(|draft| draft.certificate == answer.certificate) {
            let (set, what) = match answer.phase {
                Phase::Received => (&mut draft.received, "router_received"),
                Phase::Done => (&mut draft.done, "router_done"),
            };
            if !set.insert(answer.router.clone()) {
                continue;
            }
            let mut detail = answer.router.to_string();
            if answer.phase == Phase::Done {
                let Counts { streams, moved, unmovable, failed } = answer.counts.unwrap_or_default();
                draft.streams.streams += streams;
                draft.streams.moved += moved;
                draft.streams.unmovable += unmovable;
                draft.streams.failed += failed;
                detail = format!("{detail}: {streams} streams, {moved} moved, {unmovable} unmovable, {failed} failed");
            }
            draft.entries.push(Entry::new(at, MomentKind::Effect, what, detail));
        }
    }

    /// Takes out the certificates that are complete, or have waited long enough.
    /// `routers` is how many routers are expected to answer; `acting` says of which lives the
    /// processes are being seen to, which is waited for.
    pub(crate) fn settled(
        &mut self,
        routers: usize,
        acting: impl Fn(WorkerId, &Incarnation) -> bool,
        now: Nanos,
    ) -> Vec<Certificate> {
        let node = self.node.clone();
        let (settled, open): (Vec<_>, Vec<_>) = std::mem::take(&mut self.drafts).into_iter().partition(|draft| {
            draft.over.is_some_and(|over| {
                let answered = draft.done.len() >= routers || draft.observed_only;
                let complete = draft.withdrawn && answered && draft.process_gone;
                (complete || now.since(over) >= SETTLE) && !acting(draft.worker, &draft.incarnation)
            })
        });
        self.drafts = open;
        settled.into_iter().map(|draft| draft.finish(&node, now)).collect()
    }

    /// How many moments did not fit into their certificates since this was asked last.
    pub(crate) fn take_left_out(&mut self) -> u64 {
        std::mem::take(&mut self.left_out)
    }

    /// Whether some certificate is waiting to be settled.
    #[must_use]
    pub(crate) fn is_settling(&self) -> bool {
        self.drafts.iter().any(|draft| draft.over.is_some())
    }
}

impl Draft {
    fn finish(self, node: &Name, now: Nanos) -> Certificate {
        let Self { worker: _, name, incarnation, epoch, certificate, cause, observed_only, mut entries, .. } = self;
        let alive = self.remaining.into_iter().filter(|(id, _)| proc::is_alive(*id));
        let orphans = alive.map(|(id, title)| Orphan { pid: id.tgid, title: title.as_ref().to_owned() }).collect();
        entries.sort_by_key(|entry| entry.at);
        let first = entries.first().map_or(now, |entry| entry.at);
        let age = SignedDuration::try_from(now.since(first)).unwrap_or_default();
        let micros = |at: Nanos| i64::try_from(at.since(first).as_micros()).unwrap_or(i64::MAX);
        let timeline = entries
            .into_iter()
            .map(|Entry { at, kind, what, detail, count: _ }| Moment {
                at_us: micros(at),
                kind: kind.as_str().to_owned(),
                what: what.to_owned(),
                detail,
            })
            .collect();
        Certificate {
            schema: SCHEMA,
            certificate,
            node: node.clone(),
            worker: name,
            incarnation,
            epoch,
            at: Timestamp::now().checked_sub(age).unwrap_or_default(),
            at_monotonic_ns: first.0,
            cause,
            observed_only,
            timeline,
            routers_received: self.received.len() as u64,
            routers_done: self.done.len() as u64,
            streams: self.streams,
            container: self.container,
            orphans,
        }
    }
}

/// Certificates that the server has not acknowledged, at most. They have some KiB each.
const MAX_UNKEPT: usize = 256;
/// Pauses between tries to keep one.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));

/// Keeps certificates on the server, for as long as it takes: it may be full, or not there yet.
#[derive(Debug, Clone)]
pub(crate) struct Archive {
    context: watch::Receiver<Option<jetstream::Context>>,
    /// Where there is no stream for them, they stay with this daemon.
    only_where_there: bool,
    room: Arc<Semaphore>,
    metrics: Metrics,
}

impl Archive {
    /// An archive on the server of this context, once there is one. An observer's certificates go there only
    /// where their stream is: `only_where_there`.
    #[must_use]
    pub(crate) fn new(
        context: watch::Receiver<Option<jetstream::Context>>,
        only_where_there: bool,
        metrics: Metrics,
    ) -> Self {
        Self { context, only_where_there, room: Arc::new(Semaphore::new(MAX_UNKEPT)), metrics }
    }

    /// What keeps one, to be spawned. If too many others wait, it is lost to the server, and counted; the
    /// log and `lastgasp events` have had it.
    pub(crate) fn keep(&self, certificate: &Certificate) -> Option<impl Future<Output = ()> + use<>> {
        let Ok(room) = Arc::clone(&self.room).try_acquire_owned() else {
            tracing::error!(certificate = certificate.certificate, "certificate not kept: too many others wait");
            self.metrics.lose(Loss::Certificate, 1);
            return None;
        };
        let subject = lastgasp_protocol::death_subject(&certificate.node, &certificate.worker);
        let payload = Bytes::from(certificate.to_json());
        let (mut context, id) = (self.context.clone(), certificate.certificate.clone());
        let only_where_there = self.only_where_there;
        Some(async move {
            let mut pause = BACKOFF.0;
            loop {
                let Ok(context) = context.wait_for(Option::is_some).await.map(|context| context.clone()) else {
                    return;
                };
                let Some(context) = context else { return };
                match publish(&context, subject.clone(), payload.clone(), only_where_there).await {
                    Ok(true) => break,
                    Ok(false) => {
                        tracing::debug!(
                            certificate = id,
                            "certificate kept on this node alone: NATS has no stream for it"
                        );
                        return;
                    }
                    Err(error) => tracing::warn!(%error, certificate = id, "certificate not kept yet"),
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(BACKOFF.1);
            }
            fault::point("certificate kept");
            drop(room);
        })
    }
}

/// `false`: there is no stream for it, and it went nowhere.
async fn publish(
    context: &jetstream::Context,
    subject: String,
    payload: Bytes,
    only_where_there: bool,
) -> Result<bool, async_nats::Error> {
    if only_where_there {
        match context.get_stream(lastgasp_protocol::DEATHS_STREAM).await {
            Err(error) if is_missing(&error) => return Ok(false),
            found => _ = found?,
        }
    }
    context.publish(subject, payload).await?.await?;
    Ok(true)
}

/// Reads the certificates of this node that the server keeps, oldest first: `each` gets the id and
/// the JSON. Where there are too many, the last one of each worker has to do.
pub(crate) async fn recall(context: jetstream::Context, node: Name, each: impl Fn(&str, &str) + Send) {
    if let Err(error) = try_recall(&context, &node, each).await {
        tracing::debug!(%error, "earlier death certificates not read");
    }
}

/// By requests for single messages: who may create a consumer may have its messages delivered wherever he
/// likes, so no node's permissions include one for what it writes itself.
async fn try_recall(
    context: &jetstream::Context,
    node: &Name,
    each: impl Fn(&str, &str) + Send,
) -> Result<(), async_nats::Error> {
    let stream = context.get_stream(lastgasp_protocol::DEATHS_STREAM).await?;
    let own = lastgasp_protocol::death_subjects(node);
    let kept: Vec<(String, usize)> = stream.info_with_subjects(own.clone()).await?.try_collect().await?;
    let tell = |payload: &[u8]| {
        if let (Ok(json), Ok(certificate)) =
            (std::str::from_utf8(payload), serde_json::from_slice::<Certificate>(payload))
        {
            each(&certificate.certificate, json);
        }
    };
    if kept.iter().map(|(_, count)| count).sum::<usize>() > MAX_RECALLED {
        for (subject, _) in kept {
            tell(&stream.get_last_raw_message_by_subject(&subject).await?.payload);
        }
        return Ok(());
    }
    let mut next = 1;
    loop {
        match stream.get_first_raw_message_by_subject(&own, next).await {
            Ok(message) => {
                tell(&message.payload);
                next = message.sequence + 1;
            }
            Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use lastgasp_protocol::{CauseKind, Sender};

    use super::*;
    use crate::core::Process;

    fn at(ms: u64) -> Nanos {
        Nanos(ms * 1_000_000)
    }

    fn root() -> Process {
        Process { tgid: 42, title: "root".into(), root: true }
    }

    fn stopped() -> Kind {
        let sender = Sender { pid: 7, comm: "kill".to_owned(), cgroup: None };
        Kind::SignalSent { to: Addressee::Process(root()), signal: libc::SIGSTOP, sender, ending: false }
    }

    /// What its certificate begins with, if it is lost at that moment.
    fn lost(mut deaths: Deaths, now: Nanos) -> Vec<String> {
        let (worker, name) = (WorkerId(0), Name::new("vllm-0").unwrap());
        let incarnation = Incarnation::new("life").unwrap();
        deaths.open(worker, &name, &incarnation, 1, "id", &Cause::of(CauseKind::Hung), false, None);
        let certificate = deaths.so_far(worker, now).unwrap();
        certificate.timeline.into_iter().map(|moment| moment.what).collect()
    }

    /// The check had been asked for before the signal, and its answer is read after it.
    #[test]
    fn who_stopped_it_is_not_forgotten_over_an_answer_that_was_on_its_way() {
        let mut deaths = Deaths::new(Name::new("node-a").unwrap());
        deaths.evidence(WorkerId(0), &Kind::WatchBroken, at(0));
        deaths.evidence(WorkerId(0), &stopped(), at(1));
        deaths.evidence(WorkerId(0), &Kind::ProbeAnswered, at(2));
        deaths.evidence(WorkerId(0), &Kind::ProbeUnanswered, at(1002));
        assert_eq!(lost(deaths, at(11_000)), ["signal_sent", "probe_unanswered"]);
    }

    #[test]
    fn a_signal_long_before_is_no_part_of_it() {
        let mut deaths = Deaths::new(Name::new("node-a").unwrap());
        deaths.evidence(WorkerId(0), &stopped(), at(1));
        deaths.evidence(WorkerId(0), &Kind::ProbeAnswered, at(6000));
        deaths.evidence(WorkerId(0), &Kind::ProbeUnanswered, at(7000));
        assert_eq!(lost(deaths, at(17_000)), ["probe_unanswered"]);
    }

    /// Dynamo's discovery answers when the next life is being lost already.
    #[test]
    fn what_was_done_about_a_life_stands_in_its_own_certificate() {
        let mut deaths = Deaths::new(Name::new("node-a").unwrap());
        let (worker, name) = (WorkerId(0), Name::new("vllm-0").unwrap());
        let [former, present] = ["former", "present"].map(|life| Incarnation::new(life).unwrap());
        for life in [&former, &present] {
            deaths.open(worker, &name, life, 1, life.as_str(), &Cause::of(CauseKind::Hung), false, None);
            deaths.over(worker, &Cause::of(CauseKind::Hung), at(0));
        }
        deaths.moment_of(worker, Some(&former), MomentKind::Effect, "dynamo", String::new(), at(1));
        let settled = deaths.settled(0, |_, _| false, at(1_000_000));
        let closed =
            settled.iter().map(|one| (&one.incarnation, one.timeline.iter().any(|moment| moment.what == "dynamo")));
        assert_eq!(closed.collect::<Vec<_>>(), [(&former, true), (&present, false)]);
    }
}
