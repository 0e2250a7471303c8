//! Notices to a program and to a URL, for those who do not read NATS.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::http::HeaderMap;
use axum::{Json, Router};
use lastgasp_protocol::WORKERS_BUCKET;
use lastgasp_protocol::kv::{Bucket, Value as Stored};
use lastgasp_tests::daemon::DaemonConfig;
use lastgasp_tests::process::GIVE_UP;
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::Notify;

use crate::scene::Scene;

/// What came in, each with the state of discovery at that very time.
#[derive(Default)]
struct Received {
    notices: Mutex<VecDeque<(HeaderMap, Value, bool)>>,
    more: Notify,
    /// A receiver that takes and never answers.
    silent: bool,
    bucket: Mutex<Option<Bucket>>,
}

/// An HTTP server that takes notices.
struct Receiver {
    address: SocketAddr,
    received: Arc<Received>,
}

impl Receiver {
    async fn start(address: &str, silent: bool) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let received = Arc::new(Received { silent, ..Received::default() });
        let app = Router::new().route("/hook", axum::routing::post(take)).with_state(Arc::clone(&received));
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { address, received }
    }

    /// Looks into discovery whenever something comes in.
    async fn looks_into(&self, scene: &Scene) {
        let context = async_nats::jetstream::new(scene.nats.client().await.unwrap());
        *self.received.bucket.lock().unwrap() = Some(Bucket::open(&context, WORKERS_BUCKET, 1).await.unwrap());
    }

    /// The next notice of this kind; whether its worker was listed when it came; and its headers.
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
    let listed = match bucket {
        Some(bucket) => {
            let key = format!("{}.{}", notice["node"].as_str().unwrap(), notice["worker"].as_str().unwrap());
            matches!(bucket.read(&key).await.unwrap().map(|entry| entry.value), Some(Stored::Put(_)))
        }
        None => false,
    };
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
    receiver.looks_into(&scene).await;
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
    scene.daemon.counts("lastgasp_notify_total{outcome=\"delivered\",sink=\"exec-1\"}", 2.0).await.unwrap();
    let written = |event: &str| -> Value {
        serde_json::from_str(&std::fs::read_to_string(files.path().join(event)).unwrap()).unwrap()
    };
    assert_eq!(written("withdrawn")["incarnation"], notice["incarnation"]);
    assert_eq!(written("certificate")["certificate"], complete["certificate"]);
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
    let place = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut only = webhook(place);
    only.insert("on".into(), vec!["withdrawn"].into());
    let mut scene = Scene::configured("required", &[], notifying(vec![only])).await;
    scene.engine("alpha").signal_core(Signal::SIGKILL);
    scene.discovery.removed("alpha").await.unwrap();
    scene.daemon.counts("lastgasp_notify_total{outcome=\"retried\",sink=\"webhook-0\"}", 1.0).await.unwrap();

    let receiver = Receiver::start(&place.to_string(), false).await;

    assert_eq!(receiver.next("withdrawn").await.0["worker"], "alpha");
    scene.daemon.counts("lastgasp_notify_total{outcome=\"delivered\",sink=\"webhook-0\"}", 1.0).await.unwrap();
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
    scene.daemon.counts("lastgasp_notify_total{outcome=\"refused\",sink=\"webhook-0\"}", 2.0).await.unwrap();
    let lost = |status: &Value| {
        let losses = status["losses"].as_array().unwrap();
        losses.iter().any(|loss| loss["hop"] == "notify" && loss["kind"] == "delivery" && loss["count"] == 2)
    };
    scene.daemon.status_when("the loss", lost).await.unwrap();
    assert_eq!(
        scene.daemon.counted("lastgasp_notify_total{outcome=\"retried\",sink=\"webhook-0\"}").await.unwrap(),
        0.0
    );
}
