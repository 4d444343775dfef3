//! Dirty sources: they report which pages of guest RAM were written.
//!
//! # The model
//! Tracking a page has two steps. A *sync* ([`DirtySource::sync`]) reports that the page was written.
//! *Re-arming* makes the source report the next write. Some sources do both in one step (userfaultfd, KVM
//! without manual protection). The others (KVM with manual protection, the software log) report a page at every
//! sync until it is re-armed. This order is correct for all of them: sync, re-arm, then read the page. A later
//! sync reports a write after the re-arming; the read sees a write before it.
//!
//! Two rules for users of a source follow:
//! - Re-arm only bits that a sync reported. Re-arming another bit loses a write.
//! - A page that is not re-armed yet may be reported again. In a sync while a round is still being sent, drop
//!   reports of pages that are still set in that round *after* the sync. These pages will be re-armed and read
//!   later, and the source reports writes after that. Do not drop reports of pages that will be sent without
//!   being read, such as absent ones.
//!
//! [`DirtySource::initially_set`] sources report every page until it was re-armed once. The first round must
//! then re-arm all pages, also absent ones, before it looks for absent pages.
//!
//! A write that one source does not see needs another source. For example, KVM does not see the writes of a
//! vhost device, which has a separate log ([`VhostLog`]). [`Combined`] joins several sources.
//!
//! A VMM that reads KVM's log itself, or has another log, supplies its results through an [`ExternalLog`].

#[cfg(feature = "vm-memory")]
mod atomic_bitmap;
mod bitmaps;
mod combined;
mod external;
mod kvm;
mod replaceable;
mod ring;
mod software;
mod source;
mod sync_report;
mod uffd;
mod vhost;

#[cfg(feature = "vm-memory")]
pub use atomic_bitmap::AtomicBitmapLog;
pub use bitmaps::DirtyBitmaps;
pub use combined::Combined;
pub use external::{ExternalLog, FoundPages, VmmLog};
pub use kvm::{KvmDirtyLog, KvmLogMode, KvmSlot};
pub use replaceable::Replaceable;
pub use ring::{KvmDirtyRing, KvmDirtyRings};
pub use software::SoftwareLog;
pub use source::DirtySource;
pub use sync_report::{SyncReport, SyncTimes};
pub use uffd::UffdDirtyLog;
pub use vhost::{LoggedRange, VhostLog};
