//! Large third-party systems beside lastgasp: `cargo xtask test --peers`.
#![forbid(unsafe_code)]

mod dynamo;
mod infera;
mod litellm;
mod vllm;
