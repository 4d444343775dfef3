//! What to restore.

use std::path::PathBuf;

use sterna_transport::Direct;

/// Whether the guest starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Start {
    /// If it ran when it was saved.
    #[default]
    AsItWas,
    /// No.
    Paused,
    /// Yes.
    Running,
}

/// What to restore, and how.
#[derive(Debug, Clone)]
pub struct RestoreRequest {
    /// The image.
    pub path: PathBuf,
    /// Threads that read pages (1 to 255); none for eight.
    pub channels: Option<u8>,
    /// Whether pages go past the page cache, where the form allows.
    pub direct: Direct,
    /// Whether the guest starts.
    pub start: Start,
}
