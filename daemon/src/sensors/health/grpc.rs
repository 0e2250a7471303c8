//! The RPCs of `grpc.health.v1`, and the loop that feeds their outcomes to the [`Machine`].

use std::error::Error as _;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::Context;
use super::machine::{Answer, Ask, End, Machine, ProbeOutcome, Round, Step};
use crate::config::{HealthConfig, Service};
use crate::core::HealthRole;
use crate::network::Dialer;

/// What servers call their services, to be tried when a configured name is not known: vLLM's Python
/// servicer, vllm-rs 0.32, SGLang, TokenSpeed and MLX by the smg servicer 0.14.
pub(super) const NAMES: [&str; 7] = [
    "",
    "vllm.grpc.engine.VllmEngine",
    "vllm.Inference",
    "vllm.Control",
    "sglang.grpc.scheduler.SglangScheduler",
    "tokenspeed.grpc.scheduler.TokenSpeedScheduler",
    "mlx.grpc.engine.MlxEngine",
];
/// The shortest and the longest wait before a Watch is opened again.
const BACKOFF: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];
/// Events that may wait for the loop; a server that floods its Watch is read no faster.
const EVENTS: usize = 16;

enum Event {
    WatchSaid { service: usize, answer: Answer },
    WatchEnded { service: usize, end: End, open_for: Duration },
    Answered { channel: Option<Channel>, round: Round, outcomes: Vec<ProbeOutcome>, aloud: bool },
    Knows(Vec<String>),
}

/// How this server is reached. Every [`Dial::channel`] is a connection of its own.
#[derive(Clone)]
struct Dial {
    endpoint: Endpoint,
    dialer: Dialer,
    timeout: Duration,
    /// To see whether somebody listens although the connection was refused.
    root: u32,
    port: u16,
}

/// Watches and asks until there turns out to be no health service.
pub(super) async fn run(context: &Context, address: &str, config: &HealthConfig) {
    let Some(dial) = Dial::new(context, address, config) else {
        context.complain(format!("configuration: health.grpc {address:?} must be http://HOST:PORT"));
        return;
    };
    let whole_server = [Service { name: String::new(), role: HealthRole::Liveness }];
    let services = if config.services.is_empty() { &whole_server[..] } else { &config.services };
    let mut machine = Machine::grpc(address, services, context.served_before());
    let (events, mut arriving) = mpsc::channel(EVENTS);
    let mut tasks = JoinSet::new();
    for service in 0..services.len() {
        tasks.spawn(watch(dial.clone(), service, machine.name(service).to_owned(), Duration::ZERO, events.clone()));
    }
    let mut tick = super::in_step(config.check_interval);
    let mut channel = None;
    let mut asking = false;
    let mut ask = Ask::No;
    loop {
        context.tell(&machine);
        if machine.is_over() {
            return;
        }
        if ask > Ask::No && !asking {
            let round = machine.round();
            let names = round.services().map(|service| machine.name(service).to_owned()).collect();
            let (dial, channel, events) = (dial.clone(), channel.take(), events.clone());
            let aloud = ask == Ask::Aloud;
            tasks.spawn(async move {
                let (channel, outcomes) = dial.check_all(channel, names).await;
                let _ = events.send(Event::Answered { channel, round, outcomes, aloud }).await;
            });
            (asking, ask) = (true, Ask::No);
        }
        let Step { report, watch: again, ask: next, look } = tokio::select! {
            Some(event) = arriving.recv() => match event {
                Event::WatchSaid { service, answer } => machine.watch_said(service, answer),
                Event::WatchEnded { service, end, open_for } => machine.watch_ended(service, end, open_for),
                Event::Answered { channel: used, round, outcomes, aloud } => {
                    (channel, asking) = (used, false);
                    machine.answered(&round, outcomes, aloud)
                }
                Event::Knows(known) => {
                    machine.knows(known);
                    Step::default()
                }
            },
            Some(_) = tasks.join_next(), if !tasks.is_empty() => continue,
            () = context.asked() => Step { ask: Ask::Aloud, ..Step::default() },
            _ = tick.tick() => Step { ask: Ask::Quietly, ..Step::default() },
        };
        for kind in report {
            context.report(kind);
        }
        for (service, attempts) in again {
            let name = machine.name(service).to_owned();
            tasks.spawn(watch(dial.clone(), service, name, backoff(attempts), events.clone()));
        }
        if look {
            tasks.spawn(knows(dial.clone(), events.clone()));
        }
        ask = ask.max(next);
    }
}

/// Twice as long after each short-lived attempt, less up to a half by chance, so that the daemons of
/// a cluster do not dial in step.
fn backoff(attempts: u32) -> Duration {
    use std::hash::{BuildHasher as _, RandomState};
    let [shortest, longest] = BACKOFF;
    let full = shortest.saturating_mul(2_u32.saturating_pow(attempts.saturating_add(1))).min(longest);
    // RandomState is seeded anew each time: random enough here, and no crate.
    let chance = RandomState::new().hash_one(attempts) % 1024;
    full / 2 + full.mul_f64(chance as f64 / 2048.0)
}

/// One Watch, from dialling to its end.
async fn watch(dial: Dial, service: usize, name: String, after: Duration, events: mpsc::Sender<Event>) {
    sleep(after).await;
    let mut opened = None;
    let end = 'end: {
        let mut client = HealthClient::new(dial.channel());
        let mut stream = match client.watch(HealthCheckRequest { service: name }).await {
            Ok(response) => response.into_inner(),
            Err(status) => break 'end end(&status),
        };
        loop {
            match stream.message().await {
                Ok(Some(message)) => {
                    opened.get_or_insert_with(Instant::now);
                    let answer = answer(message.status());
                    if events.send(Event::WatchSaid { service, answer }).await.is_err() {
                        return;
                    }
                }
                Ok(None) => break 'end End::Clean,
                Err(status) => break 'end end(&status),
            }
        }
    };
    let open_for = opened.map_or(Duration::ZERO, |opened| opened.elapsed());
    let _ = events.send(Event::WatchEnded { service, end, open_for }).await;
}

/// Which of the well-known services the server knows.
async fn knows(dial: Dial, events: mpsc::Sender<Event>) {
    let names = NAMES.map(ToOwned::to_owned).to_vec();
    let (_, outcomes) = dial.check_all(None, names).await;
    let known = NAMES.iter().zip(outcomes).filter(|(_, outcome)| {
        matches!(outcome, ProbeOutcome::Answered(Answer::Serving | Answer::NotServing | Answer::Undecided))
    });
    let _ = events.send(Event::Knows(known.map(|(name, _)| (*name).to_owned()).collect())).await;
}

impl Dial {
    /// None if the address is not one of plain-text HTTP.
    fn new(context: &Context, address: &str, config: &HealthConfig) -> Option<Self> {
        let endpoint = Endpoint::from_shared(address.to_owned())
            .ok()
            .filter(|endpoint| endpoint.uri().scheme_str() == Some("http"))?
            .connect_timeout(config.check_timeout)
            // Without these tonic never notices that the other side is gone without a FIN. Servers
            // on grpc-core end connections that ping more often than they allow: 10 s is accepted.
            .http2_keep_alive_interval(config.keepalive)
            .keep_alive_timeout(config.check_timeout)
            .keep_alive_while_idle(true);
        let port = endpoint.uri().port_u16().unwrap_or(80);
        let (dialer, timeout) = (context.dialer(), config.check_timeout);
        Some(Self { endpoint, dialer, timeout, root: context.root_tgid(), port })
    }

    fn channel(&self) -> Channel {
        self.endpoint.connect_with_connector_lazy(self.dialer.clone())
    }

    /// Asks all services within one deadline. A connection that has served before may have broken
    /// without a word: that is not the engine's fault, and one fresh connection is tried. Returns the
    /// connection if it is still good.
    async fn check_all(&self, channel: Option<Channel>, names: Vec<String>) -> (Option<Channel>, Vec<ProbeOutcome>) {
        let deadline = Instant::now() + self.timeout;
        let used = channel.is_some();
        let mut channel = channel.unwrap_or_else(|| self.channel());
        let mut replies = ask(&channel, &names, deadline).await;
        if used && replies.contains(&Reply::Broken) {
            channel = self.channel();
            replies = ask(&channel, &names, deadline).await;
        }
        let good = replies.iter().all(|reply| matches!(reply, Reply::Answered(_)));
        let outcomes = replies.into_iter().map(|reply| match reply {
            Reply::Answered(answer) => ProbeOutcome::Answered(answer),
            Reply::Refused => ProbeOutcome::Refused { listening: super::still_listening(self.root, self.port) },
            Reply::Broken | Reply::Late => ProbeOutcome::Unanswered,
            Reply::NotAsked => ProbeOutcome::NotAsked,
        });
        (good.then_some(channel), outcomes.collect())
    }
}

/// Asks these services at the same time.
pub(super) async fn ask(channel: &Channel, names: &[String], deadline: Instant) -> Vec<Reply> {
    join_all(names.iter().map(|name| async {
        let mut request = Request::new(HealthCheckRequest { service: name.clone() });
        // Tells the server to give up too: probes that nobody waits for pile up (sglang#35884).
        request.set_timeout(deadline.saturating_duration_since(Instant::now()));
        let mut client = HealthClient::new(channel.clone());
        match timeout_at(deadline, client.check(request)).await {
            Ok(Ok(response)) => Reply::Answered(answer(response.into_inner().status())),
            Ok(Err(status)) => reply(&status),
            Err(_) => Reply::Late,
        }
    }))
    .await
}

/// What came of one Check.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// The server said this.
    Answered(Answer),
    /// Nobody listens.
    Refused,
    /// The connection broke.
    Broken,
    /// Nothing came in time.
    Late,
    /// It could not be asked, for want of something on our side.
    NotAsked,
}

impl Reply {
    /// The server knows the service and gave its status.
    pub(super) const fn is_status(&self) -> bool {
        matches!(self, Self::Answered(Answer::Serving | Answer::NotServing | Answer::Undecided))
    }
}

const fn answer(status: ServingStatus) -> Answer {
    match status {
        ServingStatus::Serving => Answer::Serving,
        ServingStatus::NotServing => Answer::NotServing,
        ServingStatus::ServiceUnknown => Answer::NoSuchService,
        ServingStatus::Unknown => Answer::Undecided,
    }
}

/// tonic makes a status of whatever goes wrong on its own side too, with codes that servers use as
/// well; but only such a status has a source.
fn reply(status: &Status) -> Reply {
    if super::is_refused(status) {
        return Reply::Refused;
    }
    if super::is_ours(status) {
        return Reply::NotAsked;
    }
    if status.source().is_some() {
        return Reply::Broken;
    }
    match status.code() {
        Code::NotFound => Reply::Answered(Answer::NoSuchService),
        Code::Unimplemented => Reply::Answered(Answer::Unimplemented),
        // A proxy before the engine, or the server on the engine's behalf: nobody answered it.
        Code::DeadlineExceeded | Code::Unavailable => Reply::Late,
        code => Reply::Answered(Answer::Other(format!("{code:?}: {}", status.message()))),
    }
}

fn end(status: &Status) -> End {
    match reply(status) {
        Reply::Answered(Answer::NoSuchService) => End::NoSuchService,
        Reply::Answered(Answer::Unimplemented) => End::Unimplemented,
        _ => End::Broken,
    }
}
