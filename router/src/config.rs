//! What the operator chose, however it was said.

use std::time::Duration;

/// Behaviour of the proxy.
#[derive(Debug, Clone)]
pub struct Config {
    /// Moves in the life of one stream; 0 switches all of it off.
    pub migration_limit: u32,
    /// Refuse moves that cannot be exact.
    pub strict: bool,
    /// Ids that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Times a request is sent elsewhere before anything was produced.
    pub max_retries: u32,
    /// How long a worker is waited for where there is none.
    pub wait_for_worker: Duration,
    /// A stream that is silent for so long has its worker probed.
    pub stall_timeout: Option<Duration>,
    /// Answers say which worker answers, that one is sought, and that the stream was moved.
    pub tell_clients: bool,
    /// Largest request body, in bytes.
    pub max_body: usize,
    /// Most bytes of all bodies that are held at once.
    pub max_bodies: usize,
    /// Requests under way at once.
    pub max_requests: usize,
    /// How long a client may take to send a request's body.
    pub request_timeout: Duration,
    /// Keys that are accepted; none means that no key is asked for.
    pub api_keys: Vec<String>,
    /// Keys with which engines may be changed; none means that nobody may.
    pub admin_keys: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            migration_limit: 0,
            strict: false,
            eos_token_ids: Vec::new(),
            max_retries: 2,
            wait_for_worker: Duration::from_secs(10),
            stall_timeout: None,
            tell_clients: false,
            max_body: 64 * 1024 * 1024,
            max_bodies: 256 * 1024 * 1024,
            max_requests: 8192,
            request_timeout: Duration::from_secs(60),
            api_keys: Vec::new(),
            admin_keys: Vec::new(),
        }
    }
}
