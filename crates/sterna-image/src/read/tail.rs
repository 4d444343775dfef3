//! Finds the end of the devices, EOF, and the description (`specs/mapped-ram.md §1.6`).
//!
//! Bodies have no length field. Therefore the search starts at the end. The description is text without a zero byte.
//! So the last `00 06` whose length reaches exactly to the end is the correct one, whatever bytes the devices
//! contain.

use std::ops::Range;

use sterna_wire::limits::VM_DESCRIPTION_BYTES;

use super::opaque::{DESCRIPTION, FOOTER, FOOTER_BYTES};

/// Bytes of EOF, type, length, and the description's first byte.
const HEAD: usize = 1 + 1 + 4 + 1;

/// The parts of a stream after RAM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tail {
    /// Length of the devices' part in bytes.
    pub(super) devices: usize,
    pub(super) has_eof: bool,
    /// Range of the JSON.
    pub(super) description: Option<Range<usize>>,
    pub(super) is_description_torn: bool,
    /// Without footers, only a complete description proves the end. Other matches may be bytes of a device.
    pub(super) is_end_unsure: bool,
    /// Offset of the end of the stream.
    pub(super) end: usize,
}

/// Splits the stream after RAM, up to the end of the file.
pub(super) fn split(bytes: &[u8], footers: bool) -> Tail {
    let end = whole(bytes, footers).or_else(|| cut_or_missing(bytes, footers));
    let is_end_unsure = end.as_ref().is_some_and(|end| !footers && end.description.is_none());
    end.filter(|_| !is_end_unsure).unwrap_or(Tail {
        devices: bytes.len(),
        has_eof: false,
        description: None,
        is_description_torn: false,
        is_end_unsure,
        end: bytes.len(),
    })
}

/// Finds a complete description, with or without unrelated bytes after it.
fn whole(bytes: &[u8], footers: bool) -> Option<Tail> {
    let mut junk = None;
    for at in candidates(bytes, footers) {
        let start = at + HEAD - 1;
        let length = length_at(bytes, at)?;
        // This length exceeds the limit of every reader and writer (specs/stream.md §9).
        if length > VM_DESCRIPTION_BYTES {
            continue;
        }
        let Some(end) = start.checked_add(length).filter(|end| *end <= bytes.len()) else { continue };
        let tail = Tail {
            devices: at,
            has_eof: true,
            description: Some(start..end),
            is_description_torn: false,
            is_end_unsure: false,
            end,
        };
        if end == bytes.len() {
            return Some(tail);
        }
        // If other bytes follow, the description counts only if it is valid JSON.
        if junk.is_none() && is_description(&bytes[start..end]) {
            junk = Some(tail);
        }
    }
    junk
}

/// Finds the first complete description. On a device, the bytes after it may be an older image.
pub(super) fn first(bytes: &[u8], footers: bool) -> Option<Tail> {
    places(bytes, footers).find_map(|at| {
        let start = at + HEAD - 1;
        let end = start.checked_add(length_at(bytes, at)?).filter(|end| *end <= bytes.len())?;
        is_description(&bytes[start..end]).then_some(Tail {
            devices: at,
            has_eof: true,
            description: Some(start..end),
            is_description_torn: false,
            is_end_unsure: false,
            end,
        })
    })
}

/// Finds an EOF at the end, or an EOF with a truncated description.
fn cut_or_missing(bytes: &[u8], footers: bool) -> Option<Tail> {
    let tail = |at: usize, end: usize, torn: bool| Tail {
        devices: at,
        has_eof: true,
        description: None,
        is_description_torn: torn,
        is_end_unsure: false,
        end,
    };
    // A truncated description: after its length field, no byte is zero.
    for at in candidates(bytes, footers) {
        if !bytes[at + HEAD - 1..].contains(&0) {
            return Some(tail(at, bytes.len(), true));
        }
    }
    // The description was truncated before its first byte, or there is none.
    (1..HEAD.min(bytes.len() + 1)).find_map(|count| {
        let at = bytes.len() - count;
        let is_eof = bytes[at] == 0 && (count == 1 || bytes[at + 1] == DESCRIPTION);
        (is_eof && follows_section(bytes, at, footers)).then(|| tail(at, bytes.len(), count > 1))
    })
}

/// Places where EOF and a description may start, the last one first.
fn candidates(bytes: &[u8], footers: bool) -> impl Iterator<Item = usize> {
    places(bytes, footers).rev()
}

/// Places where EOF and a description may start.
fn places(bytes: &[u8], footers: bool) -> impl DoubleEndedIterator<Item = usize> {
    let last = bytes.len().saturating_sub(HEAD - 1);
    (0..last).filter(move |at| {
        bytes[*at] == 0
            && bytes[at + 1] == DESCRIPTION
            && bytes.get(at + HEAD - 1) == Some(&b'{')
            && follows_section(bytes, *at, footers)
    })
}

/// Whether `at` is the start, or follows a section's footer. The check relies on small section numbers.
fn follows_section(bytes: &[u8], at: usize, footers: bool) -> bool {
    !footers || at == 0 || (at >= FOOTER_BYTES && bytes[at - FOOTER_BYTES..].starts_with(&[FOOTER, 0, 0]))
}

fn length_at(bytes: &[u8], at: usize) -> Option<usize> {
    let length = bytes.get(at + 2..at + HEAD - 1)?;
    Some(u32::from_be_bytes(length.try_into().ok()?) as usize)
}

fn is_description(bytes: &[u8]) -> bool {
    bytes.last() == Some(&b'}') && !bytes.contains(&0) && sterna_wire::vmdesc::parse(bytes).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICES: &[u8] = b"\x04\0\0\0\x05\x01a\0\0\0\0\0\0\0\x01body\0\x06\0\0\0\x02{}\x7e\0\0\0\x05";
    const JSON: &[u8] = b"{\"devices\":[]}";

    fn stream(parts: &[&[u8]]) -> Vec<u8> {
        parts.concat()
    }

    #[test]
    fn split_whole_tail_is_found_with_and_without_junk() {
        for junk in [&b""[..], b"junk\0\0", b"\0\x06\0\0\0\x01{"] {
            let bytes = stream(&[DEVICES, b"\0\x06\0\0\0\x0e", JSON, junk]);

            let tail = split(&bytes, true);

            assert_eq!(tail.devices, DEVICES.len());
            assert!(tail.has_eof && !tail.is_description_torn);
            assert_eq!(&bytes[tail.description.clone().unwrap()], JSON);
            assert_eq!(bytes.len() - tail.end, junk.len());
        }
    }

    #[test]
    fn split_tail_cut_at_every_byte_keeps_devices_and_eof_apart() {
        let bytes = stream(&[DEVICES, b"\0\x06\0\0\0\x0e", JSON]);

        for length in 0..bytes.len() {
            let tail = split(&bytes[..length], true);

            let has_eof = length > DEVICES.len() || length == 0;
            assert_eq!(tail.has_eof, has_eof && length > 0, "{length}");
            assert_eq!(tail.devices, length.min(DEVICES.len()), "{length}");
            assert_eq!(tail.is_description_torn, length > DEVICES.len() + 1, "{length}");
            assert_eq!(tail.description, None, "{length}");
        }
    }

    #[test]
    fn split_stream_without_footers_is_found_too() {
        let devices = b"\x04\0\0\0\x05\x01a\0\0\0\0\0\0\0\x01body";
        let bytes = stream(&[devices, b"\0\x06\0\0\0\x0e", JSON]);

        let tail = split(&bytes, false);

        assert_eq!((tail.devices, tail.end), (devices.len(), bytes.len()));
        assert!(tail.has_eof && !tail.is_end_unsure);
    }

    #[test]
    fn split_stream_without_footers_and_description_is_never_said_to_be_whole() {
        let devices = b"\x04\0\0\0\x05\x01a\0\0\0\0\0\0\0\x01body";
        let zeros = stream(&[devices, &[0; 3]]);
        let torn = stream(&[devices, b"\0\x06\0\0\0\x0e", &JSON[..5]]);
        for (bytes, is_unsure) in [(&zeros[..], true), (&torn, true), (devices, false), (b"", false)] {
            let tail = split(bytes, false);

            assert_eq!((tail.has_eof, tail.is_end_unsure), (false, is_unsure), "{bytes:?}");
            assert_eq!((tail.devices, tail.end), (bytes.len(), bytes.len()));
        }
    }
}
