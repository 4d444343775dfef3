//! A guest that is protected by a standby.
//!
//! | module | contains |
//! | --- | --- |
//! | `contact` | the connection between primary and standby beside the guest's state, and who may run the guest |

mod contact;

pub use contact::{
    Claims, ContactError, ContactState, PrimaryContact, PrimaryGuest, Protection, Secret, StandbyContact,
    StandbyGuest, Terms,
};
/// The machines' states, events and outcomes.
pub use sterna_proto::replica::{Ruling, primary, standby};
