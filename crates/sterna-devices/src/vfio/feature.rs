//! Numbers of device features (`struct vfio_device_feature`). The kernel's ioctl and vfio-user's
//! DEVICE_FEATURE message share them.

use vfio_bindings::bindings::vfio as sys;

/// Bits of the flags that contain the feature's number.
pub const MASK: u32 = sys::VFIO_DEVICE_FEATURE_MASK;
/// Flag: read the feature.
pub const GET: u32 = sys::VFIO_DEVICE_FEATURE_GET;
/// Flag: set the feature.
pub const SET: u32 = sys::VFIO_DEVICE_FEATURE_SET;
/// Flag: only report whether the device has the feature, with the other flagged methods.
pub const PROBE: u32 = sys::VFIO_DEVICE_FEATURE_PROBE;

/// The device's migration states: GET, a u64 of flags ([`super::MigrationFeatures`]).
pub const MIGRATION: u16 = sys::VFIO_DEVICE_FEATURE_MIGRATION as u16;
/// The device's state: GET and SET, a u32 state and an i32 descriptor.
pub const MIG_DEVICE_STATE: u16 = sys::VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE as u16;
/// Start of logging for DMA writes: SET, page size and ranges.
pub const DMA_LOGGING_START: u16 = sys::VFIO_DEVICE_FEATURE_DMA_LOGGING_START as u16;
/// End of logging: SET, without data.
pub const DMA_LOGGING_STOP: u16 = sys::VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP as u16;
/// Pages written in a range since the last report: GET, a range and its bitmap.
pub const DMA_LOGGING_REPORT: u16 = sys::VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT as u16;
/// Approximate number of bytes to read if the device stopped now: GET, a u64.
pub const MIG_DATA_SIZE: u16 = sys::VFIO_DEVICE_FEATURE_MIG_DATA_SIZE as u16;
