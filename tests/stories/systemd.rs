//! The daemon as a service of systemd, `Type=notify` with `WatchdogSec=`: the socket that systemd
//! listens on is the test's.

use std::time::Duration;

use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::GIVE_UP;
use nix::sys::signal::Signal;
use tokio::net::UnixDatagram;
use tokio::process::Command;

struct Notified {
    socket: UnixDatagram,
}

impl Notified {
    /// Reads until something is said that begins with `what`; all of that message.
    async fn hear(&self, what: &str) -> String {
        let heard = async {
            let mut buffer = [0; 4096];
            loop {
                let length = self.socket.recv(&mut buffer).await.unwrap();
                let message = String::from_utf8_lossy(&buffer[..length]).into_owned();
                if message.lines().any(|line| line == what) {
                    return message;
                }
            }
        };
        tokio::time::timeout(GIVE_UP, heard).await.unwrap_or_else(|_| panic!("no {what}"))
    }

    /// Whether nothing comes for so long.
    async fn is_silent(&self, pause: Duration) -> bool {
        let mut buffer = [0; 4096];
        while self.socket.try_recv(&mut buffer).is_ok() {}
        tokio::time::timeout(pause, self.socket.recv(&mut buffer)).await.is_err()
    }
}

#[tokio::test]
async fn systemd_is_told_of_the_start_of_every_second_and_of_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let path = folder.path().join("notify.sock");
    let notified = Notified { socket: UnixDatagram::bind(&path).unwrap() };
    let config = DaemonConfig::new("node-a", &nats.url(), "auto", folder.path());
    let mut command = Command::new(binaries::find("lastgasp").unwrap());
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "10000000");
    let mut daemon = Daemon::start_by(command, &config, folder.path()).await.unwrap();

    let ready = notified.hear("READY=1").await;
    assert!(ready.lines().any(|line| line.starts_with("STATUS=watching 0 workers by ")), "{ready}");
    notified.hear("WATCHDOG=1").await;
    notified.hear("WATCHDOG=1").await;

    // One that is stuck gives no sign, so systemd ends it.
    assert!(daemon.process.identity.signal(Signal::SIGSTOP));
    let stopped = async {
        while !daemon.process.identity.is_stopped() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(GIVE_UP, stopped).await.expect("it stops");
    assert!(notified.is_silent(Duration::from_millis(2500)).await);
    assert!(daemon.process.identity.signal(Signal::SIGCONT));
    notified.hear("WATCHDOG=1").await;

    assert!(daemon.process.identity.signal(Signal::SIGTERM));
    notified.hear("STOPPING=1").await;
    assert_eq!(daemon.process.exited().await.unwrap().code(), Some(0));
}
