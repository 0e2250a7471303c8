//! From settings to a [`Config`]: what one setting alone cannot tell.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::http::Uri;
use lastgasp_protocol::login::Login;
use lastgasp_protocol::{Name, Writer, bounds};

use super::error::Problem;
use super::settings::Settings;
use super::sinks;
use super::{
    Config, DeclareConfig, EbpfConfig, EbpfMode, Find, HealthConfig, KubeletConfig, Mode, NatsConfig, OnLost,
    OnNotServing, PolicyConfig, SeverConfig, StatusConfig, WorkerConfig,
};
use crate::core::HealthRole;
use crate::engines::{Profile, Service};

/// Longest path of our socket: `sun_path` has 108 bytes with the NUL (unix(7)), and the socket is
/// bound beside its place under a name that is up to 8 bytes longer.
pub(super) const MAX_SOCKET: usize = 99;

/// How long streams go on when neither the configuration nor the profile tells.
const DRAIN_WINDOW: Duration = Duration::from_secs(5);

pub(super) fn config(settings: &mut Settings, host: impl FnOnce() -> Option<String>) -> Option<Config> {
    let node = node(settings, host);
    let nats = nats(settings, "nats");
    replicas(settings);
    let status = status(settings);
    let declare = declare(settings);
    let workers = workers(settings, declare.enabled);
    let sinks::Sinks { notify, infera, dynamo } = sinks::notify(settings);
    let policy = PolicyConfig {
        hold_down: millis(settings, "policy.hold_down_ms"),
        near_certain_recheck: millis(settings, "policy.near_certain_recheck_ms"),
        soft_withdrawals_per_minute: u32::try_from(number(settings, "policy.soft_withdrawals_per_minute"))
            .expect("within the schema's bounds"),
    };
    let config = Config {
        node: node?,
        mode: word(settings, "mode", &[("enforce", Mode::Enforce), ("observe", Mode::Observe)]),
        realtime: word(settings, "priority", &[("normal", false), ("realtime", true)]),
        nats,
        ebpf: EbpfConfig {
            enabled: word(
                settings,
                "ebpf.enabled",
                &[("auto", EbpfMode::Auto), ("off", EbpfMode::Off), ("required", EbpfMode::Required)],
            ),
            btf: PathBuf::from(text(settings, "ebpf.btf")),
            ring_bytes: u32::try_from(number(settings, "ebpf.ring_bytes")).expect("within the schema's bounds"),
        },
        status,
        lease_ttl: Duration::from_secs(number(settings, "lease.ttl_s")),
        replicas: usize::try_from(number(settings, "nats.replicas")).expect("within the schema's bounds"),
        policy,
        declare,
        notify,
        infera,
        dynamo,
        workers,
    };
    settings.problems.is_empty().then_some(config)
}

fn node(settings: &mut Settings, host: impl FnOnce() -> Option<String>) -> Option<Name> {
    if settings.is_set("node") {
        return settings.text("node").and_then(|name| Name::new(name).ok());
    }
    let name = host().and_then(|name| Name::new(name).ok());
    if name.is_none() {
        let place = settings.place("node");
        settings.refuse(place, "node", "is missing, and the host name cannot stand for it; set node or LASTGASP_NODE");
    }
    name
}

fn replicas(settings: &mut Settings) {
    if let Some(replicas @ (2 | 4)) = settings.number("nats.replicas") {
        let place = settings.place("nats.replicas");
        settings.refuse(
            place,
            "nats.replicas",
            format!("{replicas} replicas cannot outvote anything; allowed: 1, 3, 5"),
        );
    }
}

/// The NATS of this table.
pub(super) fn nats(settings: &mut Settings, table: &str) -> NatsConfig {
    let at = |key: &str| format!("{table}.{key}");
    let logins = ["user", "token_file", "creds_file", "nkey_seed_file"].map(at);
    let logins: Vec<String> = logins.into_iter().filter(|path| settings.is_set(path)).collect();
    if let [first, second, ..] = &logins[..] {
        let place = settings.place(second);
        settings.refuse(place, second, format!("is one login too many beside {first}; keep one"));
    }
    for (one, other) in
        [("user", "password_file"), ("password_file", "user"), ("tls_cert", "tls_key"), ("tls_key", "tls_cert")]
    {
        let (one, other) = (at(one), at(other));
        if settings.is_set(&one) && !settings.is_set(&other) {
            let place = settings.place(&one);
            settings.refuse(place, &one, format!("is set without {other}; set both or neither"));
        }
    }
    let path = |key| settings.text(&at(key)).map(PathBuf::from);
    let login = Login {
        user: settings.text(&at("user")),
        password_file: path("password_file"),
        token_file: path("token_file"),
        creds_file: path("creds_file"),
        nkey_seed_file: path("nkey_seed_file"),
        tls_required: settings.flag(&at("tls_required")),
        tls_ca: path("tls_ca"),
        tls_cert: path("tls_cert"),
        tls_key: path("tls_key"),
    };
    NatsConfig { url: text(settings, &at("url")), login }
}

fn status(settings: &mut Settings) -> StatusConfig {
    let socket = PathBuf::from(text(settings, "status.socket"));
    let length = socket.as_os_str().len();
    if length > MAX_SOCKET {
        let place = settings.place("status.socket");
        let message = format!(
            "has {length} bytes, the kernel's socket addresses leave room for {MAX_SOCKET}; name a shorter path"
        );
        settings.refuse(place, "status.socket", message);
    }
    StatusConfig {
        socket,
        listen: text(settings, "status.listen").parse().expect("checked by its kind"),
        page: settings.flag("status.page"),
    }
}

fn declare(settings: &mut Settings) -> DeclareConfig {
    let cgroups = settings.texts("declare.cgroups");
    let uids = settings.numbers("declare.uids");
    let enabled = settings.flag("declare.enabled");
    if let Some(wrong) = cgroups.iter().find(|cgroup| !cgroup.starts_with('/')) {
        let place = settings.place("declare.cgroups");
        let message = format!("{wrong:?} is not a cgroup's path; it begins with /, as in /proc/PID/cgroup");
        settings.refuse(place, "declare.cgroups", message);
    }
    if enabled && uids.is_empty() && cgroups.is_empty() {
        let place = settings.place("declare.enabled");
        let message = "is true, but no process may declare a worker; set declare.uids, declare.cgroups or both";
        settings.refuse(place, "declare.enabled", message);
    }
    DeclareConfig {
        enabled,
        uids: uids.into_iter().filter_map(|uid| u32::try_from(uid).ok()).collect(),
        cgroups: cgroups.into_iter().map(|cgroup| cgroup.trim_end_matches('/').to_owned()).collect(),
        scan_interval: millis(settings, "declare.scan_interval_ms"),
        on_lost: on_lost(settings, "declare"),
        reap_grace: millis(settings, "declare.reap_grace_ms"),
        sever: settings.flag("declare.sever"),
        kubelet: kubelet(settings),
    }
}

fn kubelet(settings: &mut Settings) -> Option<KubeletConfig> {
    const URL: &str = "declare.kubelet.url";
    let path = |key: &str| settings.text(key).map(PathBuf::from);
    let (token_file, tls_ca) = (path("declare.kubelet.token_file"), path("declare.kubelet.tls_ca"));
    let Some(url) = settings.text(URL) else {
        for without in ["declare.kubelet.token_file", "declare.kubelet.tls_ca"] {
            if settings.is_set(without) {
                let place = settings.place(without);
                settings.refuse(place, without, format!("is set without {URL}; set it too, or neither"));
            }
        }
        return None;
    };
    Some(KubeletConfig { url, token_file, tls_ca })
}

fn on_lost(settings: &mut Settings, section: &str) -> OnLost {
    let (word_path, path) = (format!("{section}.on_lost"), format!("{section}.on_lost.command"));
    if settings.is_set(&path) {
        let command = settings.texts(&path);
        let wrong = if command.is_empty() {
            Some("is empty; name a program, as [\"/usr/bin/logger\"]".to_owned())
        } else if settings.is_set(&word_path) {
            Some(format!("is one choice too many beside {word_path}; keep one"))
        } else {
            None
        };
        if let Some(message) = wrong {
            let place = settings.place(&path);
            settings.refuse(place, &path, message);
        }
        return OnLost::Command(command);
    }
    match text(settings, &word_path).as_str() {
        "reap" => OnLost::Reap,
        "terminate-root" => OnLost::TerminateRoot,
        "kill-tree" => OnLost::KillTree,
        _ => OnLost::None,
    }
}

fn workers(settings: &mut Settings, may_be_declared: bool) -> Vec<WorkerConfig> {
    let entries = settings.entries("worker");
    if entries == 0 && !may_be_declared && !settings.is_set("worker") {
        let message = "no [[worker]] is configured; there is nothing to watch".to_owned();
        settings.warnings.push(Problem { place: settings.place("worker"), path: String::new(), message });
    }
    let mut seen: BTreeMap<Name, String> = BTreeMap::new();
    let mut workers = Vec::new();
    for index in 0..entries {
        let section = format!("worker[{index}]");
        let worker = worker(settings, &section);
        if let Some(name) = settings.text(&format!("{section}.name")).and_then(|name| Name::new(name).ok()) {
            let path = format!("{section}.name");
            let place = settings.place(&path);
            if let Some(first) = seen.get(&name) {
                settings.refuse(
                    place,
                    &path,
                    format!("\"{name}\" is the name of {first} too; give each worker its own"),
                );
            } else {
                seen.insert(name, section);
            }
        }
        workers.extend(worker);
    }
    workers
}

pub(super) fn worker(settings: &mut Settings, section: &str) -> Option<WorkerConfig> {
    let at = |key: &str| format!("{section}.{key}");
    let name = needed(settings, &at("name"), "a name that is unique on this node, as \"vllm-0\"")
        .and_then(|name| Name::new(name).ok());
    let endpoint = needed(settings, &at("endpoint"), "the URL for routers, as \"http://10.0.0.7:8000\"")
        .map(|endpoint| endpoint.trim_end_matches('/').to_owned());
    let port = endpoint.as_deref().and_then(|endpoint| serving_port(settings, &at("endpoint"), endpoint));
    let profile = Profile::find(&text(settings, &at("engine"))).expect("checked by its kind");
    let critical = settings.texts(&at("critical")).into_iter().filter_map(|pattern| pattern.parse().ok());
    let health = health(settings, section, &profile);
    let shutdown_timeout = settings.number(&at("shutdown_timeout_s")).map(Duration::from_secs);
    let drain_window = settings
        .number(&at("drain_window_ms"))
        .map_or_else(|| shutdown_timeout.or(profile.shutdown_grace).unwrap_or(DRAIN_WINDOW), Duration::from_millis);
    let find = find(settings, section, name.as_ref());
    let on_lost = on_lost(settings, section);
    let sever = sever(settings, &at("sever"));
    bounded(settings, section);
    let dynamo_instance = dynamo_instance(settings, &at("dynamo_instance"));
    let infera_id = settings.text(&at("infera_id")).or_else(|| endpoint.as_deref().map(host_and_port));
    Some(WorkerConfig {
        engine: profile.name.clone(),
        profile: Arc::new(profile.with_critical(critical)),
        find: find?,
        writer: word(settings, &at("writer"), &[("daemon", Writer::Daemon), ("worker", Writer::Worker)]),
        models: settings.texts(&at("models")),
        labels: settings.text_map(&at("labels")),
        drain_window,
        termination_grace: settings.number(&at("termination_grace_s")).map(Duration::from_secs),
        pre_stop: Duration::from_secs(number(settings, &at("pre_stop_s"))),
        shutdown_timeout,
        on_not_serving: word(
            settings,
            &at("on_not_serving"),
            &[("drain", OnNotServing::Drain), ("lost", OnNotServing::Lost), ("unready", OnNotServing::Unready)],
        ),
        on_lost,
        reap_grace: millis(settings, &at("reap_grace_ms")),
        sever: sever?,
        infera_id: infera_id?,
        dynamo_instance,
        health,
        name: name?,
        endpoint: endpoint?,
        port: port?,
    })
}

/// As in the keys of Dynamo's records: hexadecimal.
fn dynamo_instance(settings: &mut Settings, path: &str) -> Option<u64> {
    let text = settings.text(path)?;
    let instance = u64::from_str_radix(&text, 16);
    if instance.is_err() {
        let place = settings.place(path);
        settings.refuse(
            place,
            path,
            format!("{text:?} is no instance; write it as in its keys, as \"2b3a228b5059d13\""),
        );
    }
    instance.ok()
}

/// What the contract's readers would refuse, see [`bounds`].
fn bounded(settings: &mut Settings, section: &str) {
    let models = settings.texts(&format!("{section}.models"));
    let labels = settings.text_map(&format!("{section}.labels"));
    let longest = |texts: &mut dyn Iterator<Item = usize>| texts.max().unwrap_or(0);
    for (key, entries, most, bytes) in [
        ("models", models.len(), bounds::MAX_MODELS, longest(&mut models.iter().map(String::len))),
        (
            "labels",
            labels.len(),
            bounds::MAX_LABELS,
            longest(&mut labels.iter().map(|(key, value)| key.len().max(value.len()))),
        ),
    ] {
        if entries > most || bytes > bounds::MAX_TEXT {
            let path = format!("{section}.{key}");
            let place = settings.place(&path);
            let message =
                format!("has {entries} entries of up to {bytes} bytes; allowed: {most} of {}", bounds::MAX_TEXT);
            settings.refuse(place, &path, message);
        }
    }
}

fn serving_port(settings: &mut Settings, path: &str, endpoint: &str) -> Option<u16> {
    let uri: Uri = endpoint.parse().expect("checked by its kind");
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    if host.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified()) {
        let place = settings.place(path);
        settings.refuse(
            place,
            path,
            format!("{host} is where a server listens, not where routers reach it; name an address of this node"),
        );
    }
    uri.port_u16()
}

/// Of an endpoint, as Infera makes a worker's id of them.
fn host_and_port(endpoint: &str) -> String {
    let uri: Uri = endpoint.parse().expect("checked by its kind");
    let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 });
    format!("{}:{port}", uri.host().unwrap_or_default())
}

fn find(settings: &mut Settings, section: &str, name: Option<&Name>) -> Option<Find> {
    match process(settings, &format!("{section}.find"), &["pid", "pid_file", "port", "cmdline", "env"]) {
        Ok(None) => name.map(|name| Find::Env(name.to_string())),
        given => given.ok().flatten(),
    }
}

fn sever(settings: &mut Settings, table: &str) -> Option<SeverConfig> {
    let companion = process(settings, &format!("{table}.companion"), &["pid", "pid_file", "port", "cmdline"]);
    let enabled = settings.flag(&format!("{table}.enabled"));
    if !enabled && let Ok(Some(_)) = companion {
        let path = format!("{table}.companion");
        let place = settings.place(&path);
        settings.refuse(place, &path, format!("is set, but nothing is severed; set {table}.enabled = true"));
    }
    let spare_ports = settings.numbers(&format!("{table}.spare_ports"));
    Some(SeverConfig {
        enabled,
        companion: companion.ok()?,
        spare_ports: spare_ports.into_iter().filter_map(|port| u16::try_from(port).ok()).collect(),
    })
}

/// A problem with it was noted.
struct RefusedSetting;

/// The one way of several in which a table names a process, if it does.
fn process(settings: &mut Settings, table: &str, ways: &[&str]) -> Result<Option<Find>, RefusedSetting> {
    let at = |key: &str| format!("{table}.{key}");
    let given: Vec<&str> = ways.iter().copied().filter(|way| settings.is_set(&at(way))).collect();
    let short = table.rsplit_once('.').map_or(table, |(_, short)| short);
    if let [first, second, ..] = given[..] {
        let place = settings.place(&at(second));
        settings.refuse(place, &at(second), format!("is one way too many beside {short}.{first}; keep one"));
        return Err(RefusedSetting);
    }
    let Some(way) = given.first() else { return Ok(None) };
    let path = at(way);
    let integer = |settings: &Settings| settings.number(&path).and_then(|number| u32::try_from(number).ok());
    let found = match *way {
        "pid" => integer(settings).map(Find::Pid),
        "port" => integer(settings).and_then(|port| u16::try_from(port).ok()).map(Find::Port),
        way => settings.text(&path).and_then(|text| {
            if text.trim().is_empty() {
                let place = settings.place(&path);
                settings.refuse(place, &path, "is empty and would fit any process; name the one that is meant");
                return None;
            }
            Some(match way {
                "pid_file" => Find::PidFile(text.into()),
                "cmdline" => Find::Cmdline(text),
                _ => Find::Env(text),
            })
        }),
    };
    found.map(Some).ok_or(RefusedSetting)
}

fn health(settings: &mut Settings, section: &str, profile: &Profile) -> HealthConfig {
    let at = |key: &str| format!("{section}.health.{key}");
    let services = services(settings, &at("services"));
    if settings.is_set(&at("grpc")) && settings.is_set(&at("http")) {
        let place = settings.place(&at("http"));
        settings.refuse(place, &at("http"), "is one health source too many beside health.grpc; keep one");
    }
    if settings.entries(&at("services")) > 0 && !settings.is_set(&at("grpc")) {
        let place = settings.place(&at("services[0]"));
        settings.refuse(
            place,
            &at("services"),
            "names gRPC services, but health.grpc is not set; set it to their address",
        );
    }
    let config = HealthConfig {
        grpc: settings.text(&at("grpc")),
        services: if services.is_empty() { profile.services.clone() } else { services },
        http: settings.text(&at("http")),
        check_interval: millis(settings, &at("check_interval_ms")),
        check_timeout: millis(settings, &at("check_timeout_ms")),
        hang_window: millis(settings, &at("hang_window_ms")),
        keepalive: millis(settings, &at("keepalive_ms")),
    };
    let least = 2 * (config.check_interval + config.check_timeout);
    if config.hang_window < least {
        let path = at("hang_window_ms");
        let place = settings.place(&path);
        let message = format!(
            "{} ms leave no room for two checks with their timeouts; allowed: from {} ms (2 x (check_interval_ms + check_timeout_ms))",
            config.hang_window.as_millis(),
            least.as_millis()
        );
        settings.refuse(place, &path, message);
    }
    config
}

fn services(settings: &mut Settings, path: &str) -> Vec<Service> {
    let mut services: Vec<Service> = Vec::new();
    for index in 0..settings.entries(path) {
        let name_path = format!("{path}[{index}].name");
        let Some(name) = needed(settings, &name_path, "the service, or \"\" for the server as a whole") else {
            continue;
        };
        let role_path = format!("{path}[{index}].role");
        let Some(role) = needed(settings, &role_path, "\"liveness\" or \"readiness\"") else { continue };
        if services.iter().any(|service| service.name == name) {
            let place = settings.place(&name_path);
            settings.refuse(place, &name_path, format!("{name:?} is listed twice; keep one"));
        }
        let role = if role == "readiness" { HealthRole::Readiness } else { HealthRole::Liveness };
        services.push(Service { name, role });
    }
    services
}

/// A text that must be set.
pub(super) fn needed(settings: &mut Settings, path: &str, what: &str) -> Option<String> {
    require(settings, path, what);
    settings.text(path)
}

pub(super) fn require(settings: &mut Settings, path: &str, what: &str) {
    if !settings.is_set(path) {
        let place = settings.place(path);
        settings.refuse(place, path, format!("is missing; set it to {what}"));
    }
}

/// Where one of a setting's words leads.
fn word<T: Copy>(settings: &Settings, path: &str, words: &[(&str, T)]) -> T {
    let given = text(settings, path);
    words.iter().find(|(word, _)| *word == given).expect("the schema lists the same words").1
}

pub(super) fn text(settings: &Settings, path: &str) -> String {
    settings.text(path).expect("has a default")
}

pub(super) fn number(settings: &Settings, path: &str) -> u64 {
    settings.number(path).expect("has a default")
}

pub(super) fn millis(settings: &Settings, path: &str) -> Duration {
    Duration::from_millis(number(settings, path))
}

/// The host name (uname(2)).
pub(crate) fn host_name() -> Option<String> {
    nix::unistd::gethostname().ok()?.into_string().ok()
}

/// Reads a file as text.
pub(super) fn read(file: &Path) -> Result<String, super::ConfigError> {
    std::fs::read_to_string(file).map_err(|error| super::ConfigError::Unreadable { file: file.to_owned(), error })
}
