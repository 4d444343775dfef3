//! Sterna's image format, and stores that share frames across images (`specs/image.md`).
//!
//! | module | contains |
//! | --- | --- |
//! | `blob` | [`Blob`]: random access to a file, an object, or memory |
//! | `objects` | [`Objects`]: the interface of an object storage |
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod blob;
mod error;
mod objects;

pub use blob::{Blob, FileBlob, MemoryBlob};
pub use error::StoreError;
pub use objects::{Condition, Listed, Objects, Tag, Upload};
