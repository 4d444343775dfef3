//! Pages sent as a difference to their older content (`specs/stream.md §2.4`).
//!
//! A delta is a list of pairs: the number of old bytes to keep, and the new bytes to write after them. The
//! page's bytes after the last pair do not change.

use std::ops::Range;

use crate::PAGE_SIZE;
use crate::error::WireError;

const MESSAGE: &str = "XBZRLE delta";
const SPEC: &str = "specs/stream.md §2.4";

/// New bytes of a page, as [`pairs`] returns them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Literal<'a> {
    /// Offset of the bytes in the page.
    pub offset: usize,
    /// The new bytes: at least one, within the page.
    pub bytes: &'a [u8],
}

/// Checks all of `delta` without a page.
///
/// # Errors
/// As for [`apply`].
pub fn check(delta: &[u8]) -> Result<(), WireError> {
    pairs(delta).try_for_each(|literal| literal.map(|_| ()))
}

/// Applies `delta` to `page`. After an error `page` is unchanged.
///
/// # Errors
/// [`Fault::PeerMisbehaved`](crate::Fault::PeerMisbehaved) for:
///
/// - a literal of no bytes
/// - a skip of 0 that is not the first
/// - a length of more than two bytes
/// - a pair that exceeds the page or the delta
pub fn apply(delta: &[u8], page: &mut [u8; PAGE_SIZE]) -> Result<(), WireError> {
    check(delta)?;
    for literal in pairs(delta).flatten() {
        page[literal.offset..literal.offset + literal.bytes.len()].copy_from_slice(literal.bytes);
    }
    Ok(())
}

/// The literals of `delta`, for a caller that cannot pass the page as a slice.
///
/// [`check`] the delta first, because the iterator returns the pairs before a wrong one as valid. It ends after
/// an error.
pub fn pairs(delta: &[u8]) -> Pairs<'_> {
    Pairs { delta, at: 0, place: 0 }
}

/// Iterator over the literals of a delta.
#[derive(Debug, Clone)]
pub struct Pairs<'a> {
    delta: &'a [u8],
    at: usize,
    place: usize,
}

impl<'a> Iterator for Pairs<'a> {
    type Item = Result<Literal<'a>, WireError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.delta.len() {
            return None;
        }
        let pair = self.pair();
        if pair.is_err() {
            self.at = self.delta.len();
        }
        Some(pair)
    }
}

impl<'a> Pairs<'a> {
    fn pair(&mut self) -> Result<Literal<'a>, WireError> {
        let first = self.at == 0;
        let start = self.at;
        let skip = self.length()?;
        if skip == 0 && !first {
            return Err(bad(start, "a skip of 0 that is not the first"));
        }
        let start = self.at;
        let count = self.length()?;
        if count == 0 {
            return Err(bad(start, "a literal of no bytes"));
        }
        let offset = self.place + skip;
        let end = offset + count;
        if end > PAGE_SIZE {
            return Err(bad(start, format!("bytes {offset} to {end}, in a page of {PAGE_SIZE}")));
        }
        let Some(bytes) = self.delta[self.at..].get(..count) else {
            return Err(bad(
                start,
                format!("a literal of {count} bytes, but only {} are left", self.delta.len() - self.at),
            ));
        };
        self.at += count;
        self.place = end;
        Ok(Literal { offset, bytes })
    }

    /// Reads a length: one byte below 0x80, or 14 bits in two bytes, lowest first.
    fn length(&mut self) -> Result<usize, WireError> {
        let start = self.at;
        let low = self.byte()?;
        if low < 0x80 {
            return Ok(usize::from(low));
        }
        let high = self.byte()?;
        if high >= 0x80 {
            return Err(bad(start, "a length of more than two bytes"));
        }
        Ok(usize::from(low & 0x7f) | usize::from(high) << 7)
    }

    fn byte(&mut self) -> Result<u8, WireError> {
        let Some(byte) = self.delta.get(self.at) else {
            return Err(bad(self.at, "the delta ends inside a pair"));
        };
        self.at += 1;
        Ok(*byte)
    }
}

fn bad(offset: usize, rule: impl Into<std::borrow::Cow<'static, str>>) -> WireError {
    WireError::misbehaved(MESSAGE, offset as u64, SPEC, rule)
}

/// Appends the delta that turns `old` into `new`.
///
/// Returns `false` and leaves `out` unchanged if the pages are equal, or if the delta would exceed `limit`
/// bytes. In the second case the caller sends the whole page.
pub fn encode(old: &[u8; PAGE_SIZE], new: &[u8; PAGE_SIZE], limit: usize, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    let mut at = 0;
    while let Some(changed) = next_change(old, new, at) {
        put_length(out, changed.start - at);
        put_length(out, changed.len());
        out.extend_from_slice(&new[changed.clone()]);
        if out.len() - start > limit {
            out.truncate(start);
            return false;
        }
        at = changed.end;
    }
    out.len() > start
}

/// The next range for one literal. It includes gaps of one or two equal bytes, because another pair would not
/// be shorter.
fn next_change(old: &[u8; PAGE_SIZE], new: &[u8; PAGE_SIZE], at: usize) -> Option<Range<usize>> {
    let start = at + equal_bytes(&old[at..], &new[at..]);
    if start == PAGE_SIZE {
        return None;
    }
    let mut end = start;
    loop {
        end += changed_bytes(&old[end..], &new[end..]);
        let differs = |i: &usize| old.get(*i) != new.get(*i);
        match (end + 1..=end + 2).find(differs) {
            Some(next) => end = next,
            None => return Some(start..end),
        }
    }
}

/// Number of equal bytes before the first one that differs.
fn equal_bytes(old: &[u8], new: &[u8]) -> usize {
    count_until(old, new, |difference| difference)
}

/// Number of bytes that differ before the first equal one.
fn changed_bytes(old: &[u8], new: &[u8]) -> usize {
    // The lowest bit that this sets is in the lowest byte that is zero.
    count_until(old, new, |difference| {
        difference.wrapping_sub(u64::from_ne_bytes([0x01; 8])) & !difference & u64::from_ne_bytes([0x80; 8])
    })
}

/// Index of the first byte for which `mark` sets a bit. `mark` receives the differences of eight bytes per
/// call.
fn count_until(old: &[u8], new: &[u8], mark: impl Fn(u64) -> u64) -> usize {
    let ((old_words, old_rest), (new_words, new_rest)) = (old.as_chunks::<8>(), new.as_chunks::<8>());
    for (i, (old, new)) in old_words.iter().zip(new_words).enumerate() {
        let marks = mark(u64::from_le_bytes(*old) ^ u64::from_le_bytes(*new));
        if marks != 0 {
            return i * 8 + marks.trailing_zeros() as usize / 8;
        }
    }
    let byte = |(old, new): (&u8, &u8)| mark(u64::from(*old ^ *new) | !0xff) & 0xff;
    old_words.len() * 8 + old_rest.iter().zip(new_rest).take_while(|pair| byte(*pair) == 0).count()
}

fn put_length(out: &mut Vec<u8>, length: usize) {
    // At most 4096, so 14 bits are enough.
    if length < 0x80 {
        out.push(length as u8);
    } else {
        out.push(length as u8 & 0x7f | 0x80);
        out.push((length >> 7) as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apply_example_of_spec_changes_four_bytes() {
        let delta = [0x10, 0x01, 0xa3, 0xef, 0x03, 0x02, 0x75, 0x6f, 0xfd, 0x1b, 0x01, 0xa3];
        let mut page = [0x11; PAGE_SIZE];

        apply(&delta, &mut page).unwrap();

        let mut expected = [0x11; PAGE_SIZE];
        (expected[16], expected[512], expected[513], expected[4095]) = (0xa3, 0x75, 0x6f, 0xa3);
        assert_eq!(page, expected);
        let mut again = Vec::new();
        assert!(encode(&[0x11; PAGE_SIZE], &expected, PAGE_SIZE, &mut again));
        assert_eq!(again, delta);
    }

    #[test]
    fn encode_joins_changes_with_at_most_two_equal_bytes_between() {
        let old = [0; PAGE_SIZE];
        let mut new = old;
        for changed in [10, 12, 15, 19, 4093, 4095] {
            new[changed] = 7;
        }
        let mut delta = Vec::new();

        assert!(encode(&old, &new, PAGE_SIZE, &mut delta));

        let offsets: Vec<_> =
            pairs(&delta).map(|pair| pair.unwrap()).map(|l| (l.offset, l.bytes.len())).collect();
        assert_eq!(offsets, [(10, 6), (19, 1), (4093, 3)]);
    }

    #[test]
    fn encode_of_more_than_the_limit_leaves_buffer() {
        let mut delta = vec![0xee];

        assert!(!encode(&[0; PAGE_SIZE], &[7; PAGE_SIZE], 4097, &mut delta));
        assert!(!encode(&[7; PAGE_SIZE], &[7; PAGE_SIZE], 4097, &mut delta));
        assert_eq!(delta, [0xee]);
        assert!(encode(&[0; PAGE_SIZE], &[7; PAGE_SIZE], 4099, &mut delta));
        assert_eq!(delta.len(), 1 + 4099);
    }

    #[test]
    fn apply_wrong_delta_leaves_page_and_names_byte() {
        // Pairs of delta and offset of the offending byte.
        let cases: [(&[u8], u64); 7] = [
            (&[0, 0], 1),
            (&[1, 1, 9, 0, 1, 9], 3),
            (&[5], 1),
            (&[5, 2, 9], 1),
            (&[0xff, 0x1f, 2, 9, 9], 2),
            (&[0x80, 0x80, 1, 9], 0),
            (&[0x80], 1),
        ];
        for (delta, offset) in cases {
            let mut page = [0x22; PAGE_SIZE];
            let error = apply(delta, &mut page).unwrap_err();
            assert_eq!(error.offset, offset, "{delta:x?}: {error}");
            assert_eq!(page, [0x22; PAGE_SIZE]);
        }
    }
}
