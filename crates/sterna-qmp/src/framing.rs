//! Splits a byte stream into JSON values.
//!
//! QMP has no framing: values follow each other, with or without white space. Like QEMU's parser, this one accepts
//! strings in apostrophes, reports malformed input and continues. After an error it drops bytes up to the next control
//! character (usually a newline) or to the start of an object or array. A byte 0xFF resets it at any time. Its limits
//! are stricter than QEMU's: the bytes of one value, and its depth. It allocates no memory by a length that the peer
//! states.

use std::collections::VecDeque;

use serde_json::Value;

/// Maximum depth of nested values. QEMU's own messages have much less.
pub const MAX_DEPTH: usize = 64;

/// One element of the stream.
#[derive(Debug, Clone, PartialEq)]
pub enum Frame {
    /// A complete value. At the top level only objects and arrays are recognised.
    Value(Value),
    /// Input that is not JSON, with the reason. Parsing continues after it.
    Malformed(String),
}

/// Splits a byte stream into [`Frame`]s.
#[derive(Debug)]
pub struct Framer {
    max_bytes: usize,
    buffer: Vec<u8>,
    depth: usize,
    quote: Option<u8>,
    escaped: bool,
    recovery: Recovery,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Recovery {
    None,
    /// Drop bytes until a control character or the start of a value.
    Soft,
    /// Drop bytes until a control character: the value was too long or too deep.
    Hard,
}

impl Framer {
    /// A framer that refuses values of more than `max_bytes` bytes.
    pub fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes,
            buffer: Vec::new(),
            depth: 0,
            quote: None,
            escaped: false,
            recovery: Recovery::None,
        }
    }

    /// Parses the next bytes of the stream, and appends the completed frames to `frames`.
    pub fn push(&mut self, bytes: &[u8], frames: &mut VecDeque<Frame>) {
        for &byte in bytes {
            if let Some(frame) = self.byte(byte) {
                frames.push_back(frame);
            }
        }
    }

    fn byte(&mut self, byte: u8) -> Option<Frame> {
        if byte == 0xff {
            return Some(self.fail("invalid UTF-8 sequence in input", Recovery::None));
        }
        if self.quote.is_some() {
            self.in_string(byte)
        } else if self.depth > 0 {
            self.in_value(byte)
        } else {
            self.between_values(byte)
        }
    }

    fn between_values(&mut self, byte: u8) -> Option<Frame> {
        match (byte, self.recovery) {
            (b'{' | b'[', Recovery::None | Recovery::Soft) => {
                self.recovery = Recovery::None;
                self.in_value(byte)
            }
            (b' ', _) => None,
            (b'\t' | b'\n' | b'\r', _) => {
                self.recovery = Recovery::None;
                None
            }
            (_, Recovery::None) => Some(self.fail("expecting value", Recovery::Soft)),
            (0..0x20, _) => {
                self.recovery = Recovery::None;
                None
            }
            _ => None,
        }
    }

    fn in_value(&mut self, byte: u8) -> Option<Frame> {
        match byte {
            b'{' | b'[' if self.depth == MAX_DEPTH => {
                return Some(self.fail("nesting depth limit exceeded", Recovery::Hard));
            }
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth -= 1,
            b'"' | b'\'' => {
                self.quote = Some(byte);
                return self.keep(b"\"");
            }
            b'\t' | b'\n' | b'\r' => {}
            0..0x20 => return Some(self.fail("stray control character", Recovery::None)),
            0x80.. => return Some(self.fail("stray non-ASCII byte outside a string", Recovery::Soft)),
            _ => {}
        }
        self.keep(&[byte]).or_else(|| (self.depth == 0).then(|| self.parse()))
    }

    fn in_string(&mut self, byte: u8) -> Option<Frame> {
        if byte < 0x20 {
            return Some(self.fail("control character in a string", Recovery::None));
        }
        if std::mem::take(&mut self.escaped) {
            return match byte {
                b'\'' => self.keep(b"'"),
                _ => self.keep(&[b'\\', byte]),
            };
        }
        match byte {
            b'\\' => {
                self.escaped = true;
                None
            }
            _ if Some(byte) == self.quote => {
                self.quote = None;
                self.keep(b"\"")
            }
            b'"' => self.keep(b"\\\""),
            _ => self.keep(&[byte]),
        }
    }

    fn keep(&mut self, bytes: &[u8]) -> Option<Frame> {
        if self.buffer.len() + bytes.len() > self.max_bytes {
            return Some(self.fail("size limit exceeded", Recovery::Hard));
        }
        self.buffer.extend_from_slice(bytes);
        None
    }

    fn parse(&mut self) -> Frame {
        let text = std::mem::take(&mut self.buffer);
        match serde_json::from_slice(&text) {
            Ok(value) => Frame::Value(value),
            Err(error) => Frame::Malformed(format!("JSON parse error, {error}")),
        }
    }

    fn fail(&mut self, why: &str, recovery: Recovery) -> Frame {
        *self = Self { recovery, ..Self::new(self.max_bytes) };
        Frame::Malformed(format!("JSON parse error, {why}"))
    }
}

/// Encodes `value` for QMP: one line, ASCII only, ended by CR LF.
pub fn to_line(value: &Value) -> Vec<u8> {
    let text = value.to_string();
    let mut line = String::with_capacity(text.len() + 2);
    for character in text.chars() {
        if character.is_ascii() {
            line.push(character);
        } else {
            // Only strings contain non-ASCII characters, so an escape is valid at every such place.
            let mut units = [0; 2];
            for unit in character.encode_utf16(&mut units) {
                line.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    line.push_str("\r\n");
    line.into_bytes()
}
