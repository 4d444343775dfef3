//! The payload of a packet of differences (`specs/extension.md §10`).
//!
//! The payload has one entry for each page of the packet: the length of the delta, then the delta.

use crate::PAGE_SIZE;
use crate::error::WireError;
use crate::limits::PACKET_PAGES;

const MESSAGE: &str = "multifd packet of differences";
pub(super) const SPEC: &str = "specs/extension.md §10";
/// Bytes of a delta's length field.
const LENGTH: usize = 2;
/// Longest payload, in bytes.
pub(super) const MOST_BYTES: usize = PACKET_PAGES * (LENGTH + PAGE_SIZE);

/// Appends a page's delta (`specs/stream.md §2.4`) with its length to a payload.
///
/// # Errors
/// [`Fault::Local`](crate::Fault::Local) for a delta that is not 1 to [`PAGE_SIZE`] bytes.
pub fn push_difference(delta: &[u8], payload: &mut Vec<u8>) -> Result<(), WireError> {
    if delta.is_empty() || delta.len() > PAGE_SIZE {
        let rule = format!("a delta of {} bytes, not 1 to {PAGE_SIZE}", delta.len());
        return Err(WireError::local(MESSAGE, payload.len() as u64, SPEC, rule));
    }
    // At most 4096, so the length fits a u16.
    payload.extend_from_slice(&(delta.len() as u16).to_be_bytes());
    payload.extend_from_slice(delta);
    Ok(())
}

/// Iterator over a payload's deltas, in the order of the packet's pages.
///
/// The content of the deltas is not checked yet. The iterator ends after an error.
#[derive(Debug, Clone)]
pub struct Differences<'a> {
    payload: &'a [u8],
    at: usize,
    left: usize,
}

impl<'a> Differences<'a> {
    /// The deltas of a packet with `pages` normal pages.
    pub fn new(payload: &'a [u8], pages: usize) -> Self {
        Self { payload, at: 0, left: pages }
    }

    fn read(&mut self) -> Result<&'a [u8], WireError> {
        let start = self.at;
        let short = |what: &str| bad(start, format!("the payload ends in {what}"));
        let rest = &self.payload[start..];
        let (length, rest) = rest.split_first_chunk::<LENGTH>().ok_or_else(|| short("a delta's length"))?;
        let length = usize::from(u16::from_be_bytes(*length));
        if !(1..=PAGE_SIZE).contains(&length) {
            return Err(bad(start, format!("a delta of {length} bytes, not 1 to {PAGE_SIZE}")));
        }
        let delta = rest.get(..length).ok_or_else(|| short("a delta"))?;
        self.at += LENGTH + length;
        if self.left == 1 && self.at < self.payload.len() {
            let more = self.payload.len() - self.at;
            return Err(bad(self.at, format!("{more} bytes after the last delta")));
        }
        Ok(delta)
    }
}

impl<'a> Iterator for Differences<'a> {
    type Item = Result<&'a [u8], WireError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        let read = self.read();
        self.left = if read.is_ok() { self.left - 1 } else { 0 };
        Some(read)
    }
}

#[cold]
fn bad(offset: usize, rule: String) -> WireError {
    WireError::misbehaved(MESSAGE, offset as u64, SPEC, rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_comes_apart_as_it_was_put_together_and_never_otherwise() {
        let deltas: [&[u8]; 3] = [&[0, 1, 7], &[9; PAGE_SIZE], &[5]];
        let mut payload = Vec::new();
        deltas.iter().for_each(|delta| push_difference(delta, &mut payload).unwrap());

        let read: Result<Vec<_>, _> = Differences::new(&payload, 3).collect();
        assert_eq!(read.unwrap(), deltas);

        for length in 0..payload.len() {
            let read: Result<Vec<_>, _> = Differences::new(&payload[..length], 3).collect();
            assert!(read.is_err(), "cut to {length} bytes");
        }
        // Fewer or more pages than deltas.
        for pages in [1, 2, 4] {
            assert!(Differences::new(&payload, pages).any(|delta| delta.is_err()), "{pages} pages");
        }
        for length in [0, PAGE_SIZE + 1] {
            let mut wrong = (length as u16).to_be_bytes().to_vec();
            wrong.resize(LENGTH + length, 0);
            let error = Differences::new(&wrong, 1).next().unwrap().unwrap_err();
            assert_eq!((error.offset, error.paragraph), (0, SPEC), "{error}");
            assert!(push_difference(&wrong[LENGTH..], &mut Vec::new()).is_err());
        }
    }
}
