//! Encodes libvirt's container for an image (`specs/libvirt-save.md §1`).

use sterna_wire::libvirt::{ByteOrder, PADDING_BYTES, SaveHeader, VERSION, is_domain_xml};

use crate::error::ImageError;
use crate::format::Format;
use crate::model::{LibvirtHeader, Shape};

/// The only version of the header that Sterna writes.
pub const OUTPUT_VERSION: u32 = VERSION;

/// The content of the container, except the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// The domain's XML without a NUL; kept byte for byte.
    pub xml: Vec<u8>,
    /// The cookie without a NUL; kept byte for byte.
    pub cookie: Option<Vec<u8>>,
    /// The word *was running*: not 0 if a restore starts the CPUs.
    ///
    /// None uses the guest's run state from the save.
    pub was_running: Option<u32>,
    /// Bytes between header and stream.
    ///
    /// None uses libvirt's default: the texts, with room for longer ones.
    pub data_length: Option<u32>,
}

impl Envelope {
    /// The envelope of an existing image, including its room for texts.
    pub fn of(header: &LibvirtHeader) -> Self {
        Self {
            xml: header.xml.clone(),
            cookie: header.cookie.clone(),
            was_running: Some(header.was_running),
            data_length: Some(header.data_length),
        }
    }

    /// Makes an envelope for a domain.
    ///
    /// # Errors
    /// [`ImageError::Request`] if `xml` is not a domain's XML ([`is_domain_xml`]), or if the cookie contains a NUL.
    pub fn new(xml: Vec<u8>, cookie: Option<Vec<u8>>) -> Result<Self, ImageError> {
        let request = |text: &str| Err(ImageError::Request(text.to_owned()));
        if !is_domain_xml(&xml) {
            return request(
                "the domain's XML must be text with a <domain> element: use the output of `virsh dumpxml --migratable \
                 --inactive`",
            );
        }
        if cookie.as_ref().is_some_and(|cookie| cookie.contains(&0)) {
            return request("the cookie must be text without NUL");
        }
        Ok(Self { xml, cookie, was_running: None, data_length: None })
    }

    /// Returns header and texts, and the stream's offset. The caller leaves zeros between them.
    ///
    /// If `complete` contains the whole shape, the header marks the image as complete.
    pub(crate) fn bytes(
        &self,
        format: Format,
        complete: Option<&Shape>,
    ) -> Result<(Vec<u8>, u64), ImageError> {
        let Some(number) = format.number() else {
            let text = format!("only libvirt images contain XML and cookie, {format} does not");
            return Err(ImageError::Request(text));
        };
        let texts = self.xml.len() + 1 + self.cookie.as_ref().map_or(0, |cookie| cookie.len() + 1);
        let smallest = u32::try_from(texts).ok().filter(|bytes| bytes.checked_add(PADDING_BYTES).is_some());
        let Some(smallest) = smallest else {
            return Err(ImageError::Request("XML and cookie are larger than 4 GiB".to_owned()));
        };
        let data_length = match self.data_length {
            Some(length) if length >= smallest => length,
            _ => smallest + PADDING_BYTES,
        };
        let was_running = u32::from(complete.is_some_and(Shape::was_running));
        let header = SaveHeader {
            is_complete: complete.is_some(),
            byte_order: ByteOrder::Little,
            version: OUTPUT_VERSION,
            data_length,
            was_running: self.was_running.unwrap_or(was_running),
            format: number,
            cookie_offset: if self.cookie.is_some() { self.xml.len() as u32 + 1 } else { 0 },
        };
        let mut out = Vec::new();
        header.encode(&mut out);
        out.extend_from_slice(&self.xml);
        out.push(0);
        if let Some(cookie) = &self.cookie {
            out.extend_from_slice(cookie);
            out.push(0);
        }
        Ok((out, header.stream_offset()))
    }
}
