//! The messages of a handover between two Sternas, so that tests can cut a connection at each of them.
//!
//! A test's proxy gives every connection and direction a [`Watch`] for the message at which it
//! cuts, and [`Place`] names the side of the message. The list follows specs/stream.md §1.7 and
//! §1.9 and specs/extension.md: a message that is added there must be added to [`MESSAGES`]. A
//! watch searches only the main channel and the first bytes of a connection. Page content cannot
//! look like a message as long as it is random words or zeros.

/// The direction of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Way {
    /// From source to destination.
    Forward,
    /// From destination to source.
    Back,
}

/// The migrations in which a message is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Every migration has the message.
    Always,
    /// A migration without postcopy.
    Precopy,
    /// A migration that switches to postcopy.
    Postcopy,
    /// A migration with a reconnect window.
    Window,
    /// A migration on the same host, which passes memory as descriptors.
    SameHost,
}

/// The place at which a test cuts a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// No byte of the message passes: its receiver never gets it.
    Before,
    /// A part of the message passes, so its receiver gets an incomplete message.
    Within,
    /// The message passes and its receiver acts on it. Later bytes of both directions are lost.
    After,
}

impl Place {
    /// Every place, in the order of the type.
    pub const ALL: [Self; 3] = [Self::Before, Self::Within, Self::After];
}

/// A message of the handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The name that the specifications use.
    pub name: &'static str,
    /// The direction in which the message travels.
    pub way: Way,
    /// The migrations in which the message is sent.
    pub when: When,
    /// With a reconnect window, a connection that is lost here is resumed. Both sides have agreed
    /// to resume, and *prepare* is not answered yet.
    pub resumes: bool,
    form: Form,
}

/// How a watch recognises a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// The message is these bytes.
    Bytes(&'static [u8]),
    /// The message is the first byte after PING *prepare* and keep-alives.
    Eof,
}

const fn forward(name: &'static str, when: When, resumes: bool, bytes: &'static [u8]) -> Message {
    Message { name, way: Way::Forward, when, resumes, form: Form::Bytes(bytes) }
}

const fn back(name: &'static str, when: When, resumes: bool, bytes: &'static [u8]) -> Message {
    Message { name, way: Way::Back, when, resumes, form: Form::Bytes(bytes) }
}

const PREPARE: &[u8] = &[8, 0, 2, 0, 4, 0x53, 0x54, 0x4e, 3];
const KEEP_ALIVE: &[u8] = &[8, 0, 2, 0, 4, 0x53, 0x54, 0x4e, 5];

/// Every message, in the order in which it is sent for the first time.
pub const MESSAGES: &[Message] = &[
    forward("file header", When::Always, false, &[0x51, 0x45, 0x56, 0x4d]),
    forward("OPEN_RETURN_PATH", When::Always, false, &[8, 0, 1, 0, 0]),
    forward("PING probe", When::Always, false, &[8, 0, 2, 0, 4, 0x53, 0x54, 0x4e, 1]),
    forward("PING fence", When::Always, false, &[8, 0, 2, 0, 4, 0x53, 0x54, 0x4e, 2]),
    back("PONG probe", When::Always, false, &[0, 2, 0, 4, 0x53, 0x54, 0x4e, 1]),
    back("PONG features", When::Always, false, &[0, 2, 0, 4, 0x53, 0x46]),
    back("PONG fence", When::Always, false, &[0, 2, 0, 4, 0x53, 0x54, 0x4e, 2]),
    forward("handover section", When::Always, false, b"\x0fsterna/handover"),
    forward("PING reconnection", When::Window, false, &[8, 0, 2, 0, 4, 0x53, 0x54, 0x4e, 9]),
    back("PONG reconnection", When::Window, false, &[0, 2, 0, 4, 0x53, 0x54, 0x4e, 9]),
    forward("PING memory", When::SameHost, false, &[8, 0, 2, 0, 4, 0x53, 0x54, 0x4e, 0x10]),
    back("PONG memory", When::SameHost, false, &[0, 2, 0, 4, 0x53, 0x54, 0x4e, 0x10]),
    forward("POSTCOPY_ADVISE", When::Postcopy, false, &[8, 0, 3, 0, 16]),
    // The source may send this message before it has read the PONG.
    forward("RAM START", When::Always, false, b"\x03ram\0\0\0\0\0\0\0\x04"),
    forward("PING round", When::Window, true, &[8, 0, 2, 0, 4, 0x53, 0x54, 0x4e, 0x0a]),
    back("PONG round", When::Window, true, &[0, 2, 0, 4, 0x53, 0x54, 0x4e, 0x0a]),
    forward("SWITCHOVER_START", When::Always, true, &[8, 0, 11, 0, 0]),
    forward("device section", When::Precopy, true, b"\x0bglobalstate"),
    forward("PING prepare", When::Precopy, true, PREPARE),
    back("PONG prepare", When::Precopy, true, &[0, 2, 0, 4, 0x53, 0x54, 0x4e, 3]),
    Message { name: "EOF", way: Way::Forward, when: When::Precopy, resumes: false, form: Form::Eof },
    forward("RAM_DISCARD", When::Postcopy, false, &[8, 0, 6, 0]),
    forward("PACKAGED", When::Postcopy, false, &[8, 0, 7, 0, 4]),
    forward("PING prepare of the package", When::Postcopy, false, PREPARE),
    back("PONG prepare of the package", When::Postcopy, false, &[0, 2, 0, 4, 0x53, 0x54, 0x4e, 3]),
    forward("RUN", When::Postcopy, false, &[8, 0, 5, 0, 0]),
    forward("PING started", When::Postcopy, false, &[8, 0, 2, 0, 4, 0x53, 0x54, 0x4e, 0x20]),
    back("PONG started", When::Postcopy, false, &[0, 2, 0, 4, 0x53, 0x54, 0x4e, 0x20]),
    back("SHUT", When::Always, false, &[0, 1, 0, 4]),
];

/// Searches one direction of one connection for one message.
#[derive(Debug)]
pub struct Watch {
    message: Message,
    /// The last bytes that passed, in case the message began in them.
    tail: Vec<u8>,
    /// Number of bytes before the tail.
    before: usize,
    after_prepare: bool,
}

/// Upper bound of the bytes in a message's form.
const MOST_BYTES: usize = 32;

impl Watch {
    /// A watch for the first occurrence of the message.
    pub fn new(message: Message) -> Self {
        Self { message, tail: Vec::new(), before: 0, after_prepare: false }
    }

    /// Handles bytes that are about to pass.
    ///
    /// If the message ends in them, returns how many of them pass before a connection is cut at
    /// `place`.
    pub fn passes(&mut self, piece: &[u8], place: Place) -> Option<usize> {
        let passed = self.before + self.tail.len();
        self.tail.extend_from_slice(piece);
        let Some((from, bytes)) = self.find() else {
            let old = self.tail.len().saturating_sub(MOST_BYTES);
            self.drop(old);
            return None;
        };
        let at = match place {
            Place::Before => from,
            Place::Within => from + bytes / 2,
            Place::After => from + bytes,
        };
        Some((self.before + at).saturating_sub(passed))
    }

    fn drop(&mut self, bytes: usize) {
        self.tail.drain(..bytes);
        self.before += bytes;
    }

    /// The position and the length of the message in the tail.
    fn find(&mut self) -> Option<(usize, usize)> {
        let position =
            |all: &[u8], wanted: &[u8]| all.windows(wanted.len()).position(|bytes| bytes == wanted);
        match self.message.form {
            Form::Bytes(bytes) => position(&self.tail, bytes).map(|at| (at, bytes.len())),
            Form::Eof => {
                if !self.after_prepare {
                    let at = position(&self.tail, PREPARE)?;
                    self.after_prepare = true;
                    self.drop(at + PREPARE.len());
                }
                while self.tail.starts_with(KEEP_ALIVE) {
                    self.drop(KEEP_ALIVE.len());
                }
                (self.tail.first() == Some(&0)).then_some((0, 1))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(name: &str) -> Message {
        *MESSAGES.iter().find(|message| message.name == name).unwrap()
    }

    #[test]
    fn message_is_found_in_pieces_of_any_size() {
        let ping = [&[1; 40][..], PREPARE, &[9, 9]].concat();
        for size in 1..=ping.len() {
            for (place, cut) in [(Place::Before, 40), (Place::Within, 44), (Place::After, 49)] {
                let (mut watch, mut passed) = (Watch::new(message("PING prepare")), 0);
                for piece in ping.chunks(size) {
                    match watch.passes(piece, place) {
                        Some(pass) => {
                            passed += pass;
                            break;
                        }
                        None => passed += piece.len(),
                    }
                }
                // Bytes that passed in an earlier piece cannot be held back.
                assert_eq!(passed, cut.max(48 / size * size), "{size} {place:?}");
            }
        }
    }

    #[test]
    fn end_is_the_byte_after_prepare_and_keep_alives() {
        let stream = [&[0, 0][..], PREPARE, KEEP_ALIVE, &[0, 6]].concat();
        let found = Watch::new(message("EOF")).passes(&stream, Place::Before);
        assert_eq!(found, Some(2 + PREPARE.len() + KEEP_ALIVE.len()));
    }
}
