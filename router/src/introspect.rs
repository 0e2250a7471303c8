//! What a worker says of itself: the context length of its models.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::mpsc;
use tracing::debug;

use crate::workers::Listing;

/// Longest wait for the list of models.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Times a worker is asked. It may be busy at first.
const ATTEMPTS: u32 = 5;

/// Asks every new listing once, until the sender is gone.
pub async fn run(mut arrivals: mpsc::UnboundedReceiver<Arc<Listing>>, client: reqwest::Client) {
    while let Some(listing) = arrivals.recv().await {
        let client = client.clone();
        tokio::spawn(async move {
            for attempt in 0..ATTEMPTS {
                match ask(&client, &listing.endpoint).await {
                    Ok(context) => {
                        _ = listing.context.set(context);
                        return;
                    }
                    Err(error) => debug!(worker = %listing.key, %error, "models not listed"),
                }
                tokio::time::sleep(Duration::from_secs(1 << attempt)).await;
            }
        });
    }
}

/// `max_model_len` by model, as vLLM and SGLang tell it.
async fn ask(client: &reqwest::Client, endpoint: &str) -> Result<HashMap<String, u64>, reqwest::Error> {
    let url = format!("{endpoint}/v1/models");
    let answer: Value = client.get(url).timeout(TIMEOUT).send().await?.error_for_status()?.json().await?;
    let models = answer.get("data").and_then(Value::as_array).into_iter().flatten();
    Ok(models
        .filter_map(|model| Some((model.get("id")?.as_str()?.to_owned(), model.get("max_model_len")?.as_u64()?)))
        .collect())
}
