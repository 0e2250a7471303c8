//! What a person sees who made a mistake, word for word.

use std::path::Path;
use std::time::Duration;
use strum::VariantArray as _;

use lastgasp_protocol::Writer;

use super::*;
use crate::core::HealthRole;

fn read(text: &str, variables: &[(&str, &str)]) -> Result<(Config, Vec<Problem>), ConfigError> {
    let variables = variables.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
    Config::read(Some((Path::new("gpu.toml"), text)), variables, &[])
}

#[track_caller]
fn config(text: &str, variables: &[(&str, &str)]) -> Config {
    read(text, variables).unwrap_or_else(|error| panic!("{error}")).0
}

/// What is printed, without the worker that every text ends with.
#[track_caller]
fn refused(text: &str) -> String {
    refused_with(text, &[])
}

#[track_caller]
fn refused_with(text: &str, variables: &[(&str, &str)]) -> String {
    match read(text, variables) {
        Ok(_) => panic!("accepted: {text}"),
        Err(error) => error.to_string(),
    }
}

const WORKER: &str = r#"
[[worker]]
name = "vllm-0"
engine = "vllm"
endpoint = "http://127.0.0.1:8000"
"#;

const EVERYTHING: &str = r#"
node = "gpu-a/pod-7"
mode = "observe"
[nats]
url = "nats://a:4222, tls://b:4222"
user = "lastgasp"
password_file = "/run/secrets/nats"
replicas = 3
[ebpf]
enabled = "required"
[status]
socket = "/tmp/lg.sock"
listen = "[::1]:0"
[lease]
ttl_s = 3
[policy]
hold_down_ms = 0
soft_withdrawals_per_minute = 0
[[worker]]
name = "vllm-0"
engine = "vllm"
find = { port = 8000 }
writer = "worker"
endpoint = "http://[fd00::7]:8000"
models = ["Qwen/Qwen3-0.6B"]
labels = { zone = "a" }
drain_window_ms = 30_000
on_not_serving = "lost"
critical = ["*::MyRole"]
[worker.health]
grpc = "http://127.0.0.1:50051"
services = [{ name = "", role = "liveness" }, { name = "vllm.Inference", role = "readiness" }]
check_interval_ms = 100
check_timeout_ms = 100
hang_window_ms = 1000
[[worker]]
name = "sglang-0"
engine = "sglang"
find.pid_file = "/run/sglang.pid"
endpoint = "http://127.0.0.1:30000"
health = { http = "http://127.0.0.1:30000/ready" }
"#;

#[test]
fn a_worker_needs_only_a_name_and_an_endpoint() {
    let config = config("node = 'gpu-a'\n[[worker]]\nname = 'w'\nendpoint = 'http://10.0.0.7:8000/'", &[]);
    assert_eq!((config.node.as_str(), config.mode, config.ebpf.enabled), ("gpu-a", Mode::Enforce, EbpfMode::Auto));
    assert_eq!(config.nats.url, "nats://127.0.0.1:4222");
    assert_eq!(config.status.listen.to_string(), "127.0.0.1:9464");
    assert_eq!((config.lease_ttl, config.replicas), (Duration::from_secs(6), 1));
    let [worker] = &config.workers[..] else { panic!("{:?}", config.workers) };
    assert_eq!(
        (worker.endpoint.as_str(), worker.port, worker.engine.as_str()),
        ("http://10.0.0.7:8000", 8000, "generic")
    );
    assert_eq!((&worker.find, worker.writer), (&Find::Env("w".into()), Writer::Daemon));
    assert_eq!((worker.drain_window, worker.on_not_serving), (Duration::from_secs(5), OnNotServing::Drain));
    assert_eq!(worker.health.services, [Service { name: String::new(), role: HealthRole::Liveness }]);
    assert_eq!(worker.health.hang_window, Duration::from_secs(10));
}

#[test]
fn everything_can_be_said() {
    let config = config(EVERYTHING, &[]);
    assert_eq!((config.mode, config.ebpf.enabled, config.replicas), (Mode::Observe, EbpfMode::Required, 3));
    assert_eq!(config.nats.login.password_file.as_deref(), Some(Path::new("/run/secrets/nats")));
    let [vllm, sglang] = &config.workers[..] else { panic!("{:?}", config.workers) };
    assert_eq!((&vllm.find, vllm.writer, vllm.port), (&Find::Port(8000), Writer::Worker, 8000));
    assert_eq!((vllm.labels["zone"].as_str(), vllm.models[0].as_str()), ("a", "Qwen/Qwen3-0.6B"));
    assert!(vllm.profile.role("x::MyRole", "").is_some() && vllm.profile.role("VLLM::EngineCor", "").is_some());
    assert_eq!(vllm.health.services[1], Service { name: "vllm.Inference".into(), role: HealthRole::Readiness });
    assert_eq!(vllm.drain_window, Duration::from_secs(30));
    assert_eq!(sglang.find, Find::PidFile("/run/sglang.pid".into()));
    assert_eq!(sglang.health.http.as_deref(), Some("http://127.0.0.1:30000/ready"));
}

#[test]
fn an_unknown_engine() {
    assert_eq!(
        refused("[[worker]]\nname = \"vllm-0\"\nengine = \"vlm\"\nendpoint = \"http://127.0.0.1:8000\"\n"),
        r#"gpu.toml:3: worker[0].engine: "vlm" is not an engine profile; allowed: vllm, sglang, trtllm, generic (did you mean "vllm"?)"#
    );
}

#[test]
fn a_key_with_a_slip_of_the_finger() {
    assert_eq!(
        refused(&format!("[lease]\nttl_s = 6\n[status]\n\nlisten_on = \"127.0.0.1:1\"\nsokcet = \"/x\"{WORKER}")),
        "gpu.toml:5: status.listen_on: is not a setting; known here: socket, listen, page (did you mean \"listen\"?)\n\
         gpu.toml:6: status.sokcet: is not a setting; known here: socket, listen, page (did you mean \"socket\"?)"
    );
    assert_eq!(
        refused(&format!("nat.url = \"nats://h:1\"{WORKER}")),
        "gpu.toml:1: nat: is not a setting; known here: node, mode, priority, nats, ebpf, status, lease, policy, declare, notify, worker (did you mean \"nats\"?)"
    );
}

#[test]
fn a_value_of_another_type() {
    assert_eq!(
        refused(&format!("[lease]\nttl_s = \"6s\"{WORKER}drain_window_ms = 2.5\nmodels = \"m\"\n")),
        "gpu.toml:2: lease.ttl_s: the text \"6s\" does not fit; allowed: a whole number from 1 to 3600 s\n\
         gpu.toml:7: worker[0].drain_window_ms: the fraction 2.5 does not fit; allowed: a whole number from 0 to 86400000 ms\n\
         gpu.toml:8: worker[0].models: the text \"m\" does not fit; allowed: a list of texts"
    );
}

#[test]
fn a_number_out_of_range() {
    assert_eq!(
        refused(&format!("lease.ttl_s = 0{WORKER}find.port = 70000\nhealth.check_interval_ms = -1\n")),
        "gpu.toml:1: lease.ttl_s: 0 is out of range; allowed: a whole number from 1 to 3600 s\n\
         gpu.toml:6: worker[0].find.port: 70000 is out of range; allowed: a whole number from 1 to 65535\n\
         gpu.toml:7: worker[0].health.check_interval_ms: -1 is out of range; allowed: a whole number from 50 to 3600000 ms"
    );
}

#[test]
fn a_worker_without_what_it_needs() {
    assert_eq!(
        refused("mode = \"observe\"\n\n[[worker]]\nengine = \"vllm\"\n"),
        "gpu.toml:3: worker[0].name: is missing; set it to a name that is unique on this node, as \"vllm-0\"\n\
         gpu.toml:3: worker[0].endpoint: is missing; set it to the URL for routers, as \"http://10.0.0.7:8000\""
    );
}

#[test]
fn two_workers_of_one_name() {
    assert_eq!(
        refused(&format!("{WORKER}{WORKER}")),
        "gpu.toml:8: worker[1].name: \"vllm-0\" is the name of worker[0] too; give each worker its own"
    );
}

#[test]
fn endpoints_that_nobody_can_use() {
    for (endpoint, wrong) in [
        ("10.0.0.7:8000", "\"10.0.0.7:8000\" does not begin with http://"),
        ("http://10.0.0.7", "\"http://10.0.0.7\" has no port"),
        ("http://10.0.0.7:0", "\"http://10.0.0.7:0\" has port 0"),
        ("http://10.0.0.7:8000/v1", "\"http://10.0.0.7:8000/v1\" has a path"),
        ("http://me:secret@h:1", "holds credentials, which would be published"),
        ("https://h:1", "\"https://h:1\" asks for TLS, which workers on this node are not asked for"),
        ("http://h:1 ", "\"http://h:1 \" is not a URL"),
        ("", "\"\" is not a URL"),
    ] {
        assert_eq!(
            refused(&format!("[[worker]]\nname = \"w\"\nendpoint = \"{endpoint}\"\n")),
            format!("gpu.toml:3: worker[0].endpoint: {wrong}; allowed: \"http://host:port\"")
        );
    }
    assert_eq!(
        refused("[[worker]]\nname = \"w\"\nendpoint = \"http://0.0.0.0:8000\"\n"),
        "gpu.toml:3: worker[0].endpoint: 0.0.0.0 is where a server listens, not where routers reach it; name an address of this node"
    );
}

#[test]
fn two_ways_to_find_a_process() {
    assert_eq!(
        refused(&format!("{WORKER}find = {{ pid = 7, port = 8000 }}\n")),
        "gpu.toml:6: worker[0].find.port: is one way too many beside find.pid; keep one"
    );
    assert_eq!(
        refused(&format!("{WORKER}find.cmdline = \" \"\n")),
        "gpu.toml:6: worker[0].find.cmdline: is empty and would fit any process; name the one that is meant"
    );
}

#[test]
fn health_that_contradicts_itself() {
    assert_eq!(
        refused(&format!("{WORKER}[worker.health]\ngrpc = \"http://h:1\"\nhttp = \"http://h:2/health\"\n")),
        "gpu.toml:8: worker[0].health.http: is one health source too many beside health.grpc; keep one"
    );
    assert_eq!(
        refused(&format!("{WORKER}[worker.health]\nservices = [{{ name = \"\", role = \"livenes\" }}]\n")),
        "gpu.toml:7: worker[0].health.services[0].role: \"livenes\" is unknown; allowed: liveness, readiness (did you mean \"liveness\"?)\n\
         gpu.toml:7: worker[0].health.services: names gRPC services, but health.grpc is not set; set it to their address"
    );
    assert_eq!(
        refused(&format!("{WORKER}[worker.health]\ncheck_interval_ms = 9000\n")),
        "gpu.toml:6: worker[0].health.hang_window_ms: 10000 ms leave no room for two checks with their timeouts; \
         allowed: from 20000 ms (2 x (check_interval_ms + check_timeout_ms))"
    );
}

#[test]
fn a_pattern_that_would_make_a_compiler_critical() {
    assert_eq!(
        refused(&format!("{WORKER}critical = [\"*::EngineCore\", \"*\"]\n")),
        "gpu.toml:6: worker[0].critical: \"*\" names fewer than 4 characters of a role; allowed: a list of titles, as \"*::EngineCore*\""
    );
}

#[test]
fn nats_logins() {
    assert_eq!(
        refused(&format!("[nats]\nurl = \"nats://me:secret@h:4222\"{WORKER}")),
        "gpu.toml:2: nats.url: a URL holds credentials, which logs, status and process lists would show; name files with them \
         instead (user and password file, token file, nkey seed file, credentials file)"
    );
    assert_eq!(
        refused(&format!("[nats]\nuser = \"me\"\ntoken_file = \"/t\"{WORKER}")),
        "gpu.toml:2: nats.user: is set without nats.password_file; set both or neither\n\
         gpu.toml:3: nats.token_file: is one login too many beside nats.user; keep one"
    );
    assert_eq!(
        refused(&format!("[nats]\nreplicas = 2{WORKER}")),
        "gpu.toml:2: nats.replicas: 2 replicas cannot outvote anything; allowed: 1, 3, 5"
    );
}

#[test]
fn a_worker_that_is_no_list_and_a_table_that_is_none() {
    assert_eq!(
        refused("nats = \"nats://h:1\"\n[worker]\nname = \"w\"\n"),
        "gpu.toml:1: nats: is a table; write [nats]\n\
         gpu.toml:2: worker: is a list of tables; write [[worker]]"
    );
}

#[test]
fn a_quoted_path_names_nothing() {
    let error = refused(&format!("\"worker[0].name\" = \"x\"\n\"nats.url\" = \"nats://h:1\"{WORKER}"));
    let lines: Vec<&str> = error.lines().collect();
    assert!(lines[0].starts_with("gpu.toml:1: worker[0].name: is not a setting; known here: "), "{error}");
    assert!(lines[1].starts_with("gpu.toml:2: nats.url: is not a setting; known here: "), "{error}");
    assert_eq!(lines.len(), 2, "{error}");
}

proptest::proptest! {
    /// Whatever a person does to a line, there is an answer and no panic.
    #[test]
    fn no_document_makes_it_fall_over(line in 0..EVERYTHING.lines().count(), value in "[-a-z0-9\\[\\]{}='\" .:/]{0,12}", key in "[a-z_.\\[\\]]{0,8}") {
        let text: String = EVERYTHING
            .lines()
            .enumerate()
            .map(|(number, old)| if number == line { format!("{key} = {value}\n") } else { format!("{old}\n") })
            .collect();
        if let Err(error) = read(&text, &[(&format!("LASTGASP_{}", key.to_uppercase()), &value)]) {
            proptest::prop_assert!(!error.to_string().is_empty());
        }
    }
}

#[test]
fn what_is_not_toml() {
    let error = refused("node = \"a\"\nmode = enforce\n");
    assert!(error.starts_with("gpu.toml:2: is not TOML: "), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn a_node_that_is_no_name() {
    assert_eq!(
        refused(&format!("node = \"a\\u0007\"{WORKER}")),
        "gpu.toml:1: node: \"a\\u{7}\" contains a control character; allowed: a name of at most 128 bytes"
    );
}

#[test]
fn a_socket_path_that_the_kernel_would_refuse() {
    let path = format!("/run/{}.sock", "x".repeat(100));
    assert_eq!(
        refused(&format!("status.socket = \"{path}\"{WORKER}")),
        "gpu.toml:1: status.socket: has 110 bytes, the kernel's socket addresses leave room for 99; name a shorter path"
    );
}

#[test]
fn the_environment_stands_over_the_file() {
    let config = config(
        &format!("mode = \"enforce\"{WORKER}"),
        &[
            ("LASTGASP_MODE", "observe"),
            ("LASTGASP_NODE", "gpu-b"),
            ("LASTGASP_WORKER_0_HEALTH_GRPC", "http://127.0.0.1:50051"),
            ("LASTGASP_WORKER_0_HEALTH_SERVICES_0_NAME", "vllm.Inference"),
            ("LASTGASP_WORKER_0_HEALTH_SERVICES_0_ROLE", "readiness"),
            ("LASTGASP_WORKER_0_MODELS", "a, b"),
            ("LASTGASP_WORKER_0_LABELS", "zone=a,rack=7"),
            ("LASTGASP_WORKER_1_NAME", "vllm-1"),
            ("LASTGASP_WORKER_1_ENDPOINT", "http://127.0.0.1:8001"),
            ("LASTGASP_WORKER_1_FIND_PID", "4242"),
        ],
    );
    assert_eq!((config.mode, config.node.as_str()), (Mode::Observe, "gpu-b"));
    assert_eq!(config.workers[0].models, ["a", "b"]);
    assert_eq!(config.workers[0].labels["rack"], "7");
    assert_eq!(config.workers[0].health.services[0].role, HealthRole::Readiness);
    assert_eq!((config.workers[1].name.as_str(), &config.workers[1].find), ("vllm-1", &Find::Pid(4242)));
}

#[test]
fn a_wrong_variable_is_named() {
    assert_eq!(
        refused_with(WORKER, &[("LASTGASP_LEASE_TTL_S", "soon"), ("LASTGASP_NATS_TLS_REQUIRED", "yes")]),
        "LASTGASP_LEASE_TTL_S: lease.ttl_s: \"soon\" is not a whole number; allowed: a whole number from 1 to 3600 s\n\
         LASTGASP_NATS_TLS_REQUIRED: nats.tls_required: \"yes\" is neither true nor false; allowed: true, false"
    );
    assert_eq!(
        refused_with(WORKER, &[("LASTGASP_WORKER_2_NAME", "w2")]),
        "LASTGASP_WORKER_2_NAME: worker[1]: is missing, but worker[2] is there; count from 0 without gaps"
    );
}

#[test]
fn other_peoples_variables_are_only_mentioned() {
    let variables = [
        ("LASTGASP_SERVICE_HOST", "10.0.0.1"),
        ("LASTGASP_NATS_ULR", "nats://h:1"),
        ("LASTGASP_WORKER", "vllm-0"),
        ("LASTGASP_LOG", "debug"),
        ("PATH", "/bin"),
    ];
    let (_, warnings) = read(WORKER, &variables).unwrap();
    let warnings: Vec<String> = warnings.iter().map(Problem::to_string).collect();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].starts_with("LASTGASP_SERVICE_HOST: is not a setting and has no effect"), "{warnings:?}");
    assert_eq!(
        warnings[1],
        "LASTGASP_NATS_ULR: is not a setting and has no effect (did you mean \"LASTGASP_NATS_URL\"?)"
    );
}

#[test]
fn a_flag_stands_over_everything() {
    let variables = [("LASTGASP_EBPF_ENABLED".to_owned(), "required".to_owned())];
    let flags = [("--no-ebpf", "ebpf.enabled", "off".to_owned())];
    let (config, _) = Config::read(Some((Path::new("gpu.toml"), WORKER)), variables.clone(), &flags).unwrap();
    assert_eq!(config.ebpf.enabled, EbpfMode::Off);
    let flags = [("--mode", "mode", "watch".to_owned())];
    let error = Config::read(Some((Path::new("gpu.toml"), WORKER)), variables, &flags).unwrap_err().to_string();
    assert_eq!(error, "--mode: mode: \"watch\" is unknown; allowed: enforce, observe");
}

#[test]
fn no_worker_at_all_is_odd_but_not_wrong() {
    let (config, warnings) = Config::read(None, [], &[("--node", "node", "gpu-a".to_owned())]).unwrap();
    assert!(config.workers.is_empty());
    assert_eq!(warnings[0].to_string(), "configuration: no [[worker]] is configured; there is nothing to watch");
}

#[test]
fn a_missing_file_says_how_to_name_one() {
    let error = Config::load(Some(Path::new("/nonexistent/gpu.toml")), &[]).unwrap_err().to_string();
    assert_eq!(
        error,
        "/nonexistent/gpu.toml: cannot be read: No such file or directory (os error 2); \
         name an existing TOML file with --config or LASTGASP_CONFIG"
    );
}

#[test]
fn what_follows_a_loss_is_a_word_or_a_command() {
    let chosen = |lines: &str| config(&format!("{WORKER}{lines}"), &[]).workers.remove(0).on_lost;
    assert_eq!(chosen(""), OnLost::None);
    assert_eq!(chosen("on_lost = \"reap\"\n"), OnLost::Reap);
    assert_eq!(chosen("on_lost = \"terminate-root\"\nreap_grace_ms = 0\n"), OnLost::TerminateRoot);
    let command = OnLost::Command(vec!["/usr/bin/page".to_owned(), "--gpu".to_owned()]);
    assert_eq!(chosen("on_lost = { command = [\"/usr/bin/page\", \"--gpu\"] }\n"), command);
    let by_env = config(WORKER, &[("LASTGASP_WORKER_0_ON_LOST_COMMAND", "/usr/bin/page,--gpu")]);
    assert_eq!(by_env.workers[0].on_lost, command);

    assert_eq!(
        refused(&format!("{WORKER}on_lost = \"kill\"\n")),
        "gpu.toml:6: worker[0].on_lost: \"kill\" is unknown; allowed: none, reap, terminate-root, kill-tree"
    );
    assert_eq!(
        refused(&format!("{WORKER}on_lost = {{ command = [] }}\n")),
        "gpu.toml:6: worker[0].on_lost.command: is empty; name a program, as [\"/usr/bin/logger\"]"
    );
    assert_eq!(
        refused(&format!("{WORKER}on_lost = {{ comand = [\"x\"] }}\n")),
        "gpu.toml:6: worker[0].on_lost.comand: is not a setting; known here: command (did you mean \"command\"?)"
    );
    let both = [("LASTGASP_WORKER_0_ON_LOST_COMMAND", "/usr/bin/page")];
    assert_eq!(
        refused_with(&format!("{WORKER}on_lost = \"reap\"\n"), &both),
        "LASTGASP_WORKER_0_ON_LOST_COMMAND: worker[0].on_lost.command: is one choice too many beside worker[0].on_lost; keep one"
    );
}

#[test]
fn nobody_may_declare_a_worker_unless_somebody_is_allowed_to() {
    let declare = config(WORKER, &[]).declare;
    assert!(!declare.enabled && declare.uids.is_empty() && declare.cgroups.is_empty());
    let text = "[declare]\nenabled = true\nuids = [1000, 1001]\ncgroups = [\"/kubepods.slice/\"]\n";
    let (config, warnings) = read(text, &[]).unwrap();
    assert_eq!((config.declare.uids, config.declare.cgroups), (vec![1000, 1001], vec!["/kubepods.slice".to_owned()]));
    assert!(warnings.is_empty(), "a node may have declared workers only: {warnings:?}");
    let by_env = [("LASTGASP_DECLARE_ENABLED", "true"), ("LASTGASP_DECLARE_UIDS", "0, 1000")];
    assert_eq!(self::config("", &by_env).declare.uids, [0, 1000]);

    assert_eq!(
        refused("[declare]\nenabled = true\nuids = []\n"),
        "gpu.toml:2: declare.enabled: is true, but no process may declare a worker; set declare.uids, declare.cgroups or both"
    );
    assert_eq!(
        refused("[declare]\nuids = [-1]\ncgroups = [\"kubepods\"]\n"),
        "gpu.toml:2: declare.uids: -1 is out of range; allowed: a list of whole numbers from 0 to 4294967295\n\
         gpu.toml:3: declare.cgroups: \"kubepods\" is not a cgroup's path; it begins with /, as in /proc/PID/cgroup"
    );
}

#[test]
fn an_environment_declares_a_worker() {
    let declare = |variables: &[(&str, &str)]| {
        let variables: Vec<_> = variables.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        let all = |problems: Vec<Problem>| problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        declared(&variables).map_err(all)
    };
    let worker = declare(&[
        ("LASTGASP_WORKER", "vllm-7"),
        ("LASTGASP_ENGINE", "vllm"),
        ("LASTGASP_ENDPOINT", "http://10.0.0.7:8000/"),
        ("LASTGASP_GRPC_HEALTH", "http://10.0.0.7:50051"),
        ("LASTGASP_MODELS", "qwen,qwen-chat"),
    ])
    .unwrap();
    assert_eq!((worker.name.as_str(), worker.endpoint.as_str(), worker.port), ("vllm-7", "http://10.0.0.7:8000", 8000));
    assert_eq!((worker.engine.as_str(), worker.models), ("vllm", vec!["qwen".to_owned(), "qwen-chat".to_owned()]));
    assert!(worker.health.has_liveness());
    assert_eq!(
        declare(&[("LASTGASP_WORKER", ""), ("LASTGASP_ENGINE", "vlm")]).unwrap_err(),
        "LASTGASP_WORKER: worker[0].name: \"\" is empty; allowed: a name of at most 128 bytes\n\
         LASTGASP_ENGINE: worker[0].engine: \"vlm\" is not an engine profile; allowed: vllm, sglang, trtllm, generic (did you mean \"vllm\"?)\n\
         LASTGASP_WORKER: worker[0].endpoint: is missing; set it to the URL for routers, as \"http://10.0.0.7:8000\""
    );
}

#[test]
fn sinks_of_notices_have_what_their_kind_needs() {
    let text = format!(
        "[[notify]]\nkind = 'exec'\ncommand = ['/bin/on-death', '-v']\non = ['withdrawn']\n\
         [[notify]]\nkind = 'webhook'\nurl = 'https://hooks.example/T0/secret'\nheaders = {{ x-a = 'b' }}\n{WORKER}"
    );
    let config = config(&text, &[]);
    let [exec, hook] = &config.notify[..] else { panic!("{:?}", config.notify) };
    assert_eq!((exec.name.as_str(), &exec.on[..]), ("exec-0", &[NotificationKind::Withdrawn][..]));
    assert_eq!(exec.kind, NotifyKind::Exec { command: vec!["/bin/on-death".into(), "-v".into()] });
    assert_eq!((hook.name.as_str(), &hook.on[..], hook.attempts), ("webhook-1", NotificationKind::VARIANTS, 8));
}

#[test]
fn a_wrong_sink_is_refused_in_so_many_words() {
    let sink = |lines: &str| refused(&format!("[[notify]]\n{lines}\n{WORKER}"));
    for (lines, words) in [
        ("on = ['withdrawn']", "notify[0].kind: is missing; set it to \"exec\", \"webhook\", \"infera\" or \"dynamo\""),
        ("kind = 'exec'", "notify[0].command: is missing; set it to a program"),
        ("kind = 'exec'\ncommand = []", "notify[0].command: is empty; name a program"),
        ("kind = 'webhook'", "notify[0].url: is missing; set it to where JSON is posted to"),
        ("kind = 'webhook'\nurl = 'ftp://a/b'", "does not begin with http:// or https://"),
        ("kind = 'webhook'\nurl = 'http://u:s3cret@a/b'", "holds credentials; use token_file or headers"),
        ("kind = 'webhook'\nurl = 'http://a/b'\ncommand = ['x']", "has no meaning with kind = \"webhook\"; remove it"),
        ("kind = 'infera'\non = ['withdrawn']", "notify[0].on: has no meaning with kind = \"infera\"; remove it"),
        ("kind = 'webhook'\nurl = 'http://a/b'\nnats.url = 'nats://a'", "nats.url: has no meaning with kind"),
        ("kind = 'infera'\netcd.url = 'https://a:2379'", "etcd is reached in no other way here"),
        ("kind = 'dynamo'", "notify[0].backend: is missing; set it to \"etcd\" or \"file\""),
        ("kind = 'dynamo'\nbackend = 'etcd'", "notify[0].etcd.url: is missing"),
        ("kind = 'dynamo'\nbackend = 'file'", "notify[0].folder: is missing"),
        (
            "kind = 'dynamo'\nbackend = 'file'\nfolder = '/a'\netcd.url = 'http://a:2379'",
            "notify[0].etcd.url: has no meaning with backend = \"file\"; remove it",
        ),
        (
            "kind = 'dynamo'\nbackend = 'etcd'\netcd.url = 'http://a:2379'\netcd.prefix = '/x/'",
            "notify[0].etcd.prefix: has no meaning with kind = \"dynamo\"; remove it",
        ),
        ("kind = 'infera'\netcd.prefix = '/x/'", "notify[0].etcd.url: is missing"),
        ("kind = 'infera'\nnats.user = 'u'", "notify[0].nats.user: is set without notify[0].nats.password_file"),
        ("kind = 'exec'\ncommand = ['x']\non = ['death']", "\"death\" is unknown; allowed: serving, unready"),
        ("kind = 'webhook'\nurl = 'http://a/b'\nheaders = { 'a b' = 'c' }", "\"a b\" is no header"),
    ] {
        let said = sink(lines);
        assert!(said.contains(words) && !said.contains("s3cret"), "{lines}: {said}");
    }
}

#[test]
fn an_infera_has_a_nats_and_perhaps_an_etcd_and_workers_their_ids_there() {
    let text = format!("[[notify]]\nkind = 'infera'\netcd.url = 'http://10.0.0.1:2379'\n{WORKER}");
    let config = config(&text, &[]);
    let [infera] = &config.infera[..] else { panic!("{:?}", config.infera) };
    assert_eq!((infera.name.as_str(), infera.nats.url.as_str()), ("infera-0", "nats://127.0.0.1:4222"));
    assert_eq!(infera.etcd.as_ref().map(|etcd| etcd.prefix.as_str()), Some("/infera/workers/"));
    let endpoint = &config.workers[0].endpoint;
    assert_eq!(Some(config.workers[0].infera_id.as_str()), endpoint.strip_prefix("http://"));
}

#[test]
fn a_dynamo_has_its_discovery_in_etcd_or_in_a_folder_and_workers_may_name_their_instance() {
    let text = format!(
        "[[notify]]\nkind = 'dynamo'\nbackend = 'etcd'\netcd.url = 'http://10.0.0.1:2379'\n\
         [[notify]]\nkind = 'dynamo'\nbackend = 'file'\nfolder = '/tmp/dynamo_store_kv'\n{WORKER}"
    );
    let config = config(&text, &[]);
    let [etcd, folder] = &config.dynamo[..] else { panic!("{:?}", config.dynamo) };
    assert_eq!(etcd.backend, DynamoBackend::Etcd { url: "http://10.0.0.1:2379".into() });
    assert_eq!((etcd.backend.port(), folder.backend.port()), (Some(2379), None));
    assert_eq!(
        (folder.name.as_str(), &folder.backend),
        ("dynamo-1", &DynamoBackend::Folder("/tmp/dynamo_store_kv".into()))
    );
    assert_eq!(config.workers[0].dynamo_instance, None);

    let named = |id: &str| format!("{WORKER}dynamo_instance = '{id}'\n");
    let config = self::config(&named("2b3a228b5059d13"), &[]);
    assert_eq!(config.workers[0].dynamo_instance, Some(194677504626498835));
    assert!(refused(&named("0x2b")).contains("worker[0].dynamo_instance: \"0x2b\" is no instance"));
}
