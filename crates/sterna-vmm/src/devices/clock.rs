//! Section `kvm-clock`, version 1: the VM-wide paravirtual clock.
//!
//! | field | what |
//! | --- | --- |
//! | `clck` | `kvm_clock_data` as KVM_GET_CLOCK gave it, with the host's realtime and TSC if offered |
//! | `real` | CLOCK_REALTIME at that moment, in ns since 1970 |
//!
//! The clock goes on by the real time that has passed. Where both kernels know KVM_CLOCK_REALTIME the
//! destination's kernel adds it, else this module does.

use std::sync::Arc;

use kvm_bindings::{KVM_CLOCK_REALTIME, kvm_clock_data};
use sterna::{Device, VmError};

use super::codec::{Body, Fields, StateError, kernel};
use super::context::{Context, saving};
use super::realtime::{passed_ns, realtime_ns};

pub(crate) struct KvmClock(pub(crate) Arc<Context>);

impl Device for KvmClock {
    fn name(&self) -> String {
        "kvm-clock".into()
    }

    fn version(&self) -> u32 {
        1
    }

    fn save(&self) -> Result<Vec<u8>, VmError> {
        saving(self, save(&self.0))
    }

    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        self.0.load(self, body, |fields| load(&self.0, fields))
    }

    fn body_limit(&self) -> usize {
        4096
    }
}

fn save(context: &Context) -> Result<Vec<u8>, StateError> {
    let real = realtime_ns();
    let clock = context.hardware.vm.fd().get_clock().map_err(kernel("KVM_GET_CLOCK"))?;
    let mut body = Body::default();
    body.plain(*b"clck", &clock);
    body.u64(*b"real", if clock.flags & KVM_CLOCK_REALTIME != 0 { clock.realtime } else { real });
    Ok(body.finish())
}

fn load(context: &Context, fields: &mut Fields<'_>) -> Result<(), StateError> {
    let saved: kvm_clock_data = fields.plain(*b"clck")?;
    let real = fields.u64(*b"real")?;
    let kernel_adds = saved.flags & context.hardware.caps.clock_flags & KVM_CLOCK_REALTIME != 0;
    let clock = if kernel_adds {
        kvm_clock_data {
            clock: saved.clock,
            flags: KVM_CLOCK_REALTIME,
            realtime: saved.realtime,
            ..Default::default()
        }
    } else {
        kvm_clock_data { clock: saved.clock.saturating_add(passed_ns(real)), ..Default::default() }
    };
    context.hardware.vm.fd().set_clock(&clock).map_err(kernel("KVM_SET_CLOCK"))
}
