//! Finds the sections of devices in a complete buffer (`specs/stream.md §1.4`, `§1.6`).
//!
//! Tails and checkpoints use it, because their sections are searched after all bytes have arrived.

use std::collections::HashSet;
use std::ops::Range;

use super::element::{self, FOOTER, FOOTER_BYTES, SectionHeader};
use super::footer;
use crate::reader::{Reader, Stop};

/// Header of a FULL section, with the position of the body.
pub(crate) struct FullSection<'a> {
    pub(crate) id: u32,
    pub(crate) name: &'a str,
    pub(crate) instance: u32,
    pub(crate) version: u32,
    /// Offset of the body in the buffer, in bytes.
    pub(crate) body: usize,
}

/// Reads the header of a FULL section at `at`; `None` without a whole one.
pub(crate) fn full_section(bytes: &[u8], at: usize) -> Option<FullSection<'_>> {
    let mut r = Reader::new(bytes.get(at..)?, "section header");
    let read = (|| -> Result<_, Stop> {
        let kind = r.u8()?;
        let header = SectionHeader::read(&mut r)?;
        Ok((kind, header))
    })();
    match read {
        Ok((element::FULL, SectionHeader { id, name, instance, version })) => {
            Some(FullSection { id, name, instance, version, body: at + r.at() })
        }
        _ => None,
    }
}

/// The ranges of all sections, header to footer, if they fill `bytes`.
///
/// A section ends at the length from `length_of` (by name and instance) if a footer is there. Otherwise it ends
/// at the first plausible footer.
pub(crate) fn sections(
    bytes: &[u8],
    length_of: impl Fn(&str, u32) -> Option<u64>,
) -> Option<Vec<Range<usize>>> {
    let (mut used, mut found, mut at) = (HashSet::new(), Vec::new(), 0);
    while at < bytes.len() {
        let section = full_section(bytes, at)?;
        used.insert(section.id);
        let described = length_of(section.name, section.instance)
            .and_then(|length| section.body.checked_add(usize::try_from(length).ok()?))
            .filter(|foot| is_foot(bytes, *foot, section.id, &used));
        let foot = match described {
            Some(foot) => foot,
            None => footer::foot(bytes, section.body, section.id, &used)?,
        };
        found.push(at..foot + FOOTER_BYTES);
        at = foot + FOOTER_BYTES;
    }
    (at == bytes.len()).then_some(found)
}

fn is_foot(bytes: &[u8], at: usize, id: u32, used: &HashSet<u32>) -> bool {
    let Some(next) = at.checked_add(FOOTER_BYTES) else { return false };
    let Some(footer) = bytes.get(at..next) else { return false };
    footer[0] == FOOTER
        && footer[1..] == id.to_be_bytes()
        && (next == bytes.len()
            || full_section(bytes, next).is_some_and(|section| !used.contains(&section.id)))
}
