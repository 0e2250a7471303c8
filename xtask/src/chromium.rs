//! A Chromium for the status page's tests, and `cargo xtask screenshots`.

use std::process::ExitCode;

use crate::{debian, nats_server, tools};

/// Names under which distributions have it.
const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// Takes the pictures of the status page that stand in docs/.
///
/// A daemon, engines and a router are started, a worker is killed, and a headless Chromium looks at
/// it. Needs root for eBPF.
#[derive(clap::Args)]
pub(crate) struct Arguments {}

/// Whether there is one. As root, on a machine with apt, it is installed.
pub(crate) fn ensure() -> bool {
    let there = || NAMES.iter().any(|name| tools::on_path(name).is_some());
    if there() {
        return true;
    }
    tools::is_root() && debian::install(&["chromium"]).status().is_ok_and(|status| status.success()) && there()
}

pub(crate) fn screenshots(_: &Arguments) -> ExitCode {
    match take() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cargo xtask screenshots: {error}");
            ExitCode::FAILURE
        }
    }
}

fn take() -> Result<(), Box<dyn std::error::Error>> {
    if !ensure() {
        return Err("there is no chromium; install it: apt-get install chromium".into());
    }
    let nats = nats_server::ensure(&tools::target())?;
    let mut build = tools::cargo();
    build.args(["build", "--bins", "-p", "lastgasp", "-p", "lastgasp-router", "-p", "lastgasp-tests"]);
    tools::step("build", &mut build)?;
    let mut test = tools::cargo();
    test.args(["test", "-p", "lastgasp-tests", "--test", "page", "a_death_is_seen_as_it_happens"]);
    test.env(nats_server::ENVIRONMENT, nats).env("LASTGASP_SCREENSHOTS", tools::workspace().join("docs"));
    tools::step("pictures into docs/", &mut test)?;
    Ok(())
}
