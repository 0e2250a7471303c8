//! `kind = "webhook"`: the notification as the body of a POST.

use reqwest::StatusCode;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE};

use super::DeliveryFailure;
use crate::config::WebhookConfig;
use crate::https;
use crate::log::with_cause;

/// One connection, or none yet.
pub(super) struct Client(Result<reqwest::Client, String>);

impl Client {
    pub(super) fn new(config: &WebhookConfig) -> Self {
        Self(https::client(&config.url, config.tls_ca.as_deref()))
    }

    /// Posts `body` as JSON. Any 2xx is success; a 4xx that does not ask for patience is final.
    pub(super) async fn post(&self, config: &WebhookConfig, body: Vec<u8>) -> Result<(), DeliveryFailure> {
        let client = self.0.as_ref().map_err(|error| DeliveryFailure::Refused(error.clone()))?;
        let mut request = client.post(&config.url).header(CONTENT_TYPE, "application/json");
        for (name, value) in &config.headers {
            request = request.header(name, value);
        }
        if let Some(file) = &config.token_file {
            // Read every time: a token is replaced while the daemon runs.
            let token = tokio::fs::read_to_string(file).await;
            let token =
                token.map_err(|error| DeliveryFailure::Later(format!("token_file {}: {error}", file.display())))?;
            request = request.header(AUTHORIZATION, format!("Bearer {}", token.trim()));
        }
        // Without the address, which may hold a secret in its path.
        let response = request.body(body).send().await;
        let response = response.map_err(|error| DeliveryFailure::Later(with_cause(&error.without_url())))?;
        match response.status() {
            status if status.is_success() => Ok(()),
            status @ (StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS) => {
                Err(DeliveryFailure::Later(status.to_string()))
            }
            status if status.is_client_error() => Err(DeliveryFailure::Refused(status.to_string())),
            status => Err(DeliveryFailure::Later(status.to_string())),
        }
    }
}
