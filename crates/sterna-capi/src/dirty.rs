//! Which pages the guest and its devices write.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sterna::ram::dirty::KvmSlot;

use crate::boundary::{enter, is_null, read};
use crate::error::{Failure, STERNA_ERROR_NULL, STERNA_ERROR_SYSTEM, sterna_error};
use crate::tracking::{CLog, Tracking, sterna_dirty_log};
use crate::vm::sterna_vm;

/// A memory slot of a KVM machine, and the part of guest memory that it maps.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sterna_kvm_slot {
    /// The number of the slot, as in KVM_SET_USER_MEMORY_REGION.
    pub slot: u32,
    /// The slot's flags without KVM_MEM_LOG_DIRTY_PAGES.
    pub flags: u32,
    /// The guest-physical address of the slot.
    pub guest_address: u64,
    /// The mapped block: 0 for the first that was added.
    pub block: u64,
    /// The first page of the block that the slot maps. Pages have 4096 bytes.
    pub first_page: u64,
    /// Number of pages.
    pub pages: u64,
}

/// Uses KVM's dirty log for the writes of vCPUs. `vm_fd` is the descriptor of the virtual machine; it is
/// duplicated. The library sets and clears KVM_MEM_LOG_DIRTY_PAGES of the slots, which must not change during a
/// migration.
///
/// Sources of dirty pages add up. Together they must cover every thread and device that writes guest memory.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_use_kvm_dirty_log(
    vm: *mut sterna_vm,
    vm_fd: i32,
    slots: *const sterna_kvm_slot,
    slots_count: usize,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            if slots.is_null() {
                return Err(is_null("slots"));
            }
            let slots = std::slice::from_raw_parts(slots, slots_count).iter().map(kvm_slot).collect();
            if vm_fd < 0 {
                return Err(Failure::new(
                    STERNA_ERROR_SYSTEM,
                    format!("vm_fd is {vm_fd}, and no descriptor"),
                ));
            }
            let fd = BorrowedFd::borrow_raw(vm_fd).try_clone_to_owned();
            let fd =
                fd.map_err(|error| Failure::new(STERNA_ERROR_SYSTEM, format!("duplicating vm_fd: {error}")))?;
            sterna_vm::change(vm, |parts| {
                parts.dirty.push(Tracking::Kvm(fd, slots));
                Ok(())
            })
        })
    }
}

/// Uses userfaultfd for the writes of all threads of this process, of the kernel on their behalf, and of KVM.
/// Needs Linux 6.7, and STERNA_RAM_MAY_USERFAULTFD on every block. It does not see other processes.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_use_userfaultfd(vm: *mut sterna_vm, error: *mut *mut sterna_error) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            sterna_vm::change(vm, |parts| {
                parts.dirty.push(Tracking::Userfaultfd);
                Ok(())
            })
        })
    }
}

/// Uses a dirty log that the program keeps.
///
/// Threads: any. The callbacks run on threads of the library, one after the other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_use_dirty_log(
    vm: *mut sterna_vm,
    log: *const sterna_dirty_log,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            sterna_vm::change(vm, |parts| {
                let given = read(log)?;
                if given.read.is_none() {
                    return Err(Failure::new(STERNA_ERROR_NULL, "sterna_dirty_log.read is NULL"));
                }
                parts.dirty.push(Tracking::Log(CLog { given, _owned: Arc::clone(&parts.vm.owned) }));
                Ok(())
            })
        })
    }
}

fn kvm_slot(given: &sterna_kvm_slot) -> KvmSlot {
    KvmSlot {
        slot: given.slot,
        flags: given.flags,
        guest_address: given.guest_address,
        block: usize::try_from(given.block).unwrap_or(usize::MAX),
        first_page: given.first_page,
        pages: given.pages,
    }
}
