//! What to save.

use std::path::PathBuf;

use sterna_transport::Direct;

use super::format::Format;

/// What to save, where to, and how.
#[derive(Debug, Clone)]
pub struct SaveRequest {
    /// The image's place.
    pub path: PathBuf,
    /// Which form. libvirt's need [`domain`](Self::domain).
    pub format: Format,
    /// Threads that write pages (1 to 255); none for four.
    pub channels: Option<u8>,
    /// Whether pages go past the page cache, where the form allows.
    pub direct: Direct,
    /// What libvirt's container holds beside the stream.
    pub domain: Option<Domain>,
    /// A file that lies in the place is replaced.
    pub replace: bool,
    /// The guest goes on after the save.
    pub resume_after: bool,
}

/// A domain as libvirt describes it.
#[derive(Debug, Clone)]
pub struct Domain {
    /// `virsh dumpxml --migratable --inactive`.
    pub xml: Vec<u8>,
    /// libvirt's cookie, where it is known.
    pub cookie: Option<Vec<u8>>,
}
