//! Dynamo's frontend hears nothing of a worker that hangs, and its record stands for as long as its lease.

use std::fs;
use std::path::{Path, PathBuf};

use lastgasp_tests::client::{Ending, LiveStream};
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use nix::sys::signal::Signal;
use serde_json::json;

use crate::scene::{Question, Scene};

/// Where the record of the instance is that listens on this port.
fn file(root: &Path, port: u16) -> PathBuf {
    root.join("v1/instances").join(format!("dynamo%2Fbackend%2Fgenerate%2F{port:x}"))
}

fn register(root: &Path, port: u16) {
    let transport = json!({"tcp": format!("127.0.0.1:{port}/{port:x}/dynamo/backend/generate")});
    let record = json!({"type": "Endpoint", "instance_id": port, "transport": transport});
    fs::create_dir_all(root.join("v1/instances")).unwrap();
    fs::write(file(root, port), record.to_string()).unwrap();
}

/// The frontend moves a stream that breaks to another worker, so none that hangs may be listed then.
#[tokio::test]
async fn a_hung_worker_is_out_of_discovery_before_its_streams_break_and_back_when_it_goes_on() {
    let records = tempfile::tempdir().unwrap();
    let root = records.path();
    let mut scene = Scene::configured("required", &[], |config| {
        let mut config = config.with_hold_down_ms(0);
        for worker in &mut config.worker {
            register(root, worker.endpoint.rsplit(':').next().unwrap().parse().unwrap());
            worker.health.hang_window_ms = Some(3000);
            worker.sever = toml::toml! { enabled = true };
        }
        let mut sink = toml::toml! { kind = "dynamo" backend = "file" };
        sink.insert("folder".into(), root.display().to_string().into());
        config.notify = vec![sink];
        config
    })
    .await;
    let [alpha, beta] = ["alpha", "beta"].map(|name| file(root, scene.engine(name).ready.http.port()));
    for worker in ["alpha", "beta"] {
        scene.daemon.counts(&format!("lastgasp_dynamo_instances{{worker=\"{worker}\"}}"), 1.0).await.unwrap();
    }
    let question = Question::chat("one");
    let direct = scene.engine("alpha").ready.http;
    let mut cut = LiveStream::open(direct, question.endpoint, &question.body).await.unwrap();
    cut.tokens(5).await.unwrap();

    scene.engine("alpha").signal_root(Signal::SIGSTOP);

    let cut = cut.finish().await.unwrap();
    assert!(matches!(cut.ending, Some(Ending::Broken(_))), "{cut:#?}");
    assert!(!alpha.exists() && beta.exists(), "when the stream broke");
    let has_both = |what: &[&str]| ["dynamo", "sever"].iter().all(|wanted| what.contains(wanted));
    let certificate = scene.discovery.certificate("alpha", |certificate| {
        has_both(&certificate.timeline.iter().map(|moment| moment.what.as_str()).collect::<Vec<_>>())
    });
    let certificate = certificate.await.unwrap();
    let place = |what| certificate.timeline.iter().position(|moment| moment.what == what);
    assert!(place("dynamo") < place("sever"), "{certificate:#?}");

    scene.engine("alpha").signal_root(Signal::SIGCONT);
    scene.daemon.counts("lastgasp_dynamo_records_total{outcome=\"restored\"}", 1.0).await.unwrap();
    assert!(alpha.exists() && beta.exists());
}

/// Beside another daemon that sees the same death and the same records, and deletes its copy of them.
#[tokio::test]
async fn in_observe_mode_no_record_is_touched() {
    let records = tempfile::tempdir().unwrap();
    let [observed, changed] = ["observed", "changed"].map(|name| records.path().join(name));
    let sink = |root: &Path| {
        let mut sink = toml::toml! { kind = "dynamo" backend = "file" };
        sink.insert("folder".into(), root.display().to_string().into());
        vec![sink]
    };
    let mut scene = Scene::configured("required", &[], |mut config| {
        for worker in &config.worker {
            let port = worker.endpoint.rsplit(':').next().unwrap().parse().unwrap();
            register(&observed, port);
            register(&changed, port);
        }
        (config.notify, config.mode) = (sink(&observed), "observe");
        config
    })
    .await;
    let folder = scene.folder.path().join("second");
    fs::create_dir(&folder).unwrap();
    let mut config = DaemonConfig::new("node-b", &scene.nats.url(), "auto", &folder).with(scene.engine("alpha"));
    config.notify = sink(&changed);
    let enforcing = Daemon::start(&config, &folder).await.unwrap();
    enforcing.counts("lastgasp_dynamo_instances{worker=\"alpha\"}", 1.0).await.unwrap();
    let serves = "lastgasp_worker_state{state=\"serving\",worker=\"alpha\"}";
    scene.daemon.counts(serves, 1.0).await.unwrap();
    enforcing.counts(serves, 1.0).await.unwrap();
    let port = scene.engine("alpha").ready.http.port();

    scene.engine("alpha").signal_core(Signal::SIGKILL);

    scene.daemon.event("the death", |event| event["event"] == "certificate").await.unwrap();
    enforcing.counts("lastgasp_dynamo_records_total{outcome=\"deleted\"}", 1.0).await.unwrap();
    assert!(file(&observed, port).exists() && !file(&changed, port).exists());
}
