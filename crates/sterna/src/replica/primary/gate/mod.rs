//! Where a protected guest's output waits until the checkpoint after it is held.
//!
//! | module | contains |
//! | --- | --- |
//! | `epoch_gate` | what every gate does |
//! | `waiting` | what waits, in order, and whether it may leave |
//! | `outlet` | pieces that wait, and how they leave |
//! | `bytes`, `packets` | the gates of a console and of network cards |
//! | `joined` | several gates as one |

mod bytes;
mod epoch_gate;
mod joined;
mod outlet;
mod packets;
mod waiting;

pub use bytes::ByteGate;
pub use epoch_gate::{EpochGate, GateStatistics, MaySay, NoOutput};
pub use joined::JoinedGate;
pub use packets::{PacketGate, PacketLane};
