//! Header and footer (`specs/image.md §2, §3`).

use super::bytes::{Fields, Rule};
use super::limits::{EXTENT_LEAST, EXTENT_MOST};
use crate::digest::Digest;

/// The first bytes of an image.
pub(crate) const MAGIC: &[u8; 8] = b"STERNAIM";
const END_MAGIC: &[u8; 8] = b"STERNAEN";
const VERSION: u32 = 1;
pub(crate) const HEADER_BYTES: usize = 128;
pub(crate) const FOOTER_BYTES: usize = 64;
const CHECK_BYTES: usize = 8;

/// Bits of the header. A reader refuses an incompatible bit that it does not know, and ignores a compatible one.
pub(crate) mod features {
    /// Frames and index are encrypted, digests are keyed.
    pub(crate) const ENCRYPTED: u64 = 1;
    /// The image holds only the pages that differ from its base.
    pub(crate) const LAYER: u64 = 2;
    /// The frames are in packs of a store.
    pub(crate) const PACKS: u64 = 4;
    pub(crate) const KNOWN: u64 = ENCRYPTED | LAYER | PACKS;
}

/// The fixed part at the start of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) incompatible: u64,
    pub(crate) compatible: u64,
    pub(crate) extent_bytes: u32,
    pub(crate) salt: [u8; 32],
    pub(crate) key_check: [u8; 16],
}

/// Why a header cannot be used.
pub(crate) enum HeaderError {
    NotAnImage,
    Unsupported(String),
    Broken(Rule),
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = Vec::with_capacity(HEADER_BYTES);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&(HEADER_BYTES as u32).to_le_bytes());
        out.extend_from_slice(&self.incompatible.to_le_bytes());
        out.extend_from_slice(&self.compatible.to_le_bytes());
        out.extend_from_slice(&self.extent_bytes.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.salt);
        out.extend_from_slice(&self.key_check);
        out.resize(HEADER_BYTES - CHECK_BYTES, 0);
        with_check(out)
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, HeaderError> {
        if !bytes.starts_with(MAGIC) {
            return Err(HeaderError::NotAnImage);
        }
        let mut fields = Fields::new(&bytes[MAGIC.len()..], "the header");
        let version = fields.u32().map_err(HeaderError::Broken)?;
        // The version comes before the check, because a later version may have another header.
        if version != VERSION {
            return Err(HeaderError::Unsupported(format!(
                "version {version} of the format, this one knows 1"
            )));
        }
        check(bytes).map_err(HeaderError::Broken)?;
        Self::fields(&mut fields).map_err(HeaderError::Broken).and_then(Self::known)
    }

    fn fields(fields: &mut Fields<'_>) -> Result<Self, Rule> {
        let length = fields.u32()?;
        if length != HEADER_BYTES as u32 {
            return Err((format!("the header's length is {length}, not {HEADER_BYTES}"), "§2"));
        }
        let (incompatible, compatible, extent_bytes, _) =
            (fields.u64()?, fields.u64()?, fields.u32()?, fields.u32()?);
        Ok(Self { incompatible, compatible, extent_bytes, salt: fields.array()?, key_check: fields.array()? })
    }

    fn known(self) -> Result<Self, HeaderError> {
        let unknown = self.incompatible & !features::KNOWN;
        if unknown != 0 {
            let bit = unknown.trailing_zeros();
            return Err(HeaderError::Unsupported(format!(
                "it has the feature with bit {bit}, which is not known"
            )));
        }
        let extent = self.extent_bytes;
        if !extent.is_power_of_two() || !(EXTENT_LEAST..=EXTENT_MOST).contains(&extent) {
            let rule = format!("an extent of {extent} bytes is not a power of two from 64 KiB to 2 MiB");
            return Err(HeaderError::Broken((rule, "§2")));
        }
        Ok(self)
    }
}

/// The fixed part at the end of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Footer {
    pub(crate) index_offset: u64,
    pub(crate) index_bytes: u64,
    pub(crate) digest: Digest,
}

impl Footer {
    pub(crate) fn encode(&self) -> [u8; FOOTER_BYTES] {
        let mut out = Vec::with_capacity(FOOTER_BYTES);
        out.extend_from_slice(END_MAGIC);
        out.extend_from_slice(&self.index_offset.to_le_bytes());
        out.extend_from_slice(&self.index_bytes.to_le_bytes());
        out.extend_from_slice(&self.digest.0);
        with_check(out)
    }

    pub(crate) fn decode(bytes: &[u8; FOOTER_BYTES]) -> Result<Self, Rule> {
        if !bytes.starts_with(END_MAGIC) {
            let rule = "the last bytes are not a footer: the image is truncated, or something was appended";
            return Err((rule.to_owned(), "§3"));
        }
        check(bytes)?;
        let mut fields = Fields::new(&bytes[END_MAGIC.len()..], "the footer");
        Ok(Self { index_offset: fields.u64()?, index_bytes: fields.u64()?, digest: Digest(fields.array()?) })
    }
}

fn with_check<const N: usize>(mut out: Vec<u8>) -> [u8; N] {
    let sum = blake3::hash(&out);
    out.extend_from_slice(&sum.as_bytes()[..CHECK_BYTES]);
    let mut all = [0; N];
    all.copy_from_slice(&out);
    all
}

fn check(bytes: &[u8]) -> Result<(), Rule> {
    let (fields, sum) = bytes.split_at(bytes.len() - CHECK_BYTES);
    match blake3::hash(fields).as_bytes()[..CHECK_BYTES] == *sum {
        true => Ok(()),
        false => Err(("its checksum is wrong".to_owned(), "§2")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            incompatible: 0,
            compatible: 1 << 40,
            extent_bytes: 1 << 16,
            salt: [3; 32],
            key_check: [4; 16],
        }
    }

    #[test]
    fn header_and_footer_decode_to_what_was_encoded_and_every_changed_byte_is_refused() {
        let footer = Footer { index_offset: 1, index_bytes: 2, digest: Digest([5; 32]) };

        assert!(Header::decode(&header().encode()).is_ok_and(|decoded| decoded == header()));
        assert_eq!(Footer::decode(&footer.encode()), Ok(footer));
        for at in 0..HEADER_BYTES {
            let mut bytes = header().encode();
            bytes[at] ^= 0x10;
            assert!(Header::decode(&bytes).is_err(), "byte {at}");
        }
        for at in 0..FOOTER_BYTES {
            let mut bytes = footer.encode();
            bytes[at] ^= 0x10;
            assert!(Footer::decode(&bytes).is_err(), "byte {at}");
        }
    }

    #[test]
    fn incompatible_feature_of_a_later_version_is_refused_and_a_compatible_one_is_ignored() {
        let later = Header { incompatible: 1 << 20, ..header() };

        assert!(matches!(Header::decode(&later.encode()), Err(HeaderError::Unsupported(_))));
        assert!(Header::decode(&Header { compatible: u64::MAX, ..header() }.encode()).is_ok());
        for extent_bytes in [0, 4096, 3 << 16, 4 << 20] {
            let other = Header { extent_bytes, ..header() };
            assert!(matches!(Header::decode(&other.encode()), Err(HeaderError::Broken(_))), "{extent_bytes}");
        }
    }
}
