//! `lastgasp drain`, `undrain`, `withdraw`: what the daemon is asked to do about a worker.

use std::io::{self, BufRead, IsTerminal, Write};
use std::time::Duration;

use clap::Args;
use jiff::SignedDuration;
use tonic::{Response, Status};

use super::CliError;
use super::ask::SocketArgs;
use super::output::{say, say_json};
use crate::status::client::{self, ClientError};
use crate::status::proto::{Commanded, DrainRequest, UndrainRequest, WithdrawRequest};

const EXIT_CODES: &str = "\
Exit codes: 0 decided, 1 refused as things stand, 64 wrong command line, 66 no such worker, 69 no
daemon answers, 77 its socket may not be opened.";

pub(super) fn drain_examples() -> String {
    format!(
        "\
Examples:
  lastgasp drain vllm-0                           for the worker's own drain window
  lastgasp drain vllm-0 --deadline 10m --reason 'new driver'
  lastgasp drain vllm-0 --deadline 0s             move its streams now

Routers send it no new work. Its streams go on until the deadline, then those that can be moved are
moved, and it is not listed again before `lastgasp undrain` or a new process, whatever its health
says; a restart of the daemon changes nothing in that. The daemon leaves its processes alone.

{EXIT_CODES}"
    )
}

pub(super) fn undrain_examples() -> String {
    format!(
        "\
Examples:
  lastgasp undrain vllm-0

The daemon lists the worker again at once if it is well, else as soon as it is.

{EXIT_CODES}"
    )
}

pub(super) fn withdraw_examples() -> String {
    format!(
        "\
Examples:
  lastgasp withdraw vllm-0 --reason 'garbled answers'
  lastgasp withdraw vllm-0 --reason 'garbled answers' --yes --output json

The daemon deletes the worker's record at once. Routers move its streams, and end visibly what they
cannot move. The worker is not listed again before `lastgasp undrain` or a new process; a restart of
the daemon changes nothing in that. The worker's processes are left alone: on_lost is not applied. To
let streams finish: `lastgasp drain`.

{EXIT_CODES}"
    )
}

#[derive(Debug, Args)]
pub(super) struct DrainArgs {
    /// Name of the worker, as `lastgasp status` shows it
    worker: String,
    /// How long the worker's streams go on, as 30s or 1h30m. Default: the worker's drain_window_ms
    #[arg(long, value_name = "TIME", value_parser = window)]
    deadline: Option<Duration>,
    /// Reason, for the record, the certificate and the log
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    reason: String,
    #[command(flatten)]
    socket: SocketArgs,
}

#[derive(Debug, Args)]
pub(super) struct UndrainArgs {
    /// Name of the worker, as `lastgasp status` shows it
    worker: String,
    #[command(flatten)]
    socket: SocketArgs,
}

#[derive(Debug, Args)]
pub(super) struct WithdrawArgs {
    /// Name of the worker, as `lastgasp status` shows it
    worker: String,
    /// Reason, for the tombstone, the certificate and the log
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// Withdraw without asking for confirmation
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

/// A time that is not negative, as jiff reads it.
fn window(text: &str) -> Result<Duration, String> {
    let time: SignedDuration = text.parse().map_err(|error| format!("{error}; write 30s, 5m or 1h30m"))?;
    Duration::try_from(time).map_err(|_| "a deadline lies in the future".to_owned())
}

pub(super) async fn drain(args: DrainArgs) -> Result<(), CliError> {
    let DrainArgs { worker, deadline, reason, socket } = args;
    let window_ms = deadline.map(|window| u64::try_from(window.as_millis()).unwrap_or(u64::MAX));
    let mut client = client::connect_control(&socket.socket).await?;
    answer(client.drain(DrainRequest { worker, window_ms, reason }).await, &socket)
}

pub(super) async fn undrain(args: UndrainArgs) -> Result<(), CliError> {
    let UndrainArgs { worker, socket } = args;
    let mut client = client::connect_control(&socket.socket).await?;
    answer(client.undrain(UndrainRequest { worker }).await, &socket)
}

pub(super) async fn withdraw(args: WithdrawArgs) -> Result<(), CliError> {
    let WithdrawArgs { worker, reason, yes, socket } = args;
    let mut client = client::connect_control(&socket.socket).await?;
    if !yes {
        confirm(&worker)?;
    }
    answer(client.withdraw(WithdrawRequest { worker, reason }).await, &socket)
}

fn answer(answer: Result<Response<Commanded>, Status>, socket: &SocketArgs) -> Result<(), CliError> {
    let commanded = answer.map_err(ClientError::from)?.into_inner();
    if socket.output.is_json() {
        return say_json(&commanded);
    }
    let Commanded { worker, state, message } = commanded;
    say(&format!("{worker}: {state}: {message}\n"))
}

/// Asks on the terminal. Where there is none, nobody can mean it by accident, nor on purpose.
fn confirm(worker: &str) -> Result<(), CliError> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return Err(CliError::NobodyToAsk);
    }
    let mut error = io::stderr().lock();
    write!(error, "Withdraw {worker}? What cannot be moved of its streams ends at once. [y/N] ")?;
    error.flush()?;
    let mut line = String::new();
    stdin.lock().read_line(&mut line)?;
    if matches!(line.trim(), "y" | "Y" | "yes") { Ok(()) } else { Err(CliError::NotMeant) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_a_time_from_now_on() {
        assert_eq!(window("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(window("0s"), Ok(Duration::ZERO));
        assert_eq!(window("500ms"), Ok(Duration::from_millis(500)));
        assert!(window("30").unwrap_err().ends_with("; write 30s, 5m or 1h30m"));
        assert_eq!(window("-5s"), Err("a deadline lies in the future".to_owned()));
    }
}
