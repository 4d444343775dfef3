//! Checks descriptors of guest memory and devices against the source's table, and maps them.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use sterna_ram::{GuestRam, RamError, TakenMemory};
use sterna_wire::extension::HandedOver;

use crate::error::MigrationError;
use crate::threads::call;
use crate::vm::HostDescriptors;

/// Memory and device descriptors that this machine uses until they are given back.
#[derive(Default)]
pub(in crate::incoming) struct Taken {
    memory: Vec<TakenMemory>,
    held: Vec<Arc<dyn HostDescriptors>>,
}

/// Maps the memory of every block of `ram` read-only, and gives the devices in `held` their descriptors. An
/// error leaves everything unchanged.
pub(in crate::incoming) fn take(
    ram: &GuestRam,
    table: &[HandedOver],
    held: &[Arc<dyn HostDescriptors>],
    descriptors: Vec<OwnedFd>,
) -> Result<Taken, MigrationError> {
    check_counts(ram, table, descriptors.len())?;
    let mut taken: Vec<TakenMemory> = Vec::new();
    let mut of_devices = Vec::new();
    let mut descriptors = descriptors.into_iter();
    for entry in table {
        let mut next = descriptors.by_ref().take(entry.descriptors());
        let (name, len_bytes, page_bytes, offset) = match entry {
            HandedOver::Block { name, len_bytes, page_bytes, offset } => {
                (name, len_bytes, page_bytes, offset)
            }
            HandedOver::Device { name, instance, .. } => {
                let ours = held.iter().find(|ours| (&ours.name(), ours.instance()) == (name, *instance));
                let ours = ours.ok_or_else(|| {
                    incompatible(format!(
                        "the source hands over {name} ({instance}), and this machine has none: use the same"
                    ))
                })?;
                of_devices.push((ours, next.collect()));
                continue;
            }
        };
        let Some(descriptor) = next.next() else {
            return Err(misbehaved("a descriptor is missing".to_owned()));
        };
        let block = ram.index_of(name).map(|index| ram.block(index));
        let block = block.ok_or_else(|| incompatible(format!("this machine has no RAM block {name:?}")))?;
        if (block.len_bytes(), block.page_bytes()) != (*len_bytes, *page_bytes) {
            return Err(incompatible(format!(
                "RAM block {name:?} has {len_bytes} bytes in pages of {page_bytes} at the source, and {} in pages of {} here",
                block.len_bytes(),
                block.page_bytes()
            )));
        }
        if taken.iter().any(|memory| memory.block().name() == name) {
            return Err(misbehaved(format!("RAM block {name:?} is listed twice")));
        }
        let memory = block.take_memory(File::from(descriptor), *offset).map_err(explained)?;
        check_apart(&taken, &memory)?;
        taken.push(memory);
    }
    let mut taken = Taken { memory: taken, held: Vec::new() };
    for (ours, came) in of_devices {
        // Recorded before the attempt, so that a half-completed take is undone as well.
        taken.held.push(Arc::clone(ours));
        let name = ours.name();
        if let Err(error) = call(format!("HostDescriptors::take of {name:?}"), || ours.take(came)) {
            taken.give_back();
            return Err(error.into());
        }
    }
    Ok(taken)
}

impl Taken {
    /// Whether it includes memory of the source.
    pub(in crate::incoming) fn has_memory(&self) -> bool {
        !self.memory.is_empty()
    }

    /// Makes the memory writable.
    pub(in crate::incoming) fn keep(&mut self) -> Result<(), MigrationError> {
        self.memory.iter_mut().try_for_each(|memory| Ok(memory.keep()?))
    }

    /// Undoes everything, and returns the errors. Memory that this side has already kept is released without
    /// discarding, because only a source that has the guest may want it discarded.
    pub(in crate::incoming) fn give_back(&mut self) -> Vec<String> {
        self.held.drain(..).for_each(|held| held.let_go());
        let undone = self.memory.drain(..).map(|memory| {
            let block = memory.block().clone();
            if memory.is_kept() { block.let_go() } else { memory.give_back() }
        });
        undone.filter_map(Result::err).map(|error| error.to_string()).collect()
    }
}

fn check_counts(ram: &GuestRam, table: &[HandedOver], descriptors: usize) -> Result<(), MigrationError> {
    let listed: usize = table.iter().map(HandedOver::descriptors).fold(0, usize::saturating_add);
    if listed != descriptors {
        return Err(misbehaved(format!("{descriptors} descriptors came for {listed} that are listed")));
    }
    let missing = ram.blocks().iter().find(|block| {
        !table.iter().any(|entry| matches!(entry, HandedOver::Block { name, .. } if name == block.name()))
    });
    match missing {
        Some(block) => Err(misbehaved(format!("the memory of RAM block {:?} did not come", block.name()))),
        None => Ok(()),
    }
}

/// Checks that no byte of a file is memory of two blocks.
fn check_apart(taken: &[TakenMemory], memory: &TakenMemory) -> Result<(), MigrationError> {
    let place =
        |memory: &TakenMemory| memory.place().map_err(|error| MigrationError::System(error.to_string()));
    let (device, inode, bytes) = place(memory)?;
    for other in taken {
        let (other_device, other_inode, other_bytes) = place(other)?;
        let is_apart = bytes.end <= other_bytes.start || other_bytes.end <= bytes.start;
        if (device, inode) == (other_device, other_inode) && !is_apart {
            let (one, two) = (other.block().name(), memory.block().name());
            return Err(misbehaved(format!(
                "the descriptors of RAM blocks {one:?} and {two:?} are the same memory"
            )));
        }
    }
    Ok(())
}

fn explained(error: RamError) -> MigrationError {
    match error {
        RamError::Descriptor { .. } => misbehaved(error.to_string()),
        RamError::NotReplaceable { .. } => incompatible(error.to_string()),
        error => error.into(),
    }
}

fn misbehaved(what: String) -> MigrationError {
    MigrationError::PeerMisbehaved { what }
}

fn incompatible(what: String) -> MigrationError {
    MigrationError::PeerIncompatible { what }
}

#[cfg(test)]
mod tests;
