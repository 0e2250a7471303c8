//! `cargo xtask test`: every test there is, against real parts, with a summary at the end.
//!
//! What a test needs and a machine may lack (nats-server, the eBPF toolchain) is installed first.
//! A step that cannot run here fails, or is listed as skipped with its reason; it never counts as
//! passed.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use crate::{build_ebpf, chromium, containers, debian, nats_server, systems, tools};

/// All tests, unprivileged and privileged.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask test                       everything, within 35 minutes on two cores
  cargo xtask test --filter engine_core  only tests whose name contains this
  cargo xtask test --long                more property-test cases, kernels, kills, faults and restarts
  cargo xtask test --peers               also beside LiteLLM, Dynamo and vLLM, from PyPI (6 GB)

With LASTGASP_INFERA_SRC=FOLDER also beside Infera, from a checkout of it there (20 minutes).
Kernel tests and stories need root, the Python clients need venv. Without it they are listed as
skipped, and the exit status is 3. The image's test installs buildah, podman and crun by apt-get.
Exit status: 0 all passed, 1 something failed, 3 all that could run passed.")]
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

/// Names the file in which tests say what they cannot check on this machine (`lastgasp_tests::skipped`).
const SKIPPED: &str = "LASTGASP_SKIPPED";

fn skipped_here() -> PathBuf {
    tools::target().join("skipped.txt")
}

/// What became of a step.
enum Verdict {
    Passed,
    Failed,
    Skipped(&'static str),
}

struct Step {
    name: &'static str,
    verdict: Verdict,
    passed: usize,
    failed: usize,
    took: Duration,
}

pub(crate) fn main(arguments: &Arguments) -> ExitCode {
    let steps = match run(arguments) {
        Ok(steps) => steps,
        Err(error) => {
            eprintln!("cargo xtask test: {error}");
            return ExitCode::FAILURE;
        }
    };
    summary(&steps)
}

fn run(arguments: &Arguments) -> Result<Vec<Step>, Box<dyn std::error::Error>> {
    let nats = nats_server::ensure(&tools::target())?;
    let root = tools::is_root();
    let needs_root = (!root).then_some("needs root");
    let whole = arguments.filter.is_none();
    let filtered = (!whole).then_some(FILTERED);
    let cases = if arguments.long { "20000" } else { "256" };
    // For each target of `lastgasp-fuzz`.
    let fuzz_seconds = if arguments.long { "600" } else { "1" };
    let mut steps = Vec::new();

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
    if matches!(steps.last(), Some(Step { verdict: Verdict::Failed, .. })) {
        return Ok(steps);
    }

    let _ = std::fs::remove_file(skipped_here());
    let mut test = |name, skip: Option<&'static str>, command: &mut Command| {
        command.env(SKIPPED, skipped_here());
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
    test("unit and property tests", None, cargo("test").args(["--no-fail-fast"]));
    test("shared event types", None, cargo("test").args(["-p", "lastgasp-ebpf", "--lib"]));
    test("mock engine", None, cargo("test").args(["-p", "lastgasp-tests", "--lib", "--bins", "--test", "mock"]));
    test("kernel", needs_root, cargo("test").args(["-p", "lastgasp-tests", "--test", "kernel"]));
    test("privilege", needs_root, cargo("test").args(["-p", "lastgasp-tests", "--test", "privilege"]));
    let mut stories = cargo("test");
    stories.args(["-p", "lastgasp-tests", "--test", "stories"]);
    if root {
        // One story is about a server that is too old; without it that story fails, and says why.
        match nats_server::ensure_old(&tools::target()) {
            Ok(old) => _ = stories.env(nats_server::OLD_ENVIRONMENT, old),
            Err(error) => eprintln!("no nats-server 2.10: {error}"),
        }
    }
    test("stories", needs_root, &mut stories);

    test("benches, a little of each", needs_root, cargo("test").args(["-p", "lastgasp-bench"]));

    // What is in deploy/. The packages are installed into target/, by pip; the image's tools by apt-get.
    let no_venv = Command::new("python3").args(["-c", "import ensurepip, venv"]).output();
    let no_venv = (!no_venv.is_ok_and(|output| output.status.success())).then_some("no python3-venv");
    let deploy = |only: &[&str]| {
        let mut command = cargo("test");
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

    let mut page = cargo("test");
    page.args(["-p", "lastgasp-tests", "--test", "page"]).env(nats_server::ENVIRONMENT, &nats);
    let no_browser =
        filtered.or(needs_root).or_else(|| (!chromium::ensure()).then_some("no chromium, and it cannot be installed"));
    steps.push(step("status page, in Chromium", &mut page, no_browser));

    let mut infera = cargo("test");
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
    let mut dynamo = cargo("test");
    dynamo.args(["-p", "lastgasp-tests", "--test", "dynamo", "--", "--include-ignored"]);
    dynamo.envs(etcd.as_ref().map(|path| (debian::ETCD.variable, path)));
    steps.push(step("Dynamo's discovery", &mut dynamo, no_etcd));

    // The packages are installed into target/, by pip.
    let mut clients = cargo("test");
    clients.args(["-p", "lastgasp-router", "--test", "clients", "--", "--ignored"]);
    steps.push(step("real Python clients", &mut clients, filtered.or(no_venv)));

    // A router in Python, from docs/writing-a-router.md; its package comes by pip too.
    let mut example = cargo("test");
    example.args(["-p", "lastgasp-tests", "--test", "example_router", "--", "--ignored"]);
    example.env(nats_server::ENVIRONMENT, &nats);
    steps.push(step("example router in Python", &mut example, filtered.or(no_venv)));

    let mut rules = cargo("test");
    rules.args(["-p", "xtask", "--", "--ignored", "promtool"]);
    let mut dashboards = cargo("test");
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
    let mut peers = if absent.is_none() { systems::peers()? } else { cargo("test") };
    peers.args((!arguments.peers).then_some("infera::")).env(SKIPPED, skipped_here());
    steps.push(step(name, &mut peers, absent));

    let mut kernels = xtask();
    kernels.arg("test-kernels");
    if !arguments.long {
        // The oldest one: its tracepoints differ most from this machine's. It does not sleep.
        kernels.args(["--kernel", "6.1", "--boot", "kernel", "--boot", "machine", "--boot", "lockdown"]);
    }
    steps.push(step("kernel, on Debian's kernels in QEMU", &mut kernels, needs_root.or(filtered)));

    let mut demo = xtask();
    let result: PathBuf = tools::target().join("demo.json");
    demo.args(["demo", "--json"]).arg(&result);
    if arguments.long {
        demo.args(["--kills", "200"]);
    }
    steps.push(step("demo", &mut demo, filtered));
    Ok(steps)
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
    let mut command = Command::new(tools::cargo());
    command.current_dir(tools::workspace()).arg(subcommand);
    command
}

fn xtask() -> Command {
    let mut command = cargo("run");
    command.args(["--quiet", "--package", "xtask", "--"]);
    command
}

/// Runs a step, shows what it prints, and counts the tests in it.
fn step(name: &'static str, command: &mut Command, skip: Option<&'static str>) -> Step {
    if let Some(reason) = skip {
        eprintln!("==> {name}: SKIPPED, {reason}");
        return Step { name, verdict: Verdict::Skipped(reason), passed: 0, failed: 0, took: Duration::ZERO };
    }
    eprintln!("==> {name}\n    {}", tools::shown(command));
    let begin = Instant::now();
    let (mut passed, mut failed) = (0, 0);
    let success = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().and_then(|mut child| {
        let output = child.stdout.take().map(BufReader::new);
        for line in output.into_iter().flat_map(BufRead::lines) {
            let line = line?;
            if let Some((ok, not)) = counted(&line) {
                passed += ok;
                failed += not;
            }
            println!("{line}");
        }
        child.wait()
    });
    let verdict = match success {
        Ok(status) if status.success() => Verdict::Passed,
        Ok(_) => Verdict::Failed,
        Err(error) => {
            eprintln!("    {error}");
            Verdict::Failed
        }
    };
    Step { name, verdict, passed, failed, took: begin.elapsed() }
}

/// Passed and failed of a line like `test result: ok. 12 passed; 0 failed; 1 ignored; …`.
fn counted(line: &str) -> Option<(usize, usize)> {
    let rest = line.strip_prefix("test result: ")?;
    let count = |what: &str| {
        let before = rest.split(what).next()?;
        before.split_whitespace().next_back()?.parse().ok()
    };
    Some((count(" passed")?, count(" failed")?))
}

fn summary(steps: &[Step]) -> ExitCode {
    println!("\n{:<38} {:<8} {:>7} {:>7} {:>9}", "step", "verdict", "passed", "failed", "took");
    let (mut bad, mut skipped) = (false, false);
    for Step { name, verdict, passed, failed, took } in steps {
        let (word, why) = match verdict {
            Verdict::Passed => ("passed", ""),
            Verdict::Failed => ("FAILED", ""),
            Verdict::Skipped(why) => ("SKIPPED", *why),
        };
        bad |= matches!(verdict, Verdict::Failed);
        skipped |= matches!(verdict, Verdict::Skipped(why) if *why != FILTERED);
        let took = format!("{:.1} s", took.as_secs_f64());
        println!("{name:<38} {word:<8} {passed:>7} {failed:>7} {took:>9}  {why}");
    }
    for line in std::fs::read_to_string(skipped_here()).unwrap_or_default().lines() {
        println!("skipped on this machine, and counted as passed above: {line}");
    }
    let (passed, failed) = steps.iter().fold((0, 0), |sum, step| (sum.0 + step.passed, sum.1 + step.failed));
    println!("\n{passed} passed, {failed} failed");
    match (bad, skipped) {
        (true, _) => ExitCode::FAILURE,
        (false, true) => ExitCode::from(3),
        (false, false) => ExitCode::SUCCESS,
    }
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn the_closing_line_of_cargo_test_is_read() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out";
        assert_eq!(counted(line), Some((12, 3)));
        assert_eq!(counted("test core::a ... ok"), None);
    }
}
