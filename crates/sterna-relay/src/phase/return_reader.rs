//! Reads the return path of a main channel while it passes.

use sterna_wire::return_path::ReturnMessage;

/// The value of the PING after which a source of QEMU 10.2 or later never resumes its guest.
const PACKAGE_LOADED: u32 = 0x42;

/// Reads one return path, from its first byte on.
#[derive(Debug, Default)]
pub struct ReturnReader {
    pending: Vec<u8>,
    /// Nothing more is read: a bitmap, or bytes that are no messages.
    is_deaf: bool,
    shut: Option<u32>,
    is_package_loaded: bool,
}

impl ReturnReader {
    /// A reader at the start of a return path.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads the next bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.is_deaf {
            return;
        }
        self.pending.extend_from_slice(bytes);
        let mut used = 0;
        loop {
            match ReturnMessage::decode(&self.pending[used..]) {
                Ok(Some((message, length))) => {
                    used += length;
                    match message {
                        ReturnMessage::Shut(value) => self.shut = Some(value),
                        ReturnMessage::Pong(PACKAGE_LOADED) => self.is_package_loaded = true,
                        // The bitmap follows, whose length is the block's.
                        ReturnMessage::ReceivedBitmap { .. } => self.is_deaf = true,
                        _ => {}
                    }
                    if self.is_deaf {
                        self.pending = Vec::new();
                        return;
                    }
                }
                Ok(None) => break,
                Err(_) => {
                    self.is_deaf = true;
                    self.pending = Vec::new();
                    return;
                }
            }
        }
        self.pending.drain(..used);
    }

    /// The value of SHUT, with which the destination ends: 0 if it has the guest.
    pub fn shut(&self) -> Option<u32> {
        self.shut
    }

    /// Whether the destination has answered that the package of postcopy is loaded.
    pub fn is_package_loaded(&self) -> bool {
        self.is_package_loaded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shut_and_pong_are_found_in_pieces() {
        let mut bytes = Vec::new();
        for message in [ReturnMessage::Pong(1), ReturnMessage::Pong(0x42), ReturnMessage::Shut(0)] {
            message.encode(&mut bytes).unwrap();
        }
        let mut reader = ReturnReader::new();
        for (at, byte) in bytes.iter().enumerate() {
            assert_eq!((reader.is_package_loaded(), reader.shut()), (at >= 16, None));
            reader.feed(&[*byte]);
        }
        assert_eq!(reader.shut(), Some(0));
    }

    #[test]
    fn bytes_that_are_no_messages_end_the_reading_and_keep_no_memory() {
        let mut reader = ReturnReader::new();
        for _ in 0..1000 {
            reader.feed(&[0xff; 1000]);
        }
        assert_eq!((reader.shut(), reader.pending.len()), (None, 0));
    }
}
