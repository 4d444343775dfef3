//! Options of a target in Sterna's own format.

use std::path::PathBuf;

use sterna_store::{EXTENT_LEAST, Key};

/// Options of a target in Sterna's own format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrameOptions {
    /// Bytes of an extent: a power of two from 64 KiB (default) to 2 MiB.
    pub extent_bytes: u32,
    /// zstd's level, 1 (default) to 22; 0 for no compression.
    pub level: i32,
    /// The level changes while the image is written, so that neither the disk nor the processors wait.
    pub adapts: bool,
    /// The key that encrypts the target.
    pub key: Option<Key>,
    /// The image over which the target becomes a layer.
    pub base: Option<PathBuf>,
    /// The source is a stream that holds only the pages that differ from the base: all others are the base's.
    pub only_changes: bool,
}

impl Default for FrameOptions {
    fn default() -> Self {
        Self {
            extent_bytes: EXTENT_LEAST,
            level: 1,
            adapts: false,
            key: None,
            base: None,
            only_changes: false,
        }
    }
}
