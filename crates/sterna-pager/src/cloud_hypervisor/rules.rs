//! The limits of the protocol (specs/ch-offload.md §2).

/// The version of the protocol that this side speaks.
pub(super) const VERSION: u16 = 0;
/// Most bytes of a configuration.
pub(super) const CONFIG_MOST: u64 = 16 << 20;
/// Most bytes of a state.
pub(super) const STATE_MOST: u64 = 256 << 20;
/// Most memory slots of a machine.
pub(super) const SLOTS_MOST: usize = 1024;
