//! Copying pages to their places in the staging memory, by several threads.

use sterna_ram::{GuestRam, PAGE_SIZE, RamBlock};

use super::pieces::{Piece, bytes, count};
use crate::error::MigrationError;

/// From so many pages on a second thread is worth its start.
const PAGES_PER_THREAD: u64 = 1024;
/// More threads do not copy faster: memory is the limit.
const MOST_THREADS: u64 = 4;

/// Copies all pieces.
pub(super) fn copy_all((ram, arena): (&GuestRam, &RamBlock), pieces: &[Piece]) -> Result<(), MigrationError> {
    let pages = count(pieces);
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let threads = (pages / PAGES_PER_THREAD).clamp(1, MOST_THREADS.min(processors));
    let share = pages.div_ceil(threads).max(1);
    let part = |thread: u64| {
        let first = thread * share;
        copy_part((ram, arena), pieces, first..first + share)
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || part(thread))).collect();
        let mut done = part(0);
        for other in others {
            let other = other.join().unwrap_or_else(|_| {
                Err(MigrationError::Internal("a thread that copies a checkpoint panicked".to_owned()))
            });
            done = done.and(other);
        }
        done
    })
}

/// Copies these of their pages, counted from the first piece's first.
fn copy_part(
    (ram, arena): (&GuestRam, &RamBlock),
    pieces: &[Piece],
    pages: std::ops::Range<u64>,
) -> Result<(), MigrationError> {
    let mut before = 0;
    for piece in pieces {
        let (begin, end) = (before, before + piece.run.count);
        before = end;
        if end <= pages.start {
            continue;
        }
        if begin >= pages.end {
            break;
        }
        let skip = pages.start.saturating_sub(begin);
        let count = piece.run.count.min(pages.end - begin) - skip;
        let length = count as usize * PAGE_SIZE;
        let from = ram.block(piece.run.block).slice(bytes(piece.run.first + skip), length)?;
        from.copy_to_window(&arena.slice(bytes(piece.at + skip), length)?)?;
    }
    Ok(())
}
