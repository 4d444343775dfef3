//! Reads parts of the memory through the cache of frames.

use std::ops::Range;
use std::sync::Arc;

use crate::cache::FrameCache;
use crate::source::{PageSource, SourceError};

/// A source and its cache.
pub(crate) struct Content {
    pub(crate) source: Arc<dyn PageSource>,
    cache: FrameCache,
}

/// Where bytes were that need no wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Now {
    /// The source read these bytes alone.
    Page,
    /// A whole frame is in the cache.
    Frame,
    /// They must be waited for.
    Later,
}

impl Content {
    pub(crate) fn new(source: Arc<dyn PageSource>, cache_limit_bytes: u64) -> Self {
        Self { source, cache: FrameCache::new(cache_limit_bytes) }
    }

    /// The frame that contains byte `offset`, or the page of `page_bytes` if that is larger.
    pub(crate) fn span(&self, offset: u64, page_bytes: u64) -> Range<u64> {
        let unit = self.source.frame_bytes().max(page_bytes);
        let start = offset / unit * unit;
        start..(start + unit).min(self.source.len_bytes())
    }

    /// Fills `to` if that needs no wait.
    pub(crate) fn read_now(&self, offset: u64, to: &mut [u8]) -> Result<Now, SourceError> {
        let frame = self.source.frame_bytes();
        // One frame at most is looked up: a fault of a huge page is rare, and long in any case.
        let inside = (offset % frame) as usize;
        if inside + to.len() <= frame as usize
            && let Some(content) = self.cache.peek(offset / frame)
        {
            to.copy_from_slice(&content[inside..inside + to.len()]);
            return Ok(Now::Frame);
        }
        Ok(if self.source.read_now(offset, to)? { Now::Page } else { Now::Later })
    }

    /// Fills `to` with the bytes of a span, and waits for them. Frames that are read are kept.
    pub(crate) fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), SourceError> {
        if self.source.read_now(offset, to)? {
            return Ok(());
        }
        let frame = self.source.frame_bytes();
        let (mut at, end) = (offset, offset + to.len() as u64);
        while at < end {
            let start = at / frame * frame;
            let bytes = frame.min(self.source.len_bytes() - start) as usize;
            let content = self.cache.get(start / frame, bytes, |content| self.source.read(start, content))?;
            let count = (end.min(start + bytes as u64) - at) as usize;
            let from = (at - start) as usize;
            let into = (at - offset) as usize;
            to[into..into + count].copy_from_slice(&content[from..from + count]);
            at += count as u64;
        }
        Ok(())
    }
}
