//! One question to a worker's health source, for `lastgasp doctor`.

use tonic::transport::Endpoint;

use super::grpc::{self, NAMES, Reply};
use super::http;
use super::machine::Answer;
use crate::config::HealthConfig;
use crate::network::{Dialer, Namespace};
use tokio::time::Instant;

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// It serves.
    Serving,
    /// It does not.
    NotServing,
    /// There is no service of that name; these are there.
    NoSuchService(Vec<String>),
    /// The server has no health service.
    Unimplemented,
    /// Nobody listens.
    Refused,
    /// No answer in time, or the connection broke.
    Unanswered,
    /// Something else.
    Other(String),
}

/// Asks every configured service once, within the configured time; HTTP has one, named `""`. It is asked from
/// within that network namespace, or from this thread's own.
pub async fn ask(config: &HealthConfig, namespace: Option<Namespace>) -> Vec<(String, Asked)> {
    let dialer = Dialer::from(namespace);
    match (&config.grpc, &config.http) {
        (Some(address), _) => ask_grpc(address, config, dialer).await,
        (None, Some(address)) => vec![(String::new(), ask_http(address, config, dialer).await)],
        (None, None) => Vec::new(),
    }
}

async fn ask_grpc(address: &str, config: &HealthConfig, dialer: Dialer) -> Vec<(String, Asked)> {
    let names: Vec<String> = match &config.services[..] {
        [] => vec![String::new()],
        services => services.iter().map(|service| service.name.clone()).collect(),
    };
    let endpoint = match Endpoint::from_shared(address.to_owned()) {
        Ok(endpoint) => endpoint.connect_timeout(config.check_timeout),
        Err(error) => return names.into_iter().map(|name| (name, Asked::Other(error.to_string()))).collect(),
    };
    let channel = endpoint.connect_with_connector_lazy(dialer);
    let deadline = || Instant::now() + config.check_timeout;
    let replies = grpc::ask(&channel, &names, deadline()).await;
    let mut known = None;
    let mut asked = Vec::new();
    for (name, reply) in names.into_iter().zip(replies) {
        let outcome = match reply {
            Reply::Answered(Answer::NoSuchService) => {
                if known.is_none() {
                    let names = NAMES.map(ToOwned::to_owned);
                    let replies = grpc::ask(&channel, &names, deadline()).await;
                    let there = names.into_iter().zip(replies).filter(|(_, reply)| reply.is_status());
                    known = Some(there.map(|(name, _)| format!("{name:?}")).collect::<Vec<_>>());
                }
                Asked::NoSuchService(known.clone().unwrap_or_default())
            }
            Reply::Answered(answer) => answered(answer),
            Reply::Refused => Asked::Refused,
            Reply::Broken | Reply::Late => Asked::Unanswered,
            Reply::NotAsked => cannot_ask(),
        };
        asked.push((name, outcome));
    }
    asked
}

async fn ask_http(address: &str, config: &HealthConfig, dialer: Dialer) -> Asked {
    match http::ask_once(address, config.check_timeout, dialer).await {
        Some(Reply::Answered(answer)) => answered(answer),
        Some(Reply::Refused) => Asked::Refused,
        Some(Reply::Broken | Reply::Late) => Asked::Unanswered,
        Some(Reply::NotAsked) => cannot_ask(),
        None => Asked::Other("must be http://HOST:PORT/PATH".to_owned()),
    }
}

fn cannot_ask() -> Asked {
    Asked::Other("not asked: the daemon has no descriptor or port left".to_owned())
}

fn answered(answer: Answer) -> Asked {
    match answer {
        Answer::Serving => Asked::Serving,
        Answer::NotServing => Asked::NotServing,
        Answer::NoSuchService => Asked::NoSuchService(Vec::new()),
        Answer::Unimplemented => Asked::Unimplemented,
        Answer::Undecided => Asked::Other("has not decided whether it serves".to_owned()),
        Answer::Other(says) => Asked::Other(says),
    }
}
