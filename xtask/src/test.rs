//! `cargo xtask test`: every test there is, against real parts, with a summary at the end.
//!
//! What a test needs and a machine may lack (nats-server, the eBPF toolchain) is installed first.
//! A step or a test that cannot run here fails, or is listed as skipped with its reason; it never counts
//! as passed.

mod tally;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use crate::{build_ebpf, chromium, containers, debian, nats_server, systems, tools};
use tally::{Counts, Skip, Tally};
pub(crate) use tally::{SKIPPED, TIMED};

/// All tests, unprivileged and privileged.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask test                       everything, within 35 minutes on two cores
  cargo xtask test --filter engine_core  only tests whose name contains this
  cargo xtask test --long                more property-test cases, kernels, kills, faults and restarts,
                                         and the demo as it is released
  cargo xtask test --peers               also beside LiteLLM, Dynamo and vLLM, from PyPI (6 GB)

With LASTGASP_INFERA_SRC=FOLDER also beside Infera, from a checkout of it there (20 minutes).
Kernel tests and stories need root, the Python clients need venv. A step without what it needs is
skipped. So is a test that finds out that this machine lacks what it needs. Both are listed with the
reason. The image's test installs buildah, podman and crun by apt-get.

The ten slowest tests stand at the end, and the last line is `N passed, N failed, N skipped`. A step
that is skipped, or that has no tests of its own, counts as one.
Exit status: 0 nothing failed and every step ran, 1 something failed, 3 nothing failed and a step was
skipped.")]
pub(crate) struct Arguments {
    /// Only tests whose name contains this; the object and the demo are then left out.
    #[arg(long, value_name = "NAME")]
    filter: Option<String>,
    /// Run for hours rather than minutes.
    #[arg(long)]
    long: bool,
    /// Also run against large third-party systems, which are installed into target/ first.
    #[arg(long)]
    peers: bool,
}

/// Tells tests that they may take long.
pub(crate) const LONG: &str = "LASTGASP_LONG";

/// Why a step is left out that was not asked for.
const FILTERED: &str = "a filter was given";

/// So many of the slowest tests are listed.
const SLOWEST: usize = 10;

/// What became of a step.
enum TestResult {
    Passed,
    Failed,
    Skipped(&'static str),
}

struct Step {
    name: &'static str,
    verdict: TestResult,
    tally: Tally,
    took: Duration,
}

impl Step {
    /// One that ran no test.
    fn without_tests(name: &'static str, verdict: TestResult) -> Self {
        Self { name, verdict, tally: Tally::default(), took: Duration::ZERO }
    }

    fn counts(&self) -> Counts {
        match self.verdict {
            TestResult::Passed => self.tally.counts(true),
            TestResult::Failed => self.tally.counts(false),
            // Nobody asked for it.
            TestResult::Skipped(FILTERED) => Counts::default(),
            TestResult::Skipped(_) => Counts { skipped: 1, ..Counts::default() },
        }
    }
}

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    let mut steps = Vec::new();
    if let Err(error) = run(arguments, &mut steps) {
        eprintln!("cargo xtask test: {error}");
        steps.push(Step::without_tests("what the steps need", TestResult::Failed));
    }
    println!("\n{}", summary(&steps));
    status(&steps)
}

fn run(arguments: &Arguments, steps: &mut Vec<Step>) -> Result<(), Box<dyn std::error::Error>> {
    let nats = nats_server::ensure(&tools::target())?;
    let root = tools::is_root();
    let needs_root = (!root).then_some("needs root");
    let whole = arguments.filter.is_none();
    let filtered = (!whole).then_some(FILTERED);
    let cases = if arguments.long { "20000" } else { "256" };
    // For each target of `lastgasp-fuzz`.
    let fuzz_seconds = if arguments.long { "600" } else { "1" };

    let mut object = xtask();
    object.args(["build-ebpf", "--check"]);
    if root {
        // A machine of its own, as in CI: what is missing may be installed.
        object.arg("--install");
    }
    let unbuilt = (!root && !build_ebpf::toolchain_is_there()).then_some("no eBPF toolchain; as root it is installed");
    steps.push(step("eBPF object agrees with its source", &mut object, filtered.or(unbuilt)));

    steps.push(step("dependencies are allowed", xtask().arg("dependencies"), filtered));

    let fresh = whole.then(fresh_object).flatten();
    let mut bins = cargo("build");
    bins.args(["--bins", "-p", "lastgasp", "-p", "lastgasp-router", "-p", "lastgasp-tests"]);
    steps.push(step("build", &mut bins, None));
    if matches!(steps.last(), Some(Step { verdict: TestResult::Failed, .. })) {
        return Ok(());
    }

    let mut test = |name, skip: Option<&'static str>, command: &mut Command| {
        command.env(nats_server::ENVIRONMENT, &nats).env("PROPTEST_CASES", cases);
        command.env("LASTGASP_FUZZ_SECONDS", fuzz_seconds);
        if arguments.long {
            command.env(LONG, "1");
        }
        if let Some(object) = &fresh {
            command.env("LASTGASP_EBPF_OBJECT", object);
        }
        if let Some(filter) = &arguments.filter {
            command.arg("--").arg(filter);
        }
        steps.push(step(name, command, skip));
    };
    test("unit and property tests", None, timed_test().args(["--no-fail-fast"]));
    test("shared event types", None, timed_test().args(["-p", "lastgasp-ebpf", "--lib"]));
    test("mock engine", None, timed_test().args(["-p", "lastgasp-tests", "--lib", "--bins", "--test", "mock"]));
    test("kernel", needs_root, timed_test().args(["-p", "lastgasp-tests", "--test", "kernel"]));
    test("privilege", needs_root, timed_test().args(["-p", "lastgasp-tests", "--test", "privilege"]));
    let mut stories = timed_test();
    stories.args(["-p", "lastgasp-tests", "--test", "stories"]);
    // Most of the time they wait.
    let threads = std::thread::available_parallelism().map_or(2, usize::from) * 2;
    stories.env("RUST_TEST_THREADS", threads.to_string());
    if root {
        // One story is about a server that is too old; without it that story fails, and says why.
        match nats_server::ensure_old(&tools::target()) {
            Ok(old) => _ = stories.env(nats_server::OLD_ENVIRONMENT, old),
            Err(error) => eprintln!("no nats-server 2.10: {error}"),
        }
    }
    test("stories", needs_root, &mut stories);

    test("benches, a little of each", needs_root, timed_test().args(["-p", "lastgasp-bench"]));

    // What is in deploy/. The packages are installed into target/, by pip; the image's tools by apt-get.
    let no_venv = Command::new("python3").args(["-c", "import ensurepip, venv"]).output();
    let no_venv = (!no_venv.is_ok_and(|output| output.status.success())).then_some("no python3-venv");
    let deploy = |only: &[&str]| {
        let mut command = timed_test();
        command.args(["-p", "lastgasp-tests", "--test", "deploy", "--", "--ignored"]).args(only);
        command.env(nats_server::ENVIRONMENT, &nats);
        command
    };
    let no_systemd = tools::on_path("systemd-analyze").is_none().then_some("no systemd-analyze");
    steps.push(step(
        "manifests and chart",
        &mut deploy(&["manifests", "examples", "dockerfile"]),
        filtered.or(no_venv),
    ));
    steps.push(step("systemd unit", &mut deploy(&["unit"]), filtered.or(no_systemd)));
    let no_image = filtered.or(needs_root).or(no_venv).or_else(containers::install);
    steps.push(step("image, in a container", &mut deploy(&["image"]), no_image));

    let mut page = timed_test();
    page.args(["-p", "lastgasp-tests", "--test", "page"]).env(nats_server::ENVIRONMENT, &nats);
    let no_browser =
        filtered.or(needs_root).or_else(|| (!chromium::ensure()).then_some("no chromium, and it cannot be installed"));
    steps.push(step("status page, in Chromium", &mut page, no_browser));

    let mut infera = timed_test();
    infera.args(["-p", "lastgasp-tests", "--test", "infera", "--", "--include-ignored"]);
    infera.env(nats_server::ENVIRONMENT, &nats);
    let etcd = filtered.or(needs_root).is_none().then(|| debian::ETCD.ensure());
    if let Some(Err(error)) = &etcd {
        eprintln!("{error}");
    }
    let etcd = etcd.and_then(Result::ok);
    let no_etcd = filtered.or(needs_root).or_else(|| etcd.is_none().then_some("no etcd: apt-get install etcd-server"));
    infera.envs(etcd.as_ref().map(|path| (debian::ETCD.variable, path)));
    steps.push(step("Infera's router and discovery", &mut infera, no_etcd));
    let mut dynamo = timed_test();
    dynamo.args(["-p", "lastgasp-tests", "--test", "dynamo", "--", "--include-ignored"]);
    dynamo.envs(etcd.as_ref().map(|path| (debian::ETCD.variable, path)));
    steps.push(step("Dynamo's discovery", &mut dynamo, no_etcd));

    // The packages are installed into target/, by pip.
    let mut clients = timed_test();
    // Without `-p`: of the router alone cargo would choose other features, and build anew what it is made of.
    clients.args(["--test", "clients", "--", "--ignored"]);
    steps.push(step("real Python clients", &mut clients, filtered.or(no_venv)));

    // A router in Python, from docs/writing-a-router.md; its package comes by pip too.
    let mut example = timed_test();
    example.args(["-p", "lastgasp-tests", "--test", "example_router", "--", "--ignored"]);
    example.env(nats_server::ENVIRONMENT, &nats);
    steps.push(step("example router in Python", &mut example, filtered.or(no_venv)));

    let mut rules = timed_test();
    rules.args(["-p", "xtask", "--", "--ignored", "promtool"]);
    let mut dashboards = timed_test();
    dashboards.args(["-p", "lastgasp-tests", "--test", "dashboards", "--", "--ignored"]);
    dashboards.env(nats_server::ENVIRONMENT, &nats);
    let no_promtool = filtered.or_else(|| match debian::PROMTOOL.ensure() {
        Ok(path) => {
            rules.env(debian::PROMTOOL.variable, &path);
            dashboards.env(debian::PROMTOOL.variable, &path);
            None
        }
        Err(error) => {
            eprintln!("{error}");
            Some("no promtool: apt-get install prometheus")
        }
    });
    steps.push(step("alert rules, by promtool", &mut rules, no_promtool));
    steps.push(step("dashboards, by Prometheus", &mut dashboards, no_promtool));

    // Infera's own parts need a checkout, which cannot be installed; where there is none, their tests say so.
    let (name, absent) = if arguments.peers {
        ("systems that people run", needs_root.or(no_etcd))
    } else {
        ("Infera itself, from a checkout", no_etcd)
    };
    let mut peers = if absent.is_none() { systems::peers(&["--config", TIMED])? } else { timed_test() };
    peers.args((!arguments.peers).then_some("infera::"));
    steps.push(step(name, &mut peers, absent));

    let mut kernels = xtask();
    kernels.arg("test-kernels");
    if !arguments.long {
        // The oldest one: its tracepoints differ most from this machine's. It does not sleep.
        kernels.args(["--kernel", "6.1", "--boot", "kernel", "--boot", "machine", "--boot", "lockdown"]);
    }
    steps.push(step("kernel, on Debian's kernels in QEMU", &mut kernels, needs_root.or(filtered)));

    // `cargo xtask demo` builds everything once more, in release mode, which takes minutes.
    let mut demo = if arguments.long { xtask() } else { Command::new(tools::target().join("debug").join("demo")) };
    if arguments.long {
        demo.args(["demo", "--kills", "200"]);
    }
    let result: PathBuf = tools::target().join("demo.json");
    demo.arg("--json").arg(&result).env(nats_server::ENVIRONMENT, &nats);
    steps.push(step("demo", &mut demo, filtered));
    Ok(())
}

/// The object that `build-ebpf --check` has built, if its bytes are others than the committed
/// ones, as another toolchain makes them: the tests must pass with it too.
fn fresh_object() -> Option<PathBuf> {
    const OBJECT: &str = "lastgasp-probes.bpf.o";
    let fresh = tools::target().join("ebpf").join(OBJECT);
    let built = std::fs::read(&fresh).ok()?;
    let committed = std::fs::read(tools::workspace().join("ebpf/prebuilt").join(OBJECT)).ok()?;
    (built != committed).then_some(fresh)
}

fn cargo(subcommand: &str) -> Command {
    let mut command = tools::cargo();
    command.arg(subcommand);
    command
}

fn xtask() -> Command {
    let mut command = cargo("run");
    command.args(["--quiet", "--package", "xtask", "--"]);
    command
}

/// `cargo test`, which says how long each test took.
fn timed_test() -> Command {
    let mut command = cargo("test");
    command.args(["--config", TIMED]);
    command
}

/// Runs a step, shows what it prints, and counts the tests in it.
fn step(name: &'static str, command: &mut Command, skip: Option<&'static str>) -> Step {
    if let Some(reason) = skip {
        eprintln!("==> {name}: SKIPPED, {reason}");
        return Step::without_tests(name, TestResult::Skipped(reason));
    }
    // As one would type it: without what only this summary needs.
    eprintln!("==> {name}\n    {}", tools::shown(command).replace(&format!(" --config {}", tools::quoted(TIMED)), ""));
    let begin = Instant::now();
    let mut tally = Tally::default();
    let verdict = match counted(command, &mut tally) {
        Ok(true) => TestResult::Passed,
        Ok(false) => TestResult::Failed,
        Err(error) => {
            eprintln!("    {error}");
            TestResult::Failed
        }
    };
    Step { name, verdict, tally, took: begin.elapsed() }
}

/// Whether the command ended well, and what became of the tests that it ran.
fn counted(command: &mut Command, tally: &mut Tally) -> std::io::Result<bool> {
    let skips = tempfile::NamedTempFile::new()?;
    let mut child = command.env(SKIPPED, skips.path()).stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let output = child.stdout.take().map(BufReader::new);
    for line in output.into_iter().flat_map(|output| output.split(b'\n')) {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        tally.read(&line);
        println!("{line}");
    }
    let status = child.wait()?;
    tally.read_skips(&std::fs::read_to_string(skips.path())?);
    Ok(status.success())
}

/// A table of the steps, what was skipped and what failed by name, the slowest tests, and all sums in the last line.
fn summary(steps: &[Step]) -> String {
    let mut lines = Vec::new();
    lines.push(format!(
        "{:<38} {:<8} {:>7} {:>7} {:>7} {:>9}",
        "step", "verdict", "passed", "failed", "skipped", "took"
    ));
    let mut all = Counts::default();
    for step in steps {
        let (word, why) = match step.verdict {
            TestResult::Passed => ("passed", ""),
            TestResult::Failed => ("FAILED", ""),
            TestResult::Skipped(FILTERED) => ("left out", FILTERED),
            TestResult::Skipped(why) => ("SKIPPED", why),
        };
        let Counts { passed, failed, skipped } = step.counts();
        all.passed += passed;
        all.failed += failed;
        all.skipped += skipped;
        let took = format!("{:.1} s", step.took.as_secs_f64());
        let line = format!("{:<38} {word:<8} {passed:>7} {failed:>7} {skipped:>7} {took:>9}  {why}", step.name);
        lines.push(line.trim_end().to_owned());
    }
    lines.push(String::new());
    for Step { name, tally, .. } in steps {
        lines.extend(tally.skips.iter().map(|Skip { test, reason }| format!("skipped: {name}: {test}: {reason}")));
        lines.extend(tally.failures.iter().map(|test| format!("FAILED: {name}: {test}")));
    }
    let timed = steps.iter().flat_map(|step| step.tally.times.iter().map(|(time, test)| (time, step.name, test)));
    let mut timed: Vec<_> = timed.collect();
    timed.sort_by(|one, other| other.cmp(one));
    timed.truncate(SLOWEST);
    if !timed.is_empty() {
        lines.push("\nThe slowest tests:".to_owned());
    }
    lines.extend(timed.iter().map(|(time, name, test)| format!("{:>9.1} s  {name}: {test}", time.as_secs_f64())));
    lines.push(format!("\n{} passed, {} failed, {} skipped", all.passed, all.failed, all.skipped));
    lines.join("\n")
}

fn status(steps: &[Step]) -> ExitCode {
    let any = |is: fn(&TestResult) -> bool| steps.iter().any(|step| is(&step.verdict));
    match (
        any(|verdict| matches!(verdict, TestResult::Failed)),
        any(|verdict| matches!(verdict, TestResult::Skipped(why) if *why != FILTERED)),
    ) {
        (true, _) => ExitCode::FAILURE,
        (false, true) => ExitCode::from(3),
        (false, false) => ExitCode::SUCCESS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `cargo test` does, as far as it is read here.
    fn tests_of(name: &'static str, script: &str) -> Step {
        step(name, Command::new("sh").args(["-c", script]), None)
    }

    #[test]
    fn a_run_is_summed_up_to_its_last_line() {
        let mut steps = vec![
            tests_of("build", "echo built"),
            tests_of(
                "kernel",
                "printf 'oom::a\\tno memory cgroup\\n' >> $LASTGASP_SKIPPED; printf '\\377\\n'; \
                 echo 'test oom::a ... ok <0.010s>'; echo 'test exit::b ... ok <2.500s>'; \
                 echo 'test result: ok. 2 passed; 0 failed; 3 ignored; 0 measured; 0 filtered out'",
            ),
            // It has a file of its own: nobody skipped anything here.
            tests_of("mock", "echo 'test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out'"),
            step("page", &mut Command::new("false"), Some("no chromium")),
            step("demo", &mut Command::new("false"), Some(FILTERED)),
        ];
        let summary = summary(&steps);
        assert!(summary.contains("skipped: kernel: oom::a: no memory cgroup\n"), "{summary}");
        assert!(summary.contains("\n      2.5 s  kernel: exit::b\n      0.0 s  kernel: oom::a\n"), "{summary}");
        assert_eq!(summary.lines().next_back(), Some("7 passed, 0 failed, 2 skipped"));
        assert_eq!(status(&steps), ExitCode::from(3));
        // What is left out was not asked for, and a test may skip itself.
        steps.remove(3);
        assert_eq!(status(&steps), ExitCode::SUCCESS);
    }

    #[test]
    fn a_step_that_fails_counts_whatever_it_printed() {
        let steps = [tests_of("build", "exit 101")];
        assert_eq!(summary(&steps).lines().next_back(), Some("0 passed, 1 failed, 0 skipped"));
        assert_eq!(status(&steps), ExitCode::FAILURE);
    }

    #[test]
    fn only_the_ten_slowest_are_listed() {
        let script = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo \"test t$i ... ok <$i.000s>\"; done";
        let summary = summary(&[tests_of("unit", script)]);
        assert!(summary.contains("12.0 s  unit: t12\n") && summary.contains("3.0 s  unit: t3\n"), "{summary}");
        assert!(!summary.contains("unit: t2\n"), "{summary}");
    }
}
