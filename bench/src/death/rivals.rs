//! What others do: each notices one death, by its own means, and removes its record.

use std::time::Duration;

use lastgasp_tests::HarnessError;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::BenchError;
use super::records::{Record, Records};
use super::stage::monotonic_ns;

/// Between two polls, and how long an answer may take.
const POLL: Duration = Duration::from_secs(1);

/// When a rival saw the death, and when its deletion was acknowledged; monotonic, ns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Noticed {
    pub(super) evidence_ns: u64,
    pub(super) gone_ns: u64,
}

async fn removed(record: Record) -> Result<Noticed, BenchError> {
    let evidence_ns = monotonic_ns();
    record.delete().await?;
    Ok(Noticed { evidence_ns, gone_ns: monotonic_ns() })
}

/// grpc.health.v1 Watch of the whole server; begins when it has said SERVING.
pub(super) async fn watch(
    grpc: String,
    record: Record,
) -> Result<impl Future<Output = Result<Noticed, BenchError>> + Send + 'static, BenchError> {
    let failed = |error: String| BenchError::from(HarnessError::GaveUp(format!("health of {grpc}: {error}")));
    let channel = Endpoint::from_shared(grpc.clone()).map_err(|error| failed(error.to_string()))?.connect().await;
    let mut client = HealthClient::new(channel.map_err(|error| failed(error.to_string()))?);
    let request = HealthCheckRequest { service: String::new() };
    let stream = client.watch(request).await.map_err(|error| failed(error.to_string()))?;
    let mut stream = stream.into_inner();
    let first = stream.message().await.map_err(|error| failed(error.to_string()))?;
    if first.is_none_or(|first| first.status() != ServingStatus::Serving) {
        return Err(failed("it does not serve".to_owned()));
    }
    Ok(async move {
        while let Ok(Some(message)) = stream.message().await {
            if message.status() != ServingStatus::Serving {
                break;
            }
        }
        drop(client);
        removed(record).await
    })
}

/// `GET /health` every second, from a moment of its own within the first.
pub(super) async fn poll(endpoint: String, record: Record, phase: f64) -> Result<Noticed, BenchError> {
    let client = reqwest::Client::builder().no_proxy().timeout(POLL).build();
    let client = client.map_err(|error| HarnessError::Http(error.to_string()))?;
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + POLL.mul_f64(phase), POLL);
    loop {
        ticks.tick().await;
        let answer = client.get(format!("{endpoint}/health")).send().await;
        if answer.and_then(reqwest::Response::error_for_status).is_err() {
            return removed(record).await;
        }
    }
}

/// Renews the lease for ever, from a moment of its own within the first period.
pub(super) async fn renew(leases: Records, worker: String, ttl: Duration, phase: f64) -> Result<(), BenchError> {
    let period = ttl / 3;
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + period.mul_f64(phase), period);
    loop {
        ticks.tick().await;
        leases.lease(&worker, ttl).await?;
    }
}
