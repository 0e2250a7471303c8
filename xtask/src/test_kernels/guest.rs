//! A kernel in QEMU, and what it says on its serial line.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::{Boot, KernelsError, image::Kernel, io};
use crate::test::SKIPPED;

/// Begins the line with the exit status of the tests.
pub(super) const VERDICT: &str = "lastgasp-tests-ended-with=";

/// Begins a line of the file of tests that skipped themselves.
pub(super) const SKIP: &str = "lastgasp-test-skipped=";

/// Boots, shows what the guest prints, hands on which tests skipped themselves, and returns the exit status of
/// its tests.
pub(super) fn run(kernel: &Kernel, initramfs: &Path, boot: Boot, timeout: Duration) -> Result<i32, KernelsError> {
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "2048", "-nographic", "-no-reboot"]);
    qemu.arg("-append").arg(format!("console=ttyS0 quiet panic=-1 loglevel=3 {}", boot.parameters()));
    qemu.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(initramfs);
    let mut guest = qemu.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(io("qemu-system-x86_64"))?;
    let output = guest.stdout.take().map(BufReader::new);
    let (lines, said) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in output.into_iter().flat_map(|output| output.split(b'\n')).map_while(Result::ok) {
            if lines.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                return;
            }
        }
    });
    let deadline = Instant::now() + timeout;
    let (mut verdict, mut skips) = (None, String::new());
    while let Ok(line) = said.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        if let Some(status) = line.strip_prefix(VERDICT) {
            verdict = status.parse().ok();
        } else if let Some(skip) = line.strip_prefix(SKIP) {
            skips += skip;
            skips += "\n";
        } else {
            println!("{line}");
        }
    }
    // It has powered itself off, or hangs.
    let _ = guest.kill();
    guest.wait().map_err(io("qemu-system-x86_64"))?;
    drop(said);
    let _ = reader.join();
    hand_on(&skips).map_err(io(SKIPPED))?;
    verdict.ok_or(KernelsError::NoVerdict(timeout))
}

/// Writes these lines into this machine's file of skips, if `cargo xtask test` has made one.
fn hand_on(skips: &str) -> std::io::Result<()> {
    let Some(path) = std::env::var_os(SKIPPED) else { return Ok(()) };
    let mut file = std::fs::OpenOptions::new().append(true).open(path)?;
    file.write_all(skips.as_bytes())
}
