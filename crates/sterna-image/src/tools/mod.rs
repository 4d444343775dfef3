//! Looking at images, and mending them: what stands behind `sterna verify`, `inspect`, `extract`, `diff` and
//! `repair`.
//!
//! | module | what |
//! | --- | --- |
//! | [`verify`](mod@verify) | is it sound; what is damaged, where, and what to do |
//! | [`finding`] | how that is said |
//! | [`inspect`](mod@inspect), [`coverage`], [`picture`](mod@picture) | what it is; which pages hold data |
//! | [`state`], [`description`], [`sections`] | a device's opaque bytes by the names of their fields |
//! | [`extract`](mod@extract) | memory out of an image, raw or as a core file |
//! | [`memory_map`], [`paging`], [`registers`], [`elf`], [`architecture`] | where blocks lie in physical memory, what maps it, core files |
//! | [`diff`](mod@diff) | what two images differ in |
//! | [`repair`](mod@repair) | bitmaps for a background snapshot |
//! | [`reading`], [`spool`] | reading much, once; random access to what has none |

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
