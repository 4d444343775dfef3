//! Compression between two relays, and references to pages that the other relay has (`specs/relay.md §10`).
//!
//! The session knows nothing of it: it gives DATA to a carrier and takes DATA from one. At the sender a [`Packer`]
//! turns DATA into PACKED before it is written; at the receiver an [`Unpacker`] turns it back. What the session
//! stores, counts and sends again are always the plain bytes.
//!
//! | type | belongs to | contents |
//! | --- | --- | --- |
//! | [`Packer`] | a carrier at the sender | its zstd stream, and for each flow the [`Trial`] of `auto` |
//! | [`Known`] | a session at the sender | hashes of the pages that the receiver probably has |
//! | [`Unpacker`] | a carrier at the receiver | the other end of its zstd stream |
//! | [`Cache`] | a relay at the receiver | the pages, of all sessions, and the dictionaries |
//!
//! Both ends need not agree about the cache. If a page is missing, the receiver asks for the bytes with MISS, and the
//! sender sends them again without references.

mod cache;
mod effort;
mod hash;
mod known;
mod mode;
mod packer;
mod trial;
mod unpacker;
mod window;

pub use cache::{Cache, Dictionary};
pub use effort::Effort;
pub use hash::PageHash;
pub use known::{Known, MOST_ANNOUNCED};
pub use mode::{BadMode, Mode};
pub use packer::{Figures, Packed, Packer};
pub use trial::Trial;
pub use unpacker::{Unpacked, Unpacker};
pub use window::WINDOW_LOG;

#[cfg(test)]
mod tests;
