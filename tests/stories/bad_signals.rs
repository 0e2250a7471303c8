//! Messages on the subject of migration signals that are none, or are about something else than what
//! is listed: none of them does anything, and each is counted by its reason.

use std::time::Duration;

use lastgasp_protocol::WorkerState;
use lastgasp_protocol::bounds::MAX_MESSAGE;
use lastgasp_tests::matrix;
use serde_json::{Value, json};

use crate::scene::{Scene, was_moved};

fn signal(node: &str, worker: &str, incarnation: &str, epoch: u64) -> Value {
    json!({"schema": 1, "node": node, "action": "move", "mode": "lost", "certificate": "01M",
        "workers": [{"worker": worker, "incarnation": incarnation, "epoch": epoch}],
        "cause": {"kind": "process_killed"}})
}

#[tokio::test]
async fn none_of_them_does_anything_and_all_are_counted() {
    let scene = Scene::new(&[]).await;
    let record = scene.discovery.listed("alpha", WorkerState::Serving).await.unwrap();
    let incarnation = record.incarnation.as_str();
    let asked = scene.ask_several().await;
    let client = scene.nats.client().await.unwrap();

    let right = signal("node-a", "alpha", incarnation, 0);
    let with = |field: &str, value: Value| {
        let mut signal = right.clone();
        signal[field] = value;
        signal.to_string().into_bytes()
    };
    let text = |value: Value| value.to_string().into_bytes();
    let many: Vec<Value> = (0..2000).map(|n| json!({"worker": format!("w{n}"), "incarnation": "x"})).collect();
    let deep = "[".repeat(100_000).into_bytes();
    let bad: Vec<(&str, Vec<u8>)> = vec![
        // An earlier listing of the same life, and things that were never listed.
        ("stale", text(right.clone())),
        ("other_incarnation", text(signal("node-a", "alpha", "another-life", 1))),
        ("unseen", text(signal("node-a", "nobody", "x", 1))),
        ("unknown_schema", with("schema", json!(2))),
        ("oversized", vec![b' '; MAX_MESSAGE + 1]),
        ("out_of_bounds", with("workers", json!(many))),
        ("malformed", b"not json".to_vec()),
        ("malformed", Vec::new()),
        ("malformed", b"{\"schema\":1,\"node\":\"\xff\xfe\"}".to_vec()),
        ("malformed", deep),
        ("malformed", with("schema", json!("1"))),
        ("malformed", with("action", json!("kill"))),
        ("malformed", with("node", json!("node-a\u{1b}[2J"))),
        ("malformed", with("workers", json!([{"worker": "x".repeat(129), "incarnation": "x"}]))),
        ("misplaced", text(signal("node-b", "alpha", incarnation, 1))),
    ];
    let mut reasons: Vec<&str> = bad.iter().map(|(reason, _)| *reason).collect();
    for (_, payload) in &bad {
        client.publish("lastgasp.v1.migrate.node-a", payload.clone().into()).await.unwrap();
    }
    client.publish("lastgasp.v1.migrate.node-b", text(signal("node-b", "alpha", incarnation, 1)).into()).await.unwrap();
    client.publish("lastgasp.v1.migrate.node-b", text(signal("node-a", "alpha", incarnation, 1)).into()).await.unwrap();
    client.flush().await.unwrap();
    reasons.extend(["unknown_node", "misplaced"]);

    for reason in &reasons {
        let count = reasons.iter().filter(|other| *other == reason).count();
        let line = format!("lastgasp_router_signals_total{{result=\"{reason}\"}}");
        scene.router.counts(&line, count as f64).await.unwrap();
    }
    // The subscription lives: what comes now is heard.
    let draining = json!({"schema": 1, "node": "node-a", "action": "drain", "certificate": "01N",
        "workers": [{"worker": "beta", "incarnation": "other"}], "cause": {"kind": "process_killed"}});
    let answer = tokio::time::timeout(
        Duration::from_secs(60),
        client.request("lastgasp.v1.migrate.node-a", text(draining).into()),
    );
    let answer: Value = serde_json::from_slice(&answer.await.unwrap().unwrap().payload).unwrap();
    assert_eq!(answer["phase"], "received");
    for asked in asked {
        assert!(!was_moved(&asked.finish().await));
    }
    assert_eq!((scene.discovery.removals("alpha"), scene.discovery.removals("beta")), (0, 0));
    matrix::count("bad inputs tried", reasons.len());
    matrix::row(
        "Migration signals that are none or do not match: stale, of another life, unseen, unknown node, future schema, oversized, not JSON, not UTF-8, on another node's subject",
        "nothing is withdrawn or moved, each is counted by its reason",
        "all counted; no stream moved; the next signal was heard",
    );
}
