//! Infera's router awaits answers on NATS and watches nobody: it is told where it waits.

use std::time::Duration;

use async_nats::{Client, HeaderMap, Subscriber};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::StreamExt as _;
use lastgasp_tests::daemon::DaemonConfig;
use lastgasp_tests::process::GIVE_UP;
use nix::sys::signal::Signal;
use tokio::task::JoinHandle;

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
        while let Some(request) = requests.next().await {
            let first: u32 = std::str::from_utf8(&request.payload).unwrap().parse().unwrap();
            let inbox = request.reply.unwrap();
            for token in first..LENGTH {
                client.publish(inbox.clone(), token.to_string().into()).await.unwrap();
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let mut done = HeaderMap::new();
            done.insert("rs-type", "done");
            done.insert("rs-status", "200");
            client.publish_with_headers(inbox, done, "".into()).await.unwrap();
        }
    })
}

/// Asks a worker for the rest of an answer, as Infera's router does, with an inbox of its own.
async fn ask(client: &Client, id: &str, first: u32) -> Subscriber {
    let inbox = format!("_INBOX.{:x}", fastrand::u64(..));
    let answer = client.subscribe(inbox.clone()).await.unwrap();
    client.publish_with_reply(subject("req", id), inbox, first.to_string().into()).await.unwrap();
    answer
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

fn told(mut config: DaemonConfig, url: &str) -> DaemonConfig {
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
    let mut scene = Scene::configured("required", &[], |config| told(config, &url)).await;
    let client = nats.client().await.unwrap();
    let id = |scene: &mut Scene, worker: &str| scene.engine(worker).ready.http.to_string();
    let (alpha, beta) = (id(&mut scene, "alpha"), id(&mut scene, "beta"));
    let remembered = "lastgasp_infera_remembered_requests{worker=\"alpha\"}";
    // It has begun to listen once it remembers something.
    while scene.daemon.counted(remembered).await.unwrap() < 1.0 {
        ask(&client, &alpha, LENGTH).await;
    }
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

#[tokio::test]
async fn in_observe_mode_nothing_is_heard_and_nothing_told() {
    let mut scene = Scene::configured("required", &[], |config| {
        let url = config.nats_url().to_owned();
        let mut config = told(config, &url);
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
