//! What a worker says of itself: the context length of its models, and which frontend it has.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::mpsc;
use tracing::debug;

use crate::workers::{Listing, Models};

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
                    Ok(models) => {
                        _ = listing.models.set(models);
                        return;
                    }
                    Err(error) => debug!(worker = %listing.key, %error, "models not listed"),
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
    use serde_json::json;

    use super::*;

    #[test]
    fn the_two_frontends_of_vllm_are_told_apart() {
        let said = |owner: &str| json!({ "data": [{ "id": "m", "owned_by": owner, "max_model_len": 2048 }] });
        let models = |python_frontend| Models { context: [("m".to_owned(), 2048)].into(), python_frontend };
        assert_eq!(read(&said("vllm")), models(true));
        assert_eq!(read(&said("vllm-frontend-rs")), models(false));
        assert_eq!(read(&json!({ "data": [] })), Models::default());
    }
}
