//! Blocks that are registered as a whole and on demand (`specs/rdma.md §6.8`).
//!
//! Nothing is pinned then.

use sterna_wire::rdma::BlockRange;

use super::{Remote, State, Work};

impl Work {
    /// At the first use of blocks, registers each one on demand if possible.
    ///
    /// This happens before windows are planned for the block. The plan then uses that registration.
    pub(super) fn use_blocks(&self, ranges: &[BlockRange]) {
        let mut last = None;
        for BlockRange { block, .. } in ranges {
            if last.replace(*block) != Some(*block) {
                self.used.at_first_use(*block, || self.use_block(*block));
            }
        }
    }

    fn use_block(&self, block: usize) {
        let adapter = self.rdma.adapter();
        let own = self.used.register(&*adapter, self.ram.block(block));
        let there = self.rdma.on_demand_key(block);
        let mut state = self.state.lock();
        let State { own: plan, registrations, remote, keys, .. } = &mut *state;
        if let Some(registration) = own {
            plan.on_demand(block);
            registrations.insert((block, 0), registration);
            self.rdma.counts.registered(0);
        }
        if let (Some(key), Remote::Known(remote)) = (there, remote) {
            remote.on_demand(block);
            keys.insert((block, 0), (key, self.ram.block(block).len_bytes()));
        }
    }
}
