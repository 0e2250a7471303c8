//! The command line where it needs no daemon.

use std::io::Write;
use std::process::{Command, Output, Stdio};

fn lastgasp(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lastgasp")).args(arguments).env_remove("LASTGASP_CONFIG").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn bash_understands_its_completions() {
    let script = lastgasp(&["completions", "bash"]);
    assert_eq!(script.status.code(), Some(0));
    let mut bash = Command::new("bash").arg("-s").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = bash.stdin.take().unwrap();
    stdin.write_all(&script.stdout).unwrap();
    // As bash itself does it for `lastgasp un<TAB>`.
    stdin
        .write_all(
            b"\nCOMP_WORDS=(lastgasp un) COMP_CWORD=1\n_lastgasp lastgasp un lastgasp\necho \"${COMPREPLY[@]}\"\n",
        )
        .unwrap();
    drop(stdin);
    assert_eq!(text(&bash.wait_with_output().unwrap().stdout), "undrain\n");
}

#[test]
fn manual_pages_are_written_where_they_are_wanted() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    let said = lastgasp(&["man", pages.to_str().unwrap()]);
    assert_eq!(said.status.code(), Some(0));
    let drain = std::fs::read_to_string(pages.join("lastgasp-drain.1")).unwrap();
    assert!(drain.contains("lastgasp drain vllm") && drain.contains("deadline"), "{drain}");
    let refused = lastgasp(&["man", "/proc/no/such/folder"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("name a folder that can be written"));
}

#[test]
fn a_program_can_read_what_is_wrong_with_a_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gpu.toml");
    let mistakes = "mode = 'obsreve'\nnodename = 'a'\n[lease]\nttl_s = 0\n[[worker]]\nname = 'w'\nendpoint = 'http://0.0.0.0:8000'\nengine = 'vlm'\n";
    std::fs::write(&file, mistakes).unwrap();
    let said = lastgasp(&["check-config", "--output", "json", "--config", file.to_str().unwrap()]);
    assert_eq!(said.status.code(), Some(78));
    let json: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    assert_eq!(json["right"], false);
    let problems: Vec<&str> = json["problems"].as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect();
    for setting in ["mode", "nodename", "lease.ttl_s", "worker[0].endpoint", "worker[0].engine"] {
        assert!(problems.iter().any(|problem| problem.contains(&format!(": {setting}: "))), "{setting}: {problems:#?}");
    }
    // From the top of the file to its end.
    let line = |problem: &&str| problem.rsplit_once("gpu.toml:").unwrap().1.split(':').next().unwrap().parse().unwrap();
    assert!(problems.iter().map(line).is_sorted_by_key(|line: u32| line), "{problems:#?}");

    std::fs::write(&file, "node = 'a'\n[[worker]]\nname = 'w'\nendpoint = 'http://10.0.0.7:8000'\n").unwrap();
    let said = lastgasp(&["check-config", "--json", "--config", file.to_str().unwrap()]);
    assert_eq!(said.status.code(), Some(0));
    let json: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    assert_eq!((&json["right"], &json["workers"]), (&true.into(), &serde_json::json!(["w"])));
    let settings = lastgasp(&["check-config", "--settings", "--output", "json"]);
    let settings: serde_json::Value = serde_json::from_slice(&settings.stdout).unwrap();
    assert!(settings.as_array().unwrap().iter().any(|one| one["variable"] == "LASTGASP_NATS_URL"));
}
