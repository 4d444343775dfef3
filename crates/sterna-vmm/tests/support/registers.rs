//! A virtio-mmio driver that a test controls. The guest executes the commands in a mailbox in its RAM, one
//! register access at a time. The tests therefore cover the whole path: exits of the vCPU, the kernel's
//! eventfds, the interrupt's status.

#![allow(dead_code, reason = "each program of tests uses a part")]

use std::thread;
use std::time::Instant;

use sterna_devices::vhost_user::Ring;
use sterna_vmm::{GuestImage, KvmMachine};

use crate::virtqueue::{PATIENCE, Virtqueue};

/// Address of the mailbox. Its words: command (1 writes, 2 reads, 0 when done), address, value.
const MAILBOX: u64 = 0x20_0000;
/// Address of the first device's registers, and the distance to the next.
const DEVICES: u64 = 0xd000_0000;
const DEVICE_BYTES: u64 = 0x1000;

pub const MAGIC: u64 = 0x000;
pub const DEVICE_ID: u64 = 0x008;
pub const QUEUE_NUM_MAX: u64 = 0x034;
pub const INTERRUPT_STATUS: u64 = 0x060;
pub const STATUS: u64 = 0x070;
pub const GENERATION: u64 = 0x0fc;
pub const CONFIGURATION: u64 = 0x100;

pub const FEATURES_OK: u32 = 8;
pub const DRIVER_OK: u32 = 4;
pub const NEEDS_RESET: u32 = 64;
/// The feature bit VIRTIO_F_VERSION_1.
pub const VERSION_1: u64 = 1 << 32;

/// The guest that executes the mailbox's commands on one vCPU.
pub fn guest() -> GuestImage {
    #[rustfmt::skip]
    let code = vec![
        0xbb, 0x00, 0x00, 0x20, 0x00, // mov ebx, MAILBOX
        0xf3, 0x90,                   // again: pause
        0x8b, 0x03,                   // mov eax, [rbx]
        0x83, 0xf8, 0x01,             // cmp eax, 1
        0x74, 0x10,                   // je write
        0x83, 0xf8, 0x02,             // cmp eax, 2
        0x75, 0xf2,                   // jne again
        0x48, 0x8b, 0x4b, 0x08,       // mov rcx, [rbx + 8]
        0x8b, 0x11,                   // mov edx, [rcx]
        0x89, 0x53, 0x10,             // mov [rbx + 16], edx
        0xeb, 0x09,                   // jmp done
        0x48, 0x8b, 0x4b, 0x08,       // write: mov rcx, [rbx + 8]
        0x8b, 0x53, 0x10,             // mov edx, [rbx + 16]
        0x89, 0x11,                   // mov [rcx], edx
        0x31, 0xc0,                   // done: xor eax, eax
        0x89, 0x03,                   // mov [rbx], eax
        0xeb, 0xd8,                   // jmp again
    ];
    GuestImage::Flat64 { code, parameters: Vec::new() }
}

/// Waits for a condition that the guest or a device must fulfil.
///
/// # Panics
/// If it is not fulfilled within [`PATIENCE`].
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < PATIENCE, "it does not come: {what}");
        thread::yield_now();
    }
}

/// The registers of one device. They are the same on every machine.
#[derive(Debug, Clone, Copy)]
pub struct Registers(u64);

impl Registers {
    /// The registers of the device in slot `slot`.
    pub fn of(slot: u64) -> Self {
        Self(DEVICES + slot * DEVICE_BYTES)
    }

    pub fn read(self, machine: &KvmMachine, register: u64) -> u32 {
        access(machine, 2, self.0 + register, 0)
    }

    pub fn write(self, machine: &KvmMachine, register: u64, value: u32) {
        access(machine, 1, self.0 + register, value);
    }

    /// The first `bytes` of the configuration space, a multiple of 4.
    pub fn configuration(self, machine: &KvmMachine, bytes: u64) -> Vec<u8> {
        let word = |at| self.read(machine, CONFIGURATION + at).to_le_bytes();
        (0..bytes).step_by(4).flat_map(word).collect()
    }

    /// The features that the device offers.
    pub fn features(self, machine: &KvmMachine) -> u64 {
        let half = |select: u32| {
            self.write(machine, 0x014, select);
            u64::from(self.read(machine, 0x010)) << (32 * select)
        };
        half(0) | half(1)
    }

    /// Resets the device and negotiates `features`. False if the device refuses them.
    pub fn agree(self, machine: &KvmMachine, features: u64) -> bool {
        self.write(machine, STATUS, 0);
        self.write(machine, STATUS, 3);
        for select in [0, 1] {
            self.write(machine, 0x024, select);
            self.write(machine, 0x020, (features >> (32 * select)) as u32);
        }
        self.write(machine, STATUS, 3 | FEATURES_OK);
        self.read(machine, STATUS) & FEATURES_OK != 0
    }

    /// Sets up the queues and reports the driver as ready. The features must have been negotiated.
    pub fn start(self, machine: &KvmMachine, rings: &[Ring]) {
        for (index, ring) in (0..).zip(rings) {
            self.write(machine, 0x030, index);
            self.write(machine, 0x038, ring.size.into());
            for (register, address) in
                [(0x080, ring.descriptors), (0x090, ring.available), (0x0a0, ring.used)]
            {
                self.write(machine, register, address as u32);
                self.write(machine, register + 4, (address >> 32) as u32);
            }
            self.write(machine, 0x044, 1);
        }
        self.write(machine, STATUS, 3 | FEATURES_OK | DRIVER_OK);
    }

    pub fn notify(self, machine: &KvmMachine, queue: u32) {
        self.write(machine, 0x050, queue);
    }

    /// Kicks the device and waits for an answer and the interrupt.
    pub fn wait(self, machine: &KvmMachine, driver: &mut Virtqueue, queue: u32) -> (u16, u32) {
        self.notify(machine, queue);
        let mut answer = None;
        wait_until("an answer", || {
            answer = driver.take(machine.ram());
            answer.is_some()
        });
        self.acknowledge(machine, 1);
        answer.expect("it was waited for")
    }

    /// Waits for an interrupt with this cause and acknowledges it.
    pub fn acknowledge(self, machine: &KvmMachine, cause: u32) {
        wait_until("an interrupt", || self.read(machine, INTERRUPT_STATUS) & cause != 0);
        self.write(machine, 0x064, cause);
    }
}

fn access(machine: &KvmMachine, what: u32, address: u64, value: u32) -> u32 {
    let block = machine.ram().block(0);
    let word = |at: u64| {
        let mut bytes = [0; 4];
        block.read(MAILBOX + at, &mut bytes).expect("inside RAM");
        u32::from_le_bytes(bytes)
    };
    block.write(MAILBOX + 8, &address.to_le_bytes()).expect("inside RAM");
    block.write(MAILBOX + 16, &value.to_le_bytes()).expect("inside RAM");
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    block.write(MAILBOX, &what.to_le_bytes()).expect("inside RAM");
    wait_until("the guest's access", || word(0) == 0);
    word(16)
}
