//! What this side tells a source about itself (specs/extension.md §1).

use sterna_wire::extension::Features;

use super::shared::Shared;

impl Shared {
    /// This side's features beyond QEMU's format, under the present settings.
    pub(super) fn features(&self) -> Features {
        let mut features = Features::OURS;
        if self.capabilities.postcopy_ram {
            features = features.union(Features::POSTCOPY);
            if self.places.lanes() > 0 {
                features = features.union(Features::POSTCOPY_LANES);
            }
        }
        if self.capabilities.postcopy_preempt {
            features = features.union(Features::PREEMPT);
        }
        if self.can_wait() {
            features = features.union(Features::RECONNECT);
        }
        features
    }
}
