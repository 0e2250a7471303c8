//! The status socket is its owner's and root's, whatever its mode is changed to.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::nats::Nats;
use lastgasp_tests::user::User;

#[tokio::test]
async fn another_user_is_not_answered() {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let daemon =
        Daemon::start(&DaemonConfig::new("node-a", &nats.url(), "off", folder.path()), folder.path()).await.unwrap();
    let socket = &daemon.ready.socket;
    let mode = fs::metadata(socket).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600);
    let stranger = || {
        User::nobody(&[])
            .command(&binaries::find("lastgasp").unwrap())
            .args(["status", "--socket"])
            .arg(socket)
            .output()
    };
    let refused = stranger().await.unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("may not be opened"), "{refused:?}");

    fs::set_permissions(socket, PermissionsExt::from_mode(0o666)).unwrap();
    let refused = stranger().await.unwrap();
    assert!(!refused.status.success() && refused.stdout.is_empty(), "{refused:?}");
    assert!(daemon.process.log_tail().contains("status socket refused another user"));
    assert!(daemon.says("status").await.unwrap().contains("node-a"));
}
