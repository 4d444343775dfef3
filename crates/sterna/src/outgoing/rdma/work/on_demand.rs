//! Blocks that are registered as a whole and on demand: nothing of them is pinned (`specs/rdma.md §6.8`).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use sterna_ram::{GuestRam, RamBlock};
use sterna_transport::rdma::{Access, Adapter, Registration};
use sterna_wire::rdma::BlockRange;

use super::super::source::RdmaSource;
use super::{Remote, State, Work};
use crate::rdma::register_on_demand;

/// Which blocks pages were taken of.
pub(super) struct UsedBlocks {
    used: Vec<OnceLock<()>>,
    /// This side's adapter registers memory without pinning it, as far as is known.
    may_follow: AtomicBool,
    warn: Box<dyn Fn(String) + Send + Sync>,
}

impl UsedBlocks {
    pub(super) fn new(
        rdma: &RdmaSource,
        ram: &GuestRam,
        warn: impl Fn(String) + Send + Sync + 'static,
    ) -> Self {
        let may_follow = AtomicBool::new(rdma.adapter().has_on_demand_paging());
        Self { used: vec![OnceLock::new(); ram.blocks().len()], may_follow, warn: Box::new(warn) }
    }

    pub(super) fn may_follow(&self) -> bool {
        self.may_follow.load(Ordering::Relaxed)
    }

    /// Registers a block on demand, if the adapter can. After a refusal no other block is tried.
    fn register(&self, adapter: &dyn Adapter, block: &RamBlock) -> Option<Registration> {
        if !self.may_follow() {
            return None;
        }
        let registered = register_on_demand(adapter, block, Access::SOURCE);
        let refused = |text: String| {
            self.may_follow.store(false, Ordering::Relaxed);
            (self.warn)(text);
        };
        registered.map_err(refused).ok()
    }
}

impl Work {
    /// Pages of these blocks are to be written. The first time, a block is registered on demand where that is possible, and
    /// found from then on: before anything is planned for it.
    pub(super) fn use_blocks(&self, ranges: &[BlockRange]) {
        let mut last = None;
        for BlockRange { block, .. } in ranges {
            if last.replace(*block) != Some(*block)
                && let Some(used) = self.used.used.get(*block)
            {
                used.get_or_init(|| self.use_block(*block));
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
