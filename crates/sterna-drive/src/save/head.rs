//! The part of libvirt's container before the stream (specs/libvirt-save.md §1).

use sterna_image::Format;
use sterna_wire::libvirt::{ByteOrder, PADDING_BYTES, SaveHeader, VERSION, is_domain_xml};

use super::Domain;
use crate::DriveError;

/// Header, XML and cookie, followed by zeros up to the start of the stream.
pub(super) struct Head {
    header: SaveHeader,
    texts: Vec<u8>,
}

impl Head {
    /// Builds the head of an image that is not complete yet.
    pub(super) fn new(format: Format, domain: &Domain, was_running: bool) -> Result<Self, DriveError> {
        let unfit = |text: &str| Err(DriveError::Unreadable(text.to_owned()));
        let Some(number) = format.number() else {
            return unfit(&format!("only libvirt's formats contain XML and cookie; {format} does not"));
        };
        if !is_domain_xml(&domain.xml) {
            return unfit(
                "the domain's XML must be text with a <domain> element: use the output of `virsh dumpxml --migratable \
                 --inactive`",
            );
        }
        if domain.cookie.as_ref().is_some_and(|cookie| cookie.contains(&0)) {
            return unfit("the cookie must be text without NUL");
        }
        let mut texts = domain.xml.clone();
        texts.push(0);
        let mut cookie_offset = 0;
        if let Some(cookie) = &domain.cookie {
            cookie_offset = texts.len();
            texts.extend_from_slice(cookie);
            texts.push(0);
        }
        let length = u32::try_from(texts.len()).ok().and_then(|length| length.checked_add(PADDING_BYTES));
        let Some(data_length) = length else {
            return unfit("XML and cookie are larger than 4 GiB");
        };
        let header = SaveHeader {
            is_complete: false,
            byte_order: ByteOrder::Little,
            version: VERSION,
            data_length,
            was_running: was_running.into(),
            format: number,
            cookie_offset: cookie_offset as u32,
        };
        Ok(Self { header, texts })
    }

    /// Offset of the stream in the file, in bytes.
    pub(super) fn stream_offset(&self) -> u64 {
        self.header.stream_offset()
    }

    /// The encoded head from the start of the file, marked as complete or not.
    pub(super) fn bytes(&self, is_complete: bool) -> Vec<u8> {
        let mut bytes = Vec::new();
        SaveHeader { is_complete, ..self.header }.encode(&mut bytes);
        bytes.extend_from_slice(&self.texts);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_of_a_domain_is_what_readers_find() {
        let domain = Domain { xml: b"<domain/>".to_vec(), cookie: Some(b"<cookie/>".to_vec()) };

        let head = Head::new(Format::LibvirtSparse, &domain, true).unwrap();

        let (header, length) = SaveHeader::decode(&head.bytes(true)).unwrap().unwrap();
        assert!(header.is_complete && header.was_running == 1 && header.format == 6);
        assert_eq!(header.cookie_offset, 10);
        assert_eq!(&head.bytes(true)[length..], b"<domain/>\0<cookie/>\0");
        assert_eq!(head.stream_offset(), 92 + 20 + 65536);
        assert!(!SaveHeader::decode(&head.bytes(false)).unwrap().unwrap().0.is_complete);
    }

    #[test]
    fn head_of_each_format_of_libvirts_has_its_number_and_a_bare_format_has_no_head() {
        let domain = Domain { xml: b"<domain/>".to_vec(), cookie: None };
        for format in Format::ALL.iter().copied() {
            let head = Head::new(format, &domain, false).ok();

            let number = head.map(|head| SaveHeader::decode(&head.bytes(true)).unwrap().unwrap().0.format);
            assert_eq!(number, format.number(), "{format}");
        }
    }

    #[test]
    fn head_of_what_is_no_domain_is_refused() {
        for xml in ["", "<network/>", "<domain>\0</domain>"] {
            let domain = Domain { xml: xml.into(), cookie: None };

            assert!(Head::new(Format::LibvirtRaw, &domain, false).is_err(), "{xml:?}");
        }
    }
}
