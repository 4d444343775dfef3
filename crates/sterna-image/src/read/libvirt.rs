//! Reads libvirt's container: header, XML, cookie (`specs/libvirt-save.md §1`).

use sterna_wire::libvirt::SaveHeader;

use super::source::ReadAt;
use super::source::read_exact;
use crate::error::ImageError;
use crate::model::LibvirtHeader;

/// The limit of XML or cookie in bytes: 64 MiB.
const TEXT_BYTES: u64 = 64 << 20;
const AREA: &str = "specs/libvirt-save.md §1.2";

/// Reads header and texts of the container. Also returns the offset of the stream.
pub(super) fn read(source: &dyn ReadAt, file: &str) -> Result<(LibvirtHeader, u64), ImageError> {
    let mut bytes = [0; SaveHeader::BYTES];
    read_exact(source, file, 0, &mut bytes, "libvirt's header")?;
    let header = match SaveHeader::decode(&bytes) {
        Ok(Some((header, _))) => header,
        Ok(None) => {
            let offset = SaveHeader::BYTES as u64;
            return Err(ImageError::Torn { file: file.to_owned(), offset, what: "libvirt's header" });
        }
        Err(error) if error.fault == sterna_wire::Fault::PeerIncompatible => {
            let rule = error.rule.into_owned();
            return Err(ImageError::Unsupported { file: file.to_owned(), rule, paragraph: error.paragraph });
        }
        Err(error) => {
            let (offset, rule) = (error.offset, error.rule.into_owned());
            return Err(ImageError::Broken {
                file: file.to_owned(),
                offset,
                rule,
                paragraph: error.paragraph,
            });
        }
    };
    let length = source.len_bytes().map_err(|error| ImageError::io(file, "fstat", error))?;
    if header.stream_offset() > length {
        let rule = format!(
            "{} bytes of XML and cookie are announced, but the file ends at byte {length}",
            header.data_length
        );
        let paragraph = "specs/libvirt-save.md §4.3";
        return Err(ImageError::Broken { file: file.to_owned(), offset: 20, rule, paragraph });
    }
    let start = SaveHeader::BYTES as u64;
    let xml_end = start + u64::from(header.xml_area());
    let xml = text(source, file, start, xml_end, "the XML")?;
    let cookie = match header.cookie_offset {
        0 => None,
        // C = L means that there is no room for a cookie. libvirt restores such an image (§4.3).
        offset if offset == header.data_length => None,
        _ => Some(text(source, file, xml_end, header.stream_offset(), "the cookie")?),
    };
    let container = LibvirtHeader {
        is_complete: header.is_complete,
        byte_order: header.byte_order,
        version: header.version,
        data_length: header.data_length,
        was_running: header.was_running,
        format: header.format,
        xml,
        cookie,
    };
    Ok((container, header.stream_offset()))
}

/// Reads the text that starts at `start` and ends with a NUL before `end`.
fn text(
    source: &dyn ReadAt,
    file: &str,
    start: u64,
    end: u64,
    what: &'static str,
) -> Result<Vec<u8>, ImageError> {
    let mut text = Vec::new();
    let mut chunk = vec![0; 64 << 10];
    let mut at = start;
    while at < end {
        let count = (end - at).min(chunk.len() as u64) as usize;
        read_exact(source, file, at, &mut chunk[..count], what)?;
        if let Some(nul) = chunk[..count].iter().position(|byte| *byte == 0) {
            text.extend_from_slice(&chunk[..nul]);
            return Ok(text);
        }
        text.extend_from_slice(&chunk[..count]);
        at += count as u64;
        if text.len() as u64 > TEXT_BYTES {
            return Err(ImageError::TooLarge { file: file.to_owned(), what, limit_bytes: TEXT_BYTES });
        }
    }
    let rule = format!("{what} does not end with a NUL before byte {end}");
    Err(ImageError::Broken { file: file.to_owned(), offset: start, rule, paragraph: AREA })
}
