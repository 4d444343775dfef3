//! Tide on KVM runs, is stopped anywhere, is checked, migrates with RAM and registers, and continues.

use crate::common::{self, report, skipped};
use crate::machine::{self, Machine, Mode, wait_until};
use sterna_guests::checker::Violation;
use sterna_guests::tide::{self, RamRange, TideError, boot, control, pc_ranges};
use sterna_guests::{Fill, Pattern, Tide, TideConfig, Verdict};
use sterna_ram::{GuestRam, PAGE_SIZE};

/// 4 MiB below the hole and 2 MiB above it: 2 + 2 MiB are swept.
fn two_ranges() -> Vec<RamRange> {
    vec![
        RamRange { block: 0, guest_address: 0, len_bytes: 4 << 20 },
        RamRange { block: 1, guest_address: 4 << 30, len_bytes: 2 << 20 },
    ]
}

/// A machine with the loaded tide; `None` if KVM is not available.
fn machine(test: &str, tide: &Tide, ranges: &[RamRange]) -> Option<Machine> {
    match machine::open() {
        Ok(kvm) => {
            let machine = Machine::new(kvm, ranges, tide.config().vcpus, Mode::Long);
            tide.prepare(&machine.ram).unwrap();
            tide.load(&machine.ram).unwrap();
            Some(machine)
        }
        Err(reason) => {
            skipped(test, &reason);
            None
        }
    }
}

fn steps(tide: &Tide, ram: &GuestRam) -> Vec<u64> {
    tide.progress(ram).unwrap().steps
}

/// Waits until every vCPU has taken `more` steps.
fn wait_steps(tide: &Tide, ram: &GuestRam, more: u64) {
    let before = steps(tide, ram);
    wait_until("steps", || steps(tide, ram).iter().zip(&before).all(|(now, then)| *now >= then + more));
}

fn assert_consistent(tide: &Tide, ram: &GuestRam) {
    let verdict = tide.check(ram).unwrap();
    assert!(verdict.is_consistent(), "{verdict}");
}

#[test]
fn tide_stopped_anywhere_is_consistent_and_goes_on() {
    let mut random = sterna_testing::random("tide_stopped_anywhere_is_consistent_and_goes_on");
    for vcpus in [1, 2, 3] {
        for pattern in Pattern::ALL {
            let working_set_pages = (random.u64(..2) == 0).then(|| 1 + random.u64(..400));
            let fill = *random.choice(&[Fill::Zero, Fill::Random(7), Fill::Half(8)]).unwrap();
            let (seed, zero_of_256) = (random.u64(..), [0, 100][random.usize(..2)]);
            let config =
                TideConfig { vcpus, pattern, working_set_pages, fill, seed, ..TideConfig::default() };
            let config = TideConfig { zero_of_256, ..config };
            let ranges = two_ranges();
            let tide = Tide::new(config, &ranges).unwrap();
            let Some(mut machine) = machine("tide_stopped_anywhere", &tide, &ranges) else { return };
            assert_consistent(&tide, &machine.ram);
            for _ in 0..5 {
                let before = tide.progress(&machine.ram).unwrap();
                machine.run();
                let least = random.u64(..100);
                wait_until("beats", || {
                    let now = tide.progress(&machine.ram).unwrap();
                    now.beats.iter().zip(&before.beats).all(|(now, then)| *now > then + least)
                });
                machine.stop();
                assert_consistent(&tide, &machine.ram);
            }
            let progress = tide.progress(&machine.ram).unwrap();
            assert_eq!(progress.total_steps() == 0, pattern == Pattern::Idle);
            assert_eq!((progress.clock_went_back, progress.refused), (0, 0));
            assert!(progress.max_gap_ticks > 0);
        }
    }
}

#[test]
fn tide_moved_to_another_machine_is_consistent_and_goes_on() {
    let ranges = two_ranges();
    let config =
        TideConfig { vcpus: 2, pattern: Pattern::Mixed, fill: Fill::Random(3), ..TideConfig::default() };
    let config = TideConfig { zero_of_256: 100, ..config };
    let tide = Tide::new(config, &ranges).unwrap();
    let Some(mut source) = machine("tide_moved", &tide, &ranges) else { return };
    source.run();
    wait_steps(&tide, &source.ram, 700);
    source.stop();
    let mut target = Machine::new(machine::open().unwrap(), &ranges, 2, Mode::Long);
    for (from, to) in source.ram.blocks().iter().zip(target.ram.blocks()) {
        let mut bytes = vec![0; from.len_bytes() as usize];
        from.read(0, &mut bytes).unwrap();
        to.write(0, &bytes).unwrap();
    }
    target.set_registers(&source.registers());
    assert_consistent(&tide, &target.ram);
    let before = steps(&tide, &target.ram);
    target.run();
    wait_steps(&tide, &target.ram, 700);
    target.stop();
    assert_consistent(&tide, &target.ram);
    assert!(steps(&tide, &target.ram).iter().zip(&before).all(|(now, then)| *now >= then + 700));
    assert_eq!(steps(&tide, &source.ram), before, "the source's guest stood still");
}

#[test]
fn tide_steered_from_outside_stays_consistent() {
    let ranges = two_ranges();
    let tide = Tide::new(TideConfig { vcpus: 2, ..TideConfig::default() }, &ranges).unwrap();
    let Some(mut machine) = machine("tide_steered", &tide, &ranges) else { return };
    let mut random = sterna_testing::random("tide_steered_from_outside_stays_consistent");
    machine.run();
    for _ in 0..12 {
        let pattern = *random.choice(&Pattern::ALL).unwrap();
        let working_set = (random.u64(..3) > 0).then(|| 1 + random.u64(..600));
        tide.set_pattern(&machine.ram, pattern, working_set).unwrap();
        tide.set_pace(&machine.ram, random.u64(..2) * random.u64(..1 << 18)).unwrap();
        tide.reset_max_gap(&machine.ram).unwrap();
        let before = tide.progress(&machine.ram).unwrap();
        wait_until("beats", || tide.progress(&machine.ram).unwrap().beats[0] > before.beats[0] + 60);
        machine.stop();
        assert_consistent(&tide, &machine.ram);
        machine.run();
    }
    // The guest refuses an invalid request and continues.
    for (index, value) in [(control::REQUEST_PATTERN, 9), (control::REQUEST_COUNT, 1000)] {
        for worker in 0..2 {
            let at = tide::LOAD_ADDRESS + (PAGE_SIZE * (1 + worker) + index * 8) as u64;
            machine.ram.blocks()[0].write_u64(at, value).unwrap();
        }
    }
    wait_until("refusals", || tide.progress(&machine.ram).unwrap().refused == 2);
    machine.stop();
    assert_consistent(&tide, &machine.ram);
}

#[test]
fn tide_with_more_requests_than_epochs_refuses_the_rest() {
    let ranges = pc_ranges(4 << 20);
    let tide = Tide::new(TideConfig::default(), &ranges).unwrap();
    let Some(mut machine) = machine("tide_with_more_requests", &tide, &ranges) else { return };
    machine.run();
    wait_until("steps", || tide.progress(&machine.ram).unwrap().steps[0] > 0);
    // The guest acknowledges a request before it reads the values, so the test waits for the counters of
    // the results.
    let answered = || {
        let word = |index: usize| {
            let at = tide::LOAD_ADDRESS + (PAGE_SIZE + index * 8) as u64;
            machine.ram.blocks()[0].read_u64(at).unwrap()
        };
        word(control::EPOCHS) + word(control::REFUSED)
    };
    let before = answered();
    for request in 1..control::EPOCHS_MAX as u64 + 3 {
        tide.set_pattern(&machine.ram, Pattern::Random, Some(request)).unwrap();
        wait_until("the request", || answered() == before + request);
    }
    wait_until("refusals", || tide.progress(&machine.ram).unwrap().refused == 3);
    machine.stop();
    assert_consistent(&tide, &machine.ram);
}

#[test]
fn tide_heartbeat_counts_on_the_serial_port() {
    let ranges = pc_ranges(8 << 20);
    let tide =
        Tide::new(TideConfig { heartbeat_ticks: Some(1 << 24), ..TideConfig::default() }, &ranges).unwrap();
    let Some(mut machine) = machine("tide_heartbeat", &tide, &ranges) else { return };
    // A guest that was stopped within a line continues with the next byte.
    for lines in [2, 4, 6] {
        machine.run();
        wait_until("lines", || machine.serial_text().lines().count() > lines);
        machine.stop();
    }
    let text = machine.serial_text();
    let whole = &text[..=text.rfind('\n').unwrap()];
    let counts: Vec<u64> =
        whole.lines().map(|line| line.strip_prefix("tide ").unwrap().parse().unwrap()).collect();
    assert!(counts.len() >= 6 && counts.windows(2).all(|pair| pair[0] < pair[1]), "{counts:?}");
    assert!(counts[counts.len() - 1] <= tide.progress(&machine.ram).unwrap().steps[0]);
}

#[test]
fn tide_with_any_single_page_damaged_is_corrupt() {
    let ranges = two_ranges();
    let config =
        TideConfig { vcpus: 2, fill: Fill::Random(3), working_set_pages: Some(100), ..TideConfig::default() };
    let config = TideConfig { zero_of_256: 60, ..config };
    let tide = Tide::new(config, &ranges).unwrap();
    let Some(mut machine) = machine("tide_with_any_single_page_damaged", &tide, &ranges) else { return };
    let mut random = sterna_testing::random("tide_with_any_single_page_damaged_is_corrupt");
    let read = |ram: &GuestRam, block: usize, page: u64| {
        let mut bytes = vec![0; PAGE_SIZE];
        ram.blocks()[block].read(page * PAGE_SIZE as u64, &mut bytes).unwrap();
        bytes
    };
    let write = |ram: &GuestRam, block: usize, page: u64, bytes: &[u8]| {
        ram.blocks()[block].write(page * PAGE_SIZE as u64, bytes).unwrap();
    };
    // The code, the control pages, and every page from 2 MiB on.
    let pages: Vec<_> = (256..259).chain(512..1024).map(|p| (0, p)).chain((0..512).map(|p| (1, p))).collect();
    machine.run();
    wait_steps(&tide, &machine.ram, 500);
    machine.stop();
    let old: Vec<_> = pages.iter().map(|&(block, page)| read(&machine.ram, block, page)).collect();
    machine.run();
    wait_steps(&tide, &machine.ram, 500);
    machine.stop();
    assert_consistent(&tide, &machine.ram);
    let mut damaged = 0;
    for (&(block, page), old) in pages.iter().zip(&old) {
        let good = read(&machine.ram, block, page);
        let (other_block, other_page) = *random.choice(&pages).unwrap();
        let at = 8 * (1 + random.u64(..510) as usize);
        let torn = [&good[..at], &old[at..]].concat();
        for bad in [vec![0; PAGE_SIZE], old.clone(), read(&machine.ram, other_block, other_page), torn] {
            // A stale control page is torn only where it differs. Words that the checker does not demand
            // may differ.
            if bad == good || (block == 0 && (257..259).contains(&page) && bad[16..24] == good[16..24]) {
                continue;
            }
            write(&machine.ram, block, page, &bad);
            let verdict = tide.check(&machine.ram).unwrap();
            let in_flight = block_of_next_step(&tide, &machine.ram, block, page);
            assert!(!verdict.is_consistent() || in_flight, "block {block} page {page}: {verdict}");
            damaged += 1;
        }
        write(&machine.ram, block, page, &good);
    }
    assert!(damaged > 1500, "{damaged}");
    assert_consistent(&tide, &machine.ram);
}

/// Whether a vCPU's next step writes this page. An older version may be correct there.
fn block_of_next_step(tide: &Tide, ram: &GuestRam, block: usize, page: u64) -> bool {
    let Ok(cut) = tide.cut(ram).unwrap() else { return false };
    cut.workers.iter().any(|worker| {
        let next = worker.history.page(worker.seed, worker.steps + 1);
        next.and_then(|next| worker.share.locate(next)) == Some((block, page))
    })
}

#[test]
fn tide_with_lost_control_page_is_corrupt_not_an_error() {
    let ranges = pc_ranges(8 << 20);
    let tide = Tide::new(TideConfig::default(), &ranges).unwrap();
    let block = sterna_ram::RamBlock::new("ram", 8 << 20, sterna_ram::Backing::Memfd).unwrap();
    let ram = GuestRam::new(vec![block]).unwrap();
    let Verdict::Corrupt { violations, .. } = tide.check(&ram).unwrap() else {
        panic!("nothing passed as a tide")
    };
    assert!(matches!(violations[0], Violation::Control { worker: 0, .. }));
    tide.load(&ram).unwrap();
    assert_consistent(&tide, &ram);
}

#[test]
fn tide_that_cannot_be_is_refused() {
    let refused =
        |config, ranges: &[RamRange]| matches!(Tide::new(config, ranges), Err(TideError::Config(_)));
    let config = TideConfig::default;
    assert!(refused(TideConfig { vcpus: 0, ..config() }, &two_ranges()));
    assert!(refused(TideConfig { zero_of_256: 193, ..config() }, &two_ranges()));
    assert!(refused(TideConfig { vcpus: 65, ..config() }, &two_ranges()));
    assert!(refused(TideConfig { working_set_pages: Some(0), ..config() }, &two_ranges()));
    assert!(refused(config(), &[]));
    assert!(refused(config(), &pc_ranges(1 << 20)));
    assert!(refused(config(), &pc_ranges(2 << 20)), "no page to sweep");
    assert_eq!(pc_ranges(5 << 30).len(), 2);
}

#[test]
fn boot_sector_stopped_anywhere_is_consistent_and_goes_on() {
    let kvm = match machine::open() {
        Ok(kvm) => kvm,
        Err(reason) => return skipped("boot_sector_stopped_anywhere", &reason),
    };
    let mut random = sterna_testing::random("boot_sector_stopped_anywhere_is_consistent_and_goes_on");
    let mut machine = Machine::new(kvm, &pc_ranges(1 << 20), 1, Mode::Real);
    machine.ram.blocks()[0].discard_all().unwrap();
    machine.ram.blocks()[0].write(boot::LOAD_ADDRESS, &boot::boot_sector()).unwrap();
    let steps = |machine: &Machine| boot::boot_progress(&machine.ram, 0).unwrap().steps[0];
    for _ in 0..15 {
        let least = steps(&machine) + random.u64(..200);
        machine.run();
        wait_until("steps", || steps(&machine) > least);
        machine.stop();
        let verdict = boot::check_boot(&machine.ram, 0).unwrap();
        assert!(verdict.is_consistent(), "{verdict}");
    }
    machine.run();
    wait_until("lines", || machine.serial_text().contains('\n'));
    machine.stop();
    assert!(machine.serial_text().starts_with("tide 4096"), "{}", machine.serial_text());
    let progress = boot::boot_progress(&machine.ram, 0).unwrap();
    assert!(progress.max_gap_ticks > 0 && progress.clock_went_back == 0);
    machine.ram.blocks()[0].write_u64(boot::FIRST_SWEPT + 4088, 0).unwrap();
    assert!(!boot::check_boot(&machine.ram, 0).unwrap().is_consistent());
}

/// Prints the speed of the guest: `cargo test -p sterna-guests --test guests tide:: -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn measure_step_rates() {
    for vcpus in [1, 2] {
        for pattern in [Pattern::Sequential, Pattern::Random, Pattern::HotSet] {
            let ranges = pc_ranges(64 << 20);
            let tide = Tide::new(TideConfig { vcpus, pattern, ..TideConfig::default() }, &ranges).unwrap();
            let Some(mut machine) = machine("measure_step_rates", &tide, &ranges) else { return };
            machine.run();
            let (begin, cpu) = (std::time::Instant::now(), common::cpu_seconds());
            std::thread::sleep(std::time::Duration::from_secs(2));
            machine.stop();
            let progress = tide.progress(&machine.ram).unwrap();
            let steps = progress.total_steps() as f64;
            report(&format!(
                "{vcpus} vCPUs {pattern}: {:.0} steps/s, {:.0} per CPU second, max gap {} ticks",
                steps / begin.elapsed().as_secs_f64(),
                steps / (common::cpu_seconds() - cpu),
                progress.max_gap_ticks
            ));
        }
    }
}
