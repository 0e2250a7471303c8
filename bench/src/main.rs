//! `cargo xtask bench`: what lastgasp is worth and what it costs, as distributions from one run.
//!
//! One module per bench: each starts real programs, as the tests do, and returns the [`Section`]s of its
//! [`Report`]. Everything else is here: which benches run, what is written where, what is shown.
#![forbid(unsafe_code)]

mod cpu;
mod death;
mod machine;
mod node;
mod page;
mod plot;
mod progress;
mod report;
mod router;
mod scale;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use lastgasp_tests::HarnessError;

use machine::{Load, Machine};
use report::{Report, SCHEMA, Section};

const EXAMPLES: &str = "\
Examples:
  cargo xtask bench                      all of them, for most of an hour
  cargo xtask bench node                 one of them
  cargo xtask bench --quick              a little of each, in minutes: do they run here?
  cargo xtask bench --json result.json   and all distributions in one file
  cargo xtask bench death --only quiet,busy --beside former/lastgasp --out target/bench
                                         what has a change of the daemon changed?

Close what else runs on the machine first: what it does is measured too. Needs root.
Exit status: 0 measured, 1 not, 2 for a wrong command line.";

/// Measure what lastgasp is worth and what it costs.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask bench", after_help = EXAMPLES)]
struct Arguments {
    /// Which; all of them if none is named.
    #[arg(value_name = "NAME")]
    names: Vec<Name>,
    /// Also write what was found into this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only so much that every part of a bench runs once; written to target/bench.
    #[arg(long)]
    quick: bool,
    /// Deaths of each sort; a tenth where each takes seconds.
    #[arg(long, value_name = "N", default_value_t = DEATHS)]
    deaths: usize,
    /// Only these parts of `death`, `node` and `router`.
    #[arg(long, value_name = "PART", value_delimiter = ',', value_parser = PARTS)]
    only: Vec<String>,
    /// Another version of what is measured, in turns with this one: of `lastgasp` for `death`, of
    /// `lastgasp-router` for `router`.
    #[arg(long, value_name = "PROGRAM")]
    beside: Option<PathBuf>,
    /// Where NAME.json, the pictures and README.md go [default: docs/bench].
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Measure nothing: draw the pictures and write README.md from the JSON files that are there.
    #[arg(long, conflicts_with_all = ["json", "quick", "names"])]
    render: bool,
}

/// For a 99th percentile that is not the largest of all.
const DEATHS: usize = 300;

/// Situations of `death`, and sections of `node` and of `router`.
const PARTS: [&str; 12] = [
    "quiet",
    "busy",
    "core",
    "large",
    "dump",
    "idle",
    "storms",
    "programs",
    "latency",
    "throughput",
    "memory",
    "moves",
];

/// A bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Name {
    /// From a death to safety, beside what else notices deaths.
    Death,
    /// What the daemon costs the node that it watches.
    Node,
    /// What the router adds and costs, and how soon it moves streams, beside another router.
    Router,
    /// A thousand nodes and twenty routers, without engines and clients, on three nats-servers.
    Scale,
}

impl Name {
    const fn title(self) -> &'static str {
        match self {
            Self::Death => "From death to safety",
            Self::Node => "Cost on the node",
            Self::Router => "The router",
            Self::Scale => "Scale",
        }
    }

    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    async fn run(self, options: &Options) -> Result<Vec<Section>, BenchError> {
        match self {
            Self::Death => death::run(options).await,
            Self::Node => node::run(options).await,
            Self::Router => router::run(options).await,
            Self::Scale => scale::run(options).await,
        }
    }
}

/// How much is measured.
#[derive(Debug, Clone)]
struct Options {
    /// A few of each, to show that the bench runs.
    quick: bool,
    /// Deaths of each sort.
    deaths: usize,
    /// Parts; all if none is named.
    only: Vec<String>,
    /// Another daemon, or another router.
    beside: Option<PathBuf>,
}

impl Options {
    fn wants(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == part)
    }
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
enum BenchError {
    /// Something could not be started, or did not do what it does.
    #[error(transparent)]
    Harness(#[from] HarnessError),
    /// A file.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A file that is there but no report.
    #[error("{path} is no report of a bench: {source}; delete it and run the bench again")]
    NoReport {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: serde_json::Error,
    },
    /// A picture.
    #[error("{path} cannot be drawn: {source}")]
    Picture {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: plot::DrawingError,
    },
    /// It was ended by a person.
    #[error("interrupted; everything that was started is gone")]
    Interrupted,
}

fn file(path: &Path) -> impl FnOnce(std::io::Error) -> BenchError {
    let path = path.to_owned();
    move |source| BenchError::File { path, source }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("threads can be started");
    let outcome = runtime.block_on(async {
        tokio::select! {
            outcome = run(&arguments) => outcome,
            // Returning drops what was started.
            _ = tokio::signal::ctrl_c() => Err(BenchError::Interrupted),
        }
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: &Arguments) -> Result<(), BenchError> {
    let default = if arguments.quick { "target/bench" } else { "docs/bench" };
    let out = arguments.out.clone().unwrap_or_else(|| default.into());
    std::fs::create_dir_all(&out).map_err(file(&out))?;
    let mut found = Vec::new();
    if !arguments.render {
        let all = Name::value_variants();
        let names = if arguments.names.is_empty() { all } else { &arguments.names };
        let options = Options {
            quick: arguments.quick,
            deaths: arguments.deaths.max(1),
            only: arguments.only.clone(),
            beside: arguments.beside.clone(),
        };
        for name in names {
            let report = measure(*name, &options).await?;
            println!("{}", page::show(&report));
            write_json(&out.join(format!("{}.json", report.bench)), &report)?;
            found.push(report);
        }
    }
    if let Some(path) = &arguments.json {
        write_json(path, &serde_json::json!({ "schema": SCHEMA, "benches": found }))?;
    }
    render(&out)
}

async fn measure(name: Name, options: &Options) -> Result<Report, BenchError> {
    eprintln!("{}", name.title());
    let (at, begin, before) = (jiff::Timestamp::now(), Instant::now(), Load::now());
    let sections = name.run(options).await?;
    Ok(Report {
        schema: SCHEMA,
        bench: name.name(),
        title: name.title().to_owned(),
        command: command(name, options),
        revision: machine::revision(),
        at: at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        took_s: begin.elapsed().as_secs(),
        quick: options.quick,
        machine: Machine::this(),
        load: [before, Load::now()],
        sections,
    })
}

/// What does it again.
fn command(name: Name, options: &Options) -> String {
    let mut command = format!("cargo xtask bench {}", name.name());
    if options.quick {
        command += " --quick";
    } else if name == Name::Death && options.deaths != DEATHS {
        command += &format!(" --deaths {}", options.deaths);
    }
    if !options.only.is_empty() {
        command += &format!(" --only {}", options.only.join(","));
    }
    command
}

/// Everything that follows from the JSON files of a folder.
fn render(out: &Path) -> Result<(), BenchError> {
    let mut reports = Vec::new();
    for name in Name::value_variants() {
        let path = out.join(format!("{}.json", name.name()));
        if !path.exists() {
            continue;
        }
        let bytes = std::fs::read(&path).map_err(file(&path))?;
        let report: Report =
            serde_json::from_slice(&bytes).map_err(|source| BenchError::NoReport { path: path.clone(), source })?;
        for drawn in report.sections.iter().flat_map(|section| &section.plots) {
            let path = out.join(format!("{}-{}.svg", report.bench, drawn.name));
            plot::draw(drawn, &path).map_err(|source| BenchError::Picture { path, source })?;
        }
        reports.push(report);
    }
    let path = out.join("README.md");
    std::fs::write(&path, page::render(&reports)).map_err(file(&path))?;
    println!("written to {}", out.display());
    Ok(())
}

fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<(), BenchError> {
    let mut text = serde_json::to_vec_pretty(value).expect("names and finite numbers");
    text.push(b'\n');
    std::fs::write(path, text).map_err(file(path))
}
