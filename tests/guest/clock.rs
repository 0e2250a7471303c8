//! Somebody sets the clock, by hours. Nothing is withdrawn, the lease lives, a death is seen.
//!
//! The server is on the same machine, and its clock is set with it: worse than what a cluster sees.

use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime, clock_settime};

use crate::scene::Scene;

const HOURS: Duration = Duration::from_secs(5 * 3600);

/// Sets the clock back to what it would be when this is dropped.
struct Clock {
    /// `CLOCK_REALTIME` less `CLOCK_BOOTTIME`.
    boot: Duration,
}

impl Clock {
    fn new() -> Self {
        Self { boot: now(ClockId::CLOCK_REALTIME) - now(ClockId::CLOCK_BOOTTIME) }
    }

    fn set(&self, time: Duration) {
        clock_settime(ClockId::CLOCK_REALTIME, TimeSpec::from_duration(time)).expect("root may");
    }

    fn right(&self) -> Duration {
        self.boot + now(ClockId::CLOCK_BOOTTIME)
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.set(self.right());
    }
}

fn now(clock: ClockId) -> Duration {
    clock_gettime(clock).expect("every kernel has it").into()
}

#[tokio::test]
async fn the_clock_goes_forward_by_hours() {
    let clock = Clock::new();
    let scene = Scene::new("required", &[]).await;
    let lease = scene.lease().await;
    clock.set(clock.right() + HOURS);
    lease.renewed_twice().await;
    scene.a_death_is_seen().await;
}

#[tokio::test]
async fn the_clock_goes_back_by_hours() {
    let clock = Clock::new();
    let scene = Scene::new("required", &[]).await;
    let lease = scene.lease().await;
    clock.set(clock.right() - HOURS);
    lease.renewed_twice().await;
    scene.a_death_is_seen().await;
}
