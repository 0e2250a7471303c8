//! The limit of open files is too low for what the router promises: it takes what it may have, and says
//! what is missing.
#![forbid(unsafe_code)]

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

#[test]
fn a_router_under_a_low_limit_takes_all_of_it_and_names_the_fix() {
    let mut router = Command::new("sh")
        .args([
            "-c",
            r#"ulimit -Sn 256; ulimit -Hn 300; exec "$0" --nats nats://127.0.0.1:1 --listen 127.0.0.1:0 --threads 1"#,
        ])
        .arg(env!("CARGO_BIN_EXE_lastgasp-router"))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(router.stderr.take().unwrap()).lines().map(Result::unwrap);
    // It comes before the router listens, or not at all.
    let warning = lines.find(|line| line.contains("files may be open") || line.contains("listening"));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", router.id()));
    router.kill().unwrap();
    router.wait().unwrap();
    let warning = warning.expect("it starts");
    for part in ["at most 300 ", "--max-connections 16384", "--max-requests 8192", "LimitNOFILE=24708"] {
        assert!(warning.contains(part), "{warning}");
    }
    let limits = limits.unwrap();
    let open_files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(open_files.split_whitespace().skip(3).collect::<Vec<_>>(), ["300", "300", "files"]);
}
