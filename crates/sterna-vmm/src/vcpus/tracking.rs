//! The dirty sources of a machine. One tracks the vCPUs' writes and is chosen when the machine is built. Each
//! device in another process has its own.

use std::sync::Arc;

use sterna_ram::DirtySource;
use sterna_ram::dirty::{Combined, KvmDirtyLog, KvmDirtyRing};

/// The dirty source for the vCPUs' writes.
#[derive(Debug, Clone)]
pub(crate) enum VcpuTracking {
    /// KVM's dirty log, which uses bitmaps.
    Log(Arc<KvmDirtyLog>),
    /// KVM's dirty rings, one per vCPU.
    Ring(Arc<KvmDirtyRing>),
}

/// All dirty sources of a machine.
#[derive(Debug)]
pub(crate) struct Tracking {
    vcpus: VcpuTracking,
    /// vCPUs' and devices' sources combined. `None` without devices.
    all: Option<Combined>,
}

impl Tracking {
    /// Combines the vCPUs' dirty source with the sources of `devices`.
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

    /// The dirty source that covers all writers.
    pub(crate) fn source(&self) -> &dyn DirtySource {
        match (&self.all, &self.vcpus) {
            (Some(all), _) => all,
            (None, VcpuTracking::Log(log)) => log.as_ref(),
            (None, VcpuTracking::Ring(ring)) => ring.as_ref(),
        }
    }

    /// The dirty rings, if the vCPUs use them.
    pub(crate) fn ring(&self) -> Option<&KvmDirtyRing> {
        match &self.vcpus {
            VcpuTracking::Log(_) => None,
            VcpuTracking::Ring(ring) => Some(ring),
        }
    }
}
