//! Cloud Hypervisor's local migrations: machines that become images, and images that become machines (specs/ch-offload.md).
//!
//! The VMM sends its machine over a Unix socket, with the guest's memory as descriptors. A [`Save`] receives a machine and
//! writes it to an image with the contents of the VMM's own snapshots. A [`Restore`] sends a machine out of an image, with
//! filled memory, or with empty memory whose pages the VMM requests when they are needed.
//!
//! | module | contains |
//! | --- | --- |
//! | `message` | headers, page requests: bytes and rules. Pure |
//! | `order` | [`Order`]: which message may come when. Pure |
//! | `machine`, `json` | the machine's texts. Pure |
//! | `layout` | [`MemoryLayout`]: memory slots, ranges, and their places in the image. Pure |
//! | `rules` | the limits of all |
//! | `channel`, `stop` | a connection; what ends its waits |
//! | `received`, `save` | [`Save`] |
//! | `image` | [`SavedMachine`] |
//! | `memory`, `placement` | the guest's memory, and which of it is there |
//! | `ahead`, `faults` | memory that is filled before the VMM asks for it; its requests |
//! | `huge_memfds` | hosts that cannot place single pages |
//! | `restore` | [`Restore`] |

mod ahead;
mod channel;
mod error;
mod faults;
mod huge_memfds;
mod image;
mod json;
mod layout;
mod machine;
mod machine_error;
mod memory;
mod message;
mod order;
mod placement;
mod received;
mod restore;
mod rules;
mod save;
mod stop;

pub use error::SessionError;
pub use image::SavedMachine;
pub use layout::{Found, MemoryLayout, Part, Slot};
pub use machine::{migration_config, vm_config};
pub use machine_error::MachineError;
pub use message::{
    Command, FAULT_ROLE, HEADER_BYTES, MessageError, PAGE_REQUEST_BYTES, PageRequest, Request, Response,
    SLOT_BYTES,
};
pub use order::{Order, OrderError};
pub use restore::{Restore, RestorePlan};
pub use save::{Save, SavePlan, SaveProgress, SaveStage, SavedGuest};
