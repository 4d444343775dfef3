//! The request for a restore.

use std::path::PathBuf;

use sterna_image::Access;
use sterna_transport::Direct;

/// Whether the guest starts after the restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Start {
    /// The guest starts if it ran when it was saved.
    #[default]
    AsItWas,
    /// The guest stays paused.
    Paused,
    /// The guest starts.
    Running,
}

/// The options of a restore.
#[derive(Debug, Clone)]
pub struct RestoreRequest {
    /// Path of the image.
    pub path: PathBuf,
    /// The key of an encrypted image, and the bases of a layer.
    pub access: Access,
    /// Number of threads that read pages, 1 to 255. None: 8.
    pub channels: Option<u8>,
    /// Whether pages are read past the page cache, where the form allows it.
    pub direct: Direct,
    /// Whether the guest starts after the restore.
    pub start: Start,
}
