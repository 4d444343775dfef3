//! KVM calls that kvm-ioctls lacks, and conversions between the kernel's structures and bytes. The calls are
//! the second form of the segment registers, xsave of any size, and the TSC's offset.

use std::mem::size_of;
use std::os::fd::AsRawFd;

use kvm_bindings::{
    KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, KVMIO, kvm_clock_data, kvm_debugregs, kvm_device_attr,
    kvm_irqchip, kvm_lapic_state, kvm_pit_state2, kvm_regs, kvm_sregs, kvm_sregs2, kvm_vcpu_events, kvm_xcrs,
    kvm_xsave,
};
use kvm_ioctls::{Error, VcpuFd};
use vmm_sys_util::ioctl::{ioctl_with_mut_ptr, ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref};
use vmm_sys_util::{ioctl_ior_nr, ioctl_iow_nr};

ioctl_ior_nr!(KVM_GET_SREGS2, KVMIO, 0xcc, kvm_sregs2);
ioctl_iow_nr!(KVM_SET_SREGS2, KVMIO, 0xcd, kvm_sregs2);
ioctl_ior_nr!(KVM_GET_XSAVE, KVMIO, 0xa4, kvm_xsave);
ioctl_iow_nr!(KVM_SET_XSAVE, KVMIO, 0xa5, kvm_xsave);
ioctl_ior_nr!(KVM_GET_XSAVE2, KVMIO, 0xcf, kvm_xsave);
ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);
ioctl_iow_nr!(KVM_HAS_DEVICE_ATTR, KVMIO, 0xe3, kvm_device_attr);

/// A structure of the kernel's ABI without padding, valid for any bytes.
///
/// # Safety
/// Only for `repr(C)` types whose every byte belongs to an integer (or to an array or union of such).
pub(crate) unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($name:ty),+ $(,)?) => { $(
        // SAFETY: an ABI structure made of integers alone; the kernel's headers spell out every padding field.
        unsafe impl Plain for $name {}
    )+ };
}
plain!(
    kvm_regs,
    kvm_sregs,
    kvm_sregs2,
    kvm_xcrs,
    kvm_lapic_state,
    kvm_vcpu_events,
    kvm_debugregs,
    kvm_clock_data,
    kvm_irqchip,
    kvm_pit_state2,
);

/// The bytes of a structure. x86 is little-endian, so they are the same on every host.
pub(crate) fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: `Plain` has no padding, so all `size_of::<T>()` bytes are initialised; the borrow keeps it alive.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// Decodes a structure; `None` if the number of bytes is wrong.
pub(crate) fn from_bytes<T: Plain>(bytes: &[u8]) -> Option<T> {
    if bytes.len() != size_of::<T>() {
        return None;
    }
    // SAFETY: the length was checked, `read_unaligned` needs no alignment, and any bytes are a valid `Plain`.
    Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// A structure whose bytes are all zero.
pub(crate) fn zeroed<T: Plain>() -> T {
    // SAFETY: any bytes are a valid `Plain`.
    unsafe { std::mem::zeroed() }
}

fn check(result: i32) -> Result<(), Error> {
    if result < 0 { Err(Error::last()) } else { Ok(()) }
}

/// Reads segment and control registers with the PDPTRs (Linux 5.14).
pub(crate) fn get_sregs2(vcpu: &VcpuFd) -> Result<kvm_sregs2, Error> {
    let mut sregs = zeroed();
    // SAFETY: the kernel writes exactly one kvm_sregs2.
    check(unsafe { ioctl_with_mut_ref(vcpu, KVM_GET_SREGS2(), &mut sregs) })?;
    Ok(sregs)
}

/// Sets the registers that [`get_sregs2`] read.
pub(crate) fn set_sregs2(vcpu: &VcpuFd, sregs: &kvm_sregs2) -> Result<(), Error> {
    // SAFETY: the kernel reads exactly one kvm_sregs2.
    check(unsafe { ioctl_with_ref(vcpu, KVM_SET_SREGS2(), sregs) })
}

/// Reads the xsave area. `size` is KVM_CAP_XSAVE2's value, or 4096 if the kernel does not offer it (`two`
/// false).
pub(crate) fn get_xsave(vcpu: &VcpuFd, size: usize, two: bool) -> Result<Vec<u8>, Error> {
    let mut area = vec![0u64; size.max(size_of::<kvm_xsave>()).div_ceil(8)];
    let request = if two { KVM_GET_XSAVE2() } else { KVM_GET_XSAVE() };
    // SAFETY: the kernel writes at most the size it announced (4096 for the old call), and `area` has that much.
    check(unsafe { ioctl_with_mut_ptr(vcpu, request, area.as_mut_ptr().cast::<kvm_xsave>()) })?;
    Ok(area.iter().flat_map(|word| word.to_le_bytes()).collect())
}

/// Sets an xsave area. A shorter one is padded with zeros to `size`, because the kernel reads all of it.
pub(crate) fn set_xsave(vcpu: &VcpuFd, bytes: &[u8], size: usize) -> Result<(), Error> {
    let len = size.max(size_of::<kvm_xsave>()).max(bytes.len());
    let mut area = vec![0u64; len.div_ceil(8)];
    for (word, chunk) in area.iter_mut().zip(bytes.chunks(8)) {
        let mut le = [0; 8];
        le[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_le_bytes(le);
    }
    // SAFETY: the kernel reads the size it announced at most, and `area` has at least that much.
    check(unsafe { ioctl_with_ptr(vcpu, KVM_SET_XSAVE(), area.as_ptr().cast::<kvm_xsave>()) })
}

/// The guest's TSC minus the host's. Fails if the kernel has no such attribute.
pub(crate) fn tsc_offset(vcpu: &VcpuFd) -> Result<u64, Error> {
    let mut offset = 0u64;
    let attribute = tsc_attribute(std::ptr::from_mut(&mut offset) as u64);
    // SAFETY: both calls read the attribute, the second writes 8 bytes at its address, which is `offset`.
    check(unsafe { ioctl_with_ref(vcpu, KVM_HAS_DEVICE_ATTR(), &attribute) })?;
    // SAFETY: as above.
    check(unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR(), &attribute) })?;
    Ok(offset)
}

/// Sets the offset that [`tsc_offset`] reads.
pub(crate) fn set_tsc_offset(vcpu: &VcpuFd, offset: u64) -> Result<(), Error> {
    let attribute = tsc_attribute(std::ptr::from_ref(&offset) as u64);
    // SAFETY: the kernel reads the attribute and 8 bytes at its address, which is `offset`.
    check(unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR(), &attribute) })
}

fn tsc_attribute(addr: u64) -> kvm_device_attr {
    kvm_device_attr { flags: 0, group: KVM_VCPU_TSC_CTRL, attr: KVM_VCPU_TSC_OFFSET.into(), addr }
}

/// Reads one MSR. None if the kernel does not know it.
pub(crate) fn read_msr(vcpu: &VcpuFd, index: u32) -> Option<u64> {
    let entry = kvm_bindings::kvm_msr_entry { index, ..Default::default() };
    let mut msrs = kvm_bindings::Msrs::from_entries(&[entry]).ok()?;
    match vcpu.get_msrs(&mut msrs) {
        Ok(1) => Some(msrs.as_slice()[0].data),
        _ => None,
    }
}

/// Writes one MSR. False if the kernel refuses the value.
pub(crate) fn write_msr(vcpu: &VcpuFd, index: u32, data: u64) -> bool {
    let entry = kvm_bindings::kvm_msr_entry { index, data, ..Default::default() };
    kvm_bindings::Msrs::from_entries(&[entry]).is_ok_and(|msrs| matches!(vcpu.set_msrs(&msrs), Ok(1)))
}

/// Duplicates a descriptor: a second one for the same open file.
pub(crate) fn duplicate(fd: &impl AsRawFd) -> std::io::Result<std::os::fd::OwnedFd> {
    // SAFETY: the descriptor is open: `fd` owns it and is borrowed for the length of the call.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(fd.as_raw_fd()) }.try_clone_to_owned()
}
