//! The container that a process runs in, from its cgroup's path. No container runtime is asked.
//!
//! Paths as kubelet, containerd, CRI-O, Docker and Podman make them, with the cgroupfs and the
//! systemd driver, on cgroup v1 and v2. Where containers are nested (kind, Docker in Docker) the
//! innermost is meant, but the outermost pod: whoever may make cgroups within a pod's names them as he likes. A path is what `/proc/PID/cgroup` shows to *this* process: seen from a
//! cgroup namespace of its own it begins with `/..` (cgroup_namespaces(7)).

use std::fmt;
use std::fs;
use std::io::{self, Read as _};

use lastgasp_protocol::Container;

/// Most of `/proc/PID/cgroup` that is read, in bytes: a v1 host has a dozen lines.
const MAX_FILE: u64 = 16 << 10;
/// Longest path that is looked at, in bytes: `PATH_MAX`.
const MAX_PATH: usize = 4096;
/// v1 hierarchies whose path tells, the best first. On a hybrid host the unified hierarchy holds
/// systemd's own groups only, and the container's stands in the controllers'.
const HIERARCHIES: [&str; 5] = ["memory", "pids", "cpu", "name=systemd", ""];
/// What runtimes put before the id, as in `cri-containerd-<id>.scope`, and what they are called.
const RUNTIMES: [(&str, &str); 5] = [
    ("cri-containerd", "containerd"),
    ("crio", "cri-o"),
    ("docker", "docker"),
    ("libpod", "podman"),
    ("nerdctl", "containerd"),
];

/// The container of a process, with its PID and network namespace where those may be seen.
///
/// # Errors
/// Not found: no such process. Invalid data: no cgroup path that could be understood.
pub fn container(tgid: u32) -> io::Result<Container> {
    let mut text = Vec::new();
    fs::File::open(format!("/proc/{tgid}/cgroup"))?.take(MAX_FILE).read_to_end(&mut text)?;
    // A group's name may be any bytes but a slash and a NUL.
    let mut container = parse(&String::from_utf8_lossy(&text)).ok_or(io::ErrorKind::InvalidData)?;
    container.pid_namespace = super::namespace(tgid, "pid").ok();
    container.network_namespace = super::namespace(tgid, "net").ok();
    Ok(container)
}

/// Reads the text of `/proc/PID/cgroup` (cgroups(7)): `hierarchy:controllers:path` a line.
#[must_use]
pub fn parse(text: &str) -> Option<Container> {
    let lines: Vec<(&str, &str)> = text
        .lines()
        .filter_map(|line| {
            let (_, rest) = line.split_once(':')?;
            rest.split_once(':')
        })
        .filter(|(_, path)| path.starts_with('/') && path.len() <= MAX_PATH)
        .collect();
    let path = HIERARCHIES.iter().find_map(|wanted| {
        let line = lines.iter().find(|(controllers, _)| controllers.split(',').any(|controller| controller == *wanted));
        line.map(|(_, path)| *path)
    })?;
    // A cgroup may be removed while a zombie is still in it.
    Some(of_path(path.strip_suffix(" (deleted)").unwrap_or(path)))
}

fn of_path(path: &str) -> Container {
    let mut container = Container { cgroup_path: super::printable(path), ..Container::default() };
    // With the cgroupfs driver under systemd a segment is `<slice>:<runtime>:<id>` (runc, systemd).
    let parts: Vec<&str> = path.split(['/', ':']).collect();
    for (at, part) in parts.iter().enumerate().rev() {
        if container.container_id.is_none()
            && let Some((runtime, id)) = container_id(part)
        {
            let parent = at.checked_sub(1).and_then(|at| parts.get(at)).copied().unwrap_or_default();
            container.runtime = runtime.or_else(|| runtime_named(parent)).map(str::to_owned);
            container.container_id = Some(id.to_owned());
        }
        if pod_uid(part).is_some() {
            break;
        }
    }
    container.pod_uid = parts.iter().find_map(|part| pod_uid(part));
    container
}

/// `<id>`, `<runtime>-<id>` or `<runtime>-<id>.scope`, the id being 64 hexadecimal digits. A
/// monitor's own group (`crio-conmon-<id>`) is not the container's.
fn container_id(part: &str) -> Option<(Option<&'static str>, &str)> {
    let name = part.strip_suffix(".scope").unwrap_or(part);
    let (runtime, id) = match name.rsplit_once('-') {
        Some((prefix, id)) => (Some(runtime_named(prefix)?), id),
        None => (None, name),
    };
    is_hex(id, 64).then_some((runtime, id))
}

fn runtime_named(name: &str) -> Option<&'static str> {
    RUNTIMES.iter().find(|(prefix, _)| *prefix == name).map(|(_, runtime)| *runtime)
}

/// `pod<uid>`, or `kubepods-burstable-pod<uid>.slice` where systemd wants `_` for `-`. The uid of a
/// static pod is the hash of its manifest.
fn pod_uid(part: &str) -> Option<String> {
    let uid = match part.strip_suffix(".slice") {
        Some(slice) => slice.rsplit_once("-pod")?.1.replace('_', "-"),
        None => part.strip_prefix("pod")?.to_owned(),
    };
    let groups: Vec<&str> = uid.split('-').collect();
    let uuid = groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12]);
    let hex = groups.iter().all(|group| is_hex(group, group.len()));
    (hex && (uuid || is_hex(&uid, 32))).then_some(uid)
}

/// Whether a cgroup is `allowed` or lies below it. Seen from a cgroup namespace of the daemon's own,
/// paths outside begin with `/..`, once for each level up to where both meet: `/../../..` then
/// allows what lies below the daemon's own ancestor three levels up, as `/kubepods.slice`.
#[must_use]
pub fn is_within(path: &str, allowed: &str) -> bool {
    let ((up, path), (allowed_up, allowed)) = (levels_up(path), levels_up(allowed));
    match up.cmp(&allowed_up) {
        std::cmp::Ordering::Less => allowed.is_empty(),
        std::cmp::Ordering::Equal => {
            path.strip_prefix(allowed).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        }
        std::cmp::Ordering::Greater => false,
    }
}

/// How many levels a path goes up from this process's cgroup namespace, and what follows.
fn levels_up(mut path: &str) -> (usize, &str) {
    let mut up = 0;
    while let Some(rest) = path.strip_prefix("/..").filter(|rest| rest.is_empty() || rest.starts_with('/')) {
        (up, path) = (up + 1, rest);
    }
    (up, path.trim_end_matches('/'))
}

/// A cgroup of the configuration that holds every process of the host, or may hold it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TooWide {
    /// As configured.
    pub allowed: String,
    /// How many levels the daemon's cgroup namespace lies below the host's root, if that is known.
    pub depth: Option<usize>,
}

impl TooWide {
    /// What to write instead.
    #[must_use]
    pub fn fix(&self) -> String {
        match self.depth {
            None => "run lastgasp in the host's PID namespace (hostPID), or set declare.uids alone".to_owned(),
            Some(0 | 1) => "name a cgroup, as /kubepods.slice".to_owned(),
            Some(depth) => format!("write {} for the daemon's own ancestor below the root", "/..".repeat(depth - 1)),
        }
    }
}

impl fmt::Display for TooWide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { allowed, depth } = self;
        let allowed = if allowed.is_empty() { "/" } else { allowed };
        match depth {
            Some(_) => {
                write!(f, "declare.cgroups: {allowed} is the root of the host's cgroups, seen from lastgasp's own")?
            }
            None => write!(
                f,
                "declare.cgroups: {allowed} may be the root of the host's cgroups, which cannot be seen here"
            )?,
        }
        f.write_str("; it would let every process of this node declare a worker, and counts for none")
    }
}

/// How many levels the root of this process's cgroup namespace lies below the host's. A pod's own depth
/// depends on its quality-of-service class: three below `/kubepods.slice` if that is Burstable, two if it is
/// Guaranteed. None where the host's kernel threads are not to be seen: their paths go up to the root.
#[must_use]
pub fn own_depth() -> Option<usize> {
    let path = container(super::kthreadd()?).ok()?.cgroup_path;
    Some(levels_up(&path).0)
}

/// Splits the configured cgroups into those that count and those that are [`TooWide`] for a namespace so
/// many levels below the host's root.
#[must_use]
pub fn narrow(allowed: &[String], depth: Option<usize>) -> (Vec<String>, Vec<TooWide>) {
    let (wide, narrow): (Vec<_>, Vec<_>) = allowed.iter().cloned().partition(|allowed| {
        let (up, rest) = levels_up(allowed);
        match depth {
            Some(depth) => up > depth || (up == depth && rest.is_empty()),
            None => up > 0,
        }
    });
    (narrow, wide.into_iter().map(|allowed| TooWide { allowed, depth }).collect())
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "3e5c0f6c1d2b4a59886770011223344556677889900aabbccddeeff001122334";
    const UID: &str = "8f3a2c51-7f0e-4c3b-9d34-0a1b2c3d4e5f";
    const UID_: &str = "8f3a2c51_7f0e_4c3b_9d34_0a1b2c3d4e5f";

    #[track_caller]
    fn is(text: &str, pod: Option<&str>, id: Option<&str>, runtime: Option<&str>) {
        let Container { pod_uid, container_id, runtime: seen, .. } = parse(text).unwrap();
        assert_eq!((pod_uid.as_deref(), container_id.as_deref(), seen.as_deref()), (pod, id, runtime), "{text}");
    }

    #[test]
    fn a_pod_of_containerd_with_the_systemd_driver() {
        let slices = format!("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice");
        let line = format!("0::{slices}/cri-containerd-{ID}.scope\n");
        is(&line, Some(UID), Some(ID), Some("containerd"));
        // Guaranteed pods have no class of their own, and a container may make groups within its own.
        let line = format!("0::/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{ID}.scope/init\n");
        is(&line, Some(UID), Some(ID), Some("containerd"));
    }

    #[test]
    fn a_pod_of_containerd_with_the_cgroupfs_driver() {
        is(&format!("0::/kubepods/besteffort/pod{UID}/{ID}\n"), Some(UID), Some(ID), None);
        let line =
            format!("0::/system.slice/containerd.service/kubepods-burstable-pod{UID_}.slice:cri-containerd:{ID}\n");
        is(&line, Some(UID), Some(ID), Some("containerd"));
    }

    #[test]
    fn a_pod_of_cri_o_but_not_its_monitor() {
        let slices = format!("/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UID_}.slice");
        is(&format!("0::{slices}/crio-{ID}.scope\n"), Some(UID), Some(ID), Some("cri-o"));
        is(&format!("0::{slices}/crio-{ID}.scope/container\n"), Some(UID), Some(ID), Some("cri-o"));
        is(&format!("0::{slices}/crio-conmon-{ID}.scope\n"), Some(UID), None, None);
    }

    #[test]
    fn docker_and_podman_without_a_pod() {
        is(&format!("0::/system.slice/docker-{ID}.scope\n"), None, Some(ID), Some("docker"));
        is(&format!("0::/docker/{ID}\n"), None, Some(ID), Some("docker"));
        is(&format!("0::/machine.slice/libpod-{ID}.scope/container\n"), None, Some(ID), Some("podman"));
        is(&format!("0::/user.slice/libpod-conmon-{ID}.scope\n"), None, None, None);
    }

    #[test]
    fn on_v1_the_controllers_tell_and_the_unified_hierarchy_does_not() {
        let text = format!(
            "12:pids:/kubepods/burstable/pod{UID}/{ID}\n\
             5:cpu,cpuacct:/kubepods/burstable/pod{UID}/{ID}\n\
             4:memory:/kubepods/burstable/pod{UID}/{ID}\n\
             1:name=systemd:/kubepods/burstable/pod{UID}/{ID}\n\
             0::/system.slice/containerd.service\n"
        );
        is(&text, Some(UID), Some(ID), None);
        let docker = format!("11:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/\n");
        is(&docker, None, Some(ID), Some("docker"));
    }

    #[test]
    fn of_nested_containers_the_innermost_is_meant() {
        let outer = ID.replace('3', "4");
        let line = format!(
            "0::/system.slice/docker-{outer}.scope/kubelet.slice/kubelet-kubepods.slice/\
             kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{UID_}.slice/cri-containerd-{ID}.scope\n"
        );
        is(&line, Some(UID), Some(ID), Some("containerd"));
        let line = format!("0::/docker/{outer}/kubelet/kubepods/pod{UID}/{ID}/docker/{outer}\n");
        is(&line, Some(UID), Some(&outer), Some("docker"));
    }

    #[test]
    fn of_pods_within_a_pod_the_outermost_counts_which_kubelet_has_named() {
        let claimed = UID.replace('8', "9");
        let line = format!("0::/kubepods/burstable/pod{UID}/{ID}/kubepods/pod{claimed}/x\n");
        assert_eq!(parse(&line).unwrap().pod_uid.as_deref(), Some(UID));
    }

    #[test]
    fn a_static_pod_and_a_view_from_a_namespace() {
        let hash = "0123456789abcdef0123456789abcdef";
        is(&format!("0::/kubepods/pod{hash}/{ID}\n"), Some(hash), Some(ID), None);
        let line = format!("0::/../../kubepods-burstable-pod{UID_}.slice/cri-containerd-{ID}.scope\n");
        is(&line, Some(UID), Some(ID), Some("containerd"));
    }

    #[test]
    fn what_is_no_container_has_its_path_alone() {
        for path in ["/", "/system.slice/vllm.service", "/user.slice/user-1000.slice/session-3.scope", "/pod/podcast"] {
            is(&format!("0::{path}\n"), None, None, None);
            assert_eq!(parse(&format!("0::{path}\n")).unwrap().cgroup_path, path);
        }
        assert_eq!(parse("0::/a/b (deleted)\n").unwrap().cgroup_path, "/a/b");
    }

    #[test]
    fn nonsense_is_refused_and_what_is_shown_is_printable() {
        for text in ["", "\n", "0:/x", "0::x", "7:cpuset:/only\n", &format!("0::/{}\n", "x".repeat(MAX_PATH))] {
            assert!(parse(text).is_none(), "{text}");
        }
        assert_eq!(parse("0::/\u{1b}[31m\n").unwrap().cgroup_path, "/\u{fffd}[31m");
    }

    #[test]
    fn a_cgroup_lies_below_its_ancestors_and_nobody_elses() {
        for (path, allowed) in [
            ("/kubepods.slice", "/kubepods.slice"),
            ("/kubepods.slice/a.scope", "/kubepods.slice"),
            ("/system.slice/vllm.service", ""),
            ("/../../a-pod.slice/b.scope", "/../.."),
            ("/../a.scope", "/../.."),
            ("/../../a-pod.slice/b.scope", "/../../a-pod.slice"),
            ("/../..a", "/.."),
        ] {
            assert!(is_within(path, allowed), "{path} below {allowed}");
        }
        for (path, allowed) in [
            ("/kubepods.slice-evil/a", "/kubepods.slice"),
            ("/user.slice/kubepods.slice/a", "/kubepods.slice"),
            ("/../../../user.slice/a", "/../.."),
            ("/../../a", ""),
        ] {
            assert!(!is_within(path, allowed), "{path} not below {allowed}");
        }
    }

    #[test]
    fn the_root_of_the_host_is_nobodys_cgroup() {
        let split = |allowed: &[&str], depth| {
            let allowed: Vec<String> = allowed.iter().map(|&path| path.to_owned()).collect();
            let (narrow, wide) = narrow(&allowed, depth);
            (narrow, wide.into_iter().map(|wide| wide.allowed).collect::<Vec<_>>())
        };
        let shipped = ["/kubepods.slice", "/../../.."];
        let split_of = |narrow: &[&str], wide: &[&str]| {
            let owned = |paths: &[&str]| paths.iter().map(|&path| path.to_owned()).collect::<Vec<_>>();
            (owned(narrow), owned(wide))
        };
        assert_eq!(split(&shipped, Some(4)), split_of(&shipped, &[]), "a Burstable pod");
        assert_eq!(split(&shipped, Some(3)), split_of(&shipped[..1], &shipped[1..]), "a Guaranteed one");
        assert_eq!(split(&shipped, Some(2)), split_of(&shipped[..1], &shipped[1..]), "or higher still");
        assert_eq!(split(&["/../../../x"], Some(3)), split_of(&["/../../../x"], &[]), "one cgroup below the root");
        assert_eq!(split(&["", "/a"], Some(0)), split_of(&["/a"], &[""]), "on the host itself");
        assert_eq!(split(&["", "/.."], None), split_of(&[""], &["/.."]), "where the depth is not known");
        let wide = TooWide { allowed: "/../../..".to_owned(), depth: Some(3) };
        assert!(wide.to_string().contains("/../../.. is the root") && wide.fix().contains("write /../.. for"));
    }

    #[test]
    fn this_process_has_a_cgroup_and_namespaces() {
        let mine = container(std::process::id()).unwrap();
        assert!(mine.cgroup_path.starts_with('/'));
        assert_eq!(mine.network_namespace, super::super::netns_inum(std::process::id()).ok());
        assert!(mine.pid_namespace.is_some());
        assert_eq!(container(u32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
