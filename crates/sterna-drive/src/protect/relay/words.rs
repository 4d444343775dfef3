//! Finds the end of each checkpoint in QEMU's main channel after CHECKPOINT_READY (`specs/colo.md` §2 to §5).
//! Decodes no more than needed for this. Pure. The standby checks the content.

use sterna_wire::PAGE_SIZE;
use sterna_wire::colo::{Message, MessageKind};
use sterna_wire::ram::flags;

use super::heads::Heads;

/// Byte `03` and the section's id.
const SECTION_BYTES: usize = 5;
/// Footer: byte `7e` and the section's id, then byte `00`.
const FOOTER_BYTES: usize = 6;

/// A decoded element of the main channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    /// CHECKPOINT_REQUEST. QEMU sends nothing else before it reads REPLY.
    Request,
    /// A flush: each multifd channel brings a SYNC.
    Flush,
    /// The last byte of a checkpoint. QEMU sends nothing else before it reads LOADED.
    Whole,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    Request,
    Send,
    Section,
    Record,
    /// The length of a block's name. After the name follow that many bytes of page content.
    Name(u64),
    Footer,
    Size,
    /// The end marker after the devices' state.
    End,
}

/// Decoder of the main channel.
#[derive(Debug)]
pub(super) struct Words {
    due: Due,
    heads: Heads,
}

impl Words {
    /// Creates a decoder. The next byte is the first one after CHECKPOINT_READY.
    pub(super) fn new() -> Self {
        Self { due: Due::Request, heads: Heads::default() }
    }

    /// Decodes more bytes. Returns the words whose last byte is among them.
    ///
    /// # Errors
    /// The unexpected byte. The rest of the channel cannot be decoded.
    pub(super) fn push(&mut self, mut bytes: &[u8]) -> Result<Vec<Word>, String> {
        let mut words = Vec::new();
        while let Some(head) = self.heads.next(&mut bytes, self.due.head_bytes()) {
            let (due, word) = self.step(&head)?;
            self.due = due;
            words.extend(word);
        }
        Ok(words)
    }

    fn step(&mut self, head: &[u8]) -> Result<(Due, Option<Word>), String> {
        let next = match self.due {
            Due::Request => {
                self.message(head, MessageKind::CheckpointRequest)?;
                return Ok((Due::Send, Some(Word::Request)));
            }
            Due::Send => {
                self.message(head, MessageKind::VmstateSend)?;
                Due::Section
            }
            Due::Section if head[0] == 3 => Due::Record,
            Due::Record => {
                return self.record(u64::from_be_bytes([
                    head[0], head[1], head[2], head[3], head[4], head[5], head[6], head[7],
                ]));
            }
            Due::Name(behind) => {
                self.heads.skip(u64::from(head[0]) + behind);
                Due::Record
            }
            Due::Footer if (head[0], head[5]) == (0x7e, 0) => Due::Size,
            Due::Size => {
                let Message::VmstateSize { bytes } = self.message(head, MessageKind::VmstateSize)? else {
                    return Err("VMSTATE_SIZE has no size".to_owned());
                };
                self.heads.skip(bytes);
                Due::End
            }
            Due::End => return Ok((Due::Request, Some(Word::Whole))),
            Due::Section | Due::Footer => {
                return Err(format!("byte {:#04x} arrived instead of {:?}", head[0], self.due));
            }
        };
        Ok((next, None))
    }

    fn record(&mut self, word: u64) -> Result<(Due, Option<Word>), String> {
        let flag = word & flags::MASK;
        let behind = match flag & !flags::CONTINUE {
            flags::PAGE => PAGE_SIZE as u64,
            flags::ZERO => 1,
            _ if word == flags::EOS => return Ok((Due::Footer, None)),
            _ if word == flags::MULTIFD_FLUSH => return Ok((Due::Record, Some(Word::Flush))),
            _ => return Err(format!("record {word:#x} is not allowed in the RAM of a checkpoint")),
        };
        if flag & flags::CONTINUE == 0 {
            return Ok((Due::Name(behind), None));
        }
        self.heads.skip(behind);
        Ok((Due::Record, None))
    }

    fn message(&self, head: &[u8], due: MessageKind) -> Result<Message, String> {
        match Message::decode(head) {
            Ok(Some((message, _))) if message.kind() == due => Ok(message),
            Ok(Some((message, _))) => Err(format!("{} arrived instead of {due}", message.kind())),
            Ok(None) => Err(format!("{due} is incomplete")),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl Due {
    fn head_bytes(self) -> usize {
        match self {
            Self::Request | Self::Send => 4,
            Self::Section => SECTION_BYTES,
            Self::Record => 8,
            Self::Name(_) => 1,
            Self::Footer => FOOTER_BYTES,
            Self::Size => Message::MAX_BYTES,
            Self::End => 0,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A checkpoint after its REQUEST. It contains a page of a named block, a page and a zero page of the same block,
    /// `flushes`, and devices.
    pub(in super::super) fn checkpoint(flushes: usize) -> Vec<u8> {
        let word = |word: u64| word.to_be_bytes().to_vec();
        [
            vec![0, 0, 0, 3, 3, 0, 0, 0, 9],
            word(flags::PAGE | 0x5000),
            vec![6],
            b"pc.ram".to_vec(),
            vec![0x10; PAGE_SIZE],
            word(flags::PAGE | flags::CONTINUE | 0x6000),
            vec![0x7e; PAGE_SIZE],
            word(flags::ZERO | flags::CONTINUE | 0x7000),
            vec![0],
            word(flags::MULTIFD_FLUSH).repeat(flushes),
            word(flags::EOS),
            vec![0x7e, 0, 0, 0, 9, 0],
            vec![0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 5],
            vec![1, 2, 3, 4, 0],
        ]
        .concat()
    }

    pub(in super::super) const REQUEST: [u8; 4] = [0, 0, 0, 1];

    #[test]
    fn ends_of_checkpoints_are_found_however_the_bytes_come() {
        let stream = [&REQUEST[..], &checkpoint(0), &REQUEST, &checkpoint(2), &REQUEST].concat();
        let expected =
            [Word::Request, Word::Whole, Word::Request, Word::Flush, Word::Flush, Word::Whole, Word::Request];
        for size in [1, 2, 7, 4096, stream.len()] {
            let mut words = Words::new();
            let found: Vec<Word> = stream
                .chunks(size)
                .flat_map(|piece| words.push(piece).expect("it is a checkpoint's"))
                .collect();
            assert_eq!(found, expected, "{size}");
        }
    }

    #[test]
    fn checkpoint_is_whole_with_its_last_byte_and_not_before() {
        let (mut words, stream) = (Words::new(), [&REQUEST[..], &checkpoint(1)].concat());
        let (last, all) = stream.split_last().unwrap();
        assert_eq!(words.push(all).unwrap(), [Word::Request, Word::Flush]);
        assert_eq!(words.push(&[*last]).unwrap(), [Word::Whole]);
    }

    #[test]
    fn other_bytes_are_refused_where_they_come() {
        let good = [&REQUEST[..], &checkpoint(1)].concat();
        let at = |index: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[index] = byte;
            Words::new().push(&bytes)
        };
        let footer = good.len() - 5 - 12 - 6;
        for (index, byte) in
            [(3, 2), (7, 4), (8, 1), (20, 0x40), (footer, 1), (footer + 5, 1), (footer + 9, 3)]
        {
            assert!(at(index, byte).is_err(), "{index}");
        }
        assert!(at(good.len() - 1, 9).is_ok(), "devices are the standby's to check");
    }
}
