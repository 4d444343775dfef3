//! Errors of building and operating a machine.

use std::io;

use sterna::VmError;

/// A local failure of the machine itself, never caused by a peer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmmError {
    /// The configuration cannot be built.
    #[error("machine configuration: {what}: {why}")]
    Config {
        /// Name of the setting.
        what: &'static str,
        /// Why the setting is wrong, and which values are right.
        why: String,
    },
    /// The kernel refused a call.
    #[error("{call} on {on}: {source}")]
    Kvm {
        /// The call, such as `KVM_CREATE_VM`.
        call: &'static str,
        /// The object of the call: `/dev/kvm`, `vm`, `vcpu 3`.
        on: String,
        /// The error that the kernel returned.
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
        /// The thread's owner: `vcpu 3`, `the throttle`.
        of: String,
        /// The error that the system returned.
        source: io::Error,
    },
    /// The operation is not possible in the machine's present state.
    #[error("{what}: {why}")]
    State {
        /// Name of the requested operation.
        what: &'static str,
        /// Why it is not possible now, and what to do.
        why: String,
    },
}

impl VmmError {
    /// Builds the error of a refused `call` on the object `on`.
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
