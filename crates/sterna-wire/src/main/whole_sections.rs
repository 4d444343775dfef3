//! The sections that fill a buffer.

use std::collections::HashSet;
use std::ops::Range;

use super::walk::full_section;
use crate::main::element::{FOOTER, FOOTER_BYTES};
use crate::main::footer;

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
