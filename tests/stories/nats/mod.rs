//! What NATS does to a daemon and a router, and what they make of it.

pub(crate) mod stage;

mod ack_lost;
mod bucket_deleted;
mod bucket_purged;
mod consumer_limit;
mod full_store;
mod hung_server;
mod jetstream_off;
mod leader_killed;
mod lease_of_another_machine;
mod leases_lapse;
mod left_unconfigured;
mod login_refused;
mod many_reconnects;
mod misshapen_bucket;
mod old_server;
mod partition;
mod registers_itself_again;
mod replicas;
mod sidecar;
mod silent_network;
mod slow_server;
mod slow_watcher;
mod wiped_server;
