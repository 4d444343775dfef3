//! Registering a block without pinning it: the adapter follows its memory, and faults in what it needs.

use sterna_ram::RamBlock;
use sterna_transport::rdma::{Access, Adapter, Memory, RdmaError, Registration};

/// Registers all of a block on demand.
///
/// # Errors
/// It is refused, though the adapter announces it: the words for an operator. Memory is to be registered in windows then,
/// which pin it.
pub(crate) fn register_on_demand(
    adapter: &dyn Adapter,
    block: &RamBlock,
    access: Access,
) -> Result<Registration, String> {
    let memory = Memory::of_block(block, 0, block.len_bytes() as usize);
    let registered = memory
        .map_err(|error| error.to_string())
        .and_then(|memory| register(adapter, memory, access.on_demand()).map_err(|error| error.to_string()));
    registered.map_err(|why| {
        format!(
            "RAM block {:?} cannot be registered on demand, which the RDMA adapter announces: {why}. Memory is pinned \
             instead, below x-sterna-rdma-pinned-limit and the locked-memory limit",
            block.name()
        )
    })
}

/// Registers memory. Never with key 0 for the peer: a QEMU takes it for memory without a key.
pub(crate) fn register(
    adapter: &dyn Adapter,
    memory: Memory,
    access: Access,
) -> Result<Registration, RdmaError> {
    let first = adapter.register(memory.clone(), access)?;
    // The first one keeps its key until the second one has another.
    if first.rkey() == 0 { adapter.register(memory, access) } else { Ok(first) }
}
