//! Daemon, router and workers under the permissions of `deploy/nats/lastgasp.conf`, with the file as
//! it is shipped: what they need they may do, and everything else the server refuses.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Output;

use async_nats::jetstream;
use async_nats::{Client, ConnectOptions, Event};
use futures_util::StreamExt as _;
use lastgasp_protocol::{WorkerRecord, WorkerState};
use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::nats::{Nats, Options};
use lastgasp_tests::process::GIVE_UP;
use lastgasp_tests::router::Router;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;
use tokio::sync::mpsc;

use crate::scene::was_moved;

const USERS: [&str; 5] = ["admin", "gpu-a", "gpu-b", "router", "vllm-1"];

/// A server with the shipped configuration, and everybody's password in a file.
struct Site {
    nats: Nats,
    folder: TempDir,
}

impl Site {
    /// With the buckets, which the administrator has made.
    async fn new() -> Self {
        Self::under(Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/nats/lastgasp.conf")).await
    }

    /// The same, where gpu-a may write nothing but its certificates.
    async fn where_gpu_a_may_not_write() -> Self {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/nats/lastgasp.conf");
        let mut text = std::fs::read_to_string(shipped).unwrap();
        for subject in ["$KV.lastgasp_workers.gpu-a.*", "$KV.lastgasp_nodes.gpu-a", "lastgasp.v1.migrate.gpu-a"] {
            let allowed = format!("\"{subject}\"");
            let at = text.find(&allowed).unwrap();
            text.replace_range(at..at + allowed.len(), "");
        }
        let folder = tempfile::tempdir().unwrap();
        let narrow = folder.path().join("narrow.conf");
        std::fs::write(&narrow, text).unwrap();
        Self::under(narrow).await
    }

    async fn under(config: PathBuf) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let variables: Vec<(String, String)> = USERS
            .iter()
            .map(|user| (format!("LASTGASP_{}_PASSWORD", user.to_uppercase().replace('-', "_")), password(user)))
            .collect();
        let options = Options { config: Some(config), environment: variables, ..Options::default() };
        let nats = Nats::start_with(folder.path(), options).await.unwrap();
        let site = Self { nats, folder };
        for user in USERS {
            std::fs::write(site.password_file(user), password(user)).unwrap();
            std::fs::set_permissions(site.password_file(user), PermissionsExt::from_mode(0o600)).unwrap();
        }
        let made = site.create_buckets("admin").await;
        assert!(made.status.success(), "{made:?}");
        let said: serde_json::Value = serde_json::from_slice(&made.stdout).unwrap();
        assert_eq!(said["there"].as_array().unwrap().len(), 4, "{said}");
        site
    }

    fn password_file(&self, user: &str) -> PathBuf {
        self.folder.path().join(format!("{user}.password"))
    }

    async fn create_buckets(&self, user: &str) -> Output {
        let mut command = Command::new(binaries::find("lastgasp").unwrap());
        command.args(["create-buckets", "--nats", &self.nats.url(), "--node", user]).args(["--output", "json"]);
        command.env("LASTGASP_NATS_USER", user);
        command.env("LASTGASP_NATS_PASSWORD_FILE", self.password_file(user)).output().await.unwrap()
    }

    async fn client(&self, user: &str) -> Client {
        ConnectOptions::with_user_and_password(user.to_owned(), password(user)).connect(self.nats.url()).await.unwrap()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("nats-server.log")).unwrap()
    }
}

fn password(user: &str) -> String {
    format!("pass-of-{user}")
}

#[tokio::test]
async fn a_kill_is_withdrawn_and_a_stream_is_moved() {
    let site = Site::new().await;
    let (path, url) = (site.folder.path(), site.nats.url());
    let discovery = Discovery::over(async_nats::jetstream::new(site.client("admin").await), 1).await.unwrap();
    let mut config = DaemonConfig::new("gpu-a", &url, "required", path)
        .with_nats("user", "gpu-a")
        .with_nats("password_file", site.password_file("gpu-a").to_str().unwrap());
    let mut engines = Vec::new();
    for name in ["alpha", "beta"] {
        let engine = Engine::start(name, &["--tokens-per-second", "100"], path).await.unwrap();
        config = config.with(&engine);
        engines.push(engine);
    }
    let daemon = Daemon::start(&config, path).await.unwrap();
    for name in ["alpha", "beta"] {
        discovery.listed(name, WorkerState::Serving).await.unwrap();
    }
    let secret = site.password_file("router");
    let login = ["--nats", &url, "--nats-user", "router", "--nats-password-file", secret.to_str().unwrap()];
    let router =
        Router::start_with("router-1", &[&login[..], &["--migration-limit", "3"]].concat(), path).await.unwrap();

    let body = json!({"model": "tiny", "prompt": "one", "max_tokens": 400, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true});
    let mut stream = router.stream(Endpoint::Completions, &body).await.unwrap();
    stream.tokens(10).await.unwrap();
    let worker = stream.transcript.worker.clone().unwrap().replace("gpu-a/", "");
    let engine = engines.iter().find(|engine| engine.process.name() == worker).unwrap();
    engine.signal_core(Signal::SIGKILL);

    let transcript = stream.finish().await.unwrap();
    assert!(was_moved(&transcript) && transcript.ids.len() == 400, "{transcript:?}");
    discovery.removed(&worker).await.unwrap();
    let certificate = discovery.certificate(&worker, |c| c.routers_done == 1).await.unwrap();
    assert_eq!((certificate.streams.streams, certificate.streams.moved), (1, 1));
    let held = |status: &Value| status["lease"] == "held" && status["routers"][0]["router"] == "router-1";
    daemon.status_when("lease and routers", held).await.unwrap();
    // A daemon that is started later knows of it.
    drop(daemon);
    let daemon = Daemon::start(&config, path).await.unwrap();
    let recalled = async { while !daemon.says("deaths").await.unwrap().contains(&certificate.certificate) {} };
    tokio::time::timeout(GIVE_UP, recalled).await.expect("its own certificates can be read");
    // Nothing was asked for that is not allowed: the permissions are wide enough.
    drop((router, daemon));
    let log = site.log();
    assert!(!log.contains("Violation"), "{log}");
}

/// An observer needs no right to write a record, a lease or a signal.
#[tokio::test]
async fn a_node_that_may_not_write_can_observe() {
    let site = Site::where_gpu_a_may_not_write().await;
    let (path, url) = (site.folder.path(), site.nats.url());
    let engine = Engine::start("alpha", &[], path).await.unwrap();
    let mut config = DaemonConfig::new("gpu-a", &url, "required", path)
        .with_nats("user", "gpu-a")
        .with_nats("password_file", site.password_file("gpu-a").to_str().unwrap())
        .with(&engine);
    config.mode = "observe";
    let daemon = Daemon::start(&config, path).await.unwrap();
    let serves = |status: &Value| status["workers"][0]["state"] == "serving" && status["nats"] == "connected";
    daemon.status_when("alpha serves", serves).await.unwrap();

    engine.signal_core(Signal::SIGKILL);

    let discovery = Discovery::over(async_nats::jetstream::new(site.client("admin").await), 1).await.unwrap();
    let certificate = discovery.certificate("alpha", |_| true).await.unwrap();
    assert!(certificate.observed_only);
    let status = daemon.status().await.unwrap();
    assert_eq!((&status["degraded"], &status["losses"]), (&json!([]), &json!([])), "{status:#}");
    drop(daemon);
    let log = site.log();
    assert!(!log.contains("Violation"), "{log}");
}

/// What each user may not publish. Every one of these is refused by the server, and heard by nobody.
const FORBIDDEN: [(&str, &[&str]); 3] = [
    (
        "gpu-a",
        &[
            // Another node's records, lease, signals and certificates.
            "$KV.lastgasp_workers.gpu-b.beta",
            "$KV.lastgasp_nodes.gpu-b",
            "lastgasp.v1.migrate.gpu-b",
            "lastgasp.v1.death.gpu-b.beta",
            // All nodes at once, and beside the shape of a key.
            "lastgasp.v1.migrate",
            "lastgasp.v1.migrate.gpu-a.beta",
            "$KV.lastgasp_workers.gpu-a",
            "$KV.lastgasp_nodes.gpu-a.x",
            // A router's lease, and its answer.
            "$KV.lastgasp_routers.router-1",
            "_INBOX.lastgasp-node.gpu-b.x",
            // Changes of what stores all of it, and raw messages, which a server hands out wherever
            // it is asked to.
            "$JS.API.STREAM.CREATE.KV_lastgasp_workers",
            "$JS.API.STREAM.UPDATE.KV_lastgasp_workers",
            "$JS.API.STREAM.DELETE.KV_lastgasp_workers",
            "$JS.API.STREAM.PURGE.KV_lastgasp_workers",
            "$JS.API.STREAM.MSG.DELETE.KV_lastgasp_workers",
            "$JS.API.DIRECT.GET.KV_lastgasp_workers",
            "$JS.API.DIRECT.GET.KV_lastgasp_workers.$KV.lastgasp_workers.gpu-a.alpha",
            "$JS.API.CONSUMER.DELETE.KV_lastgasp_workers.x",
            "$JS.API.CONSUMER.CREATE.lastgasp_deaths",
            "$JS.API.CONSUMER.CREATE.lastgasp_deaths.x",
            "$JS.API.CONSUMER.CREATE.lastgasp_deaths.x.lastgasp.v1.death.gpu-a.*",
            "$JS.API.DIRECT.GET.lastgasp_deaths",
            "anything.else",
        ],
    ),
    (
        "router",
        &[
            "$KV.lastgasp_workers.gpu-a.alpha",
            "$KV.lastgasp_nodes.gpu-a",
            "lastgasp.v1.migrate.gpu-a",
            "lastgasp.v1.death.gpu-a.alpha",
            // An answer to nothing.
            "_INBOX.lastgasp-node.gpu-a.x",
            "$JS.API.STREAM.CREATE.KV_lastgasp_routers",
            "$JS.API.STREAM.DELETE.KV_lastgasp_workers",
            "$JS.API.STREAM.PURGE.KV_lastgasp_workers",
            "$JS.API.DIRECT.GET.KV_lastgasp_workers",
            "anything.else",
        ],
    ),
    (
        "vllm-1",
        &[
            "$KV.lastgasp_workers.gpu-a.alpha",
            "$KV.lastgasp_workers.gpu-b.vllm-1",
            "$KV.lastgasp_nodes.gpu-a",
            "$KV.lastgasp_routers.router-1",
            "lastgasp.v1.migrate.gpu-a",
            "lastgasp.v1.death.gpu-a.vllm-1",
            "$JS.API.STREAM.MSG.GET.KV_lastgasp_workers",
            "$JS.API.DIRECT.GET.KV_lastgasp_workers",
            "$JS.API.CONSUMER.CREATE.KV_lastgasp_workers",
            "$JS.API.STREAM.DELETE.KV_lastgasp_workers",
            "anything.else",
        ],
    ),
];

/// What each user may not listen to.
const DEAF: [(&str, &[&str]); 3] = [
    ("gpu-a", &[">", "lastgasp.v1.migrate.*", "_INBOX.>", "_INBOX.lastgasp-node.gpu-b.>", "$KV.>"]),
    ("router", &[">", "lastgasp.v1.death.>", "_INBOX.lastgasp-node.gpu-a.>", "$KV.>"]),
    ("vllm-1", &[">", "lastgasp.v1.migrate.*", "_INBOX.lastgasp-node.gpu-a.>", "$KV.>"]),
];

/// A client of this user, and what the server says to it besides.
async fn complaining(site: &Site, user: &str) -> (Client, mpsc::UnboundedReceiver<String>) {
    let (complain, complaints) = mpsc::unbounded_channel();
    let options =
        ConnectOptions::with_user_and_password(user.to_owned(), password(user)).event_callback(move |event| {
            if let Event::ServerError(error) = event {
                _ = complain.send(error.to_string());
            }
            std::future::ready(())
        });
    (options.connect(site.nats.url()).await.unwrap(), complaints)
}

async fn next(complaints: &mut mpsc::UnboundedReceiver<String>) -> String {
    tokio::time::timeout(GIVE_UP, complaints.recv()).await.expect("the server complains").unwrap()
}

#[tokio::test]
async fn everything_else_is_refused_and_heard_by_nobody() {
    let site = Site::new().await;
    let admin = site.client("admin").await;
    let mut heard = admin.subscribe(">").await.unwrap();
    admin.flush().await.unwrap();
    for (user, subjects) in FORBIDDEN {
        let (client, mut complaints) = complaining(&site, user).await;
        for subject in subjects {
            client.publish(*subject, "x".into()).await.unwrap();
            let said = next(&mut complaints).await;
            assert!(said.contains("Permissions Violation for Publish") && said.contains(subject), "{user}: {said}");
        }
    }
    for (user, subjects) in DEAF {
        let (client, mut complaints) = complaining(&site, user).await;
        for subject in subjects {
            let _subscription = client.subscribe(*subject).await.unwrap();
            let said = next(&mut complaints).await;
            assert!(said.contains("Permissions Violation for Subscription"), "{user}: {said}");
        }
    }
    admin.publish("the.end", "".into()).await.unwrap();
    while let Some(message) = heard.next().await.filter(|message| message.subject.as_str() != "the.end") {
        assert!(message.subject.starts_with("$SYS") || message.subject.starts_with("$JS.EVENT"), "{message:?}");
    }
    // What a worker that registers itself needs, it has.
    let worker = ConnectOptions::with_user_and_password("vllm-1".to_owned(), password("vllm-1"));
    let worker = worker.custom_inbox_prefix("_INBOX.lastgasp-worker.vllm-1").connect(site.nats.url()).await.unwrap();
    let records = jetstream::new(worker).get_key_value("lastgasp_workers").await.unwrap();
    records.put("gpu-a.vllm-1", "{}".into()).await.unwrap();
    // Who is nobody gets nowhere.
    let nobody = async_nats::connect(site.nats.url()).await.unwrap_err().to_string();
    assert!(nobody.contains("authorization violation"), "{nobody}");
    let wrong = ConnectOptions::with_user_and_password("gpu-a".to_owned(), "guess".to_owned());
    assert!(wrong.connect(site.nats.url()).await.is_err());
    let made = site.create_buckets("gpu-b").await;
    assert_eq!(made.status.code(), Some(0), "what is there need not be made: {made:?}");
    let tried = [FORBIDDEN, DEAF].as_flattened().iter().map(|(_, subjects)| subjects.len()).sum();
    matrix::count("bad inputs tried", tried);
    matrix::row(
        "Daemon, router and self-registering worker publish and listen beyond their permissions (deploy/nats)",
        "the server refuses each, nobody hears it",
        "all refused, none heard",
    );
}

/// A server answers a request on any subject that the request names, with its own words: that is how
/// whoever may ask anything puts a text where it may not write. Such a text is no record, no lease
/// and no signal, and changes nothing.
#[tokio::test]
async fn an_answer_of_the_server_under_anothers_name_changes_nothing() {
    let site = Site::new().await;
    let (path, url) = (site.folder.path(), site.nats.url());
    let engine = Engine::start("alpha", &["--tokens-per-second", "100"], path).await.unwrap();
    let config = DaemonConfig::new("gpu-a", &url, "off", path)
        .with_nats("user", "gpu-a")
        .with_nats("password_file", site.password_file("gpu-a").to_str().unwrap())
        .with(&engine);
    let daemon = Daemon::start(&config, path).await.unwrap();
    let records = jetstream::new(site.client("admin").await).get_key_value("lastgasp_workers").await.unwrap();
    let mut record = records.watch_with_history("gpu-a.alpha").await.unwrap();
    let is_record = |bytes: &[u8]| WorkerRecord::parse("gpu-a.alpha", bytes).is_ok();
    assert!(is_record(&record.next().await.unwrap().unwrap().value));
    let secret = site.password_file("router");
    let login = ["--nats", &url, "--nats-user", "router", "--nats-password-file", secret.to_str().unwrap()];
    let router =
        Router::start_with("router-1", &[&login[..], &["--migration-limit", "3"]].concat(), path).await.unwrap();
    let body =
        json!({"model": "tiny", "prompt": "one", "max_tokens": 100, "ignore_eos": true, "return_token_ids": true});
    let mut stream = router.stream(Endpoint::Completions, &body).await.unwrap();
    stream.tokens(5).await.unwrap();

    let (attacker, mut complaints) = complaining(&site, "gpu-b").await;
    let own = json!({"schema": 1, "node": "gpu-a", "action": "move", "mode": "lost", "certificate": "x",
        "workers": [{"worker": "alpha", "incarnation": "x"}], "cause": {"kind": "process_killed"}});
    let last = json!({"last_by_subj": "$KV.lastgasp_workers.gpu-b.x"}).to_string();
    for (subject, reply, payload) in [
        ("$KV.lastgasp_workers.gpu-b.x", "lastgasp.v1.migrate.gpu-a", own.to_string()),
        ("$KV.lastgasp_workers.gpu-b.x", "$KV.lastgasp_nodes.gpu-a", own.to_string()),
        ("$JS.API.STREAM.MSG.GET.KV_lastgasp_workers", "lastgasp.v1.migrate.gpu-a", last.clone()),
        ("$JS.API.STREAM.MSG.GET.KV_lastgasp_workers", "$KV.lastgasp_workers.gpu-a.alpha", last),
        ("$KV.lastgasp_workers.gpu-b.x", "$KV.lastgasp_workers.gpu-a.alpha", own.to_string()),
    ] {
        attacker.publish_with_reply(subject, reply, payload.into()).await.unwrap();
    }
    // A consumer, which would have the stored bytes themselves delivered, under the key they stand at.
    let config = json!({"deliver_subject": "lastgasp.v1.migrate.gpu-a", "filter_subject": "$KV.lastgasp_workers.gpu-b.*",
        "ack_policy": "none", "deliver_policy": "all", "mem_storage": true, "num_replicas": 1});
    let request = json!({"stream_name": "KV_lastgasp_workers", "config": config}).to_string();
    let mut answers = attacker.subscribe("_INBOX.lastgasp-node.gpu-b.consumer").await.unwrap();
    let (subject, reply) = ("$JS.API.CONSUMER.CREATE.KV_lastgasp_workers", "_INBOX.lastgasp-node.gpu-b.consumer");
    attacker.publish_with_reply(subject, reply, request.into()).await.unwrap();
    let answer: Value = serde_json::from_slice(&answers.next().await.unwrap().payload).unwrap();
    assert_eq!(answer["error"], Value::Null, "{answer:#}");
    // The same into another bucket: a lease that the daemon would take for another machine's.
    let nodes = jetstream::new(site.client("admin").await).get_key_value("lastgasp_nodes").await.unwrap();
    let mut leases = nodes.watch("gpu-a").await.unwrap();
    let forged = json!({"schema": 1, "node": "gpu-a", "machine_id": "forged", "boot_id": "forged", "pid": 1,
        "start_ticks": 1});
    attacker.publish("$KV.lastgasp_workers.gpu-b.y", forged.to_string().into()).await.unwrap();
    let config = json!({"deliver_subject": "$KV.lastgasp_nodes.gpu-a", "filter_subject": "$KV.lastgasp_workers.gpu-b.y",
        "ack_policy": "none", "deliver_policy": "all", "mem_storage": true, "num_replicas": 1});
    let request = json!({"stream_name": "KV_lastgasp_workers", "config": config}).to_string();
    attacker.publish_with_reply(subject, reply, request.into()).await.unwrap();
    let answer: Value = serde_json::from_slice(&answers.next().await.unwrap().payload).unwrap();
    assert_eq!(answer["error"], Value::Null, "{answer:#}");
    attacker.flush().await.unwrap();
    for _ in 0..2 {
        let lease = leases.next().await.unwrap().unwrap();
        assert!(!String::from_utf8_lossy(&lease.value).contains("forged"), "{lease:?}");
    }

    // The daemon writes over it.
    assert!(!is_record(&record.next().await.unwrap().unwrap().value), "nothing was put there: is this test in vain?");
    while !is_record(&record.next().await.unwrap().unwrap().value) {}
    let transcript = stream.finish().await.unwrap();
    assert!(!was_moved(&transcript) && transcript.ids.len() == 100, "{transcript:?}");
    let again = router.stream(Endpoint::Completions, &body).await.unwrap().finish().await.unwrap();
    assert_eq!(again.worker.as_deref(), Some("gpu-a/alpha"));
    for line in [
        r#"lastgasp_router_signals_total{result="malformed"}"#,
        r#"lastgasp_router_records_refused_total{reason="malformed"}"#,
    ] {
        router.counts(line, 1.0).await.unwrap();
    }
    daemon.status_when("its lease is held", |status| status["lease"] == "held").await.unwrap();
    assert!(complaints.try_recv().is_err(), "the server refused it: this test is in vain");
    matrix::row(
        "Another node has the server's own answers written under a worker's key, a lease and a signal's subject",
        "nothing is withdrawn or moved; the daemon writes over it",
        "the record stood again; no stream moved; counted as malformed",
    );
}
