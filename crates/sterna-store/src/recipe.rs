//! Recipes: how a file is put together from the image's blocks (`specs/image.md §6`).
//!
//! A VMM's file has pages and other bytes. The pages are in the blocks of RAM, and the other bytes in the block of bytes. A
//! recipe lists the pieces in the order of the file, so that the file can be read, at any offset, byte for byte.

use crate::layout::PAGE_BYTES;
use crate::layout::bytes::{Fields, Rule, number, put_number};

/// Flags of a record's word in QEMU's stream (`specs/mapped-ram.md §2`).
const RECORD_ZERO: u64 = 0x02;
const RECORD_PAGE: u64 = 0x08;
const RECORD_CONTINUE: u64 = 0x20;
/// Bytes of a record of a page, and of a zero page, in a run.
const PAGE_RECORD: u64 = 8 + PAGE_BYTES as u64;
const ZERO_RECORD: u64 = 9;

/// One piece of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// Zeros.
    Hole {
        /// Length in bytes.
        length: u64,
    },
    /// Bytes of a block.
    Copy {
        /// Number of the block.
        block: u32,
        /// Offset in the block.
        offset: u64,
        /// Length in bytes.
        length: u64,
    },
    /// Records of QEMU's stream, each a word with the flags PAGE and CONTINUE, and the page.
    PageRecords {
        /// Number of the block.
        block: u32,
        /// First page.
        first: u64,
        /// Number of pages, in ascending order.
        count: u64,
    },
    /// Records of QEMU's stream, each a word with the flags ZERO and CONTINUE, and a byte 0.
    ZeroRecords {
        /// First page.
        first: u64,
        /// Number of pages, in ascending order.
        count: u64,
    },
}

impl Piece {
    /// Length in the file; none if it does not fit 64 bits.
    pub fn length(&self) -> Option<u64> {
        match *self {
            Self::Hole { length } | Self::Copy { length, .. } => Some(length),
            Self::PageRecords { count, .. } => count.checked_mul(PAGE_RECORD),
            Self::ZeroRecords { count, .. } => count.checked_mul(ZERO_RECORD),
        }
    }

    /// This piece and `next` as one piece; none if `next` does not continue it.
    pub fn joined(self, next: Piece) -> Option<Piece> {
        merge(self, next)
    }
}

/// The pieces of a file, in the file's order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recipe {
    pieces: Vec<(u64, Piece)>,
    length: u64,
}

impl Recipe {
    /// Appends a piece; merges it with the one before if both are one piece. Empty pieces are left out.
    pub fn push(&mut self, piece: Piece) {
        let length = piece.length().unwrap_or(0);
        if length == 0 {
            return;
        }
        let merged = self.pieces.last().and_then(|(_, last)| merge(*last, piece));
        match (self.pieces.last_mut(), merged) {
            (Some((_, last)), Some(merged)) => *last = merged,
            _ => self.pieces.push((self.length, piece)),
        }
        self.length = self.length.saturating_add(length);
    }

    /// Length of the file in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The pieces with their offsets in the file.
    pub fn pieces(&self) -> &[(u64, Piece)] {
        &self.pieces
    }

    /// Number of the first piece that contains a byte at or after `offset`.
    pub(crate) fn at(&self, offset: u64) -> usize {
        self.pieces.partition_point(|(start, _)| *start <= offset).saturating_sub(1)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let (mut copied, mut recorded) = (0, 0);
        for (_, piece) in &self.pieces {
            match *piece {
                Piece::Hole { length } => put(&mut out, 0, &[length]),
                Piece::Copy { block, offset, length } => {
                    put(&mut out, 1, &[block.into(), zigzag(offset, copied), length]);
                    copied = offset.wrapping_add(length);
                }
                Piece::PageRecords { block, first, count } => {
                    put(&mut out, 2, &[block.into(), zigzag(first, recorded), count]);
                    recorded = first.wrapping_add(count);
                }
                Piece::ZeroRecords { first, count } => {
                    put(&mut out, 3, &[zigzag(first, recorded), count]);
                    recorded = first.wrapping_add(count);
                }
            }
        }
        out
    }

    /// Decodes a recipe for blocks of these lengths in bytes. Every piece must be inside of its block.
    pub(crate) fn decode(bytes: &[u8], blocks: &[u64]) -> Result<Self, Rule> {
        let mut fields = Fields::new(bytes, "a recipe");
        let (mut recipe, mut copied, mut recorded) = (Self::default(), 0, 0);
        while !fields.is_empty() {
            let piece = match fields.u8()? {
                0 => Piece::Hole { length: number(&mut fields)? },
                1 => {
                    let block = block(&mut fields)?;
                    let (offset, length) = (unzigzag(number(&mut fields)?, copied), number(&mut fields)?);
                    copied = offset.wrapping_add(length);
                    Piece::Copy { block, offset, length }
                }
                2 => {
                    let block = block(&mut fields)?;
                    let (first, count) = (unzigzag(number(&mut fields)?, recorded), number(&mut fields)?);
                    recorded = first.wrapping_add(count);
                    Piece::PageRecords { block, first, count }
                }
                3 => {
                    let (first, count) = (unzigzag(number(&mut fields)?, recorded), number(&mut fields)?);
                    recorded = first.wrapping_add(count);
                    Piece::ZeroRecords { first, count }
                }
                other => return Err((format!("piece {other} is not known: it needs a later Sterna"), "§6")),
            };
            check(&piece, blocks)?;
            let length = piece.length().and_then(|length| recipe.length.checked_add(length));
            if length.is_none_or(|length| length > i64::MAX as u64) {
                return Err(("the file of a recipe is longer than 2^63 bytes".to_owned(), "§6"));
            }
            recipe.push(piece);
        }
        Ok(recipe)
    }
}

/// Reads bytes of a block from an offset.
type ReadBytes<'a, E> = dyn FnMut(u32, u64, &mut [u8]) -> Result<(), E> + 'a;

/// Fills `to` with the bytes of a run of records from byte `skip` of the run. `read` reads pages' bytes.
pub(crate) fn records<E>(
    piece: Piece,
    skip: u64,
    to: &mut [u8],
    read: &mut ReadBytes<'_, E>,
) -> Result<(), E> {
    let (block, first, record, flag) = match piece {
        Piece::PageRecords { block, first, .. } => (Some(block), first, PAGE_RECORD, RECORD_PAGE),
        Piece::ZeroRecords { first, .. } => (None, first, ZERO_RECORD, RECORD_ZERO),
        Piece::Hole { .. } | Piece::Copy { .. } => return Ok(()),
    };
    let (mut at, mut done) = (skip, 0);
    while done < to.len() {
        let (page, inside) = (first + at / record, at % record);
        let count = match inside {
            0..8 => {
                let word = ((page * PAGE_BYTES as u64) | flag | RECORD_CONTINUE).to_be_bytes();
                let part = &word[inside as usize..];
                let count = part.len().min(to.len() - done);
                to[done..done + count].copy_from_slice(&part[..count]);
                count
            }
            _ => {
                let count = ((record - inside) as usize).min(to.len() - done);
                let part = &mut to[done..done + count];
                match block {
                    Some(block) => read(block, page * PAGE_BYTES as u64 + inside - 8, part)?,
                    None => part.fill(0),
                }
                count
            }
        };
        at += count as u64;
        done += count;
    }
    Ok(())
}

fn merge(last: Piece, next: Piece) -> Option<Piece> {
    match (last, next) {
        (Piece::Hole { length: a }, Piece::Hole { length: b }) => {
            Some(Piece::Hole { length: a.checked_add(b)? })
        }
        (Piece::Copy { block, offset, length: a }, Piece::Copy { block: other, offset: next, length: b })
            if block == other && offset + a == next =>
        {
            Some(Piece::Copy { block, offset, length: a + b })
        }
        (
            Piece::PageRecords { block, first, count: a },
            Piece::PageRecords { block: other, first: next, count: b },
        ) if block == other && first + a == next => Some(Piece::PageRecords { block, first, count: a + b }),
        (Piece::ZeroRecords { first, count: a }, Piece::ZeroRecords { first: next, count: b })
            if first + a == next =>
        {
            Some(Piece::ZeroRecords { first, count: a + b })
        }
        _ => None,
    }
}

fn check(piece: &Piece, blocks: &[u64]) -> Result<(), Rule> {
    let of = |block: u32| blocks.get(block as usize).copied();
    let is_inside = match *piece {
        Piece::Hole { .. } => true,
        Piece::Copy { block, offset, length } => {
            of(block).zip(offset.checked_add(length)).is_some_and(|(most, end)| end <= most)
        }
        Piece::PageRecords { block, first, count } => {
            let end = first.checked_add(count).and_then(|end| end.checked_mul(PAGE_BYTES as u64));
            of(block).zip(end).is_some_and(|(most, end)| end <= most)
        }
        Piece::ZeroRecords { first, count } => {
            first.checked_add(count).is_some_and(|end| end <= u64::MAX / PAGE_BYTES as u64)
        }
    };
    if is_inside { Ok(()) } else { Err((format!("{piece:?} is outside of its block"), "§6")) }
}

fn block(fields: &mut Fields<'_>) -> Result<u32, Rule> {
    u32::try_from(number(fields)?).map_err(|_| ("a piece names a block that does not exist".to_owned(), "§6"))
}

fn put(out: &mut Vec<u8>, kind: u8, numbers: &[u64]) {
    out.push(kind);
    numbers.iter().for_each(|number| put_number(out, *number));
}

/// The difference to the expected number, with its sign in the lowest bit, so that short ways in both directions are short.
fn zigzag(number: u64, expected: u64) -> u64 {
    let difference = number.wrapping_sub(expected) as i64;
    (difference << 1 ^ difference >> 63) as u64
}

fn unzigzag(coded: u64, expected: u64) -> u64 {
    let difference = (coded >> 1) as i64 ^ -((coded & 1) as i64);
    expected.wrapping_add(difference as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipe_decodes_to_what_was_encoded_and_neighbours_are_one_piece() {
        let mut recipe = Recipe::default();
        recipe.push(Piece::Copy { block: 1, offset: 0, length: 10 });
        recipe.push(Piece::Copy { block: 1, offset: 10, length: 5 });
        recipe.push(Piece::Hole { length: 0 });
        recipe.push(Piece::PageRecords { block: 0, first: 3, count: 1 });
        recipe.push(Piece::PageRecords { block: 0, first: 4, count: 2 });
        recipe.push(Piece::ZeroRecords { first: 0, count: 3 });
        recipe.push(Piece::Hole { length: 7 });
        recipe.push(Piece::Copy { block: 0, offset: 4096, length: 4096 });

        assert_eq!(recipe.pieces().len(), 5);
        assert_eq!(recipe.length(), 15 + 3 * 4104 + 27 + 7 + 4096);
        let blocks = [6 * 4096, 15];
        assert_eq!(Recipe::decode(&recipe.encode(), &blocks), Ok(recipe.clone()));
        assert!(Recipe::decode(&recipe.encode(), &[5 * 4096, 15]).is_err(), "pages outside of the block");
        assert!(Recipe::decode(&recipe.encode(), &[6 * 4096, 14]).is_err(), "bytes outside of the block");
        assert!(Recipe::decode(&[9], &blocks).is_err(), "an unknown piece");
    }

    #[test]
    fn bytes_of_records_are_the_same_in_pieces_of_every_length() {
        let piece = Piece::PageRecords { block: 0, first: 1, count: 2 };
        let mut read = |_: u32, offset: u64, to: &mut [u8]| -> Result<(), ()> {
            (offset..).zip(to).for_each(|(at, byte)| *byte = (at / 10) as u8);
            Ok(())
        };
        let mut whole = vec![0; piece.length().unwrap() as usize];
        records(piece, 0, &mut whole, &mut read).unwrap();

        assert_eq!(whole[..8], 0x1028u64.to_be_bytes());
        assert_eq!(whole[4104..4112], 0x2028u64.to_be_bytes());
        for step in [1, 3, 8, 4000] {
            let mut again = vec![0; whole.len()];
            for at in (0..again.len()).step_by(step) {
                let end = (at + step).min(whole.len());
                records(piece, at as u64, &mut again[at..end], &mut read).unwrap();
            }
            assert!(again == whole, "{step}");
        }
    }
}
