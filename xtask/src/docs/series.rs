//! Metrics that are exported, and metrics that alerts and dashboards ask for.

use std::fs;

use lastgasp_process::catalogue::{Family, Label};
use serde_json::Value;

use super::page::{Page, anchor};
use crate::tools;

/// A metric as it is exported.
pub(super) struct Series {
    pub(super) name: String,
    pub(super) help: String,
    pub(super) kind: &'static str,
    pub(super) labels: Vec<Label>,
    /// `daemon` or `router`.
    pub(super) by: &'static str,
}

impl Series {
    /// All that daemon and router export.
    pub(super) fn exported() -> Vec<Self> {
        let daemon = lastgasp::metrics::Metrics::new().families().into_iter().map(|family| {
            let Family { name, help, kind, labels } = family;
            Self { name, help, kind, labels, by: "daemon" }
        });
        let router = lastgasp_router::metrics::Metrics::default().families().into_iter().map(|family| {
            let Family { name, help, kind, labels } = family;
            Self { name, help, kind, labels, by: "router" }
        });
        daemon.chain(router).collect()
    }
}

/// A metric that an expression names, with the labels that it selects by.
#[derive(Debug, PartialEq)]
struct Asked<'a> {
    name: &'a str,
    /// Label, operator, value.
    selectors: Vec<(&'a str, &'a str, &'a str)>,
}

/// Labels that a scrape adds, and Prometheus itself.
const OF_SCRAPES: [&str; 6] = ["instance", "job", "le", "namespace", "pod", "node"];

fn asked(expression: &str) -> Vec<Asked<'_>> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let mut rest = expression;
    while let Some(begin) = rest.find("lastgasp_") {
        let preceded = rest[..begin].ends_with(word);
        rest = &rest[begin..];
        let end = rest.find(|c| !word(c)).unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        rest = after;
        let inside = rest.strip_prefix('{').and_then(|rest| rest.split_once('}')).map_or("", |(inside, _)| inside);
        if !preceded {
            found.push(Asked { name, selectors: selectors(inside) });
        }
    }
    found
}

fn selectors(inside: &str) -> Vec<(&str, &str, &str)> {
    // No value here holds a comma.
    let parts = inside.split(',').map(str::trim).filter(|part| !part.is_empty());
    let selector = |part| {
        let part: &str = part;
        let operator =
            ["=~", "!~", "!=", "="].into_iter().find(|operator| part.contains(operator)).expect("an operator");
        let (label, value) = part.split_once(operator).expect("it contains it");
        (label.trim(), operator, value.trim().trim_matches('"'))
    };
    parts.map(selector).collect()
}

/// Labels after `by (`, `on (` and the like.
fn grouped(expression: &str) -> Vec<&str> {
    let words = ["by (", "without (", "on (", "ignoring (", "group_left ("];
    let lists = words.iter().flat_map(|word| expression.split(word).skip(1));
    let labels = lists.flat_map(|rest| rest.split(')').next().unwrap_or_default().split(','));
    labels.map(str::trim).filter(|label| !label.is_empty()).collect()
}

/// What is wrong with the metrics that an expression names.
fn wrong(expression: &str, exported: &[Series]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut labels: Vec<&str> = OF_SCRAPES.to_vec();
    for Asked { name, selectors } in asked(expression) {
        let family = |suffix| exported.iter().find(|series| Some(series.name.as_str()) == name.strip_suffix(suffix));
        let histogram = ["_bucket", "_count", "_sum"].into_iter().find_map(family).filter(|s| s.kind == "histogram");
        let Some(series) =
            exported.iter().find(|series| series.name == name && series.kind != "histogram").or(histogram)
        else {
            wrong.push(format!("{name} is not exported"));
            continue;
        };
        labels.extend(series.labels.iter().map(|label| label.name));
        for (label, operator, value) in selectors {
            if OF_SCRAPES.contains(&label) {
                continue;
            }
            let Some(known) = series.labels.iter().find(|known| known.name == label) else {
                wrong.push(format!("{name} has no label {label}"));
                continue;
            };
            {
                let values: Vec<&str> = if operator.contains('~') { value.split('|').collect() } else { vec![value] };
                let unknown = values.into_iter().filter(|value| !value.starts_with('$') && !known.may_be(value));
                wrong.extend(unknown.map(|value| format!("{label} of {name} is never {value}")));
            }
        }
    }
    let unknown = grouped(expression).into_iter().filter(|label| !labels.contains(label));
    wrong.extend(unknown.map(|label| format!("nothing here has a label {label}")));
    wrong
}

const ALERTS: &str = "deploy/prometheus/alerts.yaml";
const ALERT_TESTS: &str = "deploy/prometheus/alerts.test.yaml";
const DASHBOARDS: [&str; 2] = ["deploy/grafana/fleet.json", "deploy/grafana/node.json"];

/// Alerts with their expressions: this file's own layout, not YAML at large.
fn alerts(text: &str) -> Vec<(&str, String)> {
    let blocks = text.split("      - alert: ").skip(1);
    let alert = |block| {
        let block: &str = block;
        let name = block.lines().next().expect("a name").trim();
        let from = block.find("\n        expr:").unwrap_or_else(|| panic!("{name} has no expr"));
        let lines = block[from + 1..].lines();
        let first = lines.clone().next().expect("expr").trim_start_matches("        expr:").trim().trim_matches('|');
        let more = lines.skip(1).take_while(|line| line.starts_with("          ")).map(str::trim);
        (name, std::iter::once(first).chain(more).collect::<Vec<_>>().join(" "))
    };
    blocks.map(alert).collect()
}

#[test]
fn alerts_ask_for_what_is_exported() {
    let text = fs::read_to_string(tools::workspace().join(ALERTS)).expect("the rule file");
    let exported = Series::exported();
    let alerts = alerts(&text);
    assert!(alerts.len() > 8, "{alerts:?}");
    for (name, expression) in alerts {
        assert_eq!(wrong(&expression, &exported), Vec::<String>::new(), "{name}: {expression}");
        assert!(!asked(&expression).is_empty(), "{name}: {expression}");
    }
    // Also what people read.
    let buckets =
        [lastgasp_protocol::WORKERS_BUCKET, lastgasp_protocol::NODES_BUCKET, lastgasp_protocol::ROUTERS_BUCKET];
    for Asked { name, .. } in asked(&text).into_iter().filter(|asked| !buckets.contains(&asked.name)) {
        let known = exported.iter().any(|series| name.starts_with(&series.name));
        assert!(known, "{name}");
    }
}

#[test]
fn every_alert_has_its_section_in_the_runbook_and_the_other_way_round() {
    let text = fs::read_to_string(tools::workspace().join(ALERTS)).expect("the rule file");
    let page = Page::read("docs/operations.md");
    let mut sections: Vec<String> = page
        .anchors()
        .into_iter()
        .filter(|heading| heading.starts_with("lastgasp") && !heading.contains('-'))
        .collect();
    for block in text.split("      - alert: ").skip(1) {
        let name = block.lines().next().expect("a name").trim();
        let url = block.split("runbook_url: ").nth(1).and_then(|rest| rest.lines().next());
        let expected = format!("{}/blob/main/docs/operations.md#{}", env!("CARGO_PKG_REPOSITORY"), anchor(name));
        assert_eq!(url, Some(expected.as_str()), "{name}");
        let before = sections.len();
        sections.retain(|section| *section != anchor(name));
        assert_eq!(sections.len() + 1, before, "docs/operations.md: a section {name}");
    }
    assert!(sections.is_empty(), "sections for alerts that do not exist: {sections:?}");
}

#[test]
fn every_alert_is_seen_to_fire() {
    let rules = fs::read_to_string(tools::workspace().join(ALERTS)).expect("the rule file");
    let tests = fs::read_to_string(tools::workspace().join(ALERT_TESTS)).expect("its tests");
    for (name, _) in alerts(&rules) {
        let fires = [format!("alertname=\"{name}\""), format!("alertname: {name}\n        exp_alerts")];
        assert!(fires.iter().any(|text| tests.contains(text)), "{ALERT_TESTS}: nothing makes {name} fire");
    }
}

#[test]
fn dashboards_ask_for_what_is_exported() {
    let exported = Series::exported();
    for path in DASHBOARDS {
        let dashboard = dashboard(path);
        let mut count = 0;
        for (panel, expression) in expressions(&dashboard) {
            count += 1;
            assert_eq!(wrong(expression, &exported), Vec::<String>::new(), "{path}: {panel}: {expression}");
            assert!(!asked(expression).is_empty(), "{path}: {panel}: {expression}");
        }
        assert!(count > 8, "{path}: {count}");
    }
}

/// Each metric is on a dashboard: what nobody looks at need not be exported.
#[test]
fn everything_exported_can_be_seen() {
    let shown: Vec<Value> = DASHBOARDS.map(dashboard).into();
    let expressions: Vec<&str> = shown.iter().flat_map(expressions).map(|(_, expression)| expression).collect();
    for series in Series::exported() {
        let seen = expressions.iter().flat_map(|expression| asked(expression)).any(|asked| {
            asked.name == series.name || (series.kind == "histogram" && asked.name.starts_with(&series.name))
        });
        assert!(seen, "no panel shows {}", series.name);
    }
}

/// What Grafana would not draw, or would draw wrongly without a word.
#[test]
fn dashboards_are_whole() {
    for path in DASHBOARDS {
        let dashboard = dashboard(path);
        let text = dashboard.to_string();
        assert!(!text.contains("://"), "{path} loads something from elsewhere");
        assert!(dashboard["id"].is_null() && dashboard["__inputs"].is_null(), "{path} belongs to one Grafana");
        for field in ["uid", "title"] {
            assert!(dashboard[field].as_str().is_some_and(|text| !text.is_empty()), "{path}: {field}");
        }
        let variables = dashboard["templating"]["list"].as_array().expect("variables");
        assert_eq!(
            (&variables[0]["name"], &variables[0]["type"]),
            (&"datasource".into(), &"datasource".into()),
            "{path}"
        );
        let mut names: Vec<&str> = variables.iter().filter_map(|variable| variable["name"].as_str()).collect();
        names.extend(["__rate_interval", "__range"]);
        let panels = dashboard["panels"].as_array().expect("panels");
        let mut taken: Vec<[u64; 4]> = Vec::new();
        let mut ids = Vec::new();
        for panel in panels {
            let title = panel["title"].as_str().unwrap_or_else(|| panic!("{path}: a panel without a title"));
            let id = panel["id"].as_u64().unwrap_or_else(|| panic!("{path}: {title}: no id"));
            assert!(!ids.contains(&id), "{path}: {title}: id {id} twice");
            ids.push(id);
            let [x, y, w, h] = ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().expect("a place"));
            assert!(x + w <= 24 && w > 0 && h > 0, "{path}: {title} stands out");
            let over = taken.iter().any(|[x2, y2, w2, h2]| x < x2 + w2 && *x2 < x + w && y < y2 + h2 && *y2 < y + h);
            assert!(!over, "{path}: {title} lies over another");
            taken.push([x, y, w, h]);
            if panel["type"] == "row" {
                continue;
            }
            let known = ["stat", "timeseries", "state-timeline", "table", "bargauge", "heatmap"];
            assert!(known.iter().any(|kind| panel["type"] == *kind), "{path}: {title}: {}", panel["type"]);
            assert!(
                panel["description"].as_str().is_some_and(|text| text.len() > 10),
                "{path}: {title}: no description"
            );
            assert_eq!(panel["datasource"]["uid"], "${datasource}", "{path}: {title}");
            let targets = panel["targets"].as_array().unwrap_or_else(|| panic!("{path}: {title}: no query"));
            for (at, target) in targets.iter().enumerate() {
                assert_eq!(target["refId"], ["A", "B", "C"][at], "{path}: {title}");
                let expression = target["expr"].as_str().expect("an expression");
                for variable in expression.split('$').skip(1) {
                    let name = variable.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
                    assert!(names.contains(&name), "{path}: {title}: no variable {name}");
                }
            }
        }
    }
}

fn dashboard(path: &str) -> Value {
    let text = fs::read_to_string(tools::workspace().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Every expression with the title of its panel; those of variables too.
fn expressions(dashboard: &Value) -> Vec<(&str, &str)> {
    let panels = dashboard["panels"].as_array().into_iter().flatten().flat_map(|panel| {
        let title = panel["title"].as_str().unwrap_or_default();
        panel["targets"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(move |target| Some((title, target["expr"].as_str()?)))
    });
    let variables = dashboard["templating"]["list"].as_array().into_iter().flatten();
    let asked =
        variables.filter_map(|variable| Some((variable["name"].as_str()?, variable["query"]["query"].as_str()?)));
    panels.chain(asked).collect()
}

/// Prometheus itself reads the rules, runs their tests, and reads every expression of the dashboards.
#[test]
#[ignore = "needs promtool: cargo xtask test fetches it"]
fn promtool_agrees() {
    let promtool = std::env::var_os(crate::debian::PROMTOOL.variable).unwrap_or_else(|| "promtool".into());
    let run = |arguments: &[&std::ffi::OsStr]| {
        let output = std::process::Command::new(&promtool).args(arguments).current_dir(tools::workspace()).output();
        let output = output.unwrap_or_else(|error| panic!("{}: {error}", promtool.display()));
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "promtool {arguments:?}\n{said}");
    };
    run(&["check".as_ref(), "rules".as_ref(), ALERTS.as_ref()]);
    run(&["test".as_ref(), "rules".as_ref(), ALERT_TESTS.as_ref()]);
    let mut rules = "groups:\n  - name: panels\n    rules:\n".to_owned();
    for path in DASHBOARDS {
        let dashboard = dashboard(path);
        for (number, (_, expression)) in expressions(&dashboard).into_iter().enumerate() {
            // The query of a variable is a call of Grafana's own.
            if !expression.starts_with("label_values(") {
                let filled = expression.replace("$__rate_interval", "1m").replace("$__range", "1h");
                let name = path.split(['/', '.']).nth(2).expect("deploy/grafana/NAME.json");
                rules.push_str(&format!("      - record: {name}_{number}\n        expr: {}\n", Value::from(filled)));
            }
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("panels.yaml");
    fs::write(&file, rules).expect("a file in it");
    run(&["check".as_ref(), "rules".as_ref(), file.as_ref()]);
}

#[test]
fn what_is_not_exported_is_found() {
    let exported = Series::exported();
    let found = |expression| wrong(expression, &exported).join("; ");
    assert_eq!(found("rate(lastgasp_deaths_totals[5m])"), "lastgasp_deaths_totals is not exported");
    assert_eq!(found("lastgasp_deaths_total{reason=\"x\"}"), "lastgasp_deaths_total has no label reason");
    assert_eq!(found("lastgasp_deaths_total{cause=~\"hung|dead\"}"), "cause of lastgasp_deaths_total is never dead");
    assert_eq!(found("sum by (kind) (lastgasp_deaths_total)"), "nothing here has a label kind");
    assert_eq!(
        found("lastgasp_evidence_to_withdrawn_seconds"),
        "lastgasp_evidence_to_withdrawn_seconds is not exported"
    );
    assert_eq!(found("sum by (cause, le) (lastgasp_deaths_total{instance=~\"$x\", cause=\"hung\"})"), "");
    assert_eq!(
        alerts("      - alert: A\n        expr: |\n          a\n          + b\n        for: 1m\n"),
        [("A", " a + b".to_owned())]
    );
}
