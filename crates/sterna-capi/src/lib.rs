//! The C interface of the engine. `sterna.h` declares it, `docs/c-api.md` describes it.
//!
//! | module | contains |
//! | --- | --- |
//! | `boundary` | what every entry does: no panic leaves it, pointers and texts are checked |
//! | `error` | error codes, `sterna_error`, and how a callback reports a failure |
//! | `parameters` | settings by QEMU's names, from the tables of `sterna-qmp` |
//! | `vm`, `ram`, `device`, `hook`, `dirty` | a virtual machine out of callbacks |
//! | `machine` | the same machine, as the engine sees it |
//! | `events` | statuses and events |
//! | `migration`, `incoming`, `waiting` | the two sides of a migration |
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
mod device;
mod dirty;
mod error;
mod events;
mod hook;
mod incoming;
mod machine;
mod migration;
mod parameters;
mod ram;
mod vm;
mod waiting;

pub use boundary::{sterna_string_free, sterna_version};
pub use callbacks::{sterna_notice, sterna_step};
pub use device::{
    sterna_device, sterna_state, sterna_state_write, sterna_vm_add_device, sterna_vm_set_compatibility,
};
pub use dirty::{
    sterna_dirty_log, sterna_dirty_pages, sterna_dirty_pages_add, sterna_dirty_pages_add_bitmap,
    sterna_kvm_slot, sterna_vm_use_dirty_log, sterna_vm_use_kvm_dirty_log, sterna_vm_use_userfaultfd,
};
pub use error::*;
pub use events::*;
pub use hook::{sterna_hook, sterna_vm_add_hook};
pub use incoming::*;
pub use migration::*;
pub use parameters::*;
pub use ram::*;
pub use vm::*;
