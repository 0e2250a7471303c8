//! Compiles `proto/status.proto` without a system protoc.

use std::error::Error;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    let descriptors = protox::compile(["proto/status.proto"], ["proto"])?;
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    // With it, `grpcurl -plaintext -unix …` needs no .proto file.
    std::fs::write(out.join("status.bin"), protox::prost::Message::encode_to_vec(&descriptors))?;
    tonic_prost_build::configure().type_attribute(".", "#[derive(serde::Serialize)]").compile_fds(descriptors)?;
    println!("cargo::rerun-if-changed=proto/status.proto");
    Ok(())
}
