//! A client for an operator's HTTP or HTTPS server.

use std::path::Path;

use reqwest::Certificate;

/// Trusts the authorities in this PEM file, or the system's. Follows no redirect: that would take a token
/// elsewhere.
///
/// # Errors
/// For people: the file is not there or no PEM; or what the TLS library says.
pub(crate) fn client(url: &str, tls_ca: Option<&Path>) -> Result<reqwest::Client, String> {
    let mut builder = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .user_agent(concat!("lastgasp/", env!("CARGO_PKG_VERSION")));
    if url.starts_with("https:") {
        match tls_ca {
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
