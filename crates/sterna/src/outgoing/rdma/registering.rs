//! The thread that registers this side's memory.

use sterna_transport::rdma::{Access, Memory, Registration};
use sterna_wire::rdma::{BlockRange, Step};

use super::work::Work;
use crate::error::MigrationError;

/// Registers windows, and deregisters windows that are given back, until no more pages follow.
pub(in crate::outgoing) fn register(work: &Work) -> Result<(), MigrationError> {
    while let Some(step) = work.next_own_step() {
        let done = match step {
            Step::Register(windows) => windows.into_iter().try_for_each(|window| {
                let registration = registered(work, window)?;
                work.registered(window, registration)
            }),
            Step::GiveBack(windows) => work.given_back(&windows).map(|registrations| {
                drop(registrations);
                work.rdma.counts.deregistered(windows.iter().map(|window| window.length).sum());
            }),
            Step::Wait => Ok(()),
        };
        done.inspect_err(|error| work.fail(error.clone()))?;
    }
    Ok(())
}

fn registered(work: &Work, window: BlockRange) -> Result<Registration, MigrationError> {
    let block = work.ram.block(window.block);
    let memory = Memory::of_block(block, window.start, window.length as usize)?;
    let registration = work.rdma.adapter().register(memory, Access::SOURCE);
    let registration = registration.map_err(|error| work.rdma.failed()(error.into()))?;
    work.rdma.counts.registered(window.length);
    Ok(registration)
}
