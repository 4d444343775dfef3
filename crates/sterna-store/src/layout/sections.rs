//! The list of sections of an index, and the seals of optional ones (`specs/image.md §4`).

use std::collections::HashSet;

use super::bytes::{Fields, Rule};
use crate::digest::Digest;
use crate::key::Crypt;

/// A reader ignores a section with this bit that it does not know.
pub(crate) const OPTIONAL: u32 = 1 << 31;
/// Bytes of a section's kind and length.
const HEAD_BYTES: usize = 12;
/// Bytes of the seal at the beginning of an optional section.
const SEAL_BYTES: usize = 32;

/// The sections of an index, in their order.
pub(crate) struct Sections<'a> {
    all: Vec<Section<'a>>,
}

/// One section.
#[derive(Clone, Copy)]
pub(crate) struct Section<'a> {
    pub(crate) kind: u32,
    /// Head and body.
    whole: &'a [u8],
}

impl<'a> Section<'a> {
    /// The content; that of an optional section begins after its seal.
    pub(crate) fn body(&self) -> &'a [u8] {
        &self.whole[HEAD_BYTES + if self.is_optional() { SEAL_BYTES } else { 0 }..]
    }

    pub(crate) fn is_optional(&self) -> bool {
        self.kind & OPTIONAL != 0
    }
}

impl<'a> Sections<'a> {
    pub(crate) fn split(index: &'a [u8]) -> Result<Self, Rule> {
        let mut fields = Fields::new(index, "the index");
        let (mut all, mut seen, mut at) = (Vec::new(), HashSet::new(), 0);
        while !fields.is_empty() {
            let (kind, length) = (fields.u32()?, fields.u64()?);
            let length = fields.bytes(usize::try_from(length).unwrap_or(usize::MAX))?.len();
            if !seen.insert(kind) {
                return Err((format!("section {kind} occurs twice"), "§4"));
            }
            let section = Section { kind, whole: &index[at..at + HEAD_BYTES + length] };
            if section.is_optional() && length < SEAL_BYTES {
                return Err((format!("optional section {kind:#x} is shorter than its seal"), "§4"));
            }
            all.push(section);
            at += HEAD_BYTES + length;
        }
        Ok(Self { all })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Section<'a>> + '_ {
        self.all.iter().copied()
    }

    /// Digest of the image with this header: it covers the sections that are not optional.
    pub(crate) fn digest(&self, crypt: &Crypt, header: &[u8]) -> Digest {
        let required = self.iter().filter(|section| !section.is_optional()).map(|section| section.whole);
        crypt.digest(&[header].into_iter().chain(required).collect::<Vec<_>>())
    }

    /// Refuses an optional section of another image, or a changed one.
    pub(crate) fn check_seals(&self, crypt: &Crypt, image: Digest) -> Result<(), Rule> {
        for section in self.iter().filter(Section::is_optional) {
            if section.whole[HEAD_BYTES..HEAD_BYTES + SEAL_BYTES]
                != seal(crypt, image, section.kind, section.body())
            {
                let rule = format!("the seal of optional section {:#x} is wrong", section.kind);
                return Err((rule, "§4"));
            }
        }
        Ok(())
    }
}

/// Appends a section that the image's digest covers.
pub(crate) fn put(out: &mut Vec<u8>, kind: u32, body: &[u8]) {
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&(body.len() as u64).to_le_bytes());
    out.extend_from_slice(body);
}

/// Appends an optional section of the image with digest `image`.
pub(crate) fn put_optional(out: &mut Vec<u8>, crypt: &Crypt, image: Digest, kind: u32, body: &[u8]) {
    put(out, kind, &[&seal(crypt, image, kind, body)[..], body].concat());
}

fn seal(crypt: &Crypt, image: Digest, kind: u32, body: &[u8]) -> [u8; SEAL_BYTES] {
    crypt.digest(&[b"sterna image section", &image.0, &kind.to_le_bytes(), body]).0
}
