//! Dirty sources, and a guest that writes.
#![allow(dead_code, reason = "each test program uses its part")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sterna::ram::dirty::{Combined, KvmDirtyLog, KvmDirtyRings, KvmSlot, UffdDirtyLog};
use sterna::ram::{DirtySource, GuestRam};

use crate::vm::{LockedVm, PAGES};

/// The dirty source of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Log {
    Software,
    Userfaultfd,
    Kvm,
    KvmRing,
}

/// A VM of KVM's without vCPUs, whose only slot is the block.
fn kvm_vm(ram: &GuestRam) -> Option<(OwnedFd, KvmSlot)> {
    const KVM_CREATE_VM: libc::c_ulong = 0xae01;
    const KVM_SET_USER_MEMORY_REGION: libc::c_ulong = 0x4020_ae46;
    let kvm = std::fs::File::options().read(true).write(true).open("/dev/kvm").ok()?;
    // SAFETY: no pointers are passed, and the descriptor is new.
    let vm = unsafe {
        let vm = libc::ioctl(kvm.as_raw_fd(), KVM_CREATE_VM, 0);
        (vm >= 0).then(|| OwnedFd::from_raw_fd(vm))?
    };
    let block = ram.block(0);
    let region = [0u64, 0, block.len_bytes(), block.host_address() as u64];
    // SAFETY: slot 0 without flags at address 0: the structure has these four words, and the memory outlives the VM.
    let set = unsafe { libc::ioctl(vm.as_raw_fd(), KVM_SET_USER_MEMORY_REGION, region.as_ptr()) };
    assert_eq!(set, 0);
    let slot = KvmSlot { slot: 0, flags: 0, guest_address: 0, block: 0, first_page: 0, pages: block.pages() };
    Some((vm, slot))
}

/// The dirty source of a case, beside the software log that has the test's writes. `None`: this host has none.
pub fn dirty_source(log: Log, vm: &LockedVm) -> Option<Arc<dyn DirtySource>> {
    let (ram, software) = (&vm.ram, Arc::clone(&vm.log) as Arc<dyn DirtySource>);
    let also: Arc<dyn DirtySource> = match log {
        Log::Software => return Some(software),
        Log::Userfaultfd if !UffdDirtyLog::is_supported() => return None,
        Log::Userfaultfd => Arc::new(UffdDirtyLog::new(ram.clone())),
        Log::Kvm => {
            let (vm, slot) = kvm_vm(ram)?;
            Arc::new(KvmDirtyLog::new(vm, vec![slot], ram.clone()).unwrap())
        }
        Log::KvmRing => {
            let (vm, slot) = kvm_vm(ram)?;
            Arc::new(KvmDirtyRings::enable(vm, 1024).ok()?.source(&[], vec![slot], ram.clone()).unwrap())
        }
    };
    Some(Arc::new(Combined::new(vec![software, also])))
}

/// Writes pages as a guest does, until the test ends it or the engine stops the guest.
pub fn write_until(source: &LockedVm, writes: &AtomicBool) {
    for page in (1..PAGES).step_by(64).cycle() {
        if !writes.load(Ordering::Acquire) || !source.write_if_running(page, 3) {
            return;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Writes as a guest does until the test ends it, also after the engine has paused the guest for a moment.
pub fn write_steadily(source: &LockedVm, writes: &AtomicBool) {
    while writes.load(Ordering::Acquire) {
        write_until(source, writes);
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Writes few pages often, so that a write meets a protected page.
pub fn write_often(source: &LockedVm, writes: &AtomicBool) {
    for page in (1..33).cycle() {
        if !writes.load(Ordering::Acquire) {
            return;
        }
        source.write_if_running(page, 5);
        std::thread::sleep(Duration::from_micros(1));
    }
}
