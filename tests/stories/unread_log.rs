//! Nobody reads what is logged: the collector of a sick node stands still, and the pipe to it is full.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use lastgasp_tests::binaries;
use lastgasp_tests::daemon::DaemonConfig;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::{GIVE_UP, Process};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use serde_json::Value;
use tokio::process::Command;

use crate::scene::{Scene, only_those_of_are_moved};

/// A pipe that is full, and that nobody reads while this lives.
struct FullPipe {
    path: PathBuf,
    _end: File,
}

impl FullPipe {
    fn new(folder: &Path) -> Self {
        let path = folder.join("log.pipe");
        nix::unistd::mkfifo(&path, Mode::S_IRWXU).unwrap();
        // Both ends: a pipe that nobody could read would be no full one, but a broken one.
        let mut end = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
        while end.write(&[b'.'; 4096]).is_ok() {}
        while end.write(b".").is_ok() {}
        Self { path, _end: end }
    }

    /// A program whose standard output and error are the pipe, as a service manager has it.
    fn command(&self, program: &'static str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", r#"exec >"$0" 2>&1; exec "$@""#]).arg(&self.path).arg(binaries::find(program).unwrap());
        command
    }
}

#[tokio::test]
async fn a_death_is_withdrawn_lost_lines_are_counted_and_sigterm_is_obeyed() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = FullPipe::new(folder.path());
    let trace = |mut config: DaemonConfig| {
        config.log = "trace";
        config
    };
    let mut scene = Scene::configured_and_started_by(trace, pipe.command("lastgasp")).await;
    let asked = scene.ask_several().await;

    scene.engine("alpha").signal_core(Signal::SIGKILL);

    only_those_of_are_moved("alpha", asked).await;
    scene.discovery.removed("alpha").await.unwrap();
    let lost = "lastgasp_losses_total{hop=\"log\",kind=\"line\"}";
    let counted = async {
        // Each answer is lines of the log, too.
        while scene.daemon.counted(lost).await.unwrap() < 1.0 {
            assert_eq!(scene.daemon.status().await.unwrap()["nats"], "connected");
        }
    };
    tokio::time::timeout(GIVE_UP, counted).await.expect("more lines than there is room for");
    let of_log = |status: &Value| {
        let losses = status["losses"].as_array().into_iter().flatten();
        losses.clone().any(|loss| loss["hop"] == "log" && loss["kind"] == "line")
    };
    scene.daemon.status_when("lost lines", of_log).await.unwrap();
    assert!(scene.daemon.process.identity.signal(Signal::SIGTERM));
    assert_eq!(scene.daemon.process.exited().await.unwrap().code(), Some(0));
}

#[tokio::test]
async fn a_router_serves_counts_lost_lines_and_obeys_sigterm() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let pipe = FullPipe::new(folder.path());
    let ready_file = folder.path().join("ready.json");
    let mut command = pipe.command("lastgasp-router");
    command.args(["--listen", "127.0.0.1:0", "--name", "router-1", "--nats", &nats.url(), "--log", "trace"]);
    command.arg("--ready-file").arg(&ready_file);
    let mut router = Process::spawn("router", command, folder.path()).unwrap();
    let ready: Value = router.ready_file(&ready_file).await.unwrap();
    let address = ready["listen"].as_str().unwrap();
    let none_lost = "\nlastgasp_router_log_lines_lost_total 0\n";
    let get = async |path: &str| {
        let answer = reqwest::get(format!("http://{address}{path}")).await.unwrap();
        assert_eq!(answer.status(), 200);
        answer.text().await.unwrap()
    };
    let client = nats.client().await.unwrap();
    let lost = async {
        while get("/metrics").await.contains(none_lost) {
            // Each message is lines of the log.
            for _ in 0..500 {
                client.publish("lastgasp.v1.migrate.node-b", "no signal".into()).await.unwrap();
            }
            get("/v1/models").await;
        }
    };
    tokio::time::timeout(GIVE_UP, lost).await.expect("more lines than there is room for");
    assert!(router.identity.signal(Signal::SIGTERM));
    assert_eq!(router.exited().await.unwrap().code(), Some(0));
}
