//! A protection domain on a device, and the memory registered in it.

use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::abi::*;
use super::context::Context;
use super::errno::failed;
use super::locked::locked_memory;
use super::ports;
use crate::rdma::adapter::{Adapter, AdapterInfo, LockedMemory};
use crate::rdma::error::RdmaError;
use crate::rdma::memory::{Access, Memory, PinnedMemory, Registration};

/// A fabric's protection domain on one device.
pub(crate) struct Domain {
    context: Arc<Context>,
    raw: NonNull<ibv_pd>,
}

// SAFETY: libibverbs' functions are thread-safe, and the pointer stays valid until `self` is dropped.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub(crate) fn new(context: Arc<Context>) -> Result<Arc<Self>, RdmaError> {
        // SAFETY: the device is open.
        let raw = NonNull::new(unsafe { (context.library().verbs.ibv_alloc_pd)(context.raw()) });
        let raw = raw.ok_or_else(|| failed(context.name(), "ibv_alloc_pd"))?;
        Ok(Arc::new(Self { context, raw }))
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn raw(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }

    fn register(self: &Arc<Self>, memory: Memory, access: Access) -> Result<Registration, RdmaError> {
        let (address, len) = (memory.address(), memory.len());
        if access.on_demand && !ports::has_on_demand_paging(self.context.raw()) {
            // Some providers ignore the flag if they do not know it, and pin the memory.
            let source = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
            return Err(RdmaError::Registration { address, len: len as u64, source });
        }
        let locked = (!access.on_demand).then(locked_memory);
        if let Some(refusal) = locked.and_then(|locked| refusal(locked, len as u64)) {
            return Err(refusal);
        }
        let pinned = PinnedMemory::new(memory, access);
        let register = self.context.library().verbs.ibv_reg_mr;
        let start = pinned.memory().slice().as_ptr().cast();
        // SAFETY: the memory is mapped as long as its owner lives. The registration below keeps the owner, and
        // drops the handle first. The adapter's access is like another thread's through raw pointers.
        let raw = NonNull::new(unsafe { register(self.raw(), start, len, flags(access)) });
        let Some(raw) = raw else {
            let source = io::Error::last_os_error();
            return Err(RdmaError::Registration { address, len: len as u64, source });
        };
        // SAFETY: the library has just returned the pointer.
        let keys = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        Ok(Registration::new(pinned, keys, Region { domain: self.clone(), raw }))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: no region or queue pair of the domain exists any more, because each keeps the domain alive.
        unsafe { (self.context.library().verbs.ibv_dealloc_pd)(self.raw()) };
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain").field("device", &self.context.name()).finish()
    }
}

/// A domain and the port that a connection uses: the engine's [`Adapter`].
#[derive(Debug)]
pub(crate) struct VerbsAdapter {
    pub(crate) domain: Arc<Domain>,
    pub(crate) port: u8,
}

impl Adapter for VerbsAdapter {
    fn info(&self) -> AdapterInfo {
        let context = self.domain.context();
        ports::of_port(context.library(), context.raw(), context.name(), self.port)
    }

    fn max_message_bytes(&self) -> u32 {
        let context = self.domain.context();
        ports::attributes(context.library(), context.raw(), self.port).max_msg_sz
    }

    fn has_on_demand_paging(&self) -> bool {
        ports::has_on_demand_paging(self.domain.context().raw())
    }

    fn locked_memory(&self) -> LockedMemory {
        locked_memory()
    }

    fn register(&self, memory: Memory, access: Access) -> Result<Registration, RdmaError> {
        self.domain.register(memory, access)
    }
}

/// Handle of registered memory, which deregisters it on drop.
struct Region {
    domain: Arc<Domain>,
    raw: NonNull<ibv_mr>,
}

// SAFETY: as for `Domain`.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: deregistered once, before the memory's owner and the domain are dropped.
        unsafe { (self.domain.context.library().verbs.ibv_dereg_mr)(self.raw.as_ptr()) };
    }
}

fn flags(access: Access) -> i32 {
    let Access { local_write, remote_write, on_demand, .. } = access;
    let flags = [
        (local_write, IBV_ACCESS_LOCAL_WRITE),
        (remote_write, IBV_ACCESS_REMOTE_WRITE),
        (on_demand, IBV_ACCESS_ON_DEMAND),
    ];
    flags.iter().filter(|(wanted, _)| *wanted).fold(0, |all, (_, flag)| all | *flag as i32)
}

/// The error for a registration beyond the limit. The kernel would refuse it without a reason.
fn refusal(locked: LockedMemory, wanted: u64) -> Option<RdmaError> {
    let limit = locked.limit_bytes.filter(|_| !locked.has_room(wanted))?;
    Some(RdmaError::LockedMemory { wanted, pinned: locked.pinned_bytes, limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_those_of_verbs() {
        assert_eq!(flags(Access::SOURCE), 0);
        assert_eq!(flags(Access::RECEIVE), 1);
        assert_eq!(flags(Access::REMOTE_WRITE), 3);
        assert_eq!(flags(Access::REMOTE_WRITE.on_demand()), 67);
    }

    #[test]
    fn registration_above_the_limit_is_refused_with_the_figures() {
        let locked = LockedMemory { limit_bytes: Some(8 << 20), pinned_bytes: 4 << 20 };

        assert!(refusal(locked, 4 << 20).is_none());
        let text = refusal(locked, (4 << 20) + 1).expect("one byte too many").to_string();

        assert!(
            ["4194305", "4194304", "8388608", "ulimit -l"].iter().all(|word| text.contains(word)),
            "{text}"
        );
    }
}
