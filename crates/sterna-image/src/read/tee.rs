//! Copies a stream to a second consumer while it is read.

use std::io::{self, Write};
use std::sync::Arc;

use parking_lot::Mutex;

/// A second consumer of the decompressed stream, which is set after the head was read.
///
/// It receives the bytes that the reader has consumed. It can hold bytes back: a stream without its end cannot be
/// loaded.
#[derive(Clone, Default)]
pub(crate) struct Tee(Arc<Mutex<To>>);

type Taker = Box<dyn Write + Send>;

enum To {
    /// Keeps the bytes until the consumer is set.
    Unnamed(Vec<u8>),
    Write(Taker),
    /// Keeps the bytes until they are released.
    Held(Taker, Vec<u8>),
    Off,
}

impl Default for To {
    fn default() -> Self {
        Self::Unnamed(Vec::new())
    }
}

impl Tee {
    /// Sends the bytes so far, and all further bytes, to `taker`.
    pub(crate) fn to(&self, mut taker: Taker) -> io::Result<()> {
        let mut to = self.0.lock();
        if let To::Unnamed(bytes) = &*to {
            taker.write_all(bytes)?;
        }
        *to = To::Write(taker);
        Ok(())
    }

    /// Drops the copy; no consumer needs it.
    pub(crate) fn off(&self) {
        *self.0.lock() = To::Off;
    }

    /// Drops the bytes so far, because the stream begins again.
    pub(crate) fn restart(&self) {
        *self.0.lock() = To::default();
    }

    /// Holds further bytes back until [`release`](Self::release).
    pub(super) fn hold(&self) {
        let mut to = self.0.lock();
        *to = match std::mem::replace(&mut *to, To::Off) {
            To::Write(taker) => To::Held(taker, Vec::new()),
            other => other,
        };
    }

    /// Sends the held bytes, and all further bytes, to the consumer.
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

    /// Takes consumed bytes of the stream.
    pub(super) fn take(&self, bytes: &[u8]) -> io::Result<()> {
        match &mut *self.0.lock() {
            To::Unnamed(kept) | To::Held(_, kept) => kept.extend_from_slice(bytes),
            To::Write(taker) => taker.write_all(bytes)?,
            To::Off => {}
        }
        Ok(())
    }
}
