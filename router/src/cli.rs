//! The command line.

use std::net::SocketAddr;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use lastgasp_protocol::Name;
use lastgasp_protocol::login::Login;

use crate::config::Config;
use crate::memory;

/// An OpenAI-compatible router that continues a token stream on another worker when its own dies.
///
/// Workers are taken from the NATS bucket `lastgasp_workers`, whoever writes them there.
#[derive(Debug, Clone, Parser)]
#[command(
    version,
    after_help = "Examples:
  # Route, and retry what has produced nothing yet; streams are not moved.
  lastgasp-router --nats nats://127.0.0.1:4222 --listen 127.0.0.1:8080

  # Let a stream be moved up to three times, and refuse moves that cannot be exact.
  lastgasp-router --nats nats://127.0.0.1:4222 --listen :8080 --migration-limit 3 --strict

  # Log in with a password and a client certificate.
  lastgasp-router --nats tls://nats:4222 --nats-user router --nats-password-file /run/secrets/nats \
    --nats-tls-ca ca.pem --nats-tls-cert router.pem --nats-tls-key router-key.pem

Exit codes: 0 after SIGTERM or SIGINT, 64 for a wrong command line, 78 for a file or an address
that cannot be used, 1 otherwise."
)]
pub struct Args {
    /// NATS servers, separated by commas. Credentials come from files, never from a URL.
    #[arg(long, value_name = "URL", env = "LASTGASP_NATS_URL", default_value = "nats://127.0.0.1:4222")]
    pub nats: String,

    /// Who the router is for NATS, and whom it trusts.
    #[command(flatten)]
    pub login: LoginArgs,

    /// Replicas of buckets that do not exist yet.
    #[arg(long, value_name = "N", env = "LASTGASP_NATS_REPLICAS", default_value_t = 1)]
    pub nats_replicas: usize,

    /// Address to listen on; `:PORT` is every address, port 0 takes a free one.
    #[arg(long, value_name = "ADDR", env = "LASTGASP_ROUTER_LISTEN", default_value = "127.0.0.1:8080", value_parser = address)]
    pub listen: SocketAddr,

    /// How often one stream may be moved. 0 moves none, and adds nothing to requests.
    #[arg(long, value_name = "N", env = "LASTGASP_MIGRATION_LIMIT", default_value_t = 0)]
    pub migration_limit: u32,

    /// Refuse moves that are not exact: by text, and of requests with penalties or a seed.
    #[arg(long, env = "LASTGASP_ROUTER_STRICT")]
    pub strict: bool,

    /// Token ids that end a sequence, for models whose special tokens are shown as text.
    #[arg(long, value_name = "ID", env = "LASTGASP_EOS_TOKEN_IDS", value_delimiter = ',')]
    pub eos_token_id: Vec<u32>,

    /// How often a request is sent to another worker before anything was produced, and a stream that is
    /// moved before it goes on.
    #[arg(long, value_name = "N", env = "LASTGASP_MAX_RETRIES", default_value_t = 2)]
    pub max_retries: u32,

    /// How long to wait for a worker where there is none, in seconds.
    #[arg(long, value_name = "SECONDS", env = "LASTGASP_WAIT_FOR_WORKER", default_value = "10", value_parser = seconds)]
    pub wait_for_worker: Duration,

    /// Ask a worker whether it is well once it was silent for so many seconds, before or within its
    /// answer, and go elsewhere if it is not. For nodes that no daemon watches. Off by default: a long
    /// prompt may take minutes. A worker of a node whose lease lapsed is asked after 2 seconds anyway.
    #[arg(long, value_name = "SECONDS", env = "LASTGASP_STALL_TIMEOUT", value_parser = seconds)]
    pub stall_timeout: Option<Duration>,

    /// Tell clients which worker answers, in the header `x-lastgasp-worker`, and in comments of a stream that
    /// a worker is sought and that the stream was moved. Clients then learn names of nodes.
    #[arg(long, env = "LASTGASP_TELL_CLIENTS")]
    pub tell_clients: bool,

    /// How long streams may go on after SIGTERM, in seconds.
    #[arg(long, value_name = "SECONDS", env = "LASTGASP_SHUTDOWN_TIMEOUT", default_value = "30", value_parser = seconds)]
    pub shutdown_timeout: Duration,

    /// Largest request body, in bytes.
    #[arg(long, value_name = "BYTES", env = "LASTGASP_MAX_BODY", default_value_t = 64 * 1024 * 1024)]
    pub max_body: usize,

    /// Bytes of bodies that are held at once, those of streams until they end; more are refused with
    /// status 503. A body takes up to three times its bytes while it is read. By default a quarter of the
    /// memory that the router may use, and room for one largest body at least.
    #[arg(long, value_name = "BYTES", env = "LASTGASP_MAX_BODIES")]
    pub max_bodies: Option<usize>,

    /// How long a client may take to send the head of a request, and again its body, in seconds. An
    /// idle connection is closed after as long.
    #[arg(long, value_name = "SECONDS", env = "LASTGASP_REQUEST_TIMEOUT", default_value = "60", value_parser = seconds)]
    pub request_timeout: Duration,

    /// Requests under way at once; more are refused with status 503.
    #[arg(long, value_name = "N", env = "LASTGASP_MAX_REQUESTS", default_value_t = 8192)]
    pub max_requests: usize,

    /// Connections of clients at once; more wait.
    #[arg(long, value_name = "N", env = "LASTGASP_MAX_CONNECTIONS", default_value_t = 16384)]
    pub max_connections: usize,

    /// Threads that serve requests. By default as many as the router may use cores, and 8 at the most: each
    /// carries about a thousand streams, and keeps connections to workers of its own.
    #[arg(long, value_name = "N", env = "LASTGASP_ROUTER_THREADS", default_value_t = threads(), hide_default_value = true)]
    pub threads: NonZero<usize>,

    /// File with the keys that clients must send as `Authorization: Bearer KEY`, one a line.
    #[arg(long, value_name = "FILE", env = "LASTGASP_API_KEY_FILE")]
    pub api_key_file: Option<PathBuf>,

    /// File with the keys, one a line, with which engines may be changed through
    /// `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`: each goes to every worker that
    /// serves. They are no keys of clients. By default no client may.
    #[arg(long, value_name = "FILE", env = "LASTGASP_ADMIN_KEY_FILE")]
    pub admin_key_file: Option<PathBuf>,

    /// PEM file with the certificate chain, to serve HTTPS instead of HTTP.
    #[arg(long, value_name = "FILE", env = "LASTGASP_ROUTER_TLS_CERT", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// PEM file with the certificate's key.
    #[arg(long, value_name = "FILE", env = "LASTGASP_ROUTER_TLS_KEY", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// Name of this router in its answers to signals; each router needs its own. Default: made up at the start.
    #[arg(long, value_name = "NAME", env = "LASTGASP_ROUTER_NAME")]
    pub name: Option<Name>,

    /// File that the router writes once it listens and has listed the workers: {"pid":1,"listen":"127.0.0.1:8080"}.
    #[arg(long, value_name = "PATH")]
    pub ready_file: Option<PathBuf>,

    /// Filter of log lines, as for `RUST_LOG`.
    #[arg(long, value_name = "FILTER", env = "LASTGASP_LOG", default_value = "info,async_nats=warn")]
    pub log: String,

    /// Format of log lines, on standard error.
    #[arg(long, value_name = "FORMAT", env = "LASTGASP_LOG_FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

/// Who we are for NATS: at most one of user, token, nkey and credentials.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct LoginArgs {
    /// NATS user name.
    #[arg(
        long,
        value_name = "NAME",
        env = "LASTGASP_NATS_USER",
        requires = "nats_password_file",
        group = "nats_login"
    )]
    nats_user: Option<String>,

    /// File with the password and nothing else.
    #[arg(long, value_name = "FILE", env = "LASTGASP_NATS_PASSWORD_FILE", requires = "nats_user")]
    nats_password_file: Option<PathBuf>,

    /// File with a NATS token and nothing else.
    #[arg(long, value_name = "FILE", env = "LASTGASP_NATS_TOKEN_FILE", group = "nats_login")]
    nats_token_file: Option<PathBuf>,

    /// File with an nkey seed.
    #[arg(long, value_name = "FILE", env = "LASTGASP_NATS_NKEY_SEED_FILE", group = "nats_login")]
    nats_nkey_seed_file: Option<PathBuf>,

    /// NATS credentials file, with a JWT and its seed, as `nsc` writes it.
    #[arg(long, value_name = "FILE", env = "LASTGASP_NATS_CREDENTIALS", group = "nats_login")]
    nats_credentials: Option<PathBuf>,

    /// Refuse a NATS server without TLS.
    #[arg(long, env = "LASTGASP_NATS_TLS_REQUIRED")]
    nats_tls_required: bool,

    /// PEM file with the authorities that a NATS server's certificate may come from. Default: the
    /// system's.
    #[arg(long, value_name = "FILE", env = "LASTGASP_NATS_TLS_CA")]
    nats_tls_ca: Option<PathBuf>,

    /// PEM file with the client certificate for NATS.
    #[arg(long, value_name = "FILE", env = "LASTGASP_NATS_TLS_CERT", requires = "nats_tls_key")]
    nats_tls_cert: Option<PathBuf>,

    /// PEM file with the client certificate's key.
    #[arg(long, value_name = "FILE", env = "LASTGASP_NATS_TLS_KEY", requires = "nats_tls_cert")]
    nats_tls_key: Option<PathBuf>,
}

impl From<LoginArgs> for Login {
    fn from(args: LoginArgs) -> Self {
        let LoginArgs {
            nats_user: user,
            nats_password_file: password_file,
            nats_token_file: token_file,
            nats_nkey_seed_file: nkey_seed_file,
            nats_credentials: creds_file,
            nats_tls_required: tls_required,
            nats_tls_ca: tls_ca,
            nats_tls_cert: tls_cert,
            nats_tls_key: tls_key,
        } = args;
        Self { user, password_file, token_file, creds_file, nkey_seed_file, tls_required, tls_ca, tls_cert, tls_key }
    }
}

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

impl Args {
    /// The proxy's part, with keys read from their files.
    ///
    /// # Errors
    /// A file of keys cannot be read, or has none; a key is one of clients and of admins; or one body may be larger
    /// than all together.
    pub fn config(&self) -> Result<Config, String> {
        let api_keys = keys("--api-key-file", self.api_key_file.as_deref())?;
        let admin_keys = keys("--admin-key-file", self.admin_key_file.as_deref())?;
        if admin_keys.iter().any(|key| api_keys.contains(key)) {
            return Err("--admin-key-file: has a key that --api-key-file has too; give admins one of their own".into());
        }
        let max_bodies = self.max_bodies.unwrap_or_else(|| (memory::usable() / 4).max(self.max_body));
        if max_bodies < self.max_body {
            return Err(format!(
                "--max-bodies {max_bodies}: there must be room for one largest body; lower --max-body {} or raise it",
                self.max_body
            ));
        }
        Ok(Config {
            migration_limit: self.migration_limit,
            strict: self.strict,
            eos_token_ids: self.eos_token_id.clone(),
            max_retries: self.max_retries,
            wait_for_worker: self.wait_for_worker,
            stall_timeout: self.stall_timeout,
            tell_clients: self.tell_clients,
            max_body: self.max_body,
            max_bodies,
            max_requests: self.max_requests,
            request_timeout: self.request_timeout,
            api_keys,
            admin_keys,
        })
    }
}

/// The keys of a file, one a line; none without a file.
fn keys(flag: &str, path: Option<&Path>) -> Result<Vec<String>, String> {
    let Some(path) = path else { return Ok(Vec::new()) };
    let text = std::fs::read_to_string(path).map_err(|error| format!("{flag} {}: {error}", path.display()))?;
    let keys: Vec<String> = text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect();
    if keys.is_empty() {
        return Err(format!("{flag} {}: has no key; write one a line", path.display()));
    }
    Ok(keys)
}

fn threads() -> NonZero<usize> {
    const MOST: NonZero<usize> = NonZero::new(8).expect("it is not zero");
    // A limit of the cgroup counts too.
    std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN).min(MOST)
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let whole = if text.starts_with(':') { format!("0.0.0.0{text}") } else { text.to_owned() };
    whole.parse().map_err(|_| "write an IP address and a port, like 127.0.0.1:8080, [::1]:8080 or :8080".to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "write a number of seconds, like 10 or 0.5".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|_| "write a number of seconds that is not negative".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn streams_are_not_moved_unless_asked_for() {
        assert_eq!(Args::parse_from(["lastgasp-router"]).config().unwrap().migration_limit, 0);
    }

    #[test]
    fn one_login_is_enough() {
        let parse = |flags: &[&str]| Args::try_parse_from([&["lastgasp-router"], flags].concat());
        assert!(parse(&["--nats-user", "router", "--nats-password-file", "f"]).is_ok());
        assert!(parse(&["--nats-user", "router"]).is_err());
        assert!(parse(&["--nats-token-file", "f", "--nats-credentials", "g"]).is_err());
        let login = Login::from(parse(&["--nats-nkey-seed-file", "f", "--nats-tls-required"]).unwrap().login);
        assert_eq!(login, Login { nkey_seed_file: Some("f".into()), tls_required: true, ..Login::default() });
    }

    #[test]
    fn addresses_and_times_are_read_as_people_write_them() {
        assert_eq!(address(":80"), Ok("0.0.0.0:80".parse().unwrap()));
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert!(seconds("-1").is_err() && seconds("soon").is_err() && address("host:80").is_err());
    }
}
