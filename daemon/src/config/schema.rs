//! Every setting, once: its path, what it may be, its default, and what it is for. Unknown keys,
//! wrong types, names of environment variables and the reference all come from this table.

use crate::config::value::SettingKind::{self, *};

/// A setting.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Path in TOML; `[]` stands for the entries of a list: `worker[].health.grpc`.
    pub path: &'static str,
    /// What it may be.
    pub kind: SettingKind,
    /// Its default as it would stand in an environment variable, where there is a fixed one.
    pub default: Option<&'static str>,
    /// What it is for; where there is no fixed default, what happens without it.
    pub help: &'static str,
}

/// Prefix of all environment variables.
pub const ENV_PREFIX: &str = "LASTGASP_";

/// Variables with our prefix that are no settings: the command line's, and what an engine's
/// environment may declare for the daemon to find.
pub const RESERVED: [&str; 15] = [
    "LASTGASP_CONFIG",
    "LASTGASP_LOG",
    "LASTGASP_POD",
    "LASTGASP_STARTUP_DEADLINE",
    "LASTGASP_EBPF_OBJECT",
    "LASTGASP_WORKER",
    "LASTGASP_ENGINE",
    "LASTGASP_ENDPOINT",
    "LASTGASP_GRPC_HEALTH",
    "LASTGASP_HTTP_HEALTH",
    "LASTGASP_MODELS",
    "LASTGASP_DRAIN_WINDOW_MS",
    "LASTGASP_TERMINATION_GRACE_S",
    "LASTGASP_PRE_STOP_S",
    "LASTGASP_SHUTDOWN_TIMEOUT_S",
];

/// Of etcd and of NATS: a companion's ties to discovery, which are not streams.
const SPARE_PORTS: &str = "2379,4222";
const ON_LOST: SettingKind = OneOf(&["none", "reap", "terminate-root", "kill-tree"]);
const MINUTE_MS: u64 = 60_000;
const HOUR_MS: u64 = 60 * MINUTE_MS;

const fn ms(min: u64, max: u64) -> SettingKind {
    Number { min, max, unit: " ms" }
}

const fn seconds(min: u64, max: u64) -> SettingKind {
    Number { min, max, unit: " s" }
}

const fn count(min: u64, max: u64) -> SettingKind {
    Number { min, max, unit: "" }
}

const fn fixed(path: &'static str, kind: SettingKind, default: &'static str, help: &'static str) -> Setting {
    Setting { path, kind, default: Some(default), help }
}

const fn open(path: &'static str, kind: SettingKind, help: &'static str) -> Setting {
    Setting { path, kind, default: None, help }
}

/// All settings.
pub static SCHEMA: &[Setting] = &[
    open("node", Name, "Name of this node in discovery. Default: the host name."),
    fixed(
        "mode",
        OneOf(&["enforce", "observe"]),
        "enforce",
        "`observe` decides, certifies and counts, but changes nothing. It writes nothing to NATS but certificates, and those only where their stream is.",
    ),
    fixed(
        "priority",
        OneOf(&["normal", "realtime"]),
        "normal",
        "`realtime` runs the thread that takes in deaths and sends signals before all others; needs CAP_SYS_NICE or RLIMIT_RTPRIO.",
    ),
    fixed("nats.url", NatsUrls, "nats://127.0.0.1:4222", "Servers, separated by commas."),
    open("nats.user", Text, "User name; needs nats.password_file."),
    open("nats.password_file", Path, "File with the password and nothing else."),
    open("nats.token_file", Path, "File with a token and nothing else."),
    open("nats.creds_file", Path, "Credentials file with a JWT and its seed, as `nsc` writes it."),
    open("nats.nkey_seed_file", Path, "File with an nkey seed."),
    fixed("nats.tls_required", Flag, "false", "Refuse a server without TLS."),
    open("nats.tls_ca", Path, "PEM file with the authorities to trust. Default: the system's."),
    open("nats.tls_cert", Path, "PEM file with the client certificate; needs nats.tls_key."),
    open("nats.tls_key", Path, "PEM file with the client certificate's key."),
    fixed("nats.replicas", count(1, 5), "1", "Replicas of the buckets, if this daemon is the one that makes them."),
    fixed(
        "ebpf.enabled",
        OneOf(&["auto", "off", "required"]),
        "auto",
        "`auto` goes on with pidfd where the kernel refuses; `required` ends instead.",
    ),
    fixed(
        "ebpf.btf",
        Path,
        "/sys/kernel/btf/vmlinux",
        "Description of the kernel's types, for kernels without CONFIG_DEBUG_INFO_BTF that have one in a file.",
    ),
    fixed(
        "ebpf.ring_bytes",
        count(4096, 64 << 20),
        "262144",
        "Bytes of the ring buffer between kernel and daemon; made a power of two of pages.",
    ),
    fixed(
        "status.socket",
        Path,
        "/run/lastgasp/lastgasp.sock",
        "Unix socket of `lastgasp status` and `lastgasp events`.",
    ),
    fixed("status.listen", Address, "127.0.0.1:9464", "Address of /metrics, /livez and /readyz; port 0 takes any."),
    fixed(
        "status.page",
        Flag,
        "true",
        "Whether the daemon serves a status page there too, at /; everybody who can reach the address can read it.",
    ),
    fixed(
        "lease.ttl_s",
        Number { min: 1, max: 3600, unit: " s" },
        "6",
        "How long routers trust this node's workers without a sign of the daemon.",
    ),
    fixed(
        "policy.hold_down_ms",
        ms(0, HOUR_MS),
        "10000",
        "How long a lost worker that recovers stays unlisted; doubles with every loss in a row, up to 32 times. From the \
         second loss on, its next process is held down too.",
    ),
    fixed(
        "policy.near_certain_recheck_ms",
        ms(100, HOUR_MS),
        "5000",
        "When to look whether a process with a fatal signal is gone.",
    ),
    fixed(
        "policy.soft_withdrawals_per_minute",
        count(0, 10_000),
        "4",
        "Most withdrawals a minute on anything but process evidence; the daemon holds back the rest, and warns of it.",
    ),
    fixed(
        "declare.enabled",
        Flag,
        "false",
        "Whether processes may declare themselves workers by LASTGASP_WORKER and more in their environment.",
    ),
    fixed(
        "declare.uids",
        Numbers { min: 0, max: u32::MAX as u64 },
        "",
        "Users whose processes may declare themselves; with declare.cgroups set, both must fit.",
    ),
    fixed(
        "declare.cgroups",
        Texts,
        "",
        "Cgroups whose processes, and those below, may declare themselves, as \"/kubepods.slice\".",
    ),
    fixed(
        "declare.scan_interval_ms",
        ms(1000, HOUR_MS),
        "1000",
        "Time between two looks through all processes; with eBPF, the daemon also looks at a process when it calls exec.",
    ),
    fixed("declare.on_lost", ON_LOST, "none", "Action on the processes of a declared worker that is lost."),
    open("declare.on_lost.command", Texts, "A program and its arguments to run then, instead of a word."),
    fixed("declare.reap_grace_ms", ms(0, HOUR_MS), "5000", "How long those processes have to end by themselves."),
    open(
        "declare.kubelet.url",
        WebUrl,
        "URL of the node's kubelet, as https://127.0.0.1:10250; the daemon asks it for the addresses of pods where the host's routes do not tell them.",
    ),
    open("declare.kubelet.token_file", Path, "File with the token for it; read at each question."),
    open(
        "declare.kubelet.tls_ca",
        Path,
        "PEM file with the authorities that kubelet's certificate is by. Default: the system's.",
    ),
    fixed("declare.sever", Flag, "false", "Whether the connections of a declared worker that is lost are destroyed."),
    open(
        "notify[].kind",
        OneOf(&["exec", "webhook", "infera", "dynamo"]),
        "Kind of the sink that is notified of workers: a program, a URL, Infera, or Dynamo's discovery.",
    ),
    fixed(
        "notify[].on",
        Texts,
        "serving,unready,draining,withdrawn,certificate",
        "Events that the sink is notified of: a record in this state, a record withdrawn, a death certificate complete.",
    ),
    fixed(
        "notify[].command",
        Texts,
        "",
        "With exec: the program and its arguments; it gets JSON on its standard input.",
    ),
    open("notify[].url", WebUrl, "With webhook: where JSON is posted to."),
    open(
        "notify[].token_file",
        Path,
        "With webhook: file with a bearer token and nothing else, read for every notification.",
    ),
    fixed("notify[].headers", TextMap, "", "With webhook: further headers."),
    open("notify[].tls_ca", Path, "With webhook: PEM file with the authorities to trust. Default: the system's."),
    fixed("notify[].timeout_ms", ms(100, 10 * MINUTE_MS), "10000", "How long one try may take."),
    fixed(
        "notify[].attempts",
        count(1, 1000),
        "8",
        "How often a notification is tried, with pauses that grow from 0.5 s to 30 s.",
    ),
    fixed(
        "notify[].concurrency",
        count(1, 64),
        "1",
        "How many notifications are under way at one time; those about one worker stay in order.",
    ),
    fixed("notify[].queue", count(1, 100_000), "256", "How many notifications wait for each of those places."),
    fixed(
        "notify[].nats.url",
        NatsUrls,
        "nats://127.0.0.1:4222",
        "With infera: Infera's NATS servers, separated by commas.",
    ),
    open("notify[].nats.user", Text, "With infera: user name; needs notify[].nats.password_file."),
    open("notify[].nats.password_file", Path, "With infera: file with the password and nothing else."),
    open("notify[].nats.token_file", Path, "With infera: file with a token and nothing else."),
    open("notify[].nats.creds_file", Path, "With infera: credentials file with a JWT and its seed."),
    open("notify[].nats.nkey_seed_file", Path, "With infera: file with an nkey seed."),
    fixed("notify[].nats.tls_required", Flag, "false", "With infera: refuse a server without TLS."),
    open("notify[].nats.tls_ca", Path, "With infera: PEM file with the authorities to trust. Default: the system's."),
    open(
        "notify[].nats.tls_cert",
        Path,
        "With infera: PEM file with the client certificate; needs notify[].nats.tls_key.",
    ),
    open("notify[].nats.tls_key", Path, "With infera: PEM file with the client certificate's key."),
    open(
        "notify[].etcd.url",
        WebUrl,
        "With infera or dynamo: its etcd, as \"http://10.0.0.1:2379\". Needed with backend = \"etcd\"; without it Infera's discovery is left as it is.",
    ),
    open("notify[].backend", OneOf(&["etcd", "file"]), "With dynamo: where its discovery is; needed."),
    open("notify[].folder", Path, "With dynamo and backend = \"file\": that folder, as in DYN_FILE_KV; needed."),
    fixed("notify[].etcd.prefix", Text, "/infera/workers/", "With infera: what the keys of its workers begin with."),
    fixed(
        "notify[].stand_in",
        Flag,
        "true",
        "With infera: whether requests to a lost worker are answered with an error until it serves again.",
    ),
    fixed(
        "notify[].max_requests",
        count(1, 10_000_000),
        "65536",
        "With infera: most requests of one worker that are remembered; the oldest makes room, and that is counted.",
    ),
    fixed(
        "notify[].max_age_s",
        seconds(1, 86_400),
        "3600",
        "With infera: how long a request is remembered, for its end is not seen.",
    ),
    open("worker[].name", Name, "Name of the worker in discovery; needed, and once on this node."),
    fixed("worker[].engine", Engine, "generic", "Profile of the engine: its critical processes and health services."),
    open("worker[].find.pid", count(1, 4_194_304), "The root process by its pid."),
    open("worker[].find.pid_file", Path, "The root process by a file with its pid, written after the process began."),
    open("worker[].find.port", count(1, 65_535), "The root process by the port that it listens on."),
    open("worker[].find.cmdline", Text, "The root process by a part of its command line, blanks between arguments."),
    open(
        "worker[].find.env",
        Text,
        "The root process by the value of LASTGASP_WORKER in its environment. Default: the worker's name.",
    ),
    fixed(
        "worker[].writer",
        OneOf(&["daemon", "worker"]),
        "daemon",
        "Writer of the record in discovery; the daemon adopts one that the worker writes.",
    ),
    open("worker[].endpoint", BaseUrl, "Where routers reach the worker; needed."),
    fixed("worker[].models", Texts, "", "Models that the worker serves, as clients name them."),
    fixed("worker[].labels", TextMap, "", "Labels that routers may select by."),
    open(
        "worker[].drain_window_ms",
        ms(0, 24 * HOUR_MS),
        "How long streams go on when the worker leaves. Default: worker[].shutdown_timeout_s or the engine's own grace where that is known, else 5000.",
    ),
    open(
        "worker[].termination_grace_s",
        seconds(0, 86_400),
        "terminationGracePeriodSeconds of the worker's pod, to check that the times of a deletion fit. Default: not checked.",
    ),
    fixed(
        "worker[].pre_stop_s",
        seconds(0, 86_400),
        "0",
        "How long the preStop hook of the worker's pod takes, for the same check.",
    ),
    open(
        "worker[].shutdown_timeout_s",
        seconds(0, 86_400),
        "How long the engine lets streams go on after SIGTERM, as `vllm serve --shutdown-timeout`. Default: what is known of the engine.",
    ),
    fixed(
        "worker[].on_not_serving",
        OneOf(&["drain", "lost", "unready"]),
        "drain",
        "Consequence when a liveness service says NOT_SERVING while the processes live.",
    ),
    fixed(
        "worker[].on_lost",
        ON_LOST,
        "none",
        "Action on the worker's processes when it is lost: `reap` kills what outlives the root, `terminate-root` ends a root that lives on, `kill-tree` kills the root and all below it.",
    ),
    open(
        "worker[].on_lost.command",
        Texts,
        "A program and its arguments to run then, instead of a word; it gets the certificate as JSON on its standard input.",
    ),
    fixed(
        "worker[].reap_grace_ms",
        ms(0, HOUR_MS),
        "5000",
        "How long those processes have to end by themselves; with `terminate-root`, and again between SIGTERM and SIGKILL.",
    ),
    fixed(
        "worker[].sever.enabled",
        Flag,
        "false",
        "Whether the worker's TCP connections are destroyed when it is lost, for routers that only watch their connections.",
    ),
    open(
        "worker[].sever.companion.pid",
        count(1, 4_194_304),
        "A process whose connections are destroyed too, as a sidecar's.",
    ),
    open("worker[].sever.companion.pid_file", Path, "The companion by a file with its pid."),
    open("worker[].sever.companion.port", count(1, 65_535), "The companion by the port that it listens on."),
    open("worker[].sever.companion.cmdline", Text, "The companion by a part of its command line."),
    fixed(
        "worker[].sever.spare_ports",
        Numbers { min: 1, max: 65_535 },
        SPARE_PORTS,
        "Connections to these ports stay: etcd's and NATS's unless others are named.",
    ),
    open(
        "worker[].dynamo_instance",
        Text,
        "Instance of the worker in Dynamo, as in the keys of its records. Default: the instance whose TCP port its processes listen on.",
    ),
    open("worker[].infera_id", Text, "Id of the worker in Infera. Default: host and port of worker[].endpoint."),
    fixed("worker[].critical", Patterns, "", "Titles of processes that are critical, besides the engine profile's."),
    open("worker[].health.grpc", Url, "Address of the gRPC health service."),
    open("worker[].health.services[].name", Text, "gRPC health service; empty is the server as a whole."),
    open(
        "worker[].health.services[].role",
        OneOf(&["liveness", "readiness"]),
        "Meaning of the service's status: liveness or readiness.",
    ),
    open("worker[].health.http", Url, "URL that answers 2xx while the worker serves, instead of gRPC."),
    fixed("worker[].health.check_interval_ms", ms(50, HOUR_MS), "1000", "Time between two checks."),
    fixed("worker[].health.check_timeout_ms", ms(10, HOUR_MS), "1000", "Time that a check has."),
    fixed(
        "worker[].health.hang_window_ms",
        ms(100, 24 * HOUR_MS),
        "10000",
        "How long checks go unanswered before the worker counts as hung.",
    ),
    fixed(
        "worker[].health.keepalive_ms",
        ms(10_000, HOUR_MS),
        "10000",
        "HTTP/2 keepalive of the health connection; gRPC servers may cut one that pings faster than every 10 s.",
    ),
];

impl Setting {
    /// The setting at a path whose indexes are numbers, as `worker[0].name`.
    pub(super) fn at(path: &str) -> Option<&'static Self> {
        let path = without_indexes(path);
        SCHEMA.iter().find(|setting| setting.path == path)
    }

    /// The environment variable, with `*` for an index: `LASTGASP_WORKER_*_HEALTH_GRPC`.
    #[must_use]
    pub fn env(&self) -> String {
        format!("{ENV_PREFIX}{}", self.path.replace("[]", ".*").replace('.', "_").to_uppercase())
    }
}

/// What may stand directly under a path without indexes (`""`, `nats`, `worker[]`): the next
/// segments, lists with their `[]`.
pub(super) fn children(parent: &str) -> Vec<&'static str> {
    let mut children: Vec<&'static str> = SCHEMA
        .iter()
        .filter_map(|setting| match parent {
            "" => Some(setting.path),
            _ => setting.path.strip_prefix(parent)?.strip_prefix('.'),
        })
        .map(|rest| rest.split('.').next().unwrap_or(rest))
        .collect();
    children.dedup();
    children
}

/// `worker[0].name` as it stands in the schema: `worker[].name`.
pub(super) fn without_indexes(path: &str) -> String {
    let mut inside = false;
    path.chars()
        .filter(|c| {
            match c {
                '[' => inside = true,
                ']' => inside = false,
                _ => return !inside,
            }
            true
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_is_a_value_of_its_kind() {
        for setting in SCHEMA {
            if let Some(default) = setting.default {
                setting.kind.read_text(default).unwrap_or_else(|error| panic!("{}: {error}", setting.path));
            }
        }
    }

    #[test]
    fn no_two_settings_share_a_path_or_a_variable() {
        for (i, setting) in SCHEMA.iter().enumerate() {
            for other in &SCHEMA[..i] {
                assert_ne!(setting.path, other.path);
                assert_ne!(setting.env(), other.env());
            }
            assert!(!RESERVED.contains(&setting.env().as_str()), "{}", setting.path);
            assert!(setting.help.ends_with('.'), "{}", setting.path);
        }
    }

    #[test]
    fn variables_are_the_path_in_capitals() {
        assert_eq!(Setting::at("nats.url").unwrap().env(), "LASTGASP_NATS_URL");
        assert_eq!(Setting::at("worker[7].health.grpc").unwrap().env(), "LASTGASP_WORKER_*_HEALTH_GRPC");
    }

    #[test]
    fn children_are_what_may_stand_in_a_table() {
        assert_eq!(children("worker[].find"), ["pid", "pid_file", "port", "cmdline", "env"]);
        assert!(children("").contains(&"worker[]"));
        assert_eq!(children("worker[].health.services[]"), ["name", "role"]);
    }
}
