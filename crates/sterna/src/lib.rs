//! The live-migration engine that a VMM embeds.
#![deny(unsafe_code)]

pub mod events;
pub mod hooks;
pub mod params;
pub mod stats;
pub mod vm;

pub use events::{Event, Observer, Status, SwitchoverStep};
pub use hooks::Hook;
pub use params::{Capabilities, Compression, Parameters, WaitLimits, ZeroPageDetection};
pub use stats::{IncomingStatistics, Round, Sample, Statistics};
pub use sterna_ram as ram;
pub use sterna_transport::Address;
pub use vm::{Device, RunState, SourceVm, TargetVm, VmError};
