//! VFIO's migration protocol, version 2: states, paths between them, and requests to a device.
//!
//! # The model
//! A device is in one of eight states ([`MigState`]). Its driver requests a state, and the device changes to
//! it along the shortest path through the [`arcs`]. If an arc fails, the device is in its old state or in a
//! state on the path. It may also have failed permanently: only a reset leaves ERROR.
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
//! In the P2P states a device starts no DMA to other devices. It may still write guest RAM until it has
//! stopped. P2P and PRE_COPY are optional ([`MigrationFeatures`]). Without them, arcs connect the
//! neighbouring states.
//!
//! The state of the device is a stream of bytes. It is read in the states of the lower row and written in
//! RESUMING. It ends at the first read of 0 bytes in STOP_COPY. The device checks a written state when it
//! leaves RESUMING.
//!
//! [`DmaLog`] is the dirty source for a device's writes to guest RAM, for any logger. With the cargo feature
//! `vfio-ioctls` there is a module `kernel` for devices of the kernel's VFIO.
//!
//! [`feature`] contains the numbers and payloads that the kernel's ioctl and vfio-user's message share.

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
