//! Migration signals, and the two answers to each.

use lastgasp_protocol::ClosedName as _;
use std::sync::Arc;

use async_nats::{Message, Subject};
use futures_util::StreamExt;
use lastgasp_protocol::kv::backoff;
use lastgasp_protocol::{Action, Answer, Counts, MIGRATE_WILDCARD, MigrateSignal, Phase, SCHEMA};
use tracing::{info, warn};

use super::NatsClient;
use crate::workers::Listing;

/// Hears signals for as long as the router runs. The subscription outlives reconnects.
pub(super) async fn run(client: NatsClient) {
    for attempts in 0.. {
        match client.client.subscribe(MIGRATE_WILDCARD).await {
            Ok(mut signals) => {
                while let Some(message) = signals.next().await {
                    hear(&client, message).await;
                }
                warn!("the subscription to signals ended");
            }
            Err(error) => warn!(%error, "cannot subscribe to signals"),
        }
        tokio::time::sleep(backoff(attempts)).await;
    }
}

async fn hear(client: &NatsClient, message: Message) {
    let metrics = &client.proxy.metrics;
    let signal = match MigrateSignal::parse(&message.subject, &message.payload) {
        Ok(signal) => signal,
        Err(error) => {
            warn!(subject = %message.subject, %error, "signal not read");
            metrics.signals.with_label_values(&[error.as_str()]).inc();
            return;
        }
    };
    // Only put into the client's queue here, which takes microseconds; behind a thousand
    // streams that wake it would leave after the daemon has asked again.
    if let Some(reply) = message.reply.clone() {
        answer(client, &reply, &signal.certificate, Phase::Received, None).await;
    }
    let (listings, heard) = client.proxy.workers.signal(&signal);
    for heard in &heard {
        metrics.signals.with_label_values(&[heard.as_str()]).inc();
    }
    let MigrateSignal { schema: _, node, action, mode, certificate, workers, cause } = signal;
    let names: Vec<&str> = workers.iter().map(|worker| worker.worker.as_str()).collect();
    info!(node = %node, ?action, ?mode, certificate, ?names, %cause, ?heard, "signal");
    if let Some(reply) = message.reply {
        let client = client.clone();
        tokio::spawn(async move {
            let counts = if action == Action::Move { settled(&listings).await } else { Counts::default() };
            answer(&client, &reply, &certificate, Phase::Done, Some(counts)).await;
            let Counts { streams, moved, unmovable, failed } = counts;
            info!(certificate, streams, moved, unmovable, failed, "signal carried out");
        });
    }
}

async fn settled(listings: &[Arc<Listing>]) -> Counts {
    let mut sum = Counts::default();
    for listing in listings {
        let Counts { streams, moved, unmovable, failed } = listing.settled().await;
        sum.streams += streams;
        sum.moved += moved;
        sum.unmovable += unmovable;
        sum.failed += failed;
    }
    sum
}

async fn answer(client: &NatsClient, reply: &Subject, certificate: &str, phase: Phase, counts: Option<Counts>) {
    let router = client.settings.name.clone();
    let answer = Answer { schema: SCHEMA, router, certificate: certificate.to_owned(), phase, counts };
    if let Err(error) = client.client.publish(reply.clone(), answer.to_json().into()).await {
        warn!(%error, "answer not sent");
    }
}
