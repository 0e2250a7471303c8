//! What the daemon costs the node that it watches.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lastgasp_tests::binaries;
use lastgasp_tests::daemon::{Daemon, DaemonConfig};
use lastgasp_tests::distribution::Unit;
use lastgasp_tests::nats::Nats;

use crate::progress::Progress;
use crate::report::{Plot, Row, Section};
use crate::{BenchError, Options, file};

/// Threads that fork, in the storm of exits.
const THREADS: &str = "2";

pub(crate) async fn run(options: &Options) -> Result<Vec<Section>, BenchError> {
    Ok(vec![storms(options).await?])
}

/// Exits and connections a second, with a daemon and without one, in turns.
async fn storms(options: &Options) -> Result<Section, BenchError> {
    let (pairs, time) = if options.quick { (2, Duration::from_millis(100)) } else { (30, Duration::from_secs(1)) };
    let folder = tempfile::tempdir().map_err(file(&std::env::temp_dir()))?;
    let nats = Nats::start(folder.path()).await?;
    let config = DaemonConfig::new("node", &nats.url(), "required", folder.path());
    let mut rows = Vec::new();
    for (what, storm) in [("exits", exits as fn(Duration) -> Result<f64, BenchError>), ("TCP connects", connects)] {
        let mut progress = Progress::begin(&format!("storm of {what}"), pairs);
        let (mut without, mut with) = (Vec::new(), Vec::new());
        let at_work = |time| tokio::task::block_in_place(|| storm(time));
        at_work(time)?;
        for pair in 0..pairs {
            // Now this one first, now that one: the machine may get slower or faster.
            for watched in [pair % 2 == 0, pair % 2 != 0] {
                if watched {
                    let _daemon = Daemon::start(&config, folder.path()).await?;
                    with.push(at_work(time)?);
                } else {
                    without.push(at_work(time)?);
                }
            }
            progress.step();
        }
        let lost = without.iter().zip(&with).map(|(without, with)| (1.0 - with / without) * 100.0);
        let lost = Row::of([what, "lost, by pairs"], Unit::Percent, lost);
        let without = Row::of([what, "without the daemon"], Unit::PerSecond, without);
        let with = Row::of([what, "with the daemon"], Unit::PerSecond, with).map(|row| row.against(without.as_ref()));
        rows.extend([without, with, lost].into_iter().flatten());
    }
    let drawn = rows.chunks(3).zip(["exits", "connects"]).map(|(rows, name)| {
        let lines = rows[..2].iter().map(|row| (row.labels[1].clone(), row));
        let title = format!("{}, with the daemon and without", rows[0].labels[0]);
        Plot::cumulative(name, &title, ("a second", false), lines)
    });
    let plots = drawn.collect();
    Ok(Section {
        title: "Storms".to_owned(),
        about: format!(
            "{pairs} pairs of {} s each, with the daemon and without it, in turns: processes that fork and exit from \
             {THREADS} threads as fast as they can, and TCP connections over loopback one after the other. None of them \
             concerns a worker. Less than nothing lost is noise.",
            time.as_secs_f64()
        ),
        labels: ["storm", "daemon"].map(str::to_owned).to_vec(),
        compared_with: Some("with : without".to_owned()),
        rows,
        plots,
    })
}

fn exits(time: Duration) -> Result<f64, BenchError> {
    let program = binaries::find("victim")?;
    let begin = Instant::now();
    let mut storm = Storm(
        Command::new(&program)
            .args(["storm", THREADS])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(file(&program))?,
    );
    std::thread::sleep(time);
    let mut input = storm.0.stdin.take().expect("piped");
    input.write_all(b"\n").map_err(file(&program))?;
    let said = BufReader::new(storm.0.stdout.take().expect("piped"));
    let exits = said.lines().map_while(Result::ok).find_map(|line| line.strip_prefix("exits ")?.parse::<f64>().ok());
    let exits = exits.ok_or_else(|| lastgasp_tests::HarnessError::GaveUp("the number of exits".to_owned()))?;
    Ok(exits / begin.elapsed().as_secs_f64())
}

/// A program that is ended with this value.
struct Storm(Child);

impl Drop for Storm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
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
