//! Names under which user space finds things in the object file.
//!
//! A program's name begins with `lastgasp_` and has at most 15 bytes
//! (`BPF_OBJ_NAME_LEN`), so that `bpftool prog` shows whose it is.

/// Programs.
pub mod program {
    /// `sched_process_exit`
    pub const EXIT: &str = "lastgasp_exit";
    /// `signal_deliver`
    pub const SIGNAL: &str = "lastgasp_signal";
    /// `sched_process_fork`
    pub const FORK: &str = "lastgasp_fork";
    /// `sched_process_exec`
    pub const EXEC: &str = "lastgasp_exec";
    /// `task_rename`
    pub const RENAME: &str = "lastgasp_rename";
    /// `mark_victim`
    pub const OOM: &str = "lastgasp_oom";
    /// `inet_sock_set_state`
    pub const LISTENER: &str = "lastgasp_listen";
    /// `signal_generate`
    pub const SENDER: &str = "lastgasp_sender";
    /// `tcp_send_reset`
    pub const RESET_SENT: &str = "lastgasp_rstout";
    /// `tcp_receive_reset`
    pub const RESET_RECEIVED: &str = "lastgasp_rst_in";
}

/// Maps.
pub mod map {
    /// Hash: tgid to [`Watched`](crate::Watched).
    pub const WATCHED: &str = "WATCHED";
    /// Hash: [`ListenerKey`](crate::ListenerKey) to slot.
    pub const PORTS: &str = "PORTS";
    /// Array: a bit for each port in `PORTS`, see [`port_bit`](crate::port_bit).
    pub const PORT_BITS: &str = "PORT_BITS";
    /// Array of one: how many processes that nobody watches are still to be told when they exec.
    pub const STRANGERS: &str = "STRANGERS";
    /// LRU hash: [`SignalledKey`](crate::SignalledKey) to nothing of interest.
    pub const SIGNALLED: &str = "SIGNALLED";
    /// LRU hash: [`ResetKey`](crate::ResetKey) to [`ResetWindow`](crate::ResetWindow).
    pub const RESETS: &str = "RESETS";
    /// Per-CPU array: events lost for want of room in the ring, by kind.
    pub const DROPPED: &str = "DROPPED";
    /// Ring buffer of [`Event`](crate::Event).
    pub const EVENTS: &str = "EVENTS";
}

/// Globals of type `u32` that the loader sets: byte offsets of kernel fields,
/// and which variant of a tracepoint this kernel has.
pub mod global {
    /// `task_struct.tgid`
    pub const TASK_TGID: &str = "TASK_TGID";
    /// `task_struct.pid`
    pub const TASK_PID: &str = "TASK_PID";
    /// `task_struct.flags`
    pub const TASK_FLAGS: &str = "TASK_FLAGS";
    /// `task_struct.comm`
    pub const TASK_COMM: &str = "TASK_COMM";
    /// `task_struct.group_leader`
    pub const TASK_GROUP_LEADER: &str = "TASK_GROUP_LEADER";
    /// `task_struct.start_boottime`
    pub const TASK_START_BOOTTIME: &str = "TASK_START_BOOTTIME";
    /// `task_struct.exit_code`
    pub const TASK_EXIT_CODE: &str = "TASK_EXIT_CODE";
    /// `task_struct.signal`
    pub const TASK_SIGNAL: &str = "TASK_SIGNAL";
    /// `signal_struct.live.counter`
    pub const SIGNAL_LIVE: &str = "SIGNAL_LIVE";
    /// `signal_struct.flags`
    pub const SIGNAL_FLAGS: &str = "SIGNAL_FLAGS";
    /// `signal_struct.group_exit_code`
    pub const SIGNAL_GROUP_EXIT_CODE: &str = "SIGNAL_GROUP_EXIT_CODE";
    /// `k_sigaction.sa.sa_handler`
    pub const SIGACTION_HANDLER: &str = "SIGACTION_HANDLER";
    /// `inet_sock.inet_sport`
    pub const INET_SPORT: &str = "INET_SPORT";
    /// `sock.__sk_common.skc_net.net`
    pub const SOCK_NET: &str = "SOCK_NET";
    /// `net.ns.inum`
    pub const NET_INUM: &str = "NET_INUM";
    /// `kernel_siginfo.si_code`
    pub const SIGINFO_CODE: &str = "SIGINFO_CODE";
    /// `sock.__sk_common.skc_family`
    pub const SOCK_FAMILY: &str = "SOCK_FAMILY";
    /// `sock.__sk_common.skc_num`
    pub const SOCK_NUM: &str = "SOCK_NUM";
    /// `sock.__sk_common.skc_dport`
    pub const SOCK_DPORT: &str = "SOCK_DPORT";
    /// `sock.__sk_common.skc_daddr`
    pub const SOCK_DADDR: &str = "SOCK_DADDR";
    /// `sock.__sk_common.skc_v6_daddr`
    pub const SOCK_V6_DADDR: &str = "SOCK_V6_DADDR";
    /// `sk_buff.head`
    pub const SKB_HEAD: &str = "SKB_HEAD";
    /// `sk_buff.transport_header`
    pub const SKB_TRANSPORT: &str = "SKB_TRANSPORT";
    /// `sk_buff.network_header`
    pub const SKB_NETWORK: &str = "SKB_NETWORK";
    /// `sk_buff.dev`
    pub const SKB_DEV: &str = "SKB_DEV";
    /// `net_device.nd_net.net`
    pub const DEV_NET: &str = "DEV_NET";
    /// 1 if `tcp_send_reset` gives the reason, else 0.
    pub const RESET_HAS_REASON: &str = "RESET_HAS_REASON";
    /// 1 if `sched_process_exit` has the argument `group_dead`, else 0.
    pub const EXIT_HAS_GROUP_DEAD: &str = "EXIT_HAS_GROUP_DEAD";
    /// 1 if `mark_victim` names a task, 0 if it names a thread id.
    pub const OOM_HAS_TASK: &str = "OOM_HAS_TASK";
}
