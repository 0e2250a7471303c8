//! Another user, with these capabilities and no others.

use std::path::Path;

use tokio::process::Command;

use crate::HarnessError;

/// A user that has nothing to do with the one that runs the tests.
#[derive(Clone, Debug)]
pub struct User {
    /// Its number.
    pub uid: u32,
    /// What it may do besides, as `bpf` for `CAP_BPF`.
    pub capabilities: Vec<String>,
}

impl User {
    /// `nobody`, with these capabilities.
    pub fn nobody(capabilities: &[&str]) -> Self {
        Self { uid: 65534, capabilities: capabilities.iter().map(|&name| name.to_owned()).collect() }
    }

    /// Runs `program` as this user, by `setpriv` of util-linux. The capabilities are ambient: they
    /// outlive the exec of a program that knows nothing of them (capabilities(7)). The process
    /// stays the same.
    pub fn command(&self, program: &Path) -> Command {
        let Self { uid, capabilities } = self;
        let list = capabilities.iter().fold("-all".to_owned(), |list, name| format!("{list},+{name}"));
        let mut command = Command::new("setpriv");
        command
            .arg(format!("--reuid={uid}"))
            .arg(format!("--regid={uid}"))
            .arg("--clear-groups")
            .arg(format!("--inh-caps={list}"))
            .arg(format!("--ambient-caps={list}"))
            .arg(program);
        command
    }

    /// Lets this user write into a folder.
    ///
    /// # Errors
    ///
    /// The test is not run by root.
    pub fn give(&self, folder: &Path) -> Result<(), HarnessError> {
        std::os::unix::fs::chown(folder, Some(self.uid), Some(self.uid))
            .map_err(|source| HarnessError::Io { what: format!("giving away {}", folder.display()), source })
    }
}
