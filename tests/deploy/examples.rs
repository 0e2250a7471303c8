//! Engines that declare themselves: what their pod templates say is what the daemon accepts.

use lastgasp::config::{self, DECLARATION};

use crate::render::{container, environment, file, kustomize, text};

const EXAMPLES: [&str; 4] = ["vllm-http", "vllm-grpc", "sglang", "generic"];

#[test]
#[ignore = "installs packages from PyPI"]
fn every_example_declares_a_worker_whose_times_fit() {
    assert_eq!(kustomize("deploy/examples").of_kind("Deployment").len(), EXAMPLES.len());
    for example in EXAMPLES {
        let objects = file(&format!("deploy/examples/{example}.yaml"));
        let engine = objects.the("Deployment");
        let inside = container(engine, "containers");
        let variables: Vec<(String, String)> = environment(inside)
            .into_iter()
            .filter(|(name, _)| DECLARATION.iter().any(|(variable, _)| variable == name))
            .collect();
        let worker = config::declared(&variables).unwrap_or_else(|problems| panic!("{example}: {problems:?}"));
        assert!(worker.misfits().is_empty(), "{example}: {:?}", worker.misfits());
        assert_eq!(worker.name.as_str(), "vllm-7f9c4");
        let grace = &engine["spec"]["template"]["spec"]["terminationGracePeriodSeconds"];
        assert_eq!(*grace, worker.termination_grace.unwrap().as_secs(), "{example}");
        let ports: Vec<u64> =
            inside["ports"].as_array().unwrap().iter().map(|port| port["containerPort"].as_u64().unwrap()).collect();
        assert!(ports.contains(&u64::from(worker.port)), "{example}: {ports:?}");
        let health = worker.health.grpc.or(worker.health.http).expect("an example has a health address");
        assert!(ports.iter().any(|port| health.contains(&format!("10.0.0.7:{port}"))), "{example}: {health}");
        // What is passed on the command line is what was declared.
        let command = inside["command"].to_string();
        if let Some(timeout) = worker.shutdown_timeout {
            assert!(command.contains(&format!(r#""--shutdown-timeout","{}""#, timeout.as_secs())), "{command}");
        }
        assert!(command.contains(&worker.port.to_string()), "{command}");
    }
}

/// Paths, values and settings that the page tells people to type.
#[test]
#[ignore = "installs packages from PyPI"]
fn the_getting_started_page_names_what_exists() {
    let page = text("docs/getting-started-kubernetes.md");
    let mut paths = 0;
    for word in page.split(|c: char| c.is_whitespace() || "`()\"".contains(c)) {
        let word = word.trim_end_matches(['.', ',', ':', ';']);
        if word.starts_with("deploy/") && !word.contains('<') {
            assert!(crate::render::workspace().join(word).exists(), "{word}");
            paths += 1;
        }
    }
    assert!(paths > 5, "{paths} paths");
    let observe = page.find("observe").unwrap();
    let enforce = page.find("enforce").unwrap();
    assert!(observe < enforce, "it begins with observe");
}
