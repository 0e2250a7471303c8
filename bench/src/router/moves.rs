//! A worker is lost, and its streams go elsewhere.

use std::path::Path;
use std::time::Duration;

use futures_util::StreamExt as _;
use lastgasp::sensors::proc::monotonic_now;
use lastgasp_protocol::{
    Action, Answer, Cause, CauseKind, MigrateSignal, Mode, Name, Phase, SCHEMA, WorkerRef, migrate_subject,
};
use lastgasp_tests::HarnessError;
use lastgasp_tests::distribution::Unit;
use lastgasp_tests::nats::Nats;
use nix::sys::signal::Signal;

use super::PEER;
use super::clients::{Crowd, Order};
use super::parts::{Engine, NODE, Register, Router, incarnation};
use crate::progress::Progress;
use crate::report::{Plot, Row, Section};
use crate::{BenchError, Options, file};

/// How many streams the worker has that is lost, and how often that is done.
const CROWDS: [(usize, usize); 3] = [(100, 10), (1000, 5), (5000, 3)];
/// Between tokens: what streams say while they wait to be moved is not what is measured.
const PACE: Duration = Duration::from_millis(500);
/// Streams of the comparison with the other router, and how often.
const LOST: (usize, usize) = (100, 3);

/// Times in microseconds since just before the kill.
#[derive(Default)]
struct Found {
    first: Vec<f64>,
    median: Vec<f64>,
    last: Vec<f64>,
    /// Of every stream.
    next_token: Vec<f64>,
    /// Of every stream.
    asked: Vec<f64>,
    /// The router said `done`.
    done: Vec<f64>,
    /// Percent of the streams that ended whole.
    whole: Vec<f64>,
}

pub(super) async fn run(python: &Path, options: &Options) -> Result<Vec<Section>, BenchError> {
    let folder = tempfile::tempdir().map_err(file(&std::env::temp_dir()))?;
    let nats = Nats::start(folder.path()).await?;
    let register = Register::open(&nats).await?;
    let stage = Stage { nats, register, folder: folder.path() };
    let crowds = if options.quick { [(10, 1), (20, 1), (50, 1)] } else { CROWDS };
    let mut progress = Progress::begin("moves", crowds.iter().map(|(_, rounds)| rounds).sum());
    let mut rows = Vec::new();
    for (streams, rounds) in crowds {
        let mut found = Found::default();
        for round in 0..rounds {
            stage.lose(&mut found, streams, round).await?;
            progress.step();
        }
        let label = streams.to_string();
        let Found { first, median, last, next_token, asked, done, whole } = found;
        rows.extend(Row::of([&label, "first request at the next worker"], Unit::Microseconds, first));
        rows.extend(Row::of([&label, "median request"], Unit::Microseconds, median));
        rows.extend(Row::of([&label, "last request"], Unit::Microseconds, last));
        rows.extend(Row::of([&label, "every request"], Unit::Microseconds, asked));
        rows.extend(Row::of([&label, NEXT], Unit::Microseconds, next_token));
        rows.extend(Row::of([&label, "the router says `done`"], Unit::Microseconds, done));
        rows.extend(Row::of([&label, "streams without a missing or repeated token"], Unit::Percent, whole));
    }
    drop(progress);
    let named = rows.iter().filter(|row| row.labels[1] == NEXT);
    let named = named.map(|row| (format!("{} streams", row.labels[0]), row));
    let plots = vec![Plot::cumulative(
        "moves",
        "Streams of a lost worker: the next token at the client",
        ("since the kill", true),
        named,
    )];
    let moves = Section {
        title: "Streams of a lost worker".to_owned(),
        about: format!(
            "An engine with so many live streams gets SIGKILL, and the signal that a daemon sends is published right after \
             it: times since just before the kill. Every stream has a token each {} ms; whatever comes from the next worker \
             first counts as the next token. All of it, router, engines and clients, shares the machine's cores.",
            PACE.as_millis()
        ),
        labels: ["streams", "what"].map(str::to_owned).to_vec(),
        compared_with: None,
        rows,
        plots,
    };
    Ok(vec![moves, stage.beside(python, options).await?])
}

const NEXT: &str = "next token at the client";

struct Stage<'a> {
    nats: Nats,
    register: Register,
    folder: &'a Path,
}

impl Stage<'_> {
    /// One worker with all streams is killed beside another that has none.
    async fn lose(&self, found: &mut Found, streams: usize, round: usize) -> Result<(), BenchError> {
        let [old, new] = ["old", "new"].map(|name| format!("{name}-{streams}-{round}"));
        let mut lost = Engine::start('a', &old, self.folder).await?;
        let next = Engine::start('b', &new, self.folder).await?;
        let router = Router::ours(&format!("router-{streams}-{round}"), &self.nats, 3, self.folder).await?;
        self.register.list(&old, &lost).await?;
        router.offers(&[&old]).await?;
        let ramp = Duration::from_millis(streams as u64);
        // Long enough that none ends before all have begun and the worker is lost.
        let tokens = 8 + usize::try_from(ramp.as_millis() / PACE.as_millis()).unwrap_or_default();
        let order = Order { tokens, pace: PACE };
        let mut crowd =
            Crowd::gather(vec![(router.address, streams)], order, ramp).map_err(file("a thread".as_ref()))?;
        crowd.begun(streams).await;
        self.register.list(&new, &next).await?;
        router.offers(&[&new, &old]).await?;

        let client = self.nats.client().await?;
        let nats = |error: async_nats::Error| HarnessError::Nats(error);
        let inbox = client.new_inbox();
        let mut answers = client.subscribe(inbox.clone()).await.map_err(|error| nats(error.into()))?;
        let signal = signal(&old);
        let (subject, payload) = (migrate_subject(&signal.node), signal.to_json());
        let killed = monotonic_now().0;
        lost.process.identity.signal(Signal::SIGKILL);
        let published = client.publish_with_reply(subject, inbox, payload.into()).await;
        published.map_err(|error| nats(error.into()))?;
        client.flush().await.map_err(|error| nats(error.into()))?;
        let micros = |at: u64| at.saturating_sub(killed) as f64 / 1e3;
        while let Some(message) = answers.next().await {
            if Answer::parse(&message.payload).is_ok_and(|answer| answer.phase == Phase::Done) {
                found.done.push(micros(monotonic_now().0));
                break;
            }
        }
        lost.process.end();
        let crowd = crowd.over().await;
        let reads = crowd.groups.first().map(Vec::as_slice).unwrap_or_default();
        found.whole.push(reads.iter().filter(|read| read.whole).count() as f64 / streams as f64 * 100.0);
        let next_token = |read: &super::clients::Read| read.tokens.iter().find(|token| token.engine == b'b').copied();
        found.next_token.extend(reads.iter().filter_map(next_token).map(|token| micros(token.received)));
        let mut asked = next.asked().await?;
        asked.sort_unstable();
        if let (Some(first), Some(last)) = (asked.first(), asked.last()) {
            found.first.push(micros(*first));
            found.median.push(micros(asked[asked.len() / 2]));
            found.last.push(micros(*last));
        }
        found.asked.extend(asked.into_iter().map(micros));
        self.register.withdraw(&old).await?;
        self.register.withdraw(&new).await?;
        Ok(())
    }

    /// What becomes of a lost worker's streams behind either router.
    async fn beside(&self, python: &Path, options: &Options) -> Result<Section, BenchError> {
        let (streams, rounds) = if options.quick { (10, 1) } else { LOST };
        let mut whole = [Vec::new(), Vec::new()];
        let mut progress = Progress::begin("a lost worker behind either router", rounds * 2);
        for round in 0..rounds {
            for peer in [false, true] {
                let [old, new] = ["old", "new"].map(|name| format!("beside-{name}-{peer}-{round}"));
                let mut lost = Engine::start('a', &old, self.folder).await?;
                let next = Engine::start('b', &new, self.folder).await?;
                self.register.list(&old, &lost).await?;
                self.register.list(&new, &next).await?;
                let router = if peer {
                    Router::peer(python, &[&lost, &next], self.folder).await?
                } else {
                    let router = Router::ours(&format!("beside-{round}"), &self.nats, 3, self.folder).await?;
                    router.offers(&[&new, &old]).await?;
                    router
                };
                let order = Order { tokens: 8, pace: Duration::from_millis(250) };
                let ramp = Duration::from_millis(100);
                let mut crowd =
                    Crowd::gather(vec![(router.address, streams)], order, ramp).map_err(file("a thread".as_ref()))?;
                crowd.begun(streams).await;
                lost.process.end();
                let client = self.nats.client().await?;
                let signal = signal(&old);
                let published = client.publish(migrate_subject(&signal.node), signal.to_json().into()).await;
                published.map_err(|error| HarnessError::Nats(error.into()))?;
                client.flush().await.map_err(|error| HarnessError::Nats(error.into()))?;
                let crowd = crowd.over().await;
                let there =
                    |read: &&super::clients::Read| read.tokens.first().is_some_and(|token| token.engine == b'a');
                let there: Vec<_> = crowd.groups.iter().flatten().filter(there).collect();
                let ended = there.iter().filter(|read| read.whole).count();
                if !there.is_empty() {
                    whole[usize::from(peer)].push(ended as f64 / there.len() as f64 * 100.0);
                }
                self.register.withdraw(&old).await?;
                self.register.withdraw(&new).await?;
                progress.step();
            }
        }
        let [ours, peers] = whole;
        let rows = [("lastgasp-router", ours), (PEER, peers)];
        let rows = rows.into_iter().filter_map(|(name, whole)| Row::of([name], Unit::Percent, whole));
        Ok(Section {
            title: "A lost worker behind either router".to_owned(),
            about: format!(
                "{streams} streams on two engines, one of which gets SIGKILL: of the streams that it had, how many had every \
                 token once and ended with `[DONE]`. The other router knows of no way to go on with a stream."
            ),
            labels: vec!["router".to_owned()],
            compared_with: None,
            rows: rows.collect(),
            plots: Vec::new(),
        })
    }
}

/// As a daemon says it of an engine that was killed.
fn signal(worker: &str) -> MigrateSignal {
    MigrateSignal {
        schema: SCHEMA,
        node: Name::new(NODE).expect("letters"),
        action: Action::Move,
        mode: Some(Mode::Lost),
        certificate: worker.to_owned(),
        workers: vec![WorkerRef {
            worker: Name::new(worker).expect("letters and digits"),
            incarnation: incarnation(worker),
            epoch: 1,
            revision: 0,
        }],
        cause: Cause::of(CauseKind::ProcessKilled),
    }
}
