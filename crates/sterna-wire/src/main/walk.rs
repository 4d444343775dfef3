//! Finds the sections of devices in a complete buffer (`specs/stream.md §1.4`, `§1.6`).
//!
//! Tails and checkpoints use it, because their sections are searched after all bytes have arrived.

use super::element::{self, SectionHeader};
use crate::reader::{Reader, Stop};

/// Header of a FULL section, with the position of the body.
pub(crate) struct FullSection<'a> {
    pub(crate) id: u32,
    pub(crate) name: &'a str,
    pub(crate) instance: u32,
    #[cfg_attr(not(feature = "standby"), allow(dead_code, reason = "checkpoints ask"))]
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
