//! The configuration of a hosted VM.

use sterna_vmm::MachineConfig;

/// The configuration of a hosted VM.
///
/// The process machine refuses options of [`Config::machine`] that it lacks.
pub struct Config {
    /// The machine, without its guest and its console.
    pub machine: MachineConfig,
    /// How the guest writes its memory.
    pub load: Load,
}

/// How the guest writes its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// The order in which pages are written.
    pub pattern: sterna_guests::Pattern,
    /// The content of RAM before the first write.
    pub fill: sterna_guests::Fill,
    /// Pages per second and vCPU; 0: as fast as possible.
    pub rate: u64,
    /// Bytes that the guest writes repeatedly, over all vCPUs; none: all RAM.
    pub working_set_bytes: Option<u64>,
}
