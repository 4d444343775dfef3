//! COLO: the messages behind the acknowledgement of a migration, by which a primary sends checkpoints (`specs/colo.md`).
//!
//! ```text
//! primary                    standby
//! EOF, description ──────►
//!                  ◄──────   SHUT 0, CHECKPOINT_READY
//! REQUEST          ──────►                               every checkpoint
//!                  ◄──────   REPLY
//! VMSTATE_SEND, RAM, VMSTATE_SIZE, devices ──────►
//!                  ◄──────   RECEIVED, LOADED
//! ```
//!
//! [`Message`] is the codec. [`StandbyOrder`] is the order at the standby: a pure machine that says what is due and
//! refuses everything else. [`DeviceList`] finds the sections of a checkpoint's device state. RAM between VMSTATE_SEND and
//! VMSTATE_SIZE is read by [`MainDecoder::begin_checkpoint`](crate::main::MainDecoder::begin_checkpoint).

mod devices;
mod message;
mod order;

pub use devices::{CheckpointDevices, DeviceList, KnownDevice};
pub use message::{Message, MessageKind};
pub use order::{Due, OrderError, StandbyOrder};
