//! Faults of GPUs, as the kernel's log tells them: whose they are.
//!
//! A line that names a process is about that process. One that names only the GPU is about whoever
//! has its device file open: of a single worker it is that worker's; where several have it open, it is
//! not known whose work failed, and each of them is asked. A GPU that nobody holds, or that cannot be
//! found, is the node's matter: a note says so, and no verdict follows.

use crate::core::{Evidence, GpuPolicy, Kind, Nanos, ProcessId, WorkerId};
use crate::metrics::Warning;
use crate::sensors::gpus::{PciAddress, Roots};
use crate::sensors::proc;
use lastgasp_protocol::ClosedName as _;

use super::{Message, Supervisor};

/// A fault that was logged.
pub(super) struct Fault {
    /// As `xid 79 (GPU has fallen off the bus) PCI:0000:3b:00`.
    pub(super) fault: String,
    /// What follows for a worker whose it is.
    pub(super) policy: GpuPolicy,
    pub(super) at: Nanos,
}

impl Supervisor {
    pub(super) fn gpu_fault(&mut self, fault: Fault, pid: Option<u32>, gpu: Option<PciAddress>) {
        let Fault { fault: text, policy, at } = &fault;
        tracing::warn!(fault = text, pid, policy = ?policy, "GPU fault");
        self.metrics.warnings.with_label_values(&[Warning::GpuFault.as_str()]).inc();
        if let Some(pid) = pid {
            let tgid = proc::thread_group(pid).unwrap_or(pid);
            // A process of nobody's: so is the fault.
            let Some(tracked) = self.processes.by_pid(tgid) else { return };
            let (worker, root, process) = (tracked.worker, tracked.root, Some(tracked.process()));
            let kind = Kind::GpuFault { process, fault: text.clone(), policy: *policy };
            self.evidence(Evidence { worker, root, kind, at: *at });
            return;
        }
        let Some(gpu) = gpu else {
            self.gpu_held(&fault, None);
            return;
        };
        let trees: Vec<(WorkerId, ProcessId, Vec<u32>)> = self
            .workers
            .iter()
            .filter_map(|(worker, _)| {
                let tree = self.processes.tree(worker).into_iter().filter(|tracked| !tracked.exit_seen);
                Some((worker, self.processes.root(worker)?, tree.map(|tracked| tracked.id.tgid).collect()))
            })
            .collect();
        let messages = self.messages.clone();
        tokio::task::spawn_blocking(move || {
            let holders = holders(&Roots::default(), &gpu, trees);
            let _ = messages.send(Message::GpuHeld(fault, holders));
        });
    }

    /// It was looked who holds the GPU; `None`: that cannot be seen, and it may be anybody.
    pub(super) fn gpu_held(&mut self, fault: &Fault, holders: Option<Vec<(WorkerId, ProcessId)>>) {
        let Fault { fault, policy, at } = fault;
        let (concerned, known) = match holders {
            Some(holders) if !holders.is_empty() => (holders, true),
            Some(_) => {
                self.note_about("", format!("GPU fault: {fault}; no worker holds that GPU"));
                return;
            }
            None => {
                self.note_about("", format!("GPU fault: {fault}; which worker's is not known"));
                let roots = self.workers.iter().filter_map(|(worker, _)| Some((worker, self.processes.root(worker)?)));
                (roots.collect(), false)
            }
        };
        let policy = policy_for(*policy, known && concerned.len() == 1);
        for (worker, root) in concerned {
            let kind = Kind::GpuFault { process: None, fault: fault.clone(), policy };
            self.evidence(Evidence { worker, root, kind, at: *at });
        }
    }
}

/// Those of the workers, each with its root and tree, that have a device file of the GPU open.
fn holders(
    roots: &Roots,
    gpu: &PciAddress,
    trees: Vec<(WorkerId, ProcessId, Vec<u32>)>,
) -> Option<Vec<(WorkerId, ProcessId)>> {
    let files = roots.device_files(gpu)?;
    let holds = |tree: &[u32]| tree.iter().any(|tgid| roots.holds(*tgid, &files));
    Some(trees.into_iter().filter(|(.., tree)| holds(tree)).map(|(worker, root, _)| (worker, root)).collect())
}

/// What follows for each worker that it may be about: no verdict, unless it is about this one alone.
fn policy_for(policy: GpuPolicy, alone: bool) -> GpuPolicy {
    if policy == GpuPolicy::Lost && !alone { GpuPolicy::Probe } else { policy }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_fault_without_a_process_is_that_of_the_worker_whose_tree_holds_the_gpu() {
        let folder = tempfile::tempdir().unwrap();
        let roots = Roots { proc: folder.path().join("proc"), sys: folder.path().join("sys") };
        for minor in 0..3 {
            let gpu = roots.proc.join(format!("driver/nvidia/gpus/0000:0{minor}:00.0"));
            fs::create_dir_all(&gpu).unwrap();
            fs::write(gpu.join("information"), format!("Device Minor: \t {minor}\n")).unwrap();
        }
        // The root of the first worker has nothing, its child has the GPU; both workers have the second one.
        for (tgid, files) in [(10, vec![]), (11, vec!["/dev/nvidia0", "/dev/nvidia1"]), (20, vec!["/dev/nvidia1"])] {
            let descriptors = roots.proc.join(format!("{tgid}/fd"));
            fs::create_dir_all(&descriptors).unwrap();
            for file in files {
                symlink(file, descriptors.join(&file[file.len() - 1..])).unwrap();
            }
        }
        let root = |tgid| ProcessId { tgid, start_ticks: 7 };
        let trees = || vec![(WorkerId(0), root(10), vec![10, 11]), (WorkerId(1), root(20), vec![20])];
        let holders = |address| holders(&roots, &PciAddress::parse(address).unwrap(), trees());
        assert_eq!(holders("0000:00:00"), Some(vec![(WorkerId(0), root(10))]));
        assert_eq!(holders("0000:01:00"), Some(vec![(WorkerId(0), root(10)), (WorkerId(1), root(20))]));
        assert_eq!(holders("0000:02:00"), Some(vec![]));
        assert_eq!(holders("0000:09:00"), None);
    }

    #[test]
    fn a_verdict_follows_only_where_one_worker_alone_can_be_meant() {
        assert_eq!(policy_for(GpuPolicy::Lost, true), GpuPolicy::Lost);
        assert_eq!(policy_for(GpuPolicy::Lost, false), GpuPolicy::Probe);
        assert_eq!(policy_for(GpuPolicy::Note, false), GpuPolicy::Note);
    }
}
