//! Answers the page faults of guests out of a memory image (specs/uffd.md). Another VMM runs them, or this process.
//!
//! The VMM (Firecracker with the memory backend `Uffd`) maps the guest's memory empty, registers it with a
//! userfaultfd, and sends the descriptor to a Unix socket. A [`Pager`] listens at the sockets of any number of guests
//! of one image. It answers each fault with the image's page, and fills the remaining memory in the background. A guest
//! whose memory is complete does not need the pager any more.
//!
//! A guest that cannot be served any more would wait without end. The pager therefore kills its VMM, and reports why.
//!
//! | module | contains |
//! | --- | --- |
//! | `source` | [`PageSource`]: random access to a guest's memory |
//! | `sources` | [`RawMemory`], [`ImageMemory`], [`StoredMemory`] |
//! | `handshake` | the VMM's message, decoded and checked. Pure |
//! | `receive`, `descriptors`, `peer` | the message and its descriptor on the socket; the process that sent it |
//! | `owner`, `own` | whose memory it is; the memory of a guest that this process runs itself |
//! | `guest` | the memory of one guest: placed, missing and removed pages |
//! | `cache`, `content` | frames of the source: read once for all guests, in bounded memory |
//! | `fetches`, `fetch` | faults that wait for a frame; the threads that read it |
//! | `answer` | answers faults |
//! | `pace`, `fill_order`, `fill` | the background fill: its speed, its order, its thread |
//! | `working_set` | recorded pages, and their file |
//! | `reception`, `pager` | the sockets; the threads, and the handle of all |
//! | [`cloud_hypervisor`] | the migrations of Cloud Hypervisor, which saves and restores machines with another protocol |
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod answer;
mod cache;
pub mod cloud_hypervisor;
mod content;
mod descriptors;
mod error;
mod fetch;
mod fetches;
mod fill;
mod fill_order;
mod guest;
pub mod handshake;
mod load;
mod options;
mod own;
mod owner;
mod pace;
mod pager;
mod peer;
mod receive;
mod reception;
mod source;
mod sources;
mod statistics;
mod working_set;

pub use error::{GuestError, PagerError};
pub use options::{FillRate, PagerOptions, SocketPlan};
pub use own::OwnGuest;
pub use owner::OwnEvents;
pub use pager::Pager;
pub use source::{PageSource, SourceError};
pub use sources::{ImageMemory, RawMemory, StoredMemory};
pub use statistics::{GuestEnd, GuestStage, GuestStatistics};
pub use working_set::{WorkingSet, WorkingSetError};
