//! The link to the machine on which NATS runs goes down, for a moment and for longer: packets are
//! lost, and no connection is closed. NATS runs in a network namespace of its own.

use std::net::Ipv4Addr;
use std::process::Command;

use lastgasp_protocol::WorkerState;
use lastgasp_tests::discovery::Discovery;
use lastgasp_tests::matrix;
use lastgasp_tests::nats::{Nats, Options};

use super::stage::Stage;

/// A network namespace behind a link. Both are gone with the value.
struct Island {
    name: String,
    address: Ipv4Addr,
}

impl Island {
    fn new() -> Self {
        // Link-local (RFC 3927), and another /30 in every test process.
        let pid = std::process::id();
        let [high, low] = [u8::try_from(pid / 64 % 254 + 1).unwrap(), u8::try_from(pid % 64 * 4).unwrap()];
        let (here, address) = (Ipv4Addr::new(169, 254, high, low + 1), Ipv4Addr::new(169, 254, high, low + 2));
        let name = format!("lg{pid}");
        let island = Self { name, address };
        let Self { name, address } = &island;
        ip(&format!("netns add {name}"));
        ip(&format!("link add {name} type veth peer name uplink netns {name}"));
        ip(&format!("addr add {here}/30 dev {name}"));
        ip(&format!("link set {name} up"));
        ip(&format!("-n {name} addr add {address}/30 dev uplink"));
        ip(&format!("-n {name} link set uplink up"));
        island
    }

    /// Takes the far end of the link down, or up again.
    fn link(&self, state: &str) {
        matrix::count("partitions", usize::from(state == "down"));
        ip(&format!("-n {} link set uplink {state}", self.name));
    }
}

impl Drop for Island {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.name]).status();
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().expect("iproute2 is installed");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn deaths_on_this_side_are_made_up_for_when_it_heals() {
    let folder = tempfile::tempdir().unwrap();
    let island = Island::new();
    let options = Options { namespace: Some((island.name.clone(), island.address)), ..Options::default() };
    let nats = Nats::start_with(folder.path(), options).await.unwrap();
    let discovery = Discovery::watch(&nats).await.unwrap();
    let mut stage = Stage::at(&nats.url()).await;
    for worker in ["alpha", "beta"] {
        discovery.listed(worker, WorkerState::Serving).await.unwrap();
    }

    // For a moment: nobody notices but TCP.
    island.link("down");
    stage.kill("alpha").await;
    island.link("up");
    discovery.removed("alpha").await.unwrap();
    stage.daemon.no_trouble().await.unwrap();

    // For longer: the connection is given up.
    island.link("down");
    stage.daemon.trouble("unreachable").await.unwrap();
    assert_eq!(discovery.removals("beta"), 0);
    stage.kill("beta").await;
    island.link("up");
    discovery.removed("beta").await.unwrap();
    stage.daemon.no_trouble().await.unwrap();
    assert_eq!((discovery.removals("alpha"), discovery.removals("beta")), (1, 1));
    matrix::row(
        "partition: the link to NATS down for a moment and for longer, a worker killed each time",
        "each withdrawn once after it heals, nobody else",
        "each withdrawn once after it healed, the other worker stayed listed through the first",
    );
}
