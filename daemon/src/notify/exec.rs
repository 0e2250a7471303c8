//! `kind = "exec"`: a program that reads the notification from its standard input.

use std::process::Stdio;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use super::DeliveryFailure;

/// Where programs are looked for that are not named with a path.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs the program, without a shell and with nothing in its environment but `PATH`. Dropped before
/// the end, the program and what it has started are killed.
pub(super) async fn run(command: &[String], body: &[u8]) -> Result<(), DeliveryFailure> {
    let [program, arguments @ ..] = command else {
        return Err(DeliveryFailure::Refused("no program is named".to_owned()));
    };
    let child = Command::new(program)
        .args(arguments)
        .env_clear()
        .env("PATH", PATH)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .kill_on_drop(true)
        .spawn();
    let mut child = child.map_err(|error| DeliveryFailure::Later(format!("{program}: {error}")))?;
    let group = Group(child.id());
    if let Some(mut stdin) = child.stdin.take() {
        // A program may end without reading it.
        let _ = stdin.write_all(body).await;
    }
    let status = child.wait().await.map_err(|error| DeliveryFailure::Later(format!("{program}: {error}")))?;
    group.ended();
    if status.success() { Ok(()) } else { Err(DeliveryFailure::Later(format!("{program}: {status}"))) }
}

/// The program's process group, which has the program's pid for its number.
struct Group(Option<u32>);

impl Group {
    /// The program has ended by itself: its pid may be another's by now.
    fn ended(mut self) {
        self.0 = None;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(pid) = self.0 {
            // The program was not waited for, so the number is still its own.
            let _ = killpg(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(parts: &[&str]) -> Vec<String> {
        parts.iter().map(|&part| part.to_owned()).collect()
    }

    #[tokio::test]
    async fn the_program_reads_the_notice_and_has_an_environment_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("out");
        let script = format!("{{ cat; env | grep -v -e ^PWD= -e ^_= -e ^SHLVL=; }} > {}", file.display());
        run(&command(&["sh", "-c", &script]), b"{\"schema\":1}\n").await.unwrap();
        assert_eq!(std::fs::read_to_string(file).unwrap(), format!("{{\"schema\":1}}\nPATH={PATH}\n"));
    }

    #[tokio::test]
    async fn arguments_are_no_shell_script() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("$(echo owned); true");
        run(&command(&["touch", file.to_str().unwrap()]), b"").await.unwrap();
        assert!(file.exists());
    }

    #[tokio::test]
    async fn how_it_ended_is_told() {
        let failed = run(&command(&["sh", "-c", "exit 3"]), &[b' '; 1 << 20]).await.unwrap_err();
        assert_eq!(failed.to_string(), "sh: exit status: 3");
        let missing = run(&command(&["/no/such/program"]), b"").await.unwrap_err();
        assert!(missing.to_string().starts_with("/no/such/program: "), "{missing}");
    }

    #[tokio::test]
    async fn what_takes_too_long_is_killed_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let pid_file = folder.path().join("pid");
        let script = format!("sleep 1000 & echo $! > {}.new && mv {0}.new {0}; wait", pid_file.display());
        let command = command(&["sh", "-c", &script]);
        let running = tokio::spawn(async move { run(&command, b"").await });
        let pid: u32 = loop {
            match std::fs::read_to_string(&pid_file) {
                Ok(pid) => break pid.trim().parse().unwrap(),
                Err(_) => tokio::task::yield_now().await,
            }
        };
        let child = crate::sensors::proc::identify(pid).unwrap();
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
        while crate::sensors::proc::is_alive(child) {
            tokio::task::yield_now().await;
        }
    }
}
