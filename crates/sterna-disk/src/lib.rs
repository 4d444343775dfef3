//! Disks in files and block devices: what they contain, and who may use them.
//!
//! An [`Image`] is a disk in a raw file, in a block device, or in a qcow2 file. It is opened when a machine is made, and used
//! while this machine has its [lock](Image::lock): a machine that waits for a guest opens it without.
//!
//! | module | contains |
//! | --- | --- |
//! | [`image`] | a disk and its content |
//! | [`lock`] | who may use it, and how that is handed over |
//! | [`qcow2`] | qcow2 files, which the crate `imago` reads and writes |
//! | [`files`], [`options`] | what these share |
#![warn(unreachable_pub)]

mod files;
mod image;
mod lock;
mod options;
mod qcow2;

pub use image::Image;
pub use options::{Format, ImageOptions, SECTOR};
