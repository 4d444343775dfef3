//! Stores: images that share frames (`specs/image.md §10`). Everything goes over [`Objects`](crate::Objects).

mod collect;
mod directory;
mod image_store;
mod keys;
mod lease;
mod open;
mod packs;
mod place;
mod record;
mod save;

pub use collect::{Collected, StoreStat};
pub use directory::DirectoryObjects;
pub use image_store::ImageStore;
pub use open::NamedImage;
