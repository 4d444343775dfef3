//! Reasons for which a guest ends without an operator's request.

/// Why the guest ended without an operator's request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EndReason {
    /// The guest wrote this byte to the exit port.
    #[error("the guest ended with code {0}")]
    Exited(u8),
    /// The guest requested a reset.
    #[error("the guest asked for a reset")]
    Reset,
    /// The guest powered the machine off.
    #[error("the guest switched the machine off")]
    PoweredOff,
    /// The guest's kernel reported a panic.
    #[error("the guest's kernel panicked")]
    Panicked,
    /// A triple fault, or a power-off event.
    #[error("vcpu {vcpu} shut down (triple fault or power-off) at rip {rip:#x}")]
    Shutdown {
        /// Index of the vCPU that shut down.
        vcpu: usize,
        /// The vCPU's instruction pointer.
        rip: u64,
    },
    /// KVM cannot continue to run a vCPU.
    #[error("vcpu {vcpu} cannot run: {why}")]
    Failed {
        /// Index of the vCPU that failed.
        vcpu: usize,
        /// KVM's description of the failure.
        why: String,
    },
}
