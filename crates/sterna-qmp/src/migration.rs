//! The migration commands of a monitor, for any VMM.
//!
//! A VMM implements [`MonitoredVm`], makes one [`MigrationControl`] per VM, and gives it to a
//! [`Server`](crate::Server) as its handler; several servers may share it. The control holds what operators
//! set, starts migrations, and tells every client what happens to them.
//!
//! Where Sterna says more than QEMU has words for, QEMU's word is kept and a member beside it tells the
//! rest, so that programs written for QEMU go on working:
//!
//! * *undecided* (specs/stream.md §5, ARCHITECTURE.md *Handover*): `status` stays `device`,
//!   `x-sterna-undecided` is true, `error-desc` says what to do, and the event `X_STERNA_UNDECIDED` is sent;
//!   [`x-sterna-decide`](GuestAt) ends it.
//! * *held*: `status` is `completed`, the run state `paused`, `x-sterna-held` true; `cont` starts the guest.
//!   `migrate_cancel` discards it only with `"x-sterna-force": true`, as it may be the only copy; `quit` ends the VM with
//!   whatever guest it has.
//!
//! * *RDMA*: `x-sterna-rdma` has what it did (specs/stream.md §8.3). A destination that listens at `rdma:` says where in
//!   `x-sterna-address`, since QEMU's `socket-address` has no RDMA.
//!
//! * *protection*: with the capability `x-colo`, `migrate` protects the guest by a standby, and `migrate-incoming` makes this VM the standby of
//!   another's guest ([`ProtectionMeans`]). `x-colo-lost-heartbeat` forces nothing: the standby's word or the arbiter decides.
//!
//! Where QEMU does nothing without saying so, Sterna refuses and says what to do: `cont` of a guest that has left. The
//! capability `return-path` is on unless an operator switches it off; QEMU has it off.

mod address;
mod announcing;
mod capabilities;
mod colo;
mod commands;
mod control;
mod custody;
mod devices;
mod dirty_limit;
mod dirty_rate;
mod engine;
mod hmp;
mod objects;
mod parameters;
mod protected;
mod protection;
mod qom;
mod query;
pub(crate) mod rdma;
mod real;
mod refusal;
mod relay;
mod vm;

pub use address::{from_channels, from_uri};
pub use announcing::Announcing;
pub use capabilities::{CAPABILITIES, CapabilitySet, Support};
pub use control::MigrationControl;
pub use engine::{Engine, GuestAt, Outgoing, Receiving};
pub use hmp::{parse_number, parse_size};
pub use parameters::{Change, PARAMETERS, ParameterSet, ParameterSpec, Range, Unit, parameter};
pub use protection::{ClaimsOf, Decide, Protection, ProtectionEnd, ProtectionMeans, SayAgain, Side};
pub use query::status_word;
pub use real::SternaEngine;
pub use refusal::{advice as advice_sentence, sentence as refusal_sentence};
pub use vm::{BlockDevice, MonitoredVm};
