//! Section `kvm-clock`, version 1: the VM-wide paravirtual clock.
//!
//! | field | content |
//! | --- | --- |
//! | `clck` | `kvm_clock_data` as KVM_GET_CLOCK returned it, with the host's realtime and TSC if offered |
//! | `real` | CLOCK_REALTIME at that moment, in ns since 1970 |
//!
//! The clock advances by the real time that passed during the migration. If both kernels know
//! KVM_CLOCK_REALTIME, the destination's kernel adds that time. Otherwise this module does.

use std::sync::Arc;

use kvm_bindings::{KVM_CLOCK_REALTIME, kvm_clock_data};
use sterna::{Device, VmError};

use super::codec::{Body, Fields, StateError, kernel};
use super::context::{Context, saving};
use super::realtime::{at_once, passed_ns};

/// Attempts to set the clock. They end once the clock is within [`NEAR_NS`] of its target.
const TRIES: usize = 9;
const NEAR_NS: u64 = 20_000;

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
    let vm = context.hardware.vm.fd();
    let (clock, real) = at_once(|| vm.get_clock()).map_err(kernel("KVM_GET_CLOCK"))?;
    let mut body = Body::default();
    body.plain(*b"clck", &clock);
    body.u64(*b"real", if clock.flags & KVM_CLOCK_REALTIME != 0 { clock.realtime } else { real });
    Ok(body.finish())
}

fn load(context: &Context, fields: &mut Fields<'_>) -> Result<(), StateError> {
    let saved: kvm_clock_data = fields.plain(*b"clck")?;
    let real = fields.u64(*b"real")?;
    let kernel_adds = saved.flags & context.hardware.caps.clock_flags & KVM_CLOCK_REALTIME != 0;
    let vm = context.hardware.vm.fd();
    let set = |clock: kvm_clock_data| vm.set_clock(&clock).map_err(kernel("KVM_SET_CLOCK"));
    if kernel_adds {
        let (clock, realtime) = (saved.clock, saved.realtime);
        return set(kvm_clock_data { clock, flags: KVM_CLOCK_REALTIME, realtime, ..Default::default() });
    }
    // A call takes time. That time is measured and added in the next attempt, several times if the thread was
    // preempted.
    let mut lag = 0;
    for _ in 0..TRIES {
        let clock = saved.clock.saturating_add(passed_ns(real)).saturating_add_signed(lag);
        set(kvm_clock_data { clock, ..Default::default() })?;
        let (now, at) = at_once(|| vm.get_clock()).map_err(kernel("KVM_GET_CLOCK"))?;
        let missing =
            saved.clock.saturating_add(at.saturating_sub(real)).wrapping_sub(now.clock).cast_signed();
        if missing.unsigned_abs() < NEAR_NS {
            break;
        }
        lag = lag.saturating_add(missing);
    }
    Ok(())
}
