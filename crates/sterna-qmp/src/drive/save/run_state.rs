//! The run state in the stream.
//!
//! The guest is stopped before it is saved, so that it is written once and the monitor stays awake, and the
//! stream says `paused` of a guest that ran. Section `globalstate` has room for any state's name
//! (specs/stream.md §1.10): it is given the one that the guest had.

/// Head of the section behind its id: name, instance 0, version 1.
const HEAD: &[u8] = b"\x0bglobalstate\x00\x00\x00\x00\x00\x00\x00\x01";
const FULL: u8 = 0x04;
const FOOTER: u8 = 0x7e;
/// Type and id before the head.
const ID_BYTES: usize = 5;
const BODY_BYTES: usize = 104;
/// Length and name, of which the body begins.
const NAME_BYTES: usize = 4 + 32;

/// Where the length and the name of the run state stand in `bytes`, a part of a stream after RAM.
pub(super) fn find(bytes: &[u8]) -> Option<std::ops::Range<usize>> {
    let first = *HEAD.first()?;
    let candidates = bytes.iter().enumerate().filter(|(_, byte)| **byte == first).map(|(at, _)| at);
    candidates.filter(|at| bytes[*at..].starts_with(HEAD)).find_map(|at| {
        let section = at.checked_sub(ID_BYTES)?;
        let body = at + HEAD.len();
        let footer = bytes.get(body + BODY_BYTES..body + BODY_BYTES + ID_BYTES)?;
        // The footer repeats the id: what a device's state holds by chance does not look like this.
        let is_section =
            bytes[section] == FULL && footer[0] == FOOTER && footer[1..] == bytes[section + 1..at];
        is_section.then_some(body..body + NAME_BYTES)
    })
}

/// A run state as it stands there.
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
