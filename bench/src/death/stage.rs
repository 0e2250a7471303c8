//! Engines that are killed, those who watch them, and a reader of each one's stream.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lastgasp_protocol::{Certificate, WORKERS_BUCKET};
use lastgasp_tests::HarnessError;
use lastgasp_tests::client::LiveStream;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::engine::Engine;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::GIVE_UP;
use lastgasp_tests::router::Router;
use nix::time::{ClockId, clock_gettime};
use serde_json::json;
use tokio::process::Command;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt as _;

use super::busy::Busy;
use super::records::Records;
use super::rivals::{self, Noticed};
use super::{BenchError, Death, Hops, Kill, Situation, Watcher};
use crate::file;
use crate::progress::Progress;

/// The leases' bucket.
const LEASES: &str = "bench_leases";
/// A model that nobody asks for.
const UNUSED: &str = "unused";
/// Tokens that a reader has before the kill.
const BEFORE: usize = 3;
/// Between two deaths.
const PAUSE: Duration = Duration::from_millis(10);
/// A certificate is complete by then (`SETTLE` in daemon/src/effects/deaths.rs, and a little).
const SETTLED: Duration = Duration::from_secs(7);

pub(super) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has a monotonic clock");
    u64::try_from(now.tv_sec() * 1_000_000_000 + now.tv_nsec()).expect("time since boot is positive")
}

/// A rival that watches one life.
type Watching = JoinHandle<Result<Noticed, BenchError>>;

/// A place for a worker: it is killed and started again.
struct Place {
    name: String,
    group: &'static [Watcher],
    engine: Engine,
    /// On another engine, where its streams go on.
    _spare: Engine,
}

impl Place {
    fn model(name: &str) -> String {
        format!("model-{name}")
    }

    fn has(&self, watcher: Watcher) -> bool {
        self.group.contains(&watcher)
    }

    /// The model that its record in the name of this watcher has: only the owner's is asked for.
    fn listed_model(&self, watcher: Watcher) -> String {
        if self.group[0] == watcher { Self::model(&self.name) } else { UNUSED.to_owned() }
    }
}

/// One death, while it is being watched.
struct Dying {
    place: String,
    killed_ns: u64,
    killed: Instant,
    owner: Watcher,
    /// With the time at which another client of NATS saw that the record is gone (monotonic, ns).
    lastgasp: Vec<(Watcher, u64)>,
    reader: Option<JoinHandle<Result<Read, BenchError>>>,
    read: Option<Read>,
    rivals: Vec<(Watcher, Watching)>,
}

/// What the reader of a stream saw.
#[derive(Debug, Clone, Copy, Default)]
struct Read {
    acted: Option<Instant>,
    next_token: Option<Instant>,
}

struct Stage<'a> {
    situation: &'a Situation,
    places: Vec<Place>,
    life: usize,
    records: Records,
    leases: Records,
    router: Router,
    certificates: Arc<Mutex<Vec<Certificate>>>,
    /// Ends renewals, by place.
    renewals: Vec<(String, JoinHandle<Result<(), BenchError>>)>,
    watching: Vec<(String, Watcher, Watching)>,
    _daemons: Vec<Daemon>,
    _nats: Nats,
    folder: tempfile::TempDir,
}

/// All deaths of a situation.
pub(super) async fn deaths(situation: &Situation, beside: Option<&Path>) -> Result<Vec<Death>, BenchError> {
    let groups = situation.groups.len();
    let mut progress = Progress::begin(situation.name, situation.deaths * groups);
    let mut stage = Stage::set(situation, beside).await?;
    let mut dying = Vec::new();
    let mut left = situation.deaths;
    while left > 0 {
        let now = left.min(situation.at_once);
        left -= now;
        stage.begin_life().await?;
        let busy = if situation.busy { Some(Busy::start().await?) } else { None };
        // In turns: the machine may get slower or faster.
        for index in 0..now {
            for group in 0..groups {
                let place = stage.place(group, index);
                dying.push(stage.kill(place).await?);
                progress.step();
            }
        }
        drop(busy);
        for one in &mut dying {
            one.settle().await?;
        }
        if left > 0 {
            stage.revive().await?;
        }
    }
    let mut found = Vec::new();
    for one in dying {
        found.extend(stage.deaths_of(one).await?);
    }
    Ok(found)
}

impl<'a> Stage<'a> {
    async fn set(situation: &'a Situation, beside: Option<&Path>) -> Result<Self, BenchError> {
        let folder = tempfile::tempdir().map_err(file(&std::env::temp_dir()))?;
        let path = folder.path();
        let nats = Nats::start(path).await?;
        let context = nats.jetstream().await?;
        let records = Records::follow(&context, WORKERS_BUCKET).await?;
        let leases = Records::follow(&context, LEASES).await?;
        let certificates = collect(&nats).await?;
        let mut places = Vec::new();
        for (number, group) in situation.groups.iter().enumerate() {
            for index in 0..situation.at_once {
                places.push(Self::build(situation, format!("{}-{number}-{index}", situation.slug), group, path));
            }
        }
        let mut built = Vec::new();
        for place in places {
            built.push(place.await?);
        }
        let places = built;
        let mut daemons = Vec::new();
        for watcher in [Watcher::Ebpf, Watcher::Former, Watcher::Realtime, Watcher::Pidfd] {
            let watched: Vec<&Place> = places.iter().filter(|place| place.has(watcher)).collect();
            if watched.is_empty() {
                continue;
            }
            let ebpf = if watcher == Watcher::Pidfd { "off" } else { "required" };
            // Who crashes over and over would not be listed at once.
            let mut config = DaemonConfig::new(watcher.node(), &nats.url(), ebpf, path).with_hold_down_ms(0);
            config.log = "info";
            config.priority = if watcher == Watcher::Realtime { "realtime" } else { "normal" };
            for place in watched {
                config = config.with(&place.engine);
                if let Some(worker) = config.worker.last_mut() {
                    worker.models = vec![place.listed_model(watcher)];
                }
            }
            daemons.push(match beside.filter(|_| watcher == Watcher::Former) {
                Some(program) => Daemon::start_by(Command::new(program), &config, path).await?,
                None => Daemon::start(&config, path).await?,
            });
        }
        for place in &places {
            let model = Place::model(&place.name);
            records.list("spare", &place.name, 0, &model, &place._spare.endpoint()).await?;
        }
        let router = ["--nats", &nats.url(), "--migration-limit", "3"];
        let router = Router::start_with("bench-router", &router, path).await?;
        Ok(Self {
            situation,
            places,
            life: 0,
            records,
            leases,
            router,
            certificates,
            renewals: Vec::new(),
            watching: Vec::new(),
            _daemons: daemons,
            _nats: nats,
            folder,
        })
    }

    async fn build(
        situation: &Situation,
        name: String,
        group: &'static [Watcher],
        folder: &Path,
    ) -> Result<Place, BenchError> {
        let engine = start(situation, &name, None, folder).await?;
        let (spare, model) = (format!("spare-{name}"), Place::model(&name));
        let arguments = ["--frontend", "rust", "--tokens-per-second", RATE, "--model", &model];
        let spare = Engine::start(&spare, &arguments, folder).await?;
        Ok(Place { name, group, engine, _spare: spare })
    }

    /// The index of one of a group.
    fn place(&self, group: usize, index: usize) -> usize {
        group * self.situation.at_once + index
    }

    /// Everybody watches every worker.
    async fn begin_life(&mut self) -> Result<(), BenchError> {
        self.life += 1;
        for place in &self.places {
            for watcher in place.group.iter().copied() {
                let (model, endpoint) = (place.listed_model(watcher), place.engine.endpoint());
                let list = self.records.list(watcher.node(), &place.name, self.life, &model, &endpoint);
                let task = match watcher {
                    Watcher::Ebpf | Watcher::Former | Watcher::Realtime | Watcher::Pidfd => {
                        self.records.listed(&format!("{}.{}", watcher.node(), place.name)).await?;
                        continue;
                    }
                    Watcher::Watch => tokio::spawn(rivals::watch(place.engine.grpc(), list.await?).await?),
                    Watcher::Poll => tokio::spawn(rivals::poll(place.engine.endpoint(), list.await?, fastrand::f64())),
                    Watcher::Lease => {
                        let lease = format!("{}-{}", place.name, self.life);
                        self.leases.lease(&lease, self.situation.lease).await?;
                        let renewal =
                            rivals::renew(self.leases.clone(), lease.clone(), self.situation.lease, fastrand::f64());
                        self.renewals.push((place.name.clone(), tokio::spawn(renewal)));
                        let (leases, key) = (self.leases.clone(), format!("{}.{lease}", watcher.node()));
                        tokio::spawn(async move {
                            leases.listed(&key).await?;
                            let gone_ns = leases.gone(&key).await?;
                            Ok(Noticed { evidence_ns: gone_ns, gone_ns })
                        })
                    }
                };
                self.watching.push((place.name.clone(), watcher, task));
            }
        }
        Ok(())
    }

    /// Kills one whose stream is being read, and waits for those who are quick.
    async fn kill(&mut self, index: usize) -> Result<Dying, BenchError> {
        let place = &self.places[index];
        let owner = place.group[0];
        let mut stream = self.stream(place, owner).await?;
        stream.tokens(BEFORE).await?;
        let is_its = |name: &String| *name == place.name;
        self.renewals.retain(|(name, renewal)| {
            if is_its(name) {
                renewal.abort();
            }
            !is_its(name)
        });
        let (its, others) = std::mem::take(&mut self.watching).into_iter().partition(|(name, _, _)| is_its(name));
        self.watching = others;
        let rivals = Vec::into_iter(its).map(|(_, watcher, task)| (watcher, task)).collect();
        tokio::time::sleep(PAUSE.mul_f64(0.5 + fastrand::f64())).await;

        let (killed_ns, killed) = (monotonic_ns(), Instant::now());
        match self.situation.kill {
            Kill::Tree => place.engine.kill_tree(),
            Kill::Core(signal) => place.engine.signal_core(signal),
        }
        let reader = tokio::spawn(read(stream, killed));
        let lastgasp = place.group.iter().copied().filter(|watcher| watcher.is_lastgasp());
        let mut dying = Dying {
            place: place.name.clone(),
            killed_ns,
            killed,
            owner,
            lastgasp: lastgasp.map(|watcher| (watcher, 0)).collect(),
            reader: Some(reader),
            read: None,
            rivals,
        };
        for (watcher, seen_ns) in &mut dying.lastgasp {
            *seen_ns = self.records.gone(&format!("{}.{}", watcher.node(), dying.place)).await?;
        }
        if owner.is_lastgasp() {
            dying.settle_reader().await?;
        }
        tokio::time::sleep(PAUSE).await;
        Ok(dying)
    }

    /// A stream that is on this worker by this watcher's record. It may have to be asked for several times.
    async fn stream(&self, place: &Place, owner: Watcher) -> Result<LiveStream, BenchError> {
        let wanted = format!("{}/{}", owner.node(), place.name);
        let body = json!({
            "model": Place::model(&place.name), "prompt": "What does an engine say that is killed?",
            "max_tokens": 2000, "temperature": 0, "ignore_eos": true, "return_token_ids": true,
        });
        let deadline = Instant::now() + GIVE_UP;
        while Instant::now() < deadline {
            let stream = self.router.stream(Endpoint::Completions, &body).await?;
            if stream.transcript.worker.as_ref() == Some(&wanted) {
                return Ok(stream);
            }
            // The router learns of a record a little later than we.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Err(HarnessError::GaveUp(format!("a stream on {wanted}")).into())
    }

    /// Starts the dead ones again, on their former ports.
    async fn revive(&mut self) -> Result<(), BenchError> {
        let Self { situation, places, folder, .. } = self;
        let (situation, folder) = (*situation, folder.path());
        remove_cores(folder);
        let mut revived = Vec::new();
        for place in std::mem::take(places) {
            let Place { name, group, engine, _spare } = place;
            let ports = (engine.ready.http.port(), engine.ready.grpc.map_or(0, |address| address.port()));
            // The old one first: it holds the ports.
            drop(engine);
            revived.push(async move {
                let engine = start(situation, &name, Some(ports), folder).await?;
                Ok::<_, BenchError>(Place { name, group, engine, _spare })
            });
        }
        // All at the same time: most of a start is waiting.
        *places = futures_util::future::try_join_all(revived).await?;
        Ok(())
    }

    /// What is known of one death, at last.
    async fn deaths_of(&self, dying: Dying) -> Result<Vec<Death>, BenchError> {
        let since = |at_ns: u64| Some(at_ns.saturating_sub(dying.killed_ns) as f64 / 1e3);
        let read = dying.read.unwrap_or_default();
        let of_reader =
            |at: Option<Instant>| at.map(|at| at.saturating_duration_since(dying.killed).as_secs_f64() * 1e6);
        let mut found = Vec::new();
        for (watcher, seen_ns) in dying.lastgasp {
            let mut hops = self.certified(watcher, &dying.place, dying.killed_ns);
            let deadline = Instant::now() + SETTLED;
            while hops.gone.is_none() && Instant::now() < deadline {
                tokio::time::sleep(Duration::from_millis(20)).await;
                hops = self.certified(watcher, &dying.place, dying.killed_ns);
            }
            hops.seen = since(seen_ns);
            found.push(Death { watcher, hops });
        }
        for (watcher, task) in dying.rivals {
            let noticed = task.await.expect("it does not panic")?;
            let hops = Hops { evidence: since(noticed.evidence_ns), gone: since(noticed.gone_ns), ..Hops::default() };
            found.push(Death { watcher, hops });
        }
        for death in found.iter_mut().filter(|death| death.watcher == dying.owner) {
            death.hops.acted = of_reader(read.acted);
            death.hops.next_token = of_reader(read.next_token);
        }
        Ok(found)
    }

    /// What a daemon says of a death.
    fn certified(&self, watcher: Watcher, place: &str, killed_ns: u64) -> Hops {
        let certificates = self.certificates.lock().unwrap_or_else(PoisonError::into_inner);
        let killed_us = i64::try_from(killed_ns / 1000).unwrap_or(i64::MAX);
        let at = |certificate: &Certificate, what: &[&str]| {
            let began = i64::try_from(certificate.at_monotonic_ns / 1000).unwrap_or(i64::MAX);
            let moments = certificate.timeline.iter().filter(|moment| what.contains(&moment.what.as_str()));
            moments.map(|moment| began + moment.at_us - killed_us).filter(|at| *at >= 0).min().map(|at| at as f64)
        };
        // Every later version of a certificate knows more. A later life's comes later.
        let mut own = certificates
            .iter()
            .filter(|certificate| certificate.node.as_str() == watcher.node() && certificate.worker.as_str() == place);
        let first = own.clone().find(|certificate| at(certificate, &["lost"]).is_some());
        let Some(last) = first.and_then(|first| own.rfind(|other| other.certificate == first.certificate)) else {
            return Hops::default();
        };
        Hops {
            evidence: at(last, &["signal_delivered", "process_exit", "process_gone"]),
            signalled: at(last, &["signalled"]),
            gone: at(last, &["withdrawn"]),
            ..Hops::default()
        }
    }
}

/// Tokens a second of each stream.
const RATE: &str = "100";

/// An engine that lets its reader wait when its core dies, as vLLM's Rust frontend does.
async fn start(
    situation: &Situation,
    name: &str,
    ports: Option<(u16, u16)>,
    folder: &Path,
) -> Result<Engine, BenchError> {
    let (model, resident) = (Place::model(name), situation.resident.to_string());
    let (port, grpc) = ports.unwrap_or_default();
    let (port, grpc) = (port.to_string(), grpc.to_string());
    let mut arguments = vec!["--frontend", "rust", "--tokens-per-second", RATE, "--model", &model];
    arguments.extend(["--port", &port, "--grpc-port", &grpc, "--core-mb", &resident]);
    Ok(Engine::start(name, &arguments, folder).await?)
}

impl Dying {
    /// Waits for everybody but the lease.
    async fn settle(&mut self) -> Result<(), BenchError> {
        self.settle_reader().await?;
        for (_, task) in self.rivals.iter_mut().filter(|(watcher, _)| *watcher != Watcher::Lease) {
            while !task.is_finished() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        Ok(())
    }

    async fn settle_reader(&mut self) -> Result<(), BenchError> {
        if let Some(reader) = self.reader.take() {
            self.read = Some(reader.await.expect("it does not panic")?);
        }
        Ok(())
    }
}

/// Until the first token after the move, or the end.
async fn read(mut stream: LiveStream, killed: Instant) -> Result<Read, BenchError> {
    loop {
        stream.tokens(1).await?;
        let events = || stream.transcript.events.iter().filter(|event| event.at >= killed);
        let acted = events().find(|event| event.raw.contains(": lastgasp moved")).map(|event| event.at);
        let next_token = acted
            .and_then(|acted| events().find(|event| event.at >= acted && !event.ids.is_empty()).map(|event| event.at));
        if next_token.is_some() || stream.transcript.ending.is_some() {
            return Ok(Read { acted, next_token });
        }
    }
}

/// Every version of every certificate.
async fn collect(nats: &Nats) -> Result<Arc<Mutex<Vec<Certificate>>>, BenchError> {
    let subscribed = nats.client().await?.subscribe("lastgasp.v1.death.>").await;
    let mut messages = subscribed.map_err(|error| HarnessError::Nats(error.into()))?;
    let collected: Arc<Mutex<Vec<Certificate>>> = Arc::default();
    let into = Arc::clone(&collected);
    tokio::spawn(async move {
        while let Some(message) = messages.next().await {
            if let Ok(certificate) = serde_json::from_slice(&message.payload) {
                into.lock().unwrap_or_else(PoisonError::into_inner).push(certificate);
            }
        }
    });
    Ok(collected)
}

/// The core files of the last life.
fn remove_cores(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("core") {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
