//! Reads and writes of a driver: the registers, followed by the configuration space.

use std::sync::atomic::Ordering;

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio::*;
use virtio_queue::QueueT;

use super::{Registers, Transport, is_at_work};

/// The magic value `virt`.
const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;
const VENDOR: u32 = u32::from_le_bytes(*b"STRN");

impl Transport {
    /// Handles a driver's read of `to.len()` bytes.
    pub(in crate::hardware::virtio) fn read(&self, offset: u64, to: &mut [u8]) {
        if let Some(at) = offset.checked_sub(VIRTIO_MMIO_CONFIG.into()) {
            return self.signals.space.read(at, to);
        }
        match <&mut [u8; 4]>::try_from(&mut *to) {
            Ok(word) => *word = self.register(offset as u32).to_le_bytes(),
            Err(_) => to.fill(0),
        }
    }

    /// Handles a driver's write. The configuration space is read-only.
    pub(in crate::hardware::virtio) fn write(&self, offset: u64, from: &[u8]) {
        if let Ok(word) = from.try_into() {
            self.set_register(offset as u32, u32::from_le_bytes(word));
        }
    }

    fn register(&self, offset: u32) -> u32 {
        let registers = self.registers.lock();
        let half = |features: u64, select: u32| match select {
            0 | 1 => (features >> (32 * select)) as u32,
            _ => 0,
        };
        match offset {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => VERSION,
            VIRTIO_MMIO_DEVICE_ID => self.identity.kind,
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => half(self.identity.features(), registers.device_features_select),
            VIRTIO_MMIO_QUEUE_NUM_MAX => {
                self.identity.queue_sizes.get(registers.queue_select as usize).copied().unwrap_or(0).into()
            }
            // A working device holds the lock of its queues; the register then reads 0.
            VIRTIO_MMIO_QUEUE_READY => self.parts.try_lock().map_or(0, |parts| {
                parts.queues.get(registers.queue_select as usize).is_some_and(QueueT::ready).into()
            }),
            VIRTIO_MMIO_INTERRUPT_STATUS => self.signals.interrupt.causes(),
            VIRTIO_MMIO_STATUS => self.signals.status.load(Ordering::SeqCst),
            VIRTIO_MMIO_CONFIG_GENERATION => self.signals.space.generation(),
            // The device has no shared memory.
            VIRTIO_MMIO_SHM_LEN_LOW | VIRTIO_MMIO_SHM_LEN_HIGH => u32::MAX,
            VIRTIO_MMIO_SHM_BASE_LOW | VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            _ => 0,
        }
    }

    fn set_register(&self, offset: u32, value: u32) {
        let mut registers = self.registers.lock();
        match offset {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => registers.device_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => registers.driver_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES => self.choose(&mut registers, value),
            VIRTIO_MMIO_QUEUE_SEL => registers.queue_select = value,
            // Only reached if the kernel does not handle the kick itself.
            VIRTIO_MMIO_QUEUE_NOTIFY => {
                if let Some(kick) = self.signals.kicks.get(value as usize) {
                    let _ = kick.write(1);
                }
            }
            VIRTIO_MMIO_INTERRUPT_ACK => self.signals.interrupt.acknowledge(value),
            VIRTIO_MMIO_STATUS if value == 0 => self.reset(&mut registers),
            VIRTIO_MMIO_STATUS => self.set_status(&mut registers, value),
            _ => self.set_queue(&registers, offset, value),
        }
    }

    /// Sets one half of the driver's features. They are fixed after FEATURES_OK.
    fn choose(&self, registers: &mut Registers, value: u32) {
        let is_agreed = self.signals.status.load(Ordering::SeqCst) & VIRTIO_CONFIG_S_FEATURES_OK != 0;
        let select = registers.driver_features_select;
        if select < 2 && !is_agreed {
            let kept = registers.driver_features & !(u64::from(u32::MAX) << (32 * select));
            registers.driver_features = kept | u64::from(value) << (32 * select);
        }
    }

    fn set_status(&self, registers: &mut Registers, value: u32) {
        let mut wanted = value & !VIRTIO_CONFIG_S_NEEDS_RESET;
        let chosen = registers.driver_features;
        if chosen & !self.identity.features() != 0 || chosen & 1 << VIRTIO_F_VERSION_1 == 0 {
            // The driver reads the missing bit back and gives up.
            wanted &= !VIRTIO_CONFIG_S_FEATURES_OK;
        }
        let before = self.signals.status.fetch_or(wanted, Ordering::SeqCst);
        if is_at_work(before | wanted) && !is_at_work(before) {
            self.start(registers);
        }
    }

    /// Sets up a queue. Writes are ignored while the device works, because the queues are locked then.
    fn set_queue(&self, registers: &Registers, offset: u32, value: u32) {
        let Some(mut parts) = self.parts.try_lock() else { return };
        let Some(queue) = parts.queues.get_mut(registers.queue_select as usize) else { return };
        match offset {
            VIRTIO_MMIO_QUEUE_NUM => queue.set_size(u16::try_from(value).unwrap_or(0)),
            VIRTIO_MMIO_QUEUE_READY => queue.set_ready(value == 1),
            VIRTIO_MMIO_QUEUE_DESC_LOW => queue.set_desc_table_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_DESC_HIGH => queue.set_desc_table_address(None, Some(value)),
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => queue.set_avail_ring_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => queue.set_avail_ring_address(None, Some(value)),
            VIRTIO_MMIO_QUEUE_USED_LOW => queue.set_used_ring_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_USED_HIGH => queue.set_used_ring_address(None, Some(value)),
            _ => {}
        }
    }
}
