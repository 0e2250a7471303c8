//! Exits and connections a second, with a daemon and without one, in turns.

use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use lastgasp_tests::HarnessError;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::distribution::Unit;
use lastgasp_tests::nats::Nats;

use super::victim::Victim;
use crate::progress::Progress;
use crate::report::{Plot, Row, Section};
use crate::{BenchError, Options, file};

/// Threads that fork, in the storm of exits.
const THREADS: &str = "2";
/// How long a daemon has been there before the storm.
const SETTLED: Duration = Duration::from_millis(300);

pub(super) async fn section(options: &Options) -> Result<Section, BenchError> {
    let (pairs, time) = if options.quick { (2, Duration::from_millis(100)) } else { (30, Duration::from_secs(1)) };
    let folder = tempfile::tempdir().map_err(file(&std::env::temp_dir()))?;
    let nats = Nats::start(folder.path()).await?;
    let mut config = DaemonConfig::new("node", &nats.url(), "required", folder.path());
    config.log = "info";
    let (mut rows, mut plots) = (Vec::new(), Vec::new());
    let storms = [("exits", exits as fn(Duration) -> Result<f64, BenchError>), ("connects", connects)];
    for (what, storm) in storms {
        let mut progress = Progress::begin(&format!("storm of {what}"), pairs);
        let (mut without, mut with) = (Vec::new(), Vec::new());
        let at_work = |time| tokio::task::block_in_place(|| storm(time));
        at_work(time)?;
        for pair in 0..pairs {
            // Now this one first, now that one: the machine may get slower or faster.
            for watched in [pair % 2 == 0, pair % 2 != 0] {
                let _daemon = if watched { Some(Daemon::start(&config, folder.path()).await?) } else { None };
                tokio::time::sleep(SETTLED).await;
                let found = at_work(time)?;
                if watched { with.push(found) } else { without.push(found) }
            }
            progress.step();
        }
        let lost = without.iter().zip(&with).map(|(without, with)| (1.0 - with / without) * 100.0);
        let lost = Row::of([what, "lost, by pairs"], Unit::Percent, lost);
        let without = Row::of([what, "without the daemon"], Unit::PerSecond, without);
        let with = Row::of([what, "with the daemon"], Unit::PerSecond, with).map(|row| row.against(without.as_ref()));
        let drawn = without.iter().chain(&with).map(|row| (row.labels[1].clone(), row));
        let title = format!("Storm of {what}, with the daemon and without");
        plots.push(Plot::cumulative(what, &title, ("a second", false), drawn));
        rows.extend([without, with, lost].into_iter().flatten());
    }
    Ok(Section {
        title: "Storms".to_owned(),
        about: format!(
            "{pairs} pairs of {} s each, with the daemon and without it, in turns: processes that fork and exit from \
             {THREADS} threads as fast as they can, and TCP connections over loopback one after the other. None of them \
             concerns a worker. Less than nothing lost is noise.",
            time.as_secs_f64()
        ),
        labels: ["storm", "daemon"].map(str::to_owned).to_vec(),
        compared_with: Some("p50, with : without".to_owned()),
        rows,
        plots,
    })
}

pub(super) fn exits(time: Duration) -> Result<f64, BenchError> {
    let mut storm = Victim::start(&["storm", THREADS])?;
    let begin = Instant::now();
    std::thread::sleep(time);
    storm.go()?;
    let exits = storm.says("exits")?;
    let took = begin.elapsed();
    let exits: f64 = exits.parse().map_err(|_| HarnessError::GaveUp(format!("a number of exits, not {exits}")))?;
    Ok(exits / took.as_secs_f64())
}

fn connects(time: Duration) -> Result<f64, BenchError> {
    let loopback = || file("127.0.0.1".as_ref());
    let listener = TcpListener::bind("127.0.0.1:0").map_err(loopback())?;
    let address = listener.local_addr().map_err(loopback())?;
    let begin = Instant::now();
    let mut count = 0.0;
    while begin.elapsed() < time {
        let client = TcpStream::connect(address).map_err(loopback())?;
        drop(listener.accept().map_err(loopback())?);
        drop(client);
        count += 1.0;
    }
    Ok(count / begin.elapsed().as_secs_f64())
}
