//! Section `pit`, version 1: the interval timer.
//!
//! | field | content |
//! | --- | --- |
//! | `pit2` | `kvm_pit_state2` |
//!
//! The kernel does not save how much of a period has elapsed. A loaded channel therefore restarts its period,
//! as under every VMM on this kernel interface:
//!
//! - A periodic tick is late by less than a period.
//! - A pending one-shot timer fires, late by the elapsed part of its period.
//! - A one-shot timer that had already fired may fire once more.

use std::sync::Arc;

use kvm_bindings::{KVM_PIT_FLAGS_HPET_LEGACY, KVM_PIT_FLAGS_SPEAKER_DATA_ON, kvm_pit_state2};
use sterna::{Device, VmError};

use super::codec::{Body, Fields, StateError, kernel};
use super::context::{Context, saving};

pub(crate) struct Pit(pub(crate) Arc<Context>);

impl Device for Pit {
    fn name(&self) -> String {
        "pit".into()
    }

    fn version(&self) -> u32 {
        1
    }

    fn save(&self) -> Result<Vec<u8>, VmError> {
        let state = || {
            let state = self.0.hardware.vm.fd().get_pit2().map_err(kernel("KVM_GET_PIT2"))?;
            let mut body = Body::default();
            body.plain(*b"pit2", &state);
            Ok(body.finish())
        };
        saving(self, state())
    }

    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        self.0.load(self, body, |fields| load(&self.0, fields))
    }

    fn body_limit(&self) -> usize {
        4096
    }
}

fn load(context: &Context, fields: &mut Fields<'_>) -> Result<(), StateError> {
    let mut state: kvm_pit_state2 = fields.plain(*b"pit2")?;
    let unknown = state.flags & !(KVM_PIT_FLAGS_HPET_LEGACY | KVM_PIT_FLAGS_SPEAKER_DATA_ON);
    if unknown != 0 {
        return Err(StateError::value(*b"pit2", format!("flags {unknown:#x} are unknown")));
    }
    for (index, channel) in state.channels.iter_mut().enumerate() {
        if channel.count > 0x1_0000 {
            return Err(StateError::value(
                *b"pit2",
                format!("channel {index} counts from {:#x}", channel.count),
            ));
        }
        channel.count_load_time = 0; // a time of the source's clock, meaningless here; loading sets it again
    }
    context.hardware.vm.fd().set_pit2(&state).map_err(kernel("KVM_SET_PIT2"))
}
