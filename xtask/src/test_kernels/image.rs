//! A kernel from Debian's packages, and the initramfs that it boots into.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{KernelsError, Stories, io};
use crate::{debian, tools};

/// The versions that can be asked for.
pub(super) const KERNELS: [&str; 2] = ["6.1", "6.12"];

/// An unpacked kernel package.
pub(super) struct Kernel {
    /// The package's name.
    pub(super) name: String,
    /// The bootable image.
    pub(super) image: PathBuf,
}

/// Finds the kernel of this version in `target/kernels`, or fetches it.
pub(super) fn kernel(version: &str) -> Result<Kernel, KernelsError> {
    let folder = tools::target().join("kernels");
    fs::create_dir_all(&folder).map_err(io(folder.display().to_string()))?;
    let prefix = format!("linux-image-{version}.");
    let unpacked = |name: &str| {
        let boot = fs::read_dir(folder.join(name).join("boot")).ok()?;
        let image =
            boot.filter_map(Result::ok).find(|entry| entry.file_name().as_encoded_bytes().starts_with(b"vmlinuz-"));
        Some(Kernel { name: name.to_owned(), image: image?.path() })
    };
    let there = fs::read_dir(&folder).map_err(io(folder.display().to_string()))?;
    let names = there.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    if let Some(kernel) = names.filter(|name| name.starts_with(&prefix)).find_map(|name| unpacked(&name)) {
        return Ok(kernel);
    }

    let pattern = format!("^linux-image-{}\\..*-cloud-amd64$", version.replace('.', "\\."));
    let found = tools::output(Command::new("apt-cache").args(["search", "--names-only", &pattern]))?;
    let names = found.lines().filter_map(|line| line.split_whitespace().next());
    let name =
        names.max_by_key(|name| numbers(name)).ok_or_else(|| KernelsError::NoKernel { version: version.into() })?;
    debian::unpack(name, &folder.join(name))?;
    unpacked(name).ok_or_else(|| KernelsError::NoKernel { version: version.into() })
}

/// The numbers in a name, so that 6.1.0-50 comes after 6.1.0-9.
fn numbers(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

/// Packs the initramfs: tests, what they start, their libraries, a shell.
pub(super) fn initramfs(kernel: &Kernel, stories: &Stories, filter: Option<&str>) -> Result<PathBuf, KernelsError> {
    let folder = tools::target().join("kernels");
    let root = folder.join(format!("root-{}", kernel.name));
    if root.exists() {
        fs::remove_dir_all(&root).map_err(io(root.display().to_string()))?;
    }
    for made in ["bin", "proc", "sys", "dev", "tmp"] {
        fs::create_dir_all(root.join(made)).map_err(io(made))?;
    }
    let busybox = tools::on_path("busybox").unwrap_or_default();
    fs::copy(&busybox, root.join("bin/busybox")).map_err(io("busybox"))?;
    for applet in ["sh", "mount", "poweroff", "ip", "cat", "ls", "uname", "mkdir", "echo", "true", "sleep"] {
        symlink("busybox", root.join("bin").join(applet)).map_err(io(applet))?;
    }
    // A static program.
    fs::copy(&stories.nats, root.join("bin/nats-server")).map_err(io("nats-server"))?;
    // At the paths that they have here, since the tests know the others' by it.
    let Stories { kernel: tests, guest, started, nats: _ } = stories;
    let ours: Vec<&PathBuf> = [tests, guest].into_iter().chain(started).collect();
    for program in ours.iter().copied().cloned().chain(tools::on_path("setpriv")) {
        put(&root, &program)?;
        for library in libraries(&program)? {
            put(&root, &library)?;
        }
    }
    for stripped in ours {
        // Half a gigabyte of debug information would have to be unpacked by an emulated CPU.
        let mut strip = Command::new("strip");
        let _unless_there_is_none = strip.arg("-g").arg(inside(&root, stripped)).status();
    }
    let init = root.join("init");
    fs::write(&init, script(tests, guest, filter)).map_err(io("init"))?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).map_err(io("init"))?;

    let archive = folder.join(format!("{}.cpio.gz", kernel.name));
    let pack = "find . -print0 | cpio --null --create --format=newc --quiet | gzip -1";
    let output = fs::File::create(&archive).map_err(io(archive.display().to_string()))?;
    let packed = Command::new("sh").args(["-c", pack]).current_dir(&root).stdout(output).stdin(Stdio::null()).status();
    match packed.map_err(io("sh"))?.success() {
        true => Ok(archive),
        false => Err(io("cpio")(std::io::Error::other("it failed"))),
    }
}

/// What the guest does.
fn script(kernel: &Path, guest: &Path, filter: Option<&str>) -> String {
    let mut script = Vec::new();
    let line = |text: &str, script: &mut Vec<u8>| writeln!(script, "{text}").expect("memory can be written");
    for text in [
        "#!/bin/sh",
        "export PATH=/bin:/usr/bin:/sbin:/usr/sbin",
        "mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev",
        "mount -t cgroup2 cgroup /sys/fs/cgroup; mount -t securityfs security /sys/kernel/security",
        "ip link set lo up",
        "uname -r",
        "export LASTGASP_GUEST=1",
        "export LASTGASP_SKIPPED=/tmp/skipped; : > $LASTGASP_SKIPPED",
        // Only libtest asks for it: for how long each test takes.
        "export RUSTC_BOOTSTRAP=1",
        "cd /tmp",
        "status=0",
    ] {
        line(text, &mut script);
    }
    let filter = filter.map(|filter| format!(" '{}'", filter.replace('\'', ""))).unwrap_or_default();
    let timed = "-Zunstable-options --report-time";
    let run =
        |program: &Path, options: &str| format!("{} {timed} {options}{filter} 2>&1 || status=$?", program.display());
    line("case $stories in", &mut script);
    line(&format!("kernel) {};;", run(kernel, "--test-threads=2")), &mut script);
    // Each of these has the machine for itself.
    for (stories, others) in [
        ("machine", "--skip lockdown:: --skip suspend::"),
        ("lockdown", "--skip clock:: --skip freezer:: --skip oom:: --skip suspend::"),
        ("sleep", "--skip clock:: --skip freezer:: --skip oom:: --skip lockdown::"),
    ] {
        line(&format!("{stories}) {};;", run(guest, &format!("--test-threads=1 {others}"))), &mut script);
    }
    line("*) status=1;;\nesac", &mut script);
    line(
        &format!("while IFS= read -r line; do echo \"{}$line\"; done < $LASTGASP_SKIPPED", super::guest::SKIP),
        &mut script,
    );
    line(&format!("echo {}$status", super::guest::VERDICT), &mut script);
    line("poweroff -f", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Where a file of this machine lies in the guest's root.
fn inside(root: &Path, file: &Path) -> PathBuf {
    root.join(file.strip_prefix("/").unwrap_or(file))
}

fn put(root: &Path, file: &Path) -> Result<(), KernelsError> {
    let to = inside(root, file);
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).map_err(io(folder.display().to_string()))?;
    }
    fs::copy(file, &to).map(drop).map_err(io(file.display().to_string()))
}

/// The shared libraries of a program, the loader among them.
fn libraries(program: &Path) -> Result<Vec<PathBuf>, KernelsError> {
    let said = tools::output(Command::new("ldd").arg(program))?;
    Ok(said.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_package_is_the_one_with_the_greatest_numbers() {
        let names = ["linux-image-6.1.0-9-cloud-amd64", "linux-image-6.1.0-50-cloud-amd64"];
        assert_eq!(names.into_iter().max_by_key(|name| numbers(name)), Some(names[1]));
    }

    #[test]
    fn the_guest_says_how_its_tests_ended_and_goes() {
        let script = script(Path::new("/somewhere/kernel"), Path::new("/somewhere/guest"), Some("signal::"));
        assert!(script.starts_with("#!/bin/sh\n"));
        assert!(
            script
                .contains("/kernel -Zunstable-options --report-time --test-threads=2 'signal::' 2>&1 || status=$?;;\n"),
            "{script}"
        );
        assert!(
            script.contains(" --report-time --test-threads=1 --skip lockdown:: --skip suspend:: 'signal::' 2>&1"),
            "{script}"
        );
        assert!(script.ends_with("poweroff -f\n"));
    }
}
