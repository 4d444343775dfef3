//! Checks descriptors of guest memory and devices against the source's table, and maps them.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use sterna_ram::{GuestRam, RamError, TakenMemory};
use sterna_wire::extension::HandedOver;

use crate::error::{BadMemory, MemoryDifference, MigrationError};
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
                let ours = ours.ok_or_else(|| MemoryDifference::NoDevice {
                    device: name.clone(),
                    instance: *instance,
                })?;
                of_devices.push((ours, next.collect()));
                continue;
            }
        };
        let Some(descriptor) = next.next() else {
            return Err(BadMemory::NoDescriptor.into());
        };
        let block = ram.index_of(name).map(|index| ram.block(index));
        let block = block.ok_or_else(|| MemoryDifference::NoBlock { block: name.clone() })?;
        if (block.len_bytes(), block.page_bytes()) != (*len_bytes, *page_bytes) {
            let (our_length, our_page) = (block.len_bytes(), block.page_bytes());
            let (block, length, page) = (name.clone(), *len_bytes, *page_bytes);
            return Err(MemoryDifference::BlockSize { block, length, page, our_length, our_page }.into());
        }
        if taken.iter().any(|memory| memory.block().name() == name) {
            return Err(BadMemory::Twice { block: name.clone() }.into());
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
        return Err(BadMemory::Count { descriptors, listed }.into());
    }
    let missing = ram.blocks().iter().find(|block| {
        !table.iter().any(|entry| matches!(entry, HandedOver::Block { name, .. } if name == block.name()))
    });
    match missing {
        Some(block) => Err(BadMemory::NoBlock { block: block.name().to_owned() }.into()),
        None => Ok(()),
    }
}

/// Checks that no byte of a file is memory of two blocks.
fn check_apart(taken: &[TakenMemory], memory: &TakenMemory) -> Result<(), MigrationError> {
    let place = |memory: &TakenMemory| {
        memory.place().map_err(|error| MigrationError::system(error.to_string(), error))
    };
    let (device, inode, bytes) = place(memory)?;
    for other in taken {
        let (other_device, other_inode, other_bytes) = place(other)?;
        let is_apart = bytes.end <= other_bytes.start || other_bytes.end <= bytes.start;
        if (device, inode) == (other_device, other_inode) && !is_apart {
            let (one, two) = (other.block().name(), memory.block().name());
            return Err(BadMemory::Shared { one: one.to_owned(), two: two.to_owned() }.into());
        }
    }
    Ok(())
}

fn explained(error: RamError) -> MigrationError {
    match error {
        RamError::Descriptor { .. } => BadMemory::Descriptor(Arc::new(error)).into(),
        RamError::NotReplaceable { .. } => MemoryDifference::NotReplaceable(Arc::new(error)).into(),
        error => error.into(),
    }
}

#[cfg(test)]
mod tests;
