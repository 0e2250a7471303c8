//! What the kernel programs cost and gain, measured on this machine:
//! `cargo test -p lastgasp-tests --test measure -- cost|storm|latency|withdraw`, as root.
//!
//! No test: it judges nothing, since a busy machine would make it a liar.
#![forbid(unsafe_code)]

mod cost;
#[path = "../kernel/harness.rs"]
#[expect(dead_code, reason = "the stories of tests/kernel need more of it")]
mod harness;
mod latency;
mod storm;
mod withdraw;

use clap::Parser;

/// What to measure.
#[derive(Parser)]
#[command(bin_name = "cargo test -p lastgasp-tests --test measure --")]
enum Measure {
    /// Nanoseconds per run of each program, for events that concern nobody (`BPF_ENABLE_STATS`).
    Cost {
        /// Seconds of each load.
        #[arg(long, default_value_t = 2)]
        seconds: u64,
    },
    /// Exits and TCP connects a second, with the programs and without, in pairs.
    Storm {
        /// Pairs.
        #[arg(long, default_value_t = 10)]
        rounds: usize,
        /// Seconds of each half of a pair.
        #[arg(long, default_value_t = 1)]
        seconds: u64,
    },
    /// From the kill to the evidence: kernel programs, pidfd, the closing socket.
    Latency {
        /// Kills of each sort; the medians are shown.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Resident MiB of the large process.
        #[arg(long, default_value_t = 6144)]
        resident: usize,
        /// MiB of the core dump.
        #[arg(long, default_value_t = 1024)]
        core: usize,
    },
    /// From the kill to the acknowledged delete of the record, with quiet and with busy cores in turns.
    Withdraw {
        /// Kills of each sort.
        #[arg(long, default_value_t = 50)]
        kills: usize,
    },
}

fn main() {
    match Measure::parse() {
        Measure::Cost { seconds } => cost::main(seconds),
        Measure::Storm { rounds, seconds } => storm::main(rounds, seconds),
        Measure::Latency { rounds, resident, core } => latency::main(rounds, resident, core),
        Measure::Withdraw { kills } => withdraw::main(kills),
    }
}

/// The value that so many percent of the others do not exceed.
fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let at = (values.len() * percent).div_ceil(100).saturating_sub(1);
    values.get(at).copied().unwrap_or(f64::NAN)
}

/// The middle of what was measured.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
