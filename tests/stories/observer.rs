//! `mode = "observe"`: nothing is written to NATS, whatever dies.

use async_nats::jetstream::stream;
use futures_util::{StreamExt as _, TryStreamExt as _};
use lastgasp_protocol::{Certificate, DEATHS_STREAM};
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::engine::Engine;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::GIVE_UP;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

/// An observing daemon and one engine that serves.
struct Observed {
    daemon: Daemon,
    engine: Engine,
    nats: Nats,
    _folder: TempDir,
}

impl Observed {
    async fn on(nats: Nats, folder: TempDir) -> Self {
        let engine = Engine::start("alpha", &[], folder.path()).await.unwrap();
        let mut config = DaemonConfig::new("node-a", &nats.url(), "required", folder.path()).with(&engine);
        config.mode = "observe";
        let daemon = Daemon::start(&config, folder.path()).await.unwrap();
        let watches = |status: &Value| status["workers"][0]["state"] == "serving" && status["nats"] == "connected";
        daemon.status_when("it watches", watches).await.unwrap();
        Self { daemon, engine, nats, _folder: folder }
    }

    /// The engine dies; what the daemon says of that.
    async fn death(&self) -> String {
        self.engine.signal_core(Signal::SIGKILL);
        self.daemon.event("its certificate", |event| event["event"] == "certificate").await.unwrap();
        let deaths = self.daemon.says("deaths").await.unwrap();
        assert!(deaths.contains("alpha") && deaths.contains("observed only"), "{deaths}");
        self.daemon.tell(&["death", "alpha"]).await.unwrap().out
    }

    async fn ends(&mut self) {
        assert!(self.daemon.process.identity.signal(Signal::SIGTERM));
        assert_eq!(self.daemon.process.exited().await.unwrap().code(), Some(0));
    }

    async fn streams(&self) -> Vec<String> {
        self.nats.jetstream().await.unwrap().stream_names().try_collect().await.unwrap()
    }
}

#[tokio::test]
async fn an_empty_server_stays_empty() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let client = nats.client().await.unwrap();
    let mut heard = client.subscribe("lastgasp.>").await.unwrap();
    let mut stored = client.subscribe("$KV.>").await.unwrap();
    client.flush().await.unwrap();
    let mut observed = Observed::on(nats, folder).await;

    let death = observed.death().await;

    assert!(death.contains("would withdraw its record and signal move"), "{death}");
    let status = observed.daemon.status().await.unwrap();
    assert_eq!((&status["ready"], &status["degraded"], &status["losses"]), (&json!(true), &json!([]), &json!([])));
    assert_eq!(status["lease"], "not taken: mode is \"observe\"");
    observed.ends().await;
    assert_eq!(observed.streams().await, Vec::<String>::new());
    let account = observed.nats.jetstream().await.unwrap().query_account().await.unwrap();
    assert_eq!((account.streams, account.storage, account.memory), (0, 0, 0));
    for (subject, heard) in [("lastgasp.end", &mut heard), ("$KV.end", &mut stored)] {
        client.publish(subject, "".into()).await.unwrap();
        assert_eq!(heard.next().await.unwrap().subject.as_str(), subject, "nothing was said before");
    }
}

#[tokio::test]
async fn its_certificates_are_kept_where_there_is_a_stream_for_them() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let subjects = vec!["lastgasp.v1.death.>".to_owned()];
    let config = stream::Config { name: DEATHS_STREAM.to_owned(), subjects, ..stream::Config::default() };
    let deaths = nats.jetstream().await.unwrap().create_stream(config).await.unwrap();
    let mut observed = Observed::on(nats, folder).await;

    observed.death().await;

    let subject = lastgasp_protocol::death_subject(&"node-a".parse().unwrap(), &"alpha".parse().unwrap());
    let kept = async {
        loop {
            if let Ok(kept) = deaths.get_last_raw_message_by_subject(&subject).await {
                return serde_json::from_slice::<Certificate>(&kept.payload).unwrap();
            }
        }
    };
    let certificate = tokio::time::timeout(GIVE_UP, kept).await.expect("its certificate");
    assert!(certificate.observed_only, "{certificate:#?}");
    observed.ends().await;
    assert_eq!(observed.streams().await, [DEATHS_STREAM]);
    assert_eq!(deaths.get_info().await.unwrap().state.messages, 1);
}
