//! A guest that is protected by a standby.
//!
//! [`Primary`] protects a guest of this process: it seeds a standby and sends checkpoints (`specs/replica.md §4`). An unmodified QEMU 11
//! with `x-colo` does the same (`specs/colo.md`).
//!
//! [`Standby`] holds the last checkpoint, and runs nothing. The seeding is received as any opaque machine is ([`crate::opaque`]), into
//! memory. Then checkpoints come, over the main channel alone or with multifd. RAM is here once. The pages of the checkpoint that is
//! arriving go into a redo journal with a limit. When all of it has come and is checked, the checkpoint is *held*: the standby promises so
//! (RECEIVED), lets the primary's guest go on (LOADED), and copies the journal to RAM. A checkpoint that is cut off is dropped whole, and
//! the one before stays.
//!
//! Who may take over is decided elsewhere. Where nobody speaks with the primary, an operator decides ([`TakeoverPermission`]). With
//! [`Standby::protect`] primary and standby are in contact beside the guest's state ([`PrimaryContact`], [`StandbyContact`]), and
//! [`machines`] decide, with an arbiter's claim. The guest then goes on as a [`Survivor`]: an image ([`ImageSurvivor`]), or a VM
//! that waits for it.
//!
//! | module | contains |
//! | --- | --- |
//! | `primary` | a guest of this process that a standby protects: seeding, checkpoints, output |
//! | `contact` | the connection between primary and standby beside the guest's state, and who may run the guest |
//! | `standby` | the handle |
//! | `protected` | the contact at the standby's address, joined with what is held |
//! | `takeover` | by an operator's word |
//! | `survivor`, `vm_survivor`, `held` | where the guest goes on: an image, a VM of this process; the guest as it is taken over |
//! | `store`, `witness` | what is held, and when a checkpoint counts as held |
//! | `stream_sink` | what is held of devices' streams goes there |
//! | `journal`, `gate` | pages of the arriving checkpoint, and when they may come |
//! | `disk` | the guest's disks, as the primary writes them |
//! | `lane` | where a lane's pages go |
//! | `target` | the seeding |

mod contact;
mod disk;
mod gate;
mod held;
mod journal;
mod lane;
mod primary;
mod protected;
mod standby;
mod store;
mod stream_sink;
mod survivor;
mod takeover;
mod target;
mod vm_survivor;
mod witness;

pub use crate::outgoing::protection::{CheckpointCopy, CheckpointMode, MOST_IN_FLIGHT};
pub use contact::{
    Claims, ContactError, ContactState, PrimaryContact, PrimaryGuest, Protection, Secret, StandbyContact,
    StandbyGuest, Terms, new_protection,
};
pub use disk::{DiskFile, StandbyDisk};
pub use held::{HeldCheckpoint, HeldDevice, HeldGuest};
pub use primary::{
    ByteGate, DeltaStatistics, EpochGate, GateStatistics, Guardians, JoinedGate, LEAST_CHECKPOINT_DELAY,
    MaySay, NoOutput, PacketGate, PacketLane, Primary, PrimaryOptions, PrimaryStatistics, ProtectError,
};
pub use protected::ContactRules;
pub use standby::{Standby, StandbyOptions, StandbyState, StandbyStatistics};
/// Who may run the guest: states, events and outcomes.
pub use sterna_proto::replica as machines;
pub use survivor::{ImageSurvivor, Survivor};
pub use takeover::{OperatorsWord, TakenOver, TakeoverError, TakeoverPermission};
pub use vm_survivor::VmSurvivor;
