//! The VMM migrates, cancels, saves and restores. Its guest memory keeps its mappings, and the code of
//! `docs/embedding.md` is part of the VMM.
//!
//! A lost page makes these tests fail. The guest checks every word that it counts and halts at a wrong one.
//! The ticker checks the number that it wrote last. Both end the process.
#![allow(clippy::print_stderr, reason = "a skipped test says so")]

mod guide;
mod maps;
mod vmm;

use std::path::Path;

use maps::Maps;
use sterna_testing::is_listening;
use vmm::{Vmm, kvm_or_skip};

#[test]
fn live_migration_takes_the_guest_along_and_leaves_guest_memory_where_it_is() {
    if !kvm_or_skip("live_migration_takes_the_guest_along_and_leaves_guest_memory_where_it_is") {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let (path, disk) = (home.path(), home.path().join("disk"));
    let disk = ["--disk", disk.to_str().unwrap()];
    let address = format!("unix:{}", path.join("migration").display());
    let mut source = Vmm::start(path, "source", &disk);
    let mut destination = Vmm::start(path, "destination", &[&disk[..], &["--incoming", &address]].concat());
    source.wait_for_numbers(5);
    let before = [Maps::of(&source), Maps::of(&destination)];

    source.ask("migrate", &address);
    source.wait_for("outgoing completed");
    destination.wait_for("incoming completed");
    destination.wait_for_numbers(5);

    let after = [Maps::of(&source), Maps::of(&destination)];
    for (before, after) in before.iter().zip(&after) {
        before.assert_guest_memory_is_untouched_in(after);
    }
    assert!(source.status().contains("guest stopped"), "{}", source.status());
    source.quit();
    destination.quit();
    assert_unbroken(&[source.numbers(), destination.numbers()]);
}

#[test]
fn cancelled_migration_leaves_the_guest_running_and_a_second_one_succeeds() {
    if !kvm_or_skip("cancelled_migration_leaves_the_guest_running_and_a_second_one_succeeds") {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let path = home.path();
    let address = |name: &str| format!("unix:{}", path.join(name).display());
    let mut source = Vmm::start(path, "source", &[]);
    let mut first = Vmm::start(path, "first", &["--incoming", &address("1")]);
    let mut second = Vmm::start(path, "second", &["--incoming", &address("2")]);
    source.wait_for_numbers(3);
    let before = Maps::of(&source);

    // The bandwidth is so low that the migration does not converge: the guest's dirty pages take a second
    // to send.
    source.ask("limit", "65536");
    source.ask("migrate", &address("1"));
    source.wait_for("outgoing active");
    assert!(source.refusal("quit", "").contains("cancel it first"));
    assert!(source.refusal("migrate", &address("2")).contains("already being migrated"));
    source.ask("cancel", "");
    source.wait_for("outgoing cancelled");
    first.wait_for("incoming failed");

    source.wait_for_numbers(source.numbers().len() + 3);
    assert!(source.status().contains("guest running"), "{}", source.status());
    assert!(first.numbers().is_empty() && first.status().contains("guest stopped"));
    before.assert_guest_memory_is_untouched_in(&Maps::of(&source));

    source.ask("limit", "0");
    source.ask("migrate", &address("2"));
    source.wait_for("outgoing completed");
    second.wait_for_numbers(3);
    for vmm in [&mut source, &mut first, &mut second] {
        vmm.quit();
    }
    assert_unbroken(&[source.numbers(), second.numbers()]);
}

#[test]
fn saved_guest_runs_on_where_it_was_saved_and_where_it_is_restored() {
    if !kvm_or_skip("saved_guest_runs_on_where_it_was_saved_and_where_it_is_restored") {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let (path, file) = (home.path(), home.path().join("image"));
    let file = file.to_str().unwrap();
    let mut saved = Vmm::start(path, "saved", &[]);
    saved.wait_for_numbers(3);
    let before = Maps::of(&saved);
    assert!(saved.refusal("resume", "").contains("not stopped by a completed save"));

    saved.ask("save", file);
    saved.wait_for("outgoing completed");
    assert!(saved.status().contains("guest stopped"), "{}", saved.status());
    let until_save = saved.all_numbers_of_stopped_guest();
    saved.ask("resume", "");
    saved.wait_for_numbers(until_save.len() + 3);

    let mut restored = Vmm::start(path, "restored", &["--restore", file]);
    restored.wait_for_numbers(3);
    before.assert_guest_memory_is_untouched_in(&Maps::of(&saved));
    Maps::of(&restored).assert_guest_memory_is_the_only_large_one();
    saved.quit();
    restored.quit();
    assert_unbroken(&[saved.numbers()]);
    assert_unbroken(&[until_save, restored.numbers()]);
}

#[test]
fn memory_that_was_plugged_between_migrations_moves_with_the_guest() {
    if !kvm_or_skip("memory_that_was_plugged_between_migrations_moves_with_the_guest") {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let path = home.path();
    let address = |name: &str| format!("unix:{}", path.join(name).display());
    let plugged = 67u64 << 20; // Plugged memory begins at 66 MiB.
    let mut source = Vmm::start(path, "source", &[]);
    let mut small = Vmm::start(path, "small", &["--incoming", &address("1")]);
    let mut large = Vmm::start(path, "large", &["--incoming", "defer"]);
    source.wait_for_numbers(3);
    assert!(source.refusal("read", &plugged.to_string()).contains("error"), "not plugged yet");

    source.ask("limit", "65536");
    source.ask("migrate", &address("1"));
    source.wait_for("outgoing active");
    assert!(source.refusal("plug", "2").contains("cannot be plugged"));
    source.ask("cancel", "");
    source.wait_for("outgoing cancelled");
    small.wait_for("incoming failed");

    source.ask("plug", "2");
    source.ask("write", &format!("{plugged} 4711"));
    large.ask("plug", "2");
    large.ask("listen", &address("2"));
    source.ask("limit", "0");
    source.ask("migrate", &address("2"));
    source.wait_for("outgoing completed");
    large.wait_for("incoming completed");
    large.wait_for_numbers(3);

    assert_eq!(large.answer("read", &plugged.to_string()), "ok 4711");
    // Writes after the first migration are tracked too.
    large.ask("write", &format!("{} 4712", plugged + 4096));
    let mut last = Vmm::start(path, "last", &["--incoming", "defer"]);
    last.ask("plug", "2");
    last.ask("listen", &address("3"));
    large.ask("migrate", &address("3"));
    large.wait_for("outgoing completed");
    last.wait_for("incoming completed");
    assert_eq!(last.answer("read", &(plugged + 4096).to_string()), "ok 4712");
    for vmm in [&mut source, &mut small, &mut large, &mut last] {
        vmm.quit();
    }
    assert_unbroken(&[source.numbers(), large.numbers(), last.numbers()]);
}

#[test]
fn machine_that_is_made_from_the_source_has_its_plugged_memory() {
    if !kvm_or_skip("machine_that_is_made_from_the_source_has_its_plugged_memory") {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let path = home.path();
    let address = format!("unix:{}", path.join("migration").display());
    let plugged = 35u64 << 20; // Plugged memory begins at 34 MiB.
    let mut source = Vmm::start(path, "source", &["--memory", "32"]);
    source.wait_for_numbers(3);
    source.ask("plug", "2");
    source.ask("write", &format!("{plugged} 4711"));
    // Its control socket exists when its machine does.
    let destination = {
        let (path, address) = (path.to_owned(), address.clone());
        std::thread::spawn(move || Vmm::start(&path, "destination", &["--from-source", &address]))
    };
    // The file exists before the socket listens.
    let socket = path.join("migration");
    while !is_listening(&socket) {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    source.ask("migrate", &address);
    let mut destination = destination.join().unwrap();
    source.wait_for("outgoing completed");
    destination.wait_for("incoming completed");
    destination.wait_for_numbers(3);
    assert_eq!(destination.answer("read", &plugged.to_string()), "ok 4711");
    source.quit();
    destination.quit();
    assert_unbroken(&[source.numbers(), destination.numbers()]);
}

#[test]
fn disk_that_another_vmm_has_fails_the_migration_and_the_guest_runs_on() {
    if !kvm_or_skip("disk_that_another_vmm_has_fails_the_migration_and_the_guest_runs_on") {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let (path, disk, other) = (home.path(), home.path().join("disk"), home.path().join("other"));
    let address = format!("unix:{}", path.join("migration").display());
    let taken = std::fs::File::create(&other).unwrap();
    taken.try_lock().unwrap();
    let mut source = Vmm::start(path, "source", &["--disk", disk.to_str().unwrap()]);
    let arguments = ["--disk", other.to_str().unwrap(), "--incoming", &address];
    let mut destination = Vmm::start(path, "destination", &arguments);
    source.wait_for_numbers(3);

    source.ask("migrate", &address);
    source.wait_for("outgoing failed");
    destination.wait_for("incoming failed");

    source.wait_for_numbers(source.numbers().len() + 3);
    assert!(std::fs::File::open(&disk).unwrap().try_lock().is_err(), "the source has its disk again");
    source.quit();
    destination.quit();
    assert_unbroken(&[source.numbers()]);
    assert!(destination.numbers().is_empty());
}

#[test]
fn modules_that_name_the_engine_have_at_most_400_lines() {
    let lines = sources().into_iter().filter(|(_, text)| text.contains("sterna::"));
    let lines: Vec<_> = lines.map(|(name, text)| (name, text.lines().count())).collect();

    assert!(lines.len() >= 2 && lines.iter().map(|(_, count)| count).sum::<usize>() <= 400, "{lines:?}");
}

#[test]
fn every_block_of_rust_in_the_guide_stands_in_the_example() {
    let mut sources = sources();
    let ownership = include_str!("../../../../crates/sterna/tests/engine/ownership.rs");
    let first = include_str!("../../../../crates/sterna/examples/first-vmm.rs");
    let others = include_str!("../../../../crates/sterna/tests/engine/guide.rs");
    sources.extend([
        ("guide.rs".to_owned(), others.to_owned()),
        ("ownership.rs".to_owned(), ownership.to_owned()),
        ("first-vmm.rs".to_owned(), first.to_owned()),
    ]);
    let mut blocks = guide::rust_blocks(include_str!("../../../../docs/embedding.md"));
    blocks.extend(guide::rust_blocks(include_str!("../../../../docs/embedding-states.md")));

    assert!(blocks.len() >= 5, "{} blocks", blocks.len());
    for block in &blocks {
        assert!(
            guide::stands_in(block, &sources),
            "not in examples/vm-memory-vmm/src, ownership.rs, guide.rs or first-vmm.rs:\n{block}"
        );
    }
}

/// The texts of the modules, by path.
fn sources() -> Vec<(String, String)> {
    let files = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap();
    let paths = files.map(|file| file.unwrap().path());
    paths.map(|path| (path.display().to_string(), std::fs::read_to_string(path).unwrap())).collect()
}

/// Checks that the guest printed 1, 2, 3 and so on, across the processes.
#[track_caller]
fn assert_unbroken(parts: &[Vec<u32>]) {
    let printed = parts.concat();
    assert!(printed.iter().copied().eq(1..=printed.len() as u32), "{parts:?}");
}
