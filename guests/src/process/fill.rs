//! Writes the fill into RAM before the guest's first step.

use sterna_ram::{GuestRam, PAGE_SIZE, RamError};

use crate::model::{Fill, PageId, WORDS_PER_PAGE, share};

/// Fills all of `ram`, divided as for `workers` workers. Uses one thread per share, up to 4 threads. Zero
/// pages are not touched.
pub(super) fn fill(ram: &GuestRam, fill: Fill, workers: usize) -> Result<(), RamError> {
    if fill == Fill::Zero {
        return Ok(());
    }
    let shares: Vec<_> = share::divide(ram, workers).into_iter().enumerate().collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = shares
            .chunks(shares.len().div_ceil(4).max(1))
            .map(|part| {
                scope.spawn(move || {
                    part.iter().try_for_each(|(worker, share)| fill_share(ram, fill, *worker, share))
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

fn fill_share(ram: &GuestRam, fill: Fill, worker: usize, share: &share::Share) -> Result<(), RamError> {
    let mut words = [0; WORDS_PER_PAGE];
    let mut bytes = [0; PAGE_SIZE];
    for page in 0..share.pages() {
        let id = PageId::new(worker, page);
        let Some((block, block_page)) = share.locate(page).filter(|_| !fill.is_zero(id)) else { continue };
        fill.put(id, &mut words);
        for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(&words) {
            *bytes = word.to_le_bytes();
        }
        ram.blocks()[block].write(block_page * PAGE_SIZE as u64, &bytes)?;
    }
    Ok(())
}
