//! Counts what a conversion writes.

use std::sync::atomic::{AtomicU64, Ordering};

use sterna_wire::PAGE_SIZE;

use crate::ImageError;
use crate::read::body::RecordSink;
use crate::read::visitor::PageVisitor;

/// Counts of the pages and bytes that were written so far.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) data: AtomicU64,
    pub(super) zero: AtomicU64,
    pub(super) shared: AtomicU64,
    pub(super) target_bytes: AtomicU64,
}

/// Counts pages that go to `to`.
pub(super) struct Counted<'a> {
    pub(super) to: &'a mut dyn PageVisitor,
    pub(super) counts: &'a Counts,
}

impl PageVisitor for Counted<'_> {
    fn pages(&mut self, block: usize, first: u64, content: &[u8]) -> Result<(), ImageError> {
        self.counts.data.fetch_add((content.len() / PAGE_SIZE) as u64, Ordering::Relaxed);
        self.to.pages(block, first, content)
    }

    fn zero(&mut self, block: usize, first: u64, count: u64) -> Result<(), ImageError> {
        self.counts.zero.fetch_add(count, Ordering::Relaxed);
        self.to.zero(block, first, count)
    }
}

/// Counts the records of a stream that is copied byte for byte.
pub(super) struct Counting<'a>(pub(super) &'a Counts);

impl RecordSink for Counting<'_> {
    fn page(&mut self, _: usize, _: u64, _: &[u8; PAGE_SIZE]) -> Result<(), ImageError> {
        self.0.data.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn zero(&mut self, _: usize, _: u64) -> Result<(), ImageError> {
        self.0.zero.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn delta(&mut self, _: usize, _: u64, _: &[u8]) -> Result<(), ImageError> {
        self.0.data.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
