//! The machine sleeps, for longer than its lease lives, and wakes up. Nothing is withdrawn, the lease
//! lives again, a death is seen, and the process is still known by its start time, which counts from
//! boot with the sleep in it.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use crate::scene::Scene;

const ALARM: &str = "/sys/class/rtc/rtc0/wakealarm";

/// Longer than the node's lease.
const SLEEP: Duration = Duration::from_secs(9);

/// How long this machine has slept since it was booted (clock_gettime(2)).
fn slept() -> Duration {
    let now = |clock| Duration::from(clock_gettime(clock).expect("every kernel has it"));
    let monotonic = now(ClockId::CLOCK_MONOTONIC);
    now(ClockId::CLOCK_BOOTTIME).saturating_sub(monotonic)
}

/// Suspends to memory until the alarm of the clock chip.
fn sleep() {
    std::fs::write(ALARM, "0").expect("there is a clock chip");
    std::fs::write(ALARM, format!("+{}", SLEEP.as_secs())).expect("it can wake");
    std::fs::write("/sys/power/state", "mem").expect("it goes to sleep and comes back");
}

#[tokio::test]
async fn the_machine_sleeps_for_longer_than_its_lease() {
    let scene = Scene::new("required", &[]).await;
    let lease = scene.lease().await;
    let before = slept();
    sleep();
    assert!(slept() - before > SLEEP / 2, "it did not sleep: {:?}", slept() - before);
    lease.renewed_twice().await;
    scene.a_death_is_seen().await;
}
