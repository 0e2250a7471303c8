//! The `lastgasp` binary. Everything is in the library.

fn main() -> std::process::ExitCode {
    lastgasp::cli::main(std::env::args_os()).into()
}
