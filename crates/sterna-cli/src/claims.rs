//! Claims of a protection's generation, by either of its sides.

use std::sync::Arc;

use sterna::replica::machines::Ruling;
use sterna::replica::{Claims, Protection};
use sterna_arbiter::{Arbiter, Claim, Claimant, Generation, GuestName, Role};

/// The claim of a protection for `role`. The other side's has the same name and generation.
pub fn claim(role: Role, protection: Protection) -> Claim {
    Claim {
        guest: GuestName::of_id(protection.id),
        generation: Generation::new(protection.generation),
        claimant: Claimant::of_this_process(role),
    }
}

/// Asks `arbiter` for it.
pub fn claims(arbiter: &Arc<dyn Arbiter>, role: Role, protection: Protection) -> Arc<dyn Claims> {
    let (arbiter, claim) = (Arc::clone(arbiter), claim(role, protection));
    Arc::new(move || match arbiter.claim(&claim) {
        Ok(sterna_arbiter::Ruling::Won) => Ok(Ruling::Won),
        Ok(sterna_arbiter::Ruling::Lost { .. }) => Ok(Ruling::Lost),
        Err(error) => Err(error.to_string()),
    })
}
