//! Microbenchmarks of the zero scan, bitmaps, packets and checkpoints. Run with `cargo xtask bench micro`.

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use sterna_ram::write_protection::WriteProtection;
use sterna_ram::zero::Method as ScanMethod;
use sterna_ram::{Backing, GuestRam, PAGE_SIZE, PageBitmap, RamBlock};
use sterna_wire::multifd::{BlockTable, Method, RamPacketEncoder, RamPacketView};
use vm_memory::{GuestAddress, GuestMemoryMmap};

fn main() {
    divan::main();
}

/// 64 MiB. This is more than the second-level cache holds, so that the speed of memory is measured.
const RAM_BYTES: u64 = 64 << 20;
/// Pages of a guest of 16 GiB.
const PAGES: u64 = 4 << 20;

#[divan::bench(args = ScanMethod::available())]
fn zero_scan(bencher: Bencher<'_, '_>, method: ScanMethod) {
    let block = RamBlock::new("ram", RAM_BYTES, Backing::Anonymous).expect("memory");
    block.populate(0, block.pages()).expect("memory");
    bencher.counter(BytesCount::new(RAM_BYTES)).bench_local(|| {
        let zero = (0..block.pages()).filter(|&page| {
            let window = block.slice(page * PAGE_SIZE as u64, PAGE_SIZE).expect("inside");
            method.is_zero(window).expect("sound memory")
        });
        black_box(zero.count())
    });
}

/// Zero pages that arrive for VMM memory. It is populated, reads as zero, and must not be released. Compare
/// with `zero_scan`. `length` is the length of the runs in pages.
#[divan::bench(args = [1, 8, 128, 16384])]
fn zero_pages_compared(bencher: Bencher<'_, '_>, length: u64) {
    let memory: GuestMemoryMmap =
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM_BYTES as usize)]).expect("memory");
    let ram = GuestRam::from_guest_memory(&memory, |_, _| "ram").expect("blocks");
    let block = ram.block(0);
    block.populate(0, block.pages()).expect("memory");
    bencher.counter(BytesCount::new(RAM_BYTES)).bench_local(|| {
        for first in (0..block.pages()).step_by(length as usize) {
            block.zero_present_pages(black_box(first), length).expect("sound memory");
        }
    });
}

/// Pause for 64 MiB of dirty pages of a checkpoint: a plain copy with `threads` threads.
#[divan::bench(args = [1, 2])]
fn checkpoint_copied(bencher: Bencher<'_, '_>, threads: u64) {
    let [from, to] = checkpoint_blocks([Backing::Memfd, Backing::Anonymous]);
    let share = RAM_BYTES / threads;
    bencher.counter(BytesCount::new(RAM_BYTES)).bench_local(|| {
        std::thread::scope(|scope| {
            for part in 0..threads {
                let [from, to] =
                    [&from, &to].map(|block| block.slice(part * share, share as usize).expect("inside"));
                scope.spawn(move || from.copy_to_window(&to).expect("sound memory"));
            }
        });
    });
}

/// The same pages, write-protected instead of copied. Runs of `length` pages alternate with gaps of that
/// length, in a guest of 128 MiB.
#[divan::bench(args = [1, 4, 16, 64, 16384])]
fn checkpoint_protected(bencher: Bencher<'_, '_>, length: u64) {
    let pages = RAM_BYTES / PAGE_SIZE as u64;
    let block = RamBlock::new("ram", 2 * RAM_BYTES, Backing::Memfd).expect("memory");
    block.populate(0, block.pages()).expect("memory");
    let ram = GuestRam::new(vec![block]).expect("a guest");
    // Without the permission for write protection on this host, nothing can be measured.
    let Ok(protection) = WriteProtection::new(&ram) else { return };
    bencher
        .counter(BytesCount::new(RAM_BYTES))
        .with_inputs(|| protection.release(0, 0, 2 * pages).expect("the kernel releases it"))
        .bench_local_values(|()| {
            for first in (0..2 * pages).step_by(2 * length as usize) {
                protection.protect(0, black_box(first), length).expect("the kernel protects it");
            }
        });
}

/// A write to each of 1,024 protected pages. A thread releases the pages one by one.
#[divan::bench]
fn checkpoint_held_writes(bencher: Bencher<'_, '_>) {
    const WRITES: u64 = 1024;
    let [block, _] = checkpoint_blocks([Backing::Memfd, Backing::Anonymous]);
    let ram = GuestRam::new(vec![block]).expect("a guest");
    let Ok(protection) = WriteProtection::new(&ram) else { return };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let answer = |block, page| protection.release(block, page, 1).expect("the kernel releases it");
            protection.serve(answer).expect("it is served");
        });
        bencher
            .counter(ItemsCount::new(WRITES))
            .with_inputs(|| protection.protect(0, 0, WRITES).expect("the kernel protects it"))
            .bench_local_values(|()| {
                (0..WRITES).for_each(|page| ram.block(0).write_u64(page << 12, page).expect("inside"));
            });
        protection.stop_serving();
    });
}

fn checkpoint_blocks(backings: [Backing; 2]) -> [RamBlock; 2] {
    backings.map(|backing| {
        let block = RamBlock::new("ram", RAM_BYTES, backing).expect("memory");
        block.populate(0, block.pages()).expect("memory");
        block
    })
}

#[divan::bench(args = [0, 1, 13, 63])]
fn bitmap_merge(bencher: Bencher<'_, '_>, offset: u64) {
    let mut bitmap = PageBitmap::new(PAGES + 64);
    let words = vec![0xa5a5_a5a5_a5a5_a5a5; (PAGES / 64) as usize];
    bencher.counter(ItemsCount::new(PAGES)).bench_local(|| bitmap.merge_words(offset, black_box(&words)));
}

/// Runs of `length` set pages that alternate with as many clear ones.
#[divan::bench(args = [1, 8, 128])]
fn bitmap_take_runs(bencher: Bencher<'_, '_>, length: u64) {
    bencher
        .counter(ItemsCount::new(PAGES / 2))
        .with_inputs(|| {
            let bitmap = PageBitmap::new(PAGES);
            (0..PAGES).step_by(2 * length as usize).for_each(|first| {
                bitmap.set_range(first, length);
            });
            bitmap
        })
        .bench_local_values(|bitmap| {
            let mut at = 0;
            while let Some(run) = bitmap.take_run(at, PAGES, 128) {
                at = run.first + run.count;
            }
            bitmap
        });
}

#[divan::bench(args = [0, 64, 128])]
fn packet_encode(bencher: Bencher<'_, '_>, zero: u64) {
    let mut packets = RamPacketEncoder::new(Method::None);
    bencher.counter(ItemsCount::new(128_u64)).bench_local(|| {
        packets.begin("ram.low").expect("a name");
        for page in 0..128 {
            let offset = page * PAGE_SIZE as u64;
            let pushed = if page < zero { packets.push_zero(offset) } else { packets.push_normal(offset) };
            assert!(pushed);
        }
        black_box(packets.finish(7, (128 - zero as u32) * PAGE_SIZE as u32)[320])
    });
}

#[divan::bench(args = [0, 64, 128])]
fn packet_decode(bencher: Bencher<'_, '_>, zero: u64) {
    let table = BlockTable::new([("ram.low".to_owned(), 1 << 30)]).expect("a table");
    let mut packets = RamPacketEncoder::new(Method::None);
    packets.begin("ram.low").expect("a name");
    for page in 0..128 {
        let offset = page * PAGE_SIZE as u64;
        assert!(if page < zero { packets.push_zero(offset) } else { packets.push_normal(offset) });
    }
    let packet = *packets.finish(7, (128 - zero as u32) * PAGE_SIZE as u32);
    bencher.counter(ItemsCount::new(128_u64)).bench_local(|| {
        let view = RamPacketView::decode(black_box(&packet), &table, Method::None).expect("sound");
        black_box(view.normal().chain(view.zero()).sum::<u64>())
    });
}
