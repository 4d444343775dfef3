//! Blocks that are registered as a whole and on demand: nothing of them is pinned (`specs/rdma.md §6.8`).

use sterna_wire::rdma::BlockRange;

use super::{Remote, State, Work};

impl Work {
    /// Pages of these blocks are to be written. The first time, a block is registered on demand where that is possible, and
    /// found from then on: before anything is planned for it.
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
