//! `kind = "webhook"`: the notice as the body of a POST.

use reqwest::header::{AUTHORIZATION, CONTENT_TYPE};
use reqwest::{Certificate, StatusCode};

use super::Failure;
use crate::config::WebhookConfig;
use crate::log::with_cause;

/// One connection, or none yet.
pub(super) struct Client(Result<reqwest::Client, String>);

impl Client {
    pub(super) fn new(config: &WebhookConfig) -> Self {
        Self(build(config))
    }

    /// Posts `body` as JSON. Any 2xx is success; a 4xx that does not ask for patience is final.
    pub(super) async fn post(&self, config: &WebhookConfig, body: Vec<u8>) -> Result<(), Failure> {
        let client = self.0.as_ref().map_err(|error| Failure::Refused(error.clone()))?;
        let mut request = client.post(&config.url).header(CONTENT_TYPE, "application/json");
        for (name, value) in &config.headers {
            request = request.header(name, value);
        }
        if let Some(file) = &config.token_file {
            // Read every time: a token is replaced while the daemon runs.
            let token = tokio::fs::read_to_string(file).await;
            let token = token.map_err(|error| Failure::Later(format!("token_file {}: {error}", file.display())))?;
            request = request.header(AUTHORIZATION, format!("Bearer {}", token.trim()));
        }
        // Without the address, which may hold a secret in its path.
        let response = request.body(body).send().await;
        let response = response.map_err(|error| Failure::Later(with_cause(&error.without_url())))?;
        match response.status() {
            status if status.is_success() => Ok(()),
            status @ (StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS) => {
                Err(Failure::Later(status.to_string()))
            }
            status if status.is_client_error() => Err(Failure::Refused(status.to_string())),
            status => Err(Failure::Later(status.to_string())),
        }
    }
}

fn build(config: &WebhookConfig) -> Result<reqwest::Client, String> {
    // A redirect would take the token elsewhere.
    let mut builder = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .user_agent(concat!("lastgasp/", env!("CARGO_PKG_VERSION")));
    if config.url.starts_with("https:") {
        match &config.tls_ca {
            Some(file) => {
                let unusable = |error: &dyn std::fmt::Display| format!("tls_ca {}: {error}", file.display());
                let pem = std::fs::read(file).map_err(|error| unusable(&error))?;
                for certificate in Certificate::from_pem_bundle(&pem).map_err(|error| unusable(&error))? {
                    builder = builder.add_root_certificate(certificate);
                }
            }
            None => {
                for certificate in rustls_native_certs::load_native_certs().certs {
                    builder = builder
                        .add_root_certificate(Certificate::from_der(&certificate).map_err(|error| error.to_string())?);
                }
            }
        }
    }
    builder.build().map_err(|error| error.to_string())
}
