//! Bytes that were looked at before they are read.

use std::sync::atomic::Ordering;

use parking_lot::MutexGuard;

use super::Channel;
use crate::TransportError;
use crate::parts::own;

impl Channel {
    /// Returns the next `count` bytes without consuming them. Waits for all of them.
    ///
    /// # Errors
    /// As [`Channel::read_exact`].
    pub fn peek(&self, count: usize) -> Result<Vec<u8>, TransportError> {
        let mut peeked = self.peeked();
        let have = peeked.len();
        if have < count {
            let mut bytes = vec![0; count - have];
            self.receive_all(&[own(&mut bytes)])?;
            // For the caller, peeked bytes are not read yet.
            self.read.fetch_sub(bytes.len() as u64, Ordering::Relaxed);
            peeked.extend_from_slice(&bytes);
            self.has_peeked.store(!peeked.is_empty(), Ordering::Release);
        }
        Ok(peeked[..count].to_vec())
    }

    /// Passes up to `most` peeked bytes to `give` and returns their count.
    pub(super) fn take_peeked(&self, most: usize, give: impl FnOnce(&[u8])) -> Result<usize, TransportError> {
        if !self.has_peeked.load(Ordering::Acquire) {
            return Ok(0);
        }
        if self.is_shut_down() {
            return Err(self.cancelled());
        }
        let mut peeked = self.peeked();
        let count = peeked.len().min(most);
        give(&peeked[..count]);
        peeked.drain(..count);
        self.has_peeked.store(!peeked.is_empty(), Ordering::Release);
        self.read.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }

    fn peeked(&self) -> MutexGuard<'_, Vec<u8>> {
        self.peeked.lock()
    }
}
