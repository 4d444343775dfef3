//! Compression of a session that runs: what its carriers share.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::pack::{Figures, Known, Packer, Unpacker};

/// What the carriers of a session share.
#[derive(Default)]
pub(super) struct Packing {
    pub(super) known: Option<Arc<Mutex<Known>>>,
    pub(super) has_announced: bool,
    pub(super) has_complained: bool,
    /// Number of the last carrier that packs.
    pub(super) carriers: u64,
    figures: Figures,
}

/// What one carrier does with the bulk data of flows.
#[derive(Default)]
pub(super) struct Codec {
    pub(super) packer: Option<Packer>,
    pub(super) unpacker: Option<Unpacker>,
}

impl Packing {
    /// The pages that the receiver has, at the source.
    pub(super) fn known(&self) -> Option<&Arc<Mutex<Known>>> {
        self.known.as_ref()
    }

    pub(super) fn add(&mut self, figures: Figures) {
        self.figures.add(figures);
    }

    pub(super) fn figures(&self) -> Figures {
        self.figures
    }
}
