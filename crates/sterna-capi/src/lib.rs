//! The C interface of the engine. `sterna.h` declares it, `docs/c-api.md` describes it.
//!
//! | module | contains |
//! | --- | --- |
//! | `boundary`, `text` | what every entry does: no panic leaves it, pointers and texts are checked |
//! | `error` | error codes and `sterna_error` |
//! | `callbacks` | calls of the program's functions, and how they report a failure |
//! | `parameters` | settings by QEMU's names, from the tables of `sterna-qmp` |
//! | `vm`, `ram`, `device`, `hook`, `dirty` | a virtual machine out of callbacks |
//! | `parts`, `tracking` | what these have added, before the first migration |
//! | `machine` | the same machine, as the engine sees it |
//! | `events` | statuses and events |
//! | `migration`, `incoming`, `waiting` | the two sides of a migration |
//! | `configured` | a destination whose machine is made from the source's configuration |
//!
//! The types have their names in C, so that a search finds both. cbindgen writes the header; a test compares it.
#![allow(non_camel_case_types, reason = "the types have their names in C")]
#![allow(
    clippy::missing_safety_doc,
    reason = "the comments are those of sterna.h, which states each contract for C"
)]
#![warn(unreachable_pub)]

mod boundary;
mod callbacks;
mod configured;
mod device;
mod dirty;
mod error;
mod events;
mod hook;
mod incoming;
mod machine;
mod migration;
mod parameters;
mod parts;
mod ram;
mod text;
mod tracking;
mod vm;
mod waiting;

pub use boundary::sterna_version;
pub use callbacks::{
    sterna_failure, sterna_failure_set, sterna_notice, sterna_state, sterna_state_write, sterna_step,
};
pub use configured::*;
pub use device::{sterna_device, sterna_vm_add_device, sterna_vm_set_compatibility};
pub use dirty::{
    sterna_kvm_slot, sterna_vm_use_dirty_log, sterna_vm_use_kvm_dirty_log, sterna_vm_use_userfaultfd,
};
pub use error::*;
pub use events::*;
pub use hook::{sterna_hook, sterna_vm_add_hook};
pub use incoming::*;
pub use migration::*;
pub use parameters::*;
pub use parts::sterna_vm_callbacks;
pub use ram::*;
pub use text::sterna_string_free;
pub use tracking::{
    sterna_dirty_log, sterna_dirty_pages, sterna_dirty_pages_add, sterna_dirty_pages_add_bitmap,
};
pub use vm::*;
