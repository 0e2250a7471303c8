//! The command line: `lastgasp run`, and all that asks a running daemon or needs none.

mod ask;
mod control;
mod manual;
mod output;

use lastgasp_protocol::ClosedName as _;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use lastgasp_process::log::{Flush, last_words};
use lastgasp_protocol::{DEATHS_STREAM, NODES_BUCKET, ROUTERS_BUCKET, WORKERS_BUCKET};
use serde_json::json;
use tracing_subscriber::EnvFilter;

use crate::config::schema::{SCHEMA, Setting};
use crate::config::{Config, ConfigError, Override, Problem};
use crate::doctor::{self, Grade};
use crate::effects::nats::{self, NatsError};
use crate::log;
use crate::status::client::ClientError;
use crate::status::render::Style;
use crate::status::story::NoSuchDeath;
use crate::supervisor::{self, RunError, RunOptions, SidecarError, SidecarOptions};
use ask::{DeathArgs, DeathsArgs, EventsArgs, StatusArgs, asking};
use control::{DrainArgs, UndrainArgs, WithdrawArgs};
use manual::{CompletionsArgs, ManArgs};
use output::{OutputArgs, say, say_json, style};

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
    /// 66: no such worker, or no such death.
    NoInput,
    /// 69: no daemon answers, or for `run`, a live lease of this node's name refuses us.
    Unavailable,
    /// 75: for `run --sidecar`, the engine did not serve within the startup deadline.
    NotYet,
    /// 77: the daemon's socket may not be opened.
    NotAllowed,
    /// 78: the configuration is wrong, or for `run`, too few files may be open.
    Config,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Clean => 0,
            Exit::Failed => 1,
            Exit::Broken => 2,
            Exit::Usage => 64,
            Exit::NoInput => 66,
            Exit::Unavailable => 69,
            Exit::NotYet => 75,
            Exit::NotAllowed => 77,
            Exit::Config => 78,
        })
    }
}

const EXAMPLES: &str = "\
Examples:
  lastgasp run --config /etc/lastgasp/lastgasp.toml      watch the workers named there
  lastgasp status                                        what the daemon of this node knows
  lastgasp events --follow                               state changes and deaths as they happen
  lastgasp death vllm-0                                  how that worker died last, moment by moment
  lastgasp drain vllm-0 --deadline 10m                   no new work for it; its streams go on for a while
  lastgasp check-config --config lastgasp.toml           is the configuration right?
  lastgasp doctor --config /etc/lastgasp/lastgasp.toml   would it work here, and what is missing?

Exit codes: 0 as asked, 1 failed or refused, 64 wrong command line, 66 no such worker or death, 69 no
daemon answers (for run: a live daemon has this node's name), 77 the daemon's socket may not be
opened, 78 wrong configuration. `doctor` has its own.";

const RUN_EXAMPLES: &str = "\
Examples:
  lastgasp run --config /etc/lastgasp/lastgasp.toml
  lastgasp run --config lastgasp.toml --mode observe      decide and report, change nothing
  lastgasp run --config lastgasp.toml --no-ebpf           without root: pidfd and health only
  LASTGASP_NATS_URL=nats://nats:4222 lastgasp run --config lastgasp.toml
  lastgasp run --sidecar --config lastgasp.toml           in an engine's pod: end when it is lost

Every setting can be given by environment too: `lastgasp check-config --settings` lists them all.

Exit codes: 0 after SIGTERM or SIGINT, 1 failed (for --sidecar also: the engine was lost, and is
withdrawn), 64 wrong command line, 69 a live daemon has this node's name, 75 the engine did not serve
within --startup-deadline, 78 wrong configuration or too few open files.";

const CHECK_EXAMPLES: &str = "\
Examples:
  lastgasp check-config --config lastgasp.toml
  lastgasp check-config --settings                every setting, its default and its variable

Exit codes: 0 right, 78 wrong.";

const DOCTOR_EXAMPLES: &str = "\
Examples:
  lastgasp doctor --config /etc/lastgasp/lastgasp.toml
  sudo -u lastgasp lastgasp doctor --config /etc/lastgasp/lastgasp.toml     as the user that will run it
  lastgasp doctor --json | jq -r '.findings[] | select(.grade != \"fine\") | .name'

Kernel programs are loaded, attached and let go again; NATS is only read; nothing is changed.

Exit codes: 0 all fine, 1 it works but something is missing, 2 it does not work, 64 wrong command
line.";

const CREATE_EXAMPLES: &str = "\
Examples:
  lastgasp create-buckets --config admin.toml
  LASTGASP_NATS_USER=admin LASTGASP_NATS_PASSWORD_FILE=admin.password lastgasp create-buckets

A daemon makes what is missing itself if it may. Where it may not, as under the permissions in
deploy/nats/, this command does it, once.

Exit codes: 0 all of it is there, 1 not made, 64 wrong command line, 78 wrong configuration.";

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
    #[command(after_help = ask::STATUS_EXAMPLES)]
    Status(StatusArgs),
    /// Show what has happened on this node
    #[command(after_help = ask::EVENTS_EXAMPLES)]
    Events(EventsArgs),
    /// List the deaths that are known
    #[command(after_help = ask::DEATHS_EXAMPLES)]
    Deaths(DeathsArgs),
    /// Tell how a worker died, moment by moment
    #[command(after_help = ask::DEATH_EXAMPLES)]
    Death(DeathArgs),
    /// Give a worker no new work, and move its streams after a while
    #[command(after_help = control::drain_examples())]
    Drain(DrainArgs),
    /// Take a drained or withdrawn worker into service again
    #[command(after_help = control::undrain_examples())]
    Undrain(UndrainArgs),
    /// Take a worker out of discovery at once, and move its streams
    #[command(after_help = control::withdraw_examples())]
    Withdraw(WithdrawArgs),
    /// Say whether a configuration is right, without running anything
    #[command(after_help = CHECK_EXAMPLES)]
    CheckConfig(CheckArgs),
    /// Say whether lastgasp works on this node, and what is missing
    #[command(after_help = DOCTOR_EXAMPLES)]
    Doctor(DoctorArgs),
    /// Print a script that completes this command line in a shell
    #[command(after_help = manual::COMPLETIONS_EXAMPLES)]
    Completions(CompletionsArgs),
    /// Write the manual pages, for packages
    #[command(after_help = manual::MAN_EXAMPLES, hide = true)]
    Man(ManArgs),
    /// Make the buckets and the stream of certificates on NATS, where a daemon may not
    #[command(after_help = CREATE_EXAMPLES)]
    CreateBuckets(CreateArgs),
}

#[derive(Debug, Args)]
struct ConfigArgs {
    /// Configuration file in TOML. Default: none, environment and built-in defaults count
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
    /// File that the daemon writes, in one step, once its sensors are attached and its first scan is over
    #[arg(long, value_name = "PATH")]
    ready_file: Option<PathBuf>,
    #[command(flatten)]
    sidecar: SidecarArgs,
    /// Filter of log lines, as `debug` or `info,lastgasp::core=trace`
    #[arg(long, value_name = "FILTER", env = "LASTGASP_LOG", default_value = "info")]
    log: String,
    /// Format of log lines, on standard error
    #[arg(long, value_enum, default_value = "text")]
    log_format: LogFormat,
}

/// In the pod of one engine.
#[derive(Debug, Args)]
struct SidecarArgs {
    /// Watch the one engine of this pod by pidfd, and end with 1 when it was lost and is withdrawn
    #[arg(long)]
    sidecar: bool,
    /// Name of the pod; the node is then NODE/POD. Default: the host name
    #[arg(long, value_name = "NAME", env = "LASTGASP_POD")]
    pod: Option<String>,
    /// How long a sidecar waits for its engine to serve, in seconds
    #[arg(long, value_name = "SECONDS", env = "LASTGASP_STARTUP_DEADLINE", default_value_t = 1800)]
    startup_deadline: u32,
}

impl SidecarArgs {
    fn options(self, config: &mut Config) -> Result<Option<SidecarOptions>, SidecarError> {
        let Self { sidecar, pod, startup_deadline } = self;
        if !sidecar {
            return Ok(None);
        }
        let pod = pod.or_else(crate::config::host_name).unwrap_or_default();
        SidecarOptions::new(config, &pod, Duration::from_secs(startup_deadline.into())).map(Some)
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LogFormat {
    /// For people
    Text,
    /// One object a line
    Json,
}

#[derive(Debug, Args)]
struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// List every setting instead: default, environment variable, what is allowed, what it is for
    #[arg(long)]
    settings: bool,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct CreateArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct DoctorArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// Why a command did not do what was asked.
#[derive(Debug, thiserror::Error)]
enum CliError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Sidecar(#[from] SidecarError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("--log {filter:?}: {error}; as an example, info,lastgasp::core=trace")]
    LogFilter { filter: String, error: tracing_subscriber::filter::ParseError },
    #[error("no worker {worker:?} on {node}; {}", there_are(.known))]
    NoSuchWorker { node: String, worker: String, known: Vec<String> },
    #[error(transparent)]
    NoSuchDeath(#[from] NoSuchDeath),
    #[error("cannot ask for confirmation without a terminal, so the worker stays in service; add --yes")]
    NobodyToAsk,
    #[error("not confirmed, so the worker stays in service")]
    NotMeant,
    #[error("{}: {error}; name a folder that can be written", path.display())]
    NotWritten { path: PathBuf, error: io::Error },
    #[error(transparent)]
    Nats(#[from] NatsError),
    #[error("not made: {0}")]
    NotMade(async_nats::Error),
    #[error("cannot write: {0}")]
    Output(#[from] io::Error),
}

impl CliError {
    fn exit(&self) -> Exit {
        match self {
            Self::Config(_) | Self::Sidecar(_) | Self::Nats(NatsError::Login(_)) => Exit::Config,
            Self::Run(error) => error.exit(),
            Self::Client(ClientError::NotThere { .. } | ClientError::Ended(_)) => Exit::Unavailable,
            Self::Client(ClientError::NotAllowed { .. }) => Exit::NotAllowed,
            Self::Client(ClientError::NoSuchWorker(_)) | Self::NoSuchWorker { .. } | Self::NoSuchDeath(_) => {
                Exit::NoInput
            }
            Self::LogFilter { .. } | Self::NobodyToAsk => Exit::Usage,
            // `lastgasp events | head` ends like this.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => Exit::Clean,
            Self::Client(_)
            | Self::Nats(_)
            | Self::NotMade(_)
            | Self::Output(_)
            | Self::NotMeant
            | Self::NotWritten { .. } => Exit::Failed,
        }
    }
}

fn there_are(workers: &[String]) -> String {
    match workers {
        [] => "there are none".to_owned(),
        [one] => format!("there is {one}"),
        many => format!("there are {}", many.join(", ")),
    }
}

/// The whole command line, as clap describes it.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
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
        Command::Status(args) => asking(ask::status(args)),
        Command::Events(args) => asking(ask::events(args)),
        Command::Deaths(args) => asking(ask::deaths(args)),
        Command::Death(args) => asking(ask::death(args)),
        Command::Drain(args) => asking(control::drain(args)),
        Command::Undrain(args) => asking(control::undrain(args)),
        Command::Withdraw(args) => asking(control::withdraw(args)),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::man(&args),
        Command::CheckConfig(args) => check_config(&args),
        Command::CreateBuckets(args) => create_buckets(&args),
        Command::Doctor(args) => match examine(&args) {
            Ok(Grade::Fine | Grade::Note) => Ok(()),
            Ok(Grade::Degraded) => return Exit::Failed,
            Ok(Grade::Broken) => return Exit::Broken,
            Err(error) => Err(error),
        },
    };
    match result {
        Ok(()) => Exit::Clean,
        Err(error) => {
            let exit = error.exit();
            match error {
                // Each line begins with its place, as compilers write it, so that editors find it.
                CliError::Config(ConfigError::Invalid(_)) => last_words(format!("{error}\n")),
                _ if exit == Exit::Clean => {}
                _ => last_words(format!("lastgasp: {error}\n")),
            }
            exit
        }
    }
}

// === run ===

fn run(args: RunArgs) -> Result<(), CliError> {
    let RunArgs { config, ready_file, sidecar, log, log_format } = args;
    let (mut config, mut warnings) = config.load()?;
    warnings.extend(config.misfits());
    let sidecar = sidecar.options(&mut config)?;
    let _flush = start_logging(&log, log_format)?;
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    let warnings = warnings.iter().map(ToString::to_string).collect();
    Ok(supervisor::run(config, RunOptions { ready_file, warnings, sidecar })?)
}

fn start_logging(filter: &str, format: LogFormat) -> Result<Flush, CliError> {
    let filter =
        EnvFilter::try_new(filter).map_err(|error| CliError::LogFilter { filter: filter.to_owned(), error })?;
    let (lines, flush) = log::start().map_err(|source| RunError::Io { what: "the log's thread", source })?;
    // What goes wrong with the log itself is not said on standard error either, where that would be waited for.
    let builder = tracing_subscriber::fmt().with_env_filter(filter).log_internal_errors(false).with_writer(lines);
    match format {
        LogFormat::Text => builder.with_ansi(style(&io::stderr()) == Style::Coloured).init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
    Ok(flush)
}

// === check-config ===

fn check_config(args: &CheckArgs) -> Result<(), CliError> {
    let CheckArgs { config: args, settings, output } = args;
    let json = output.is_json();
    if *settings {
        return if json { say_json(&settings_json()) } else { say(&settings_text()) };
    }
    let (config, mut warnings) = match args.load() {
        Err(ConfigError::Invalid(problems)) if json => {
            say_json(&json!({"right": false, "problems": as_texts(&problems)}))?;
            return Err(ConfigError::Invalid(problems).into());
        }
        loaded => loaded?,
    };
    warnings.extend(config.misfits());
    let workers: Vec<&str> = config.workers.iter().map(|worker| worker.name.as_str()).collect();
    if json {
        return say_json(&json!({
            "right": true,
            "node": config.node.as_str(),
            "mode": config.mode.as_str(),
            "workers": workers,
            "warnings": as_texts(&warnings),
        }));
    }
    for warning in &warnings {
        eprintln!("lastgasp: warning: {warning}");
    }
    let file = args.config.as_deref().unwrap_or(Path::new("configuration")).display();
    say(&format!(
        "{file}: right; node {}, mode {}, workers ({}): {}\n",
        config.node,
        config.mode.as_str(),
        workers.len(),
        workers.join(", ")
    ))
}

fn as_texts(problems: &[Problem]) -> Vec<String> {
    problems.iter().map(ToString::to_string).collect()
}

fn settings_json() -> Vec<serde_json::Value> {
    let one = |setting: &Setting| {
        json!({
            "path": setting.path,
            "help": setting.help,
            "allowed": setting.kind.allowed(),
            "default": setting.default,
            "variable": setting.env(),
        })
    };
    SCHEMA.iter().map(one).collect()
}

// === create-buckets ===

/// How long NATS may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

fn create_buckets(args: &CreateArgs) -> Result<(), CliError> {
    let (config, _) = args.config.load()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = nats::connect_once(&config.nats, &config.node, PATIENCE).await?;
        nats::create(client, config.replicas).await.map_err(CliError::NotMade)
    })?;
    if args.output.is_json() {
        let there = [WORKERS_BUCKET, NODES_BUCKET, ROUTERS_BUCKET, DEATHS_STREAM];
        return say_json(&json!({ "nats_url": config.nats.url, "there": there }));
    }
    say(&format!("{}: the buckets and the stream of certificates are there\n", config.nats.url))
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

fn examine(args: &DoctorArgs) -> Result<Grade, CliError> {
    let DoctorArgs { config, output } = args;
    let report = doctor::examine(config.load())?;
    let text =
        if output.is_json() { format!("{}\n", report.json()) } else { doctor::text(&report, style(&io::stdout())) };
    say(&text)?;
    Ok(report.grade)
}

#[cfg(test)]
mod tests {
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
    fn the_short_form_of_json_stands_for_the_long_one() {
        for flags in [&["--json"][..], &["--output", "json"], &["-o", "json"]] {
            let cli = Cli::try_parse_from([&["lastgasp", "deaths"], flags].concat()).unwrap();
            let Command::Deaths(args) = cli.command else { panic!("{cli:?}") };
            assert!(args.socket.output.is_json(), "{flags:?}");
        }
        assert!(Cli::try_parse_from(["lastgasp", "deaths", "--json", "--output", "text"]).is_err());
    }

    #[test]
    fn every_help_text_has_examples_and_no_line_is_too_long() {
        let mut whole = Cli::command();
        for name in whole.get_subcommands().map(|command| command.get_name().to_owned()).collect::<Vec<_>>() {
            let help = whole.find_subcommand_mut(&name).unwrap().render_long_help().to_string();
            assert!(help.contains("Examples:\n  lastgasp"), "{name}: {help}");
            let after = help.split("Examples:").nth(1).unwrap();
            assert!(after.lines().all(|line| line.len() <= 112), "{name}: {after}");
        }
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
