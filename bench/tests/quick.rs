//! The benches run, and what they write is whole. What it says is not looked at: a busy machine would make
//! a liar of any bound.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

#[test]
fn every_bench_runs_and_writes_whole_distributions() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("all.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
    command.args(["death", "node", "--quick", "--out"]).arg(folder.path()).arg("--json").arg(&json);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let all: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(all["schema"], 1);
    let page = std::fs::read_to_string(folder.path().join("README.md")).unwrap();
    for bench in all["benches"].as_array().unwrap() {
        let name = bench["bench"].as_str().unwrap();
        let alone = std::fs::read(folder.path().join(format!("{name}.json"))).unwrap();
        assert_eq!(*bench, serde_json::from_slice::<Value>(&alone).unwrap(), "{name}.json");
        check(name, bench, &page);
        for plot in bench["sections"].as_array().unwrap().iter().flat_map(|one| one["plots"].as_array().unwrap()) {
            let file = format!("{name}-{}.svg", plot["name"].as_str().unwrap());
            let drawn = std::fs::read_to_string(folder.path().join(&file)).unwrap();
            assert!(drawn.contains("<polyline"), "{file} has no line");
            assert!(page.contains(&format!("({file})")), "the page does not show {file}");
        }
    }
    // Everybody has noticed every death.
    let death = &all["benches"][0]["sections"][0]["rows"];
    let rows = death.as_array().unwrap().iter().map(|row| (row["labels"][0].as_str(), row["labels"][1].as_str()));
    let rows: BTreeSet<_> = rows.collect();
    let (situations, watchers): (BTreeSet<_>, BTreeSet<_>) = rows.iter().copied().unzip();
    assert_eq!((situations.len(), watchers.len(), rows.len()), (5, 6, 3 * 6 + 2 * 5), "{rows:#?}");
}

fn check(name: &str, bench: &Value, page: &str) {
    assert_eq!(bench["quick"], true);
    assert_eq!(bench["load"].as_array().unwrap().len(), 2);
    for said in ["title", "command", "revision", "at"] {
        assert!(!bench[said].as_str().unwrap().is_empty(), "{name}: {said}");
        assert!(page.contains(bench[said].as_str().unwrap()), "{name}: {said} is not in the page");
    }
    for said in ["cpu", "kernel", "nats_server"] {
        assert!(!bench["machine"][said].as_str().unwrap().is_empty(), "{name}: {said}");
    }
    let sections = bench["sections"].as_array().unwrap();
    assert!(!sections.is_empty());
    for section in sections {
        let rows = section["rows"].as_array().unwrap();
        assert!(!rows.is_empty(), "{name}: {}", section["title"]);
        for row in rows {
            assert_eq!(row["labels"].as_array().unwrap().len(), section["labels"].as_array().unwrap().len(), "{row}");
            let values = &row["values"];
            let number = |key: &str| values[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"));
            assert!(number("n") >= 1.0 && values["unit"].is_string(), "{row}");
            assert!(number("p50") <= number("p99") && number("p99") <= number("max"), "{row}");
            assert_eq!(values["percentiles"].as_array().unwrap().len(), 101, "{row}");
        }
    }
}
