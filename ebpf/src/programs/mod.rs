//! One file per tracepoint, and what they share.

mod emit;
mod exec;
mod exit;
mod fork;
mod kernel;
mod listener;
mod oom;
mod rename;
mod reset;
mod sender;
mod signal;
mod task;
mod watched;

/// The helpers that read kernel memory are open to GPL-compatible programs only
/// (`gpl_only` in kernel/trace/bpf_trace.c).
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";
