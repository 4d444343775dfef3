//! The adapters of the double's network: port information and memory registration.

use std::io;
use std::sync::Arc;

use sterna_ram::PAGE_SIZE;

use super::faults::Fault;
use super::region::Region;
use super::state::{State, keys};
use super::world::World;
use crate::rdma::{
    Access, Adapter, AdapterInfo, LockedMemory, Memory, PinnedMemory, RdmaError, Registration,
};

/// Maximum number of work requests in a queue. Opening a queue pair with a longer queue fails.
pub(super) const MOST_WORK_REQUESTS: u32 = 1 << 14;

/// A host's adapter together with a protection domain.
#[derive(Debug, Clone)]
pub(super) struct DoubleAdapter {
    pub(super) world: Arc<World>,
    pub(super) host: usize,
    pub(super) domain: usize,
}

impl DoubleAdapter {
    fn info(&self, state: &State) -> AdapterInfo {
        let settings = &self.world.core.settings;
        let mut info = AdapterInfo::new(format!("double{}", self.host), 1);
        info.state = state.port_state(self.host);
        info.addresses = state.hosts[self.host].addresses.clone();
        info.active_mtu = 4096;
        info.max_message_bytes = settings.max_message_bytes;
        info.max_registration_bytes = u64::MAX;
        info.max_work_requests = MOST_WORK_REQUESTS;
        info.max_completions = 1 << 15;
        info.on_demand_paging = state.hosts[self.host].on_demand_paging;
        info
    }

    fn locked(&self, state: &State) -> LockedMemory {
        let pinned_bytes = state.hosts[self.host].counts.pinned_bytes;
        LockedMemory { limit_bytes: self.world.core.settings.locked_memory_bytes, pinned_bytes }
    }

    /// The error for a registration that must fail. Causes are a planned fault, a lost device, and a broken rule.
    fn refusal(&self, state: &mut State, memory: &Memory, access: Access) -> Option<RdmaError> {
        let refused = |number| {
            let (address, len) = (memory.address(), memory.len() as u64);
            Some(RdmaError::Registration { address, len, source: io::Error::from_raw_os_error(number) })
        };
        match state.hosts[self.host].plan.registration() {
            Some(Fault::Errno(number)) => return refused(number),
            Some(Fault::Status(_)) => return refused(libc::EINVAL),
            Some(other) => state.strike(self.host, other),
            None => {}
        }
        if state.hosts[self.host].lost.is_some() {
            return refused(libc::EIO);
        }
        if memory.is_empty() || access.remote_write && !access.local_write {
            return refused(libc::EINVAL);
        }
        if access.on_demand && !state.hosts[self.host].on_demand_paging {
            return refused(libc::EOPNOTSUPP);
        }
        let (wanted, locked) = (pinned(memory, access), self.locked(state));
        let limit = locked.limit_bytes.filter(|_| !locked.has_room(wanted))?;
        Some(RdmaError::LockedMemory { wanted, pinned: locked.pinned_bytes, limit })
    }
}

impl Adapter for DoubleAdapter {
    fn info(&self) -> AdapterInfo {
        self.info(&self.world.core.state())
    }

    fn max_message_bytes(&self) -> u32 {
        Adapter::info(self).max_message_bytes
    }

    fn has_on_demand_paging(&self) -> bool {
        self.world.core.state().hosts[self.host].on_demand_paging
    }

    fn locked_memory(&self) -> LockedMemory {
        self.locked(&self.world.core.state())
    }

    fn register(&self, memory: Memory, access: Access) -> Result<Registration, RdmaError> {
        let core = &self.world.core;
        let refusal = self.refusal(&mut core.state(), &memory, access);
        if let Some(refusal) = refusal {
            core.state().counts(self.host).registrations_failed += 1;
            return Err(refusal);
        }
        let pinned_memory = PinnedMemory::new(memory.clone(), access);
        // Populating takes time, so it happens without the lock.
        let pins = !access.on_demand && core.settings.copies_writes;
        let mut region = Region::new(self.domain, memory.clone(), access, pins);
        let mut state = core.state();
        let pinned = pinned(&memory, access);
        region.since = state.clocks.spend(core.settings.costs.registration(if access.on_demand {
            0
        } else {
            memory.len() as u64
        }));
        let index = state.next() as u32 & 0xff_ffff;
        state.regions.insert(index, region);
        let counts = state.counts(self.host);
        counts.registrations += 1;
        counts.registrations_made += 1;
        counts.pinned_bytes += pinned;
        counts.pinned_bytes_most = counts.pinned_bytes_most.max(counts.pinned_bytes);
        let handle = Handle { world: self.world.clone(), host: self.host, index, pinned };
        Ok(Registration::new(pinned_memory, keys(index), handle))
    }
}

/// Handle of a registration, which deregisters the memory on drop.
struct Handle {
    world: Arc<World>,
    host: usize,
    index: u32,
    pinned: u64,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.world.core.state();
        let region = state.regions.remove(&self.index);
        if region.as_ref().is_some_and(Region::is_stale_anywhere) {
            state.note_stale(self.index, self.host);
        }
        let counts = state.counts(self.host);
        counts.registrations -= 1;
        counts.pinned_bytes -= self.pinned;
    }
}

/// Bytes that a registration pins, in whole pages.
fn pinned(memory: &Memory, access: Access) -> u64 {
    if access.on_demand {
        return 0;
    }
    let page = PAGE_SIZE as u64;
    let first = memory.address() / page * page;
    (memory.address() + memory.len() as u64).next_multiple_of(page) - first
}
