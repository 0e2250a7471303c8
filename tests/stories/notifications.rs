//! Notices to a program and to a URL, for those who do not read NATS.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::{Json, Router};
use lastgasp_protocol::WORKERS_BUCKET;
use lastgasp_protocol::kv::{Bucket, Content as Stored};
use lastgasp_router::connections::{self, HANDSHAKE, Limits, UNREAD};
use lastgasp_router::threads::Threads;
use lastgasp_router::tls::acceptor;
use lastgasp_tests::daemon::DaemonConfig;
use lastgasp_tests::nats::free_port;
use lastgasp_tests::process::GIVE_UP;
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};

use crate::scene::Scene;

/// What came in, each with the state of discovery at that very time.
#[derive(Default)]
struct Received {
    notices: Mutex<VecDeque<(HeaderMap, Value, bool)>>,
    more: Notify,
    /// A receiver that takes and never answers.
    silent: bool,
    bucket: Mutex<Option<Bucket>>,
    /// The workers that it looks for there.
    of_one: Mutex<Vec<String>>,
}

/// An HTTP server that takes notices.
struct Receiver {
    address: SocketAddr,
    received: Arc<Received>,
    _stop: watch::Sender<bool>,
}

impl Receiver {
    async fn start(address: &str, silent: bool) -> Self {
        Self::serving(TcpListener::bind(address).await.unwrap(), false, silent)
    }

    /// By HTTPS, with a certificate for `localhost` that no authority has signed.
    async fn start_tls() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self::serving(listener, true, false)
    }

    fn serving(listener: TcpListener, secured: bool, silent: bool) -> Self {
        let address = listener.local_addr().unwrap();
        let acceptor = secured.then(|| acceptor(&tls("cert.pem"), &tls("key.pem")).unwrap());
        let received = Arc::new(Received { silent, ..Received::default() });
        let app = Router::new().route("/hook", axum::routing::post(take)).with_state(Arc::clone(&received));
        let limits = Limits { connections: 16, head: GIVE_UP, handshake: HANDSHAKE, unread: UNREAD };
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(connections::serve(listener, acceptor, Threads::start([app]).unwrap(), limits, stopped));
        Self { address, received, _stop: stop }
    }

    /// Looks into discovery for the workers `of_one` whenever something comes in.
    async fn looks_into(&self, scene: &Scene, of_one: &[&str]) {
        *self.received.of_one.lock().unwrap() = of_one.iter().map(|name| (*name).to_owned()).collect();
        let context = async_nats::jetstream::new(scene.nats.client().await.unwrap());
        *self.received.bucket.lock().unwrap() = Some(Bucket::open(&context, WORKERS_BUCKET, 1).await.unwrap());
    }

    /// The next notice of this kind; whether a worker that it looks for was listed when it came; and its headers.
    async fn next(&self, event: &str) -> (Value, bool, HeaderMap) {
        let arrived = async {
            loop {
                let more = self.received.more.notified();
                let next = self.received.notices.lock().unwrap().pop_front();
                match next {
                    Some((headers, notice, listed)) if notice["event"] == event => return (notice, listed, headers),
                    Some(_) => {}
                    None => more.await,
                }
            }
        };
        tokio::time::timeout(GIVE_UP, arrived).await.unwrap_or_else(|_| panic!("no notice of {event}"))
    }
}

async fn take(State(received): State<Arc<Received>>, headers: HeaderMap, Json(notice): Json<Value>) {
    let bucket = received.bucket.lock().unwrap().clone();
    let of_one = received.of_one.lock().unwrap().clone();
    let mut listed = false;
    if let Some(bucket) = bucket {
        for worker in of_one {
            let key = format!("{}.{worker}", notice["node"].as_str().unwrap());
            listed |= matches!(bucket.read(&key).await.unwrap().map(|entry| entry.value), Some(Stored::Put(_)));
        }
    }
    received.notices.lock().unwrap().push_back((headers, notice, listed));
    received.more.notify_one();
    if received.silent {
        std::future::pending::<()>().await;
    }
}

fn webhook(address: SocketAddr) -> toml::Table {
    toml::toml! { kind = "webhook" }
        .into_iter()
        .chain([("url".to_owned(), format!("http://{address}/hook").into())])
        .collect()
}

fn notifying(sinks: Vec<toml::Table>) -> impl FnOnce(DaemonConfig) -> DaemonConfig {
    move |mut config| {
        config.notify = sinks;
        config
    }
}

#[tokio::test]
async fn a_url_and_a_program_are_told_once_discovery_says_it_too() {
    let receiver = Receiver::start("127.0.0.1:0", false).await;
    let files = tempfile::tempdir().unwrap();
    let token = files.path().join("token");
    std::fs::write(&token, "s3cret\n").unwrap();
    let mut hook = webhook(receiver.address);
    hook.insert("token_file".into(), token.display().to_string().into());
    hook.insert("headers".into(), toml::toml! { x-cluster = "blue" }.into());
    let script = script(files.path());
    let mut exec = toml::toml! { kind = "exec"
    on = ["withdrawn", "certificate"] };
    exec.insert("command".into(), vec![script, files.path().display().to_string()].into());
    let mut scene = Scene::configured("required", &[], notifying(vec![hook, exec])).await;
    receiver.looks_into(&scene, &["alpha"]).await;
    let (serving, ..) = receiver.next("serving").await;
    assert!(serving["endpoint"].as_str().is_some_and(|url| url.starts_with("http://127.0.0.1:")), "{serving}");

    scene.engine("alpha").signal_core(Signal::SIGKILL);

    let (notice, listed, headers) = receiver.next("withdrawn").await;
    assert!(!listed, "the record was gone before");
    assert_eq!((notice["worker"].as_str(), notice["cause"]["kind"].as_str()), (Some("alpha"), Some("process_killed")));
    let timeline = notice["certificate"]["timeline"].as_array().unwrap();
    assert!(timeline.iter().any(|moment| moment["what"] == "withdrawn"), "{notice:#}");
    assert_eq!(
        (&headers["authorization"], &headers["x-cluster"]),
        (&"Bearer s3cret".parse().unwrap(), &"blue".parse().unwrap())
    );
    let (complete, ..) = receiver.next("certificate").await;
    assert_eq!(complete["certificate"]["routers_done"], 1);
    scene.daemon.counts("lastgasp_notifications_total{outcome=\"delivered\",sink=\"exec-1\"}", 2.0).await.unwrap();
    let written = |event: &str| -> Value {
        serde_json::from_str(&std::fs::read_to_string(files.path().join(event)).unwrap()).unwrap()
    };
    assert_eq!(written("withdrawn")["incarnation"], notice["incarnation"]);
    assert_eq!(written("certificate")["certificate"], complete["certificate"]);
}

/// One sender kills both workers' engine cores. The daemon is stopped meanwhile, and reads of both at
/// once.
#[tokio::test]
async fn of_one_cause_all_records_are_gone_before_anybody_is_told() {
    let receiver = Receiver::start("127.0.0.1:0", false).await;
    let mut hook = webhook(receiver.address);
    hook.insert("on".into(), vec!["withdrawn"].into());
    hook.insert("concurrency".into(), 2.into());
    let mut scene = Scene::configured("required", &[], notifying(vec![hook])).await;
    receiver.looks_into(&scene, &["alpha", "beta"]).await;

    let daemon = scene.daemon.process.identity;
    assert!(daemon.signal(Signal::SIGSTOP));
    until(|| daemon.is_stopped()).await;
    for worker in ["alpha", "beta"] {
        scene.engine(worker).signal_core(Signal::SIGKILL);
    }
    for worker in ["alpha", "beta"] {
        let core = scene.engine(worker).core;
        until(|| !core.is_alive()).await;
    }
    assert!(daemon.signal(Signal::SIGCONT));

    let mut sent = Vec::new();
    for _ in 0..2 {
        let (notice, listed, _) = receiver.next("withdrawn").await;
        assert!(!listed, "both were gone before: {notice:#}");
        let id = notice["certificate"]["certificate"].as_str().unwrap().to_owned();
        sent.push((notice["worker"].as_str().unwrap().to_owned(), id));
    }
    sent.sort();
    assert_eq!([&*sent[0].0, &*sent[1].0], ["alpha", "beta"]);
    assert_eq!(sent[0].1, sent[1].1, "one cause, one certificate");
}

async fn until(done: impl Fn() -> bool) {
    let wait = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(GIVE_UP, wait).await.expect("it comes to that");
}

fn tls(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../router/tests/tls").join(file)
}

#[tokio::test]
async fn a_url_by_https_is_told_if_its_certificate_is_trusted() {
    let receiver = Receiver::start_tls().await;
    let mut trusting = webhook(receiver.address);
    trusting.insert("url".into(), format!("https://localhost:{}/hook", receiver.address.port()).into());
    let doubting = trusting.clone();
    trusting.insert("tls_ca".into(), tls("cert.pem").display().to_string().into());
    let mut scene = Scene::configured("required", &[], notifying(vec![trusting, doubting])).await;

    scene.engine("alpha").signal_core(Signal::SIGKILL);

    assert_eq!(receiver.next("withdrawn").await.0["worker"], "alpha");
    // To whom it may be that answers there, nothing is said.
    scene.daemon.counts("lastgasp_notifications_total{outcome=\"retried\",sink=\"webhook-1\"}", 1.0).await.unwrap();
    let delivered = |sink| format!("lastgasp_notifications_total{{outcome=\"delivered\",sink=\"{sink}\"}}");
    assert_eq!(scene.daemon.counted(&delivered("webhook-1")).await.unwrap(), 0.0);
    assert!(scene.daemon.counted(&delivered("webhook-0")).await.unwrap() >= 2.0);
}

/// A script that keeps what it reads under the name of its event.
fn script(folder: &Path) -> String {
    let script = folder.join("on-notice");
    let text = "#!/bin/sh\nnotice=$(cat)\ncase $notice in\n*'\"event\":\"withdrawn\"'*) event=withdrawn ;;\n*) event=certificate ;;\nesac\nprintf %s \"$notice\" > \"$1/$event\"\n";
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    script.display().to_string()
}

#[tokio::test]
async fn a_receiver_that_was_down_is_told_when_it_is_up_and_once() {
    let place = SocketAddr::from(([127, 0, 0, 1], free_port().unwrap()));
    let mut only = webhook(place);
    only.insert("on".into(), vec!["withdrawn"].into());
    let mut scene = Scene::configured("required", &[], notifying(vec![only])).await;
    scene.engine("alpha").signal_core(Signal::SIGKILL);
    scene.discovery.removed("alpha").await.unwrap();
    scene.daemon.counts("lastgasp_notifications_total{outcome=\"retried\",sink=\"webhook-0\"}", 1.0).await.unwrap();

    let receiver = Receiver::start(&place.to_string(), false).await;

    assert_eq!(receiver.next("withdrawn").await.0["worker"], "alpha");
    scene.daemon.counts("lastgasp_notifications_total{outcome=\"delivered\",sink=\"webhook-0\"}", 1.0).await.unwrap();
    scene.engine("beta").signal_core(Signal::SIGKILL);
    assert_eq!(receiver.next("withdrawn").await.0["worker"], "beta", "the first one came once");
}

#[tokio::test]
async fn a_receiver_that_does_not_answer_holds_up_no_withdrawal() {
    let receiver = Receiver::start("127.0.0.1:0", true).await;
    let mut patient = webhook(receiver.address);
    patient.insert("timeout_ms".into(), 600_000.into());
    let mut scene = Scene::configured("required", &[], notifying(vec![patient])).await;
    receiver.next("serving").await;

    for worker in ["alpha", "beta"] {
        scene.engine(worker).signal_core(Signal::SIGKILL);
        scene.discovery.removed(worker).await.unwrap();
        scene.discovery.certificate(worker, |_| true).await.unwrap();
    }

    assert!(receiver.received.notices.lock().unwrap().is_empty(), "it has not answered the first one yet");
}

#[tokio::test]
async fn what_is_refused_is_not_tried_again_and_is_said() {
    let receiver = Receiver::start("127.0.0.1:0", false).await;
    let mut wrong = webhook(receiver.address);
    wrong.insert("url".into(), format!("http://{}/no-such-hook", receiver.address).into());
    let scene = Scene::configured("required", &[], notifying(vec![wrong])).await;
    scene.daemon.counts("lastgasp_notifications_total{outcome=\"refused\",sink=\"webhook-0\"}", 2.0).await.unwrap();
    let lost = |status: &Value| {
        let losses = status["losses"].as_array().unwrap();
        losses.iter().any(|loss| loss["hop"] == "notify" && loss["kind"] == "delivery" && loss["count"] == 2)
    };
    scene.daemon.status_when("the loss", lost).await.unwrap();
    assert_eq!(
        scene.daemon.counted("lastgasp_notifications_total{outcome=\"retried\",sink=\"webhook-0\"}").await.unwrap(),
        0.0
    );
}
