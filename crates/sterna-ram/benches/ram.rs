//! Measures the speed of scanning pages, and of merging and walking bitmaps.

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use sterna_ram::zero::Method;
use sterna_ram::{Backing, PAGE_SIZE, PageBitmap, RamBlock};

fn main() {
    divan::main();
}

/// Makes a block of populated zero pages, so that a scan reads every byte.
fn block(bytes: u64) -> RamBlock {
    let block = RamBlock::new("bench", bytes, Backing::Memfd).expect("memory for the bench");
    block.populate(0, block.pages()).expect("memory for the bench");
    block
}

#[divan::bench(args = Method::available())]
fn zero_scan_cached_page(bencher: Bencher, method: &Method) {
    let block = block(PAGE_SIZE as u64);
    let page = block.page(0).expect("the page");
    bencher.counter(BytesCount::new(PAGE_SIZE)).bench_local(|| method.is_zero(black_box(page)));
}

#[divan::bench(args = Method::available(), sample_count = 10, sample_size = 1)]
fn zero_scan_512_mib(bencher: Bencher, method: &Method) {
    let block = block(512 << 20);
    let all = block.slice(0, 512 << 20).expect("the block");
    let mut bits = vec![0; 2048];
    bencher.counter(BytesCount::new(512usize << 20)).bench_local(|| method.zero_page_bits(all, &mut bits));
}

/// Merges the log of 16 GiB, all set, into a clear bitmap at an offset.
#[divan::bench(args = [0, 13])]
fn merge_16_gib(bencher: Bencher, first: u64) {
    const PAGES: u64 = 4 << 20;
    let words = vec![u64::MAX; (PAGES / 64) as usize];
    bencher
        .counter(ItemsCount::new(PAGES))
        .with_inputs(|| PageBitmap::new(PAGES + 64))
        .bench_local_refs(|map| map.merge_words(first, &words));
}

/// Takes every page of 16 GiB in runs of at most 128, and in the worst case every second page.
#[divan::bench(args = [u64::MAX, 0x5555_5555_5555_5555])]
fn take_runs_16_gib(bencher: Bencher, pattern: u64) {
    const PAGES: u64 = 4 << 20;
    let words = vec![pattern; (PAGES / 64) as usize];
    bencher
        .counter(ItemsCount::new(PAGES))
        .with_inputs(|| {
            let mut map = PageBitmap::new(PAGES);
            map.merge_words(0, &words);
            map
        })
        .bench_local_refs(|map| {
            let mut from = 0;
            while let Some(run) = map.take_run(from, PAGES, 128) {
                from = run.end();
            }
        });
}
