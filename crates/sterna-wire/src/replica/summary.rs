//! The primary's summary of a checkpoint: counts and digests (`specs/replica.md §7`).
//!
//! The standby compares it with the received data. It finds accidental changes and bugs, but it is no
//! protection against an attacker.

use std::fmt;
use std::sync::LazyLock;

use xxhash_rust::xxh3::xxh3_64;

use crate::error::WireError;
use crate::{PAGE_SIZE, reader};

const MESSAGE: &str = "summary of a checkpoint";
const RULES: &str = "specs/replica.md §7";

/// XXH3-64 of a zero page.
static ZERO_PAGE: LazyLock<u64> = LazyLock::new(|| xxh3_64(&[0; PAGE_SIZE]));

/// Counts of pages, and a digest of their content that ignores the order.
///
/// The sum of a whole is the sum of its parts, so that each lane can count on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageSums {
    /// Number of pages with content, sent whole or as differences.
    pub normal_pages: u64,
    /// Number of pages sent as zero.
    pub zero_pages: u64,
    /// Sum modulo 2^64 over all these pages of XXH3-64 of position and content.
    pub digest: u64,
}

impl PageSums {
    /// Adds a page with content. `block` is the block's number in the block list.
    ///
    /// For a difference, `content` is the resulting page.
    pub fn page(&mut self, block: usize, page: u64, content: &[u8]) {
        self.normal_pages += 1;
        self.digest = self.digest.wrapping_add(placed(block, page, xxh3_64(content)));
    }

    /// Adds `count` zero pages, starting at page `first`.
    pub fn zeros(&mut self, block: usize, first: u64, count: u64) {
        self.zero_pages += count;
        for page in first..first.saturating_add(count) {
            self.digest = self.digest.wrapping_add(placed(block, page, *ZERO_PAGE));
        }
    }

    /// Adds the sums of another lane.
    pub fn add(&mut self, other: &Self) {
        self.normal_pages += other.normal_pages;
        self.zero_pages += other.zero_pages;
        self.digest = self.digest.wrapping_add(other.digest);
    }
}

/// The digest of content at its position.
fn placed(block: usize, page: u64, content: u64) -> u64 {
    let mut bytes = [0; 24];
    bytes[..8].copy_from_slice(&(block as u64).to_be_bytes());
    bytes[8..16].copy_from_slice(&page.to_be_bytes());
    bytes[16..].copy_from_slice(&content.to_be_bytes());
    xxh3_64(&bytes)
}

/// The last section of a Sterna's checkpoint. The standby compares it with the received data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CheckpointSummary {
    /// The checkpoint's number. 0 in the seeding, where all other fields are 0.
    pub number: u64,
    /// Counts and digest of the checkpoint's pages.
    pub pages: PageSums,
    /// XXH3-64 of all sections before this one.
    pub sections: u64,
}

/// The first field in which a summary and the received data differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SummaryDifference {
    /// Name of the field.
    pub field: &'static str,
    /// Value in the primary's summary.
    pub said: u64,
    /// Value that the standby computed.
    pub found: u64,
}

impl fmt::Display for SummaryDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, said, found } = self;
        match field.starts_with("digest") {
            true => write!(f, "its {field} is {found:016x}, but {said:016x} in the primary's summary"),
            false => write!(f, "its {field} is {found}, but {said} in the primary's summary"),
        }
    }
}

impl CheckpointSummary {
    /// Name of the section in a checkpoint.
    pub const SECTION_NAME: &str = "sterna/checkpoint";
    /// Instance of the section.
    pub const SECTION_INSTANCE: u32 = 0;
    /// Version of the section's body.
    pub const SECTION_VERSION: u32 = 1;
    /// Length of a body without the length in front, in bytes.
    pub const BODY_BYTES: usize = 40;

    /// The summary of a checkpoint whose other sections are `sections`.
    #[must_use]
    pub fn of(number: u64, pages: PageSums, sections: &[u8]) -> Self {
        Self { number, pages, sections: xxh3_64(sections) }
    }

    /// The first field whose value in `found` differs.
    #[must_use]
    pub fn difference(&self, found: &Self) -> Option<SummaryDifference> {
        let fields = |of: &Self| {
            [
                ("number", of.number),
                ("count of normal pages", of.pages.normal_pages),
                ("count of zero pages", of.pages.zero_pages),
                ("digest of the pages", of.pages.digest),
                ("digest of the sections", of.sections),
            ]
        };
        let mut both = fields(self).into_iter().zip(fields(found));
        let ((field, said), (_, found)) = both.find(|((_, said), (_, found))| said != found)?;
        Some(SummaryDifference { field, said, found })
    }

    /// The body of the section.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let Self { number, pages, sections } = self;
        let values = [*number, pages.normal_pages, pages.zero_pages, pages.digest, *sections];
        values.iter().flat_map(|value| value.to_be_bytes()).collect()
    }

    /// Reads the body of a section.
    ///
    /// # Errors
    /// The body's length is not [`BODY_BYTES`](Self::BODY_BYTES).
    pub fn decode(body: &[u8]) -> Result<Self, WireError> {
        let read = reader::decode(body, MESSAGE, |r| {
            let number = r.u64()?;
            let (normal_pages, zero_pages, digest) = (r.u64()?, r.u64()?, r.u64()?);
            let pages = PageSums { normal_pages, zero_pages, digest };
            Ok(Self { number, pages, sections: r.u64()? })
        });
        match read? {
            Some((summary, used)) if used == body.len() => Ok(summary),
            _ => {
                let rule = format!("it has {} bytes, not {}", body.len(), Self::BODY_BYTES);
                Err(WireError::misbehaved(MESSAGE, 0, RULES, rule))
            }
        }
    }
}
