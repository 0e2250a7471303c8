//! The alerts in `deploy/` cover every loss, and say what it is. That they are about metrics that
//! exist is checked in `xtask/src/docs/series.rs`.

use lastgasp_protocol::ClosedName as _;
use std::path::Path;
use strum::VariantArray as _;

use lastgasp::core::HeldBack;

fn rules() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/prometheus/alerts.yaml");
    std::fs::read_to_string(path).expect("the rule file")
}

#[test]
fn every_way_of_losing_information_and_holding_back_has_an_alert() {
    let rules = rules();
    // Without a selector: each hop and kind, also those to come.
    assert!(rules.contains("increase(lastgasp_losses_total[10m]) > 0"));
    let reasons: Vec<&str> = HeldBack::VARIANTS.iter().map(HeldBack::as_str).collect();
    assert!(rules.contains(&format!("lastgasp_warnings_total{{kind=~\"{}\"}}", reasons.join("|"))), "{reasons:?}");
}

/// Each hop is explained to whoever is woken by it.
#[test]
fn every_hop_has_its_line_in_the_runbook() {
    let rules = rules();
    for loss in lastgasp::losses::Loss::all() {
        assert!(rules.contains(&format!("            {}: ", loss.hop())), "{}", loss.hop());
    }
}
