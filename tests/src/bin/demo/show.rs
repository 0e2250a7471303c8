//! What a person sees.

use std::io::{IsTerminal, Write as _};

use crate::kill::Kill;
use crate::report::{Distribution, Report};

const DIM: &str = "\x1b[2m";
const RED: &str = "\x1b[1;31m";
const GREEN: &str = "\x1b[32m";
const BOLD: &str = "\x1b[1m";
const PLAIN: &str = "\x1b[0m";

/// `text` in a colour, if somebody looks at a terminal that wants colours (no-color.org).
fn coloured(colour: &str, text: &str) -> String {
    let wanted = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    if wanted { format!("{colour}{text}{PLAIN}") } else { text.to_owned() }
}

pub(crate) fn step(what: &str) {
    println!("{}", coloured(DIM, &format!("starting {what}")));
}

pub(crate) fn sensor(sensor: &str, chosen: bool) {
    let says = match (sensor, chosen) {
        ("ebpf", _) => "deaths are seen by eBPF".to_owned(),
        (_, true) => "deaths are seen by pidfd, as asked".to_owned(),
        _ => "deaths are seen by pidfd: eBPF needs root (or CAP_BPF and CAP_PERFMON); run this as root to see it"
            .to_owned(),
    };
    println!("{}", coloured(DIM, &says));
}

/// The terminal, if somebody looks.
pub(crate) struct Audience {
    looks: bool,
    heard: usize,
    moved: bool,
}

impl Audience {
    pub(crate) const fn new(looks: bool) -> Self {
        Self { looks, heard: 0, moved: false }
    }

    pub(crate) fn begin(&self, worker: &str) {
        if self.looks {
            println!("\n{}\n", coloured(BOLD, &format!("An answer, streamed by {worker}:")));
        }
    }

    /// Prints what is new of the answer.
    pub(crate) fn hear(&mut self, text: &str) {
        if !self.looks {
            return;
        }
        let new = text.get(self.heard..).unwrap_or_default();
        self.heard = text.len();
        let new = if self.moved { coloured(GREEN, new) } else { new.to_owned() };
        print!("{new}");
        let _ = std::io::stdout().flush();
    }

    pub(crate) fn kill(&mut self, worker: &str, pid: u32) {
        if self.looks {
            let notice = format!("[ kill -9 {pid}: VLLM::EngineCore of {worker} ]");
            print!(" {} ", coloured(RED, &notice));
            let _ = std::io::stdout().flush();
        }
        self.moved = true;
    }

    pub(crate) fn end(&self) {
        if self.looks {
            println!("\n");
        }
    }
}

pub(crate) fn timeline(kill: &Kill) {
    println!("{}", coloured(BOLD, &format!("Since the kill ({}):", kill.certificate.cause)));
    let mut rows = vec![
        ("signal delivered", kill.moment("signal_delivered")),
        ("process exit seen in the kernel", kill.moment("process_exit")),
        ("signal to routers published", kill.moment("signalled")),
        ("record withdrawn, acknowledged", kill.moment("withdrawn")),
        ("router said that it heard", kill.moment("router_received")),
        ("stream is on another worker", kill.to_router_acted_us),
        ("next token at the client", kill.to_next_token_us),
        ("pidfd readable", kill.moment("process_gone")),
    ];
    rows.sort_by_key(|(_, at)| at.unwrap_or(i64::MAX));
    for (what, at) in rows {
        println!("  {:>12}  {what}", at.map_or_else(|| "–".to_owned(), microseconds));
    }
    println!(
        "{}",
        coloured(DIM, "  (vLLM's Rust frontend would have said nothing for 3.6 s, then closed the connection)")
    );
}

pub(crate) fn progress(done: usize, wanted: usize, kill: &Kill) {
    let at = |at: Option<i64>| at.map_or_else(|| "–".to_owned(), microseconds);
    println!(
        "kill {done:>4} of {wanted}  withdrawn after {:>9}  next token after {:>9}  {}",
        at(kill.moment("withdrawn")),
        at(kill.to_next_token_us),
        if kill.whole { "exact" } else { "NOT EXACT" }
    );
}

pub(crate) fn distributions(report: &Report) {
    let all = &report.distributions;
    println!("\n{}", coloured(BOLD, &format!("{} kills, deaths by {}", report.kills, report.death_source)));
    println!("  {:<44} {:>10} {:>10} {:>10}", "from kill() to", "p50", "p99", "max");
    let rows = [
        ("evidence in the kernel", all.kill_to_evidence_us),
        ("decision in the daemon", all.kill_to_decision_us),
        ("signal to routers published", all.kill_to_signalled_us),
        ("KV delete acknowledged", all.kill_to_withdrawn_us),
        ("router's answer `received` at the daemon", all.kill_to_router_received_us),
        ("router has acted (client sees the move)", all.kill_to_router_acted_us),
        ("next token at the client", all.kill_to_next_token_us),
        ("pidfd readable", all.kill_to_pidfd_us),
    ];
    for (what, distribution) in rows {
        let Some(Distribution { n, p50, p99, max }) = distribution else { continue };
        let [p50, p99, max] = [p50, p99, max].map(microseconds);
        println!("  {what:<44} {p50:>10} {p99:>10} {max:>10}  (n = {n})");
    }
}

pub(crate) fn verdict(report: &Report) {
    let Report { tokens_expected, tokens_received, missing, repeated, .. } = report;
    let text = format!(
        "{tokens_expected} tokens expected, {tokens_received} received, {missing} missing, {repeated} repeated"
    );
    let colour = if report.is_exact() { GREEN } else { RED };
    println!("\n{}", coloured(colour, &text));
}

/// Microseconds below a millisecond, milliseconds below a second.
fn microseconds(us: i64) -> String {
    match us {
        ..1_000 => format!("{us} µs"),
        1_000..1_000_000 => format!("{}.{:02} ms", us / 1000, us % 1000 / 10),
        _ => format!("{}.{:02} s", us / 1_000_000, us % 1_000_000 / 10_000),
    }
}
