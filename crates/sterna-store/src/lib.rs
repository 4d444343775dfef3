//! Sterna's image format, and stores that share frames across images (`specs/image.md`).
//!
//! | module | contains |
//! | --- | --- |
//! | `layout` | header, index and footer: bytes and rules |
//! | `frame`, `key` | frames: compression, encryption, digests |
//! | `recipe` | [`Recipe`]: how a VMM's file is put together from pages and other bytes |
//! | `write` | [`ImageWriter`]: writes extents from several threads |
//! | `read` | [`StoredImage`]: pages and files at random, layers, the check of all frames |
//! | `blob` | [`Blob`]: random access to a file, an object, or memory |
//! | `store` | [`ImageStore`]: names, packs, garbage collection over `Objects` |
//! | `objects` | [`Objects`]: the interface of an object storage |
//! | `place`, `storages` | [`Place`]: an image's path or address; [`Storages`]: who opens addresses |
//! | `cached` | [`RangeCache`]: ranges of remote objects in memory and in a directory |
//! | `unfinished` | [`remove_unfinished`]: what a process removes before it ends at a signal |
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod blob;
mod cached;
mod digest;
mod error;
mod frame;
mod image_name;
#[doc(hidden)]
pub mod internals;
mod key;
mod layout;
mod objects;
mod place;
mod read;
mod recipe;
mod storages;
mod store;
mod unfinished;
mod write;

pub use blob::{Blob, FileBlob, MemoryBlob};
pub use cached::{CacheOptions, CachedObjects, RangeCache};
pub use digest::Digest;
pub use error::StoreError;
pub use key::Key;
pub use layout::{Block, EXTENT_LEAST, EXTENT_MOST, PAGE_BYTES, PageRange, StoredFile};
pub use objects::{Condition, Listed, Objects, Tag, Upload};
pub use place::Place;
pub use read::{Bases, Checked, Damage, FileBases, FileReader, NoBases, PagePlace, StoredImage};
pub use recipe::{Piece, Recipe};
pub use storages::{Storages, storage, use_storages};
pub use store::{Collected, DirectoryObjects, ImageStore, NamedImage, StoreStat};
pub use unfinished::{Unfinished, remove_unfinished};
pub use write::{ImageWriter, WriteLane, WriteOptions, Written, publish, put_working_set};
