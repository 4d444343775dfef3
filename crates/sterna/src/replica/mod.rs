//! A guest that is protected by a standby.
//!
//! [`Primary`] protects a guest of this process (`specs/replica.md §3`). [`Standby`] holds the last checkpoint of a guest that runs elsewhere, and runs nothing. The primary is an unmodified QEMU 11 with
//! `x-colo` (`specs/colo.md`). Its seeding is received as any opaque machine is ([`crate::opaque`]), into memory. Then it sends
//! checkpoints, over the main channel alone or with multifd. RAM is here once. The pages of the checkpoint that is arriving go into
//! a redo journal with a limit. When all of it has come and is checked, the checkpoint is *held*: the standby promises so
//! (RECEIVED), lets the primary's guest go on (LOADED), and copies the journal to RAM. A checkpoint that is cut off is dropped
//! whole, and the one before stays. [`Standby::takeover`] makes an image of the last held checkpoint, which QEMU loads.
//!
//! Who may take over is decided elsewhere: [`TakeoverPermission`]. [`PrimaryContact`] and [`StandbyContact`] decide it between two
//! sides that are in contact beside the guest's state, by [`machines`].
//!
//! | module | contains |
//! | --- | --- |
//! | `primary` | a guest of this process that a standby protects: seeding, checkpoints, output |
//! | `contact` | the connection between primary and standby beside the guest's state, and who may run the guest |
//! | `standby` | the handle |
//! | `takeover` | may it, and the image |
//! | `store` | what is held, and when a checkpoint counts as held |
//! | `journal`, `gate` | pages of the arriving checkpoint, and when they may come |
//! | `lane` | where a lane's pages go |
//! | `target` | the seeding |

mod contact;
mod gate;
mod journal;
mod lane;
mod primary;
mod standby;
mod store;
mod takeover;
mod target;

pub use contact::{
    Claims, ContactError, ContactState, PrimaryContact, PrimaryGuest, Protection, Secret, StandbyContact,
    StandbyGuest, Terms,
};
pub use primary::{
    ByteGate, EpochGate, GateStatistics, Guardians, LEAST_CHECKPOINT_DELAY, MaySay, NoOutput, Primary,
    PrimaryOptions, PrimaryStatistics, ProtectError,
};
pub use standby::{Standby, StandbyOptions, StandbyState, StandbyStatistics};
/// Who may run the guest: states, events and outcomes.
pub use sterna_proto::replica as machines;
pub use takeover::{HeldCheckpoint, OperatorsWord, TakenOver, TakeoverError, TakeoverPermission};
