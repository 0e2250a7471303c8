//! The command line.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use lastgasp_tests::model::{Dialect, Frontend};
use serde::{Deserialize, Serialize};

const EXAMPLES: &str = "\
Examples:
  # An engine like `vllm serve`; ask it for an answer.
  mock-engine --port 8000 &
  curl -N localhost:8000/v1/completions -H 'content-type: application/json' \\
    -d '{\"prompt\":\"Hi\",\"stream\":true,\"max_tokens\":50,\"return_token_ids\":true}'

  # Like `vllm-rs serve`, on ports of the system's choice, which ready.json names.
  mock-engine --frontend rust --grpc-port 0 --ready-file ready.json

  # SIGTERM drains for up to 30 s.
  mock-engine --port 8000 --shutdown-timeout 30

  # A SIGSEGV of the engine core leaves a core file of 300 MB.
  mock-engine --port 8000 --core-mb 300

While it runs:
  kill -9 <EngineCore>               the streams stop, and the frontend notices later
  kill -STOP <EngineCore>            the streams stop, and nobody notices
  POST /mock/compile                 the engine core forks a compiler; the answer comes at its exit
  POST /mock/health?status=X         gRPC health says X: serving or not_serving
  POST /mock/freeze?grpc=true|false  gRPC connections fall silent, none is closed
  POST /mock/hang?on=true|false      the engine core lives and produces nothing
  POST /mock/exec                    the root runs `sleep` in its own place; there is no answer

Exit codes: 0 after SIGTERM, and (as measured) when the Python frontend loses its engine;
1 when the Rust frontend loses it, or when it cannot start; 2 for a wrong command line.";

/// An engine without a model, which behaves as vLLM 0.32 was measured to behave: its process
/// tree, its OpenAI API to the byte, its gRPC health, and the ways in which it dies.
///
/// The next token is a function of all tokens before it, so a lost or repeated token shows.
#[derive(Debug, Parser)]
#[command(name = "mock-engine", after_help = EXAMPLES, args_override_self = true)]
pub(crate) struct Args {
    /// Address to listen on, HTTP and gRPC.
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,

    /// HTTP port; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,

    /// gRPC port for grpc.health.v1; 0 takes a free one; without it there is none.
    #[arg(long)]
    pub(crate) grpc_port: Option<u16>,

    /// The HTTP server imitated: `python` is `vllm serve`, `rust` is `vllm-rs serve`.
    #[arg(long, value_enum, default_value = "python")]
    pub(crate) frontend: Frontend,

    /// Name of the model.
    #[arg(long, default_value = "tiny")]
    pub(crate) model: String,

    /// Context length in tokens.
    #[arg(long, default_value_t = 4096)]
    pub(crate) max_model_len: u32,

    /// Steps of the engine core in a second; each gives every running request one token.
    #[arg(long, default_value_t = 30.0)]
    pub(crate) tokens_per_second: f64,

    /// Tokens in a chunk of a stream.
    #[arg(long, default_value_t = 1)]
    pub(crate) stream_interval: usize,

    /// Time until the first token of a request, ms.
    #[arg(long, default_value_t = 0)]
    pub(crate) prefill_ms: u64,

    /// Time to load the model, ms. Nothing listens until then.
    #[arg(long, default_value_t = 0)]
    pub(crate) load_ms: u64,

    /// Time that the engine core runs under a name like `python3` before it takes its title, ms.
    #[arg(long, default_value_t = 50)]
    pub(crate) title_delay_ms: u64,

    /// What the title begins with: `<prefix>::EngineCore`.
    #[arg(long, env = "VLLM_PROCESS_NAME_PREFIX", default_value = "VLLM")]
    pub(crate) process_name_prefix: String,

    /// Written when requests are accepted: pids and addresses, as JSON.
    #[arg(long)]
    pub(crate) ready_file: Option<PathBuf>,

    /// Time that an engine core lives on when its API server was killed, s. (A real one lives
    /// on for ever.)
    #[arg(long, default_value_t = 30)]
    pub(crate) orphan_lifetime: u64,

    /// Time that `--frontend rust` needs to notice that its engine core is dead, ms.
    #[arg(long, default_value_t = 3600)]
    pub(crate) rust_notice_ms: u64,

    /// On SIGTERM, let streams finish for up to so many seconds. 0 aborts them.
    #[arg(long, default_value_t = 0)]
    pub(crate) shutdown_timeout: u64,

    /// Time from the end of a drain to the exit, ms.
    #[arg(long, default_value_t = 5000)]
    pub(crate) drain_linger_ms: u64,

    /// What SIGTERM does to the root when it does not drain.
    #[arg(long, value_enum, default_value = "abort")]
    pub(crate) on_sigterm: OnSigterm,

    /// Like `vllm serve --grpc`: when the engine core is dead, the parent says so and lives on,
    /// listening, until SIGTERM.
    #[arg(long)]
    pub(crate) grpc_mode: bool,

    /// How grpc.health.v1 Watch behaves. Default: `once` with `--frontend python`, `stream`
    /// with `--frontend rust`.
    #[arg(long, value_enum)]
    pub(crate) health_watch: Option<HealthWatch>,

    /// grpc.health.v1 Check is UNIMPLEMENTED too.
    #[arg(long)]
    pub(crate) health_check_unimplemented: bool,

    /// From the start, gRPC connections are accepted and never answered.
    #[arg(long)]
    pub(crate) half_open: bool,

    /// The engine core hangs, alive, after so many tokens in all.
    #[arg(long)]
    pub(crate) hang_after: Option<u64>,

    /// The engine core fills so much memory, MB, and a core file of it may be written.
    #[arg(long, default_value_t = 0)]
    pub(crate) core_mb: usize,

    /// The engine core forks a compiler every so many ms, which exits soon.
    #[arg(long)]
    pub(crate) compiler_child_ms: Option<u64>,
}

/// See `--on-sigterm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnSigterm {
    /// Ends every stream with `finish_reason: "abort"` and exits 0.
    Abort,
    /// Stops listening, falls silent, never exits, and leaves the engine core a zombie: three of
    /// five measured runs.
    Hang,
    /// Takes no notice.
    Ignore,
}

/// See `--health-watch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum HealthWatch {
    /// A message for every change, as vllm-rs.
    Stream,
    /// One message, then the stream ends OK, as vLLM's and SGLang's Python servicers.
    Once,
    /// UNIMPLEMENTED, as Triton.
    Unimplemented,
}

/// What the engine core has to know; it comes to it in an environment variable.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CoreSettings {
    pub(crate) tokens_per_second: f64,
    pub(crate) prefill: Duration,
    pub(crate) load: Duration,
    pub(crate) title_delay: Duration,
    pub(crate) title: String,
    pub(crate) orphan_lifetime: Duration,
    pub(crate) hang_after: Option<u64>,
    pub(crate) core_mb: usize,
    pub(crate) compiler_every: Option<Duration>,
    /// Time that the launcher in between lives on after the engine core, so that nothing tells
    /// the frontend earlier than was measured.
    pub(crate) launcher_linger: Duration,
}

impl Args {
    pub(crate) fn dialect(&self) -> Dialect {
        Dialect { frontend: self.frontend, model: self.model.clone(), max_model_len: self.max_model_len }
    }

    pub(crate) fn core_settings(&self) -> CoreSettings {
        CoreSettings {
            tokens_per_second: self.tokens_per_second,
            prefill: Duration::from_millis(self.prefill_ms),
            load: Duration::from_millis(self.load_ms),
            title_delay: Duration::from_millis(self.title_delay_ms),
            title: format!("{}::EngineCore", self.process_name_prefix),
            orphan_lifetime: Duration::from_secs(self.orphan_lifetime),
            hang_after: self.hang_after,
            core_mb: self.core_mb,
            compiler_every: self.compiler_child_ms.map(Duration::from_millis),
            launcher_linger: Duration::from_millis(self.rust_notice_ms),
        }
    }

    pub(crate) fn watch(&self) -> HealthWatch {
        self.health_watch.unwrap_or(match self.frontend {
            Frontend::Python => HealthWatch::Once,
            Frontend::Rust => HealthWatch::Stream,
        })
    }

    /// The first thing that is wrong with the values, field and fix named.
    pub(crate) fn check(&self) -> Result<(), String> {
        if !(self.tokens_per_second > 0.0 && self.tokens_per_second.is_finite()) {
            return Err(format!(
                "--tokens-per-second is {}; it must be above 0, for example 30",
                self.tokens_per_second
            ));
        }
        if self.stream_interval == 0 {
            return Err("--stream-interval is 0; it must be at least 1".to_owned());
        }
        if self.max_model_len < 2 {
            return Err("--max-model-len must be at least 2".to_owned());
        }
        Ok(())
    }
}
