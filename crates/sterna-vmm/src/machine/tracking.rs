//! How the guest's writes are found: the machine has one way from its making on.

use sterna_ram::DirtySource;
use sterna_ram::dirty::{KvmDirtyLog, KvmDirtyRing};

/// Bitmaps, or rings.
#[derive(Debug)]
pub(crate) enum Tracking {
    Log(KvmDirtyLog),
    Ring(KvmDirtyRing),
}

impl Tracking {
    /// Whichever it is.
    pub(crate) fn source(&self) -> &dyn DirtySource {
        match self {
            Self::Log(log) => log,
            Self::Ring(ring) => ring,
        }
    }

    /// The rings, if it is they.
    pub(crate) fn ring(&self) -> Option<&KvmDirtyRing> {
        match self {
            Self::Log(_) => None,
            Self::Ring(ring) => Some(ring),
        }
    }
}
