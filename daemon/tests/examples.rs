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

/// Those of the cluster; what is rendered with them is tried by `tests/deploy`.
#[test]
fn the_configurations_of_the_overlays_are_right() {
    for (overlay, workers) in [("minimal", 1), ("full", 0)] {
        let (path, text) = deploy(&format!("kubernetes/overlays/{overlay}/lastgasp.toml"));
        let config = reads(&path, &text);
        assert_eq!((config.workers.len(), config.misfits().len()), (workers, 0));
    }
}
