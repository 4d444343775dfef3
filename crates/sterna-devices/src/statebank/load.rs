//! Loads a saved stream and checks every byte.

use super::content::{self, BLOCK_BYTES};
use super::dma::PAGE_BYTES;
use super::save::Blocks;
use super::stream::{End, HEAD_BYTES, Kind, MOST_COUNT, RecordHead};

/// Errors in a stream. `at` is the byte of the stream.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A record has the wrong number: one was lost, repeated or reordered.
    #[error("byte {at}: record {got} arrived instead of record {expected}")]
    Number {
        /// Byte of the stream.
        at: u64,
        /// Number of the record.
        got: u32,
        /// Number that the record should have.
        expected: u32,
    },
    /// A record has an invalid value.
    #[error("byte {at}: {rule} ({value:#x})")]
    Record {
        /// Byte of the stream.
        at: u64,
        /// The rule that the value breaks.
        rule: &'static str,
        /// The value that breaks the rule.
        value: u64,
    },
    /// A byte of a block is wrong: it is torn, or belongs to another block.
    #[error("byte {at}: byte {offset} of block {block}, generation {generation}, is not its content")]
    Content {
        /// Byte of the stream.
        at: u64,
        /// Number of the block.
        block: u64,
        /// Generation of the block, from its record.
        generation: u64,
        /// Byte within the block.
        offset: usize,
    },
    /// A block is missing.
    #[error("the stream ends without block {block}")]
    Missing {
        /// Number of the missing block.
        block: usize,
    },
    /// The last generation of a block is missing.
    #[error(
        "the stream ends with an older generation of some block: digest {got:#x} instead of {expected:#x}"
    )]
    Digest {
        /// Digest of the received generations.
        got: u64,
        /// Digest of the source's generations.
        expected: u64,
    },
    /// The stream ends before its last record is complete.
    #[error("the stream ends at byte {at}, before its last record does")]
    Short {
        /// Number of received bytes.
        at: u64,
    },
}

/// The result of a complete stream.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) blocks: Blocks,
    pub(super) end: End,
}

/// A stream that is being loaded.
#[derive(Debug)]
pub(super) struct Loader {
    /// Expected length of the state in bytes.
    bytes: u64,
    /// Bytes received so far.
    at: u64,
    /// Number of the next record.
    number: u32,
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
    /// The body that is being received.
    body: Body,
    blocks: Option<Blocks>,
    /// Whether each block was received.
    came: Vec<bool>,
    digest: u64,
    end: Option<End>,
    failure: Option<LoadError>,
}

#[derive(Debug, Clone, Copy)]
enum Body {
    None,
    Block { block: u64, generation: u64, base: u64, offset: usize, len: usize },
    End { bytes: [u8; End::BYTES], have: usize },
}

impl Loader {
    /// A loader for a state of `bytes` bytes.
    pub(super) fn new(bytes: u64) -> Self {
        Self {
            bytes,
            at: 0,
            number: 0,
            head: [0; HEAD_BYTES],
            head_bytes: 0,
            body: Body::None,
            blocks: None,
            came: Vec::new(),
            digest: 0,
            end: None,
            failure: None,
        }
    }

    /// Takes the next bytes. After an error, all further bytes are refused.
    pub(super) fn push(&mut self, mut bytes: &[u8]) -> Result<(), LoadError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        while !bytes.is_empty() {
            let taken = self.take(bytes).inspect_err(|error| self.failure = Some(error.clone()))?;
            bytes = &bytes[taken..];
            self.at += taken as u64;
        }
        Ok(())
    }

    /// Ends the stream and returns the loaded state, if it is complete.
    pub(super) fn finish(self) -> Result<Loaded, LoadError> {
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        let (Some(blocks), Some(end)) = (self.blocks, self.end) else {
            return Err(LoadError::Short { at: self.at });
        };
        if let Some(block) = self.came.iter().position(|came| !came) {
            return Err(LoadError::Missing { block });
        }
        match blocks.digest() {
            digest if digest == self.digest => Ok(Loaded { blocks, end }),
            got => Err(LoadError::Digest { got, expected: self.digest }),
        }
    }

    /// Takes a part of a head or of a body.
    fn take(&mut self, bytes: &[u8]) -> Result<usize, LoadError> {
        match &mut self.body {
            Body::None => {
                if self.end.is_some() {
                    let value = bytes.len() as u64;
                    return Err(LoadError::Record { at: self.at, rule: "bytes follow the end", value });
                }
                let some = (HEAD_BYTES - self.head_bytes).min(bytes.len());
                self.head[self.head_bytes..self.head_bytes + some].copy_from_slice(&bytes[..some]);
                self.head_bytes += some;
                if self.head_bytes == HEAD_BYTES {
                    self.head_bytes = 0;
                    self.begin(RecordHead::decode(&self.head))?;
                }
                Ok(some)
            }
            Body::Block { block, generation, base, offset, len } => {
                let some = (*len - *offset).min(bytes.len());
                if let Some(index) = content::first_difference(*base, *offset, &bytes[..some]) {
                    return Err(LoadError::Content {
                        at: self.at + index as u64,
                        block: *block,
                        generation: *generation,
                        offset: *offset + index,
                    });
                }
                *offset += some;
                if offset == len {
                    self.body = Body::None;
                }
                Ok(some)
            }
            Body::End { bytes: body, have } => {
                let some = (End::BYTES - *have).min(bytes.len());
                body[*have..*have + some].copy_from_slice(&bytes[..some]);
                *have += some;
                if *have == End::BYTES {
                    let rule = "the end's check word does not match";
                    let end = End::decode(body);
                    let end = end.ok_or(LoadError::Record { at: self.at, rule, value: 0 })?;
                    self.end = Some(believable(end, self.at)?);
                    self.body = Body::None;
                }
                Ok(some)
            }
        }
    }

    fn begin(&mut self, head: RecordHead) -> Result<(), LoadError> {
        let at = self.at;
        let bad = |rule, value| Err(LoadError::Record { at, rule, value });
        if head.number != self.number {
            return Err(LoadError::Number { at, got: head.number, expected: self.number });
        }
        self.number = self.number.wrapping_add(1);
        let [first, second, third] = head.fields;
        if head.kind == Kind::Head as u32 {
            if self.blocks.is_some() {
                return bad("the state is described a second time", head.number.into());
            }
            if second != self.bytes {
                return bad("this device has a state of another size", second);
            }
            if third != BLOCK_BYTES {
                return bad("its blocks have another size", third);
            }
            let blocks = Blocks::new(first, self.bytes);
            self.came = vec![false; blocks.generations.len()];
            self.blocks = Some(blocks);
            return Ok(());
        }
        let Some(blocks) = &mut self.blocks else {
            return bad("the state was not described", head.kind.into());
        };
        if head.kind == Kind::Block as u32 {
            let index = usize::try_from(first).ok().filter(|index| *index < self.came.len());
            let Some(index) = index else { return bad("there is no such block", first) };
            let (generation, len) = (second, blocks.len_of(index));
            if third != len as u64 {
                return bad("a block has another length", third);
            }
            if generation > MOST_COUNT {
                return bad("no block has changed this often", generation);
            }
            if self.came[index] && generation < blocks.generations[index] {
                return bad("a block has an older generation than before", generation);
            }
            self.came[index] = true;
            blocks.generations[index] = generation;
            let base = content::base(blocks.seed, first, generation);
            self.body = Body::Block { block: first, generation, base, offset: 0, len };
        } else if head.kind == Kind::End as u32 {
            if second != blocks.generations.len() as u64 {
                return bad("the source has another number of blocks", second);
            }
            if third != End::BYTES as u64 {
                return bad("the end has another length", third);
            }
            self.digest = first;
            self.body = Body::End { bytes: [0; End::BYTES], have: 0 };
        } else {
            return bad("there is no such record", head.kind.into());
        }
        Ok(())
    }
}

/// Checks that the end record has values that a device can have. The device continues with them.
fn believable(end: End, at: u64) -> Result<End, LoadError> {
    let bad = |rule, value| Err(LoadError::Record { at, rule, value });
    if end.dma_writes > MOST_COUNT {
        return bad("no device has written this often", end.dma_writes);
    }
    let (first, bytes) = end.dma_window;
    for part in [first, bytes] {
        if !part.is_multiple_of(PAGE_BYTES) {
            return bad("the window of its writes is not made of pages", part);
        }
    }
    if first.checked_add(bytes).is_none() {
        return bad("the window of its writes ends after the last address", first);
    }
    Ok(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statebank::stream;

    /// Loads a device of one byte from a stream with `generation` and `end`.
    fn load(generation: u64, end: End) -> Result<(), LoadError> {
        let seed = 3;
        let head = |kind: Kind, number, fields| RecordHead { kind: kind as u32, number, fields }.encode();
        let mut content = [0];
        content::fill(content::base(seed, 0, generation), 0, &mut content);
        let digest = stream::digest(seed, &[generation]);
        let bytes = [
            &head(Kind::Head, 0, [seed, 1, BLOCK_BYTES])[..],
            &head(Kind::Block, 1, [0, generation, 1]),
            &content,
            &head(Kind::End, 2, [digest, 1, End::BYTES as u64]),
            &end.encode(),
        ];
        let mut loader = Loader::new(1);
        loader.push(&bytes.concat())?;
        loader.finish().map(drop)
    }

    #[test]
    fn load_of_counts_and_windows_that_cannot_be_is_refused() {
        let most = End { dma_writes: MOST_COUNT, dma_window: (4096, 1 << 40), ..End::default() };
        assert_eq!(load(MOST_COUNT, most), Ok(()));

        let bad = [
            (MOST_COUNT + 1, End::default(), MOST_COUNT + 1),
            (u64::MAX, End::default(), u64::MAX),
            (0, End { dma_writes: MOST_COUNT + 1, ..End::default() }, MOST_COUNT + 1),
            (0, End { dma_writes: u64::MAX, ..End::default() }, u64::MAX),
            (0, End { dma_window: (4097, 4096), ..End::default() }, 4097),
            (0, End { dma_window: (4096, 5000), ..End::default() }, 5000),
            (0, End { dma_window: (u64::MAX - 4095, 4096), ..End::default() }, u64::MAX - 4095),
        ];

        for (generation, end, told) in bad {
            let error = load(generation, end);
            let Err(LoadError::Record { value, .. }) = error else { panic!("{end:?}: {error:?}") };
            assert_eq!(value, told);
        }
    }
}
