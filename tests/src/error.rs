//! Why something could not be started or did not happen.

use std::path::PathBuf;

/// An error of the harness. `Debug` is `Display`, so that `unwrap` in a test tells it in words.
#[derive(thiserror::Error)]
pub enum HarnessError {
    /// A binary of the workspace is missing.
    #[error("{binary} is not built; run `{build}`")]
    NotBuilt {
        /// Where it should be.
        binary: PathBuf,
        /// What builds it.
        build: String,
    },
    /// There is no nats-server.
    #[error(
        "there is no nats-server 2.11 or later on the PATH or in target/tools; `cargo xtask test` or `cargo xtask \
         demo` fetches one, or name one in LASTGASP_NATS_SERVER"
    )]
    NoNatsServer,
    /// There is no nats-server that is too old.
    #[error(
        "there is no nats-server 2.10 in target/tools; `cargo xtask test` fetches one, or name one in \
         LASTGASP_OLD_NATS_SERVER"
    )]
    NoOldNatsServer,
    /// A program ended that should have served.
    #[error("{name} ended ({status}); it said:\n{log}")]
    Ended {
        /// Which.
        name: String,
        /// Its exit status.
        status: String,
        /// The end of its log.
        log: String,
    },
    /// Something was waited for in vain.
    #[error("waited in vain for {0}")]
    GaveUp(String),
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was done.
        what: String,
        /// Why it was refused.
        source: std::io::Error,
    },
    /// An HTTP request failed.
    #[error("HTTP: {0}")]
    Http(String),
    /// NATS refused or was not there.
    #[error("NATS: {0}")]
    Nats(async_nats::Error),
}

impl std::fmt::Debug for HarnessError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl HarnessError {
    /// With all its sources: reqwest's own text leaves out what happened.
    pub fn http(error: reqwest::Error) -> Self {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(error) = source {
            text.push_str(&format!(": {error}"));
            source = error.source();
        }
        Self::Http(text)
    }
}
