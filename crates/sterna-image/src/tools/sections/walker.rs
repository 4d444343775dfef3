//! The walk through stretches of a stream, element by element.

use std::collections::{BTreeMap, BTreeSet};

use super::found::{Command, DESCRIPTION, DeviceSection, EOF, Flaw, Part, Stop, Walk};
use crate::tools::description::{Described, Description};

const START: u8 = 0x01;
const PART: u8 = 0x02;
const END: u8 = 0x03;
const FULL: u8 = 0x04;
const COMMAND: u8 = 0x08;
const FOOTER: u8 = 0x7e;

/// Walks through stretches in order. A section that one stretch opens may continue in the next.
pub(super) struct Walker<'a> {
    devices: &'a [Described],
    /// Index in `devices` of the next entry that was not found yet.
    next: usize,
    /// Indices in the description by section, ascending. Built at the first section that is not at its described
    /// place.
    places: Option<BTreeMap<(&'a str, u32), Vec<usize>>>,
    open: BTreeSet<u32>,
    used: BTreeSet<u32>,
    bytes: &'a [u8],
    walk: Walk,
}

enum Next {
    At(usize),
    Stop(Stop),
}

type Step<T> = Result<T, (usize, String)>;

impl<'a> Walker<'a> {
    pub(super) fn new(description: Option<&'a Description>) -> Self {
        Self {
            devices: description.map_or(&[], Description::devices),
            next: 0,
            places: None,
            open: BTreeSet::new(),
            used: BTreeSet::new(),
            bytes: &[],
            walk: Walk::empty(),
        }
    }

    /// Opens section `id`, whose START is in no stretch: RAM.
    pub(super) fn opens(&mut self, id: u32) {
        self.open.insert(id);
        self.used.insert(id);
    }

    /// Closes section `id`, whose END is in no stretch: RAM.
    pub(super) fn closes(&mut self, id: u32) {
        self.open.remove(&id);
    }

    pub(super) fn stretch(&mut self, bytes: &'a [u8]) -> Walk {
        self.bytes = bytes;
        let mut at = 0;
        let stop = loop {
            match self.element(at) {
                Ok(Next::At(next)) => at = next,
                Ok(Next::Stop(stop)) => break stop,
                Err((offset, what)) => {
                    self.walk.flaws.push(Flaw { offset, what, in_description: false });
                    break Stop::Lost(at);
                }
            }
        };
        let mut walk = std::mem::replace(&mut self.walk, Walk::empty());
        walk.stop = stop;
        walk
    }

    fn element(&mut self, at: usize) -> Step<Next> {
        let Some(&kind) = self.bytes.get(at) else { return Ok(Next::Stop(Stop::Whole)) };
        match kind {
            EOF => Ok(Next::Stop(Stop::Eof(at + 1))),
            START | FULL => self.section(at, kind).map(Next::At),
            PART | END => {
                let id = self.u32(at + 1)?;
                if !self.open.contains(&id) {
                    let why = "which is not open: it was never started, or it has ended";
                    return Err((at, format!("a part of section {id}, {why}")));
                }
                let end = self.footer(at + 5, id)?;
                let is_end = kind == END;
                if is_end {
                    self.open.remove(&id);
                }
                self.walk.parts.push(Part { offset: at, id, is_end, body_bytes: end - at - 5 });
                Ok(Next::At(end + 5))
            }
            COMMAND => {
                let head = self.take(at, 5)?;
                let (number, length) = (be16(&head[1..]), usize::from(be16(&head[3..])));
                if !(1..=11).contains(&number) || number == 8 {
                    return Err((at, format!("command {number} is unknown")));
                }
                self.take(at + 5, length)?;
                self.walk.commands.push(Command { number, offset: at, body_bytes: length });
                Ok(Next::At(at + 5 + length))
            }
            other => Err((at, format!("byte {other:#04x} instead of a section or the end of the stream"))),
        }
    }

    fn section(&mut self, at: usize, kind: u8) -> Step<usize> {
        let id = self.u32(at + 1)?;
        let length = usize::from(self.take(at + 5, 1)?[0]);
        let name = self.take(at + 6, length)?;
        let name = match std::str::from_utf8(name) {
            Ok(name) if !name.is_empty() && !name.contains('\0') => name.to_owned(),
            _ => return Err((at + 5, "the name of a section is empty or not text".into())),
        };
        let (instance, version) = (self.u32(at + 6 + length)?, self.u32(at + 10 + length)?);
        if !self.used.insert(id) {
            return Err((at + 1, format!("section {name:?} has the number {id}, which another section has")));
        }
        let body = at + 14 + length;
        let (described, end) = if kind == START {
            self.open.insert(id);
            (None, self.footer(body, id)?)
        } else {
            self.full_body(body, &name, instance, version, id)?
        };
        let (offset, body_offset, body_bytes) = (at, body, end - body);
        let section =
            DeviceSection { name, instance, version, id, offset, body_offset, body_bytes, described };
        let list = if kind == START { &mut self.walk.starts } else { &mut self.walk.sections };
        list.push(section);
        Ok(end + 5)
    }

    /// Returns a FULL section's entry in the description, and the end of its body.
    fn full_body(
        &mut self,
        body: usize,
        name: &str,
        instance: u32,
        version: u32,
        id: u32,
    ) -> Step<(Option<usize>, usize)> {
        let devices = self.devices;
        let Some(device) = devices.get(self.next) else {
            if !self.devices.is_empty() {
                self.mistold(body, format!("section {name:?} is not in the description"));
            }
            return Ok((None, self.footer(body, id)?));
        };
        if device.name != name || device.instance != instance {
            let (theirs, number) = (&device.name, device.instance);
            let what = format!(
                "section {name:?} instance {instance} is at the position of {theirs:?} instance {number} in the \
                 description"
            );
            self.mistold(body, what);
            // A later entry may describe this section. Then the stream lacks the sections of the entries between.
            match self.place_ahead(name, instance) {
                Some(place) => self.next = place,
                None => return Ok((None, self.footer(body, id)?)),
            }
        }
        let index = self.next;
        let device = &devices[index];
        self.next += 1;
        if let Some(theirs) = device.version
            && theirs != version
        {
            self.mistold(
                body,
                format!("section {name:?} has version {version}, but {theirs} in the description"),
            );
        }
        let told = usize::try_from(device.length_bytes).ok().and_then(|bytes| body.checked_add(bytes));
        if let Some(end) = told
            && self.is_footer(end, id)
        {
            return Ok((Some(index), end));
        }
        let end = self.footer(body, id)?;
        let (real, told) = (end - body, device.length_bytes);
        self.mistold(
            body,
            format!("the body of section {name:?} has {real} bytes, but {told} in the description"),
        );
        Ok((None, end))
    }

    /// Index of that section in the description, from the next entry.
    fn place_ahead(&mut self, name: &str, instance: u32) -> Option<usize> {
        let devices = self.devices;
        let places = self.places.get_or_insert_with(|| {
            let mut places: BTreeMap<_, Vec<usize>> = BTreeMap::new();
            for (index, device) in devices.iter().enumerate() {
                places.entry((device.name.as_str(), device.instance)).or_default().push(index);
            }
            places
        });
        let of_that_name = places.get(&(name, instance))?;
        of_that_name.get(of_that_name.partition_point(|place| *place < self.next)).copied()
    }

    fn mistold(&mut self, offset: usize, what: String) {
        self.walk.flaws.push(Flaw { offset, what, in_description: true });
    }

    /// Offset of the first footer of section `id` with a plausible element after it.
    ///
    /// The search starts at `from`.
    fn footer(&self, from: usize, id: u32) -> Step<usize> {
        let mut at = from;
        while let Some(found) = self.bytes.get(at..).and_then(|rest| rest.iter().position(|b| *b == FOOTER)) {
            at += found;
            if self.is_footer(at, id) {
                return Ok(at);
            }
            at += 1;
        }
        Err((from.min(self.bytes.len()), format!("section {id} has no footer: it is truncated or damaged")))
    }

    fn is_footer(&self, at: usize, id: u32) -> bool {
        let mut footer = [FOOTER; 5];
        footer[1..].copy_from_slice(&id.to_be_bytes());
        let Some(end) = at.checked_add(5) else { return false };
        self.bytes.get(at..end) == Some(&footer) && self.goes_on(end)
    }

    /// Whether an element can start here, or the stretch ends.
    fn goes_on(&self, at: usize) -> bool {
        let Some(rest) = self.bytes.get(at..) else { return false };
        let number = |at: usize| rest.get(at..at + 4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]));
        match rest {
            [] | [EOF] => true,
            [EOF, DESCRIPTION, head @ ..] => head.get(4).is_none_or(|b| *b == b'{') || head[..4] == [0; 4],
            // After a stream without a description, only zeros are plausible.
            [EOF, after @ ..] => after.iter().take(4096).all(|byte| *byte == 0),
            [START | FULL, ..] => {
                let Some(length) = rest.get(5).map(|length| usize::from(*length)) else { return true };
                let name = &rest[6..rest.len().min(6 + length)];
                length > 0
                    && number(1).is_some_and(|id| !self.used.contains(&id))
                    && name.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ')
            }
            [PART | END, ..] => number(1).is_none_or(|id| self.open.contains(&id)),
            [COMMAND, ..] => rest.get(1..3).is_none_or(|n| matches!(be16(n), 1..=7 | 9..=11)),
            _ => false,
        }
    }

    fn take(&self, at: usize, count: usize) -> Step<&[u8]> {
        let end = at.checked_add(count);
        end.and_then(|end| self.bytes.get(at..end))
            .ok_or_else(|| (self.bytes.len(), "the stream ends inside a section".to_owned()))
    }

    fn u32(&self, at: usize) -> Step<u32> {
        let bytes = self.take(at, 4)?;
        Ok(u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }
}

fn be16(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Walks through one stretch that is the first of its stream.
    fn walk(bytes: &[u8], description: Option<&Description>) -> Walk {
        Walker::new(description).stretch(bytes)
    }

    fn section(id: u32, name: &str, body: &[u8]) -> Vec<u8> {
        let mut out = vec![FULL];
        out.extend(id.to_be_bytes());
        out.push(name.len() as u8);
        out.extend(name.as_bytes());
        out.extend([0, 0, 0, 0, 0, 0, 0, 1]);
        out.extend(body);
        out.push(FOOTER);
        out.extend(id.to_be_bytes());
        out
    }

    fn description(devices: &[(&str, usize)]) -> Description {
        let devices: Vec<_> = devices
            .iter()
            .map(|(name, size)| {
                serde_json::json!({"name": name, "instance_id": 0, "version": 1,
                    "fields": [{"name": "f", "type": "buffer", "size": size}]})
            })
            .collect();
        Description::parse(&serde_json::json!({ "devices": devices }).to_string()).unwrap()
    }

    /// A body that contains its own footer and bytes that look like the next section.
    fn stream() -> Vec<u8> {
        let trap = [section(3, "a", &[1]), vec![FOOTER, 0, 0, 0, 2], section(9, "x", &[])].concat();
        [section(2, "a", &trap), section(3, "b", &[1, 2, 3]), vec![EOF]].concat()
    }

    #[test]
    fn walk_with_description_is_not_fooled_by_a_footer_in_a_body() {
        let bytes = stream();
        let length = bytes.len() - section(3, "b", &[1, 2, 3]).len() - 1 - 15 - 5;

        let walk = walk(&bytes, Some(&description(&[("a", length), ("b", 3)])));

        assert_eq!((walk.flaws.len(), walk.stop), (0, Stop::Eof(bytes.len())));
        let found: Vec<_> =
            walk.sections.iter().map(|s| (s.name.as_str(), s.body_bytes, s.described)).collect();
        assert_eq!(found, [("a", length, Some(0)), ("b", 3, Some(1))]);
    }

    #[test]
    fn walk_without_description_follows_footers() {
        let bytes = [section(2, "a", &[FOOTER, 0, 0, 0, 2, 0x55]), section(3, "b", &[]), vec![EOF]].concat();

        let walk = walk(&bytes, None);

        let found: Vec<_> = walk.sections.iter().map(|s| (s.name.as_str(), s.body_bytes)).collect();
        assert_eq!(found, [("a", 6), ("b", 0)]);
        assert_eq!((walk.flaws.len(), walk.stop), (0, Stop::Eof(bytes.len())));
    }

    #[test]
    fn walk_description_that_disagrees_is_a_flaw_of_the_description() {
        let bytes = [section(2, "a", &[1; 10]), section(3, "b", &[2; 5]), vec![EOF]].concat();

        for wrong in [&[("a", 9), ("b", 5)][..], &[("z", 1), ("a", 10), ("b", 5)], &[("a", 10)], &[("q", 1)]]
        {
            let walk = walk(&bytes, Some(&description(wrong)));

            assert!(!walk.flaws.is_empty() && walk.flaws.iter().all(|flaw| flaw.in_description), "{wrong:?}");
            assert_eq!((walk.sections.len(), walk.stop), (2, Stop::Eof(bytes.len())), "{wrong:?}");
        }
    }

    #[test]
    fn walk_cut_anywhere_ends_without_an_eof() {
        let bytes = [section(2, "a", &[1; 10]), section(3, "b", &[2; 5]), vec![EOF]].concat();

        for end in 0..bytes.len() {
            let walk = walk(&bytes[..end], None);

            assert!(!matches!(walk.stop, Stop::Eof(_)), "cut at {end}");
            let whole = walk.stop == Stop::Whole;
            assert_eq!(whole, walk.flaws.is_empty(), "cut at {end}");
        }
    }

    #[test]
    fn walk_section_that_comes_later_in_the_description_goes_on_there() {
        let told = [("a", 1), ("b", 2), ("a", 3), ("c", 4), ("a", 5)];
        let of = |names: &[(&str, usize)]| {
            let sections = (2..).zip(names).map(|(id, (name, bytes))| section(id, name, &vec![7; *bytes]));
            [sections.collect::<Vec<_>>().concat(), vec![EOF]].concat()
        };
        for (found, described) in [
            (&[("a", 1), ("a", 3), ("a", 5)][..], [Some(0), Some(2), Some(4)]),
            (&[("b", 2), ("a", 3), ("a", 5)], [Some(1), Some(2), Some(4)]),
            (&[("c", 4), ("b", 2), ("a", 5)], [Some(3), None, Some(4)]),
        ] {
            let walk = walk(&of(found), Some(&description(&told)));

            let places: Vec<_> = walk.sections.iter().map(|section| section.described).collect();
            assert_eq!(places, described, "{found:?}");
            assert!(!walk.flaws.is_empty() && walk.flaws.iter().all(|flaw| flaw.in_description));
        }
    }

    #[test]
    fn walk_part_of_a_section_that_has_ended_is_not_called_never_started() {
        let mut bytes = section(2, "a", b"start");
        bytes[0] = START;
        let part = |kind| [&[kind, 0, 0, 0, 2][..], b"more", &[FOOTER, 0, 0, 0, 2]].concat();
        bytes.extend([part(PART), part(END)].concat());
        let sound = walk(&bytes, None);
        bytes.extend(part(PART));

        let walk = walk(&bytes, None);

        assert!(sound.flaws.is_empty() && sound.parts.len() == 2, "{sound:?}");
        assert!(walk.flaws.iter().any(|flaw| flaw.what.contains("or it has ended")), "{:?}", walk.flaws);
    }
}
