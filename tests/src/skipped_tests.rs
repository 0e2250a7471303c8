use std::process::Command;

use crate::skipped::ENVIRONMENT;

#[test]
#[ignore = "run by the test below"]
fn skips() {
    let lacking = "two\nlines";
    crate::skip!("no {lacking}");
}

/// With its own name, also where one test runs after the other, and seen by whoever runs it by hand.
#[test]
fn a_test_that_skips_says_so_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("skipped");
    for threads in ["1", "2"] {
        let mut test = Command::new(std::env::current_exe().unwrap());
        test.args(["--ignored", "--exact", "skipped_tests::skips", "--test-threads", threads]).env(ENVIRONMENT, &file);
        let output = test.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said, "SKIPPED: skipped_tests::skips: no two lines\n");
    }
    assert_eq!(std::fs::read_to_string(file).unwrap(), "skipped_tests::skips\tno two lines\n".repeat(2));
}

/// It would be nobody's, and a test would count as passed.
#[test]
fn another_thread_cannot_skip() {
    let panicked = std::thread::spawn(|| crate::skipped::here("anything")).join();
    assert!(panicked.is_err());
}
