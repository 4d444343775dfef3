//! How writes to guest RAM are found: the machine has one way for its vCPUs' from its making on, and one for each
//! device in another process.

use std::sync::Arc;

use sterna_ram::DirtySource;
use sterna_ram::dirty::{Combined, KvmDirtyLog, KvmDirtyRing};

/// How vCPUs' writes are found.
#[derive(Debug, Clone)]
pub(crate) enum VcpuTracking {
    /// By bitmaps.
    Log(Arc<KvmDirtyLog>),
    /// By rings.
    Ring(Arc<KvmDirtyRing>),
}

/// All of it.
#[derive(Debug)]
pub(crate) struct Tracking {
    vcpus: VcpuTracking,
    /// vCPUs' and devices' together, if there are devices.
    all: Option<Combined>,
}

impl Tracking {
    /// Finds what vCPUs write, and what `devices` find.
    pub(crate) fn new(vcpus: VcpuTracking, devices: Vec<Arc<dyn DirtySource>>) -> Self {
        if devices.is_empty() {
            return Self { vcpus, all: None };
        }
        let first: Arc<dyn DirtySource> = match &vcpus {
            VcpuTracking::Log(log) => Arc::<KvmDirtyLog>::clone(log),
            VcpuTracking::Ring(ring) => Arc::<KvmDirtyRing>::clone(ring),
        };
        let all = [vec![first], devices].concat();
        Self { vcpus, all: Some(Combined::new(all)) }
    }

    /// Finds everything.
    pub(crate) fn source(&self) -> &dyn DirtySource {
        match (&self.all, &self.vcpus) {
            (Some(all), _) => all,
            (None, VcpuTracking::Log(log)) => log.as_ref(),
            (None, VcpuTracking::Ring(ring)) => ring.as_ref(),
        }
    }

    /// The rings, if vCPUs have them.
    pub(crate) fn ring(&self) -> Option<&KvmDirtyRing> {
        match &self.vcpus {
            VcpuTracking::Log(_) => None,
            VcpuTracking::Ring(ring) => Some(ring),
        }
    }
}
