//! A destination that has no VM yet, and makes it from the source's configuration (specs/extension.md §15).
//!
//! Until the VM exists, a [`Shared`] without a VM accepts the connections. The greeter of a main channel reads the
//! configuration ([`prologue`]). The thread `configure` makes the VM and the migration's own [`Shared`] ([`making`]).
//! From then on this is the current one ([`Shared::current`]), and the main channel and all others are greeted there as
//! if they had just connected.

mod handing_over;
mod listen;
mod making;
mod no_vm;
mod prologue;

use std::sync::Arc;

use super::awaited_vm::{Configuring, make};
use super::greeting::Greeting;
use super::shared::Shared;
use crate::error::Ending;
use crate::interruption::Break;
use crate::threads::tried;
use prologue::Prologue;

/// Greets the connection again, as one of the migration whose VM is made.
pub(super) type Greet<'a> = &'a dyn Fn(&Arc<Shared>) -> Result<(), Break>;

/// Greets a main channel while there is no VM, and afterwards as the main channel of the migration.
pub(super) fn main_channel(
    shared: &Arc<Shared>,
    configuring: &Configuring<Shared>,
    greeting: &Greeting<'_>,
    greet: Greet<'_>,
) -> Result<(), Break> {
    let channel = greeting.channel;
    let mut prologue = Prologue::new(channel, shared.params.limits.setup);
    let made = prologue.read().map_err(Break::from).and_then(|configuration| {
        // A source whose settings do not fit leaves the callback to the next source.
        let settings = configuring.agree(&configuration.settings)?;
        let jobs = configuring.claim(channel)?;
        Ok((jobs, settings, configuration.configuration))
    });
    let (jobs, settings, configuration) = match made {
        Ok(made) => made,
        Err(error) => {
            prologue.refuse(&error);
            return Err(error);
        }
    };
    match make(shared, &jobs, settings, configuration) {
        Ok(made) => {
            let begun = tried("the main channel of a VM that was just made", || {
                made.set_only_main(channel);
                prologue.accept()?;
                Break::failure(greet(&made))
            });
            // The greeter of the last channel begins the migration, perhaps after this.
            if !made.places.is_complete() {
                // The VM exists and belongs to this source, so that no other can follow.
                made.end_before_it_began(begun.err().unwrap_or_else(|| Ending::Lost.into()));
            }
            Ok(())
        }
        Err(error) => {
            let error = Break::from(error);
            prologue.refuse(&error);
            if let Break::Failed(error) = error {
                shared.end_before_it_began(error);
            }
            Ok(())
        }
    }
}

/// Keeps a multifd channel until the VM is made, and greets it then.
pub(super) fn multifd(
    shared: &Arc<Shared>,
    configuring: &Configuring<Shared>,
    greeting: &Greeting<'_>,
    greet: Greet<'_>,
) -> Result<(), Break> {
    let channel = greeting.channel;
    let setup = shared.params.limits.setup;
    shared.greetings.lane_came();
    greet(&configuring.wait(channel, setup)?)
}
