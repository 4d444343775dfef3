//! Checks a destination's messages and their order on the return path in postcopy (specs/postcopy.md §3). Pure.

use sterna_wire::return_path::ReturnMessage;

use crate::error::{BadAnswer, BadGrant, MigrationError};

/// The first PING. Its PONG shows that the destination answers.
pub const HELLO_PING: u32 = 1;
/// The PING after the block list. Its PONG shows that the destination has accepted machine and memory.
pub const LISTED_PING: u32 = 0x10;
/// The PING before the package.
pub const PACKAGE_PING: u32 = 2;
/// The PING after the devices.
pub const DEVICES_PING: u32 = 3;
/// The PING after loading. Its PONG shows that the devices are loaded: from then on a broken connection can be
/// recovered.
pub const LOADED_PING: u32 = 0x42;
const PINGS: [u32; 5] = [HELLO_PING, LISTED_PING, PACKAGE_PING, DEVICES_PING, LOADED_PING];

/// The meaning of a destination's message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The answer to the PING with this value.
    Pong(u32),
    /// The destination needs these pages now.
    Request {
        /// Index of the block.
        block: usize,
        /// Offset of the first byte in the block.
        start: u64,
        /// Number of requested bytes.
        length: u64,
    },
    /// The bitmap of this block follows.
    Bitmap {
        /// Index of the block.
        block: usize,
    },
    /// The destination has resumed after a lost connection.
    Resumed,
    /// The destination has all pages and acknowledges the end.
    Done,
    /// A message that needs no action here.
    Nothing,
}

/// The messages of one connection so far, in both directions.
#[derive(Debug)]
pub struct Answers {
    names: Vec<String>,
    /// The block of the previous request.
    last: Option<usize>,
    /// PINGs that are not answered yet.
    pings: Vec<u32>,
    /// Blocks whose bitmap was requested and has not arrived.
    bitmaps: Vec<usize>,
    /// POSTCOPY_RESUME was sent and not acknowledged.
    awaits_resume: bool,
    /// LISTEN or RESUME was sent: pages may be requested.
    may_request: bool,
    /// EOF was sent, so SHUT 0 is allowed.
    has_ended: bool,
}

impl Answers {
    /// The state of a new connection, for blocks with these names.
    pub fn new(names: Vec<String>) -> Self {
        Self {
            names,
            last: None,
            pings: Vec::new(),
            bitmaps: Vec::new(),
            awaits_resume: false,
            may_request: false,
            has_ended: false,
        }
    }

    /// The name of the block with index `block`.
    pub fn name(&self, block: usize) -> &str {
        &self.names[block]
    }

    /// A PING is sent.
    pub fn pinged(&mut self, value: u32) {
        self.pings.push(value);
    }

    /// The package is sent, with LISTEN and its PINGs.
    pub fn packaged(&mut self) {
        self.pings.extend([DEVICES_PING, LOADED_PING]);
        self.may_request = true;
    }

    /// The bitmap of block `block` is requested.
    pub fn asked_bitmap(&mut self, block: usize) {
        self.bitmaps.push(block);
    }

    /// POSTCOPY_RESUME is sent: its acknowledgement and requests are allowed.
    pub fn resumed(&mut self) {
        (self.awaits_resume, self.may_request) = (true, true);
    }

    /// EOF is sent: SHUT 0 is allowed from now on.
    pub fn ended(&mut self) {
        self.has_ended = true;
    }

    /// Checks a message, and returns its meaning.
    ///
    /// # Errors
    /// [`MigrationError::PeerMisbehaved`] for a message that was not requested or names an unknown block;
    /// [`MigrationError::DestinationFailed`] if the destination has failed.
    pub fn take(&mut self, message: ReturnMessage) -> Result<Answer, MigrationError> {
        match message {
            ReturnMessage::Pong(value) => self.pong(value),
            ReturnMessage::RequestPages { block, start, length } => {
                if !self.may_request {
                    return Err(BadAnswer::EarlyRequest.into());
                }
                let block = match block {
                    Some(name) => self.block(name)?,
                    None => self.last.ok_or(BadAnswer::RequestWithoutBlock)?,
                };
                self.last = Some(block);
                Ok(Answer::Request { block, start, length: u64::from(length) })
            }
            ReturnMessage::ReceivedBitmap { block } => {
                let block = self.block(block)?;
                let at = self.bitmaps.iter().position(|asked| *asked == block);
                self.bitmaps.remove(at.ok_or(BadAnswer::UnaskedBitmap)?);
                Ok(Answer::Bitmap { block })
            }
            ReturnMessage::ResumeAck(_) if std::mem::take(&mut self.awaits_resume) => Ok(Answer::Resumed),
            ReturnMessage::ResumeAck(_) => Err(BadAnswer::UnaskedResume.into()),
            ReturnMessage::Shut(0) if self.has_ended => Ok(Answer::Done),
            ReturnMessage::Shut(0) => Err(BadAnswer::EarlyEnd.into()),
            ReturnMessage::Shut(code) => Err(MigrationError::DestinationFailed(code)),
            // The destination of some machine types sends this without a request (specs/stream.md §5.3). The
            // serving side does not wait for it.
            ReturnMessage::SwitchoverAck => Ok(Answer::Nothing),
            ReturnMessage::Grant { .. } => Err(BadGrant::NoStreams.into()),
            ReturnMessage::ConfigurationRefused(_) => Err(BadAnswer::Unasked.into()),
        }
    }

    fn pong(&mut self, value: u32) -> Result<Answer, MigrationError> {
        let at = self.pings.iter().position(|ping| *ping == value);
        let at = at.ok_or_else(|| BadAnswer::Pong { ping: value, is_known: PINGS.contains(&value) })?;
        self.pings.remove(at);
        Ok(Answer::Pong(value))
    }

    fn block(&self, name: String) -> Result<usize, BadAnswer> {
        let found = self.names.iter().position(|known| *known == name);
        found.ok_or(BadAnswer::UnknownBlock { block: name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Misbehaviour;

    fn answers() -> Answers {
        Answers::new(vec!["m0".into(), "rom".into()])
    }

    fn refusal(answers: &mut Answers, message: ReturnMessage) -> BadAnswer {
        match answers.take(message) {
            Err(MigrationError::PeerMisbehaved(Misbehaviour::Answer(why))) => why,
            taken => panic!("{:?}", taken.err()),
        }
    }

    fn request(block: Option<&str>) -> ReturnMessage {
        ReturnMessage::RequestPages { block: block.map(Into::into), start: 4096, length: 4096 }
    }

    #[test]
    fn request_without_a_name_is_about_the_block_before() {
        let mut answers = answers();
        answers.packaged();

        let first = answers.take(request(Some("rom"))).unwrap();
        let second = answers.take(request(None)).unwrap();

        assert_eq!(first, Answer::Request { block: 1, start: 4096, length: 4096 });
        assert_eq!(second, first);
    }

    #[test]
    fn what_comes_before_its_time_or_of_no_block_is_refused_by_name() {
        let bitmap = |block: &str| ReturnMessage::ReceivedBitmap { block: block.into() };
        for (message, why) in [
            (request(Some("m0")), BadAnswer::EarlyRequest),
            (bitmap("m0"), BadAnswer::UnaskedBitmap),
            (bitmap("m1"), BadAnswer::UnknownBlock { block: "m1".into() }),
            (ReturnMessage::ResumeAck(1), BadAnswer::UnaskedResume),
            (ReturnMessage::Shut(0), BadAnswer::EarlyEnd),
            (ReturnMessage::Pong(3), BadAnswer::Pong { ping: 3, is_known: true }),
            (ReturnMessage::Pong(99), BadAnswer::Pong { ping: 99, is_known: false }),
        ] {
            assert_eq!(refusal(&mut answers(), message), why);
        }
        let mut listening = answers();
        listening.packaged();
        for (message, why) in [
            (request(None), BadAnswer::RequestWithoutBlock),
            (request(Some("vga")), BadAnswer::UnknownBlock { block: "vga".into() }),
        ] {
            assert_eq!(refusal(&mut listening, message), why);
        }
    }

    #[test]
    fn each_answer_comes_once() {
        let mut answers = answers();
        answers.pinged(HELLO_PING);
        answers.packaged();
        answers.asked_bitmap(1);
        answers.resumed();
        answers.ended();
        let bitmap = || ReturnMessage::ReceivedBitmap { block: "rom".into() };

        assert_eq!(answers.take(ReturnMessage::Pong(LOADED_PING)).unwrap(), Answer::Pong(LOADED_PING));
        assert_eq!(answers.take(ReturnMessage::Pong(HELLO_PING)).unwrap(), Answer::Pong(HELLO_PING));
        assert_eq!(answers.take(bitmap()).unwrap(), Answer::Bitmap { block: 1 });
        assert_eq!(answers.take(ReturnMessage::ResumeAck(1)).unwrap(), Answer::Resumed);
        assert_eq!(answers.take(ReturnMessage::Shut(0)).unwrap(), Answer::Done);

        for again in [ReturnMessage::Pong(LOADED_PING), bitmap(), ReturnMessage::ResumeAck(1)] {
            assert!(answers.take(again).is_err());
        }
        let failed = answers.take(ReturnMessage::Shut(1)).unwrap_err();
        assert!(matches!(failed, MigrationError::DestinationFailed(1)));
    }
}
