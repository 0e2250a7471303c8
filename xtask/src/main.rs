//! Everything a developer runs: `cargo xtask <command>`.
//!
//! One module per command. It must never need what a plain `cargo build` does
//! not: what else a command wants, it finds, fetches into `target/`, or asks for
//! in one sentence.
#![forbid(unsafe_code)]

mod bench;
mod build_ebpf;
mod chromium;
mod containers;
mod debian;
mod demo;
mod dependencies;
mod docs;
mod faults;
mod handed;
mod nats_server;
mod record_btf;
mod systems;
mod test;
mod test_kernels;
mod tools;

use std::process::ExitCode;

use clap::Parser;

/// Everything a developer of lastgasp runs.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Xtask {
    Bench(bench::Arguments),
    BuildEbpf(build_ebpf::Arguments),
    Demo(demo::Arguments),
    Dependencies(dependencies::Arguments),
    Docs(docs::Arguments),
    RecordBtf(record_btf::Arguments),
    Faults(faults::Arguments),
    Screenshots(chromium::Arguments),
    Systems(systems::Arguments),
    Test(test::Arguments),
    TestKernels(test_kernels::Arguments),
}

fn main() -> ExitCode {
    match Xtask::parse() {
        Xtask::Bench(arguments) => bench::main(&arguments),
        Xtask::BuildEbpf(arguments) => build_ebpf::main(&arguments),
        Xtask::Demo(arguments) => demo::main(&arguments),
        Xtask::Dependencies(arguments) => dependencies::main(&arguments),
        Xtask::Docs(arguments) => docs::main(&arguments),
        Xtask::RecordBtf(arguments) => record_btf::main(&arguments),
        Xtask::Faults(arguments) => faults::main(&arguments),
        Xtask::Screenshots(arguments) => chromium::screenshots(&arguments),
        Xtask::Systems(arguments) => systems::main(&arguments),
        Xtask::Test(arguments) => test::main(&arguments),
        Xtask::TestKernels(arguments) => test_kernels::main(&arguments),
    }
}
