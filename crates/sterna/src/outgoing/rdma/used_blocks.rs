//! Records the blocks whose pages were taken. Such a block is registered as a whole, if the adapter then pins
//! nothing (`specs/rdma.md §6.8`).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use sterna_ram::{GuestRam, RamBlock};
use sterna_transport::rdma::{Access, Adapter, Registration};

use super::source::RdmaSource;
use crate::rdma::register_on_demand;

/// Which blocks have pages that were taken.
pub(super) struct UsedBlocks {
    used: Vec<OnceLock<()>>,
    /// This side's adapter can register memory without pinning it, as far as is known.
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
    pub(super) fn register(&self, adapter: &dyn Adapter, block: &RamBlock) -> Option<Registration> {
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

    /// Runs `act` when pages of a block are first taken. Other threads wait for its end.
    pub(super) fn at_first_use(&self, block: usize, act: impl FnOnce()) {
        if let Some(used) = self.used.get(block) {
            used.get_or_init(act);
        }
    }
}
