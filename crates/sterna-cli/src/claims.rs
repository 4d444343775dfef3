//! Claims of a protection's generation, for the primary and for the standby.

use std::sync::Arc;

use sterna_arbiter::{Arbiter, Claim, Claimant, Generation, GuestName, Identity, Role};
use sterna_standby::machines::Ruling;
use sterna_standby::{ArbiterIdentity, ArbiterStore, Claims, Protection};

/// The claim of `protection` by `role`. The claims of both sides have the same guest name and generation.
pub fn claim(role: Role, protection: Protection) -> Claim {
    Claim {
        guest: GuestName::of_id(protection.id),
        generation: Generation::new(protection.generation),
        claimant: Claimant::of_this_process(role),
    }
}

/// Connects the protection's claim to `arbiter`. `name` is the arbiter as the operator wrote it.
pub fn claims(
    name: impl Into<String>,
    arbiter: &Arc<dyn Arbiter>,
    role: Role,
    protection: Protection,
) -> Arc<dyn Claims> {
    let (arbiter, claim) = (Arc::clone(arbiter), claim(role, protection));
    Arc::new(ArbitersClaims { name: name.into(), arbiter, claim })
}

struct ArbitersClaims {
    name: String,
    arbiter: Arc<dyn Arbiter>,
    claim: Claim,
}

impl Claims for ArbitersClaims {
    fn claim(&self) -> Result<Ruling, String> {
        match self.arbiter.claim(&self.claim) {
            Ok(sterna_arbiter::Ruling::Won) => Ok(Ruling::Won),
            Ok(sterna_arbiter::Ruling::Lost { .. }) => Ok(Ruling::Lost),
            Err(error) => Err(error.to_string()),
        }
    }

    fn arbiter(&self) -> Result<ArbiterIdentity, String> {
        let found = self.arbiter.identity(&self.claim.guest, self.claim.generation);
        let store = match found.map_err(|error| error.to_string())? {
            Identity::Is(token) => ArbiterStore::Token(token),
            _ => ArbiterStore::Nothing,
        };
        // The wire format limits the length of the name and allows no NUL. The name is only shown to people,
        // so cutting it is safe.
        let name = self.name.chars().filter(|character| *character != '\0');
        let mut room = ArbiterIdentity::MOST_NAME_BYTES;
        let name = name.take_while(|character| {
            let fits = character.len_utf8() <= room;
            room = room.saturating_sub(character.len_utf8());
            fits
        });
        Ok(ArbiterIdentity { name: name.collect(), store })
    }

    fn look(&self) -> Result<(), String> {
        let Claim { guest, generation, .. } = &self.claim;
        self.arbiter.identity(guest, *generation).map_err(|error| error.to_string())?;
        self.arbiter.forget_identity(guest, *generation);
        Ok(())
    }

    fn arbiters_compared(&self) {
        self.arbiter.forget_identity(&self.claim.guest, self.claim.generation);
    }
}
