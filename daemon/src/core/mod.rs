//! The decision core: evidence in, effects out. No sockets, no clock of its own.
pub mod evidence;
pub use evidence::{Evidence, Exit, HealthRole, Kind, Nanos, ProcessId, WorkerId};
