//! `lastgasp status`, `events`, `deaths`, `death`: what the daemon of this node knows.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use futures_util::StreamExt;
use jiff::Timestamp;
use lastgasp_protocol::Certificate;
use tonic::transport::Channel;

use super::CliError;
use super::output::{OutputArgs, say, say_json, style};
use crate::status::client::{self, ClientError};
use crate::status::proto::status_client::StatusClient;
use crate::status::proto::{DeathsRequest, EventsRequest, GetStatusRequest, WatchStatusRequest};
use crate::status::render::{self, Style};
use crate::status::{NodeStatus, WorkerStatus, story};

#[derive(Debug, Args)]
pub(super) struct SocketArgs {
    /// The daemon's socket
    #[arg(long, value_name = "PATH", env = "LASTGASP_STATUS_SOCKET", default_value = "/run/lastgasp/lastgasp.sock")]
    pub(super) socket: PathBuf,
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

pub(super) const STATUS_EXAMPLES: &str = "\
Examples:
  lastgasp status
  lastgasp status vllm-0                          one worker in full
  lastgasp status --watch
  lastgasp status --output json | jq -r '.workers[] | [.worker, .state] | @tsv'

Exit codes: 0 as asked, 66 no such worker, 69 no daemon answers, 77 its socket may not be opened.";

pub(super) const EVENTS_EXAMPLES: &str = "\
Examples:
  lastgasp events
  lastgasp events --follow
  lastgasp events --output json | jq 'select(.event == \"certificate\") | .cause'

Exit codes: 0 as asked, 69 no daemon answers or it ended, 77 its socket may not be opened.";

pub(super) const DEATHS_EXAMPLES: &str = "\
Examples:
  lastgasp deaths
  lastgasp deaths --output json | jq -r '.[] | [.at, .worker, .cause.kind] | @tsv'

The daemon knows the deaths of this node that NATS keeps, and those since its own start.

Exit codes: 0 as asked, 69 no daemon answers, 77 its socket may not be opened.";

pub(super) const DEATH_EXAMPLES: &str = "\
Examples:
  lastgasp death 01KB8Z                           by the beginning of its id, as `lastgasp deaths` shows it
  lastgasp death vllm-0                           the last one of this worker
  lastgasp death vllm-0 --output json | jq .timeline

Exit codes: 0 as asked, 66 no such death or several, 69 no daemon answers, 77 its socket may not be
opened.";

#[derive(Debug, Args)]
pub(super) struct StatusArgs {
    /// Show this worker alone, in full
    worker: Option<String>,
    #[command(flatten)]
    pub(super) socket: SocketArgs,
    /// Show the status again after every change, until interrupted; as JSON, one object a line
    #[arg(long)]
    watch: bool,
}

#[derive(Debug, Args)]
pub(super) struct EventsArgs {
    #[command(flatten)]
    socket: SocketArgs,
    /// Go on with events as they happen, until interrupted
    #[arg(long, short)]
    follow: bool,
}

#[derive(Debug, Args)]
pub(super) struct DeathsArgs {
    #[command(flatten)]
    pub(super) socket: SocketArgs,
}

#[derive(Debug, Args)]
pub(super) struct DeathArgs {
    /// The beginning of a certificate's id, or a worker's name for its last one
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    socket: SocketArgs,
}

/// How often ages in a watched table move on without any change.
const REDRAW: Duration = Duration::from_secs(1);

/// Runs a command that asks the daemon.
pub(super) fn asking(command: impl Future<Output = Result<(), CliError>>) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        tokio::select! {
            result = command => result,
            // The usual end of --watch and --follow.
            _ = tokio::signal::ctrl_c() => Ok(()),
        }
    })
}

pub(super) async fn status(args: StatusArgs) -> Result<(), CliError> {
    let StatusArgs { worker, socket: SocketArgs { socket, output }, watch } = args;
    let mut client = client::connect(&socket).await?;
    let view = View { worker, style: style(&io::stdout()), json: output.is_json() };
    if !watch {
        let status = client.get_status(GetStatusRequest {}).await.map_err(ClientError::from)?.into_inner();
        return say(&view.whole(&status)?);
    }
    let mut changes = client.watch_status(WatchStatusRequest {}).await.map_err(ClientError::from)?.into_inner();
    let terminal = io::stdout().is_terminal();
    let mut redraw = tokio::time::interval(REDRAW);
    let mut latest = None;
    loop {
        let changed = tokio::select! {
            change = changes.next() => {
                latest = Some(change.ok_or_else(|| ClientError::Ended("the stream was closed".to_owned()))?.map_err(ClientError::from)?);
                true
            }
            _ = redraw.tick() => false,
        };
        let Some(status) = &latest else { continue };
        if view.json {
            if changed {
                say(&view.line(status)?)?;
            }
        } else if terminal {
            // Home, and clear to the end of the screen (ECMA-48 CUP and ED).
            say(&format!("\u{1b}[H\u{1b}[J{}", view.whole(status)?))?;
        } else if changed {
            say(&format!("{}\n", view.whole(status)?))?;
        }
    }
}

/// What of a status is shown, and how.
struct View {
    worker: Option<String>,
    style: Style,
    json: bool,
}

impl View {
    /// For a person; as JSON over several lines.
    fn whole(&self, status: &NodeStatus) -> Result<String, CliError> {
        let pretty = |text: serde_json::Result<String>| Ok(format!("{}\n", text.map_err(io::Error::from)?));
        match &self.worker {
            None if self.json => pretty(serde_json::to_string_pretty(status)),
            None => Ok(render::status(status, Timestamp::now(), self.style)),
            Some(name) if self.json => pretty(serde_json::to_string_pretty(find(status, name)?)),
            Some(name) => Ok(render::worker(&status.node, find(status, name)?, Timestamp::now(), self.style)),
        }
    }

    /// As JSON in one line.
    fn line(&self, status: &NodeStatus) -> Result<String, CliError> {
        let text = match &self.worker {
            None => serde_json::to_string(status),
            Some(name) => serde_json::to_string(find(status, name)?),
        };
        Ok(format!("{}\n", text.map_err(io::Error::from)?))
    }
}

fn find<'a>(status: &'a NodeStatus, name: &str) -> Result<&'a WorkerStatus, CliError> {
    status.workers.iter().find(|worker| worker.worker == name).ok_or_else(|| {
        let known = status.workers.iter().map(|worker| worker.worker.clone()).collect();
        CliError::NoSuchWorker { node: status.node.clone(), worker: name.to_owned(), known }
    })
}

pub(super) async fn events(args: EventsArgs) -> Result<(), CliError> {
    let EventsArgs { socket: SocketArgs { socket, output }, follow } = args;
    let mut client = client::connect(&socket).await?;
    let style = style(&io::stdout());
    let mut events = client.events(EventsRequest { follow }).await.map_err(ClientError::from)?.into_inner();
    while let Some(event) = events.next().await {
        let event = event.map_err(ClientError::from)?;
        let line = if output.is_json() { render::event_json(&event) } else { render::event(&event, style) };
        say(&format!("{line}\n"))?;
    }
    if follow { Err(ClientError::Ended("the stream was closed".to_owned()).into()) } else { Ok(()) }
}

pub(super) async fn deaths(args: DeathsArgs) -> Result<(), CliError> {
    let DeathsArgs { socket: SocketArgs { socket, output } } = args;
    let deaths = known_deaths(&mut client::connect(&socket).await?).await?;
    if output.is_json() {
        say_json(&deaths)
    } else {
        say(&story::deaths(&deaths, Timestamp::now(), style(&io::stdout())))
    }
}

pub(super) async fn death(args: DeathArgs) -> Result<(), CliError> {
    let DeathArgs { id, socket: SocketArgs { socket, output } } = args;
    let deaths = known_deaths(&mut client::connect(&socket).await?).await?;
    let death = story::find(&deaths, &id)?;
    if output.is_json() { say_json(death) } else { say(&story::death(death, Timestamp::now(), style(&io::stdout()))) }
}

async fn known_deaths(client: &mut StatusClient<Channel>) -> Result<Vec<Certificate>, CliError> {
    let mut stream = client.deaths(DeathsRequest {}).await.map_err(ClientError::from)?.into_inner();
    let mut deaths = Vec::new();
    while let Some(death) = stream.next().await {
        let json = death.map_err(ClientError::from)?.certificate_json;
        deaths.push(serde_json::from_str(&json).map_err(io::Error::from)?);
    }
    Ok(deaths)
}
