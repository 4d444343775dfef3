//! The words for states and outcomes of a protection.

use sterna_standby::machines::primary::{Outcome, State};

/// The state as one word or two.
pub(super) fn word(state: State) -> &'static str {
    match state {
        State::Seeding => "seeding",
        State::Protected => "protected",
        State::Ending => "ending",
        State::HandingOver => "handing over",
        State::Given => "given",
        State::Asking => "asking",
        State::Alone => "alone",
        State::HandedOver => "handed over",
        State::Lost => "lost",
        State::Failed => "failed",
    }
}

/// The outcome, in the words of [`word`].
pub(super) fn outcome(outcome: Outcome) -> &'static str {
    word(match outcome {
        Outcome::Alone(_) => State::Alone,
        Outcome::HandedOver => State::HandedOver,
        Outcome::Lost => State::Lost,
        Outcome::Failed(_) => State::Failed,
    })
}
