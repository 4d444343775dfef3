//! Registration of a block without pinning: the adapter follows the memory's mapping, and faults pages in when
//! it needs them.

use sterna_ram::RamBlock;
use sterna_transport::rdma::{Access, Adapter, Memory, RdmaError, Registration};

/// Registers all of a block on demand.
///
/// # Errors
/// The adapter refuses although it announces the feature. The error is a text for the operator. Register memory
/// in windows then, which are pinned.
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

/// Registers memory. The peer never gets key 0, because a QEMU treats it as memory without a key.
pub(crate) fn register(
    adapter: &dyn Adapter,
    memory: Memory,
    access: Access,
) -> Result<Registration, RdmaError> {
    let first = adapter.register(memory.clone(), access)?;
    // The first registration stays until the second one exists, so that the second one gets another key.
    if first.rkey() == 0 { adapter.register(memory, access) } else { Ok(first) }
}
