//! Workers are killed and started again, over and over; then the daemon is killed. Nothing piles up in
//! the daemon, and nothing is left of it in the kernel.

use std::time::{Duration, Instant};

use lastgasp_tests::kernel_objects::{held_by, loaded};
use lastgasp_tests::matrix;
use lastgasp_tests::process::GIVE_UP;
use nix::sys::signal::Signal;

use crate::crowd::Crowd;

/// Workers, and how often each is restarted: 300 restarts, or 10,000.
const SHORT: (usize, usize) = (30, 10);
const LONG: (usize, usize) = (200, 50);
/// How often each is restarted, where that is for neither.
const ROUNDS: &str = "LASTGASP_RESTARTS";
/// After so many rounds the daemon has allocated what it needs.
const WARM: usize = 3;
/// Growth that is allowed to the daemon's memory, per restart after that, in KiB. The last 1024 events are
/// kept, and death certificates among them, so the short form cannot be without any.
const KIB_PER_RESTART: usize = 32;

/// Descriptors and resident memory (KiB) of a process.
fn size(pid: u32) -> (usize, usize) {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
    (descriptors, rss.expect("proc_pid_status(5)"))
}

#[tokio::test]
async fn nothing_grows_and_nothing_is_left_in_the_kernel() {
    let (workers, usual) = if matrix::is_long() { LONG } else { SHORT };
    let rounds = std::env::var(ROUNDS).map_or(usual, |text| text.parse().expect("a number of rounds"));
    let mut crowd = Crowd::of(workers).await;
    let pid = crowd.daemon.process.identity.pid;
    let mut warm = size(pid);
    for round in 0..rounds {
        crowd.kill(|_| true).await;
        for number in 0..workers {
            crowd.restart(number).await;
        }
        crowd.all_listed().await;
        let (descriptors, kib) = size(pid);
        println!("{} restarts: {descriptors} descriptors, {kib} KiB", (round + 1) * workers);
        if round + 1 == WARM {
            warm = (descriptors, kib);
        }
    }
    assert_eq!(crowd.removals(), vec![rounds; workers], "every life ends once");
    let restarts = workers * (rounds - WARM);
    let growth = |now: (usize, usize)| (now.0.saturating_sub(warm.0), now.1.saturating_sub(warm.1));
    // What of the last round is closed a moment later: pidfds, connections of health.
    let deadline = Instant::now() + GIVE_UP;
    while growth(size(pid)).0 > 8 {
        assert!(Instant::now() < deadline, "{} descriptors more", growth(size(pid)).0);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let (descriptors, kib) = growth(size(pid));
    // After the first thousands there is no room for more events: then it must not grow at all.
    let allowed = restarts.min(1024) * KIB_PER_RESTART;
    assert!(kib < allowed, "{kib} KiB more than after {WARM} rounds, {allowed} allowed");

    let held = held_by(pid).unwrap();
    assert!(held.iter().all(|held| !held.is_empty()), "{held:?}");
    assert!(crowd.daemon.process.identity.signal(Signal::SIGKILL));
    crowd.daemon.process.exited().await.unwrap();
    // The kernel frees them in the background.
    let deadline = Instant::now() + GIVE_UP;
    while !held.iter().zip(loaded()).all(|(held, loaded)| held.is_disjoint(&loaded)) {
        assert!(Instant::now() < deadline, "{held:?} are left of it in {:?}", loaded());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    matrix::count("workers restarted", workers * rounds);
    matrix::row(
        "Workers are killed and started again, over and over; then the daemon is killed",
        "every life is withdrawn once; no descriptors and no memory pile up; no program, map or link is left in the kernel",
        &format!(
            "{} restarts: {} withdrawals; {descriptors} descriptors and {kib} KiB more than after the first {} restarts; of {} \
             programs, {} maps and {} links none is left",
            workers * rounds,
            crowd.removals().iter().sum::<usize>(),
            workers * WARM,
            held[0].len(),
            held[1].len(),
            held[2].len(),
        ),
    );
}
