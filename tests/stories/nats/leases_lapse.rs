//! Leases of nodes lapse at a real server: one of three, then all of them. One router was there
//! before, one starts after it.

use std::collections::BTreeSet;
use std::time::Duration;

use lastgasp_protocol::kv::{Bucket, Expect};
use lastgasp_protocol::{NODES_BUCKET, NodeLease, WORKERS_BUCKET};
use lastgasp_tests::engine::Engine;
use lastgasp_tests::matrix;
use lastgasp_tests::model::Endpoint;
use lastgasp_tests::nats::Nats;
use lastgasp_tests::process::GIVE_UP;
use lastgasp_tests::router::Router;
use serde_json::json;
use tokio::task::JoinHandle;

use super::stage::{ENGINE, SERVING};

const NODES: [&str; 3] = ["a", "b", "c"];

/// As the contract has it: twelve times as long as it takes to the next renewal, so that it does not lapse on a
/// busy machine.
const TTL: Duration = Duration::from_secs(6);

/// Keeps a node's lease for as long as its daemon would.
fn daemon(bucket: &Bucket, node: &'static str) -> JoinHandle<()> {
    let bucket = bucket.clone();
    tokio::spawn(async move {
        let node_name = node.parse().unwrap();
        let (machine_id, boot_id) = (node.to_owned(), node.to_owned());
        let lease = NodeLease { schema: 1, node: node_name, machine_id, boot_id, pid: 1, start_ticks: 1 }.to_json();
        let mut expect = Expect::Absent;
        loop {
            let revision = bucket.put(node, lease.clone().into(), expect, TTL).await.unwrap();
            expect = Expect::Revision(revision);
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    })
}

/// The nodes that forty requests go to: a node that is used is among them but once in ten million times.
async fn used(router: &Router) -> BTreeSet<String> {
    let body = json!({"model": "tiny", "prompt": "hello", "max_tokens": 1, "ignore_eos": true});
    let mut nodes = BTreeSet::new();
    for _ in 0..40 {
        let answer = router.stream(Endpoint::Completions, &body).await.unwrap().finish().await.unwrap();
        let worker = answer.worker.expect("the router says which worker it chose");
        nodes.insert(worker.split('/').next().expect("<node>/<worker>").to_owned());
    }
    nodes
}

/// Waits until forty requests go to these nodes and no others.
async fn uses(router: &Router, nodes: &[&str]) {
    let wanted: BTreeSet<String> = nodes.iter().map(ToString::to_string).collect();
    let right = async { while used(router).await != wanted {} };
    tokio::time::timeout(GIVE_UP, right).await.unwrap_or_else(|_| panic!("{nodes:?} were not those in use"));
}

#[tokio::test]
async fn one_costs_its_workers_new_work_and_all_together_cost_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let nats = Nats::start(folder.path()).await.unwrap();
    let context = nats.jetstream().await.unwrap();
    let engine = Engine::start("engine", &ENGINE, folder.path()).await.unwrap();
    let workers = Bucket::open(&context, WORKERS_BUCKET, 1).await.unwrap();
    let nodes = Bucket::open(&context, NODES_BUCKET, 1).await.unwrap();
    let [a, b, c] = NODES.map(|node| daemon(&nodes, node));
    for node in NODES {
        let record = json!({"schema": 1, "node": node, "worker": "w", "incarnation": "1", "epoch": 1, "lease": "node",
            "state": "serving", "writer": "daemon", "engine": "vllm", "models": ["tiny"], "endpoint": engine.endpoint()});
        let record = serde_json::to_vec(&record).unwrap();
        workers.put(&format!("{node}.w"), record.into(), Expect::Absent, Duration::from_secs(3600)).await.unwrap();
    }
    let router = Router::start("router-1", &nats.url(), 0, folder.path()).await.unwrap();
    router.shows(SERVING, 3.0).await.unwrap();
    uses(&router, &NODES).await;

    // Not believed for two TTLs after the router's own connection, then it is.
    a.abort();
    uses(&router, &["b", "c"]).await;

    // A router that starts after the lapse sees a record without a lease, and believes it as late.
    let late = Router::start("router-2", &nats.url(), 0, folder.path()).await.unwrap();
    uses(&late, &NODES).await;
    uses(&late, &["b", "c"]).await;

    // The rest goes together: that was not the nodes.
    b.abort();
    c.abort();
    for node in ["b", "c"] {
        let lapsed = async {
            while nodes.read(node).await.unwrap().is_some_and(|entry| !entry.payload.is_empty()) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(GIVE_UP, lapsed).await.expect("the server lets it lapse");
    }
    // The first is still avoided: it went alone. Had they believed that the others are gone too, all
    // three would be used alike.
    for router in [&router, &late] {
        uses(router, &["b", "c"]).await;
        assert_eq!(used(router).await, BTreeSet::from(["b".to_owned(), "c".to_owned()]));
    }
    matrix::row(
        "the lease of one of three nodes lapses, then those of all; a router starts after the first",
        "its workers get no new work; the late router learns it too; when the others lapse together they are not avoided for it",
        "no new work for the one, by both routers; work for the others, and for them alone, after all had lapsed",
    );
}
