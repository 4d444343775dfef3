//! Finds and encodes the run state in the stream.
//!
//! The guest is stopped before it is saved, so that each page is written once and the monitor stays responsive. The
//! stream therefore contains `paused` for a guest that ran. Section `globalstate` has room for the name of any state
//! (specs/stream.md §1.10), so the earlier state is written there.

/// The section's head after its id: name, instance 0, version 1.
const HEAD: &[u8] = b"\x0bglobalstate\x00\x00\x00\x00\x00\x00\x00\x01";
const FULL: u8 = 0x04;
const FOOTER: u8 = 0x7e;
/// Number of bytes before the head: the section's type and id.
const ID_BYTES: usize = 5;
const BODY_BYTES: usize = 104;
/// Number of bytes at the start of the body: the length and the name.
const NAME_BYTES: usize = 4 + 32;

/// Position of the run state's length and name in `bytes`, a part of a stream after RAM.
pub(super) fn find(bytes: &[u8]) -> Option<std::ops::Range<usize>> {
    let first = *HEAD.first()?;
    let candidates = bytes.iter().enumerate().filter(|(_, byte)| **byte == first).map(|(at, _)| at);
    candidates.filter(|at| bytes[*at..].starts_with(HEAD)).find_map(|at| {
        let section = at.checked_sub(ID_BYTES)?;
        let body = at + HEAD.len();
        let footer = bytes.get(body + BODY_BYTES..body + BODY_BYTES + ID_BYTES)?;
        // The footer repeats the section's id. This rules out matches inside a device's state.
        let is_section =
            bytes[section] == FULL && footer[0] == FOOTER && footer[1..] == bytes[section + 1..at];
        is_section.then_some(body..body + NAME_BYTES)
    })
}

/// A run state, encoded with its length as in the section.
pub(super) fn encode(state: &str) -> [u8; NAME_BYTES] {
    let mut bytes = [0; NAME_BYTES];
    let name = &state.as_bytes()[..state.len().min(31)];
    bytes[..4].copy_from_slice(&(name.len() as u32 + 1).to_be_bytes());
    bytes[4..4 + name.len()].copy_from_slice(name);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(id: u8, footer: u8) -> Vec<u8> {
        let mut bytes = vec![7, 11, FULL, 0, 0, 0, id];
        bytes.extend_from_slice(HEAD);
        bytes.extend_from_slice(&encode("paused"));
        bytes.extend_from_slice(&[0; BODY_BYTES - NAME_BYTES]);
        bytes.extend_from_slice(&[FOOTER, 0, 0, 0, footer, 0]);
        bytes
    }

    #[test]
    fn find_in_a_stream_gives_the_names_place() {
        let bytes = section(3, 3);

        let range = find(&bytes).unwrap();

        assert_eq!(bytes[range], *b"\0\0\0\x07paused\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    }

    #[test]
    fn find_without_the_sections_own_footer_is_nothing() {
        assert_eq!(find(&section(3, 4)), None);
        let bytes = section(3, 3);
        for end in 0..bytes.len() - 1 {
            assert_eq!(find(&bytes[..end]), None);
        }
    }
}
