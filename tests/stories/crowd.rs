//! Many workers that do nothing but listen, and one daemon.

use std::path::Path;
use std::process::Stdio;

use lastgasp_protocol::WorkerState;
use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::{Nats, free_port};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};

/// One of them. Dropped, it is killed.
struct Member {
    name: String,
    port: u16,
    child: Child,
    /// It ends when this is closed.
    _stdin: ChildStdin,
}

impl Member {
    async fn start(folder: &Path, name: String, port: u16) -> Self {
        let mut command = Command::new(binaries::find("victim").unwrap());
        command.arg("listen-on").arg(port.to_string());
        command.env("LASTGASP_WORKER", declared(folder, &name)).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn().unwrap();
        let stdin = child.stdin.take().expect("piped");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let line = lines.next_line().await.unwrap().expect("it says its port");
        assert_eq!(line, format!("ready {port}"));
        Self { name, port, child, _stdin: stdin }
    }
}

/// What no other test's processes have in their environment.
fn declared(folder: &Path, name: &str) -> String {
    folder.join(name).display().to_string()
}

/// The daemon and its workers, all listed.
pub(crate) struct Crowd {
    pub(crate) daemon: Daemon,
    members: Vec<Member>,
    pub(crate) discovery: Discovery,
    _nats: Nats,
    folder: TempDir,
}

impl Crowd {
    pub(crate) async fn of(count: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let nats = Nats::start(path).await.unwrap();
        let discovery = Discovery::watch(&nats).await.unwrap();
        let mut config = DaemonConfig::new("node-a", &nats.url(), "required", path).with_hold_down_ms(0);
        let mut members = Vec::new();
        for number in 0..count {
            let member = Member::start(path, format!("w{number}"), free_port().unwrap()).await;
            config = config.with_listener(&member.name, &declared(path, &member.name), member.port);
            members.push(member);
        }
        let daemon = Daemon::start(&config, path).await.unwrap();
        let this = Self { daemon, members, discovery, _nats: nats, folder };
        this.all_listed().await;
        this
    }

    pub(crate) async fn all_listed(&self) {
        for member in &self.members {
            self.discovery.listed(&member.name, WorkerState::Serving).await.unwrap();
        }
    }

    /// Kills every one of these at once, and waits until all are withdrawn.
    pub(crate) async fn kill(&mut self, of_these: impl Fn(usize) -> bool) {
        let mut killed = Vec::new();
        for (number, member) in self.members.iter_mut().enumerate().filter(|(number, _)| of_these(*number)) {
            member.child.start_kill().unwrap();
            killed.push(number);
        }
        matrix::count("engines killed", killed.len());
        for number in killed {
            let member = &mut self.members[number];
            member.child.wait().await.unwrap();
            self.discovery.removed(&member.name).await.unwrap();
        }
    }

    /// Starts the one of this number again.
    pub(crate) async fn restart(&mut self, number: usize) {
        let Member { name, port, .. } = &self.members[number];
        self.members[number] = Member::start(self.folder.path(), name.clone(), *port).await;
    }

    /// How often each was withdrawn.
    pub(crate) fn removals(&self) -> Vec<usize> {
        self.members.iter().map(|member| self.discovery.removals(&member.name)).collect()
    }
}
