//! What an unmodified QEMU needs beside it to be the primary of a protection (`specs/replica.md`).
//!
//! [`OutputGate`] holds what its network card says until the checkpoint behind it is held.

mod gate;

pub use gate::{GateStatistics, OutputGate};
