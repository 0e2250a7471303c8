//! What is done about the processes of a worker that is lost: to those of that very life, each
//! named by its pid and start time, and signalled through a pidfd.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};
use tokio::io::AsyncWriteExt as _;

use super::sever;
use crate::core::ProcessId;
use crate::log::with_cause;
use crate::sensors::pidfd::{self, PidfdError};
use crate::sensors::proc;

/// How long what was killed is waited for. Tearing down the memory of a GPU may take longer.
const TEARDOWN: Duration = Duration::from_secs(2);
/// How long a command may run. It is killed then.
const COMMAND: Duration = Duration::from_secs(30);

/// Peers that a report names. The rest are counted.
const MAX_PEERS: usize = 8;

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum Act {
    /// SIGKILL to what outlives the root.
    Reap,
    /// SIGTERM to a root that lives on.
    Terminate,
    /// SIGKILL to a root that lived on.
    Kill,
    /// SIGKILL to the root and what is below it.
    KillTree,
    /// A program of the operator's.
    Command,
    /// An end to its TCP connections.
    Sever,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum ActionOutcome {
    /// The signal was sent, the command ended with status 0, the connections are destroyed.
    Done,
    /// The process, or every connection, had ended by itself.
    Gone,
    /// The kernel refused, or the command could not be run or failed.
    Failed,
    /// The command had to be killed.
    TimedOut,
    /// `mode = "observe"`: nothing was done.
    Observed,
    /// Nothing was done: the processes were not proven to be the worker.
    Unproven,
}

/// One thing that was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActionReport {
    /// What.
    pub act: Act,
    /// What came of it.
    pub outcome: ActionOutcome,
    /// For people: to which process, and why it failed.
    pub detail: String,
}

/// Sends the signal of `act` to these processes and, for [`Act::Reap`] and [`Act::KillTree`], to their descendants, but
/// to none of `spared`, nor to this process or anything above it. Blocks until what was killed is
/// gone, for at most 2 s.
#[must_use]
pub fn signal(act: Act, processes: &[(ProcessId, String)], spared: &HashSet<ProcessId>) -> Vec<ActionReport> {
    let mut victims: BTreeMap<ProcessId, String> = processes.iter().cloned().collect();
    if matches!(act, Act::Reap | Act::KillTree) {
        // Without kernel events no source reports children that were born since the last look.
        for (process, _) in processes {
            for info in proc::descendants(*process) {
                victims.entry(info.id).or_insert(info.comm);
            }
        }
    }
    let ours = proc::ours();
    victims.retain(|process, _| process.tgid > 1 && !ours.contains(&process.tgid) && !spared.contains(process));
    let mut killed = Vec::new();
    let done = victims.into_iter().map(|(process, title)| end(act, process, &title, &mut killed)).collect();
    if act != Act::Terminate {
        wait_for(&killed);
    }
    done
}

/// Destroys the connections that these processes hold, see [`sever::sever`]. Blocks.
#[must_use]
pub fn sever(owners: &BTreeMap<ProcessId, String>, spare_ports: &[u16]) -> Vec<ActionReport> {
    let processes: Vec<ProcessId> = owners.keys().copied().collect();
    let done = |outcome, detail| ActionReport { act: Act::Sever, outcome, detail };
    match sever::sever(&processes, spare_ports) {
        Ok(severed) if severed.is_empty() => vec![done(ActionOutcome::Gone, "no connection was left".to_owned())],
        Ok(severed) => owners
            .iter()
            .filter_map(|(owner, title)| {
                let peers: Vec<_> = severed.iter().filter(|one| one.owner == *owner).map(|one| one.peer).collect();
                let named: Vec<String> = peers.iter().take(MAX_PEERS).map(ToString::to_string).collect();
                let more = if peers.len() > named.len() { ", …" } else { "" };
                let detail =
                    format!("{} of {title} (pid {owner}) with {}{more}", connections(peers.len()), named.join(", "));
                (!peers.is_empty()).then(|| done(ActionOutcome::Done, detail))
            })
            .collect(),
        Err(error) => vec![done(ActionOutcome::Failed, with_cause(&error))],
    }
}

fn connections(number: usize) -> String {
    format!("{number} {}", if number == 1 { "connection" } else { "connections" })
}

/// Waits until every pidfd is readable.
fn wait_for(killed: &[OwnedFd]) {
    let deadline = Instant::now() + TEARDOWN;
    for pidfd in killed {
        let left = deadline.saturating_duration_since(Instant::now()).as_millis();
        let left = u16::try_from(left).unwrap_or(u16::MAX);
        // A failure only means that the certificate may name what is on its way out.
        let _ = poll(&mut [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)], left);
    }
}

fn end(act: Act, process: ProcessId, title: &str, signalled: &mut Vec<OwnedFd>) -> ActionReport {
    let signal = if act == Act::Terminate { libc::SIGTERM } else { libc::SIGKILL };
    let mut detail = format!("{title} (pid {process}) signal {signal}");
    // A zombie would take the signal too.
    let sent = if proc::is_alive(process) { pidfd::signal(process, signal) } else { Err(PidfdError::Gone(process)) };
    let outcome = match sent {
        Ok(pidfd) => {
            signalled.push(pidfd);
            ActionOutcome::Done
        }
        Err(PidfdError::Gone(_)) => ActionOutcome::Gone,
        Err(error) => {
            detail = format!("{detail}: {}", with_cause(&error));
            ActionOutcome::Failed
        }
    };
    ActionReport { act, outcome, detail }
}

/// Runs the operator's command with the certificate on its standard input. What it prints is
/// dropped.
pub async fn run(command: &[String], certificate: Vec<u8>) -> ActionReport {
    let done = |outcome, detail| ActionReport { act: Act::Command, outcome, detail };
    let [program, arguments @ ..] = command else { return done(ActionOutcome::Failed, "no command".to_owned()) };
    let child = tokio::process::Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return done(ActionOutcome::Failed, format!("{program}: {error}")),
    };
    let mut stdin = child.stdin.take();
    let ended = async {
        if let Some(stdin) = stdin.as_mut() {
            // A command may end without reading it.
            let _ = stdin.write_all(&certificate).await;
        }
        drop(stdin.take());
        child.wait().await
    };
    match tokio::time::timeout(COMMAND, ended).await {
        Ok(Ok(status)) if status.success() => done(ActionOutcome::Done, program.clone()),
        Ok(Ok(status)) => done(ActionOutcome::Failed, format!("{program}: {status}")),
        Ok(Err(error)) => done(ActionOutcome::Failed, format!("{program}: {error}")),
        Err(_) => done(ActionOutcome::TimedOut, format!("{program}: killed after {} s", COMMAND.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Child, Command};

    use super::*;

    fn sleeper() -> (Child, ProcessId) {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = proc::identify(child.id()).unwrap();
        (child, process)
    }

    fn outcomes(done: &[ActionReport]) -> Vec<ActionOutcome> {
        done.iter().map(|done| done.outcome).collect()
    }

    #[test]
    fn only_the_process_that_is_meant_is_killed() {
        let (mut child, process) = sleeper();
        let predecessor = ProcessId { start_ticks: process.start_ticks - 1, ..process };
        let victim = |process| vec![(process, "sleep".to_owned())];
        assert_eq!(outcomes(&signal(Act::Kill, &victim(predecessor), &HashSet::new())), [ActionOutcome::Gone]);
        assert_eq!(signal(Act::Reap, &victim(process), &HashSet::from([process])), [], "it is another's by now");
        assert!(proc::is_alive(process));
        let done = signal(Act::Reap, &victim(process), &HashSet::new());
        assert_eq!(outcomes(&done), [ActionOutcome::Done]);
        assert_eq!(done[0].detail, format!("sleep (pid {}) signal 9", process.tgid));
        assert!(!proc::is_alive(process), "it was waited for");
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn this_process_and_its_parents_are_never_signalled() {
        let me = proc::identify(std::process::id()).unwrap();
        let parent = proc::identify(std::os::unix::process::parent_id()).unwrap();
        let victims = [(me, "me".to_owned()), (parent, "parent".to_owned())];
        assert_eq!(signal(Act::Kill, &victims, &HashSet::new()), []);
    }

    #[test]
    fn a_root_is_asked_to_end_before_it_is_killed() {
        let (mut child, process) = sleeper();
        let done = signal(Act::Terminate, &[(process, "sleep".to_owned())], &HashSet::new());
        assert_eq!(outcomes(&done), [ActionOutcome::Done]);
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGTERM));
    }

    #[tokio::test]
    async fn a_command_reads_the_certificate() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("certificate.json");
        let command = ["sh".to_owned(), "-c".to_owned(), format!("cat > {}", file.display())];
        let done = run(&command, b"{\"schema\":1}".to_vec()).await;
        assert_eq!(done, ActionReport { act: Act::Command, outcome: ActionOutcome::Done, detail: "sh".to_owned() });
        assert_eq!(std::fs::read_to_string(file).unwrap(), "{\"schema\":1}");
    }

    #[tokio::test]
    async fn a_command_that_fails_is_said_to_have_failed() {
        let run = |command: &[&str]| {
            let command: Vec<String> = command.iter().map(|part| (*part).to_owned()).collect();
            async move { run(&command, vec![b' '; 1 << 20]).await }
        };
        let done = run(&["sh", "-c", "exit 3"]).await;
        assert_eq!((done.outcome, done.detail.as_str()), (ActionOutcome::Failed, "sh: exit status: 3"));
        let done = run(&["/no/such/program"]).await;
        assert_eq!(done.outcome, ActionOutcome::Failed);
        assert!(done.detail.starts_with("/no/such/program: "), "{}", done.detail);
    }

    #[tokio::test(start_paused = true)]
    async fn a_command_that_does_not_end_is_killed() {
        let done = run(&["sleep".to_owned(), "1000".to_owned()], Vec::new()).await;
        assert_eq!((done.outcome, done.detail.as_str()), (ActionOutcome::TimedOut, "sleep: killed after 30 s"));
    }
}
