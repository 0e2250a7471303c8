//! The overlays and the chart.

use std::path::Path;

use clap::Parser;
use lastgasp::config::{Config, Mode, OnLost};
use lastgasp::supervisor::SidecarOptions;
use lastgasp_router::cli::Args as RouterArgs;
use serde_json::{Value, json};

use crate::render::{self, Objects, container, environment, helm, helm_refuses, kustomize, words};

const FULL: [&str; 5] = ["BPF", "PERFMON", "SYS_PTRACE", "DAC_READ_SEARCH", "KILL"];
const MINIMAL: [&str; 2] = ["BPF", "PERFMON"];

/// The configuration that the DaemonSet's container reads.
fn config(objects: &Objects) -> Config {
    let daemon = container(objects.the("DaemonSet"), "containers");
    let (config, warnings) =
        Config::read(Some((Path::new("lastgasp.toml"), objects.toml())), environment(daemon), &[]).unwrap();
    assert!(warnings.is_empty() && config.misfits().is_empty(), "{warnings:?} {:?}", config.misfits());
    assert_eq!(config.node.as_str(), "gpu-a");
    config
}

/// What every DaemonSet must have, whatever the tier.
fn assert_hardened(objects: &Objects, capabilities: &[&str]) {
    let daemon = objects.the("DaemonSet");
    let pod = &daemon["spec"]["template"]["spec"];
    let context = &container(daemon, "containers")["securityContext"];
    assert_eq!(pod["hostPID"], true);
    // Only what engines declare is a reason to be on the host's network.
    let host_network = if capabilities == FULL { json!(true) } else { Value::Null };
    assert_eq!((&pod["hostNetwork"], &pod["automountServiceAccountToken"]), (&host_network, &json!(false)));
    assert_eq!(pod["priorityClassName"], "system-node-critical");
    assert_eq!(words(&context["capabilities"]["drop"]), ["ALL"]);
    assert_eq!(words(&context["capabilities"]["add"]), capabilities);
    for (key, value) in [("privileged", false), ("allowPrivilegeEscalation", false), ("readOnlyRootFilesystem", true)] {
        assert_eq!(context[key], value, "{key}");
    }
    assert_eq!(context["seccompProfile"]["type"], "RuntimeDefault");
    assert_eq!(daemon["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"], "10%");
    for volume in pod["volumes"].as_array().unwrap() {
        assert_eq!(volume["hostPath"], Value::Null, "{volume}");
    }
}

fn assert_router(objects: &Objects) {
    let router = objects.of_kind("Deployment").into_iter().find(|one| one["metadata"]["name"] == "lastgasp-router");
    let router = router.expect("a router");
    let pod = &router["spec"]["template"]["spec"];
    let inside = container(router, "containers");
    assert_eq!((&pod["securityContext"]["runAsNonRoot"], &pod["hostPID"]), (&json!(true), &Value::Null));
    assert_eq!(words(&inside["securityContext"]["capabilities"]["drop"]), ["ALL"]);
    assert_eq!(inside["securityContext"]["readOnlyRootFilesystem"], true);
    let selector = &router["spec"]["selector"]["matchLabels"];
    let labels = &router["spec"]["template"]["metadata"]["labels"];
    let chosen = |by: &Value| by.as_object().unwrap().iter().all(|(key, value)| labels[key] == *value);
    assert!(chosen(selector) && chosen(&objects.the("Service")["spec"]["selector"]));
    assert!(chosen(&objects.the("PodDisruptionBudget")["spec"]["selector"]["matchLabels"]));
    // The hook and the streams end before kubelet's patience does.
    let grace = pod["terminationGracePeriodSeconds"].as_u64().unwrap();
    let hook = inside["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64().unwrap();
    let args = words(&inside["args"]);
    let streams = args.iter().find_map(|arg| arg.strip_prefix("--shutdown-timeout=")?.parse::<u64>().ok()).unwrap();
    assert!(hook + streams < grace, "{hook} + {streams} >= {grace}");
    RouterArgs::try_parse_from(std::iter::once("lastgasp-router").chain(args)).unwrap();
}

#[test]
fn streams_are_moved_only_where_the_operator_has_said_so() {
    let default = RouterArgs::parse_from(["lastgasp-router"]).migration_limit;
    for (path, key) in [
        ("deploy/kubernetes/router/router.yaml", "- --migration-limit="),
        ("deploy/helm/lastgasp/values.yaml", "migrationLimit: "),
    ] {
        let text = render::text(path);
        let said: Vec<u32> =
            text.lines().filter_map(|line| line.trim().strip_prefix(key)).map(|limit| limit.parse().unwrap()).collect();
        assert_eq!(said, [default], "{path}");
    }
}

#[test]
#[ignore = "installs packages from PyPI"]
fn the_minimal_overlay_has_two_capabilities_and_a_worker_by_its_command_line() {
    let objects = kustomize("deploy/kubernetes/overlays/minimal");
    assert_hardened(&objects, &MINIMAL);
    assert_router(&objects);
    let config = config(&objects);
    assert_eq!((config.mode, config.declare.enabled), (Mode::Observe, false));
    assert_eq!(config.workers[0].endpoint, "http://10.0.0.1:8000");
}

#[test]
#[ignore = "installs packages from PyPI"]
fn the_full_overlay_lets_pods_declare_themselves() {
    let objects = kustomize("deploy/kubernetes/overlays/full");
    assert_hardened(&objects, &FULL);
    assert_router(&objects);
    let config = config(&objects);
    assert_eq!((config.mode, config.declare.enabled), (Mode::Observe, true));
    assert_eq!((config.declare.on_lost, config.workers.len()), (OnLost::TerminateRoot, 0));
}

#[test]
#[ignore = "installs packages from PyPI"]
fn the_sidecar_overlay_needs_no_privilege_at_all() {
    let objects = kustomize("deploy/kubernetes/overlays/sidecar");
    assert!(objects.of_kind("DaemonSet").is_empty());
    assert_router(&objects);
    let engine = objects.of_kind("Deployment").into_iter().find(|one| one["metadata"]["name"] == "vllm").unwrap();
    let pod = &engine["spec"]["template"]["spec"];
    let sidecar = container(engine, "initContainers");
    assert_eq!((&pod["shareProcessNamespace"], &pod["hostPID"]), (&json!(true), &Value::Null));
    assert_eq!((&sidecar["restartPolicy"], &sidecar["args"][1]), (&json!("Always"), &json!("--sidecar")));
    assert_eq!(words(&sidecar["securityContext"]["capabilities"]["drop"]), ["ALL"]);
    assert_eq!(sidecar["securityContext"]["capabilities"]["add"], Value::Null);
    // A pidfd and a signal take the same user.
    for one in [sidecar, container(engine, "containers")] {
        assert_eq!(one["securityContext"]["runAsUser"], Value::Null);
    }
    let variables = environment(sidecar);
    let pod_name = variables.iter().find(|(name, _)| name == "LASTGASP_POD").unwrap().1.clone();
    let (mut config, warnings) = Config::read(None, variables, &[]).unwrap();
    SidecarOptions::new(&mut config, &pod_name, std::time::Duration::from_secs(1800)).unwrap();
    assert!(warnings.is_empty() && config.misfits().is_empty(), "{warnings:?} {:?}", config.misfits());
    assert_eq!((config.node.as_str(), config.mode), ("gpu-a/vllm-7f9c4", Mode::Observe));
    assert_eq!(config.workers[0].termination_grace.unwrap().as_secs(), pod["terminationGracePeriodSeconds"]);
}

#[test]
#[ignore = "installs packages from PyPI"]
fn the_chart_as_it_is_equals_the_full_overlay_where_it_counts() {
    let (chart, overlay) = (helm(&json!({})), kustomize("deploy/kubernetes/overlays/full"));
    assert_hardened(&chart, &FULL);
    assert_router(&chart);
    let both = [&chart, &overlay].map(|objects| container(objects.the("DaemonSet"), "containers"));
    for part in ["securityContext", "livenessProbe", "readinessProbe", "startupProbe", "resources", "args", "ports"] {
        assert_eq!(both[0][part], both[1][part], "{part}");
    }
    let (ours, theirs) = (config(&chart), config(&overlay));
    assert_eq!((ours.mode, ours.declare, ours.nats), (theirs.mode, theirs.declare, theirs.nats));
    assert!(chart.of_kind("PodMonitor").is_empty());
    assert_eq!(chart.of_kind("NetworkPolicy").len(), 2);
}

#[test]
#[ignore = "installs packages from PyPI"]
fn the_chart_with_everything_on() {
    let more = "[policy]\nhold_down_ms = 20000\n[[worker]]\nname = \"vllm\"\nengine = \"vllm\"\n\
                find = { cmdline = \"vllm serve\" }";
    let endpoint = json!({"name": "LASTGASP_WORKER_0_ENDPOINT", "value": "http://$(NODE_IP):8000"});
    let objects = helm(&json!({
        "mode": "enforce",
        "image": {"repository": "mirror/lastgasp", "tag": "x", "pullSecrets": ["pull"]},
        "nats": {"url": "tls://a:4222,tls://b:4222", "replicas": 3, "credentials": {"secret": "nats"}},
        "daemon": {
            "tier": "minimal", "declare": {"enabled": false}, "env": [endpoint], "nodeSelector": {"gpu": "true"},
            "extraConfig": more, "podAnnotations": {"a": "b"}
        },
        "router": {
            "strict": true, "extraArgs": ["--stall-timeout=30"], "replicas": 5, "priorityClassName": "high",
            "tolerations": [{"operator": "Exists"}], "service": {"type": "LoadBalancer", "annotations": {"a": "b"}}
        },
        "networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}], "routerFrom": [{"podSelector": {}}]},
        "monitoring": {"enabled": true, "labels": {"release": "prometheus"}}
    }));
    assert_hardened(&objects, &MINIMAL);
    assert_router(&objects);
    let config = config(&objects);
    assert_eq!((config.mode, config.replicas), (Mode::Enforce, 3));
    assert_eq!(config.nats.login.creds_file.as_deref(), Some(Path::new("/etc/lastgasp-nats/daemon.creds")));
    assert_eq!(config.policy.hold_down.as_secs(), 20);
    assert_eq!(config.workers[0].endpoint, "http://10.0.0.1:8000");
    for kind in ["PodMonitor", "ServiceMonitor"] {
        assert_eq!(objects.the(kind)["metadata"]["labels"]["release"], "prometheus");
    }
    // A port that is scraped by its name.
    let port = &objects.the("PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"];
    assert_eq!(*port, container(objects.the("DaemonSet"), "containers")["ports"][0]["name"]);
    let port = &objects.the("ServiceMonitor")["spec"]["endpoints"][0]["port"];
    assert_eq!(*port, objects.the("Service")["spec"]["ports"][0]["name"]);
}

/// The users of `deploy/nats/lastgasp.conf`: one of each node's name, and the routers'.
#[test]
#[ignore = "installs packages from PyPI"]
fn the_chart_with_a_user_for_each_node_takes_passwords() {
    let credentials = json!({
        "secret": "nats", "daemonUser": "$(LASTGASP_NODE)", "daemonKey": "$(LASTGASP_NODE)",
        "routerUser": "router", "routerKey": "router"
    });
    let objects = helm(&json!({"nats": {"credentials": credentials}}));
    let login = config(&objects).nats.login;
    assert_eq!((login.user.as_deref(), login.creds_file), (Some("gpu-a"), None));
    assert_eq!(login.password_file.as_deref(), Some(Path::new("/etc/lastgasp-nats/gpu-a")));
    // Which of its keys is this node's, the Secret's volume cannot say.
    let volumes = objects.the("DaemonSet")["spec"]["template"]["spec"]["volumes"].as_array().unwrap();
    let secret = &volumes.iter().find(|volume| volume["name"] == "nats").unwrap()["secret"];
    assert_eq!((&secret["secretName"], &secret["items"]), (&json!("nats"), &Value::Null));
    assert_router(&objects);
    let args = words(&container(objects.the("Deployment"), "containers")["args"]);
    assert!(args.contains(&"--nats-user=router"), "{args:?}");
    assert!(args.contains(&"--nats-password-file=/etc/lastgasp-nats/router"), "{args:?}");
}

#[test]
#[ignore = "installs packages from PyPI"]
fn the_chart_beside_sidecars_has_a_router_alone() {
    let objects = helm(&json!({"daemon": {"enabled": false}, "monitoring": {"enabled": true}}));
    assert_router(&objects);
    for kind in ["DaemonSet", "ConfigMap", "PodMonitor"] {
        assert!(objects.of_kind(kind).is_empty(), "{kind}");
    }
    assert_eq!(objects.of_kind("NetworkPolicy").len(), 1);
}

#[test]
#[ignore = "installs packages from PyPI"]
fn wrong_values_are_refused_and_say_what_is_allowed() {
    for (values, said) in [
        (json!({"mode": "maybe"}), "'observe', 'enforce'"),
        (json!({"deamon": {}}), "deamon"),
        (json!({"daemon": {"tier": "minimal"}}), "daemon.declare.enabled needs daemon.tier full"),
        (json!({"daemon": {"onLost": "kill"}}), "terminate-root"),
        (json!({"daemon": {"declare": {"cgroups": []}}}), "cgroups"),
        (json!({"daemon": {"capabilities": ["CAP_BPF"]}}), "BPF"),
        (json!({"nats": {"url": "nats.svc:4222"}}), "/nats/url"),
    ] {
        let refusal = helm_refuses(&values);
        assert!(refusal.contains(said), "{values}: {refusal}");
    }
}

/// Nothing may be set that is not shown with its default, and nothing shown that may not be set.
#[test]
#[ignore = "installs packages from PyPI"]
fn every_value_has_a_default_and_a_schema() {
    let chart = render::chart();
    fn both(values: &Value, schema: &Value, path: &str) {
        let Some(properties) = schema["properties"].as_object().filter(|_| schema["required"].is_array()) else {
            return;
        };
        for (key, schema) in properties {
            let value = values.get(key).unwrap_or_else(|| panic!("{path}{key} is not in values.yaml"));
            both(value, schema, &format!("{path}{key}."));
        }
        for key in values.as_object().unwrap().keys() {
            assert!(properties.contains_key(key), "{path}{key} is not in values.schema.json");
        }
    }
    let mut schema = chart["schema"].clone();
    // Helm's own.
    schema["properties"].as_object_mut().unwrap().remove("global");
    both(&chart["values"], &schema, "");
}

/// The component for the Prometheus operator, in an overlay as the page says.
#[test]
#[ignore = "installs packages from PyPI"]
fn the_monitoring_component_names_ports_that_exist() {
    let folder = tempfile::tempdir_in(render::workspace().join("target")).unwrap();
    let overlay = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: lastgasp\n\
                   resources: [../../deploy/kubernetes/overlays/full]\n\
                   components: [../../deploy/kubernetes/components/monitoring]\n";
    std::fs::write(folder.path().join("kustomization.yaml"), overlay).unwrap();
    let objects = kustomize(folder.path().to_str().unwrap());
    let daemon = container(objects.the("DaemonSet"), "containers");
    assert_eq!(objects.the("PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"], daemon["ports"][0]["name"]);
    assert_eq!(objects.the("ServiceMonitor")["spec"]["endpoints"][0]["port"], "http");
}
