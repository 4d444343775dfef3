//! Measures merging alone. Blocks of less than 512 GiB are merged on one thread.

use std::hint::black_box;

use sterna_ram::{DirtyBitmaps, GuestRam, PAGE_SIZE, RamBlock};

use super::random::set_bits;
use super::table::{Table, time};
use super::{Args, Failed};

const ALIGNED: &str = "merge, every block aligned";
const MISALIGNED: &str = "merge, every block misaligned";
const COPY: &str = "plain copy of the words";
const COPY_THREADS: &str = "plain copy on two threads";
const PAGES: &str = "page by page, misaligned";

/// Two tables: one with random bits in all words, the maximum of memory traffic; one with as many dirty pages
/// as a busy guest has.
pub fn measure(args: &Args) -> Result<Vec<Table>, Failed> {
    let pages = (args.guest << 30) / PAGE_SIZE as u64 / args.blocks;
    let blocks = (0..args.blocks)
        .map(|index| RamBlock::without_memory(format!("ram{index}"), pages * PAGE_SIZE as u64))
        .collect::<Result<Vec<_>, _>>()?;
    let ram = GuestRam::new(blocks)?;
    let mut random = fastrand::Rng::with_seed(1);
    let words = (pages / 64) as usize;
    let full: Vec<Vec<u64>> =
        (0..args.blocks).map(|_| (0..words).map(|_| random.u64(..)).collect()).collect();
    let dirty: Vec<Vec<u64>> = (0..args.blocks)
        .map(|_| {
            let mut words = vec![0; words];
            set_bits(&mut random, &mut words, pages, args.dirty / args.blocks);
            words
        })
        .collect();
    let shape = format!("{} GiB in {} blocks", args.guest, args.blocks);
    Ok(vec![
        table(format!("merge: {shape}, every word has bits"), args, &ram, &full),
        table(format!("merge: {shape}, {} random pages dirty", args.dirty), args, &ram, &dirty),
    ])
}

fn table(title: String, args: &Args, ram: &GuestRam, words: &[Vec<u64>]) -> Table {
    let mut table = Table::new(title);
    let mut bitmaps = DirtyBitmaps::new(ram);
    let mut plain: Vec<Vec<u64>> = words.iter().map(|words| vec![1; words.len() + 1]).collect();
    for run in 0..=args.runs {
        let mut push = |name, took| {
            // The first repetition is a warm-up and does not count.
            if run > 0 {
                table.push(name, took);
            }
        };
        // The order rotates, because a later variant finds the words in the caches.
        let mut order = [ALIGNED, MISALIGNED, COPY, COPY_THREADS];
        order.rotate_left(run % 4);
        for name in order {
            let took = match name {
                COPY => time(|| copy(words, &mut plain)).0,
                COPY_THREADS => time(|| copy_on_two_threads(words, &mut plain)).0,
                _ => {
                    bitmaps.clear_all();
                    let (took, newly) = time(|| merge(&mut bitmaps, words, name == MISALIGNED));
                    assert_eq!(newly, bitmaps.count());
                    took
                }
            };
            push(name, took);
        }
        bitmaps.clear_all();
        let (took, ()) = time(|| by_pages(&bitmaps, words));
        push(PAGES, took);
    }
    table.tell(MISALIGNED, ALIGNED);
    table.tell(MISALIGNED, COPY);
    table.tell(MISALIGNED, COPY_THREADS);
    table.tell(PAGES, MISALIGNED);
    table
}

/// The first page of a block's words: a different bit of a word for each block, or bit 0.
fn offset(block: usize, crooked: bool) -> u64 {
    if crooked { 1 + block as u64 * 7 % 63 } else { 0 }
}

fn merge(bitmaps: &mut DirtyBitmaps, words: &[Vec<u64>], crooked: bool) -> u64 {
    let merged = words
        .iter()
        .enumerate()
        .map(|(block, words)| bitmaps.block_mut(block).merge_words(offset(block, crooked), words));
    merged.sum()
}

fn copy(words: &[Vec<u64>], to: &mut [Vec<u64>]) {
    for (words, to) in words.iter().zip(to) {
        to[..words.len()].copy_from_slice(black_box(words));
    }
}

fn copy_on_two_threads(words: &[Vec<u64>], to: &mut [Vec<u64>]) {
    let half = words.len() / 2;
    let (first, second) = to.split_at_mut(half);
    std::thread::scope(|scope| {
        scope.spawn(|| copy(&words[half..], second));
        copy(&words[..half], first);
    });
}

/// The simple method: tests each page's bit and sets it in the bitmap.
fn by_pages(bitmaps: &DirtyBitmaps, words: &[Vec<u64>]) {
    for (block, words) in words.iter().enumerate() {
        let (bitmap, first) = (bitmaps.block(block), offset(block, true));
        for page in 0..bitmap.pages() - first {
            if words[(page / 64) as usize] >> (page % 64) & 1 == 1 {
                bitmap.set(first + page);
            }
        }
    }
}
