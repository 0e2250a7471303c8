//! What became of the tests of a step: counted from what libtest prints and from the file in which tests say
//! that they skipped themselves.
//!
//! libtest has no word for a test that finds out while it runs that this machine lacks what it needs: such a
//! test returns, and libtest counts it as passed. It appends a line to the file that [`SKIPPED`] names
//! (`lastgasp_tests::skipped`), and is subtracted here. What is ignored, or filtered out, was not asked for
//! and counts nowhere: where another step runs it, that step counts it.

use std::time::Duration;

/// Names the file in which tests say that they skipped themselves, `name<TAB>reason` a line.
pub(crate) const SKIPPED: &str = "LASTGASP_SKIPPED";

/// For `cargo test --config`: has test programs say how long each test took.
///
/// libtest gives times on nightly only, or where RUSTC_BOOTSTRAP is set when the program runs. Cargo must not
/// see that variable, or it would build anew every crate whose build script asks for it, and rustdoc takes no
/// such option: so both are added where cargo starts a program. What runs a program is no part of a
/// fingerprint, and nothing is rebuilt.
pub(crate) const TIMED: &str = concat!(
    r#"target."cfg(all())".runner=["#,
    r#""sh","-c","RUSTC_BOOTSTRAP=1 exec \"$@\" -Zunstable-options --report-time","sh"]"#
);

/// A test that skipped itself.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Skip {
    /// Its path in its program.
    pub(super) test: String,
    /// What the machine lacks.
    pub(super) reason: String,
}

/// Counts of a step.
#[derive(Debug, Default)]
pub(super) struct Tally {
    passed: usize,
    failed: usize,
    /// Names of tests that failed.
    pub(super) failures: Vec<String>,
    /// Those that count as passed in libtest's sums.
    pub(super) skips: Vec<Skip>,
    /// How long each test took.
    pub(super) times: Vec<(Duration, String)>,
    /// A test program has given its sums.
    summed: bool,
}

/// What a step adds to the last line.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Counts {
    pub(super) passed: usize,
    pub(super) failed: usize,
    pub(super) skipped: usize,
}

impl Tally {
    /// Takes a line of what a test program writes to its standard output.
    pub(super) fn read(&mut self, line: &str) {
        let line = line.trim_end();
        if let Some((passed, failed)) = sums(line) {
            self.passed += passed;
            self.failed += failed;
            self.summed = true;
        } else if let Some((name, outcome)) = line.strip_prefix("test ").and_then(|test| test.rsplit_once(" ... ")) {
            let (word, time) = outcome.split_once(' ').unwrap_or((outcome, ""));
            if word == "FAILED" {
                self.failures.push(name.to_owned());
            }
            self.times.extend(seconds(time).map(|time| (time, name.to_owned())));
        }
    }

    /// Takes what the step's tests wrote to the file of skips. One that failed after it has skipped itself,
    /// as where it could not clean up, is a failure and no skip.
    pub(super) fn read_skips(&mut self, file: &str) {
        let skips = file.lines().map(|line| {
            let (test, reason) = line.split_once('\t').unwrap_or((line, "no reason is given"));
            Skip { test: test.to_owned(), reason: reason.to_owned() }
        });
        self.skips.extend(skips.filter(|skip| !self.failures.contains(&skip.test)));
    }

    /// The counts of a step that ended well or not. One without tests of its own counts as one; one that
    /// failed has at least one failure, as where a test program did not come to its end.
    pub(super) fn counts(&self, well: bool) -> Counts {
        let skipped = self.skips.len();
        let passed = self.passed.saturating_sub(skipped) + usize::from(well && !self.summed);
        Counts { passed, failed: self.failed.max(usize::from(!well)), skipped }
    }
}

/// Passed and failed of a line like `test result: ok. 12 passed; 0 failed; 1 ignored; …`.
fn sums(line: &str) -> Option<(usize, usize)> {
    let rest = line.strip_prefix("test result: ")?;
    let count = |what: &str| {
        let before = rest.split(what).next()?;
        before.split_whitespace().next_back()?.parse().ok()
    };
    Some((count(" passed")?, count(" failed")?))
}

/// The time of `<1.234s>`.
fn seconds(time: &str) -> Option<Duration> {
    let seconds = time.strip_prefix('<')?.strip_suffix("s>")?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(said: &str, skips: &str) -> Tally {
        let mut tally = Tally::default();
        said.lines().for_each(|line| tally.read(line));
        tally.read_skips(skips);
        tally
    }

    #[test]
    fn a_test_that_skipped_itself_is_skipped_and_not_passed() {
        let tally = read(
            "running 3 tests\n\
             test oom::a ... ok <0.001s>\n\
             test exit::b ... ok <1.500s>\n\
             test exit::c ... ignored, run by b\n\
             \n\
             test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 1.50s\n\
             test more ... ok\n\
             test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 7 filtered out; finished in 0.00s\n",
            "oom::a\tno memory cgroup can be made\n",
        );
        assert_eq!(tally.counts(true), Counts { passed: 2, failed: 0, skipped: 1 });
        let reason = "no memory cgroup can be made".to_owned();
        assert_eq!(tally.skips, [Skip { test: "oom::a".to_owned(), reason }]);
        let times =
            [(Duration::from_millis(1), "oom::a".to_owned()), (Duration::from_millis(1500), "exit::b".to_owned())];
        assert_eq!(tally.times, times);
    }

    /// As on two kernels in one step.
    #[test]
    fn a_test_that_skipped_itself_twice_has_passed_twice() {
        let once = "test a ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n";
        let tally = read(&once.repeat(2), "a\tx\na\tx\n");
        assert_eq!(tally.counts(true), Counts { passed: 0, failed: 0, skipped: 2 });
    }

    #[test]
    fn a_test_that_fails_after_it_skipped_itself_has_failed() {
        let tally = read(
            "test a ... FAILED <0.100s>\ntest b ... ok <0.100s>\n\
             test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out\n",
            "a\tx\n",
        );
        assert_eq!(tally.counts(false), Counts { passed: 1, failed: 1, skipped: 0 });
        assert_eq!(tally.failures, ["a"]);
    }

    #[test]
    fn a_step_without_tests_counts_as_one() {
        assert_eq!(read("built", "").counts(true), Counts { passed: 1, failed: 0, skipped: 0 });
        assert_eq!(read("error: no", "").counts(false), Counts { passed: 0, failed: 1, skipped: 0 });
        // With a filter that names none of its tests.
        let none = "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out";
        assert_eq!(read(none, "").counts(true), Counts::default());
    }

    #[test]
    fn a_test_program_that_did_not_come_to_its_end_is_a_failure() {
        let one = "test a ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n\
                   running 1 test\n";
        assert_eq!(read(one, "").counts(false), Counts { passed: 1, failed: 1, skipped: 0 });
    }
}
