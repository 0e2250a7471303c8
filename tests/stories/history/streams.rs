//! Clients that ask all the while, and what became of their streams.

use std::net::SocketAddr;
use std::time::Duration;

use lastgasp_tests::client::{Ending, LiveStream, Transcript};
use lastgasp_tests::matrix;
use lastgasp_tests::model::{Dialect, Endpoint};
use lastgasp_tests::reference::Reference;
use serde_json::{Value, json};

use crate::scene::was_moved;

/// A request, and when it is made.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) after: Duration,
    pub(crate) router: usize,
    endpoint: Endpoint,
    body: Value,
}

/// What became of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StreamOutcome {
    /// Every token, as if nothing had happened.
    Exact {
        /// Another worker has finished it.
        moved: bool,
    },
    /// The client learned of it, by a status, an error event or a broken connection; what it had got by then was right.
    VisiblyFailed(String),
}

impl Request {
    pub(crate) fn random(rng: &mut fastrand::Rng, routers: usize) -> Self {
        let prompt = format!("question {}", rng.u32(..1000));
        let max_tokens = rng.u32(100..400);
        let mut body = json!({"model": "tiny", "max_tokens": max_tokens, "ignore_eos": true, "return_token_ids": true});
        let endpoint = if rng.bool() {
            body["prompt"] = prompt.into();
            Endpoint::Completions
        } else {
            body["messages"] = json!([{"role": "user", "content": prompt}]);
            Endpoint::Chat
        };
        Self { after: Duration::from_millis(rng.u64(..2500)), router: rng.usize(..routers), endpoint, body }
    }

    /// Asks, reads to the end, and judges.
    pub(crate) async fn ask(self, address: SocketAddr, dialect: Dialect) -> StreamOutcome {
        let reference = Reference::of(self.endpoint, &self.body, &dialect).unwrap();
        let stream = match LiveStream::open(address, self.endpoint, &self.body).await {
            Ok(stream) => stream,
            Err(error) => {
                matrix::count("streams visibly failed", 1);
                return StreamOutcome::VisiblyFailed(error.to_string());
            }
        };
        // Silence is no visible failure.
        judge(&stream.finish().await.unwrap(), &reference)
    }
}

fn judge(transcript: &Transcript, reference: &Reference) -> StreamOutcome {
    let failure = match (&transcript.error, &transcript.ending) {
        _ if transcript.status != 200 => Some(format!("status {}", transcript.status)),
        (Some(error), _) => Some(error.to_string()),
        (None, Some(Ending::Broken(why))) => Some(why.clone()),
        _ => None,
    };
    match failure {
        Some(why) => {
            assert!(reference.ids.starts_with(&transcript.ids), "wrong tokens before {why}: {transcript:#?}");
            matrix::count("streams visibly failed", 1);
            StreamOutcome::VisiblyFailed(why)
        }
        None => {
            reference.assert_equals(transcript);
            StreamOutcome::Exact { moved: was_moved(transcript) }
        }
    }
}
