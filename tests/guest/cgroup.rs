//! A cgroup of the v2 hierarchy, removed with its value.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const ROOT: &str = "/sys/fs/cgroup";

/// A cgroup.
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    /// An empty one below the root, with the memory controller.
    pub(crate) fn new(name: &str) -> Self {
        std::fs::write(Path::new(ROOT).join("cgroup.subtree_control"), "+memory").expect("the controller is there");
        let folder = Path::new(ROOT).join(name);
        std::fs::create_dir(&folder).expect("root may");
        Self(folder)
    }

    /// As in `/proc/PID/cgroup`.
    pub(crate) fn path(&self) -> String {
        self.0.display().to_string().replace(ROOT, "")
    }

    /// Writes into a file of it.
    pub(crate) fn write(&self, file: &str, value: &str) {
        let file = self.0.join(file);
        std::fs::write(&file, value).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }

    /// Waits until one of its files has this line.
    pub(crate) fn wait_for(&self, file: &str, line: &str) {
        let file = self.0.join(file);
        until(line, || std::fs::read_to_string(&file).is_ok_and(|text| text.lines().any(|is| is == line)));
    }

    /// Moves a process into it.
    pub(crate) fn add(&self, pid: u32) {
        self.write("cgroup.procs", &pid.to_string());
    }

    /// What is started inside belongs to it, until this process leaves it again.
    pub(crate) fn enter(&self) {
        self.add(std::process::id());
    }

    /// Back to the root.
    pub(crate) fn leave(&self) {
        std::fs::write(Path::new(ROOT).join("cgroup.procs"), std::process::id().to_string()).expect("root may");
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A frozen process can be killed, and the last one may be leaving still.
        until("the cgroup is empty", || std::fs::remove_dir(&self.0).is_ok());
    }
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is() {
        assert!(Instant::now() < deadline, "gave up waiting: {what}");
        std::thread::yield_now();
    }
}
