//! A real vLLM 0.32.0 on the CPU, with a tiny random model: both of its HTTP frontends, in Python and in
//! Rust.

mod faults;
mod install;
mod scene;
mod seams;
mod server;
mod shapes;
