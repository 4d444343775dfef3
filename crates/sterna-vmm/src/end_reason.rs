//! How a guest ends by itself.

/// Why a guest ended by itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EndReason {
    /// It wrote this byte to the exit port.
    #[error("the guest ended with code {0}")]
    Exited(u8),
    /// It asked for a reset.
    #[error("the guest asked for a reset")]
    Reset,
    /// It switched the machine off.
    #[error("the guest switched the machine off")]
    PoweredOff,
    /// Its kernel panicked.
    #[error("the guest's kernel panicked")]
    Panicked,
    /// A triple fault, or a power-off event.
    #[error("vcpu {vcpu} shut down (triple fault or power-off) at rip {rip:#x}")]
    Shutdown {
        /// Which vCPU.
        vcpu: usize,
        /// Its instruction pointer.
        rip: u64,
    },
    /// KVM could not go on.
    #[error("vcpu {vcpu} cannot run: {why}")]
    Failed {
        /// Which vCPU.
        vcpu: usize,
        /// What KVM said.
        why: String,
    },
}
