//! A guest whose memory is registered with a real userfaultfd, and the VMM's thread that requests its pages.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use super::{Arrived, Machine, OK, Slot};
use crate::PAGE;
use crate::memory::{Mapping, continue_page, next_fault, register_shared};

/// A guest that runs while its memory arrives.
#[derive(Debug)]
pub struct Guest {
    mappings: Vec<(Slot, Mapping)>,
    requests: Option<JoinHandle<io::Result<u64>>>,
    _memory: Arc<OwnedFd>,
}

impl Guest {
    /// Maps the memory, and starts the thread that walks through all of it and answers faults first.
    ///
    /// # Errors
    /// Why the kernel refuses.
    pub fn start(arrived: Arrived, machine: &Machine) -> io::Result<Self> {
        let map = |slot: &Slot| {
            let file = arrived.file(slot.number)?;
            Ok((*slot, Mapping::shared(file, slot.file_offset, slot.bytes)?))
        };
        let mappings = machine.slots.iter().map(map).collect::<io::Result<Vec<_>>>()?;
        let plain: Vec<Mapping> = mappings.iter().map(|(_, mapping)| *mapping).collect();
        let memory = Arc::new(register_shared(&plain)?);
        let (events, known) = (Arc::clone(&memory), mappings.clone());
        let requests = thread::spawn(move || serve(&arrived, &events, &known));
        Ok(Self { mappings, requests: Some(requests), _memory: memory })
    }

    /// Reads 8 bytes, as the guest does.
    pub fn read(&self, address: u64) -> u64 {
        let (mapping, offset) = self.find(address);
        mapping.read(offset)
    }

    /// Writes 8 bytes, as the guest does.
    pub fn write(&self, address: u64, value: u64) {
        let (mapping, offset) = self.find(address);
        mapping.write(offset, value);
    }

    /// Waits until all memory is there. Returns the number of requests.
    ///
    /// # Errors
    /// A request was refused.
    pub fn complete(&mut self) -> io::Result<u64> {
        let Some(requests) = self.requests.take() else { return Ok(0) };
        requests.join().map_err(|_| io::Error::other("the thread panicked"))?
    }

    fn find(&self, address: u64) -> (&Mapping, u64) {
        let inside = |slot: &Slot| slot.address <= address && address - slot.address < slot.bytes;
        let (slot, mapping) =
            self.mappings.iter().find(|(slot, _)| inside(slot)).expect("memory of the guest");
        (mapping, address - slot.address)
    }
}

/// Requests faults first, and between them every page in ascending order.
fn serve(arrived: &Arrived, events: &OwnedFd, mappings: &[(Slot, Mapping)]) -> io::Result<u64> {
    let mut requests = 0;
    let mut fetch = |slot: &Slot, mapping: &Mapping, page: u64| {
        requests += 1;
        match arrived.request(slot.address + page * PAGE, PAGE)? {
            Some(OK) => continue_page(events, mapping.address + page * PAGE, PAGE),
            other => Err(io::Error::other(format!("answer {other:?}"))),
        }
    };
    for (slot, mapping) in mappings {
        for page in 0..slot.bytes / PAGE {
            while let Some(address) = next_fault(events)? {
                let inside = |mapping: &Mapping| address.wrapping_sub(mapping.address) < mapping.bytes;
                let found = mappings.iter().find(|(_, mapping)| inside(mapping));
                let (slot, mapping) = found.ok_or_else(|| io::Error::other("a fault outside"))?;
                fetch(slot, mapping, (address - mapping.address) / PAGE)?;
            }
            fetch(slot, mapping, page)?;
        }
    }
    Ok(requests)
}
