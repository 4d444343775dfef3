//! LZO1X, the algorithm of lzop's blocks.
//!
//! A block is a list of instructions. An instruction copies literals, or copies bytes that are already decompressed.
//! It ends with up to three literals, whose number it stores in two bits. The meaning of an instruction below 16
//! depends on the number of literals before it.

/// Logarithm (base 2) of the entries in the encoder's hash table.
const HASH_BITS: u32 = 14;
/// The largest distance in bytes that an instruction can copy from.
const FAR: usize = 0xbfff;
/// The largest distance of the two-byte instruction.
const NEAR: usize = 0x800;
/// The largest distance of the middle instruction. The far instruction counts distances from here.
const MIDDLE: usize = 0x4000;

/// Appends the block `from`, compressed, to `out`.
pub(super) fn compress(from: &[u8], out: &mut Vec<u8>) {
    let mut table = vec![0u32; 1 << HASH_BITS];
    // Start of the literals that are not written yet; offset of the byte that stores their number if they are few.
    let (mut literals, mut count_at) = (0, None);
    let mut at = 1;
    while at + 4 <= from.len() {
        let word = word(from, at);
        let slot = &mut table[(word.wrapping_mul(0x9e37_79b1) >> (32 - HASH_BITS)) as usize];
        let candidate = *slot as usize;
        *slot = at as u32;
        let distance = at - candidate;
        if distance == 0 || distance > FAR || self::word(from, candidate) != word {
            // In data that does not compress, the step grows with the distance from the last match.
            at += 1 + ((at - literals) >> 5);
            continue;
        }
        let tail = from[at + 4..].iter().zip(&from[candidate + 4..]);
        let length = 4 + tail.take_while(|(new, old)| new == old).count();
        put_literals(&from[literals..at], literals == 0, count_at, out);
        count_at = Some(put_copy(distance, length, out));
        at += length;
        literals = at;
    }
    put_literals(&from[literals..], literals == 0, count_at, out);
    out.extend_from_slice(&[0x11, 0, 0]);
}

fn word(from: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([from[at], from[at + 1], from[at + 2], from[at + 3]])
}

fn put_literals(literals: &[u8], is_first: bool, count_at: Option<usize>, out: &mut Vec<u8>) {
    match (literals.len(), count_at) {
        (0, _) => {}
        (count @ 1..=238, _) if is_first => out.push(17 + count as u8),
        (count @ 1..=3, Some(at)) => out[at] |= count as u8,
        (count @ ..=18, _) => out.push(count as u8 - 3),
        (count, _) => {
            out.push(0);
            put_length(count - 18, out);
        }
    }
    out.extend_from_slice(literals);
}

/// Appends the copy instruction. Returns the offset of the byte that stores the number of literals after it.
fn put_copy(distance: usize, length: usize, out: &mut Vec<u8>) -> usize {
    if length <= 8 && distance <= NEAR {
        let distance = distance - 1;
        out.push(((length - 1) << 5 | (distance & 7) << 2) as u8);
        out.push((distance >> 3) as u8);
        return out.len() - 2;
    }
    let (code, distance, short) = match distance {
        ..=MIDDLE => (0x20, distance - 1, 33),
        _ => (0x10 | ((distance - MIDDLE) >> 11 & 8), distance - MIDDLE, 9),
    };
    if length <= short {
        out.push((code | (length - 2)) as u8);
    } else {
        out.push(code as u8);
        put_length(length - short, out);
    }
    out.extend_from_slice(&((distance & 0x3fff) << 2).to_le_bytes()[..2]);
    out.len() - 2
}

/// Writes a length that exceeds its instruction: a zero for each 255, then the remainder.
fn put_length(mut length: usize, out: &mut Vec<u8>) {
    while length > 255 {
        out.push(0);
        length -= 255;
    }
    out.push(length as u8);
}

/// Decompresses the block `from`, which must give exactly `length` bytes.
pub(super) fn decompress(from: &[u8], length: usize) -> Result<Vec<u8>, &'static str> {
    let mut block = Block { from, at: 0, out: Vec::with_capacity(length), length };
    // Number of literals before the instruction: 0 to 3 from its predecessor, or 4 after a run of literals.
    let mut state = 0;
    if let Some(&first @ 18..) = from.first() {
        block.at = 1;
        let count = usize::from(first) - 17;
        block.literals(count)?;
        state = count.min(4);
    }
    loop {
        let code = usize::from(block.byte()?);
        let (distance, length, literals) = match (code, state) {
            (64.., _) => {
                let distance = (usize::from(block.byte()?) << 3) + (code >> 2 & 7) + 1;
                (distance, (code >> 5) + 1, code & 3)
            }
            (32.., _) => {
                let length = block.length(code & 31, 31)? + 2;
                let word = block.word()?;
                ((word >> 2) + 1, length, word & 3)
            }
            (16.., _) => {
                let length = block.length(code & 7, 7)? + 2;
                let word = block.word()?;
                let distance = MIDDLE + ((code & 8) << 11) + (word >> 2);
                if distance == MIDDLE {
                    break;
                }
                (distance, length, word & 3)
            }
            (_, 0) => {
                let count = block.length(code, 15)? + 3;
                block.literals(count)?;
                state = 4;
                continue;
            }
            (_, 4) => ((usize::from(block.byte()?) << 2) + (code >> 2) + NEAR + 1, 3, code & 3),
            _ => ((usize::from(block.byte()?) << 2) + (code >> 2) + 1, 2, code & 3),
        };
        block.copy(distance, length)?;
        block.literals(literals)?;
        state = literals;
    }
    if block.at != from.len() {
        return Err("bytes after the end of a block");
    }
    if block.out.len() != length {
        return Err("a block is shorter than announced");
    }
    Ok(block.out)
}

struct Block<'a> {
    from: &'a [u8],
    at: usize,
    out: Vec<u8>,
    length: usize,
}

const ENDS: &str = "a block ends too early";
const LONGER: &str = "a block is longer than announced";

impl Block<'_> {
    fn byte(&mut self) -> Result<u8, &'static str> {
        let byte = self.from.get(self.at).ok_or(ENDS)?;
        self.at += 1;
        Ok(*byte)
    }

    fn word(&mut self) -> Result<usize, &'static str> {
        Ok(usize::from(u16::from_le_bytes([self.byte()?, self.byte()?])))
    }

    /// Reads a length. If the instruction's bits `held` are 0, it is `more` plus the bytes that follow.
    fn length(&mut self, held: usize, more: usize) -> Result<usize, &'static str> {
        if held != 0 {
            return Ok(held);
        }
        let mut length = more;
        loop {
            match self.byte()? {
                0 => length += 255,
                last => return Ok(length + usize::from(last)),
            }
        }
    }

    fn literals(&mut self, count: usize) -> Result<(), &'static str> {
        let literals = self.from.get(self.at..self.at + count).ok_or(ENDS)?;
        self.room(count)?;
        self.out.extend_from_slice(literals);
        self.at += count;
        Ok(())
    }

    fn copy(&mut self, distance: usize, length: usize) -> Result<(), &'static str> {
        let start = self.out.len().checked_sub(distance).ok_or("a copy from before the block")?;
        self.room(length)?;
        if distance >= length {
            self.out.extend_from_within(start..start + length);
            return Ok(());
        }
        // The ranges overlap: bytes that this loop writes are also its input.
        for at in start..start + length {
            let byte = self.out[at];
            self.out.push(byte);
        }
        Ok(())
    }

    fn room(&self, count: usize) -> Result<(), &'static str> {
        if self.out.len() + count > self.length { Err(LONGER) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(seed: u64, length: usize, alphabet: u8) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(seed);
        (0..length).map(|_| if alphabet == 0 { random.u8(..) } else { random.u8(..alphabet) }).collect()
    }

    #[test]
    fn decompress_what_compress_made_gives_it_back() {
        for length in (0..300).chain([4096, 70_000, 262_144]) {
            for alphabet in [1, 2, 5, 0] {
                let mut from = noise(length as u64 + 7, length, alphabet);
                // Adds matches at a large distance.
                if length > 60_000 {
                    from.copy_within(..9000, 50_000);
                    from.copy_within(100..9000, 20_000);
                }
                let mut compressed = Vec::new();
                compress(&from, &mut compressed);

                assert!(decompress(&compressed, length).unwrap() == from, "{length} bytes of {alphabet}");
            }
        }
    }

    #[test]
    fn decompress_damaged_block_is_an_error_and_never_a_panic() {
        let from = noise(3, 3000, 3);
        let mut compressed = Vec::new();
        compress(&from, &mut compressed);
        for length in 0..compressed.len() {
            assert!(decompress(&compressed[..length], 3000).is_err(), "{length}");
        }
        for at in 0..compressed.len() {
            for bit in 0..8 {
                let mut damaged = compressed.clone();
                damaged[at] ^= 1 << bit;
                if let Ok(out) = decompress(&damaged, 3000) {
                    assert_eq!(out.len(), 3000);
                }
            }
        }
        assert_eq!(decompress(&compressed, 2999), Err(LONGER));
        assert_eq!(decompress(&compressed, 3001), Err("a block is shorter than announced"));
    }
}
