//! Dynamo, unchanged, with a worker that is killed or hangs in the middle of a stream: without lastgasp
//! and with it, both at the same time.

mod system;

use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::nats::Nats;
use lastgasp_tests::systems::{Cell, Run, runs};
use nix::sys::signal::Signal;
use system::{Backend, Dynamo, Reported};

/// How many tokens an answer has, and after which one the fault comes.
const TOKENS: usize = 120;
const FAULT_AFTER: usize = 20;
/// How long it is waited for, without a fault's end in sight: the lease in etcd is 30 s long.
const WAIT: Duration = Duration::from_secs(45);
/// Between two new requests, and what counts as a slow one. One takes 0.1 s.
const EVERY: Duration = Duration::from_millis(200);
const SLOW: Duration = Duration::from_secs(2);
/// New requests that are sent once the worker is out of discovery.
const AFTERWARDS: usize = 10;
/// For how long a worker does not answer before it is hung.
const HANG_WINDOW_MS: u64 = 1000;

/// What one fault did.
#[derive(Debug)]
struct Observed {
    run: Run,
    gap: Option<Duration>,
    safe: Option<Duration>,
    asked: usize,
    failed: usize,
    slow: usize,
    why: String,
}

/// Without lastgasp and with it.
#[derive(Debug)]
struct Pair {
    without: Vec<Observed>,
    with: Vec<Observed>,
}

/// Breaks the worker that answers, as often as is asked for, and records what came of it.
async fn measure(backend: Backend, limit: u32, signal: Signal) -> Pair {
    system::python().await;
    let mut pair = Pair { without: Vec::new(), with: Vec::new() };
    for _ in 0..runs() {
        let (without, with) = tokio::join!(one(backend, limit, signal, false), one(backend, limit, signal, true));
        pair.without.push(without);
        pair.with.push(with);
    }
    pair
}

impl Pair {
    fn record(&self, backend: Backend, limit: u32, signal: Signal) {
        let store = if backend == Backend::Etcd { "etcd" } else { "files" };
        let system = format!("Dynamo 1.6.1, {store}, migration limit {limit}");
        let fault = format!("{signal} of the worker");
        for (lastgasp, observed) in [(false, &self.without), (true, &self.with)] {
            let runs: Vec<Run> = observed.iter().map(|one| one.run).collect();
            let sum = |number: fn(&Observed) -> usize| observed.iter().map(number).sum::<usize>();
            let mut remark = format!(
                "of {} new requests {} failed, {} took over {} s",
                sum(|one| one.asked),
                sum(|one| one.failed),
                sum(|one| one.slow),
                SLOW.as_secs()
            );
            if lastgasp && signal == Signal::SIGSTOP {
                remark += &format!("; it counts as hung after {HANG_WINDOW_MS} ms");
            }
            if let Some(lost) = observed.iter().find(|one| one.gap.is_none()) {
                remark += &format!("; its stream: {}", lost.why.trim());
            }
            Cell { system: &system, fault: &fault, lastgasp, waited: WAIT, runs: &runs, remark: &remark }.record();
        }
    }
}

async fn one(backend: Backend, limit: u32, signal: Signal, lastgasp: bool) -> Observed {
    let folder = tempfile::tempdir().unwrap();
    let dynamo = Dynamo::start(backend, limit, folder.path()).await;
    let _watched = if lastgasp { Some(watch(&dynamo, folder.path()).await) } else { None };

    let mut stream = dynamo.stream(TOKENS);
    let mut tokens = 0;
    while tokens < FAULT_AFTER {
        match stream.events.recv().await {
            Some((_, Reported::Token)) => tokens += 1,
            other => panic!("before the fault: {other:?}"),
        }
    }
    let worker = dynamo.serving().await;
    while stream.events.try_recv().is_ok() {
        tokens += 1;
    }
    worker.signal(signal);
    let fault = Instant::now();

    let reads = async {
        let mut last = fault;
        let mut silence = Duration::ZERO;
        loop {
            let left = WAIT.saturating_sub(fault.elapsed());
            match tokio::time::timeout(left, stream.events.recv()).await {
                Ok(Some((at, Reported::Token))) => {
                    silence = silence.max(at.saturating_duration_since(last));
                    (last, tokens) = (at, tokens + 1);
                }
                Ok(Some((_, Reported::Done))) if tokens == TOKENS => return (Some(silence), String::new()),
                Ok(Some((_, Reported::Done))) => return (None, format!("{tokens} of {TOKENS} tokens")),
                Ok(Some((_, Reported::Failed(error)))) => return (None, error),
                Ok(None) | Err(_) => return (None, "it waits for ever".to_owned()),
            }
        }
    };
    let listed = async {
        while dynamo.records(&worker.instance).await > 0 {
            if fault.elapsed() > WAIT {
                return None;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Some(fault.elapsed())
    };
    let asks = async {
        let mut asked = FuturesUnordered::new();
        let mut answers = Vec::new();
        let ask = || {
            let begin = fault.elapsed();
            let dynamo = &dynamo;
            async move { (begin, tokio::time::timeout(WAIT, dynamo.ask()).await.unwrap_or(Err("no answer".into()))) }
        };
        let mut tick = tokio::time::interval(EVERY);
        let mut listed = std::pin::pin!(listed);
        let mut out = None;
        let mut rest = AFTERWARDS;
        while rest > 0 {
            tokio::select! {
                gone = &mut listed, if out.is_none() => out = Some(gone),
                Some(answer) = asked.next() => answers.push(answer),
                _ = tick.tick() => {
                    asked.push(ask());
                    rest -= usize::from(out.is_some());
                }
            }
        }
        answers.extend(asked.collect::<Vec<_>>().await);
        (out.flatten(), answers)
    };
    let ((gap, why), (out, answers)) = tokio::join!(reads, asks);

    let bad = |answer: &&(Duration, Result<Duration, String>)| !matches!(&answer.1, Ok(took) if *took < SLOW);
    let last_bad = answers.iter().filter(bad).map(|(begin, _)| *begin).max();
    let safe = out.map(|out| out.max(last_bad.unwrap_or_default()));
    let failed = answers.iter().filter(|(_, answer)| answer.is_err()).count();
    Observed {
        run: Run::new(gap, gap.is_some(), safe),
        gap,
        safe,
        asked: answers.len(),
        failed,
        slow: answers.iter().filter(bad).count() - failed,
        why,
    }
}

/// A daemon that knows both workers.
async fn watch(dynamo: &Dynamo, folder: &Path) -> (Nats, Daemon) {
    let nats = Nats::start(folder).await.unwrap();
    let mut config = DaemonConfig::new("peers", &nats.url(), "auto", folder);
    let mut sink = toml::toml! { kind = "dynamo" };
    match &dynamo.etcd {
        Some(etcd) => {
            sink.insert("backend".into(), "etcd".into());
            sink.insert("etcd".into(), toml::toml! { url = (etcd.url()) }.into());
        }
        None => {
            sink.insert("backend".into(), "file".into());
            sink.insert("folder".into(), dynamo.folder.join("records").display().to_string().into());
        }
    }
    config.notify = vec![sink];
    for worker in &dynamo.workers {
        config = config.with_http(worker.name, worker.process.identity.pid, worker.port, HANG_WINDOW_MS);
        config.worker.last_mut().expect("it was just added").sever = toml::toml! { enabled = true };
    }
    let daemon = Daemon::start(&config, folder).await.unwrap();
    for worker in &dynamo.workers {
        daemon.counts(&format!("lastgasp_dynamo_instances{{worker=\"{}\"}}", worker.name), 1.0).await.unwrap();
        let serves = format!("lastgasp_worker_state{{state=\"serving\",worker=\"{}\"}}", worker.name);
        daemon.counts(&serves, 1.0).await.unwrap();
    }
    (nats, daemon)
}

/// With a migration limit every stream goes on, and the worker leaves discovery long before its lease.
async fn streams_go_on(backend: Backend, signal: Signal) {
    let pair = measure(backend, 3, signal).await;
    for (without, with) in pair.without.iter().zip(&pair.with) {
        assert!(with.gap.is_some(), "{}", with.why);
        assert!(with.safe.is_some() && (without.safe.is_none() || with.safe < without.safe), "{with:?} {without:?}");
        assert_eq!(with.failed, 0, "{with:?}");
        match signal {
            Signal::SIGSTOP => assert!(without.gap.is_none(), "{without:?}"),
            _ => assert!(without.gap.is_some(), "{without:?}"),
        }
    }
    pair.record(backend, 3, signal);
}

/// Without one the stream is lost in any case, but new requests are safe.
async fn new_requests_are_safe(backend: Backend, signal: Signal) {
    let pair = measure(backend, 0, signal).await;
    for (without, with) in pair.without.iter().zip(&pair.with) {
        assert!(with.gap.is_none() && without.gap.is_none(), "{with:?} {without:?}");
        assert!(with.safe.is_some() && (without.safe.is_none() || with.safe < without.safe), "{with:?} {without:?}");
    }
    // Those to a hung worker fail for as long as it is listed; a killed one may be gone before the next.
    let failed = |observed: &[Observed]| observed.iter().map(|one| one.failed).sum::<usize>();
    let (with, without) = (failed(&pair.with), failed(&pair.without));
    assert!(with < without || (with, without) == (0, 0) && signal == Signal::SIGKILL, "{pair:?}");
    pair.record(backend, 0, signal);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "installs Dynamo; cargo xtask test --peers runs it"]
async fn a_killed_worker_leaves_etcd_at_once() {
    streams_go_on(Backend::Etcd, Signal::SIGKILL).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "installs Dynamo; cargo xtask test --peers runs it"]
async fn the_stream_of_a_hung_worker_goes_on_and_it_leaves_etcd() {
    streams_go_on(Backend::Etcd, Signal::SIGSTOP).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "installs Dynamo; cargo xtask test --peers runs it"]
async fn a_killed_workers_files_are_gone_at_once() {
    streams_go_on(Backend::File, Signal::SIGKILL).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "installs Dynamo; cargo xtask test --peers runs it"]
async fn the_stream_of_a_hung_worker_goes_on_and_its_files_are_gone() {
    streams_go_on(Backend::File, Signal::SIGSTOP).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "installs Dynamo; cargo xtask test --peers runs it"]
async fn requests_avoid_a_killed_worker_though_nothing_is_migrated() {
    new_requests_are_safe(Backend::Etcd, Signal::SIGKILL).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "installs Dynamo; cargo xtask test --peers runs it"]
async fn requests_avoid_a_hung_worker_though_nothing_is_migrated() {
    new_requests_are_safe(Backend::Etcd, Signal::SIGSTOP).await;
}

/// A hung worker that goes on has its records back, and takes requests again.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "installs Dynamo; cargo xtask test --peers runs it"]
async fn a_worker_that_goes_on_after_a_hang_takes_requests_again() {
    for backend in [Backend::Etcd, Backend::File] {
        let folder = tempfile::tempdir().unwrap();
        let dynamo = Dynamo::start(backend, 3, folder.path()).await;
        let (_nats, daemon) = watch(&dynamo, folder.path()).await;
        let alpha = &dynamo.workers[0];
        let standing = dynamo.records(&alpha.instance).await;
        let answered = alpha.answered().await;
        alpha.signal(Signal::SIGSTOP);
        daemon.counts("lastgasp_dynamo_records_total{outcome=\"deleted\"}", 1.0).await.unwrap();
        assert_eq!(dynamo.records(&alpha.instance).await, 0);

        alpha.signal(Signal::SIGCONT);

        daemon.counts("lastgasp_dynamo_records_total{outcome=\"restored\"}", 1.0).await.unwrap();
        assert_eq!(dynamo.records(&alpha.instance).await, standing);
        // The frontend passes it over for 5 s after the first try, over a connection that has broken.
        let again = async {
            while alpha.answered().await <= answered {
                dynamo.ask().await.unwrap();
            }
        };
        tokio::time::timeout(lastgasp_tests::process::GIVE_UP, again).await.expect("it answers again");
    }
}
