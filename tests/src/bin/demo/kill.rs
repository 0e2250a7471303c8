//! One kill, and what followed how long after it.

use std::time::Instant;

use lastgasp_protocol::Certificate;
use lastgasp_tests::client::{Ending, LiveStream};
use lastgasp_tests::model::{Endpoint, TokenId};
use lastgasp_tests::reference::Reference;
use nix::sys::signal::Signal;
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::stage::Stage;
use crate::{Arguments, Outcome, show};

/// What one kill did.
pub(crate) struct Kill {
    /// Whose engine core was killed.
    pub(crate) worker: String,
    /// The certificate that the daemon wrote.
    pub(crate) certificate: Certificate,
    /// Microseconds from just before `kill()` to each moment.
    pub(crate) moments: Vec<(String, i64)>,
    pub(crate) to_router_acted_us: Option<i64>,
    pub(crate) to_next_token_us: Option<i64>,
    pub(crate) expected: usize,
    pub(crate) received: usize,
    pub(crate) missing: usize,
    pub(crate) repeated: usize,
    /// The stream ended as an uninterrupted one does.
    pub(crate) whole: bool,
}

impl Kill {
    /// When the first moment of this name was, in microseconds since the kill.
    pub(crate) fn moment(&self, what: &str) -> Option<i64> {
        self.moments.iter().find(|(name, _)| name == what).map(|(_, at)| *at)
    }

    /// When the kernel first reported it.
    pub(crate) fn to_evidence_us(&self) -> Option<i64> {
        ["signal_delivered", "process_exit", "process_gone"].iter().filter_map(|what| self.moment(what)).min()
    }
}

fn question(tokens: u32) -> Value {
    json!({
        "model": "tiny",
        "messages": [{"role": "user", "content": "What does an engine say that is killed?"}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": true,
        "return_token_ids": true,
    })
}

/// Kills the serving engine's core half-way through an answer that is shown as it comes.
pub(crate) async fn in_front_of_an_audience(stage: &Stage, arguments: &Arguments) -> Outcome<Kill> {
    let body = question(arguments.tokens);
    let stream = stage.router.stream(Endpoint::Chat, &body).await?;
    kill(stage, &body, stream, arguments.tokens as usize / 2, true).await
}

/// The same, with a short answer that nobody reads.
pub(crate) async fn unseen(stage: &Stage, arguments: &Arguments) -> Outcome<Kill> {
    let tokens = arguments.tokens.min(24);
    let body = question(tokens);
    let stream = stage.router.stream(Endpoint::Chat, &body).await?;
    kill(stage, &body, stream, tokens as usize / 3, false).await
}

async fn kill(stage: &Stage, body: &Value, mut stream: LiveStream, before: usize, shown: bool) -> Outcome<Kill> {
    let worker = stream.transcript.worker.clone().ok_or("the router did not say which worker answers")?;
    let worker = worker.rsplit('/').next().unwrap_or_default().to_owned();
    let engine = stage.engine(&worker)?;
    let mut audience = show::Audience::new(shown);
    audience.begin(&worker);
    while stream.transcript.ids.len() < before {
        stream.tokens(1).await?;
        audience.hear(&stream.transcript.text);
    }

    audience.kill(&worker, engine.core.pid);
    let (killed_ns, killed) = (monotonic_ns(), Instant::now());
    engine.signal_core(Signal::SIGKILL);

    while stream.transcript.ending.is_none() && stream.transcript.finish_reasons.is_empty() {
        stream.tokens(1).await?;
        audience.hear(&stream.transcript.text);
    }
    let transcript = stream.finish().await?;
    audience.end();

    let certificate = stage.discovery.certificate(&worker, |found| found.at_monotonic_ns >= killed_ns).await?;
    let first_us = i64::try_from((certificate.at_monotonic_ns - killed_ns) / 1000)?;
    let moments = certificate.timeline.iter().map(|moment| (moment.what.clone(), first_us + moment.at_us)).collect();
    let since = |at: Instant| i64::try_from(at.saturating_duration_since(killed).as_micros()).unwrap_or(i64::MAX);
    let acted = transcript.events.iter().find(|event| event.at >= killed && event.raw.contains(": lastgasp moved"));
    let reference = Reference::of(Endpoint::Chat, body, &engine.dialect()).map_err(|error| format!("{error:?}"))?;
    let (missing, repeated) = compare(&reference.ids, &transcript.ids);
    Ok(Kill {
        worker,
        certificate,
        moments,
        to_router_acted_us: acted.map(|event| since(event.at)),
        to_next_token_us: transcript.next_token_after(killed).map(since),
        expected: reference.ids.len(),
        received: transcript.ids.len(),
        missing,
        repeated,
        whole: transcript.text == reference.text
            && transcript.error.is_none()
            && transcript.dones == 1
            && transcript.finish_reasons == [reference.finish_reason]
            && transcript.ending == Some(Ending::Whole),
    })
}

/// Tokens that are missing, and tokens that are there but should not be. The two sequences are
/// equal but for one seam, so what precedes and follows it is cut away.
fn compare(expected: &[TokenId], received: &[TokenId]) -> (usize, usize) {
    let ahead = expected.iter().zip(received).take_while(|(a, b)| a == b).count();
    let (expected, received) = (&expected[ahead..], &received[ahead..]);
    let behind = expected.iter().rev().zip(received.iter().rev()).take_while(|(a, b)| a == b).count();
    (expected.len() - behind, received.len() - behind)
}

fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has a monotonic clock");
    u64::try_from(now.tv_sec() * 1_000_000_000 + now.tv_nsec()).expect("time since boot is positive")
}

#[cfg(test)]
mod tests {
    use super::compare;

    #[test]
    fn what_is_missing_and_what_is_repeated_is_told() {
        assert_eq!(compare(&[1, 2, 3, 4], &[1, 2, 3, 4]), (0, 0));
        assert_eq!(compare(&[1, 2, 3, 4], &[1, 2, 4]), (1, 0));
        assert_eq!(compare(&[1, 2, 3, 4], &[1, 2, 2, 3, 4]), (0, 1));
        assert_eq!(compare(&[1, 2, 3, 4], &[1, 2, 9, 9]), (2, 2));
        assert_eq!(compare(&[1, 2, 3, 4], &[]), (4, 0));
    }
}
