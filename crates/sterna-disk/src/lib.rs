//! Disks in files and block devices: their content and their locks.
//!
//! An [`Image`] is a disk in a raw file, a block device or a qcow2 file. A machine opens it when the machine is
//! made, and uses it while the machine has its [lock](Image::lock). A machine that waits for a guest opens the
//! disk without the lock.
//!
//! | module | contains |
//! | --- | --- |
//! | [`image`] | a disk and its content |
//! | [`lock`] | the lock of a disk, and its handover |
//! | [`qcow2`] | qcow2 files, which the crate `imago` reads and writes |
//! | [`files`], [`options`] | functions and types that the other modules share |
#![warn(unreachable_pub)]

mod files;
mod image;
mod lock;
mod options;
mod qcow2;

pub use image::Image;
pub use options::{Format, ImageOptions, SECTOR};
