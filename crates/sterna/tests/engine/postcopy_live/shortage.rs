//! A destination whose host temporarily has no free memory.

use std::fs::File;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Arc;

use sterna::ram::{Backing, GuestRam, PAGE_SIZE, RamBlock};
use sterna::{Arrival, Capabilities, Incoming, Migration, Outcome, Parameters, SourceVm, Status};
use sterna_guests::model::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest};

use super::{capabilities, config, slow};
use crate::common::{self, Log};
use crate::plain::{Plain, byte_of};
use crate::support::{eventually, has_warning, until_status};

const BYTES: u64 = 32 << 20;

/// Guest memory whose size is limited by its file system.
struct LimitedMemory(tempfile::TempDir);

impl LimitedMemory {
    fn mount(size: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let is_mounted = mount(&format!("size={size}"), directory.path());
        if !is_mounted {
            tracing::warn!("skipped: no right to mount");
        }
        is_mounted.then_some(Self(directory))
    }

    fn resize(&self, size: &str) {
        assert!(mount(&format!("remount,size={size}"), self.0.path()));
    }

    /// Uses up all memory, until the returned file is dropped.
    fn exhaust(&self) -> File {
        let mut rest = tempfile::tempfile_in(self.0.path()).unwrap();
        while rest.write_all(&[0; 4096]).is_ok() {}
        rest
    }

    fn ram(&self, blocks: &[(String, u64)]) -> GuestRam {
        let block = |(name, bytes): &(String, u64)| {
            let path = self.0.path().join(name);
            let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
            file.set_len(*bytes).unwrap();
            RamBlock::of_file(name, *bytes, file).unwrap()
        };
        GuestRam::new(blocks.iter().map(block).collect()).unwrap()
    }
}

impl Drop for LimitedMemory {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

fn mount(options: &str, at: &std::path::Path) -> bool {
    let mut command = Command::new("mount");
    command.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// The kernel places some pages of a run, and has no memory for the next one.
#[test]
fn host_that_runs_out_of_memory_within_a_run_of_pages_is_recovered_when_it_has_memory_again() {
    for multifd in [true, false] {
        let Some(on) = capabilities(true) else { return };
        let on = Capabilities { multifd, ..on };
        let params = Parameters { multifd_channels: 2, ..slow() };
        let Some(memory) = LimitedMemory::mount("12m") else { return };
        let config = ProcessConfig { fill: Fill::Random(7), working_set_pages: Some(32), ..config() };
        let target = ProcessGuest::waiting_in(config.clone(), memory.ram(&config.blocks)).unwrap();
        let source = ProcessGuest::boot(config).unwrap();
        source.cont().unwrap();
        let at = "tcp:127.0.0.1:0".parse().unwrap();
        let incoming =
            Incoming::listen(Arc::clone(&target) as _, &at, params.clone(), on, Arc::new(())).unwrap();
        let migration = common::start(&source, &incoming.address(), &params, on, Arc::new(()));
        migration.start_postcopy().unwrap();
        until_status(&migration, Status::PostcopyPaused);
        eventually("the pause", || incoming.status() == Status::PostcopyPaused);
        let why = incoming.statistics().error.unwrap_or_default();
        // A paused migration has no typed error yet: its statistics have the sentence for the operator.
        assert!(why.contains("Cannot allocate memory"), "{why}");

        memory.resize("64m");
        migration.resume(&incoming.address()).unwrap();

        let (outcome, arrival) = (migration.wait(), incoming.wait());
        assert!(matches!(outcome, Outcome::Completed), "multifd: {multifd}: {outcome:?}");
        assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
        common::assert_lives_on(&target);
    }
}

/// A page that arrives as zero needs no memory until the guest touches it.
#[test]
fn thread_that_touches_a_zero_page_waits_until_the_host_has_memory_for_it() {
    const ZEROS: u64 = 2048;
    let Some(on) = capabilities(true) else { return };
    let Some(memory) = LimitedMemory::mount("64m") else { return };
    let source =
        Plain::new(GuestRam::new(vec![RamBlock::new("m0", BYTES, Backing::Memfd).unwrap()]).unwrap());
    (ZEROS..BYTES / PAGE_SIZE as u64).for_each(|page| source.write(page, 1 + (page % 200) as u8));
    let target = Plain::new(memory.ram(&[("m0".to_owned(), BYTES)]));
    let log = Arc::new(Log::default());
    let at = "tcp:127.0.0.1:0".parse().unwrap();
    let incoming = Incoming::listen(Arc::clone(&target) as _, &at, slow(), on, log.clone()).unwrap();
    let params = Parameters { max_postcopy_bandwidth_bytes: 64 << 10, ..slow() };
    let vm: Arc<dyn SourceVm> = Arc::clone(&source) as _;
    let migration = Migration::start(vm, &incoming.address(), params, on, Arc::new(())).unwrap();
    eventually("the zero pages", || migration.statistics().transferred_bytes > 2 << 20);
    migration.start_postcopy().unwrap();
    eventually("the start", || incoming.status() == Status::PostcopyActive);

    let rest = memory.exhaust();
    let ram = target.ram.clone();
    let reader = std::thread::spawn(move || byte_of(&ram, 7));
    eventually("a warning", || has_warning(&log.events(), &["until this succeeds"]));
    assert!(!reader.is_finished(), "it waits");
    drop(rest);

    assert_eq!(reader.join().unwrap(), 0);
    migration.set_live(|params| params.max_postcopy_bandwidth_bytes = 0).unwrap();
    // Pages that arrived meanwhile could not be placed either.
    eventually("the end", || {
        if migration.status() == Status::PostcopyPaused && incoming.status() == Status::PostcopyPaused {
            let _ = migration.resume(&incoming.address());
        }
        migration.status() == Status::Completed
    });
    assert!(matches!(incoming.wait(), Arrival::Completed(_)));
    for page in 0..BYTES / PAGE_SIZE as u64 {
        assert_eq!(byte_of(&target.ram, page), byte_of(&source.ram, page), "page {page}");
    }
}
