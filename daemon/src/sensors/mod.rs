//! Sensors report [`crate::core::Evidence`]. They never decide.

pub mod health;
pub mod pidfd;
pub mod proc;
mod sys;
