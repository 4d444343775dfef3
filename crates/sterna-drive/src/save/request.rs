//! The request for a save.

use std::path::PathBuf;

use sterna_image::Format;
use sterna_image::convert::FrameOptions;
use sterna_libvirt::{Access, DomainAddress};
use sterna_transport::{CancelFlag, Direct};

use crate::DriveError;

/// The options of a save.
#[derive(Debug, Clone)]
pub struct SaveRequest {
    /// Path of the image.
    pub path: PathBuf,
    /// Format of the image. libvirt's formats need [`domain`](Self::domain).
    pub format: Format,
    /// Number of threads that write pages, 1 to 255. None: 4.
    pub channels: Option<u8>,
    /// Whether pages are written past the page cache, where the form allows it.
    pub direct: Direct,
    /// The domain for libvirt's container.
    pub domain: Option<Domain>,
    /// Whether an existing file is replaced, and XML of another machine is accepted.
    pub replace: bool,
    /// Options of an image in Sterna's own format.
    pub frames: FrameOptions,
    /// Whether the guest resumes after the save.
    pub resume_after: bool,
}

/// A domain, as libvirt describes it.
#[derive(Debug, Clone)]
pub struct Domain {
    /// The output of `virsh dumpxml --migratable --inactive`.
    pub xml: Vec<u8>,
    /// libvirt's cookie, if known.
    pub cookie: Option<Vec<u8>>,
}

impl Domain {
    /// The description that libvirt has of the domain at `address`, without a cookie.
    ///
    /// # Errors
    /// [`DriveError::Libvirt`].
    pub fn ask(address: &DomainAddress, cancel: &CancelFlag) -> Result<Self, DriveError> {
        let xml = Access::open(address, cancel).and_then(|mut access| access.xml());
        let xml = xml.map_err(|error| DriveError::Libvirt { at: address.to_string(), error })?;
        Ok(Self { xml: xml.into_bytes(), cookie: None })
    }
}
