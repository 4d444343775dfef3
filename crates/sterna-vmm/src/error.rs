//! Why a machine could not be made or driven.

use std::io;

use sterna::VmError;

/// What went wrong in the machine itself; always local, never a peer's fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmmError {
    /// The configuration cannot be built.
    #[error("machine configuration: {what}: {why}")]
    Config {
        /// Which setting.
        what: &'static str,
        /// What is wrong with it, and what would be right.
        why: String,
    },
    /// The kernel refused a call.
    #[error("{call} on {on}: {source}")]
    Kvm {
        /// The call, such as `KVM_CREATE_VM`.
        call: &'static str,
        /// The object it was made on: `/dev/kvm`, `vm`, `vcpu 3`.
        on: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Guest RAM could not be mapped or written.
    #[error("guest RAM: {0}")]
    Ram(#[from] sterna_ram::RamError),
    /// The dirty log could not be set up.
    #[error("dirty log: {0}")]
    Dirty(#[from] sterna_ram::DirtyError),
    /// A thread could not be started.
    #[error("thread of {of}: {source}")]
    Thread {
        /// Whose: `vcpu 3`, `the throttle`.
        of: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The operation does not fit what the machine is doing.
    #[error("{what}: {why}")]
    State {
        /// What was asked.
        what: &'static str,
        /// Why not now, and what to do.
        why: String,
    },
}

impl VmmError {
    /// The kernel refused `call` on `on`.
    pub(crate) fn kvm(call: &'static str, on: impl Into<String>, error: kvm_ioctls::Error) -> Self {
        VmmError::Kvm { call, on: on.into(), source: io::Error::from_raw_os_error(error.errno()) }
    }
}

impl From<VmmError> for VmError {
    fn from(error: VmmError) -> Self {
        match error {
            VmmError::State { what, why } => VmError::new(what, why),
            other => VmError::new("machine", other),
        }
    }
}
