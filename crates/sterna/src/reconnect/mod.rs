//! A lost connection is made anew: what both sides of a migration need for it, whatever they send (specs/extension.md §13).
//!
//! A *session* is the channels that a migration uses at a time. The first is number 0. When one is lost, the source dials again
//! ([`dial`]), and proves that it is the migration's source. The destination lets nobody else in, and one session after the other
//! ([`Lobby`]). Its answer says which pages it holds ([`HeldPages`]), and with that the source knows what is missing ([`Unconfirmed`]).
//!
//! # Which pages are missing
//!
//! That a page came is not enough: it may have come in an older version than the source has sent. So both sides go by rounds. Within a
//! round a page is sent once at most, and none of the next round is read before the end of the last one. The destination counts the
//! rounds of a session whose end it has read, and notes the pages that came whole since. The source keeps the pages of each round until
//! it knows that the destination has read the round's end. Then, of
//!
//! * a round whose end was read, nothing is missing;
//! * the round after it, what is not noted;
//! * later rounds, everything.
//!
//! What the guest has written since a page was read for its round is the dirty tracking's business, as ever.

mod dial;
mod held;
mod lobby;
mod unconfirmed;

pub(crate) use dial::{DialError, Dialled, Dialling, give_up};
pub(crate) use held::{HeldPages, block_pages};
pub(crate) use lobby::{Admission, Assembled, Lobby};
pub(crate) use unconfirmed::{Missing, Unconfirmed};
