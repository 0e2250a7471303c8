//! The command line: `lastgasp run`, `status`, `events`, `check-config`, `doctor`.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use futures_util::StreamExt;
use jiff::Timestamp;
use tracing_subscriber::EnvFilter;

use crate::config::schema::SCHEMA;
use crate::config::{Config, ConfigError, Override, Problem};
use crate::doctor::{self, Verdict};
use crate::log;
use crate::status::client::{self, ClientError};
use crate::status::proto::{EventsRequest, GetStatusRequest, WatchStatusRequest};
use crate::status::render::{self, Style};
use crate::supervisor::{self, RunError, RunOptions};

/// Exit codes, after sysexits.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// 0: ended as asked.
    Clean,
    /// 1: anything that has no code of its own; for `doctor`, it works but could work better.
    Failed,
    /// 2: for `doctor` alone: it would not work.
    Broken,
    /// 64: the command line is wrong.
    Usage,
    /// 69: no daemon answers, or for `run`, a live lease of this node's name refuses us.
    Unavailable,
    /// 78: the configuration is wrong.
    Config,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Clean => 0,
            Exit::Failed => 1,
            Exit::Broken => 2,
            Exit::Usage => 64,
            Exit::Unavailable => 69,
            Exit::Config => 78,
        })
    }
}

const EXAMPLES: &str = "\
Examples:
  lastgasp run --config /etc/lastgasp.toml        watch the workers named there
  lastgasp status                                 what the daemon of this node knows
  lastgasp events --follow --json | jq .          certificates and state changes as they happen
  lastgasp check-config --config lastgasp.toml    is the configuration right?
  lastgasp doctor --config /etc/lastgasp.toml     would it work here, and what is missing?

Exit codes: 0 as asked, 1 failed, 64 wrong command line, 69 no daemon answers (for run: a live
daemon has this node's name), 78 wrong configuration.";

const RUN_EXAMPLES: &str = "\
Examples:
  lastgasp run --config /etc/lastgasp.toml
  lastgasp run --config lastgasp.toml --mode observe      decide and report, change nothing
  lastgasp run --config lastgasp.toml --no-ebpf           without root: pidfd and health only
  LASTGASP_NATS_URL=nats://nats:4222 lastgasp run --config lastgasp.toml

Every setting can be given by environment too: `lastgasp check-config --settings` lists them all.

Exit codes: 0 after SIGTERM or SIGINT, 1 failed, 64 wrong command line, 69 a live daemon has this
node's name, 78 wrong configuration.";

const STATUS_EXAMPLES: &str = "\
Examples:
  lastgasp status
  lastgasp status --watch
  lastgasp status --json | jq -r '.workers[] | [.worker, .state] | @tsv'";

const EVENTS_EXAMPLES: &str = "\
Examples:
  lastgasp events
  lastgasp events --follow
  lastgasp events --json | jq 'select(.event == \"certificate\") | .cause'";

const CHECK_EXAMPLES: &str = "\
Examples:
  lastgasp check-config --config lastgasp.toml
  lastgasp check-config --settings                every setting, its default and its variable

Exit codes: 0 right, 78 wrong.";

const DOCTOR_EXAMPLES: &str = "\
Examples:
  lastgasp doctor --config /etc/lastgasp.toml
  sudo -u lastgasp lastgasp doctor --config /etc/lastgasp.toml     as the user that will run it
  lastgasp doctor --json | jq -r '.findings[] | select(.verdict != \"fine\") | .name'

Kernel programs are loaded, attached and let go again; NATS is only read; nothing is changed.

Exit codes: 0 all fine, 1 it works but something is missing, 2 it does not work, 64 wrong command
line.";

#[derive(Debug, Parser)]
#[command(
    name = "lastgasp",
    version,
    about = "Sees an LLM engine die, withdraws it from discovery and moves its streams",
    after_help = EXAMPLES
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Watch the workers of this node
    #[command(after_help = RUN_EXAMPLES)]
    Run(RunArgs),
    /// Show what the daemon of this node knows
    #[command(after_help = STATUS_EXAMPLES)]
    Status(StatusArgs),
    /// Show what has happened on this node
    #[command(after_help = EVENTS_EXAMPLES)]
    Events(EventsArgs),
    /// Say whether a configuration is right, without running anything
    #[command(after_help = CHECK_EXAMPLES)]
    CheckConfig(CheckArgs),
    /// Say whether lastgasp works on this node, and what is missing
    #[command(after_help = DOCTOR_EXAMPLES)]
    Doctor(DoctorArgs),
}

#[derive(Debug, Args)]
struct ConfigArgs {
    /// Configuration in TOML; without it, environment and defaults count
    #[arg(long, value_name = "FILE", env = "LASTGASP_CONFIG")]
    config: Option<PathBuf>,
    /// Name of this node in discovery
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// NATS servers, separated by commas
    #[arg(long, value_name = "URL")]
    nats: Option<String>,
    /// enforce, or observe: decide and report, change nothing
    #[arg(long, value_name = "MODE")]
    mode: Option<String>,
    /// Never ask the kernel for eBPF
    #[arg(long)]
    no_ebpf: bool,
}

impl ConfigArgs {
    fn load(&self) -> Result<(Config, Vec<Problem>), ConfigError> {
        let Self { config, node, nats, mode, no_ebpf } = self;
        let mut flags: Vec<Override> = Vec::new();
        for (flag, path, value) in [("--node", "node", node), ("--nats", "nats.url", nats), ("--mode", "mode", mode)] {
            flags.extend(value.clone().map(|value| (flag, path, value)));
        }
        if *no_ebpf {
            flags.push(("--no-ebpf", "ebpf.enabled", "off".to_owned()));
        }
        // An empty LASTGASP_CONFIG, as templates write it, names no file.
        Config::load(config.as_deref().filter(|file| !file.as_os_str().is_empty()), &flags)
    }
}

#[derive(Debug, Args)]
struct RunArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Written, in one step, once the sensors are attached and the first scan is over
    #[arg(long, value_name = "PATH")]
    ready_file: Option<PathBuf>,
    /// What to log, as `debug` or `info,lastgasp::core=trace`
    #[arg(long, value_name = "FILTER", env = "LASTGASP_LOG", default_value = "info")]
    log: String,
    /// How to log, to standard error
    #[arg(long, value_enum, default_value = "text")]
    log_format: LogFormat,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LogFormat {
    /// For people
    Text,
    /// One object a line
    Json,
}

#[derive(Debug, Args)]
struct SocketArgs {
    /// The daemon's socket
    #[arg(long, value_name = "PATH", env = "LASTGASP_STATUS_SOCKET", default_value = "/run/lastgasp/lastgasp.sock")]
    socket: PathBuf,
    /// As JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct StatusArgs {
    #[command(flatten)]
    socket: SocketArgs,
    /// Again after every change, until interrupted; as JSON, one object a line
    #[arg(long)]
    watch: bool,
}

#[derive(Debug, Args)]
struct EventsArgs {
    #[command(flatten)]
    socket: SocketArgs,
    /// Go on with events as they happen, until interrupted
    #[arg(long)]
    follow: bool,
}

#[derive(Debug, Args)]
struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// List every setting instead: default, environment variable, what is allowed, what it is for
    #[arg(long)]
    settings: bool,
}

#[derive(Debug, Args)]
struct DoctorArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// Why a command did not do what was asked.
#[derive(Debug, thiserror::Error)]
enum CliError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("--log {filter:?}: {error}; as an example, info,lastgasp::core=trace")]
    LogFilter { filter: String, error: tracing_subscriber::filter::ParseError },
    #[error("cannot write: {0}")]
    Output(#[from] io::Error),
}

impl CliError {
    fn exit(&self) -> Exit {
        match self {
            Self::Config(_) => Exit::Config,
            Self::Run(error) => error.exit(),
            Self::Client(ClientError::NotThere { .. } | ClientError::Ended(_)) => Exit::Unavailable,
            Self::LogFilter { .. } => Exit::Usage,
            // `lastgasp events | head` ends like this.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Clean,
            Self::Client(_) | Self::Output(_) => Exit::Failed,
        }
    }
}

/// Does what the command line says.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> Exit {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come here too, for standard output.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage } else { Exit::Clean };
        }
    };
    let result = match cli.command {
        Command::Run(args) => run(args),
        Command::Status(args) => asking(status(args)),
        Command::Events(args) => asking(events(args)),
        Command::CheckConfig(args) => check_config(&args),
        Command::Doctor(args) => match examine(&args) {
            Ok(Verdict::Fine | Verdict::Note) => Ok(()),
            Ok(Verdict::Degraded) => return Exit::Failed,
            Ok(Verdict::Broken) => return Exit::Broken,
            Err(error) => Err(error),
        },
    };
    match result {
        Ok(()) => Exit::Clean,
        Err(error) => {
            let exit = error.exit();
            match error {
                // Each line begins with its place, as compilers write it, so that editors find it.
                CliError::Config(ConfigError::Invalid(_)) => drop(writeln!(log::Stderr, "{error}")),
                _ if exit == Exit::Clean => {}
                _ => drop(writeln!(log::Stderr, "lastgasp: {error}")),
            }
            exit
        }
    }
}

// === run ===

fn run(args: RunArgs) -> Result<(), CliError> {
    let RunArgs { config, ready_file, log, log_format } = args;
    let (config, warnings) = config.load()?;
    start_logging(&log, log_format)?;
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    Ok(supervisor::run(config, RunOptions { ready_file, warnings })?)
}

fn start_logging(filter: &str, format: LogFormat) -> Result<(), CliError> {
    let filter =
        EnvFilter::try_new(filter).map_err(|error| CliError::LogFilter { filter: filter.to_owned(), error })?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| log::Stderr);
    match format {
        LogFormat::Text => builder.with_ansi(style(&io::stderr()) == Style::Coloured).init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
    Ok(())
}

// === status and events ===

/// How often ages in a watched table move on without any change.
const REDRAW: Duration = Duration::from_secs(1);

fn asking(command: impl Future<Output = Result<(), CliError>>) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        tokio::select! {
            result = command => result,
            // The usual end of --watch and --follow.
            _ = tokio::signal::ctrl_c() => Ok(()),
        }
    })
}

async fn status(args: StatusArgs) -> Result<(), CliError> {
    let StatusArgs { socket: SocketArgs { socket, json }, watch } = args;
    let mut client = client::connect(&socket).await?;
    let style = style(&io::stdout());
    if !watch {
        let status = client.get_status(GetStatusRequest {}).await.map_err(ClientError::from)?.into_inner();
        return if json {
            say(&format!("{}\n", serde_json::to_string_pretty(&status).map_err(io::Error::from)?))
        } else {
            say(&render::status(&status, Timestamp::now(), style))
        };
    }
    let mut changes = client.watch_status(WatchStatusRequest {}).await.map_err(ClientError::from)?.into_inner();
    let terminal = io::stdout().is_terminal();
    let mut redraw = tokio::time::interval(REDRAW);
    let mut latest = None;
    loop {
        let changed = tokio::select! {
            change = changes.next() => {
                latest = Some(change.ok_or_else(|| ClientError::Ended("it closed the stream".to_owned()))?.map_err(ClientError::from)?);
                true
            }
            _ = redraw.tick() => false,
        };
        let Some(status) = &latest else { continue };
        if json {
            if changed {
                say(&format!("{}\n", serde_json::to_string(status).map_err(io::Error::from)?))?;
            }
        } else if terminal {
            // Home, and clear to the end of the screen (ECMA-48 CUP and ED).
            say(&format!("\u{1b}[H\u{1b}[J{}", render::status(status, Timestamp::now(), style)))?;
        } else if changed {
            say(&format!("{}\n", render::status(status, Timestamp::now(), style)))?;
        }
    }
}

async fn events(args: EventsArgs) -> Result<(), CliError> {
    let EventsArgs { socket: SocketArgs { socket, json }, follow } = args;
    let mut client = client::connect(&socket).await?;
    let style = style(&io::stdout());
    let mut events = client.events(EventsRequest { follow }).await.map_err(ClientError::from)?.into_inner();
    while let Some(event) = events.next().await {
        let event = event.map_err(ClientError::from)?;
        let line = if json { render::event_json(&event) } else { render::event(&event, style) };
        say(&format!("{line}\n"))?;
    }
    if follow { Err(ClientError::Ended("it closed the stream".to_owned()).into()) } else { Ok(()) }
}

// === check-config ===

fn check_config(args: &CheckArgs) -> Result<(), CliError> {
    let CheckArgs { config: args, settings } = args;
    if *settings {
        return say(&settings_text());
    }
    let (config, warnings) = args.load()?;
    for warning in &warnings {
        eprintln!("lastgasp: warning: {warning}");
    }
    let workers: Vec<&str> = config.workers.iter().map(|worker| worker.name.as_str()).collect();
    let file = args.config.as_deref().unwrap_or(Path::new("configuration")).display();
    say(&format!(
        "{file}: right; node {}, mode {}, workers ({}): {}\n",
        config.node,
        config.mode.as_str(),
        workers.len(),
        workers.join(", ")
    ))
}

fn settings_text() -> String {
    SCHEMA
        .iter()
        .map(|setting| {
            let default = match setting.default {
                Some("") => "  default: empty\n".to_owned(),
                Some(default) => format!("  default: {default}\n"),
                None => String::new(),
            };
            format!(
                "{}\n  {}\n  allowed: {}\n{default}  variable: {}\n\n",
                setting.path,
                setting.help,
                setting.kind.allowed(),
                setting.env()
            )
        })
        .collect()
}

// === doctor ===

fn examine(args: &DoctorArgs) -> Result<Verdict, CliError> {
    let DoctorArgs { config, json } = args;
    let report = doctor::examine(config.load())?;
    let text = if *json { format!("{}\n", report.json()) } else { doctor::text(&report, style(&io::stdout())) };
    say(&text)?;
    Ok(report.verdict)
}

// === output ===

/// `println!` would panic when the reader has gone.
fn say(text: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Colours for a terminal whose user has not said no (no-color.org).
fn style(stream: &impl IsTerminal) -> Style {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if stream.is_terminal() && !refused { Style::Coloured } else { Style::Plain }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_setting_is_listed() {
        let text = settings_text();
        for setting in SCHEMA {
            assert!(text.contains(setting.path) && text.contains(&setting.env()), "{}", setting.path);
        }
    }

    #[test]
    fn the_default_socket_is_the_settings_default() {
        let cli = Cli::try_parse_from(["lastgasp", "status"]).unwrap();
        let Command::Status(StatusArgs { socket, .. }) = cli.command else { panic!("{cli:?}") };
        let setting = SCHEMA.iter().find(|setting| setting.path == "status.socket").unwrap();
        assert_eq!(socket.socket.to_str(), setting.default);
    }

    #[test]
    fn flags_become_settings() {
        let cli =
            Cli::try_parse_from(["lastgasp", "run", "--node", "gpu-z", "--no-ebpf", "--mode", "observe"]).unwrap();
        let Command::Run(args) = cli.command else { panic!("{cli:?}") };
        let (config, _) = args.config.load().unwrap();
        assert_eq!(config.node.as_str(), "gpu-z");
        assert_eq!((config.ebpf.enabled, config.mode), (crate::config::EbpfMode::Off, crate::config::Mode::Observe));
    }

    #[test]
    fn a_wrong_flag_is_64_and_help_is_not() {
        assert_eq!(main(["lastgasp", "run", "--sokcet"].map(OsString::from)), Exit::Usage);
        assert_eq!(main(["lastgasp", "--version"].map(OsString::from)), Exit::Clean);
    }
}
