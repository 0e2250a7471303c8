//! The main job, end to end: a real kernel, a real nats-server, real processes and sockets. An
//! engine dies in the middle of an answer, and the client's transcript equals the uninterrupted
//! one, token by token.
//!
//! They need root (for eBPF), a nats-server, and the binaries `lastgasp`, `lastgasp-router` and
//! `mock-engine`; `cargo xtask test` sees to all of it.

mod scene;

mod another_program;
mod api_server_killed_while_core_lives;
mod bad_signals;
mod crowd;
mod daemon_comes_early;
mod daemon_killed_at_every_effect;
mod daemon_restarts;
mod daemon_sees_less;
mod daemon_stops;
mod daemon_without_ebpf;
mod daemon_without_room;
mod declared_elsewhere;
mod declared_worker;
mod dynamo;
mod engine_core_killed;
mod floods;
mod history;
mod hostile_names;
mod infera;
mod killed_as_it_is_listed;
mod large_bodies;
mod many_restarts;
mod many_workers;
mod nats;
mod nats_credentials;
mod nats_down_at_the_death;
mod nats_permissions;
mod notifications;
mod observer;
mod on_lost;
mod operator_asks;
mod operator_drains;
mod operator_withdraws;
mod restart_with_late_evidence;
mod rude_clients;
mod segv_with_core_dump;
mod severed_connections;
mod sidecar;
mod sigterm_drains;
mod stale_pid_file;
mod status_socket;
mod stopped_engine;
mod stuck_neighbour;
mod supervisor_terminated;
mod systemd;
mod title_of_another_user;
mod two_workers_of_one_process;
mod unread_log;
mod unrelated_child_exits;
mod whole_tree_killed;
