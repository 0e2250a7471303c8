//! Which capability is needed for what: measured, by doing everything as another user with every
//! set of at most two capabilities. `docs/privileges.md` has to say the same.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Stdio};

use lastgasp::config::Find;
use lastgasp::sensors::ebpf::{KernelPrograms, LoadOptions};
use lastgasp::sensors::pidfd::PidFd;
use lastgasp::sensors::proc::{self, find_root, listeners, tree};
use lastgasp_tests::user::User;
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::kill;
use nix::unistd::Pid;

/// Everything that lastgasp might want a capability for.
const CAPABILITIES: [&str; 8] =
    ["bpf", "perfmon", "sys_ptrace", "dac_read_search", "kill", "syslog", "net_admin", "sys_admin"];

const WORKER: &str = "measured-0";

/// An engine of somebody else, as those see it who try what they may do with it.
struct Target {
    tgid: u32,
    port: u16,
    pid_file: PathBuf,
}

/// Something that may or may not be permitted, in the words of the table.
type Trial = (&'static str, fn(&Target) -> bool);

const TRIED: [Trial; 11] = [
    ("hold its pidfd and see it die", |target| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async { proc::identify(target.tgid).is_some_and(|id| PidFd::open(id).is_ok()) })
    }),
    ("read its name, its command line and its children", |target| {
        tree::describe(target.tgid).is_some_and(|info| !info.cmdline.is_empty())
            && std::fs::read(format!("/proc/{0}/task/{0}/children", target.tgid)).is_ok()
    }),
    ("see whether anybody listens on its port", |target| {
        listeners::listening(Some(target.tgid), target.port).unwrap_or(false)
    }),
    ("load and attach the kernel programs", |_| {
        KernelPrograms::load(&LoadOptions::default())
            .is_ok_and(|(probes, _)| probes.states().iter().all(|(_, state)| state.is_on()))
    }),
    ("tell its network namespace, to watch its listener", |target| proc::netns_inum(target.tgid).is_ok()),
    ("find it by `LASTGASP_WORKER` in its environment", |target| found(target, Find::Env(WORKER.to_owned()))),
    ("find it by its port, and tell whose listener that is", |target| found(target, Find::Port(target.port))),
    ("find it by a pid file that only its user may read", |target| {
        found(target, Find::PidFile(target.pid_file.clone()))
    }),
    ("end it or its orphans", |target| kill(Pid::from_raw(target.tgid.cast_signed()), None).is_ok()),
    ("enter its network namespace", |target| {
        let namespace = std::fs::File::open(format!("/proc/{}/ns/net", target.tgid));
        namespace.is_ok_and(|namespace| setns(namespace, CloneFlags::CLONE_NEWNET).is_ok())
    }),
    ("read GPU faults from `/dev/kmsg`", |_| {
        let log = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg");
        // A record that is overwritten meanwhile is EPIPE; too small a buffer EINVAL: it was read.
        log.is_ok_and(|mut log| log.read(&mut [0; 8192]).is_ok())
    }),
];

fn found(target: &Target, find: Find) -> bool {
    find_root(&find).is_ok_and(|found| found.is_some_and(|root| root.tgid == target.tgid))
}

/// Not a story: what another user does, whom the story runs this as.
#[test]
#[ignore = "run by the measurement, as nobody"]
fn tried_by_nobody() {
    let given = |name: &str| std::env::var(name).expect("the story sets it");
    let target = Target {
        tgid: given("TARGET_TGID").parse().expect("a number"),
        port: given("TARGET_PORT").parse().expect("a number"),
        pid_file: given("TARGET_PID_FILE").into(),
    };
    // In a new thread each, since one of them moves into another namespace.
    for (what, try_it) in TRIED {
        let works = std::thread::scope(|scope| scope.spawn(|| try_it(&target)).join()).unwrap_or(false);
        println!("\ntried {works} {what}");
    }
}

async fn tried(capabilities: &BTreeSet<&str>, target: &Target) -> BTreeMap<String, bool> {
    let user = User::nobody(&capabilities.iter().copied().collect::<Vec<_>>());
    let mut command = user.command(&std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "measured::tried_by_nobody", "--nocapture"]);
    command.env("TARGET_TGID", target.tgid.to_string()).env("TARGET_PORT", target.port.to_string());
    let output = command.env("TARGET_PID_FILE", &target.pid_file).output().await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let tried = said.lines().filter_map(|line| {
        let (works, what) = line.strip_prefix("tried ")?.split_once(' ')?;
        Some((what.to_owned(), works == "true"))
    });
    let tried: BTreeMap<String, bool> = tried.collect();
    assert_eq!(tried.len(), TRIED.len(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    tried
}

/// The smallest sets with which it works, smallest first.
fn smallest<'a>(what: &str, results: &[(BTreeSet<&'a str>, BTreeMap<String, bool>)]) -> Vec<BTreeSet<&'a str>> {
    let mut smallest: Vec<BTreeSet<&str>> = Vec::new();
    for (set, tried) in results {
        if tried[what] && !smallest.iter().any(|smaller| smaller.is_subset(set)) {
            smallest.push(set.clone());
        }
    }
    smallest
}

fn in_words(sets: &[BTreeSet<&str>]) -> String {
    let words = |set: &BTreeSet<&str>| match set.len() {
        0 => "nothing".to_owned(),
        // In the order of `CAPABILITIES`.
        _ => CAPABILITIES
            .iter()
            .filter(|name| set.contains(*name))
            .map(|name| format!("`CAP_{}`", name.to_uppercase()))
            .collect::<Vec<_>>()
            .join(" and "),
    };
    match sets {
        [] => "none of these".to_owned(),
        sets => sets.iter().map(words).collect::<Vec<_>>().join("; or "),
    }
}

struct Victim(Child);

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Somebody else's engine: neither root's nor nobody's.
fn engine(folder: &std::path::Path) -> (Victim, Target) {
    let user = User { uid: 1, capabilities: Vec::new() };
    let mut command = user.command(env!("CARGO_BIN_EXE_victim").as_ref()).into_std();
    command.arg("listen").env("LASTGASP_WORKER", WORKER).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut victim = Victim(command.spawn().expect("setpriv, of util-linux, is there"));
    let mut line = String::new();
    BufReader::new(victim.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let port = line.trim().strip_prefix("ready ").unwrap_or_else(|| panic!("{line:?}")).parse().unwrap();
    let tgid = victim.0.id();
    let pid_file = folder.join("pid");
    std::fs::write(&pid_file, tgid.to_string()).unwrap();
    std::fs::set_permissions(&pid_file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    std::os::unix::fs::chown(&pid_file, Some(1), Some(1)).unwrap();
    std::fs::set_permissions(folder, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    (victim, Target { tgid, port, pid_file })
}

#[tokio::test]
async fn the_documented_table_is_what_was_measured() {
    let sysctl = |name: &str| std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
    // Without these restrictions less is needed, and the table is about those who have them.
    for name in ["unprivileged_bpf_disabled", "dmesg_restrict"] {
        if matches!(sysctl(name).trim(), "0" | "") {
            lastgasp_tests::skip!("kernel.{name} is not set");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let (_victim, target) = engine(folder.path());
    let mut sets: Vec<BTreeSet<&str>> = vec![BTreeSet::new()];
    sets.extend(CAPABILITIES.map(|one| BTreeSet::from([one])));
    for (i, one) in CAPABILITIES.iter().enumerate() {
        sets.extend(CAPABILITIES[i + 1..].iter().map(|other| BTreeSet::from([*one, *other])));
    }
    let mut results = Vec::new();
    for set in sets {
        let tried = tried(&set, &target).await;
        results.push((set, tried));
    }
    let mut table = String::from("| to | it takes |\n|---|---|\n");
    for (what, _) in TRIED {
        table.push_str(&format!("| {what} | {} |\n", in_words(&smallest(what, &results))));
    }
    compare(&table);
}

/// With LASTGASP_BLESS=1 in the environment the document is written instead.
fn compare(measured: &str) {
    const BEGIN: &str = "<!-- measured: begin -->\n";
    const END: &str = "<!-- measured: end -->";
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/privileges.md");
    let text = std::fs::read_to_string(&path).expect("docs/privileges.md");
    let (before, rest) = text.split_once(BEGIN).expect("the table's beginning");
    let (documented, after) = rest.split_once(END).expect("the table's end");
    if std::env::var_os("LASTGASP_BLESS").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{measured}{END}{after}")).unwrap();
        return;
    }
    // Before "mm,procfs: allow read-only remote mm access under CAP_PERFMON" (2025) there is one way only.
    let older = documented
        .replace("`CAP_PERFMON` and `CAP_DAC_READ_SEARCH`; or ", "")
        .replace("; or `CAP_DAC_READ_SEARCH` and `CAP_SYS_ADMIN`", "");
    if measured == older {
        return;
    }
    assert_eq!(
        documented, measured,
        "run this test with LASTGASP_BLESS=1 if this kernel is right and the document is not"
    );
}
