//! What API server and engine core say to each other: JSON, one message a line, over an
//! abstract unix socket (a real vLLM has ZMQ there).

use lastgasp_tests::model::{CoreFinish, Limits, Sampling, TokenId};
use serde::{Deserialize, Serialize};

/// From the API server to the engine core.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToCore {
    /// Run a request.
    Add { id: u64, prompt: Vec<TokenId>, limits: Limits, sampling: Sampling },
    /// Forget a request.
    Abort { id: u64 },
    /// Fork a compiler that exits after so many milliseconds.
    Compile { id: u64, millis: u64 },
    /// Produce nothing until asked to.
    Hang { on: bool },
}

/// From the engine core to the API server.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromCore {
    /// The model is loaded.
    Ready { pid: u32 },
    /// The tokens of one step.
    Step { outputs: Vec<CoreOutput> },
    /// The compiler that `id` asked for has exited.
    Compiled { id: u64, pid: u32 },
}

/// One token of one request.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct CoreOutput {
    pub(crate) id: u64,
    pub(crate) token: TokenId,
    pub(crate) finish: Option<CoreFinish>,
}
