//! Tools that examine and repair images.
//!
//! They are the library part of `sterna verify`, `inspect`, `extract`, `diff` and `repair`.
//!
//! | module | contains |
//! | --- | --- |
//! | [`verify`](mod@verify) | checks an image; reports damage, its place and the remedy |
//! | [`finding`] | the record of one check's result |
//! | [`inspect`](mod@inspect), [`coverage`], [`picture`](mod@picture) | properties of an image; pages that have data |
//! | [`state`], [`description`], [`sections`] | a device's opaque bytes by the names of their fields |
//! | [`extract`](mod@extract) | memory out of an image, raw or as a core file |
//! | [`memory_map`], [`paging`], [`registers`], [`elf`], [`architecture`] | block addresses, page tables, core files |
//! | [`diff`](mod@diff) | differences between two images |
//! | [`repair`](mod@repair) | bitmaps for a background snapshot |
//! | [`reading`], [`spool`] | fast reads of whole files; random access to compressed images |

pub mod architecture;
pub mod coverage;
pub mod description;
pub mod diff;
pub mod elf;
pub mod extract;
pub mod finding;
pub mod inspect;
pub mod memory_map;
pub mod paging;
pub mod picture;
pub mod reading;
pub mod registers;
pub mod repair;
pub mod sections;
pub mod spool;
pub mod state;
pub mod verify;
