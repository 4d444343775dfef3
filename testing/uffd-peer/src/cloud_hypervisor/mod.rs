//! Cloud Hypervisor's side of its local migrations (specs/ch-offload.md), with real memfds and a second connection.
//!
//! The bytes are written here a second time, so that the tests compare two implementations.

mod guest;
mod receiver;
mod sender;
mod wire;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

pub use guest::Guest;
pub use receiver::{Arrived, Receiver, Reply};
pub use sender::Sender;

/// Numbers of the commands.
pub mod command {
    /// `Start`.
    pub const START: u16 = 1;
    /// `Config`.
    pub const CONFIG: u16 = 2;
    /// `State`.
    pub const STATE: u16 = 3;
    /// `Memory`.
    pub const MEMORY: u16 = 4;
    /// `Complete`.
    pub const COMPLETE: u16 = 5;
    /// `Abandon`.
    pub const ABANDON: u16 = 6;
    /// `MemoryFd`.
    pub const MEMORY_FD: u16 = 7;
    /// `CompletePaused`.
    pub const COMPLETE_PAUSED: u16 = 8;
    /// `PageFault`.
    pub const PAGE_FAULT: u16 = 9;
}

/// Status of a response: performed.
pub const OK: u16 = 1;
/// Status of a response: failed.
pub const ERROR: u16 = 2;

/// A memory slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Its number.
    pub number: u32,
    /// First guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Place in its file.
    pub file_offset: u64,
}

/// A virtual machine.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Its memory slots. The memory has their order.
    pub slots: Vec<Slot>,
    /// Its memory.
    pub memory: Vec<u8>,
}

impl Machine {
    /// A machine with two slots, of which the second begins inside of its file.
    pub fn new(first: u64, second: u64) -> Self {
        let slots = vec![
            Slot { number: 3, address: 0, bytes: first, file_offset: 0 },
            Slot { number: 1, address: 1 << 32, bytes: second, file_offset: 0x20_0000 },
        ];
        Self { slots, memory: crate::memory(first + second) }
    }

    /// The `Config`.
    pub fn config(&self) -> Vec<u8> {
        let size = self.memory.len();
        format!(
            r#"{{"vm_config":{{"memory":{{"size":{size},"shared":true}}}},"common_cpuid":[{{"function":1}}],"memory_manager_data":{}}}"#,
            self.manager("")
        )
        .into_bytes()
    }

    /// The `State`.
    pub fn state(&self) -> Vec<u8> {
        let range = |slot: &Slot| format!(r#"{{"gpa":{},"length":{}}}"#, slot.address, slot.bytes);
        let ranges: Vec<String> = self.slots.iter().map(range).collect();
        let memory = self.manager(&ranges.join(",")).replace('"', "\\\"");
        let machine = r#"{\"clock\":null,\"common_cpuid\":[{\"function\":1}]}"#;
        format!(
            r#"{{"snapshots":{{"cpu-manager":{{"snapshots":{{}}}},"memory-manager":{{"snapshots":{{}},"snapshot_data":{{"state":"{memory}"}}}}}},"snapshot_data":{{"state":"{machine}"}}}}"#
        )
        .into_bytes()
    }

    /// The memory of each slot in a memfd.
    ///
    /// # Errors
    /// The error of the system.
    pub fn memfds(&self) -> io::Result<Vec<File>> {
        let mut at = 0;
        let make = |slot: &Slot| {
            let file = File::from(rustix::fs::memfd_create("ch_ram", rustix::fs::MemfdFlags::CLOEXEC)?);
            file.set_len(slot.file_offset + slot.bytes)?;
            let content = &self.memory[at..at + slot.bytes as usize];
            for (page, content) in (0..).zip(content.chunks(crate::PAGE as usize)) {
                if content.iter().any(|byte| *byte != 0) {
                    file.write_all_at(content, slot.file_offset + page * crate::PAGE)?;
                }
            }
            at += slot.bytes as usize;
            Ok(file)
        };
        self.slots.iter().map(make).collect()
    }

    fn manager(&self, ranges: &str) -> String {
        let mapping = |slot: &Slot| {
            let Slot { number, address, bytes, file_offset } = slot;
            format!(
                r#"{{"slot":{number},"gpa":{address},"size":{bytes},"zone_id":"mem0","virtio_mem":false,"file_offset":{file_offset}}}"#
            )
        };
        let mappings: Vec<String> = self.slots.iter().map(mapping).collect();
        let mappings = mappings.join(",");
        format!(r#"{{"guest_ram_mappings":[{mappings}],"memory_ranges":{{"data":[{ranges}]}}}}"#)
    }
}
