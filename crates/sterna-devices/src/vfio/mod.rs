//! VFIO's migration protocol, version 2: states, the ways between them, and what is asked of a device.
//!
//! # The model
//! A device is in one of eight states ([`MigState`]). Whoever drives it asks for a state, and the device goes
//! there along the shortest way through the [`arcs`]; an arc may fail, and then the device is where it was or
//! somewhere on the way, or has failed permanently (ERROR: only a reset helps).
//!
//! ```text
//!                 ┌──────────┐        ┌─────────────┐      ┌──────┐      ┌──────────┐
//!   runs          │ RUNNING  │◄──────►│ RUNNING_P2P │◄────►│ STOP │◄────►│ RESUMING │  written
//!                 └────▲─────┘        └──────▲──────┘      └──▲───┘      └──────────┘
//!                      ▼                     ▼                ▼
//!                 ┌──────────┐        ┌──────────────┐  ┌───────────┐
//!   is read       │ PRE_COPY │◄──────►│ PRE_COPY_P2P │─►│ STOP_COPY │
//!                 └──────────┘        └──────────────┘  └───────────┘
//! ```
//!
//! In the P2P states a device starts nothing towards other devices; it may still write guest RAM until it has
//! stopped. P2P and PRE_COPY are optional ([`MigrationFeatures`]); without them arcs join their neighbours.
//!
//! The state of the device is a stream of bytes, read in the states of the lower row and written in RESUMING.
//! It ends at the first read of 0 bytes in STOP_COPY; leaving RESUMING is when the device checks it.
//!
//! [`DmaLog`] is the dirty source of what a device writes into guest RAM, over whoever logs it. With the cargo
//! feature `vfio-ioctls` there is `kernel`: devices that the kernel's VFIO drives.
//!
//! [`feature`] has the numbers and payloads that the kernel's ioctl and vfio-user's message share.

pub mod arcs;
mod device;
mod dma_log;
mod error;
pub mod feature;
#[cfg(any(test, feature = "vfio-ioctls"))]
pub mod kernel;
mod port;
mod state;

pub use arcs::path;
pub use device::VfioDevice;
pub(crate) use dma_log::keep;
pub use dma_log::{DmaLog, DmaLogger, DmaRange};
pub use error::{DeviceError, PortError};
pub use port::{MigrationPort, PrecopyInfo};
pub use state::{MigState, MigrationFeatures};
