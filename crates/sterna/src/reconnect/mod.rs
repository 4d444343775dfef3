//! Reconnection after a lost connection: the parts that both sides of a migration need, whatever they transfer
//! (specs/extension.md §13).
//!
//! A *session* is the set of channels that a migration uses at a time. The first session has the number 0. When
//! a session is lost, the source connects again ([`dial`]), and proves that it is the migration's source. The
//! destination admits only this source, and one session after the other ([`Lobby`]). Its answer names the pages
//! that it has received ([`HeldPages`]). From this the source computes the missing pages ([`Unconfirmed`]).
//!
//! # Which pages are missing
//!
//! It is not sufficient that a page has arrived, because the source may have sent a newer version since.
//! Therefore both sides count rounds. Within a round a page is sent at most once. The destination reads no page
//! of the next round before the end of the current one.
//!
//! The destination counts the rounds of a session whose end it has read. It records the pages that arrived
//! completely since the last round's end. The source keeps the pages of each round until it knows that the
//! destination has read the round's end. Then the missing pages are:
//!
//! * of a round whose end was read: none,
//! * of the next round: the pages that are not recorded,
//! * of later rounds: all pages.
//!
//! The source separates at most four rounds. If a destination lags further behind, the newest rounds share a
//! bitmap, and all their pages count as missing. A destination that confirms no round therefore costs the
//! source only a bounded amount of memory.
//!
//! Pages that the guest has written after they were read for a round are found by the dirty tracking, as
//! without reconnection.

use std::time::Duration;

#[cfg(feature = "reconnect")]
mod dial;
mod held;
mod lobby;
#[cfg(feature = "reconnect")]
mod unconfirmed;

/// A connection whose peer acknowledges nothing for this long is replaced, if both sides can reconnect.
///
/// A new connection may take another path. On kernels before 6.15 it also starts earlier than a retransmission
/// on the old connection.
pub(crate) const SILENCE: Duration = Duration::from_secs(4);

#[cfg(feature = "reconnect")]
pub(crate) use dial::{DialError, Dialled, Dialling, give_up};
pub(crate) use held::HeldPages;
#[cfg(feature = "reconnect")]
pub(crate) use held::block_pages;
pub(crate) use lobby::{Admission, Assembled, Lobby};
#[cfg(feature = "reconnect")]
pub(crate) use unconfirmed::{Missing, Unconfirmed};
