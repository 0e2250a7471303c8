//! buildah, podman and crun, for the test of the image.

use crate::{debian, tools};

const PROGRAMS: [&str; 3] = ["buildah", "podman", "crun"];

/// Installs what is missing, as root. Says why the image cannot be tried, if so.
pub(crate) fn install() -> Option<&'static str> {
    if is_there() {
        return None;
    }
    if tools::on_path("apt-get").is_none() {
        return Some("no buildah, podman or crun, and no apt-get");
    }
    let mut install = debian::install(&PROGRAMS);
    install.env("DEBIAN_FRONTEND", "noninteractive");
    let installed =
        tools::step("package lists", &mut debian::update()).and_then(|()| tools::step("container tools", &mut install));
    if let Err(error) = installed {
        eprintln!("    {error}");
    }
    (!is_there()).then_some("buildah, podman and crun cannot be installed")
}

fn is_there() -> bool {
    PROGRAMS.iter().all(|program| tools::on_path(program).is_some())
}
