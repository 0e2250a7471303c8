//! What NATS does to a daemon and a router, and what they make of it.

mod stage;

mod ack_lost;
mod bucket_deleted;
mod bucket_purged;
mod full_store;
mod hung_server;
mod jetstream_off;
mod leader_killed;
mod login_refused;
mod misshapen_bucket;
mod silent_network;
mod slow_server;
mod wiped_server;
