//! Optional features of the host's kernel, beyond the machine's minimum.

use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::{Cap, Kvm, VcpuFd};

use super::vm::KvmVm;
use crate::kvm;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Caps {
    pub(crate) sregs2: bool,
    /// Bytes of the xsave area. 0 if the kernel lacks KVM_CAP_XSAVE2.
    pub(crate) xsave2_bytes: usize,
    pub(crate) xsave: bool,
    pub(crate) xcrs: bool,
    pub(crate) debugregs: bool,
    pub(crate) clock_flags: u32,
    pub(crate) tsc_control: bool,
    pub(crate) gib_pages: bool,
}

impl Caps {
    /// Queries the kernel. `cpuid` is the guest's CPUID table.
    pub(crate) fn of(kvm: &Kvm, vm: &KvmVm, vcpu: &VcpuFd, cpuid: &[kvm_cpuid_entry2]) -> Self {
        let value = |cap| vm.fd().check_extension_int(cap);
        Self {
            sregs2: kvm::get_sregs2(vcpu).is_ok(),
            xsave2_bytes: value(Cap::Xsave2).try_into().unwrap_or(0),
            xsave: kvm.check_extension(Cap::Xsave),
            xcrs: kvm.check_extension(Cap::Xcrs),
            debugregs: kvm.check_extension(Cap::Debugregs),
            clock_flags: value(Cap::AdjustClock).try_into().unwrap_or(0),
            tsc_control: kvm.check_extension(Cap::TscControl),
            gib_pages: cpuid.iter().any(|entry| entry.function == 0x8000_0001 && entry.edx & 1 << 26 != 0),
        }
    }
}
