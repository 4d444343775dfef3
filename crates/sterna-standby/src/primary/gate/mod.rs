//! Gates: they keep a protected guest's output until the next checkpoint is held.
//!
//! | module | contains |
//! | --- | --- |
//! | `epoch_gate` | the interface of every gate |
//! | `waiting` | the waiting pieces in order, and the decision which may leave |
//! | `outlet` | the waiting pieces, and the thread that sends them |
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
