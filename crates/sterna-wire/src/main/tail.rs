//! The end of the device state of an opaque machine (`specs/stream.md §1.6`).
//!
//! Bodies have no length, and a source on a socket keeps the connection open after the stream, because it waits
//! for an answer. A receiver therefore stores the bytes as they arrive. After every read it checks whether the
//! stream ends there. There are three signs of an end:
//!
//! - A description: its JSON ends exactly with the received bytes. Its list of devices leads exactly to the EOF
//!   before it, or the footers do ([`Tail::described`]).
//! - A question: a Sterna source sends the PING *prepare* before it commits, directly after a footer
//!   ([`Tail::asks`]).
//! - Silence: the source has closed the connection ([`Tail::closed`]), or it sends nothing after an EOF
//!   (`suppress-vmdesc=on`; [`Tail::bare_end`]).
//!
//! None of them needs the ends of single sections, because the tail is not split. Bytes that a guest controls
//! can delay the end, or hide it from a receiver without a description. They can fake an early end only under
//! these conditions:
//!
//! - With a description, or with a source that asks, three things must coincide. The device bytes contain a
//!   footer, an EOF and a description that fits all bytes before it (or a footer and the PING). A read ends
//!   exactly there. No byte follows while the receiver checks again ([`Tail::described`] is called again after
//!   more bytes). Both signs are compared with all received bytes, so that the next real bytes refute a false
//!   end.
//! - A bare EOF is weaker. Device bytes that look like a footer and an EOF end the stream if the source is then
//!   silent for the receiver's whole waiting time.
//!
//! If a source sends more bytes after a false end, the receiver refuses the migration, and the guest stays at
//! the source.

use super::command::Command;
use super::element::{COMMAND, EOF, FOOTER, FOOTER_BYTES, FULL, VM_DESCRIPTION};
use super::footer::foot;
use super::walk::{FullSection, full_section};
use crate::error::WireError;
use crate::extension::KEEPALIVE_PING;
use crate::limits::{DEVICE_STATE_BYTES, VM_DESCRIPTION_BYTES};
use crate::vmdesc;
use std::collections::HashSet;
use std::ops::Range;

const MESSAGE: &str = "device state";
/// `00 06`, a length, and the first byte of the JSON.
const DESCRIPTION_HEAD: usize = 7;
/// Limit on remembered positions that look like the start of a description.
const CANDIDATES: usize = 65_536;

/// The bytes that have arrived after RAM so far.
#[derive(Debug, Default)]
pub struct Tail {
    bytes: Vec<u8>,
    /// Devices whose sections preceded RAM. The description lists them too.
    early: Vec<(String, u32)>,
    /// Pairs: position of a possible EOF with a description, and the end of its JSON.
    candidates: Vec<(usize, usize)>,
    /// Position up to which candidates have been searched.
    searched: usize,
}

/// The parts of a complete tail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TailEnd {
    /// Length of the device sections from the tail's start, in bytes.
    pub devices_bytes: usize,
    /// Whether EOF follows them.
    pub has_eof: bool,
    /// Position of the description's JSON in the tail.
    pub description: Option<Range<usize>>,
}

impl Tail {
    /// An empty tail of a stream in which the `early` FULL sections preceded RAM.
    ///
    /// `early` has pairs of name and instance.
    pub fn new(early: Vec<(String, u32)>) -> Self {
        Self { early, ..Self::default() }
    }

    /// The bytes that have arrived so far.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Adds bytes that have arrived.
    ///
    /// # Errors
    /// More than [`DEVICE_STATE_BYTES`] plus [`VM_DESCRIPTION_BYTES`] bytes without an end.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), WireError> {
        let most = DEVICE_STATE_BYTES as usize + VM_DESCRIPTION_BYTES;
        if self.bytes.len() + bytes.len() > most {
            let rule = format!("more than {most} bytes of device state and no end");
            return Err(WireError::misbehaved(MESSAGE, self.bytes.len() as u64, "specs/stream.md §9", rule));
        }
        self.bytes.extend_from_slice(bytes);
        self.search();
        Ok(())
    }

    /// The end, if a description ends exactly at the last byte.
    ///
    /// Device bytes can look like a description. Before the caller accepts the end, it must check once more
    /// whether further bytes follow.
    pub fn described(&mut self) -> Option<TailEnd> {
        let here = self.bytes.len();
        self.candidates.retain(|(_, end)| *end >= here);
        let ends_here: Vec<usize> =
            self.candidates.iter().filter(|(_, end)| *end == here).map(|(at, _)| *at).collect();
        // The first candidate that fits. A later one lies inside the JSON of another and is no EOF.
        ends_here.into_iter().find_map(|at| self.holds(at, here))
    }

    /// Length of the device sections, if the tail ends with a PING of `value`.
    ///
    /// The PING must follow a footer. Keepalive PINGs before and after that PING are ignored.
    pub fn asks(&self, value: u32) -> Option<usize> {
        let (asked, alive) = (ping(value)?, ping(KEEPALIVE_PING)?);
        let devices = without(&self.bytes, &alive).strip_suffix(&asked[..])?;
        let devices = without(devices, &alive).len();
        (devices == 0 || self.walk_by_footers(devices).is_some()).then_some(devices)
    }

    /// The end, if an EOF without a description is the last byte.
    pub fn bare_end(&self) -> Option<TailEnd> {
        let (last, devices) = self.bytes.split_last()?;
        let is_end = *last == EOF && self.walk_by_footers(devices.len()).is_some();
        is_end.then_some(TailEnd { devices_bytes: devices.len(), has_eof: true, description: None })
    }

    /// The end of a tail whose source has closed the connection.
    ///
    /// # Errors
    /// The source closed before EOF.
    pub fn closed(&mut self) -> Result<TailEnd, WireError> {
        if let Some(end) = self.described().or_else(|| self.bare_end()) {
            return Ok(end);
        }
        // The connection ended inside the description. The sections and EOF are complete, and only they are
        // needed (§9).
        if let Some((devices_bytes, _)) = self.walk()
            && self.bytes.get(devices_bytes) == Some(&EOF)
        {
            return Ok(TailEnd { devices_bytes, has_eof: true, description: None });
        }
        let rule = "the source closed before EOF (00)";
        Err(WireError::misbehaved(MESSAGE, self.bytes.len() as u64, "specs/stream.md §1.7", rule))
    }

    fn search(&mut self) {
        let mut at = self.searched;
        while let Some(head) = self.bytes.get(at..at + DESCRIPTION_HEAD) {
            if head[0] == EOF && head[1] == VM_DESCRIPTION && head[6] == b'{' {
                let length = u32::from_be_bytes([head[2], head[3], head[4], head[5]]) as usize;
                let end = at + DESCRIPTION_HEAD - 1 + length;
                if length <= VM_DESCRIPTION_BYTES && self.candidates.len() < CANDIDATES {
                    self.candidates.push((at, end));
                }
            }
            at += 1;
        }
        self.searched = at;
    }

    /// Checks that the description after an EOF at `at` fits the sections before it.
    fn holds(&self, at: usize, end: usize) -> Option<TailEnd> {
        let description = at + DESCRIPTION_HEAD - 1..end;
        let lengths = vmdesc::section_lengths(&self.bytes[description.clone()]).ok()?;
        let lengths: Vec<_> = lengths
            .iter()
            .map(|device| (device.name.as_str(), device.instance, device.length_bytes))
            .collect();
        let behind_ram = self.without_early(&lengths)?;
        let fits = self.walk_by_lengths(behind_ram, at) || self.names_fit(behind_ram, at);
        fits.then_some(TailEnd { devices_bytes: at, has_eof: true, description: Some(description) })
    }

    /// The listed devices whose sections follow RAM. The description lists those before RAM first.
    fn without_early<'a, 'b>(&self, listed: &'a [(&'b str, u32, u64)]) -> Option<&'a [(&'b str, u32, u64)]> {
        let (early, behind) = listed.split_at_checked(self.early.len())?;
        let same = |((name, instance, _), ours): (&(&str, u32, u64), &(String, u32))| {
            *name == ours.0 && *instance == ours.1
        };
        early.iter().zip(&self.early).all(same).then_some(behind)
    }

    /// Method A: header, body of the listed length, footer, repeated exactly up to `end`.
    fn walk_by_lengths(&self, listed: &[(&str, u32, u64)], end: usize) -> bool {
        let mut at = 0;
        for (name, instance, length) in listed {
            let Some((id, its_name, its_instance, body)) = header(&self.bytes[..end], at) else {
                return false;
            };
            if its_name != *name || its_instance != *instance {
                return false;
            }
            let Some(foot) = usize::try_from(*length).ok().and_then(|length| body.checked_add(length)) else {
                return false;
            };
            let Some(bytes) =
                foot.checked_add(FOOTER_BYTES).and_then(|next| self.bytes[..end].get(foot..next))
            else {
                return false;
            };
            if bytes[0] != FOOTER || bytes[1..] != id.to_be_bytes() {
                return false;
            }
            at = foot + FOOTER_BYTES;
        }
        at == end
    }

    /// Method B, with the additional check that the names are the description's.
    fn names_fit(&self, listed: &[(&str, u32, u64)], end: usize) -> bool {
        self.walk_by_footers(end).is_some_and(|names| {
            names.len() == listed.len()
                && names.iter().zip(listed).all(|((name, instance), (n, i, _))| name == n && instance == i)
        })
    }

    /// Method B exactly up to `end`. Returns the sections' names.
    fn walk_by_footers(&self, end: usize) -> Option<Vec<(String, u32)>> {
        let (at, names) = self.walk()?;
        (at == end).then_some(names)
    }

    /// Method B: from footer to footer, as long as sections follow. Returns the end position and the names.
    fn walk(&self) -> Option<(usize, Vec<(String, u32)>)> {
        let mut used = HashSet::new();
        let mut names = Vec::new();
        let mut at = 0;
        while self.bytes.get(at) == Some(&FULL) {
            let (id, name, instance, body) = header(&self.bytes, at)?;
            used.insert(id);
            names.push((name.to_owned(), instance));
            at = foot(&self.bytes, body, id, &used)? + FOOTER_BYTES;
        }
        matches!(self.bytes.get(at), None | Some(&(EOF | COMMAND))).then_some((at, names))
    }
}

fn ping(value: u32) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    Command::Ping(value).encode(&mut bytes).ok()?;
    Some(bytes)
}

/// `bytes` without any repetitions of `suffix` at its end.
fn without<'a>(mut bytes: &'a [u8], suffix: &[u8]) -> &'a [u8] {
    while let Some(rest) = bytes.strip_suffix(suffix) {
        bytes = rest;
    }
    bytes
}

/// Reads a FULL section's header at `at`: id, name, instance, start of the body.
fn header(bytes: &[u8], at: usize) -> Option<(u32, &str, u32, usize)> {
    let FullSection { id, name, instance, body, .. } = full_section(bytes, at)?;
    Some((id, name, instance, body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::main::{SectionHeader, encode_end, encode_footer};

    const PING: u32 = 77;

    /// Two sections. The first contains bytes that look like its own footer and like a description.
    fn devices() -> (Vec<u8>, String) {
        let bodies: [(&str, u32, Vec<u8>); 2] = [
            ("timer", 7, [&[0x7e, 0, 0, 0, 7, 0x55][..], &[0, 6, 0, 0, 0, 3, b'{', b'}'][..]].concat()),
            ("0000:00:02.0/virtio-net", 3, vec![0x7e; 100]),
        ];
        let mut out = Vec::new();
        let mut described = Vec::new();
        for (name, id, body) in bodies {
            SectionHeader { id, name, instance: 0, version: 1 }.encode_full(&mut out).unwrap();
            out.extend_from_slice(&body);
            encode_footer(id, &mut out);
            let fields = vec![vmdesc::Field::new("data", "buffer", body.len() as u64)];
            described.push(vmdesc::Device { name: name.to_owned(), instance: 0, version: 1, fields });
        }
        (out, vmdesc::build("none", &described))
    }

    fn tail(bytes: &[u8]) -> Tail {
        let mut tail = Tail::new(Vec::new());
        tail.push(bytes).unwrap();
        tail
    }

    #[test]
    fn described_stream_in_pieces_of_any_size_ends_at_its_last_byte_only() {
        let (devices, text) = devices();
        let mut whole = devices.clone();
        encode_end(&mut whole);
        vmdesc::encode(&text, &mut whole).unwrap();
        for piece in [1, 2, 7, 100, whole.len()] {
            let mut tail = Tail::new(Vec::new());
            let mut found = None;
            for part in whole.chunks(piece) {
                assert_eq!(found, None);
                tail.push(part).unwrap();
                found = tail.described();
            }
            let end = found.unwrap_or_else(|| panic!("not found in pieces of {piece}"));
            assert_eq!((end.devices_bytes, end.has_eof), (devices.len(), true));
            assert_eq!(&whole[end.description.unwrap()], text.as_bytes());
        }
    }

    #[test]
    fn described_devices_that_do_not_match_the_list_are_no_end() {
        let (devices, _) = devices();
        let fields = vec![vmdesc::Field::new("data", "buffer", 3)];
        let other = vmdesc::Device { name: "other".to_owned(), instance: 0, version: 1, fields };
        let mut whole = devices;
        encode_end(&mut whole);
        vmdesc::encode(&vmdesc::build("none", &[other]), &mut whole).unwrap();

        assert_eq!(tail(&whole).described(), None);
    }

    #[test]
    fn described_early_sections_are_listed_first() {
        let (devices, _) = devices();
        let device = |name: &str, size| vmdesc::Device {
            name: name.to_owned(),
            instance: 0,
            version: 1,
            fields: vec![vmdesc::Field::new("data", "buffer", size)],
        };
        let listed = [device("mem-early", 52), device("timer", 14), device("0000:00:02.0/virtio-net", 100)];
        let mut whole = devices.clone();
        encode_end(&mut whole);
        vmdesc::encode(&vmdesc::build("none", &listed), &mut whole).unwrap();

        let mut with = Tail::new(vec![("mem-early".to_owned(), 0)]);
        with.push(&whole).unwrap();

        assert_eq!(with.described().map(|end| end.devices_bytes), Some(devices.len()));
        assert_eq!(tail(&whole).described(), None);
    }

    #[test]
    fn described_by_a_device_that_plays_the_end_is_undone_by_the_bytes_that_follow() {
        // The body of the first section contains a footer, an EOF and a matching description.
        let device = |size| vmdesc::Device {
            name: "timer".to_owned(),
            instance: 0,
            version: 1,
            fields: vec![vmdesc::Field::new("data", "buffer", size)],
        };
        let mut whole = Vec::new();
        SectionHeader { id: 7, name: "timer", instance: 0, version: 1 }.encode_full(&mut whole).unwrap();
        let body = whole.len();
        encode_footer(7, &mut whole);
        encode_end(&mut whole);
        vmdesc::encode(&vmdesc::build("none", &[device(0)]), &mut whole).unwrap();
        let played = whole.len();
        encode_footer(7, &mut whole);
        let devices = whole.len();
        encode_end(&mut whole);
        let size = (played - body) as u64;
        vmdesc::encode(&vmdesc::build("none", &[device(size)]), &mut whole).unwrap();

        let mut tail = Tail::new(Vec::new());
        tail.push(&whole[..played]).unwrap();
        assert!(tail.described().is_some(), "nobody could tell");
        tail.push(&whole[played..=played]).unwrap();
        assert_eq!(tail.described(), None);
        tail.push(&whole[played + 1..]).unwrap();

        assert_eq!(tail.described().map(|end| end.devices_bytes), Some(devices));
    }

    #[test]
    fn asks_only_behind_a_footer() {
        let (devices, _) = devices();
        let mut asked = devices.clone();
        Command::Ping(PING).encode(&mut asked).unwrap();

        assert_eq!(tail(&asked).asks(PING), Some(devices.len()));
        assert_eq!(tail(&asked).asks(PING + 1), None);
        assert_eq!(tail(&asked[..asked.len() - 1]).asks(PING), None);
        assert_eq!(tail(&asked[1..]).asks(PING), None);
    }

    #[test]
    fn asks_with_keepalives_before_and_behind_the_question_is_heard() {
        let (devices, _) = devices();
        for (before, behind) in [(0, 1), (1, 0), (2, 3)] {
            let mut asked = devices.clone();
            let keepalives = |count: usize| ping(KEEPALIVE_PING).unwrap().repeat(count);
            asked.extend(keepalives(before));
            asked.extend(ping(PING).unwrap());
            asked.extend(keepalives(behind));

            assert_eq!(tail(&asked).asks(PING), Some(devices.len()), "{before}, {behind}");
            assert_eq!(tail(&asked[..asked.len() - 1]).asks(PING), None, "{before}, {behind}: torn");
        }
        let alive = [&devices[..], &ping(KEEPALIVE_PING).unwrap()].concat();
        assert_eq!(tail(&alive).asks(PING), None, "nobody asked");
    }

    #[test]
    fn closed_torn_description_or_none_is_an_end_and_torn_devices_are_not() {
        let (devices, text) = devices();
        let mut whole = devices.clone();
        encode_end(&mut whole);
        assert_eq!(tail(&whole).bare_end().map(|end| end.devices_bytes), Some(devices.len()));
        vmdesc::encode(&text, &mut whole).unwrap();

        for length in 0..whole.len() {
            let end = tail(&whole[..length]).closed();
            assert_eq!(end.is_ok(), length > devices.len(), "{length} of {}: {end:?}", whole.len());
            assert!(
                end.is_err()
                    || end == Ok(TailEnd { devices_bytes: devices.len(), has_eof: true, description: None })
            );
        }
        assert!(tail(&whole).closed().unwrap().description.is_some());
    }
}
