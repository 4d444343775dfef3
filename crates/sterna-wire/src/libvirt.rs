//! The header of libvirt's save images (`specs/libvirt-save.md §1.1`).
//!
//! The header has 92 bytes: a magic, then integers in the byte order of the host that wrote them. The version
//! field reveals the order: in the wrong order, it is greater than every known version.

use crate::error::WireError;
use crate::reader;

const MESSAGE: &str = "libvirt save header";
const LAYOUT: &str = "specs/libvirt-save.md §1.1";

/// Newest version of the header, and the only one that this crate writes.
pub const VERSION: u32 = 2;
/// Magic of a complete image.
pub const MAGIC_COMPLETE: [u8; 16] = *b"LibvirtQemudSave";
/// Magic of an image whose writer has not finished, or was interrupted.
pub const MAGIC_PARTIAL: [u8; 16] = *b"LibvirtQemudPart";
/// Bytes that libvirt leaves free after XML and cookie (§1.2).
pub const PADDING_BYTES: u32 = 65_536;
/// The greatest format number (§2): `sparse`, which is mapped-ram.
pub const FORMAT_SPARSE: u32 = 6;

/// Whether a text can be the XML of a libvirt domain (§1.2).
///
/// The text must have no NUL and exactly one top-level element, `domain`. White space, comments and `<?…?>` may
/// surround it, and `<!…>` may precede it. This check is a filter: only libvirt can decide whether the domain
/// is valid.
pub fn is_domain_xml(text: &[u8]) -> bool {
    if text.contains(&0) {
        return false;
    }
    let element = without_epilogue(behind_prologue(text));
    let Some(rest) = element.strip_prefix(b"<domain") else { return false };
    let is_name_whole = rest.first().is_some_and(|byte| byte.is_ascii_whitespace() || b"/>".contains(byte));
    let is_empty_element =
        || element.ends_with(b"/>") && element.iter().filter(|byte| **byte == b'<').count() == 1;
    is_name_whole && (element.ends_with(b"</domain>") || is_empty_element())
}

/// The text after white space, comments, the XML declaration and a document type.
fn behind_prologue(text: &[u8]) -> &[u8] {
    const PARTS: [(&[u8], &[u8]); 3] = [(b"<!--", b"-->"), (b"<?", b"?>"), (b"<!", b">")];
    let mut text = text.trim_ascii();
    while let Some((_, end)) = PARTS.iter().find(|(begin, _)| text.starts_with(begin)) {
        let Some(at) = text.windows(end.len()).position(|part| part == *end) else { return &[] };
        text = text[at + end.len()..].trim_ascii_start();
    }
    text
}

/// The text before the comments and processing instructions at its end.
fn without_epilogue(mut text: &[u8]) -> &[u8] {
    const PARTS: [(&[u8], &[u8]); 2] = [(b"<!--", b"-->"), (b"<?", b"?>")];
    while let Some((begin, _)) = PARTS.iter().find(|(_, end)| text.ends_with(end)) {
        let Some(at) = text.windows(begin.len()).rposition(|part| part == *begin) else { return text };
        text = text[..at].trim_ascii_end();
    }
    text
}

/// Byte order of the header's integers: the order of the host that wrote the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ByteOrder {
    /// Least significant byte first, as on x86.
    #[default]
    Little,
    /// Most significant byte first, as on s390.
    Big,
}

/// The fields of the 92-byte header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SaveHeader {
    /// Whether the magic marks a complete image.
    pub is_complete: bool,
    /// Byte order of the integers.
    pub byte_order: ByteOrder,
    /// Version of the header, 0 to 2.
    pub version: u32,
    /// Bytes between header and stream (L): XML, cookie and padding.
    pub data_length: u32,
    /// Any value but 0: libvirt starts the CPUs after a restore.
    pub was_running: u32,
    /// Format of the stream (§2), 0 to 6.
    pub format: u32,
    /// Bytes from the end of the header to the cookie (C); 0 without a cookie.
    pub cookie_offset: u32,
}

impl SaveHeader {
    /// Length of the header in the file, in bytes.
    pub const BYTES: usize = 92;

    /// Appends the header as it is in the file. The unused words are 0.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(if self.is_complete { &MAGIC_COMPLETE } else { &MAGIC_PARTIAL });
        let words = [self.version, self.data_length, self.was_running, self.format, self.cookie_offset];
        for word in words {
            out.extend_from_slice(&match self.byte_order {
                ByteOrder::Little => word.to_le_bytes(),
                ByteOrder::Big => word.to_be_bytes(),
            });
        }
        out.extend_from_slice(&[0; 14 * 4]);
    }

    /// Reads one header from the start of `buf`. The caller checks L against the size of the file.
    ///
    /// # Errors
    /// Another magic; a version above 2; a format above 6; L = 0; C > L (§4.3).
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, MESSAGE, |r| {
            let magic: [u8; 16] = r.array()?;
            if magic != MAGIC_COMPLETE && magic != MAGIC_PARTIAL {
                return Err(r.bad(LAYOUT, "the magic is not LibvirtQemudSave or LibvirtQemudPart"));
            }
            let raw: [u8; 4] = r.array()?;
            let (little, big) = (u32::from_le_bytes(raw), u32::from_be_bytes(raw));
            let (byte_order, version) = match (little, big) {
                (0..=VERSION, _) => (ByteOrder::Little, little),
                (_, 0..=VERSION) => (ByteOrder::Big, big),
                _ => {
                    let rule = format!(
                        "version {} of the save image is unknown; only 0 to {VERSION} are known: no released libvirt \
                         writes it",
                        little.min(big)
                    );
                    return Err(r.unfit("specs/libvirt-save.md §8", rule));
                }
            };
            let mut word = || -> Result<u32, reader::Stop> {
                let raw = r.array()?;
                Ok(match byte_order {
                    ByteOrder::Little => u32::from_le_bytes(raw),
                    ByteOrder::Big => u32::from_be_bytes(raw),
                })
            };
            let (data_length, was_running, format, cookie_offset) = (word()?, word()?, word()?, word()?);
            let header = Self {
                is_complete: magic == MAGIC_COMPLETE,
                byte_order,
                version,
                data_length,
                was_running,
                format,
                cookie_offset,
            };
            header.check()?;
            r.take(14 * 4)?;
            Ok(header)
        })
    }

    /// Offset of the stream in the file, in bytes.
    pub fn stream_offset(&self) -> u64 {
        Self::BYTES as u64 + u64::from(self.data_length)
    }

    /// Length in bytes of the area for the XML, which follows the header (§1.2).
    pub fn xml_area(&self) -> u32 {
        if self.cookie_offset == 0 { self.data_length } else { self.cookie_offset }
    }

    fn check(&self) -> Result<(), WireError> {
        let spec = "specs/libvirt-save.md §4.3";
        if self.data_length == 0 {
            return Err(WireError::misbehaved(MESSAGE, 20, spec, "the length of the data (XML) is 0"));
        }
        if self.format > FORMAT_SPARSE {
            let rule = format!("format {} is unknown; only 0 to {FORMAT_SPARSE} are known", self.format);
            return Err(WireError::incompatible(MESSAGE, 28, "specs/libvirt-save.md §2", rule));
        }
        if self.cookie_offset > self.data_length {
            let rule = format!(
                "the cookie at {} is beyond the data of {} bytes",
                self.cookie_offset, self.data_length
            );
            return Err(WireError::misbehaved(MESSAGE, 32, spec, rule));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Fault;

    /// The header of the example in §1.1.
    const EXAMPLE: SaveHeader = SaveHeader {
        is_complete: true,
        byte_order: ByteOrder::Little,
        version: 2,
        data_length: 67_162,
        was_running: 1,
        format: 6,
        cookie_offset: 1390,
    };

    fn encoded(header: &SaveHeader) -> Vec<u8> {
        let mut out = Vec::new();
        header.encode(&mut out);
        out
    }

    #[test]
    fn decode_example_of_spec_gives_its_fields_in_both_orders() {
        let bytes = encoded(&EXAMPLE);
        assert_eq!(bytes[..36], *b"LibvirtQemudSave\x02\0\0\0\x5a\x06\x01\0\x01\0\0\0\x06\0\0\0\x6e\x05\0\0");

        for byte_order in [ByteOrder::Little, ByteOrder::Big] {
            let header = SaveHeader { byte_order, ..EXAMPLE };
            let (decoded, used) = SaveHeader::decode(&encoded(&header)).unwrap().unwrap();
            assert_eq!((decoded, used), (header, SaveHeader::BYTES));
            assert_eq!((decoded.stream_offset(), decoded.xml_area()), (67_254, 1390));
        }
        assert_eq!(SaveHeader::decode(&bytes[..91]).unwrap(), None);
    }

    #[test]
    fn decode_header_that_libvirt_restores_is_accepted() {
        let mut used_words = encoded(&EXAMPLE);
        used_words[36..92].fill(0xff);
        assert!(SaveHeader::decode(&used_words).unwrap().is_some());
        for header in [
            SaveHeader { version: 0, ..EXAMPLE },
            SaveHeader { version: 1, ..EXAMPLE },
            SaveHeader { cookie_offset: EXAMPLE.data_length, ..EXAMPLE },
            SaveHeader { cookie_offset: 0, ..EXAMPLE },
            SaveHeader { was_running: 2, ..EXAMPLE },
            SaveHeader { is_complete: false, ..EXAMPLE },
        ] {
            assert_eq!(SaveHeader::decode(&encoded(&header)).unwrap().unwrap().0, header);
        }
    }

    #[test]
    fn decode_header_that_lies_is_refused_with_the_field_named() {
        for (header, offset) in [
            (SaveHeader { version: 3, ..EXAMPLE }, 16),
            (SaveHeader { version: 3, byte_order: ByteOrder::Big, ..EXAMPLE }, 16),
            (SaveHeader { format: 7, ..EXAMPLE }, 28),
            (SaveHeader { data_length: 0, cookie_offset: 0, ..EXAMPLE }, 20),
            (SaveHeader { cookie_offset: EXAMPLE.data_length + 1, ..EXAMPLE }, 32),
        ] {
            let error = SaveHeader::decode(&encoded(&header)).unwrap_err();
            assert_eq!(error.offset, offset, "{header:?}: {error}");
        }
        let mut magic = encoded(&EXAMPLE);
        magic[12] = b'X';
        assert_eq!(SaveHeader::decode(&magic).unwrap_err().fault, Fault::PeerMisbehaved);
    }

    #[test]
    fn decode_version_3_in_either_order_names_the_number() {
        for byte_order in [ByteOrder::Little, ByteOrder::Big] {
            let header = SaveHeader { version: 3, byte_order, ..EXAMPLE };

            let error = SaveHeader::decode(&encoded(&header)).unwrap_err();

            assert!(error.rule.starts_with("version 3 of the save image is unknown"), "{error}");
            assert_eq!(error.fault, Fault::PeerIncompatible);
        }
    }

    #[test]
    fn domain_xml_is_one_domain_element_and_what_may_stand_around_it() {
        for xml in [
            "<domain/>",
            "<domain type='kvm'/>",
            "<domain type='kvm'><name>a</name></domain>",
            " <domain>\n</domain>\n",
            "<?xml version='1.0'?>\n<!-- made by hand -->\n<domain></domain> <!-- end -->",
            "<domain></domain><?end of it?>\n",
            "<domain/> <!-- a --> <?b c?> <!-- d -->",
        ] {
            assert!(is_domain_xml(xml.as_bytes()), "{xml}");
        }
    }

    #[test]
    fn text_that_is_no_domain_element_is_none() {
        for xml in [
            "",
            "domain",
            "<network/>",
            "<domainsnapshot></domainsnapshot>",
            "<domain><name>a</name>",
            "<domain><name/>",
            "<a><domain></domain></a>",
            "<!-- <domain></domain> -->",
            "<?xml",
            "<network/><?b <domain/>?>",
            "<domain>\0</domain>",
        ] {
            assert!(!is_domain_xml(xml.as_bytes()), "{xml}");
        }
    }
}
