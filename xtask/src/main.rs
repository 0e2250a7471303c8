//! Everything a developer runs: `cargo xtask <command>`.
//!
//! One module per command. It must never need what a plain `cargo build` does
//! not: what else a command wants, it finds, fetches into `target/`, or asks for
//! in one sentence.
#![forbid(unsafe_code)]

mod build_ebpf;
mod tools;

use std::process::ExitCode;

use clap::Parser;

/// Everything a developer of lastgasp runs.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Xtask {
    BuildEbpf(build_ebpf::Arguments),
}

fn main() -> ExitCode {
    match Xtask::parse() {
        Xtask::BuildEbpf(arguments) => build_ebpf::main(&arguments),
    }
}
