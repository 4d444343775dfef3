//! Makes inputs from other inputs. Input `number` of a seed does not depend on the inputs before it.

/// Limit of changes to one input.
const MOST_CHANGES: u64 = 6;
/// Limit of bytes that one change adds or moves.
const MOST_BYTES: u64 = 64;
/// Boundary values at which decoders take another branch.
const EDGES: [u64; 16] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x100,
    0xfff,
    0x1000,
    0x7fff,
    0xffff,
    0x10_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    u64::MAX,
];

/// Random numbers that depend only on a seed and an input number.
pub struct Draw(fastrand::Rng);

impl Draw {
    /// The random numbers for input `number` of `seed`.
    pub fn new(seed: u64, number: u64) -> Self {
        let other = fastrand::Rng::with_seed(seed).u64(..) ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self(fastrand::Rng::with_seed(other))
    }

    fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// A number below `bound`; 0 if `bound` is 0.
    fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.0.u64(..bound) }
    }

    fn index(&mut self, length: usize) -> usize {
        self.below(length as u64) as usize
    }
}

/// Makes input `number` of `seed`: one of `corpus`, changed in one to six places, at most `longest` bytes.
pub fn input(corpus: &[Vec<u8>], seed: u64, number: u64, longest: usize) -> Vec<u8> {
    let mut draw = Draw::new(seed, number);
    let mut bytes = pick(corpus, &mut draw).to_vec();
    for _ in 0..=draw.below(MOST_CHANGES) {
        change(&mut bytes, corpus, &mut draw);
    }
    bytes.truncate(longest);
    bytes
}

fn pick<'a>(corpus: &'a [Vec<u8>], draw: &mut Draw) -> &'a [u8] {
    corpus.get(draw.index(corpus.len())).map_or(&[], Vec::as_slice)
}

fn change(bytes: &mut Vec<u8>, corpus: &[Vec<u8>], draw: &mut Draw) {
    let at = draw.index(bytes.len() + 1);
    let count = 1 + draw.index(MOST_BYTES as usize);
    match draw.below(11) {
        0 | 1 => overwrite(bytes, at, |byte, draw| byte ^ 1 << draw.below(8), draw),
        2 => overwrite(bytes, at, |_, draw| draw.next() as u8, draw),
        3 | 4 => number(bytes, at, draw),
        5 => {
            let noise: Vec<u8> = (0..count).map(|_| draw.next() as u8).collect();
            bytes.splice(at..at, noise);
        }
        6 => drop(bytes.drain(at..(at + count).min(bytes.len()))),
        7 => {
            let copy = bytes[at..(at + count).min(bytes.len())].to_vec();
            let to = draw.index(bytes.len() + 1);
            bytes.splice(to..to, copy);
        }
        8 => bytes.truncate(at),
        // Appends the end of another input, from the same position or from any.
        9 => {
            let other = pick(corpus, draw);
            let from = if draw.below(2) == 0 { at.min(other.len()) } else { draw.index(other.len() + 1) };
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from..]);
        }
        // Overwrites bytes with a piece of another input.
        _ => {
            let other = pick(corpus, draw);
            let from = draw.index(other.len() + 1);
            let count = count.min(other.len() - from).min(bytes.len() - at);
            bytes[at..at + count].copy_from_slice(&other[from..from + count]);
        }
    }
}

fn overwrite(bytes: &mut [u8], at: usize, with: impl Fn(u8, &mut Draw) -> u8, draw: &mut Draw) {
    if let Some(byte) = bytes.get_mut(at) {
        *byte = with(*byte, draw);
    }
}

/// Writes a boundary value at `at`, or adds a small number to the number there: 1, 2, 4 or 8 bytes, either
/// endianness.
fn number(bytes: &mut [u8], at: usize, draw: &mut Draw) {
    let width = 1 << draw.below(4);
    let Some(place) = bytes.get_mut(at..at + width) else { return };
    let is_big = draw.below(2) == 0;
    if is_big {
        place.reverse();
    }
    let mut word = [0; 8];
    word[..width].copy_from_slice(place);
    let changed = match draw.below(2) {
        0 => EDGES[draw.index(EDGES.len())],
        _ => u64::from_le_bytes(word).wrapping_add(draw.below(33)).wrapping_sub(16),
    };
    place.copy_from_slice(&changed.to_le_bytes()[..width]);
    if is_big {
        place.reverse();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_of_a_number_is_the_same_in_any_order_and_another_than_its_neighbours() {
        let corpus = vec![b"a header and a body".to_vec(), vec![7; 300], Vec::new()];
        let forward: Vec<_> = (0..500).map(|n| input(&corpus, 3, n, 256)).collect();
        let backward: Vec<_> = (0..500).rev().map(|n| input(&corpus, 3, n, 256)).collect();

        assert!(forward.iter().eq(backward.iter().rev()));
        assert!(forward.iter().all(|bytes| bytes.len() <= 256));
        let other = (0..500).filter(|n| input(&corpus, 4, *n, 256) != forward[*n as usize]).count();
        let neighbours = forward.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert!(other > 400 && neighbours > 400, "{other} {neighbours}");
    }

    #[test]
    fn input_of_no_corpus_is_made_of_nothing() {
        assert!((0..200).any(|n| !input(&[], 1, n, 64).is_empty()));
    }
}
