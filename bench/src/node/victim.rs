//! A victim program of the tests, which dies with this value.

use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use lastgasp_tests::{HarnessError, binaries};

use crate::{BenchError, file};

pub(super) struct Victim {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    program: PathBuf,
}

impl Victim {
    /// Starts one, and waits until it is ready.
    pub(super) fn start(arguments: &[&str]) -> Result<Self, BenchError> {
        let program = binaries::find("victim")?;
        let child = Command::new(&program).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(file(&program))?;
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut victim = Self { child, lines, program };
        victim.says("ready")?;
        Ok(victim)
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets it take its next step.
    pub(super) fn go(&mut self) -> Result<(), BenchError> {
        self.child.stdin.as_mut().expect("piped").write_all(b"go\n").map_err(file(&self.program))
    }

    /// What follows `start` in the next line that begins with it.
    pub(super) fn says(&mut self, start: &str) -> Result<String, BenchError> {
        let lines = self.lines.by_ref().map_while(Result::ok);
        let said = { lines }.find_map(|line| line.strip_prefix(start).map(|rest| rest.trim().to_owned()));
        said.ok_or_else(|| HarnessError::GaveUp(format!("{start:?} from the victim")).into())
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
