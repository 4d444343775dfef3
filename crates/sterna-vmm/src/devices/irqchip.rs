//! Section `irqchip`, version 1: the interrupt controllers that all vCPUs share.
//!
//! | field | content |
//! | --- | --- |
//! | `pic0` | `kvm_irqchip` of the first PIC |
//! | `pic1` | `kvm_irqchip` of the second PIC |
//! | `ioap` | `kvm_irqchip` of the IOAPIC |

use std::sync::Arc;

use kvm_bindings::{KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip};
use sterna::{Device, VmError};

use super::codec::{Body, Fields, StateError, Tag, kernel};
use super::context::{Context, saving};

const CHIPS: [(Tag, u32); 3] =
    [(*b"pic0", KVM_IRQCHIP_PIC_MASTER), (*b"pic1", KVM_IRQCHIP_PIC_SLAVE), (*b"ioap", KVM_IRQCHIP_IOAPIC)];

pub(crate) struct Irqchip(pub(crate) Arc<Context>);

impl Device for Irqchip {
    fn name(&self) -> String {
        "irqchip".into()
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
        8192
    }
}

fn save(context: &Context) -> Result<Vec<u8>, StateError> {
    let mut body = Body::default();
    for (tag, chip_id) in CHIPS {
        let mut chip = kvm_irqchip { chip_id, ..Default::default() };
        context.hardware.vm.fd().get_irqchip(&mut chip).map_err(kernel("KVM_GET_IRQCHIP"))?;
        body.plain(tag, &chip);
    }
    Ok(body.finish())
}

fn load(context: &Context, fields: &mut Fields<'_>) -> Result<(), StateError> {
    let mut chips = Vec::new();
    for (tag, chip_id) in CHIPS {
        let chip: kvm_irqchip = fields.plain(tag)?;
        if chip.chip_id != chip_id {
            return Err(StateError::value(
                tag,
                format!("it is the state of chip {}, not of chip {chip_id}", chip.chip_id),
            ));
        }
        chips.push(chip);
    }
    chips
        .iter()
        .try_for_each(|chip| context.hardware.vm.fd().set_irqchip(chip).map_err(kernel("KVM_SET_IRQCHIP")))
}
