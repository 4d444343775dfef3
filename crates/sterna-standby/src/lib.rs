//! Protection of a guest by a standby.
//!
//! [`Primary`] protects a guest of this process: it seeds a standby and sends checkpoints (`specs/replica.md §4`). An
//! unmodified QEMU 11 with `x-colo` can also be the primary (`specs/colo.md`).
//!
//! [`Standby`] holds the last checkpoint, and runs no guest. It receives the seeding like any opaque machine
//! ([`sterna_opaque`]), into memory. Checkpoints follow, over the main channel alone or with multifd. The standby has
//! one copy of RAM. The pages of an arriving checkpoint go into a redo journal with a limit. When the whole
//! checkpoint has arrived and is checked, it is *held*: the standby promises that (RECEIVED), lets the primary's
//! guest resume (LOADED), and copies the journal to RAM. A checkpoint that is cut off is dropped completely, and the
//! previous one stays held.
//!
//! Other code decides which side may take over. Without contact to the primary, an operator decides
//! ([`TakeoverPermission`]). With [`Standby::protect`], primary and standby are in contact over a separate connection
//! ([`PrimaryContact`], [`StandbyContact`]). Then [`machines`] decide, with an arbiter's claim. After a takeover the
//! guest continues as a [`Survivor`]: an image ([`ImageSurvivor`]), or a VM that waits for it.
//!
//! | module | contains |
//! | --- | --- |
//! | `primary` | a guest of this process that a standby protects: seeding, checkpoints and the copies of their pages, output |
//! | `contact` | the separate connection between primary and standby, and which side may run the guest |
//! | `standby` | the handle of a standby |
//! | `protected` | the contact at the standby's address, joined with the held checkpoint |
//! | `takeover` | takeover by an operator's decision |
//! | `survivor`, `vm_survivor`, `held` | the guest after a takeover (image, or VM of this process); the held checkpoint |
//! | `store`, `witness` | the held checkpoint, and the decision that a checkpoint counts as held |
//! | `stream_sink` | the destination of the devices' streams in a checkpoint |
//! | `journal`, `gate` | pages of the arriving checkpoint, and the times at which lanes may deliver them |
//! | `disk` | the guest's disks, which the primary writes |
//! | `lane` | the destination of a lane's pages |
//! | `hang` | when missing checkpoints are a problem |
//! | `last_times` | percentiles of the last delays |
//! | `target` | the seeding |
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod contact;
mod disk;
mod gate;
mod hang;
mod held;
mod journal;
mod lane;
mod last_times;
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

pub use contact::{
    Claims, ContactError, ContactState, PrimaryContact, PrimaryGuest, Protection, Secret, StandbyContact,
    StandbyGuest, Terms, Watchdog, new_protection,
};
pub use disk::{DiskFile, StandbyDisk};
pub use hang::checkpoints_hang;
pub use held::{HeldCheckpoint, HeldDevice, HeldGuest};
pub use last_times::LastTimes;
pub use primary::{
    ByteGate, CheckpointCopy, DeltaStatistics, EpochGate, GateStatistics, Guardians, JoinedGate,
    LEAST_CHECKPOINT_DELAY, MaySay, NoOutput, PacketGate, PacketLane, Primary, PrimaryOptions,
    PrimaryStatistics, ProtectError,
};
pub use protected::ContactRules;
pub use standby::{Standby, StandbyOptions, StandbyState, StandbyStatistics};
pub use sterna::internals::{CheckpointMode, MOST_IN_FLIGHT};
/// Machines that decide which side may run the guest: their states, events and outcomes.
pub use sterna_proto::replica as machines;
/// A side's statement about its arbiter in the greeting between primary and standby.
pub use sterna_wire::replica::{ArbiterIdentity, ArbiterStore};
pub use survivor::{ImageSurvivor, Survivor};
pub use takeover::{OperatorsWord, TakenOver, TakeoverError, TakeoverPermission};
pub use vm_survivor::VmSurvivor;
