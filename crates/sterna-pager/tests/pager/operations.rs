//! Operations that need all of a guest's memory while its own pager still fills it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_pager::{FillRate, PageSource};
use sterna_ram::{Backing, GuestRam, PAGE_SIZE};

use crate::common::{GatedSource, MIB, OpenAtEnd, SlowSource, World, eventually, until};
use crate::own::{content, ram, serve};

/// Waits until the server has placed all pages. The error: why it cannot.
fn completed(ram: &GuestRam) -> Result<(), String> {
    let Some(completing) = ram.complete() else { return Ok(()) };
    match completing.wait(Duration::from_secs(120)) {
        Ok(is_complete) => assert!(is_complete, "pages are missing"),
        Err(why) => return Err(why.to_string()),
    }
    Ok(())
}

#[test]
fn operation_that_needs_all_memory_gets_it_at_any_rate() {
    for rate in [FillRate::Off, FillRate::BytesPerSecond(1), FillRate::Adaptive, FillRate::Max] {
        let world = World::new(4 * MIB);
        let ram = ram(Backing::Memfd, &[MIB, 3 * MIB]);
        let name = "operation_that_needs_all_memory_gets_it_at_any_rate";
        let Some((pager, events)) = serve(name, world.source(), &ram, rate) else { return };
        if rate == FillRate::Off {
            assert_eq!(ram.missing_bytes(), 4 * MIB);
        }

        completed(&ram).unwrap();

        assert_eq!(ram.missing_bytes(), 0);
        eventually("the word of the completion", || events.completed.load(Ordering::SeqCst) > 0);
        assert!(!ram.is_filling() && events.reasons.lock().is_empty());
        assert!(content(&ram) == world.memory, "{rate:?}");
        drop(pager);
    }
}

#[test]
fn fill_that_was_off_is_off_again_after_the_operation() {
    let world = World::new(4 * MIB);
    let ram = ram(Backing::Memfd, &[MIB, 3 * MIB]);
    let source = GatedSource::new(&world, 64 << 10);
    let name = "fill_that_was_off_is_off_again_after_the_operation";
    let Some((pager, _)) = serve(name, source.clone(), &ram, FillRate::Off) else { return };
    // Dropped before the pager, whose end waits for its readers.
    let _open = OpenAtEnd(source.clone());

    let (one, other) = (ram.complete().unwrap(), ram.complete().unwrap());
    source.let_through(2);
    source.until("the third read waits", |reads| reads == 3);
    drop(one);
    source.let_through(1);
    source.until("another operation still needs the memory", |reads| reads == 4);
    drop(other);
    // The read that has begun ends, and no other follows: the next one is of the page that is touched.
    source.let_through(3);
    let mut page = [0; PAGE_SIZE];
    ram.block(0).read(MIB - PAGE_SIZE as u64, &mut page).unwrap();
    assert!(page[..] == world.memory[4 * MIB as usize - PAGE_SIZE..]);
    assert_eq!(source.reads(), 5);
    assert!(ram.is_filling());

    source.let_through(usize::MAX >> 1);
    completed(&ram).unwrap();
    assert!(content(&ram) == world.memory);
    drop(pager);
}

#[test]
fn unreadable_frame_fails_the_operation_and_not_the_guest() {
    let world = World::new(4 * MIB);
    let ram = ram(Backing::Memfd, &[MIB, 3 * MIB]);
    let source = SlowSource::new(&world, 64 << 10, Duration::ZERO);
    source.is_broken.store(true, Ordering::Relaxed);
    let name = "unreadable_frame_fails_the_operation_and_not_the_guest";
    let Some((pager, events)) = serve(name, source.clone(), &ram, FillRate::Off) else { return };

    for _ in 0..2 {
        let why = completed(&ram).unwrap_err();
        assert!(why.contains("page at byte") && why.contains("slow ends before"), "{why}");
    }
    assert!(events.reasons.lock().is_empty() && ram.is_filling());

    source.is_broken.store(false, Ordering::Relaxed);
    completed(&ram).unwrap();
    assert!(content(&ram) == world.memory);
    drop(pager);
}

#[test]
fn operation_ends_with_the_pager_or_with_a_guest_that_is_given_up() {
    let world = World::new(4 * MIB);
    let name = "operation_ends_with_the_pager_or_with_a_guest_that_is_given_up";
    let begin = |ram: &GuestRam, source: Arc<dyn PageSource>| serve(name, source, ram, FillRate::Off);

    let first = ram(Backing::Memfd, &[MIB, 3 * MIB]);
    let Some((pager, _)) = begin(&first, world.source()) else { return };
    drop(pager);
    let completing = first.complete().unwrap();
    let why = completing.wait(Duration::from_secs(120)).unwrap_err().to_string();
    assert!(why.contains("pager was ended"), "{why}");

    let second = ram(Backing::Memfd, &[MIB, 3 * MIB]);
    let source = SlowSource::new(&world, 64 << 10, Duration::ZERO);
    source.is_broken.store(true, Ordering::Relaxed);
    let Some((pager, events)) = begin(&second, source) else { return };
    let touched = second.clone();
    // The thread waits until the process ends.
    std::thread::spawn(move || touched.block(0).read(0, &mut [0; PAGE_SIZE]));
    until(&pager, "the end", |guests| guests[0].is_over());
    assert!(completed(&second).unwrap_err().contains("slow ends before"));
    assert_eq!(events.reasons.lock().len(), 1);
    std::mem::forget(pager);
}

#[test]
fn memory_is_complete_when_the_last_missing_pages_are_given_back() {
    for fill in [FillRate::Off, FillRate::BytesPerSecond(1)] {
        let world = World::new(4 * MIB);
        let ram = ram(Backing::Memfd, &[MIB, 3 * MIB]);
        let name = "memory_is_complete_when_the_last_missing_pages_are_given_back";
        let Some((pager, events)) = serve(name, world.source(), &ram, fill) else { return };

        for block in ram.blocks() {
            block.discard_pages(0, block.pages()).unwrap();
        }

        until(&pager, "the release", |guests| guests[0].is_over());
        eventually("the word of the completion", || events.completed.load(Ordering::SeqCst) > 0);
        assert!(content(&ram).iter().all(|byte| *byte == 0), "{fill:?}");
        drop(pager);
    }
}
