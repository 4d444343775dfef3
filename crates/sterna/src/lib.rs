//! The live-migration engine that a VMM embeds.
//!
//! A VMM implements [`Vm`], [`SourceVm`] and [`TargetVm`] (usually on the same object), and calls
//! [`Migration::start`] and [`Incoming::listen`]. The engine speaks QEMU 11's migration stream
//! (specs/stream.md), over the main channel alone or with multifd. At no instant may both sides run the guest
//! (`sterna-proto`).
//!
//! | module | contains |
//! | --- | --- |
//! | [`vm`], [`device_stream`], [`hooks`], [`throttle`], [`free_page_hints`] | what a VMM implements |
//! | [`params`], [`events`], [`stats`], [`error`] | what an operator sets and sees |
//! | [`forecast`], [`dirty_rate`] | forecasts of a migration |
//! | [`outgoing`], [`incoming`] | the two sides |
//! | `rdma` (feature `rdma`) | the stream over RDMA connections |
//!
//! The guide `docs/embedding.md` in the repository describes in which order to implement the traits, what each
//! callback costs, and which thread calls it. Its code is from `examples/vm-memory-vmm`, a VMM that is built on
//! rust-vmm crates.
//!
//! # Compatibility
//!
//! Until 1.0 a minor version may change anything; the changelog lists the changes. Enums, errors and events grow
//! without notice: they are `#[non_exhaustive]`, so match them with `_`. Fields of [`Parameters`], [`Capabilities`],
//! [`WaitLimits`] and the statistics grow, too: write them with `..Parameters::default()`, match them with `..`. New
//! methods of traits have a default.
//!
//! # Features
//!
//! By default the engine has precopy over TCP and Unix sockets with multifd, files, and `mode` `cpr-transfer`. Features
//! add the rest; a setting that needs another one is refused ([`SettingsError::NotCompiled`]).
//!
//! | feature | adds |
//! | --- | --- |
//! | `tls` | TLS, with the VMM's own provider |
//! | `aws-lc-rs`, `ring` | `tls`, and the library for its arithmetic; if both are on, `aws-lc-rs` is used |
//! | `multifd-compression` | zlib and zstd |
//! | `postcopy`, `reconnect`, `standby`, `rdma` | the mode |
//! | `log` | events for the crate `log` |
//! | `vm-memory` | guest memory of the crate `vm-memory` |
//! | `full` | every mode |
#![deny(unsafe_code)]
#![warn(unreachable_pub)]

mod bell;
mod clock;
mod codec;
pub mod device_stream;
pub mod dirty_rate;
mod driver;
pub mod error;
pub mod events;
pub mod free_page_hints;
pub mod hooks;
mod identity;
pub mod incoming;
#[doc(hidden)]
pub mod internals;
mod interruption;
mod limits;
mod machine_type;
mod order;
pub mod outgoing;
mod pages;
pub mod params;
#[cfg(feature = "postcopy")]
mod postcopy;
pub mod precopy;
#[cfg(feature = "rdma")]
pub mod rdma;
#[cfg(not(feature = "rdma"))]
#[path = "rdma/off.rs"]
mod rdma;
mod reconnect;
pub mod rules;
mod same_host;
#[cfg(target_arch = "x86_64")]
pub mod sandbox;
mod settings_error;
mod shared_settings;
mod start_error;
pub mod stats;
mod streams;
mod threads;
pub mod throttle;
mod throttle_clock;
pub mod vm;

pub use bell::EventFd;
pub use device_stream::{AskCheckpoint, DeviceStream, EpochStream, RemainingState};
pub use error::{Difference, Fault, MigrationError, Misbehaviour, VmError};
pub use events::{Event, Observer, Status, SwitchoverStep};
pub use free_page_hints::{FreePageHints, FreePages};
pub use hooks::Hook;
#[cfg(feature = "planted-faults")]
pub use incoming::SharingFault;
pub use incoming::{Arrival, Incoming, RecoverError};
pub use outgoing::live::{ChangeLog, LiveSave, LiveSaveOptions, LiveSaved, Snapshot};
pub use outgoing::{Decision, Migration, Outcome, ResumeError, RetryError, Waited};
pub use params::{
    Capabilities, Compression, MigrationMode, NonConvergence, Parameters, StatusQuestions, WaitLimits,
    ZeroPageDetection,
};
pub use precopy::Recording;
pub use rdma::RdmaParameters;
pub use settings_error::SettingsError;
pub use shared_settings::{SettingLimits, SharedSettings};
pub use start_error::{StartError, SystemRefusal, Unsharable, UnusableImage};
pub use stats::{
    IncomingRdmaStatistics, IncomingStatistics, LaneTimes, RdmaStatistics, Reconnection, ReconnectionTotals,
    Round, Sample, Statistics, StreamStatistics, SyncParts,
};
pub use sterna_forecast::forecast;
pub use sterna_ram as ram;
pub use sterna_transport::{
    Address, CredentialsError, DescriptorProblem, Direct, HandedFd, Tls, TlsEndpoint, TransportError,
};
#[cfg(feature = "tls")]
pub use sterna_transport::{Authorization, AuthorizationRule, CryptoProvider, TlsCredentials, TlsFiles};
#[cfg(feature = "rdma")]
pub use sterna_wire::rdma::ChunkSize;
#[cfg(feature = "planted-faults")]
pub use threads::planted::refuse_threads;
pub use threads::{OnThreadStart, ThreadRole};
pub use throttle::{DirtyLimitTimes, Throttle, VcpuDirtyRate};
pub use throttle_clock::{ThrottleClock, ThrottleLimits};
pub use vm::{Device, HostDescriptors, RunState, SourceVm, TargetVm, Vm};

/// Compiles the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
