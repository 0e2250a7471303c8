//! Each fault that breaks a server, seen by a client of the engine and by one of lastgasp's router at the
//! same time.

use std::time::{Duration, Instant};

use lastgasp_protocol::WorkerState;
use lastgasp_tests::client::{LiveStream, Transcript};
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::systems::{self, Cell, Run};
use nix::sys::signal::Signal;

use super::install::VERSION;
use super::scene::{Scene, is_complete, question};
use super::server::{Addresses, Frontend, Role, Server};

/// How long a client of the engine alone waits for a word, and whoever asks `/health` for a bad one.
const WAIT: Duration = Duration::from_secs(25);

/// What is done to a server.
#[derive(Clone, Copy, Debug)]
enum Act {
    Signal(Role, Signal),
    KillTree,
}

/// What is done, and to a server with which arguments.
#[derive(Clone, Copy)]
struct Fault {
    name: &'static str,
    act: Act,
    arguments: &'static [&'static str],
    /// Lastgasp does not see it (docs/limits.md).
    unseen: bool,
}

const fn fault(name: &'static str, act: Act) -> Fault {
    Fault { name, act, arguments: &[], unseen: false }
}

fn faults(frontend: Frontend) -> Vec<Fault> {
    use Signal::{SIGKILL, SIGSTOP, SIGTERM};
    let root = match frontend {
        Frontend::Python => ["SIGSTOP of the API server", "SIGKILL of the API server", "SIGTERM of the API server"],
        Frontend::Rust => ["SIGSTOP of vllm-rs", "SIGKILL of vllm-rs", "SIGTERM of vllm-rs"],
    };
    vec![
        // It goes on afterwards, so these come first.
        Fault { unseen: true, ..fault("SIGSTOP of EngineCore", Act::Signal(Role::EngineCore, SIGSTOP)) },
        fault(root[0], Act::Signal(Role::Root, SIGSTOP)),
        fault("SIGKILL of EngineCore", Act::Signal(Role::EngineCore, SIGKILL)),
        fault("SIGKILL of the Worker", Act::Signal(Role::Worker, SIGKILL)),
        fault(root[1], Act::Signal(Role::Root, SIGKILL)),
        fault("SIGKILL of all processes", Act::KillTree),
        fault(root[2], Act::Signal(Role::Root, SIGTERM)),
        Fault {
            arguments: &["--shutdown-timeout", "30"],
            ..fault("SIGTERM, --shutdown-timeout 30", Act::Signal(Role::Root, SIGTERM))
        },
    ]
}

#[tokio::test]
#[ignore = "installs vLLM, 6 GB; cargo xtask test --peers runs it"]
async fn vllm_with_its_python_frontend_is_broken_in_every_way() {
    break_it(Frontend::Python).await;
}

#[tokio::test]
#[ignore = "installs vLLM, 6 GB; cargo xtask test --peers runs it"]
async fn vllm_with_its_rust_frontend_is_broken_in_every_way() {
    break_it(Frontend::Rust).await;
}

async fn break_it(frontend: Frontend) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    // The other one is of the kind that starts sooner.
    let spare = Server::start("spare", Addresses::free(Frontend::Rust), &[], &path).await;
    let mut victim = Server::start("victim", Addresses::free(frontend), &[], &path).await;
    let address = victim.addresses();
    let url = |server: &Server| format!("http://{}", server.http);
    let scene = Scene::new(folder, (&victim, url(&victim)), (&spare, url(&spare))).await;
    let whole = LiveStream::open(spare.http, Endpoint::Completions, &question()).await.unwrap().finish().await.unwrap();
    assert_eq!((whole.ids.len(), whole.dones), (600, 1), "{whole:#?}");

    let mut arguments: &[&str] = &[];
    let mut alive = true;
    for fault in faults(frontend) {
        let Fault { name, act, arguments: wanted, unseen } = fault;
        let (mut without, mut with) = (Vec::new(), Vec::new());
        for _ in 0..systems::runs() {
            if !alive || arguments != wanted {
                drop(victim);
                victim = Server::start("victim", address, wanted, &path).await;
                arguments = wanted;
            }
            scene.offered().await;
            let pair = strike(&scene, &victim, fault, &whole).await;
            without.push(pair.without);
            with.push(pair.with);
            alive = false;
            if let Act::Signal(role, Signal::SIGSTOP) = act {
                victim.signal(role, Signal::SIGCONT);
                alive = true;
            }
        }
        let system = match frontend {
            Frontend::Python => format!("vLLM {VERSION}, `vllm serve`"),
            Frontend::Rust => format!("vLLM {VERSION}, `vllm-rs serve`"),
        };
        for (lastgasp, runs, remark) in [
            (false, &without, "safe is when `/health`, asked every 10 ms, says so"),
            (true, &with, if unseen { "not seen" } else { "safe is when the record is withdrawn or says draining" }),
        ] {
            Cell { system: &system, fault: name, lastgasp, waited: WAIT, runs, remark }.record();
        }
    }
}

/// What a client of the engine alone and one of the router saw of one fault.
struct Pair {
    without: Run,
    with: Run,
}

async fn strike(scene: &Scene, victim: &Server, fault: Fault, whole: &Transcript) -> Pair {
    let mut direct = LiveStream::open(victim.http, Endpoint::Completions, &question()).await.unwrap();
    let mut routed = scene.stream(Endpoint::Completions, &question()).await;
    direct.tokens(50).await.unwrap();
    routed.tokens(50).await.unwrap();
    let before = scene.discovery.history("victim").len();

    let at = Instant::now();
    match fault.act {
        Act::Signal(role, signal) => victim.signal(role, signal),
        Act::KillTree => victim.kill_tree(),
    }

    let said = |history: &[lastgasp_tests::discovery::Seen]| {
        let after = history[before..].iter();
        after
            .clone()
            .find(|seen| seen.record.as_ref().is_none_or(|record| record.state != WorkerState::Serving))
            .cloned()
    };
    let withdrawn = async {
        let history = scene.discovery.wait_for("victim", "withdrawn", |history| said(history).is_some()).await.unwrap();
        said(&history).expect("it was waited for").at - at
    };

    let (direct, routed, withdrawn, ill) = tokio::join!(
        tokio::time::timeout(WAIT, direct.finish()),
        tokio::time::timeout(WAIT, routed.finish()),
        tokio::time::timeout(WAIT, withdrawn),
        ill(victim, at)
    );

    // A stream that neither ends nor goes on is none.
    let [direct, routed] = [direct, routed].map(|stream| stream.ok().map(Result::unwrap));
    let complete = |stream: &Option<Transcript>| stream.as_ref().is_some_and(|stream| is_complete(stream, whole));
    if !fault.unseen {
        let log = || scene.router.process.log_tail();
        assert!(complete(&routed), "{}, through the router: {routed:#?}\n{}", fault.name, log());
        assert!(withdrawn.is_ok(), "{}: not withdrawn", fault.name);
    }
    let run = |stream: &Option<Transcript>, safe| {
        let complete = complete(stream);
        let gap = stream.as_ref().filter(|_| complete).map(|stream| silence(stream, at));
        Run::new(gap, complete, safe)
    };
    Pair { without: run(&direct, ill), with: run(&routed, withdrawn.ok()) }
}

/// The longest time after `since` in which a client got no token.
fn silence(transcript: &Transcript, since: Instant) -> Duration {
    let tokens = transcript.events.iter().filter(|event| !event.ids.is_empty()).map(|event| event.at);
    let after: Vec<Instant> = std::iter::once(since).chain(tokens.filter(|at| *at > since)).collect();
    after.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
}

/// From `since` until whoever asks `/health` all the time would give the server no more work.
async fn ill(server: &Server, since: Instant) -> Option<Duration> {
    let client = reqwest::Client::builder().timeout(Duration::from_secs(1)).build().unwrap();
    let url = format!("http://{}/health", server.http);
    while since.elapsed() < WAIT {
        let answer = client.get(&url).send().await;
        if !answer.is_ok_and(|answer| answer.status().is_success()) {
            return Some(since.elapsed());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    None
}
