//! The states, and which of them a device has.

use std::fmt;

use vfio_bindings::bindings::vfio as sys;

/// A device's migration state; the numbers are the uAPI's (`enum vfio_device_mig_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum MigState {
    /// It failed; only a reset leads out.
    Error = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_ERROR,
    /// It does nothing: no DMA, no interrupts, no change of its own.
    Stop = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_STOP,
    /// It runs.
    Running = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_RUNNING,
    /// Stopped, and its state is read.
    StopCopy = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_STOP_COPY,
    /// Stopped, and a new state is written.
    Resuming = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_RESUMING,
    /// It runs, but starts nothing towards other devices.
    RunningP2p = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_RUNNING_P2P,
    /// It runs, and what can be read of its state is read.
    PreCopy = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_PRE_COPY,
    /// Both of the last two.
    PreCopyP2p = sys::vfio_device_mig_state_VFIO_DEVICE_STATE_PRE_COPY_P2P,
}

impl MigState {
    /// All of them, in the order of their numbers.
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

    /// The state of that number, if there is one.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// Its number.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// The uAPI's name without its prefix.
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

    /// Whether the device may change its state, write guest RAM and interrupt by itself.
    pub fn runs(self) -> bool {
        matches!(self, MigState::Running | MigState::RunningP2p | MigState::PreCopy | MigState::PreCopyP2p)
    }

    /// Whether its state can be read: a *save session* lasts for as long as the device stays in such states.
    pub fn saves(self) -> bool {
        matches!(self, MigState::PreCopy | MigState::PreCopyP2p | MigState::StopCopy)
    }
}

impl fmt::Display for MigState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a device that can migrate has beyond the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct MigrationFeatures {
    /// RUNNING_P2P, and PRE_COPY_P2P if it has `pre_copy` too.
    pub p2p: bool,
    /// PRE_COPY.
    pub pre_copy: bool,
}

impl MigrationFeatures {
    /// Out of the uAPI's flags; `None` if the device cannot be stopped and read (VFIO_MIGRATION_STOP_COPY),
    /// which is the least.
    pub fn from_flags(flags: u64) -> Option<Self> {
        let has = |flag: u32| flags & u64::from(flag) != 0;
        has(sys::VFIO_MIGRATION_STOP_COPY)
            .then(|| Self { p2p: has(sys::VFIO_MIGRATION_P2P), pre_copy: has(sys::VFIO_MIGRATION_PRE_COPY) })
    }

    /// The uAPI's flags.
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

    /// Whether a device of these features has that state.
    pub fn has(self, state: MigState) -> bool {
        match state {
            MigState::RunningP2p => self.p2p,
            MigState::PreCopy => self.pre_copy,
            MigState::PreCopyP2p => self.p2p && self.pre_copy,
            _ => true,
        }
    }
}
