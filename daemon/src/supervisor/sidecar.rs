//! `lastgasp run --sidecar`: in the pod of one engine, for clusters that give no daemon the host's
//! processes.
//!
//! Everything is seen by pidfd, from a process namespace that the pod's containers share. When the
//! engine is lost, its worker is withdrawn and routers are signalled as ever; then the sidecar ends, so
//! that kubelet starts it again, and it waits for the next engine. It does not watch on: whoever
//! restarts a pod's containers learns that from exit codes, and from nothing else.

use std::time::Duration;

use lastgasp_protocol::Name;

use crate::config::{Config, EbpfMode, Mode};
use crate::core::{Evidence, Kind, Nanos, State};
use crate::sensors::proc;

use super::{RunError, Supervisor};

/// How `lastgasp run --sidecar` differs from a daemon of the node.
#[derive(Debug, Clone, Copy)]
pub struct SidecarOptions {
    /// How long the engine may take until it serves.
    pub startup_deadline: Duration,
}

/// A configuration that does not do for a sidecar.
#[derive(Debug, thiserror::Error)]
pub enum SidecarError {
    /// Not one worker.
    #[error(
        "--sidecar watches the one engine of its pod, but the configuration has {0} workers; keep one [[worker]], or \
         set LASTGASP_WORKER_0_NAME and LASTGASP_WORKER_0_ENDPOINT"
    )]
    Workers(usize),
    /// Declarations are for a daemon of the node.
    #[error("declare.enabled is for a daemon of the node; leave it out beside --sidecar")]
    Declare,
    /// There is no eBPF without the node's privileges.
    #[error("ebpf.enabled is \"required\", but a sidecar goes by pidfd alone; leave it out beside --sidecar")]
    Ebpf,
    /// Node and pod make no name together.
    #[error("--pod {pod:?}: {node}/{pod} is not a name: {error}")]
    Name {
        /// Of the node.
        node: Name,
        /// Of the pod.
        pod: String,
        /// Why.
        error: String,
    },
}

impl SidecarOptions {
    /// Makes the configuration a sidecar's: its node is `<node>/<pod>`, so that the pods of a node
    /// have leases of their own, and the kernel is not asked for eBPF.
    ///
    /// # Errors
    /// See [`SidecarError`].
    pub fn new(config: &mut Config, pod: &str, startup_deadline: Duration) -> Result<Self, SidecarError> {
        if config.workers.len() != 1 {
            return Err(SidecarError::Workers(config.workers.len()));
        }
        if config.declare.enabled {
            return Err(SidecarError::Declare);
        }
        if config.ebpf.enabled == EbpfMode::Required {
            return Err(SidecarError::Ebpf);
        }
        config.ebpf.enabled = EbpfMode::Off;
        let node = Name::new(format!("{}/{pod}", config.node)).map_err(|error| SidecarError::Name {
            node: config.node.clone(),
            pod: pod.to_owned(),
            error: error.to_string(),
        })?;
        config.node = node;
        Ok(Self { startup_deadline })
    }
}

/// What a sidecar keeps in mind.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sidecar {
    startup_deadline: Duration,
    /// When the engine must serve.
    deadline: Nanos,
    /// It has served.
    served: bool,
    /// Its record has been there and is gone, acknowledged.
    pub(super) withdrawn: bool,
    /// This process was asked to end.
    asked: bool,
}

impl Sidecar {
    pub(super) fn new(options: SidecarOptions, now: Nanos) -> Self {
        let SidecarOptions { startup_deadline } = options;
        Self { startup_deadline, deadline: now.plus(startup_deadline), served: false, withdrawn: false, asked: false }
    }
}

impl Supervisor {
    /// SIGTERM. All containers of a pod get it at once, and nobody else would see the engine to its
    /// end: it drains, and the sidecar stays until the record is gone. Says whether it stays.
    pub(super) fn leave(&mut self) -> bool {
        let enforces = self.config.mode == Mode::Enforce;
        let Some(sidecar) = self.sidecar.as_mut().filter(|sidecar| enforces && sidecar.served && !sidecar.asked) else {
            return false;
        };
        sidecar.asked = true;
        let Some((worker, _)) = self.workers.iter().next() else { return false };
        if let Some(root) = self.processes.root(worker) {
            let kind = Kind::Terminating { signal: libc::SIGTERM };
            self.evidence(Evidence { worker, root, kind, at: proc::monotonic_now() });
        }
        true
    }

    /// Whether the sidecar's work is done, and how.
    pub(super) fn sidecar_end(&mut self) -> Option<Result<(), RunError>> {
        let sidecar = self.sidecar.as_mut()?;
        let (worker, slot) = self.workers.iter().next()?;
        let state = self.core.state(worker);
        let serves = matches!(state, Some(State::Serving | State::Unready));
        sidecar.served |= serves;
        let sidecar = *sidecar;
        if self.config.mode == Mode::Observe {
            return None;
        }
        if !sidecar.served {
            let late = proc::monotonic_now() >= sidecar.deadline;
            return late.then(|| Err(RunError::NeverServed(sidecar.startup_deadline)));
        }
        let over = matches!(state, Some(State::Lost | State::Left));
        // One that is handed over lives on and may come back; only who was asked to end goes by then.
        let done = sidecar.withdrawn && !slot.withdrawing && !serves && (over || sidecar.asked);
        let is_written = !over || !self.deaths.is_open(worker);
        if !done || !is_written || self.is_acting_on(worker) || !self.publications.is_empty() {
            return None;
        }
        Some(if sidecar.asked { Ok(()) } else { Err(RunError::EngineLost(slot.reason.clone())) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(lines: &str, pod: &str) -> Result<Config, SidecarError> {
        let flags = [("--node", "node", "gpu-a".to_owned())];
        let (mut config, _) = Config::read(Some(("x.toml".as_ref(), lines)), [], &flags).unwrap();
        SidecarOptions::new(&mut config, pod, Duration::from_secs(1)).map(|_| config)
    }

    const ONE: &str = "[[worker]]\nname = \"vllm\"\nendpoint = \"http://127.0.0.1:8000\"\n";

    #[test]
    fn the_pod_is_a_part_of_the_nodes_name() {
        let config = made(ONE, "vllm-7f9c").unwrap();
        assert_eq!((config.node.as_str(), config.ebpf.enabled), ("gpu-a/vllm-7f9c", EbpfMode::Off));
        assert_eq!(config.node.token(), "gpu-a=2Fvllm-7f9c");
    }

    #[test]
    fn what_only_a_daemon_of_the_node_can_do_is_refused_with_the_settings_name() {
        let refused = |lines: &str| made(lines, "pod").unwrap_err().to_string();
        assert!(refused("").contains("LASTGASP_WORKER_0_NAME"));
        assert!(refused(&format!("[ebpf]\nenabled = \"required\"\n{ONE}")).contains("ebpf.enabled"));
        assert!(refused(&format!("[declare]\nenabled = true\nuids = [1]\n{ONE}")).contains("declare.enabled"));
        assert!(made(ONE, &"x".repeat(300)).unwrap_err().to_string().contains("--pod"));
    }
}
