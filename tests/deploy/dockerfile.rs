//! `deploy/image/Dockerfile` cannot be built where Rust's image cannot be had: it is read instead, and
//! held against the repository. The image of the same files that buildah makes is run in `image.rs`.

use std::os::unix::fs::PermissionsExt;

use crate::render::{text, workspace};

/// An instruction and what follows it.
type Instruction = (String, Vec<String>);

/// Its instructions, with lines that go on put together.
fn instructions() -> Vec<Instruction> {
    let text = text("deploy/image/Dockerfile");
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with('#')).collect();
    let whole = lines.join("\n").replace("\\\n", " ");
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    whole.lines().map(words).filter(|words| !words.is_empty()).map(|mut words| (words.remove(0), words)).collect()
}

fn all<'a>(instructions: &'a [Instruction], name: &str) -> Vec<&'a [String]> {
    instructions.iter().filter(|(instruction, _)| instruction == name).map(|(_, words)| &words[..]).collect()
}

/// What follows each of these words.
fn after<'a>(words: &'a [String], flag: &str) -> Vec<&'a str> {
    words.windows(2).filter(|pair| pair[0] == flag).map(|pair| pair[1].as_str()).collect()
}

#[test]
#[ignore = "run with the others of this folder"]
fn every_instruction_is_known_and_names_what_exists() {
    let all_of_it = instructions();
    let names: Vec<&str> = all_of_it.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        ["FROM", "WORKDIR", "COPY", "RUN", "FROM", "COPY", "ENTRYPOINT", "CMD", "LABEL"],
        "what this test knows of"
    );

    let run = all(&all_of_it, "RUN")[0];
    let commands = run.join(" ");
    let (build, files) = commands.split_once(" && ").expect("cargo build && rootfs.sh");
    let binaries: Vec<String> = {
        let words: Vec<String> = build.split(' ').map(str::to_owned).collect();
        after(&words, "--bin").into_iter().map(str::to_owned).collect()
    };
    assert_eq!(binaries, ["lastgasp", "lastgasp-router"]);
    for (binary, package) in [("lastgasp", "daemon"), ("lastgasp-router", "router")] {
        let manifest: toml::Table = text(&format!("{package}/Cargo.toml")).parse().unwrap();
        assert_eq!(manifest["package"]["name"].as_str(), Some(binary));
        assert!(workspace().join(package).join("src/main.rs").exists(), "{package}");
    }
    assert!(build.contains("--locked") && workspace().join("Cargo.lock").exists());

    let words: Vec<&str> = files.split(' ').collect();
    let [script, root, from @ ..] = &words[..] else { panic!("{files}") };
    let mode = std::fs::metadata(workspace().join(script)).unwrap().permissions().mode();
    assert_eq!(mode & 0o111, 0o111, "{script} can be run");
    let expected: Vec<String> = binaries.iter().map(|binary| format!("target/release/{binary}")).collect();
    assert_eq!(*from, expected);

    // The context: everything but what is built, and the history.
    let copies = all(&all_of_it, "COPY");
    assert_eq!(copies[0], [".", "."]);
    assert_eq!(text(".dockerignore").split_whitespace().collect::<Vec<_>>(), ["target", ".git"]);
    // What the first stage left, as the second one's root.
    assert_eq!(all(&all_of_it, "FROM")[0][1..], ["AS", "build"]);
    assert_eq!(all(&all_of_it, "FROM")[1], ["scratch"]);
    assert_eq!(copies[1], ["--from=build", root, "/"]);
}

/// Whoever builds it by one of the two gets the same.
#[test]
#[ignore = "run with the others of this folder"]
fn it_starts_what_the_image_by_buildah_starts() {
    let (all_of_it, script) = (instructions(), text("deploy/image/build.sh"));
    let entrypoint = all(&all_of_it, "ENTRYPOINT")[0].join(" ");
    assert!(script.contains(&format!("--entrypoint '{entrypoint}'")), "{entrypoint}");
    assert_eq!(all(&all_of_it, "CMD")[0], [r#"["run"]"#]);
    assert!(script.contains("--cmd run "));
    for label in all(&all_of_it, "LABEL")[0] {
        assert!(script.contains(&format!("--label {label}")), "{label}");
    }
}
