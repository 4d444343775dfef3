//! Looking at images, and mending them: what stands behind `sterna verify`, `inspect`, `extract`, `diff` and
//! `repair`.
//!
//! | module | what |
//! | --- | --- |
//! | [`verify`](mod@verify) | is it sound; what is damaged, where, and what to do |
//! | [`finding`] | how that is said |
//! | [`inspect`](mod@inspect), [`coverage`], [`picture`](mod@picture) | what it is; which pages hold data |
//! | [`state`], [`description`], [`sections`] | a device's opaque bytes by the names of their fields |
//! | [`memory_map`], [`registers`], [`elf`] | where blocks lie in physical memory, registers, core files |
//! | [`reading`] | reading much, once |

pub mod coverage;
pub mod description;
pub mod elf;
pub mod finding;
pub mod inspect;
pub mod memory_map;
pub mod picture;
pub mod reading;
pub mod registers;
pub mod sections;
pub mod state;
pub mod verify;
