//! Who may run the guest: the handover as two pure state machines.
//!
//! At one moment of a migration, the right to run the guest moves from one process to another, over
//! a network that loses messages. This crate decides that moment and nothing else.
//!
//! [`source::Source`] and [`destination::Destination`] take an [event](source::Event) and the time,
//! and return [actions](source::Action) for the engine to perform. They contain no socket, thread,
//! clock or randomness. Therefore the simulator in `sim` (feature `sim`, and the crate's own tests)
//! drives the same machines as the engine.
//!
//! # The handover
//!
//! ```text
//! source                                    destination
//! ------                                    -----------
//! Active      RAM, rounds        ------->   Active
//! Stopping    guest stopped
//! Releasing   disks, locks released
//! Switchover  last RAM, devices  ------->
//! Preparing   PREPARE ping       ------->   Completing  everything is loaded
//!                                           Preparing   disks, locks acquired
//!                                <-------   Prepared    PONG
//! Committing  EOF 00             ------->   Committed   guest is started
//! AwaitingAck                    <-------   Running     SHUT 0
//! Completed
//! ```
//!
//! *The commit* is the moment before the first byte of EOF is handed to the transport
//! ([`source::State::Committing`]). Before the commit, every failure and every cancel lets the
//! source resume the guest. After the commit, the source does not resume by itself unless the
//! destination has declared that it does not run the guest and never will. A SHUT other than 0 and
//! the answer *never* are such declarations.
//!
//! If the acknowledgement is lost, the source is [`Undecided`](source::State::Undecided). The guest
//! stays stopped, the source asks again over new connections, and an operator may decide.
//!
//! *A destination's answer is final.* The destination sends SHUT 0 or *committed* only when it has
//! started the guest or taken it over paused. It sends SHUT 1 or *never* only after it has given
//! its hooks back, so that the source can acquire them.
//!
//! # Postcopy
//!
//! ```text
//! Switchover  which pages are dropped, the devices  ------->  Active      loads, and asks for pages
//! Preparing   PREPARE ping           ------->   Completing, Preparing
//!                                    <-------   Prepared    PONG
//! Committing  RUN ══ the commit      ------->   Committed   guest is started
//! AwaitingAck                        <-------   Postcopy    PONG *started*
//! Postcopy    pages, requested first ------->
//!             END, EOF               ------->
//! Completed                          <-------   Running     SHUT 0
//! ```
//!
//! RUN takes the place of EOF: the commit is the first byte of the message that lets the
//! destination start the guest. A QEMU destination gets RUN inside the package with the devices, so
//! that package is the commit, and there is no prepare.
//!
//! A source that knows that the destination's guest was started never runs its own guest again,
//! whatever a peer or an operator sends. If the connection breaks then, the source is
//! [`PostcopyPaused`](source::State::PostcopyPaused). It keeps all of the guest's memory, and asks
//! whether the destination has every page.
//!
//! # With other peers
//!
//! * A QEMU destination answers PING in order, so prepare and commit work against it too. It cannot
//!   be asked again after a loss, so only an operator ends an undecided migration.
//! * A peer without return path cannot prepare or acknowledge: the source completes when EOF has
//!   been sent. That is QEMU's own, weaker guarantee: a destination that fails after EOF loses the
//!   guest.
//! * A QEMU source does not prepare, and resumes by itself if it misses SHUT. A managed destination
//!   therefore stays [`Held`](destination::State::Held) until its manager confirms that the source
//!   has completed. An unmanaged destination starts the guest and then sends SHUT 0, as QEMU does.
//!   If that SHUT is lost, two guests can run.

#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod destination;
mod limits;
pub mod machine;
#[cfg(feature = "standby")]
pub mod replica;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
pub mod source;

pub use limits::Limits;

/// Names one migration between two Sternas.
///
/// The source draws the id and sends it in the handover section. It quotes the id when it asks for
/// the migration's outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MigrationId(pub [u8; 16]);

/// A destination's answer to the status question of Sterna's extension.
///
/// The source asks over a new connection for the outcome of one migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// The destination runs or ran the guest, or has taken it over paused.
    Committed,
    /// As [`Status::Committed`], in postcopy. The destination may lack pages that only the source
    /// has.
    Incomplete,
    /// The destination does not run the guest and never will. It has released the guest's disks and
    /// locks.
    Never,
    /// The outcome is not certain yet: ask again.
    Pending,
    /// The peer knows no such migration. This decides nothing, because the process that knew the
    /// migration may be another one.
    Unknown,
}
