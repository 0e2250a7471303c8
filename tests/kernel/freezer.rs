//! A frozen process is not dead.

use std::path::PathBuf;

use lastgasp::core::ProcessId;
use lastgasp::sensors::proc::{ProcessState, is_alive, process_state};

use crate::harness::{Kernel, Victim, until};

/// A cgroup that can be frozen, of either version; removed with this.
struct Freezer {
    folder: PathBuf,
    file: &'static str,
    values: [&'static str; 2],
}

impl Freezer {
    fn new() -> Option<Self> {
        let v1 = ("/sys/fs/cgroup/freezer", "freezer.state", ["FROZEN", "THAWED"]);
        let v2 = ("/sys/fs/cgroup", "cgroup.freeze", ["1", "0"]);
        [v1, v2].into_iter().find_map(|(root, file, values)| {
            let folder = PathBuf::from(root).join(format!("lastgasp-freezer-{}", std::process::id()));
            std::fs::create_dir(&folder).ok()?;
            let freezer = Self { folder, file, values };
            freezer.folder.join(file).exists().then_some(freezer)
        })
    }

    fn set(&self, frozen: bool) {
        let [freeze, thaw] = self.values;
        std::fs::write(self.folder.join(self.file), if frozen { freeze } else { thaw }).expect("root may");
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.set(false);
        until("the cgroup is empty", || std::fs::remove_dir(&self.folder).is_ok().then_some(()));
    }
}

#[test]
fn a_frozen_process_is_frozen_and_alive_and_nothing_is_told_of_it() {
    let Some(freezer) = Freezer::new() else {
        lastgasp_tests::skip!("no cgroup freezer can be made");
    };
    let mut kernel = Kernel::load();
    let victim = Victim::start(&["threads", "3"]);
    kernel.watch(&victim);
    let id = ProcessId { tgid: victim.tgid, start_ticks: victim.start_ticks };
    assert_eq!(process_state(id), Some(ProcessState::Running));
    std::fs::write(freezer.folder.join("cgroup.procs"), victim.tgid.to_string()).expect("root may");
    freezer.set(true);
    until("it is frozen", || (process_state(id) == Some(ProcessState::Frozen)).then_some(()));
    assert!(is_alive(id));
    assert_eq!(kernel.seen(), []);
    freezer.set(false);
    until("it runs again", || (process_state(id) == Some(ProcessState::Running)).then_some(()));
    drop(victim);
}
