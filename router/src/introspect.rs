//! What a worker says of itself: the context length of its models, and which frontend it has.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::{Semaphore, mpsc};
use tracing::debug;

use crate::workers::{Listing, Models};

/// Longest wait for the list of models.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Times a worker is asked. It may be busy at first.
const ATTEMPTS: u32 = 5;
/// Workers asked at once. At a start there may be thousands, and each question takes a descriptor.
const AT_ONCE: usize = 64;

/// Asks every new listing once, until the sender is gone.
pub async fn run(mut arrivals: mpsc::UnboundedReceiver<Arc<Listing>>, client: reqwest::Client) {
    let room = Arc::new(Semaphore::new(AT_ONCE));
    while let Some(listing) = arrivals.recv().await {
        let (client, room) = (client.clone(), Arc::clone(&room));
        tokio::spawn(async move {
            for attempt in 0..ATTEMPTS {
                let asked = {
                    let _place = room.acquire().await.expect("it is never closed");
                    ask(&client, &listing.endpoint).await
                };
                match asked {
                    Ok(models) => {
                        _ = listing.models.set(models);
                        return;
                    }
                    Err(error) => debug!(worker = %listing.key, %error, "worker did not list its models"),
                }
                tokio::time::sleep(Duration::from_secs(1 << attempt)).await;
            }
        });
    }
}

async fn ask(client: &reqwest::Client, endpoint: &str) -> Result<Models, reqwest::Error> {
    let url = format!("{endpoint}/v1/models");
    let answer: Value = client.get(url).timeout(TIMEOUT).send().await?.error_for_status()?.json().await?;
    Ok(read(&answer))
}

/// `max_model_len` by model, as vLLM and SGLang tell it, and `owned_by`.
fn read(answer: &Value) -> Models {
    let models = || answer.get("data").and_then(Value::as_array).into_iter().flatten();
    let length = |model: &Value| Some((model.get("id")?.as_str()?.to_owned(), model.get("max_model_len")?.as_u64()?));
    Models {
        context: models().filter_map(length).collect(),
        python_frontend: models().next().is_some() && models().all(|model| model["owned_by"] == "vllm"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::{Json, Router};
    use lastgasp_protocol::WorkerRecord;
    use serde_json::json;
    use tokio::net::TcpListener;
    use tokio::sync::watch;

    use super::*;
    use crate::workers::Workers;
    use crate::workers::tests::record;

    #[tokio::test(start_paused = true)]
    async fn thousands_of_workers_are_not_asked_all_at_once() {
        const WORKERS: usize = 200;
        let (under_way, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let answered = watch::Sender::new(0);
        let (peak, count) = (Arc::clone(&most), answered.clone());
        let answer = async move || {
            peak.fetch_max(under_way.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            // This clock goes on only when whoever would ask has asked.
            tokio::time::sleep(Duration::from_secs(1)).await;
            under_way.fetch_sub(1, Ordering::Relaxed);
            count.send_modify(|answered| *answered += 1);
            Json(json!({ "data": [] }))
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });

        let (workers, arrivals) = Workers::new();
        tokio::spawn(run(arrivals, reqwest::Client::builder().no_proxy().build().unwrap()));
        for at in 0..WORKERS {
            workers.put(&WorkerRecord { endpoint: endpoint.clone(), ..record(&format!("w{at}"), "1", 1) }, 1);
        }
        answered.subscribe().wait_for(|answered| *answered == WORKERS).await.unwrap();
        assert_eq!(most.load(Ordering::Relaxed), AT_ONCE);
    }

    #[test]
    fn the_two_frontends_of_vllm_are_told_apart() {
        let said = |owner: &str| json!({ "data": [{ "id": "m", "owned_by": owner, "max_model_len": 2048 }] });
        let models = |python_frontend| Models { context: [("m".to_owned(), 2048)].into(), python_frontend };
        assert_eq!(read(&said("vllm")), models(true));
        assert_eq!(read(&said("vllm-frontend-rs")), models(false));
        assert_eq!(read(&json!({ "data": [] })), Models::default());
    }
}
