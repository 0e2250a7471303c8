//! Something better to do for every core.

use std::process::{Child, Command};
use std::time::Duration;

use crate::{BenchError, file};

/// One process for each core that never sleeps.
pub(super) struct Busy(Vec<Child>);

impl Busy {
    pub(super) async fn start() -> Result<Self, BenchError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut busy = Self(Vec::new());
        for _ in 0..cores {
            let child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn();
            busy.0.push(child.map_err(file("sh".as_ref()))?);
        }
        // The scheduler takes what was just started for something that sleeps a lot.
        tokio::time::sleep(Duration::from_millis(200)).await;
        Ok(busy)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
