//! Who may run the guest: the handover as two pure state machines.
//!
//! At one moment of a migration, the right to run the guest moves from one
//! process to another, over a network that loses messages. This crate decides
//! that moment and nothing else. [`source::Source`] and
//! [`destination::Destination`] take an [event](source::Event) and the time,
//! and give back [actions](source::Action) for the engine to perform. They
//! hold no socket, thread, clock or randomness, so the simulator in `sim`
//! (feature `sim`, and the crate's own tests) drives the very machines that
//! the engine runs.
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
//! *The commit* is the moment before the first byte of EOF is handed to the
//! transport ([`source::State::Committing`]). Before it, every failure and
//! every cancel lets the source run on. From it on the source never runs the
//! guest unless the destination has said, in a SHUT other than 0 or in an
//! answer *never*, that it does not run the guest and never will. If the
//! acknowledgement is lost, the source is
//! [`Undecided`](source::State::Undecided): the guest stays stopped, the
//! source asks again over new connections, and an operator may decide.
//!
//! *A destination's answer is final.* It sends SHUT 0 or *committed* only
//! when the guest has been started or taken over paused, and SHUT 1 or
//! *never* only when its hooks are back, so that the source can take them.
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
//! RUN takes the place of EOF: the first byte of the message that may start
//! the destination is the commit. With a QEMU destination that is the
//! package with the devices, because it has RUN in it; there is no prepare.
//! A source that has learned that the destination's guest was started never
//! runs its own again, whoever says what. If the connection breaks then, the
//! source is [`PostcopyPaused`](source::State::PostcopyPaused), keeps all of
//! the guest's memory, and asks whether the destination has everything.
//!
//! # With other peers
//!
//! * A QEMU destination answers PING in order, so prepare and commit work
//!   against it too; it cannot be asked again, so only an operator ends an
//!   undecided migration.
//! * A peer without return path cannot prepare or acknowledge: the source
//!   completes when EOF has been sent. That is QEMU's own, weaker guarantee:
//!   a destination that fails after that loses the guest.
//! * A QEMU source does not prepare, and resumes by itself if it misses
//!   SHUT. Managed, our destination stays [`Held`](destination::State::Held)
//!   until it is told that the source has completed; unmanaged it starts the
//!   guest and then says SHUT 0, as QEMU does, and two guests can run if that
//!   SHUT is lost.

#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod destination;
mod limits;
pub mod replica;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
pub mod source;

pub use limits::Limits;

/// Names one migration between two Sternas: drawn by the source, sent in the
/// handover section, and quoted when the source asks what became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MigrationId(pub [u8; 16]);

/// A destination's answer to "what became of this migration?"
/// (the status question of Sterna's extension, asked over a new connection).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// The destination runs or ran the guest, or has taken it over paused.
    Committed,
    /// As [`Status::Committed`], in postcopy, and pages may be missing that
    /// only the source has.
    Incomplete,
    /// The destination does not run the guest and never will; it holds none
    /// of the guest's disks and locks any more.
    Never,
    /// Neither is certain yet: ask again.
    Pending,
    /// The peer knows no such migration. Says nothing: the process that knew
    /// it may be another one.
    Unknown,
}
