//! A second taker of a stream that is read.

use std::io::{self, Write};
use std::sync::Arc;

use parking_lot::Mutex;

/// A second taker of the decompressed stream, which is named when the head is known. It gets what the reader has consumed, and
/// can be made to wait: a stream whose end does not come is loaded by nobody.
#[derive(Clone, Default)]
pub(crate) struct Tee(Arc<Mutex<To>>);

type Taker = Box<dyn Write + Send>;

enum To {
    /// Kept until it is known where it goes.
    Unnamed(Vec<u8>),
    Write(Taker),
    /// Kept until it is released.
    Held(Taker, Vec<u8>),
    Off,
}

impl Default for To {
    fn default() -> Self {
        Self::Unnamed(Vec::new())
    }
}

impl Tee {
    /// From now on, and with what came already, to `taker`.
    pub(crate) fn to(&self, mut taker: Taker) -> io::Result<()> {
        let mut to = self.0.lock();
        if let To::Unnamed(bytes) = &*to {
            taker.write_all(bytes)?;
        }
        *to = To::Write(taker);
        Ok(())
    }

    /// Nobody wants it.
    pub(crate) fn off(&self) {
        *self.0.lock() = To::Off;
    }

    /// From here on the taker gets nothing until [`release`](Self::release).
    pub(super) fn hold(&self) {
        let mut to = self.0.lock();
        *to = match std::mem::replace(&mut *to, To::Off) {
            To::Write(taker) => To::Held(taker, Vec::new()),
            other => other,
        };
    }

    /// The taker gets what was held, and whatever comes.
    pub(crate) fn release(&self) -> io::Result<()> {
        let mut to = self.0.lock();
        *to = match std::mem::replace(&mut *to, To::Off) {
            To::Held(mut taker, bytes) => {
                taker.write_all(&bytes)?;
                To::Write(taker)
            }
            other => other,
        };
        Ok(())
    }

    /// Bytes that were consumed.
    pub(super) fn take(&self, bytes: &[u8]) -> io::Result<()> {
        match &mut *self.0.lock() {
            To::Unnamed(kept) | To::Held(_, kept) => kept.extend_from_slice(bytes),
            To::Write(taker) => taker.write_all(bytes)?,
            To::Off => {}
        }
        Ok(())
    }
}
