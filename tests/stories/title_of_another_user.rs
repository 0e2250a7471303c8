//! A helper below the engine's root gives up its privileges and calls itself an engine core. Its end is not the
//! engine's.

use lastgasp_protocol::WorkerState;
use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig, HealthConfig};
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::{Nats, free_port};
use lastgasp_tests::process::{Identity, Process};
use lastgasp_tests::ready::Ready;
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::process::Command;

const TITLE: &str = "x::EngineCore";

#[tokio::test]
async fn it_may_end_and_the_engine_serves_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::copy("/bin/sleep", path.join(TITLE)).unwrap();
    let nats = Nats::start(path).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let ready = path.join("alpha.ready.json");
    let declared = path.join("alpha").display().to_string();
    // The root is a shell; below it are the engine, a helper that is nobody, one of the root's own user, and a nobody
    // who listens on the engine's port at another address.
    let script = r#""$1" --grpc-port 0 --port "$4" --ready-file "$2" &
        setpriv --clear-groups --reuid 65534 "$3" 1000 & echo $! > nobody.pid
        "$3" 1000 & echo $! > own.pid
        until [ -s "$2" ]; do sleep 0.01; done
        setpriv --clear-groups --reuid 65534 perl -MIO::Socket::INET -e "$5" "$4" > listens &
        wait"#;
    let listen = r#"my $socket = IO::Socket::INET->new(LocalAddr => "127.0.0.2", LocalPort => shift, Listen => 5) or die;
        print $$; close STDOUT; sleep 1000"#;
    let listens = path.join("listens");
    nix::unistd::mkfifo(&listens, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let port = free_port().unwrap().to_string();
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh"]).arg(binaries::find("mock-engine").unwrap()).arg(&ready).arg(path.join(TITLE));
    shell.args([&port, listen]);
    shell.env("LASTGASP_WORKER", &declared).current_dir(path);
    let mut root = Process::spawn("alpha", shell, path).unwrap();
    let engine: Ready = root.ready_file(&ready).await.unwrap();
    root.record(engine.pids());
    let listens = tokio::fs::read_to_string(&listens).await.unwrap();
    let helper = |file: &str| -> Identity {
        Identity::of(std::fs::read_to_string(path.join(file)).unwrap().trim().parse().unwrap()).unwrap()
    };
    let (nobody, own) = (helper("nobody.pid"), helper("own.pid"));
    root.record([nobody.pid, own.pid, listens.parse().unwrap()]);
    let omega = Engine::start("omega", &[], path).await.unwrap();
    let health = HealthConfig::grpc(format!("http://{}", engine.grpc.unwrap()));
    let config = DaemonConfig::new("node-a", &nats.url(), "required", path).with(&omega);
    let config = config.with_vllm("alpha", &declared, format!("http://{}", engine.http), health);
    let daemon = Daemon::start(&config, path).await.unwrap();
    discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    discovery.listed("omega", WorkerState::Serving).await.unwrap();
    // Looked at together with its neighbour, whose title counts.
    let titled = |status: &Value, process: Identity| {
        let workers = status["workers"].as_array().into_iter().flatten();
        let processes = workers.flat_map(|worker| worker["processes"].as_array().into_iter().flatten());
        processes.into_iter().any(|one| one["tgid"] == process.pid)
    };
    let status = daemon.status_when("the helper that counts", |status| titled(status, own)).await.unwrap();
    assert!(!titled(&status, nobody), "{status:#}");

    assert!(nobody.signal(Signal::SIGKILL));
    // What comes next was seen after that.
    omega.signal_core(Signal::SIGKILL);
    discovery.removed("omega").await.unwrap();
    assert_eq!(discovery.removals("alpha"), 0);
    assert!(own.signal(Signal::SIGKILL));
    discovery.removed("alpha").await.unwrap();
    matrix::row(
        "A helper of another user, below the root, calls itself an engine core and ends",
        "the engine stays listed",
        "it stayed",
    );
}
