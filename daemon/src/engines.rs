//! Engine profiles: which processes of an engine are critical, and what its health services mean.
//! The facts stand in `engines.toml`; this file only knows how to read and match them.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use serde::Deserialize;

use crate::core::HealthRole;

/// Longest `comm`, in bytes: `TASK_COMM_LEN` is 16 with the NUL (include/linux/sched.h).
pub(crate) const MAX_COMM: usize = 15;

/// Fewest bytes of a role that a truncated `comm` or a pattern must show. Three letters of a role
/// fit too many names.
const MIN_ROLE: usize = 4;

static PROFILES: LazyLock<Vec<Arc<Profile>>> = LazyLock::new(|| {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Engines {
        engine: Vec<Profile>,
    }
    let engines: Engines = toml::from_str(include_str!("engines.toml")).expect("engines.toml is tested");
    engines.engine.into_iter().map(Arc::new).collect()
});

/// The names of all profiles, in the order of `engines.toml`.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    PROFILES.iter().map(|profile| profile.name.as_str())
}

/// A health service and what it speaks for.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// Name in `grpc.health.v1.HealthCheckRequest`; empty is the server as a whole.
    pub name: String,
    /// What its status speaks for.
    pub role: HealthRole,
}

/// What is known of an engine.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// `vllm`, `sglang`, `trtllm`, `generic`.
    pub name: String,
    /// Process titles whose death means that the engine is lost. The root is critical anyway.
    #[serde(default)]
    pub critical: Vec<Pattern>,
    /// The same for processes without a title, by command line.
    #[serde(default)]
    pub commands: Vec<Command>,
    /// gRPC health services to watch.
    #[serde(default)]
    pub services: Vec<Service>,
    /// How long streams go on after the engine said NOT_SERVING, where that is known.
    #[serde(default, rename = "shutdown_grace_ms", deserialize_with = "millis")]
    pub shutdown_grace: Option<Duration>,
}

/// A critical process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Role {
    /// The full title with its rank, as `VLLM::Worker_TP1`, where the command line showed it; else
    /// the `comm`, which may be cut, as `VLLM::Worker_TP`.
    pub title: String,
}

impl Profile {
    /// The profile of this name.
    #[must_use]
    pub fn find(name: &str) -> Option<Arc<Self>> {
        PROFILES.iter().find(|profile| profile.name == name).cloned()
    }

    /// This profile with more critical titles.
    #[must_use]
    pub fn with_critical(&self, more: impl IntoIterator<Item = Pattern>) -> Self {
        let mut profile = self.clone();
        profile.critical.extend(more);
        profile
    }

    /// What a descendant of the root is, if its death means that the engine is lost. `comm` is the
    /// group leader's, at most [`MAX_COMM`] bytes; `cmdline` has blanks for NULs.
    ///
    /// A title takes over the command line too (setproctitle writes over argv and pads with
    /// blanks), so the command line, which is not cut, is asked first. Where the parent's names are
    /// known too, ask [`Profile::role_of_child`].
    #[must_use]
    pub fn role(&self, comm: &str, cmdline: &str) -> Option<Role> {
        let cmdline = cmdline.trim();
        let first = cmdline.split(' ').next().unwrap_or_default();
        let (name, cut) = if first.contains("::") { (first, false) } else { (comm.trim_end(), comm.len() >= MAX_COMM) };
        if self.critical.iter().any(|pattern| pattern.matches(name, cut)) {
            return Some(Role { title: name.to_owned() });
        }
        // Engines without titles are named by their program; a script's program is its interpreter.
        let program = first.rsplit('/').next().unwrap_or_default();
        if !program.is_empty() && self.critical.iter().any(|pattern| pattern.matches(program, false)) {
            return Some(Role { title: program.to_owned() });
        }
        let command = self.commands.iter().find(|command| command.matches(cmdline))?;
        Some(Role { title: command.title.clone() })
    }

    /// As [`Profile::role`], for a process whose parent's names are known. A fork that has neither
    /// called exec nor named itself still shows its parent's names and is nothing yet: ask again
    /// when they change. Otherwise an EngineCore that looks for a program which is not installed
    /// would be lost, because its child ends under its name (fork(2), then a failing execve(2)).
    /// No engine gives a critical process the very title of its parent.
    #[must_use]
    pub fn role_of_child(&self, parent: Names<'_>, child: Names<'_>) -> Option<Role> {
        // fork(2) copies the comm of the thread that forks, so the command line tells more.
        let unnamed = match child.cmdline.trim() {
            "" => child.comm == parent.comm,
            cmdline => cmdline == parent.cmdline.trim(),
        };
        if unnamed { None } else { self.role(child.comm, child.cmdline) }
    }
}

/// What a process calls itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Names<'a> {
    /// The group leader's `comm`.
    pub comm: &'a str,
    /// The command line, with blanks for NULs.
    pub cmdline: &'a str,
}

/// A process known by its command line.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Command {
    /// Each of these is part of the command line.
    pub contains: Vec<String>,
    /// What such a process is called.
    pub title: String,
}

impl Command {
    fn matches(&self, cmdline: &str) -> bool {
        self.contains.iter().all(|part| cmdline.contains(part.as_str()))
    }
}

/// A title: `<prefix>::<role>`, or a bare name. `*` stands for any prefix, and at the end for any rest.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Pattern {
    /// `None` for a bare name; `Some("*")` for any prefix.
    prefix: Option<String>,
    role: String,
    any_rest: bool,
}

/// Why a text is not a [`Pattern`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// Would make every process critical, a compiler included.
    #[error("names fewer than {MIN_ROLE} characters of a role")]
    TooShort,
    /// `*` anywhere else.
    #[error("has a `*` that is neither the whole prefix nor the last character")]
    Misplaced,
}

impl Pattern {
    /// Whether a process name matches. A name that was cut needs to show only the beginning of the
    /// role: `prod::EngineCor` is `*::EngineCore`.
    fn matches(&self, name: &str, cut: bool) -> bool {
        let Self { prefix, role, any_rest } = self;
        let rest = match (prefix, name.rsplit_once("::")) {
            (None, _) => name,
            (Some(prefix), Some((before, rest))) if prefix == "*" || prefix == before => rest,
            (Some(_), _) => return false,
        };
        rest == role
            || (*any_rest && rest.starts_with(role.as_str()))
            || (cut && rest.len() >= MIN_ROLE && role.starts_with(rest))
    }
}

impl FromStr for Pattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let (prefix, rest) = match text.rsplit_once("::") {
            Some((prefix, rest)) => (Some(prefix.to_owned()), rest),
            None => (None, text),
        };
        let (role, any_rest) = rest.strip_suffix('*').map_or((rest, false), |role| (role, true));
        if prefix.as_ref().is_some_and(|prefix| prefix != "*" && prefix.contains('*')) || role.contains('*') {
            return Err(PatternError::Misplaced);
        }
        if role.len() < MIN_ROLE {
            return Err(PatternError::TooShort);
        }
        Ok(Self { prefix, role: role.to_owned(), any_rest })
    }
}

impl TryFrom<String> for Pattern {
    type Error = PatternError;

    fn try_from(text: String) -> Result<Self, PatternError> {
        text.parse()
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { prefix, role, any_rest } = self;
        if let Some(prefix) = prefix {
            write!(f, "{prefix}::")?;
        }
        write!(f, "{role}{}", if *any_rest { "*" } else { "" })
    }
}

fn millis<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    Ok(Some(Duration::from_millis(u64::deserialize(deserializer)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn title(engine: &str, comm: &str, cmdline: &str) -> Option<String> {
        Profile::find(engine).unwrap().role(comm, cmdline).map(|role| role.title)
    }

    #[test]
    fn there_are_four_profiles() {
        assert_eq!(names().collect::<Vec<_>>(), ["vllm", "sglang", "trtllm", "generic"]);
        assert!(Profile::find("VLLM").is_none());
    }

    #[test]
    fn a_title_on_the_command_line_shows_its_rank() {
        assert_eq!(title("vllm", "VLLM::EngineCor", "VLLM::EngineCore          ").unwrap(), "VLLM::EngineCore");
        assert_eq!(title("vllm", "VLLM::Worker_TP", "VLLM::Worker_TP1   ").unwrap(), "VLLM::Worker_TP1");
        assert_eq!(title("sglang", "sglang::schedul", "sglang::scheduler_TP0").unwrap(), "sglang::scheduler_TP0");
    }

    #[test]
    fn a_comm_cut_at_15_bytes_is_enough() {
        for (engine, comm) in [
            ("vllm", "VLLM::EngineCor"),
            ("vllm", "VLLM::Worker"),
            ("vllm", "VLLM::Worker_TP"),
            ("vllm", "VLLM::Worker_PP"),
            ("vllm", "VLLM::Worker_DP"),
            ("vllm", "VLLM::APIServer"),
            ("vllm", "VLLM::DPCoordin"),
            ("sglang", "sglang::schedul"),
            ("sglang", "sglang::detoken"),
            ("sglang", "sglang::data_pa"),
            ("sglang", "sglang::tokeniz"),
        ] {
            assert_eq!(title(engine, comm, "").as_deref(), Some(comm), "{engine}");
        }
    }

    #[test]
    fn every_title_that_an_engine_gives_is_known() {
        // vLLM 0.33 and SGLang 0.5.23, as their sources set them.
        for (engine, titles) in [
            (
                "vllm",
                &[
                    "VLLM::EngineCore",
                    "VLLM::EngineCore_DP3",
                    "VLLM::Worker",
                    "VLLM::Worker_DP0_PP1_TP3_EP3",
                    "VLLM::APIServer_1",
                    "VLLM::APIServer_DP2",
                    "VLLM::DPCoordinator",
                ][..],
            ),
            (
                "sglang",
                &[
                    "sglang::scheduler",
                    "sglang::scheduler_DP1_PP0_TP3_EP1",
                    "sglang::detokenizer",
                    "sglang::detokenizer_router",
                    "sglang::data_parallel_controller",
                    "sglang::tokenizer_worker:4711",
                ],
            ),
        ] {
            for full in titles {
                let comm: String = full.chars().take(MAX_COMM).collect();
                assert_eq!(title(engine, &comm, &format!("{full}      ")).as_deref(), Some(*full));
                assert_eq!(title(engine, &comm, "").as_deref(), Some(comm.as_str()), "from {full}");
            }
        }
    }

    #[test]
    fn the_prefix_is_configurable_and_the_role_is_not() {
        assert_eq!(title("vllm", "prod::EngineCor", "").unwrap(), "prod::EngineCor");
        assert_eq!(
            title("vllm", "a-long-prefix::", "a-long-prefix::EngineCore_DP3 ").unwrap(),
            "a-long-prefix::EngineCore_DP3"
        );
        assert_eq!(title("vllm", "prod::Janitor", "prod::Janitor"), None);
    }

    #[test]
    fn a_name_that_is_not_cut_is_not_filled_up() {
        assert_eq!(title("vllm", "prod::Engine", ""), None, "12 bytes: that is its whole name");
        assert_eq!(title("vllm", "production::Eng", ""), None, "three letters of a role fit too much");
    }

    #[test]
    fn what_an_engine_forks_may_come_and_go() {
        for (comm, cmdline) in [
            ("python", "python -B -c from multiprocessing.resource_tracker import main;main(32)"),
            ("python3", "python3 -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)"),
            ("ldconfig", "/sbin/ldconfig -p"),
            ("cc1plus", "/usr/lib/gcc/x86_64-linux-gnu/12/cc1plus -quiet -I include kernel.cpp"),
            ("ptxas", "ptxas --gpu-name sm_90 a::EngineCore"),
            ("sh", "sh -c gcc -o /tmp/x.so x.c"),
            ("vllm", "/usr/bin/python3 /usr/bin/vllm serve ./tiny --served-model-name a::EngineCore"),
            ("ZMQbg/IO/0", ""),
            ("", ""),
        ] {
            for engine in names() {
                assert_eq!(title(engine, comm, cmdline), None, "{engine}: {comm} {cmdline}");
            }
        }
    }

    #[test]
    fn a_fork_under_its_parents_name_is_nothing_yet() {
        let vllm = Profile::find("vllm").unwrap();
        let core = Names { comm: "VLLM::EngineCor", cmdline: "VLLM::EngineCore      " };
        for fork in [core, Names { comm: "ZMQbg/IO/0", ..core }, Names { cmdline: "", ..core }] {
            assert_eq!(vllm.role_of_child(core, fork), None, "{fork:?}");
        }
        let worker = Names { comm: "VLLM::Worker_TP", cmdline: "VLLM::Worker_TP1   " };
        assert_eq!(vllm.role_of_child(core, worker).unwrap().title, "VLLM::Worker_TP1");
        let root = Names { comm: "vllm", cmdline: "python vllm serve ./tiny" };
        assert_eq!(vllm.role_of_child(root, core).unwrap().title, "VLLM::EngineCore");
    }

    #[test]
    fn processes_without_a_title_are_known_by_their_command_line() {
        assert_eq!(
            title("trtllm", "python3", "/usr/bin/python3 -m mpi4py.futures.server").unwrap(),
            "mpi4py.futures.server"
        );
        assert_eq!(
            title("vllm", "vllm-rs", "/opt/vllm-rs frontend --listen-fd 7 --input-listener-fd 8").unwrap(),
            "vllm-rs frontend"
        );
        assert_eq!(
            title("vllm", "python", "python -m vllm.entrypoints.cli.main serve ./tiny --headless --port 1").unwrap(),
            "vllm headless engine"
        );
    }

    #[test]
    fn an_operator_may_add_what_no_profile_knows() {
        let profile = Profile::find("generic")
            .unwrap()
            .with_critical(["*::MyRole".parse().unwrap(), "triton_python_backend_stub".parse().unwrap()]);
        assert!(profile.role("x::MyRole", "").is_some());
        assert!(profile.role("x::MyRole_2", "").is_none());
        assert!(profile.role("triton_python_b", "").is_some());
        assert_eq!(
            profile.role("python3", "/opt/tritonserver/triton_python_backend_stub /models/m").unwrap().title,
            "triton_python_backend_stub"
        );
    }

    #[test]
    fn a_pattern_that_would_fit_everything_is_refused() {
        for (text, error) in [
            ("*", PatternError::TooShort),
            ("*::*", PatternError::TooShort),
            ("*::Eng", PatternError::TooShort),
            ("VL*::EngineCore", PatternError::Misplaced),
            ("*::Engine*Core", PatternError::Misplaced),
        ] {
            assert_eq!(text.parse::<Pattern>(), Err(error), "{text}");
        }
        assert_eq!("*::EngineCore*".parse::<Pattern>().unwrap().to_string(), "*::EngineCore*");
    }

    #[test]
    fn every_engine_watches_the_whole_server_for_liveness() {
        for name in names() {
            let whole = Service { name: String::new(), role: HealthRole::Liveness };
            assert_eq!(Profile::find(name).unwrap().services, [whole], "{name}");
        }
    }
}
