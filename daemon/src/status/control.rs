//! `lastgasp.v1.Control`: from the socket to the supervisor, and its answer back.

use std::time::Duration;

use lastgasp_protocol::{Cause, CauseKind, Sender};
use tokio::sync::{mpsc, oneshot};
use tonic::transport::server::UdsConnectInfo;

use super::proto::{self, Commanded, DrainRequest, UndrainRequest, WithdrawRequest};
use crate::core::{Command, RefusedCommand};

/// Longest reason, in bytes: with who asked for it, it fits into a record.
pub(crate) const MAX_REASON: usize = 200;

/// Something that a person or a program asks for.
#[derive(Debug)]
pub(crate) struct Request {
    /// Name of the worker.
    pub worker: String,
    /// What.
    pub command: Command,
    /// By whom and why.
    pub cause: Cause,
    /// Where the answer goes.
    pub reply: oneshot::Sender<Result<Commanded, CommandError>>,
}

/// Why nothing was done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// No worker has this name.
    #[error("no worker {worker:?} on this node; there {}", known(.workers))]
    Unknown {
        /// What was asked for.
        worker: String,
        /// Those that there are.
        workers: Vec<String>,
    },
    /// It makes no sense where the worker stands.
    #[error("{worker}: {refused}")]
    Refused {
        /// Which worker.
        worker: String,
        /// Why.
        refused: RefusedCommand,
    },
    /// The daemon changes nothing.
    #[error("mode = \"observe\" changes nothing; run the daemon with mode = \"enforce\" for that")]
    Observing,
}

fn known(workers: &[String]) -> String {
    match workers {
        [] => "are none".to_owned(),
        [one] => format!("is {one}"),
        many => format!("are {}", many.join(", ")),
    }
}

impl From<CommandError> for tonic::Status {
    fn from(error: CommandError) -> Self {
        let text = error.to_string();
        match error {
            CommandError::Unknown { .. } => Self::not_found(text),
            CommandError::Refused { .. } | CommandError::Observing => Self::failed_precondition(text),
        }
    }
}

pub(super) struct ControlService {
    pub(super) commands: mpsc::Sender<Request>,
}

impl ControlService {
    async fn ask(
        &self,
        worker: String,
        command: Command,
        cause: Cause,
    ) -> Result<tonic::Response<Commanded>, tonic::Status> {
        let gone = || tonic::Status::unavailable("the daemon is ending");
        let (reply, answer) = oneshot::channel();
        self.commands.send(Request { worker, command, cause, reply }).await.map_err(|_| gone())?;
        Ok(tonic::Response::new(answer.await.map_err(|_| gone())??))
    }
}

/// Who asks, as the kernel tells it of the peer of a socket (unix(7), `SO_PEERCRED`), and why.
fn cause<T>(request: &tonic::Request<T>, reason: &str) -> Result<Cause, tonic::Status> {
    if reason.len() > MAX_REASON || reason.contains(char::is_control) {
        let text = format!("reason: {} bytes; allowed: at most {MAX_REASON}, without control characters", reason.len());
        return Err(tonic::Status::invalid_argument(text));
    }
    let peer = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
    let pid = peer.and_then(|peer| peer.pid()).and_then(|pid| u32::try_from(pid).ok());
    let sender = pid.map(|pid| {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        Sender { pid, comm: comm.trim_end().to_owned(), cgroup: None }
    });
    let reason = Some(reason.to_owned()).filter(|reason| !reason.is_empty());
    Ok(Cause { sender, reason, ..Cause::of(CauseKind::Commanded) })
}

#[tonic::async_trait]
impl proto::control_server::Control for ControlService {
    async fn drain(&self, request: tonic::Request<DrainRequest>) -> Result<tonic::Response<Commanded>, tonic::Status> {
        let cause = cause(&request, &request.get_ref().reason)?;
        let DrainRequest { worker, window_ms, reason: _ } = request.into_inner();
        self.ask(worker, Command::Drain { window: window_ms.map(Duration::from_millis) }, cause).await
    }

    async fn undrain(
        &self,
        request: tonic::Request<UndrainRequest>,
    ) -> Result<tonic::Response<Commanded>, tonic::Status> {
        let cause = cause(&request, "")?;
        self.ask(request.into_inner().worker, Command::Undrain, cause).await
    }

    async fn withdraw(
        &self,
        request: tonic::Request<WithdrawRequest>,
    ) -> Result<tonic::Response<Commanded>, tonic::Status> {
        let cause = cause(&request, &request.get_ref().reason)?;
        if cause.reason.is_none() {
            return Err(tonic::Status::invalid_argument("reason: is missing; say why"));
        }
        self.ask(request.into_inner().worker, Command::Withdraw, cause).await
    }
}
