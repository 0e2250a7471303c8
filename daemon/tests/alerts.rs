//! The alerts in `deploy/` are about metrics that exist.

use std::collections::BTreeSet;
use std::path::Path;

use lastgasp::core::HeldBack;
use lastgasp::metrics::Metrics;

fn rules() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/prometheus/alerts.yaml");
    std::fs::read_to_string(path).expect("the rule file")
}

/// Every `lastgasp_…` in the file, in expressions and in what people read.
fn named(rules: &str) -> BTreeSet<String> {
    let words = rules.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("lastgasp_")).map(str::to_owned).collect()
}

#[test]
fn every_metric_in_the_rules_exists() {
    let known = Metrics::new().names();
    let named = named(&rules());
    assert!(named.len() > 5, "{named:?}");
    for name in named {
        let family = ["_bucket", "_count", "_sum"].iter().find_map(|suffix| name.strip_suffix(suffix));
        assert!(known.contains(&name) || family.is_some_and(|family| known.iter().any(|k| k == family)), "{name}");
    }
}

#[test]
fn every_way_of_losing_information_and_holding_back_has_an_alert() {
    let rules = rules();
    // Without a selector: each hop and kind, also those to come.
    assert!(rules.contains("increase(lastgasp_losses_total[10m]) > 0"));
    let reasons: Vec<&str> = HeldBack::ALL.map(HeldBack::as_str).into();
    assert!(rules.contains(&format!("lastgasp_notices_total{{kind=~\"{}\"}}", reasons.join("|"))), "{reasons:?}");
}

/// Each hop is explained to whoever is woken by it.
#[test]
fn every_hop_has_its_line_in_the_runbook() {
    let rules = rules();
    for loss in lastgasp::losses::Loss::all() {
        assert!(rules.contains(&format!("            {}: ", loss.hop())), "{}", loss.hop());
    }
}
