//! The decoded header, XML and cookie at the start of libvirt's save image.

pub use sterna_wire::libvirt::ByteOrder;

/// Header, XML and cookie of a libvirt save image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LibvirtHeader {
    /// Whether the magic marks a complete image (`LibvirtQemudSave`).
    pub is_complete: bool,
    /// Byte order of the header's integers.
    pub byte_order: ByteOrder,
    /// Version of the container, 0 to 2.
    pub version: u32,
    /// Bytes between the end of the header (byte 92) and the stream.
    pub data_length: u32,
    /// The word *was running*: not 0 if a restore starts the CPUs.
    pub was_running: u32,
    /// The format word (`specs/libvirt-save.md §2`).
    pub format: u32,
    /// The domain's XML without its NUL.
    pub xml: Vec<u8>,
    /// The cookie without its NUL; none if the image has none.
    pub cookie: Option<Vec<u8>>,
}
