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

/// What the Debian package is made of (`cargo deb`).
#[test]
fn everything_that_the_package_holds_is_there() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = std::fs::read_to_string(package.join("Cargo.toml")).expect("its manifest");
    let manifest: toml::Table = manifest.parse().expect("TOML");
    let deb = &manifest["package"]["metadata"]["deb"];
    let assets: Vec<(&str, &str)> = deb["assets"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|asset| (asset[0].as_str().expect("a source"), asset[1].as_str().expect("a place")))
        .collect();
    for (source, _) in &assets {
        // cargo-deb builds these.
        let built =
            source.strip_prefix("target/release/").is_some_and(|name| ["lastgasp", "lastgasp-router"].contains(&name));
        assert!(built || package.join(source).is_file(), "{source}");
    }
    let conf = deb["conf-files"][0].as_str().expect("a file");
    assert!(assets.iter().any(|(_, place)| format!("/{place}") == conf), "{conf}");
    // The unit runs what the package installs, with the configuration that it installs.
    let (_, unit) = deploy("systemd/lastgasp.service");
    assert!(unit.contains(&format!("ExecStart=/usr/bin/lastgasp run --config {conf}\n")), "{unit}");
}
