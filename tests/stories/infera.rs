//! Infera's router awaits answers on NATS and watches nobody: it is notified where it waits.

use std::time::Duration;

use async_nats::{Client, HeaderMap, Subscriber};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::StreamExt as _;
use lastgasp_protocol::WorkerState;
use lastgasp_tests::daemon::DaemonConfig;
use lastgasp_tests::process::GIVE_UP;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::task::{JoinHandle, JoinSet};

use crate::scene::Scene;

/// How many tokens an answer has.
const LENGTH: u32 = 200;

fn subject(kind: &str, id: &str) -> String {
    format!("infera.{kind}.{}", URL_SAFE_NO_PAD.encode(id))
}

/// Stands in for a wrapper: answers each request with numbers from the one that it names on, until
/// it is cancelled, or dies without a word.
async fn wrapper(client: Client, id: String) -> JoinHandle<()> {
    let mut requests = client.subscribe(subject("req", &id)).await.unwrap();
    client.flush().await.unwrap();
    tokio::spawn(async move {
        // Dropped, all of them end.
        let mut answers = JoinSet::new();
        while let Some(request) = requests.next().await {
            let envelope: Value = serde_json::from_slice(&request.payload).unwrap();
            let first = u32::try_from(envelope["body"]["first"].as_u64().unwrap()).unwrap();
            let (client, inbox) = (client.clone(), request.reply.unwrap());
            answers.spawn(async move {
                for token in first..LENGTH {
                    client.publish(inbox.clone(), token.to_string().into()).await.unwrap();
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                let mut done = HeaderMap::new();
                done.insert("rs-type", "done");
                done.insert("rs-status", "200");
                client.publish_with_headers(inbox, done, "".into()).await.unwrap();
            });
        }
    })
}

/// Asks a worker for the rest of an answer, as Infera's router does, with an inbox of its own.
async fn ask(client: &Client, id: &str, first: u32) -> Subscriber {
    ask_for(client, id, &request(true, json!({"first": first}))).await
}

async fn ask_for(client: &Client, id: &str, request: &Value) -> Subscriber {
    let inbox = format!("_INBOX.{:x}", fastrand::u64(..));
    let answer = client.subscribe(inbox.clone()).await.unwrap();
    client.publish_with_reply(subject("req", id), inbox, request.to_string().into()).await.unwrap();
    answer
}

/// As the router of Infera at 5890f7f writes it: it marks what it may move.
fn request(migratable: bool, body: Value) -> Value {
    json!({"path": "/v1/chat/completions", "stream": true, "headers": null, "body": body, "migratable": migratable})
}

/// One that can be moved, one that is marked so and has two answers, and one of a router without migration.
fn three_kinds() -> [Value; 3] {
    [
        request(true, json!({"first": 0})),
        request(true, json!({"first": 0, "n": 2})),
        request(false, json!({"first": 0})),
    ]
}

/// Reads an answer's first tokens, and says what was read.
async fn begun(answer: &mut Subscriber) -> Vec<u32> {
    let mut got = Vec::new();
    assert_eq!(read(answer, &mut got, 5).await, None);
    got
}

/// A worker by the name alpha under a supervisor that stays when it is asked to leave, as Infera's wrapper
/// does while it drains; and how it is asked over Infera's NATS.
struct Wrapped {
    scene: Scene,
    client: Client,
    id: String,
    wrapper: JoinHandle<()>,
}

impl Wrapped {
    /// Streams are left alone for so long when it leaves.
    async fn new(drain_window_ms: u64) -> Self {
        let mut scene = Scene::configured("required", &[], |config| {
            let url = config.nats_url().to_owned();
            let mut config = notifying(config, &url);
            config.worker[0].drain_window_ms = drain_window_ms;
            config
        })
        .await;
        let client = scene.nats.client().await.unwrap();
        scene.engine("alpha").kill_tree();
        scene.discovery.removed("alpha").await.unwrap();
        scene.engine("alpha").process.exited().await.unwrap();
        scene.restart_supervised("alpha").await;
        scene.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
        let id = scene.engine("alpha").ready.http.to_string();
        is_heard(&scene, &client, &id).await;
        let wrapper = wrapper(client.clone(), id.clone()).await;
        Self { scene, client, id, wrapper }
    }

    /// Asks for one stream of each kind and reads the beginnings.
    async fn three_streams(&self) -> Vec<(Subscriber, Vec<u32>)> {
        let mut streams = Vec::new();
        for request in three_kinds() {
            let mut answer = ask_for(&self.client, &self.id, &request).await;
            let got = begun(&mut answer).await;
            streams.push((answer, got));
        }
        streams
    }

    /// It is asked to leave, and stays until its streams have ended.
    async fn is_asked_to_leave(&mut self) {
        self.scene.engine("alpha").process.identity.signal(Signal::SIGTERM);
        self.scene.discovery.listed("alpha", WorkerState::Draining).await.unwrap();
    }

    async fn is_handed_over(&self) {
        self.scene.discovery.removed("alpha").await.unwrap();
        let withdrawn = |event: &Value| event.to_string().contains("withdrawn (terminated)");
        self.scene.daemon.event("the handover", withdrawn).await.unwrap();
    }
}

/// Waits until the daemon listens to what alpha is asked: it remembers something.
async fn is_heard(scene: &Scene, client: &Client, alpha: &str) {
    let remembered = "lastgasp_infera_remembered_requests{worker=\"alpha\"}";
    while scene.daemon.counted(remembered).await.unwrap() < 1.0 {
        ask(client, alpha, LENGTH).await;
    }
}

/// Whether an answer came whole.
async fn is_whole((mut answer, mut got): (Subscriber, Vec<u32>)) -> bool {
    let ended_by = read(&mut answer, &mut got, LENGTH).await;
    let next = answer.next().await.unwrap();
    let done = next.headers.as_ref().and_then(|headers| headers.get("rs-type")).map(ToString::to_string);
    ended_by.is_none() && done.as_deref() == Some("done") && got == (0..LENGTH).collect::<Vec<_>>()
}

/// Reads until the answer ends, or `until` tokens are there: the text of the error frame, if one ended it.
async fn read(answer: &mut Subscriber, got: &mut Vec<u32>, until: u32) -> Option<String> {
    while got.len() < until as usize {
        let frame = tokio::time::timeout(GIVE_UP, answer.next()).await.expect("a frame").unwrap();
        let kind = frame.headers.as_ref().and_then(|headers| headers.get("rs-type")).map(ToString::to_string);
        let text = String::from_utf8(frame.payload.to_vec()).unwrap();
        match kind.as_deref() {
            None => got.push(text.parse().unwrap()),
            Some("error") => return Some(text),
            Some(_) => return None,
        }
    }
    None
}

fn notifying(mut config: DaemonConfig, url: &str) -> DaemonConfig {
    let mut sink = toml::toml! { kind = "infera" };
    sink.insert("nats".into(), toml::toml! { url = (url) }.into());
    config.notify = vec![sink];
    config
}

#[tokio::test]
async fn a_stream_of_a_dead_worker_is_moved_by_its_own_router() {
    let folder = tempfile::tempdir().unwrap();
    let nats = lastgasp_tests::nats::Nats::start(folder.path()).await.unwrap();
    let url = nats.url();
    let mut scene = Scene::configured("required", &[], |config| notifying(config, &url)).await;
    let client = nats.client().await.unwrap();
    let id = |scene: &mut Scene, worker: &str| scene.engine(worker).ready.http.to_string();
    let (alpha, beta) = (id(&mut scene, "alpha"), id(&mut scene, "beta"));
    is_heard(&scene, &client, &alpha).await;
    let dies = wrapper(client.clone(), alpha.clone()).await;
    let _lives = wrapper(client.clone(), beta.clone()).await;
    let (mut got, mut whole) = (Vec::new(), Vec::new());
    let mut answer = ask(&client, &alpha, 0).await;
    let mut other = ask(&client, &beta, 0).await;
    read(&mut answer, &mut got, 20).await;

    // The wrapper goes without a word, and its engine with it.
    dies.abort();
    scene.engine("alpha").signal_core(Signal::SIGKILL);

    let text = read(&mut answer, &mut got, LENGTH).await;
    assert_eq!(text.as_deref(), Some("lastgasp: worker lost (process_killed)"));
    let next = u32::try_from(got.len()).unwrap();
    let mut rest = ask(&client, &beta, next).await;
    let (moved, untouched) = (read(&mut rest, &mut got, LENGTH), read(&mut other, &mut whole, LENGTH));
    assert_eq!((untouched.await, moved.await), (None, None));
    let wanted: Vec<u32> = (0..LENGTH).collect();
    assert_eq!((&got, &whole), (&wanted, &wanted), "no token twice, none missing");

    // What is asked of the dead worker is answered at once.
    let refused = read(&mut ask(&client, &alpha, 0).await, &mut Vec::new(), 1).await;
    assert_eq!(refused.as_deref(), Some("lastgasp: worker lost (process_killed)"));
    let certificate = scene.discovery.certificate("alpha", |_| true).await.unwrap();
    let moments: Vec<_> = certificate.timeline.iter().map(|moment| moment.what.as_str()).collect();
    let place = |what| moments.iter().position(|moment| *moment == what);
    assert!(place("withdrawn") < place("infera") && place("infera").is_some(), "{certificate:#?}");
}

/// Infera lets a wrapper that was asked to leave finish its streams for 30 s, which is longer than the daemon's
/// own window.
#[tokio::test]
async fn streams_of_a_planned_stop_go_on_past_the_daemons_window() {
    let mut wrapped = Wrapped::new(200).await;
    let streams = wrapped.three_streams().await;

    wrapped.is_asked_to_leave().await;
    wrapped.is_handed_over().await;

    for stream in streams {
        assert!(is_whole(stream).await, "as without lastgasp");
    }
    // What is open then hears of its end.
    let mut late = ask(&wrapped.client, &wrapped.id, 0).await;
    begun(&mut late).await;
    wrapped.wrapper.abort();
    wrapped.scene.engine("alpha").signal_core(Signal::SIGKILL);
    let text = read(&mut late, &mut Vec::new(), LENGTH).await;
    assert_eq!(text.as_deref(), Some("lastgasp: worker lost (process_killed)"));
}

#[tokio::test]
async fn a_worker_that_is_killed_while_it_drains_is_told_of_at_once() {
    let mut wrapped = Wrapped::new(60_000).await;
    let streams = wrapped.three_streams().await;
    wrapped.is_asked_to_leave().await;

    wrapped.wrapper.abort();
    wrapped.scene.engine("alpha").signal_core(Signal::SIGKILL);

    for (mut answer, mut got) in streams {
        let text = read(&mut answer, &mut got, LENGTH).await;
        assert_eq!(text.as_deref(), Some("lastgasp: worker lost (process_killed)"));
    }
}

/// Its wrapper knows nothing of it, and would let every stream go on.
#[tokio::test]
async fn an_operators_drain_moves_only_what_can_be_moved() {
    let wrapped = Wrapped::new(60_000).await;
    let mut streams = wrapped.three_streams().await;

    let said = wrapped.scene.daemon.tell(&["drain", "alpha", "--deadline", "0s"]).await.unwrap();

    assert_eq!(said.code, Some(0), "{said:?}");
    let (mut movable, mut got) = streams.remove(0);
    let text = read(&mut movable, &mut got, LENGTH).await;
    assert_eq!(text.as_deref(), Some("infera: worker draining"));
    for stream in streams {
        assert!(is_whole(stream).await, "it cannot be moved");
    }
    // Nobody answers in the place of a worker that lives.
    let late = ask(&wrapped.client, &wrapped.id, 0).await;
    assert!(is_whole((late, Vec::new())).await);
}

#[tokio::test]
async fn in_observe_mode_nothing_is_heard_and_nothing_told() {
    let mut scene = Scene::configured("required", &[], |config| {
        let url = config.nats_url().to_owned();
        let mut config = notifying(config, &url);
        config.mode = "observe";
        config
    })
    .await;
    let client = scene.nats.client().await.unwrap();
    let alpha = scene.engine("alpha").ready.http.to_string();
    let mut answer = ask(&client, &alpha, 0).await;
    let answered = tokio::time::timeout(GIVE_UP, answer.next()).await.expect("an answer").unwrap();
    assert_eq!(answered.status, Some(async_nats::StatusCode::NO_RESPONDERS), "nobody subscribes");
    scene.engine("alpha").signal_core(Signal::SIGKILL);
    scene.daemon.event("the death", |event| event["event"] == "certificate").await.unwrap();
    let metrics = scene.daemon.metrics().await.unwrap();
    assert!(!metrics.contains("lastgasp_infera_frames_total{"), "{metrics}");
}
