//! Gets the programs into the kernel, one by one, and talks to their maps.

use std::{collections::BTreeMap, io, os::fd::AsFd as _, path::PathBuf};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, RingBuf},
    programs::{ProgramError, RawTracePoint},
};
use caps::Capability;
use lastgasp_ebpf::{EventKind, ListenerKey, Watched, names::map, port_bit};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use thiserror::Error;

use crate::{config::EbpfConfig, privileges};

use super::{
    KERNEL_BTF,
    btf::{Btf, BtfError},
    events::Ring,
    lockdown::{self, Lockdown},
    object::object,
    offsets::Plan,
    program::{KernelProgram, OffReason, ProgramState},
};

/// Why there is no eBPF at all. The daemon works on without it.
#[derive(Debug, Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum EbpfError {
    /// In this mode the kernel takes away the helper that reads its memory, and
    /// what it says about that is misleading, so nothing is tried.
    #[error("the kernel is locked down for confidentiality, so programs may not read its memory")]
    Lockdown,
    /// The kernel does not describe its types.
    #[error("the kernel's types are not described: cannot read {}: {source}", path.display())]
    NoBtf {
        /// Where the description should be.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The kernel's description of its types is not understood.
    #[error("{}: {source}", path.display())]
    Btf {
        /// Where the description is.
        path: PathBuf,
        /// What is wrong with it.
        source: BtfError,
    },
    /// The object file that was named cannot be read.
    #[error("cannot read the object file {}: {source}", path.display())]
    ObjectFile {
        /// Its path.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A capability is missing.
    #[error("not permitted: {operation} needs {capability}")]
    NotPermitted {
        /// What was tried.
        operation: &'static str,
        /// What it needs.
        capability: &'static str,
    },
    /// The capability is there, but not in the namespace that counts.
    #[error("not permitted: {operation} needs {capability} outside of any user namespace, and this is one")]
    UserNamespace {
        /// What was tried.
        operation: &'static str,
        /// What it needs.
        capability: &'static str,
    },
    /// The kernel refuses although the capability is there.
    #[error("{operation} is refused although {capability} is held")]
    Forbidden {
        /// What was tried.
        operation: &'static str,
        /// What it needs.
        capability: &'static str,
    },
    /// The object does not load into this kernel.
    #[error("the object does not load: {0}")]
    Object(#[source] Box<aya::EbpfError>),
    /// A map is not what it should be: object and daemon do not belong together.
    #[error("map {name} of the object is unusable: {source}")]
    Map {
        /// Its name.
        name: &'static str,
        /// What is wrong.
        source: MapError,
    },
    /// Not one program could be attached.
    #[error("no program fits this kernel: {}", reasons(.0))]
    NoProgram(Vec<(KernelProgram, OffReason)>),
}

impl EbpfError {
    /// What a person can do about it.
    #[must_use]
    pub const fn fix(&self) -> &'static str {
        match self {
            Self::Lockdown => "boot with lockdown=integrity or without lockdown; until then pidfd carries on",
            Self::NoBtf { .. } | Self::Btf { .. } => {
                "use a kernel with CONFIG_DEBUG_INFO_BTF, or name a file with its BTF in ebpf.btf"
            }
            Self::ObjectFile { .. } => "unset LASTGASP_EBPF_OBJECT, or let it name an object that can be read",
            Self::NotPermitted { .. } => "give lastgasp CAP_BPF and CAP_PERFMON (Linux 5.8), or run it as root",
            Self::UserNamespace { .. } => {
                "run lastgasp in the host's user namespace: hostUsers: true in Kubernetes, no rootless container"
            }
            Self::Forbidden { .. } => {
                "allow bpf(2) in the seccomp profile (RuntimeDefault does for those who hold CAP_BPF) and in the security \
                 module; before Linux 5.11 raise LimitMEMLOCK="
            }
            Self::Object(_) | Self::Map { .. } | Self::NoProgram(_) => {
                "report it with the kernel's version; pidfd carries on"
            }
        }
    }
}

fn reasons(programs: &[(KernelProgram, OffReason)]) -> String {
    let each: Vec<_> = programs.iter().map(|(program, why)| format!("{program}: {why}")).collect();
    each.join("; ")
}

/// A map could not be changed or read.
#[derive(Debug, Error)]
#[error("cannot {operation}: {source}")]
pub struct MapAccess {
    operation: &'static str,
    source: MapError,
}

/// How to load.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Programs to leave out.
    pub disabled: Vec<KernelProgram>,
    /// Where the kernel's types are described, if not in [`KERNEL_BTF`].
    pub btf: Option<PathBuf>,
    /// Bytes of the ring buffer, if not the usual ones; made a power of two of pages.
    pub ring_bytes: Option<u32>,
    /// Find the last thread as kernels before 6.16 have to, by reading
    /// `signal->live`, also where the tracepoint says it. For testing that way
    /// on a newer kernel.
    pub ignore_group_dead: bool,
}

impl LoadOptions {
    /// As configured.
    #[must_use]
    pub fn of(config: &EbpfConfig) -> Self {
        let EbpfConfig { enabled: _, btf, ring_bytes } = config;
        Self { btf: Some(btf.clone()), ring_bytes: Some(*ring_bytes), ..Self::default() }
    }
}

/// The programs in the kernel. Dropping it takes them out.
pub struct KernelPrograms {
    /// Holds the programs and their links.
    _programs: Ebpf,
    watched: HashMap<MapData, u32, Watched>,
    ports: HashMap<MapData, ListenerKey, u32>,
    port_bits: Array<MapData, u64>,
    strangers: Array<MapData, u32>,
    dropped: PerCpuArray<MapData, u64>,
    states: Vec<(KernelProgram, ProgramState)>,
    reset_reasons: BTreeMap<u32, String>,
}

impl KernelPrograms {
    /// Loads and attaches every program that fits this kernel, each independently.
    ///
    /// Load first, then look at processes: what happens in between is in the
    /// ring. Needs `CAP_BPF` and `CAP_PERFMON` in the calling thread (or
    /// `CAP_SYS_ADMIN`), and no runtime. They can be dropped afterwards, except
    /// that before Linux 5.19 [`watch`](Self::watch) and its like need `CAP_BPF`
    /// where `kernel.unprivileged_bpf_disabled` is set.
    ///
    /// # Errors
    ///
    /// Nothing could be attached, and why. A single program that does not fit is no
    /// error, see [`states`](Self::states).
    ///
    /// # Minimum kernel version
    ///
    /// 5.8, for the ring buffer.
    pub fn load(options: &LoadOptions) -> Result<(Self, Ring), EbpfError> {
        if Lockdown::read() == Lockdown::Confidentiality {
            return Err(EbpfError::Lockdown);
        }
        let path = options.btf.clone().unwrap_or_else(|| KERNEL_BTF.into());
        let btf = std::fs::read(&path).map_err(|source| EbpfError::NoBtf { path: path.clone(), source })?;
        let btf = Btf::parse(btf).map_err(|source| EbpfError::Btf { path, source })?;
        let plan = Plan::new(&btf, options);
        let object = object().map_err(|(path, source)| EbpfError::ObjectFile { path, source })?;

        // Kernels before 5.11 account maps against this limit. Where it cannot be
        // raised, creating a map says so.
        let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);

        let mut loader = EbpfLoader::new();
        for (name, value) in &plan.globals {
            loader.override_global(name, value, true);
        }
        if let Some(bytes) = options.ring_bytes {
            loader.map_max_entries(map::EVENTS, bytes);
        }
        let mut programs = loader.load(&object).map_err(not_loaded)?;

        let states: Vec<_> = plan
            .programs
            .into_iter()
            .map(|(program, fits)| {
                let attached = fits.and_then(|()| attach(&mut programs, program));
                (program, attached.map_or_else(ProgramState::Off, |()| ProgramState::On))
            })
            .collect();
        if !states.iter().any(|(_, state)| state.is_on()) {
            return Err(nothing_attached(states));
        }

        let (watched, watched_too) = take(&mut programs, map::WATCHED, twice)?;
        let ring = take(&mut programs, map::EVENTS, RingBuf::try_from)?;
        let ring = Ring { ring, watched: watched_too };
        let programs = Self {
            watched,
            ports: take(&mut programs, map::PORTS, HashMap::try_from)?,
            port_bits: take(&mut programs, map::PORT_BITS, Array::try_from)?,
            strangers: take(&mut programs, map::STRANGERS, Array::try_from)?,
            dropped: take(&mut programs, map::DROPPED, PerCpuArray::try_from)?,
            _programs: programs,
            states,
            reset_reasons: plan.reset_reasons,
        };
        Ok((programs, ring))
    }

    /// Whether this thread may still change the maps: a mark is set and taken away that
    /// concerns nobody.
    ///
    /// # Errors
    ///
    /// It may not.
    pub fn check_access(&mut self) -> Result<(), MapAccess> {
        let nobody = ListenerKey::default();
        let failed = |source| MapAccess { operation: "use the maps", source };
        self.ports.insert(nobody, 0, 0).map_err(failed)?;
        absent_is_fine(self.ports.remove(&nobody)).map_err(failed)
    }

    /// Each program, and whether it is on.
    #[must_use]
    pub fn states(&self) -> &[(KernelProgram, ProgramState)] {
        &self.states
    }

    /// Whether a program is on.
    #[must_use]
    pub fn is_on(&self, program: KernelProgram) -> bool {
        self.states.iter().any(|(p, state)| *p == program && state.is_on())
    }

    /// Watches a process, and every process that it makes from now on.
    ///
    /// `start_ticks` is field 22 of `/proc/PID/stat`, `slot` any number that
    /// should come back in its events. Children that exist already have to be
    /// watched one by one: look at procfs *after* this call, and again until
    /// there is no new one. A process that has died before this call leaves an
    /// entry that nothing removes but [`unwatch`](Self::unwatch), so open its
    /// pidfd and look at it after this call.
    ///
    /// # Errors
    ///
    /// There is no room, or no permission.
    pub fn watch(&mut self, tgid: u32, slot: u32, start_ticks: u64) -> Result<(), MapAccess> {
        self.insert(tgid, Watched { start_ticks, slot, signals_only: 0 })
    }

    /// Watches only the signals that are sent to a process, as to one that supervises an engine.
    /// Its children are not watched, and its exit does not end the watch.
    ///
    /// # Errors
    ///
    /// There is no room, or no permission.
    pub fn watch_signals(&mut self, tgid: u32, slot: u32, start_ticks: u64) -> Result<(), MapAccess> {
        self.insert(tgid, Watched { start_ticks, slot, signals_only: 1 })
    }

    fn insert(&mut self, tgid: u32, value: Watched) -> Result<(), MapAccess> {
        self.watched.insert(tgid, value, 0).map_err(|source| MapAccess { operation: "watch a process", source })
    }

    /// Stops watching that incarnation of a process. A process that exits stops
    /// being watched by itself. Unknown ones are no error.
    ///
    /// # Errors
    ///
    /// No permission.
    pub fn unwatch(&mut self, tgid: u32, start_ticks: u64) -> Result<(), MapAccess> {
        let failed = |source| MapAccess { operation: "unwatch a process", source };
        match self.watched.get(&tgid, 0) {
            Ok(value) if value.start_ticks == start_ticks => absent_is_fine(self.watched.remove(&tgid)).map_err(failed),
            Ok(_another_incarnation) => Ok(()),
            Err(error) => absent_is_fine(Err::<(), _>(error)).map_err(failed),
        }
    }

    /// What is watched under that tgid, as it stands in the kernel.
    #[must_use]
    pub fn watched(&self, tgid: u32) -> Option<Watched> {
        self.watched.get(&tgid, 0).ok()
    }

    /// Every watched process: those of [`watch`](Self::watch) and their children.
    pub fn watched_processes(&self) -> impl Iterator<Item = (u32, Watched)> + '_ {
        self.watched.iter().filter_map(Result::ok)
    }

    /// Watches a listening port. `netns` is the inode number of `/proc/PID/ns/net`.
    ///
    /// # Errors
    ///
    /// There is no room, or no permission.
    pub fn watch_port(&mut self, netns: u32, port: u16, slot: u32) -> Result<(), MapAccess> {
        let failed = |source| MapAccess { operation: "watch a port", source };
        let key = ListenerKey { netns, port: port.into() };
        self.ports.insert(key, slot, 0).map_err(failed)?;
        self.mark_port(port, true).map_err(failed)
    }

    /// Stops watching a port. Unknown ones are no error.
    ///
    /// # Errors
    ///
    /// No permission.
    pub fn unwatch_port(&mut self, netns: u32, port: u16) -> Result<(), MapAccess> {
        let failed = |source| MapAccess { operation: "unwatch a port", source };
        let key = ListenerKey { netns, port: port.into() };
        absent_is_fine(self.ports.remove(&key)).map_err(failed)?;
        let elsewhere = self.ports.keys().filter_map(Result::ok).any(|key| key.port == u32::from(port));
        self.mark_port(port, elsewhere).map_err(failed)
    }

    /// Nobody else writes these words.
    fn mark_port(&mut self, port: u16, watched: bool) -> Result<(), MapError> {
        let (word, mask) = port_bit(port);
        let bits = self.port_bits.get(&word, 0)?;
        self.port_bits.set(word, if watched { bits | mask } else { bits & !mask }, 0)
    }

    /// Asks for an event when a process that no worker has runs another program: of the next `count`
    /// times, not of those after them. Returns how many of the last such request were left.
    ///
    /// # Errors
    ///
    /// No permission.
    pub fn tell_strangers(&mut self, count: u16) -> Result<u16, MapAccess> {
        let failed = |source| MapAccess { operation: "ask for processes that nobody watches", source };
        let left = self.strangers.get(&0, 0).map_err(failed)?;
        self.strangers.set(0, u32::from(count), 0).map_err(failed)?;
        Ok(u16::try_from(left).unwrap_or(u16::MAX))
    }

    /// Whether this kernel tells why it sends a TCP reset. Those that do also tell of resets that no
    /// full socket sends.
    #[must_use]
    pub fn gives_reset_reasons(&self) -> bool {
        !self.reset_reasons.is_empty()
    }

    /// This kernel's name of a reason for a TCP reset, as `tcp_abort_on_close`.
    #[must_use]
    pub fn reset_reason(&self, number: u32) -> Option<&str> {
        self.reset_reasons.get(&number).map(String::as_str)
    }

    /// Events that found no room in the ring, since loading, by kind.
    ///
    /// # Errors
    ///
    /// No permission.
    pub fn dropped(&self) -> Result<[(EventKind, u64); EventKind::COUNT], MapAccess> {
        let mut counts = EventKind::ALL.map(|kind| (kind, 0));
        for (kind, count) in &mut counts {
            let values = self
                .dropped
                .get(&(*kind as u32), 0)
                .map_err(|source| MapAccess { operation: "read the count of dropped events", source })?;
            *count = values.iter().sum();
        }
        Ok(counts)
    }
}

fn attach(object: &mut Ebpf, program: KernelProgram) -> Result<(), OffReason> {
    let loaded = object.program_mut(program.function()).ok_or(OffReason::NotInObject)?;
    let loaded: &mut RawTracePoint = loaded.try_into().map_err(|_other_type| OffReason::NotInObject)?;
    loaded.load().map_err(|error| match error {
        ProgramError::LoadError { io_error, verifier_log } => OffReason::LoadRefused {
            errno: io_error.raw_os_error().unwrap_or(0),
            verifier: last_lines(&verifier_log.to_string()),
        },
        other => OffReason::LoadRefused { errno: errno(&other), verifier: other.to_string() },
    })?;
    match loaded.attach(program.tracepoint()) {
        Ok(_link_is_held_by_the_program) => Ok(()),
        Err(error) => Err(OffReason::AttachRefused { errno: errno(&error) }),
    }
}

fn errno(error: &ProgramError) -> i32 {
    match error {
        ProgramError::SyscallError(error) => error.io_error.raw_os_error().unwrap_or(0),
        _ => 0,
    }
}

/// The end of the verifier's log is where it says what it does not like.
fn last_lines(log: &str) -> String {
    let lines: Vec<_> = log.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(4)..].join(" | ")
}

fn not_loaded(error: aya::EbpfError) -> EbpfError {
    if let aya::EbpfError::MapError(MapError::CreateError { io_error, .. }) = &error
        && io_error.raw_os_error() == Some(libc::EPERM)
    {
        return refused("creating a map", Capability::CAP_BPF);
    }
    EbpfError::Object(Box::new(error))
}

/// EPERM means a missing capability, unless that is there.
fn refused(operation: &'static str, capability: Capability) -> EbpfError {
    let held = privileges::holds(capability) || privileges::holds(Capability::CAP_SYS_ADMIN);
    let capability = privileges::name(capability);
    match held {
        false => EbpfError::NotPermitted { operation, capability },
        true if privileges::in_user_namespace() => EbpfError::UserNamespace { operation, capability },
        true => EbpfError::Forbidden { operation, capability },
    }
}

fn nothing_attached(states: Vec<(KernelProgram, ProgramState)>) -> EbpfError {
    let reasons: Vec<_> = states
        .into_iter()
        .filter_map(|(program, state)| match state {
            ProgramState::On => None,
            ProgramState::Off(reason) => Some((program, reason)),
        })
        .collect();
    let locked_down = |(_, reason): &(KernelProgram, OffReason)| match reason {
        OffReason::LoadRefused { verifier, .. } => lockdown::explains(verifier),
        _ => false,
    };
    if reasons.iter().any(locked_down) {
        return EbpfError::Lockdown;
    }
    let not_permitted =
        |(_, reason): &(KernelProgram, OffReason)| matches!(reason, OffReason::LoadRefused { errno: libc::EPERM, .. });
    if reasons.iter().any(not_permitted) {
        return refused("loading a tracing program", Capability::CAP_PERFMON);
    }
    EbpfError::NoProgram(reasons)
}

fn take<T>(
    programs: &mut Ebpf,
    name: &'static str,
    as_map: impl FnOnce(Map) -> Result<T, MapError>,
) -> Result<T, EbpfError> {
    let missing = || MapError::InvalidName { name: name.to_owned() };
    let map = programs.take_map(name).ok_or_else(missing);
    map.and_then(as_map).map_err(|source| EbpfError::Map { name, source })
}

type WatchedMap = HashMap<MapData, u32, Watched>;

/// Two handles to the same map: one for [`KernelPrograms`], one for [`Ring`].
fn twice(map: Map) -> Result<(WatchedMap, WatchedMap), MapError> {
    let fd = match &map {
        Map::HashMap(data) => data.fd().as_fd().try_clone_to_owned()?,
        _ => return Err(MapError::InvalidName { name: map::WATCHED.to_owned() }),
    };
    let same = Map::HashMap(MapData::from_fd(fd)?);
    Ok((HashMap::try_from(map)?, HashMap::try_from(same)?))
}

fn absent_is_fine(result: Result<impl Sized, MapError>) -> Result<(), MapError> {
    match result {
        Ok(_) | Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use lastgasp_protocol::ClosedName as _;

    use super::*;

    fn refused_with(errno: i32, verifier: &str) -> EbpfError {
        let reason = OffReason::LoadRefused { errno, verifier: verifier.to_owned() };
        nothing_attached(vec![(KernelProgram::Exit, ProgramState::Off(reason))])
    }

    #[test]
    fn a_missing_capability_is_named_and_one_that_is_there_is_not_blamed() {
        let refused = refused_with(libc::EPERM, "");
        if privileges::holds(Capability::CAP_PERFMON) {
            let elsewhere = privileges::in_user_namespace();
            assert_eq!(refused.as_str(), if elsewhere { "user_namespace" } else { "forbidden" });
        } else {
            assert_eq!(refused.to_string(), "not permitted: loading a tracing program needs CAP_PERFMON");
        }
        assert_eq!(
            refused_with(libc::EINVAL, "").to_string(),
            "no program fits this kernel: exit: the kernel refused the program: Invalid argument (os error 22)"
        );
    }

    /// In a container securityfs is not there to ask beforehand.
    #[test]
    fn a_verifier_that_withholds_the_helper_means_lockdown_whatever_the_errno() {
        for errno in [libc::EINVAL, libc::EPERM] {
            let said = "program of this type cannot use helper bpf_probe_read_kernel#113";
            assert_eq!(refused_with(errno, said).as_str(), "lockdown");
        }
    }

    #[test]
    fn the_end_of_a_verifier_log_is_kept() {
        assert_eq!(last_lines(""), "");
        assert_eq!(last_lines("a\n\nb\nc\nd\ne\n\n"), "b | c | d | e");
    }
}
