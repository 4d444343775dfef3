//! The migration commands of a monitor, for any VMM.
//!
//! A VMM implements [`MonitoredVm`], creates one [`MigrationControl`] per VM, and passes it to a
//! [`Server`](crate::Server) as its handler. Several servers may share it. The control stores the operators' settings,
//! starts migrations, and sends their events to every client.
//!
//! If QEMU has no name for a state of Sterna, QEMU's nearest name is used, and an additional member has the rest. So
//! programs that are written for QEMU continue to work:
//!
//! * *undecided* (specs/stream.md §5, docs/design/handover.md): `status` stays `device`,
//!   `x-sterna-undecided` is true, `error-desc` contains advice, and the event `X_STERNA_UNDECIDED` is sent;
//!   [`x-sterna-decide`](GuestAt) ends it.
//! * *held*: `status` is `completed`, the run state `paused`, `x-sterna-held` true; `cont` starts the guest.
//!   `migrate_cancel` discards it only with `"x-sterna-force": true`, because it may be the only copy. `quit` ends
//!   the VM together with its guest.
//!
//! * *RDMA*: `x-sterna-rdma` contains the statistics (specs/stream.md §8.3). A destination that listens at `rdma:`
//!   reports the address in `x-sterna-address`, because QEMU's `socket-address` has no RDMA.
//!
//! * *protection*: with the capability `x-colo`, `migrate` protects the guest by a standby, and `migrate-incoming`
//!   makes this VM the standby of another VM's guest ([`ProtectionMeans`]). `x-colo-lost-heartbeat` forces nothing:
//!   the standby's answer or the arbiter decides.
//!
//! If QEMU ignores a command silently, Sterna refuses it and gives advice, for example for `cont` of a guest that has
//! left. The capability `return-path` is on unless an operator switches it off. In QEMU it is off by default.

mod address;
mod announcing;
mod capabilities;
mod colo;
mod commands;
mod control;
mod custody;
pub(crate) mod declared;
mod devices;
mod dirty_limit;
mod dirty_rate;
mod engine;
pub mod events;
mod hmp;
mod numbers;
mod objects;
mod parameters;
mod protected;
mod protection;
mod qom;
mod query;
pub mod rdma;
mod real;
mod refusal;
mod relay;
mod vm;

pub use address::{from_channels, from_uri};
pub use announcing::Announcing;
pub use capabilities::{CAPABILITIES, CapabilitySet, CapabilitySpec, Support};
pub use control::MigrationControl;
pub use declared::COMMANDS;
pub use engine::{Engine, GuestAt, Outgoing, Receiving};
pub use hmp::{HUMAN_COMMANDS, HumanCommand, parse_number, parse_size};
pub use parameters::{Change, PARAMETERS, ParameterSet, ParameterSpec, Range, Unit, parameter};
pub use protection::{ClaimsOf, Decide, Protection, ProtectionEnd, ProtectionMeans, SayAgain, Side};
pub use query::status_word;
pub use real::SternaEngine;
pub use refusal::{advice as advice_sentence, sentence as refusal_sentence};
pub use vm::{BlockDevice, MonitoredVm};
