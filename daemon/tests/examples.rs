//! What `deploy/` shows to be copied is right.

use std::path::{Path, PathBuf};

use lastgasp::config::Config;

fn deploy(file: &str) -> (PathBuf, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(file);
    let text = std::fs::read_to_string(&path).expect("an example");
    (path, text)
}

fn reads(path: &Path, text: &str) -> Config {
    match Config::read(Some((path, text)), std::iter::empty(), &[]) {
        Ok((config, warnings)) => {
            assert!(warnings.is_empty(), "{warnings:?}");
            config
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn the_example_configuration_is_right() {
    let (path, text) = deploy("lastgasp.toml");
    assert_eq!(reads(&path, &text).workers.len(), 1);
}

#[test]
fn the_configuration_in_the_daemonset_is_right() {
    let (path, yaml) = deploy("kubernetes/daemonset.yaml");
    let (_, after) = yaml.split_once("lastgasp.toml: |\n").expect("a ConfigMap with the file");
    let text: String =
        after.lines().map_while(|line| line.strip_prefix("    ")).fold(String::new(), |text, line| text + line + "\n");
    assert_eq!(reads(&path, &text).workers.len(), 1);
}
