//! Copying pages to their places in the staging memory, by several threads.

use sterna_ram::{GuestRam, PAGE_SIZE, RamBlock};

use super::pieces::{Piece, bytes};
use crate::error::MigrationError;

/// From so many pages on a second thread is worth its start.
const PAGES_PER_THREAD: u64 = 1024;
/// More threads do not copy faster: memory is the limit.
const MOST_THREADS: u64 = 4;

/// Copies all pieces, which lie side by side in the arena or leave gaps there.
pub(super) fn copy_all((ram, arena): (&GuestRam, &RamBlock), pieces: &[Piece]) -> Result<(), MigrationError> {
    let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return Ok(()) };
    let (start, end) = (first.at, last.at + last.run.count);
    let pages = end - start;
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let threads = (pages / PAGES_PER_THREAD).clamp(1, MOST_THREADS.min(processors));
    let share = pages.div_ceil(threads).max(1);
    let part = |thread: u64| {
        let first = start + thread * share;
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

/// Copies what belongs to these pages of the arena.
fn copy_part(
    (ram, arena): (&GuestRam, &RamBlock),
    pieces: &[Piece],
    places: std::ops::Range<u64>,
) -> Result<(), MigrationError> {
    let first = pieces.partition_point(|piece| piece.at + piece.run.count <= places.start);
    for piece in pieces[first..].iter().take_while(|piece| piece.at < places.end) {
        let skip = places.start.saturating_sub(piece.at);
        let count = piece.run.count.min(places.end - piece.at) - skip;
        let length = count as usize * PAGE_SIZE;
        let from = ram.block(piece.run.block).slice(bytes(piece.run.first + skip), length)?;
        from.copy_to_window(&arena.slice(bytes(piece.at + skip), length)?)?;
    }
    Ok(())
}
