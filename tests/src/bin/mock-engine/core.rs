//! The engine core: the process whose death ends the tokens.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use lastgasp_tests::model::Generation;

use crate::args::CoreSettings;
use crate::ipc::{CoreOutput, FromCore, ToCore};
use crate::role::{Role, set_title};

/// How long the compilers of `--compiler-child-ms` live.
const COMPILER_LIFETIME_MS: u64 = 20;

/// What wakes the engine core.
enum Event {
    Message(ToCore),
    /// The API server is gone.
    Orphaned,
}

/// Runs it; returns when an orphan's time is over.
pub(crate) fn run(socket: &str, settings: &CoreSettings) -> io::Result<()> {
    let started = Instant::now();
    give_up_rusts_handlers()?;
    let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(socket)?)?;
    let reader = BufReader::new(stream.try_clone()?);
    let (events, inbox) = mpsc::channel();
    thread::Builder::new().name("ZMQbg/IO/0".to_owned()).spawn(move || read(reader, &events))?;
    let (out, outbox) = mpsc::channel();
    thread::spawn(move || write(stream, &outbox));

    thread::sleep(settings.title_delay);
    set_title(&settings.title)?;
    let memory = fill_memory(settings.core_mb)?;
    if let Some(every) = settings.compiler_every {
        thread::spawn(move || {
            loop {
                thread::sleep(every);
                if let Err(error) = compile(COMPILER_LIFETIME_MS) {
                    tracing::warn!(%error, "cannot start a compiler");
                }
            }
        });
    }
    thread::sleep(settings.load.saturating_sub(started.elapsed()));
    let _ = out.send(FromCore::Ready { pid: std::process::id() });
    Core::new(settings, out).run(&inbox);

    tracing::info!("the API server is gone, I live on for a while");
    thread::sleep(settings.orphan_lifetime);
    drop(memory);
    Ok(())
}

/// Makes SIGSEGV and SIGBUS deadly, as they are to a real engine. Rust's own handlers, which look
/// for stack overflows, would swallow the first one that is sent from outside: they restore the
/// default action and expect the fault to be repeated (`std/src/sys/pal/unix/stack_overflow.rs`).
/// So they are made to do that now.
fn give_up_rusts_handlers() -> io::Result<()> {
    use nix::sys::signal::{Signal, raise};
    raise(Signal::SIGSEGV)?;
    raise(Signal::SIGBUS)?;
    Ok(())
}

fn read(reader: BufReader<UnixStream>, events: &Sender<Event>) {
    for line in reader.lines().map_while(Result::ok) {
        let message = serde_json::from_str(&line).expect("the API server wrote it");
        if events.send(Event::Message(message)).is_err() {
            return;
        }
    }
    let _ = events.send(Event::Orphaned);
}

fn write(mut stream: UnixStream, outbox: &Receiver<FromCore>) {
    for message in outbox {
        let mut line = serde_json::to_vec(&message).expect("it is plain data");
        line.push(b'\n');
        if stream.write_all(&line).is_err() {
            return;
        }
    }
}

/// Memory that a core file has to contain: every page is written to.
fn fill_memory(megabytes: usize) -> io::Result<Vec<u8>> {
    if megabytes == 0 {
        return Ok(Vec::new());
    }
    use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
    // Only root may raise the hard limit.
    if setrlimit(Resource::RLIMIT_CORE, RLIM_INFINITY, RLIM_INFINITY).is_err() {
        let (_, hard) = getrlimit(Resource::RLIMIT_CORE)?;
        setrlimit(Resource::RLIMIT_CORE, hard, hard)?;
    }
    let mut memory = vec![0; megabytes << 20];
    for (index, page) in memory.chunks_mut(4096).enumerate() {
        page.fill((index % 255) as u8 + 1);
    }
    Ok(memory)
}

/// Forks a compiler, waits for its exit and returns its pid.
fn compile(millis: u64) -> io::Result<u32> {
    let mut child = Role::Compiler { millis }.spawn()?;
    child.wait()?;
    Ok(child.id())
}

struct Running {
    generation: Generation,
    /// Its first token comes no earlier.
    starts: Instant,
}

struct Core<'a> {
    settings: &'a CoreSettings,
    out: Sender<FromCore>,
    requests: BTreeMap<u64, Running>,
    step: Duration,
    next_step: Instant,
    produced: u64,
    hangs: bool,
}

impl<'a> Core<'a> {
    fn new(settings: &'a CoreSettings, out: Sender<FromCore>) -> Self {
        Self {
            settings,
            out,
            requests: BTreeMap::new(),
            step: Duration::from_secs_f64(1.0 / settings.tokens_per_second),
            next_step: Instant::now(),
            produced: 0,
            hangs: false,
        }
    }

    /// Until the API server is gone.
    fn run(mut self, inbox: &Receiver<Event>) {
        loop {
            let event = if self.requests.is_empty() || self.hangs {
                inbox.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                inbox.recv_timeout(self.next_step.saturating_duration_since(Instant::now()))
            };
            match event {
                Ok(Event::Message(message)) => self.take(message),
                Ok(Event::Orphaned) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => self.step(),
            }
        }
    }

    fn take(&mut self, message: ToCore) {
        match message {
            ToCore::Add { id, prompt, limits, sampling } => {
                let now = Instant::now();
                if self.requests.is_empty() {
                    self.next_step = now;
                }
                self.requests.insert(
                    id,
                    Running {
                        generation: Generation::new(&prompt, sampling, limits),
                        starts: now + self.settings.prefill,
                    },
                );
            }
            ToCore::Abort { id } => {
                self.requests.remove(&id);
            }
            ToCore::Compile { id, millis } => {
                let out = self.out.clone();
                thread::spawn(move || match compile(millis) {
                    Ok(pid) => drop(out.send(FromCore::Compiled { id, pid })),
                    Err(error) => tracing::warn!(%error, "cannot start a compiler"),
                });
            }
            ToCore::Hang { on } => {
                self.hangs = on;
                self.next_step = Instant::now();
            }
        }
    }

    fn step(&mut self) {
        let now = Instant::now();
        let mut outputs = Vec::new();
        for (&id, request) in &mut self.requests {
            if request.starts > now {
                continue;
            }
            let (token, finish) = request.generation.step();
            outputs.push(CoreOutput { id, token, finish });
        }
        for output in outputs.iter().filter(|output| output.finish.is_some()) {
            self.requests.remove(&output.id);
        }
        let before = self.produced;
        self.produced += outputs.len() as u64;
        if !outputs.is_empty() {
            let _ = self.out.send(FromCore::Step { outputs });
        }
        if let Some(after) = self.settings.hang_after
            && (before..self.produced).contains(&after.saturating_sub(1))
        {
            self.hangs = true;
        }
        // After a pause (SIGSTOP, a busy machine) it goes on at its rate and does not catch up.
        self.next_step = (self.next_step + self.step).max(now);
    }
}
