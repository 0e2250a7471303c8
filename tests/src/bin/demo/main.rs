//! `cargo xtask demo`: an engine is killed in the middle of an answer, and the answer goes on.
//!
//! Everything is real but the GPU: nats-server, the daemon with its eBPF programs, the router, two
//! mock engines and the signal. With `--kills N` the same happens N times, and the distribution of
//! what came how long after the kill is printed instead of the answer.
#![forbid(unsafe_code)]

mod kill;
mod report;
mod show;
mod stage;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use kill::Kill;
use stage::Stage;

const EXAMPLES: &str = "\
Examples:
  cargo xtask demo
  cargo xtask demo --json result.json
  cargo xtask demo --kills 200            distributions over 200 deaths
  cargo xtask demo --no-ebpf              with pidfds alone, as without root

Exit status: 0 if no token was missing or repeated, 1 otherwise, 2 for a wrong command line.";

/// Kill an engine in the middle of an answer, and watch the answer go on.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask demo", after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Write the result as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Tokens of the answer.
    #[arg(long, default_value_t = 160)]
    tokens: u32,
    /// Tokens per second.
    #[arg(long, default_value_t = 40.0)]
    rate: f64,
    /// Kill that many engines, one after the other, and print distributions.
    #[arg(long, value_name = "N")]
    kills: Option<usize>,
    /// Leave the kernel programs out.
    #[arg(long)]
    no_ebpf: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(async {
            tokio::select! {
                outcome = run(&arguments) => outcome,
                // Returning drops the stage, and with it everything that was started.
                _ = tokio::signal::ctrl_c() => Err("interrupted; everything that was started is gone".into()),
            }
        }),
        Err(error) => Err(error.into()),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("demo: {error}");
            ExitCode::FAILURE
        }
    }
}

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

async fn run(arguments: &Arguments) -> Outcome<bool> {
    let mut stage = Stage::set(arguments).await?;
    let kills = match arguments.kills {
        None => vec![kill::in_front_of_an_audience(&stage, arguments).await?],
        Some(wanted) => {
            let mut kills: Vec<Kill> = Vec::with_capacity(wanted);
            for done in 1..=wanted {
                let kill = kill::unseen(&stage, arguments).await?;
                stage.replace(&kill.worker).await?;
                show::progress(done, wanted, &kill);
                kills.push(kill);
            }
            kills
        }
    };
    let report = report::Report::of(stage.death_source(), &kills);
    if arguments.kills.is_some() {
        show::distributions(&report);
    } else {
        show::timeline(&kills[0]);
    }
    show::verdict(&report);
    if let Some(path) = &arguments.json {
        std::fs::write(path, serde_json::to_vec_pretty(&report)?)?;
        println!("written to {}", path.display());
    }
    Ok(report.is_exact())
}
