//! The daemon is killed after each thing that it does in turn: taking its lease, listing, deciding,
//! signalling, withdrawing, certifying. Whatever was done by then, the one that is started in its
//! place comes to the same end.

use std::path::Path;

use lastgasp_protocol::WorkerState;
use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::reference::Reference;
use lastgasp_tests::router::Router;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::scene::was_moved;

/// An engine that says nothing of its death for an hour.
const ENGINE: [&str; 6] = ["--frontend", "rust", "--rust-notice-ms", "3600000", "--tokens-per-second", "200"];

/// More effects than a death has: a run that is stopped after so many goes round in circles.
const MOST: u32 = 30;

/// A daemon that may be stopped at any time.
struct Stoppable<'a> {
    daemon: Option<Daemon>,
    config: DaemonConfig,
    folder: &'a Path,
}

impl Stoppable<'_> {
    /// Starts one that is stopped after `number` effects.
    async fn start(&mut self, number: u32) {
        let mut command = Command::new(binaries::find("lastgasp").unwrap());
        command.env("LASTGASP_STOP_AFTER", number.to_string());
        self.daemon = Daemon::start_by(command, &self.config, self.folder).await.ok();
    }

    /// What it was stopped after, if it was.
    fn stopped_after(&self) -> Option<String> {
        let log = std::fs::read_to_string(self.folder.join("lastgasp-node-a.log")).unwrap();
        log.lines().find_map(|line| line.strip_prefix("stopped after ")).map(str::to_owned)
    }

    /// Waits until one knows that beta serves, and has heard from NATS what there is.
    async fn settled(&mut self) {
        let serves = |worker: &Value, name: &str| worker["worker"] == name && worker["state"] == "serving";
        let settled = |status: &Value| {
            let workers = status["workers"].as_array().unwrap();
            status["lease"] == "held"
                && workers.iter().any(|worker| serves(worker, "beta") && worker["revision"] != 0)
                && !workers.iter().any(|worker| serves(worker, "alpha"))
        };
        loop {
            let alive = self.daemon.take().and_then(|mut daemon| (!daemon.process.has_exited()).then_some(daemon));
            let daemon = match alive {
                Some(daemon) => daemon,
                None => Daemon::start(&self.config, self.folder).await.unwrap(),
            };
            let daemon = self.daemon.insert(daemon);
            match daemon.status_when("beta serves, alpha does not", settled).await {
                Ok(_) => return,
                Err(error) => assert!(daemon.process.has_exited(), "{error}"),
            }
        }
    }

    /// Waits for something. If the daemon is stopped meanwhile, another is started in its place.
    async fn until<T>(&mut self, wanted: impl Future<Output = T>) -> T {
        tokio::pin!(wanted);
        loop {
            match self.daemon.as_mut() {
                None => self.daemon = Some(Daemon::start(&self.config, self.folder).await.unwrap()),
                Some(daemon) => tokio::select! {
                    wanted = &mut wanted => return wanted,
                    exited = daemon.process.exited() => {
                        exited.unwrap();
                        matrix::count("daemons killed", 1);
                        self.daemon = None;
                    }
                },
            }
        }
    }
}

/// One death under a daemon that is stopped after `number` effects. Says what that came after, if
/// there were so many, and whether there is a certificate.
async fn death(number: u32) -> (Option<String>, bool) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let nats = Nats::start(path).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let alpha = Engine::start("alpha", &ENGINE, path).await.unwrap();
    let beta = Engine::start("beta", &ENGINE, path).await.unwrap();
    let router = Router::start("router-1", &nats.url(), 3, path).await.unwrap();
    let config = DaemonConfig::new("node-a", &nats.url(), "required", path).with(&alpha).with(&beta);
    let mut daemon = Stoppable { daemon: None, config, folder: path };

    daemon.start(number).await;
    let mut listed = Vec::new();
    for worker in ["alpha", "beta"] {
        listed.push(daemon.until(discovery.listed(worker, WorkerState::Serving)).await.unwrap());
    }
    let offered = [("node-a/alpha", &listed[0].incarnation), ("node-a/beta", &listed[1].incarnation)];
    daemon.until(router.offers(&offered)).await.unwrap();
    let body =
        json!({"model": "tiny", "prompt": "same", "max_tokens": 300, "ignore_eos": true, "return_token_ids": true});
    let reference = Reference::of(Endpoint::Completions, &body, &alpha.dialect()).unwrap();
    let mut streams = Vec::new();
    for _ in 0..2 {
        let mut stream = daemon.until(router.stream(Endpoint::Completions, &body)).await.unwrap();
        stream.tokens(5).await.unwrap();
        streams.push(stream);
    }

    alpha.signal_core(Signal::SIGKILL);

    daemon.until(discovery.removed("alpha")).await.unwrap();
    let mut moved = 0;
    for stream in streams {
        let transcript = daemon.until(stream.finish()).await.unwrap();
        reference.assert_equals(&transcript);
        moved += usize::from(was_moved(&transcript));
    }
    assert_eq!(moved, 1, "the stream that was on alpha");
    let stopped_after = daemon.stopped_after();
    // Between the withdrawal and the certificate nothing outlives the daemon that tells of the death.
    let certified = !matches!(stopped_after.as_deref(), Some("record withdrawn" | "signal received"));
    if certified {
        let certificate = daemon.until(discovery.certificate("alpha", |_| true)).await.unwrap();
        assert_eq!(certificate.incarnation, listed[0].incarnation);
    }
    daemon.settled().await;
    let stopped_after = daemon.stopped_after();
    let kept = discovery.listed("beta", WorkerState::Serving).await.unwrap();
    assert_eq!((&kept.incarnation, kept.epoch), (&listed[1].incarnation, listed[1].epoch));
    assert_eq!((discovery.removals("alpha"), discovery.removals("beta")), (1, 0), "{stopped_after:?}");
    let answer = router.stream(Endpoint::Completions, &body).await.unwrap().finish().await.unwrap();
    reference.assert_equals(&answer);
    assert_eq!(answer.worker.as_deref(), Some("node-a/beta"));
    (stopped_after, certified)
}

#[tokio::test]
async fn the_next_one_comes_to_the_same_end() {
    let mut stopped_after = Vec::new();
    let mut certificates = 0;
    for number in 1..=MOST {
        let (after, certified) = death(number).await;
        certificates += u32::from(certified);
        let Some(after) = after else { break };
        stopped_after.push(after);
    }
    assert!(stopped_after.len() < MOST as usize, "{stopped_after:#?}");
    for effect in
        ["lease taken", "record listed", "withdrawal decided", "signal queued", "record withdrawn", "certificate kept"]
    {
        assert!(stopped_after.iter().any(|after| after == effect), "never stopped after {effect}: {stopped_after:#?}");
    }
    let runs = stopped_after.len() + 1;
    matrix::row(
        "SIGKILL of the daemon after each of its effects in turn, around the death of an engine core",
        "the next daemon withdraws the dead worker once and nobody else; streams exact; a certificate, unless the \
         daemon died between the withdrawal and it",
        &format!(
            "{runs} deaths, {} daemons killed (after {}); {runs} withdrawals, 0 of living workers; {} streams exact, \
             0 visibly failed, 0 silently wrong; {certificates} certificates",
            stopped_after.len(),
            stopped_after.join(", "),
            3 * runs,
        ),
    );
}
