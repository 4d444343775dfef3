//! COLO: a primary sends checkpoints after the acknowledgement of a migration (`specs/colo.md`).
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
//! - [`Message`] encodes and decodes the messages.
//! - [`StandbyOrder`] is the state machine of the standby: it names the next step and refuses every other one.
//! - [`DeviceList`] finds the sections of a checkpoint's device state.
//! - [`MainDecoder::begin_checkpoint`](crate::main::MainDecoder::begin_checkpoint) reads the RAM between
//!   VMSTATE_SEND and VMSTATE_SIZE.

mod devices;
mod message;
mod order;

pub use devices::{CheckpointDevices, DeviceList, KnownDevice};
pub use message::{Message, MessageKind};
pub use order::{Due, OrderError, StandbyOrder};
