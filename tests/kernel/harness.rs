//! Loads the programs, runs victims, and waits for events.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::{fs::MetadataExt as _, process::ExitStatusExt as _},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    time::Duration,
};

use lastgasp::sensors::ebpf::{Events, KernelPrograms, LoadOptions};
use lastgasp::sensors::kmsg::{Kmsg, LogEntry};
use lastgasp_ebpf::{Event, EventKind};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::runtime::Runtime;

/// After this long a test gives up. It bounds nothing but a hang.
const GIVE_UP: Duration = Duration::from_secs(60);

/// The slot that stories watch their victims under.
pub(crate) const SLOT: u32 = 7;

/// The kernel's side: programs that are loaded and the events they sent.
pub(crate) struct Kernel {
    runtime: Runtime,
    pub(crate) programs: KernelPrograms,
    events: Events,
    seen: Vec<Event>,
}

impl Kernel {
    pub(crate) fn load() -> Self {
        Self::load_with(&LoadOptions::default())
    }

    pub(crate) fn load_with(options: &LoadOptions) -> Self {
        let (programs, ring) = KernelPrograms::load(options).unwrap_or_else(|error| panic!("{error}: run as root"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let events = {
            let _inside = runtime.enter();
            Events::new(ring).expect("a ring can be polled")
        };
        Self { runtime, programs, events, seen: Vec::new() }
    }

    /// Follows the kernel's log until `tell` has heard enough.
    pub(crate) fn follow(&self, log: Kmsg, tell: impl FnMut(LogEntry) -> bool) {
        self.runtime.block_on(async {
            let followed = tokio::time::timeout(GIVE_UP, log.follow(tell)).await;
            followed.expect("it is reported").expect("the log can be read");
        });
    }

    pub(crate) fn watch(&mut self, victim: &Victim) {
        self.programs.watch(victim.tgid, SLOT, victim.start_ticks).expect("there is room");
    }

    /// Everything seen so far, of every kind, also what is still in the ring.
    pub(crate) fn seen(&mut self) -> &[Event] {
        let Self { events, seen, .. } = self;
        let drained = events.drain(1 << 20, |event| seen.push(*event));
        assert_eq!(drained.undecodable, 0, "object and daemon disagree");
        seen
    }

    /// What was seen of one kind and process.
    pub(crate) fn of(&mut self, kind: EventKind, tgid: u32) -> Vec<Event> {
        let of = |event: &&Event| event.kind() == Some(kind) && event.tgid == tgid;
        self.seen().iter().filter(of).copied().collect()
    }

    /// The first event, seen already or to come, that `wanted` holds for.
    pub(crate) fn wait_for(&mut self, what: &str, wanted: impl Fn(&Event) -> bool) -> Event {
        let deadline = std::time::Instant::now() + GIVE_UP;
        loop {
            if let Some(event) = self.seen().iter().find(|event| wanted(event)) {
                return *event;
            }
            let Self { runtime, events, seen, .. } = self;
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            let woken = runtime.block_on(async { tokio::time::timeout(left, events.readable()).await });
            match woken {
                Ok(ready) => ready.expect("the runtime lives"),
                Err(_elapsed) => panic!("no {what} came; seen: {seen:#?}"),
            }
        }
    }

    pub(crate) fn wait_for_kind(&mut self, kind: EventKind, tgid: u32) -> Event {
        self.wait_for(kind.as_str(), |event| event.kind() == Some(kind) && event.tgid == tgid)
    }
}

/// A running victim program; it does not outlive this value.
pub(crate) struct Victim {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    pub(crate) tgid: u32,
    /// Field 22 of `/proc/PID/stat`.
    pub(crate) start_ticks: u64,
    /// What followed `ready`.
    pub(crate) said: String,
}

impl Victim {
    /// Starts it, and returns when it is ready.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::start_by(&mut Command::new(Self::program()), arguments)
    }

    pub(crate) fn start_by(command: &mut Command, arguments: &[&str]) -> Self {
        let mut child = command
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("cargo has built the victim");
        let tgid = child.id();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        let start_ticks = start_ticks(tgid).expect("it runs, or waits for its parent");
        let mut victim = Self { child, input, output, tgid, start_ticks, said: String::new() };
        victim.said = loop {
            let line = victim.read();
            match line.strip_prefix("ready") {
                Some(said) => break said.trim().to_owned(),
                None => assert!(!victim.at_end(), "the victim ended before it was ready, with {line:?}"),
            }
        };
        victim
    }

    pub(crate) fn program() -> PathBuf {
        PathBuf::from(env!("CARGO_BIN_EXE_victim"))
    }

    /// Lets it take its next step.
    pub(crate) fn go(&mut self) {
        let input = self.input.as_mut().expect("it is open until the end");
        input.write_all(b"go\n").expect("the victim reads");
    }

    /// The next line that it says.
    pub(crate) fn read(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a pipe can be read");
        line.trim_end().to_owned()
    }

    fn at_end(&mut self) -> bool {
        self.output.fill_buf().expect("a pipe can be read").is_empty()
    }

    /// The next line, which has to begin like this; the number after it.
    pub(crate) fn read_number(&mut self, prefix: &str) -> u32 {
        let line = self.read();
        let number = line.strip_prefix(prefix).and_then(|rest| rest.trim().parse().ok());
        number.unwrap_or_else(|| panic!("the victim said {line:?}, expected {prefix:?} and a number"))
    }

    pub(crate) fn kill(&self, signal: Signal) {
        kill(self.pid(), signal).expect("the victim is there until it is waited for");
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.tgid as i32)
    }

    /// Waits for its end. All of its events are in the ring by then.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("a child can be waited for")
    }

    /// Its wait status in raw form.
    pub(crate) fn wait_raw(&mut self) -> u32 {
        self.wait().into_raw() as u32
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        // No error says anything here: it may have ended long ago.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Field 22 of `/proc/PID/stat`.
pub(crate) fn start_ticks(tgid: u32) -> Option<u64> {
    // The name in field 2 may contain anything, parentheses and spaces included.
    let stat = std::fs::read_to_string(format!("/proc/{tgid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(22 - 3)?.parse().ok()
}

/// The inode number of a process's network namespace.
pub(crate) fn netns(tgid: u32) -> u32 {
    let namespace = std::fs::metadata(format!("/proc/{tgid}/ns/net")).expect("root may look");
    namespace.ino().try_into().expect("namespace numbers have 32 bits")
}

/// Asks again and again, yielding in between, for things that have no event to wait for.
pub(crate) fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = std::time::Instant::now() + GIVE_UP;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(std::time::Instant::now() < deadline, "gave up waiting until {what}");
        std::thread::yield_now();
    }
}
