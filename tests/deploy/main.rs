//! What `deploy/` holds, tried as a cluster or a node would: manifests rendered by kustomize and Helm
//! and held against the schemas of Kubernetes, configurations read by the daemon, and the image run
//! with what its manifest gives it.
//!
//! Packages are installed into a virtual environment under `target/`, and the image needs root, buildah,
//! podman and crun, hence ignored: `cargo test -p lastgasp-tests --test deploy -- --ignored`.

mod dockerfile;
mod examples;
mod image;
mod manifests;
mod podman;
mod render;
mod unit;
