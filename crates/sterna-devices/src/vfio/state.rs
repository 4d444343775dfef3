//! VFIO's migration states, and the optional ones of a device.

use std::fmt;

use vfio_bindings::bindings::vfio as sys;

/// A device's migration state, with the uAPI's numbers (`enum vfio_device_mig_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum MigState {
    /// The device has failed. Only a reset leaves this state.
    Error = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_ERROR,
    /// The device is stopped: no DMA, no interrupts, no change of its state.
    Stop = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_STOP,
    /// The device runs normally.
    Running = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_RUNNING,
    /// The device is stopped, and its state is read.
    StopCopy = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_STOP_COPY,
    /// The device is stopped, and a new state is written.
    Resuming = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_RESUMING,
    /// The device runs, but starts no DMA to other devices.
    RunningP2p = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_RUNNING_P2P,
    /// The device runs, and the available part of its state is read.
    PreCopy = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_PRE_COPY,
    /// Like `PreCopy`, and the device starts no DMA to other devices.
    PreCopyP2p = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_PRE_COPY_P2P,
}

impl MigState {
    /// All states, in the order of their numbers.
    pub const ALL: [MigState; 8] = [
        MigState::Error,
        MigState::Stop,
        MigState::Running,
        MigState::StopCopy,
        MigState::Resuming,
        MigState::RunningP2p,
        MigState::PreCopy,
        MigState::PreCopyP2p,
    ];

    /// Converts a uAPI number. `None` if no state has it.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// The state's number in the uAPI.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// The state's name in the uAPI, without its prefix.
    pub fn name(self) -> &'static str {
        match self {
            MigState::Error => "ERROR",
            MigState::Stop => "STOP",
            MigState::Running => "RUNNING",
            MigState::StopCopy => "STOP_COPY",
            MigState::Resuming => "RESUMING",
            MigState::RunningP2p => "RUNNING_P2P",
            MigState::PreCopy => "PRE_COPY",
            MigState::PreCopyP2p => "PRE_COPY_P2P",
        }
    }

    /// Whether the device may change its state, write guest RAM and raise interrupts by itself.
    pub fn runs(self) -> bool {
        matches!(self, MigState::Running | MigState::RunningP2p | MigState::PreCopy | MigState::PreCopyP2p)
    }

    /// Whether the device's state can be read. A *save session* lasts while the device is in such states.
    pub fn saves(self) -> bool {
        matches!(self, MigState::PreCopy | MigState::PreCopyP2p | MigState::StopCopy)
    }
}

impl fmt::Display for MigState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The optional migration states of a device that can migrate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct MigrationFeatures {
    /// The device has RUNNING_P2P, and PRE_COPY_P2P if it has `pre_copy` too.
    pub p2p: bool,
    /// The device has PRE_COPY.
    pub pre_copy: bool,
}

impl MigrationFeatures {
    /// Decodes the uAPI's flags. `None` if the device lacks the required VFIO_MIGRATION_STOP_COPY: it cannot
    /// be stopped and read.
    pub fn from_flags(flags: u64) -> Option<Self> {
        let has = |flag: u32| flags & u64::from(flag) != 0;
        has(sys::VFIO_MIGRATION_STOP_COPY)
            .then(|| Self { p2p: has(sys::VFIO_MIGRATION_P2P), pre_copy: has(sys::VFIO_MIGRATION_PRE_COPY) })
    }

    /// Encodes the uAPI's flags.
    pub fn flags(self) -> u64 {
        let mut flags = sys::VFIO_MIGRATION_STOP_COPY;
        if self.p2p {
            flags |= sys::VFIO_MIGRATION_P2P;
        }
        if self.pre_copy {
            flags |= sys::VFIO_MIGRATION_PRE_COPY;
        }
        u64::from(flags)
    }

    /// Whether a device with these features has the state.
    pub fn has(self, state: MigState) -> bool {
        match state {
            MigState::RunningP2p => self.p2p,
            MigState::PreCopy => self.pre_copy,
            MigState::PreCopyP2p => self.p2p && self.pre_copy,
            _ => true,
        }
    }
}
