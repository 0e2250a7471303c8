//! A signal that ends the process, or asks it to end, has reached one of its threads.
//!
//! ```text
//! signal_deliver(int sig, struct kernel_siginfo *info, struct k_sigaction *ka)
//! ```
//!
//! `info` may be a sentinel (0 or 1) and is never looked at. Signal numbers are
//! those of x86, arm64, riscv and s390.

use aya_ebpf::{
    bindings::BPF_NOEXIST,
    macros::{map, raw_tracepoint},
    maps::LruHashMap,
    programs::RawTracePointContext,
};
use lastgasp_ebpf::{Event, EventFlags, EventKind, SignalledKey};

use super::{
    emit::{emit, event},
    kernel::{Address, Offset, unresolved},
    task::{Task, current_tgid},
    watched::Process,
};

#[unsafe(no_mangle)]
static SIGACTION_HANDLER: Offset = unresolved();

/// What was reported already. Old entries leave by themselves.
#[map]
static SIGNALLED: LruHashMap<SignalledKey, u8> = LruHashMap::with_max_entries(4096, 0);

const SIGINT: u32 = 2;
const SIGKILL: u32 = 9;
const SIGTERM: u32 = 15;
const SIG_DFL: u64 = 0;
const SIG_IGN: u64 = 1;
const LAST_SIGNAL: u32 = 64;
/// Of a wait status.
const SIGNAL_BITS: u32 = 0x7f;

/// Signals whose default action is to do nothing, to stop, or to go on:
/// CHLD, CONT, STOP, TSTP, TTIN, TTOU, URG, WINCH (`SIG_KERNEL_IGNORE_MASK`,
/// `SIG_KERNEL_STOP_MASK`, include/linux/signal.h).
const HARMLESS: u64 = 1 << 17 | 1 << 18 | 1 << 19 | 1 << 20 | 1 << 21 | 1 << 22 | 1 << 23 | 1 << 28;

#[raw_tracepoint(tracepoint = "signal_deliver")]
fn lastgasp_signal(ctx: RawTracePointContext) -> i32 {
    on_signal(&ctx);
    0
}

#[inline(always)]
fn on_signal(ctx: &RawTracePointContext) -> Option<()> {
    let signal = ctx.arg::<u32>(0);
    if signal == 0 || signal > LAST_SIGNAL || signal < 64 && HARMLESS >> signal & 1 != 0 {
        return None;
    }
    let task = Task::current();
    let process = Process::of(task, current_tgid())?;
    let shared = task.signal()?;
    let shared_flags = shared.flags();
    let ending = shared_flags.is_ending();
    let mut event = event(EventKind::SignalDeliver, process);
    event.signal = signal;
    if ending {
        event.exit_code = shared.group_exit_code();
        event.flags = event.flags.with(EventFlags::GROUP_EXIT);
    }

    if signal == SIGKILL {
        // A real SIGKILL has begun to end the process when it was sent
        // (complete_signal, kernel/signal.c). Else an exec of another thread is
        // clearing this one away (zap_other_threads), and the process lives on.
        if !ending {
            return None;
        }
        if event.exit_code & SIGNAL_BITS == 0 {
            // exit_group uses SIGKILL, too.
            event.signal = 0;
        }
    } else {
        match Address(ctx.arg(2)).read::<u64>(&SIGACTION_HANDLER)? {
            SIG_DFL => {}
            SIG_IGN => return None,
            _handler => {
                if signal == SIGTERM || signal == SIGINT {
                    emit(event);
                }
                return None;
            }
        }
    }
    if event.signal != 0 {
        event.flags =
            event.flags.with(EventFlags::HANDLER_DEFAULT).with_if(shared_flags.is_unkillable(), EventFlags::UNKILLABLE);
    }
    if !already_told(&event) {
        emit(event);
    }
    Some(())
}

/// False for exactly one caller per process, signal and flags.
#[inline(always)]
fn already_told(event: &Event) -> bool {
    let key = SignalledKey {
        start_boottime: event.start_boottime,
        tgid: event.tgid,
        signal_and_flags: event.signal | event.flags.0 << 8,
    };
    // An insert into an LRU hash evicts an entry before it finds that the key is
    // there, so a thousand threads had better look first.
    SIGNALLED.get_ptr(key).is_some() || SIGNALLED.insert(key, 0, u64::from(BPF_NOEXIST)).is_err()
}
