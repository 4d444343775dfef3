//! The system calls of lazy restores. Each case restores a guest that reads all of its memory. A case with a fault restores
//! it again afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use sterna::sandbox::{Feature, Syscall};
use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::{BlockShape, Format, MappedOptions, MappedWriter, PageVisitor, Shape};
use sterna_pager::{
    FillRate, GuestError, ImageMemory, OwnEvents, OwnGuest, PageSource, Pager, PagerOptions, RawMemory,
    SourceError, StoredMemory,
};
use sterna_ram::threads::hooked;
use sterna_ram::{Backing, GuestRam, RamBlock};
use sterna_store::StoredImage;

use crate::checked::{self, Scenario};
use crate::child::is_child;
use crate::locked::{DESTINATION_CALLER, DRIVER, Locked, Outside};
use crate::recorder::mark;

const BYTES: u64 = 8 << 20;
/// Limit of every wait.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The image cannot be read any more.
    Source,
    /// The VMM ends the restore.
    Cancel,
}

struct Case {
    name: &'static str,
    /// Form of the image; `None`: a file with the memory alone.
    format: Option<Format>,
    fill: FillRate,
    backing: Backing,
    fault: Fault,
    by_device: bool,
}

impl Case {
    fn new(name: &'static str, fill: FillRate) -> Self {
        let (format, backing, fault, by_device) = (None, Backing::Memfd, Fault::None, false);
        Self { name, format, fill, backing, fault, by_device }
    }
}

impl Scenario for Case {
    fn name(&self) -> &'static str {
        self.name
    }

    fn features(&self) -> Vec<Feature> {
        let mut all = vec![Feature::FilterPerThread, Feature::LazyRestore];
        if self.by_device {
            all.push(Feature::UserfaultfdByDevice);
        }
        all
    }

    fn lacks_userfaultfd(&self) -> Option<u32> {
        self.by_device.then_some(DESTINATION_CALLER)
    }
}

fn cases() -> Vec<Case> {
    let filled = |name| Case::new(name, FillRate::Max);
    let touched = |name| Case::new(name, FillRate::Off);
    vec![
        filled("lazy"),
        Case { backing: Backing::Anonymous, ..filled("lazy-anonymous") },
        touched("lazy-touched"),
        Case { backing: Backing::Anonymous, ..touched("lazy-touched-anonymous") },
        Case::new("lazy-adaptive", FillRate::Adaptive),
        Case::new("lazy-limited", FillRate::BytesPerSecond(16 << 20)),
        Case { by_device: true, ..filled("lazy-by-device") },
        Case { format: Some(Format::MappedRam), ..filled("lazy-mapped") },
        Case { format: Some(Format::LegacyZstd), ..touched("lazy-compressed-stream") },
        Case { format: Some(Format::Sterna), ..filled("lazy-stored") },
        Case { format: Some(Format::Sterna), ..touched("lazy-stored-touched") },
        Case { fault: Fault::Source, ..touched("lazy-source-fails") },
        Case { fault: Fault::Source, ..filled("lazy-source-fails-in-fill") },
        Case { fault: Fault::Cancel, ..touched("lazy-cancel") },
    ]
}

/// The image in each form, which exists before a sandbox closes.
struct World {
    directory: tempfile::TempDir,
    memory: Vec<u8>,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let page = |number: u64| {
            let byte = if number.is_multiple_of(3) { 0 } else { number as u8 | 1 };
            [byte; 4096]
        };
        let memory: Vec<u8> = (0..BYTES / 4096).flat_map(page).collect();
        let this = Self { directory, memory };
        std::fs::write(this.path(None), &this.memory).unwrap();
        let mapped = this.mapped();
        for format in [Format::MappedRam, Format::LegacyZstd, Format::Sterna] {
            let options = ConvertOptions { target: Some(format), ..ConvertOptions::default() };
            convert(Input::File(mapped.clone()), Output::File(this.path(Some(format))), &options).unwrap();
        }
        this
    }

    fn path(&self, format: Option<Format>) -> std::path::PathBuf {
        self.directory.path().join(format!("{format:?}"))
    }

    fn mapped(&self) -> std::path::PathBuf {
        let path = self.directory.path().join("image");
        let mut shape = Shape { has_configuration: true, has_end: true, has_eof: true, ..Shape::empty() };
        shape.configuration.machine_type = "none".into();
        shape.ram.footers = true;
        shape.ram.blocks.push(BlockShape {
            name: "ram".into(),
            length_bytes: BYTES,
            address: None,
            host_page_bytes: None,
            is_skipped: false,
        });
        let writer = MappedWriter::create(&path, &shape, MappedOptions::default()).unwrap();
        let mut lane = writer.lane();
        for (page, content) in self.memory.chunks(4096).enumerate() {
            if content.iter().any(|byte| *byte != 0) {
                lane.pages(0, page as u64, content).unwrap();
            }
        }
        lane.drain().unwrap();
        writer.complete(&shape).unwrap();
        path
    }

    /// Opens the image, as the VMM does before it locks itself in.
    fn source(&self, format: Option<Format>) -> Arc<Breakable> {
        let path = self.path(format);
        let inner: Arc<dyn PageSource> = match format {
            None => Arc::new(RawMemory::open(&path).unwrap()),
            Some(Format::Sterna) => {
                Arc::new(StoredMemory::new(StoredImage::open(&path, None).unwrap()).unwrap())
            }
            Some(_) => Arc::new(ImageMemory::open(&path, Some(self.directory.path())).unwrap()),
        };
        Arc::new(Breakable { inner, is_broken: AtomicBool::new(false) })
    }
}

/// An image that fails on request.
struct Breakable {
    inner: Arc<dyn PageSource>,
    is_broken: AtomicBool,
}

impl Breakable {
    fn check(&self, offset: u64) -> Result<(), SourceError> {
        match self.is_broken.load(Ordering::Acquire) {
            true => Err(SourceError::Short { name: "broken".to_owned(), offset }),
            false => Ok(()),
        }
    }
}

impl PageSource for Breakable {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }
    fn frame_bytes(&self) -> u64 {
        self.inner.frame_bytes()
    }
    fn is_zero(&self, offset: u64, bytes: u64) -> bool {
        self.inner.is_zero(offset, bytes)
    }
    fn read_now(&self, offset: u64, to: &mut [u8]) -> Result<bool, SourceError> {
        self.check(offset)?;
        self.inner.read_now(offset, to)
    }
    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), SourceError> {
        self.check(offset)?;
        self.inner.read(offset, to)
    }
}

#[derive(Default)]
struct Events {
    completed: AtomicUsize,
    given_up: AtomicUsize,
}

impl OwnEvents for Events {
    fn completed(&self) {
        self.completed.fetch_add(1, Ordering::SeqCst);
    }
    fn given_up(&self, _: &GuestError) {
        self.given_up.fetch_add(1, Ordering::SeqCst);
    }
}

struct Restore {
    ram: GuestRam,
    pager: Pager,
    events: Arc<Events>,
}

fn begin(case: &Case, source: Arc<dyn PageSource>, locked: &Locked) -> Restore {
    let block = RamBlock::new("ram", BYTES, case.backing).unwrap();
    let ram = GuestRam::new(vec![block]).unwrap();
    let events = Arc::<Events>::default();
    let guest =
        OwnGuest { name: "own".to_owned(), ram: ram.clone(), offsets: vec![0], events: events.clone() };
    let hook = locked.hook();
    let pager = locked.on(DESTINATION_CALLER, || {
        let options = PagerOptions {
            fill: case.fill,
            record: true,
            cache_limit_bytes: PagerOptions::LEAST_CACHE_BYTES,
            ..PagerOptions::default()
        };
        hooked(Some(&hook), || Pager::serve_own(source, guest, options)).unwrap()
    });
    Restore { ram, pager, events }
}

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let end = std::time::Instant::now() + PATIENCE;
    while !is_so() {
        assert!(std::time::Instant::now() < end, "{what}: never");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn perform(case: &Case, world: &Arc<World>, outside: &Outside, locked: &Locked) -> bool {
    mark(DRIVER);
    if case.fault != Fault::None {
        disturbed(case, world, outside, locked);
    }
    let restore = begin(case, opened(case, world, outside), locked);
    let ram = restore.ram.clone();
    let content = outside.run(move || {
        let mut content = vec![1; BYTES as usize];
        ram.block(0).read(0, &mut content).unwrap();
        content
    });
    assert!(content == world.memory, "{}: memory differs", case.name);
    eventually("the end", || restore.events.completed.load(Ordering::SeqCst) == 1);
    let Restore { pager, ram, .. } = restore;
    assert!(!ram.is_filling() && pager.working_set().is_some());
    locked.on(DESTINATION_CALLER, move || drop(pager));
    true
}

/// The image, opened before the sandbox closes.
fn opened(case: &Case, world: &Arc<World>, outside: &Outside) -> Arc<Breakable> {
    let (world, format) = (Arc::clone(world), case.format);
    outside.run(move || world.source(format))
}

/// A restore that does not end.
fn disturbed(case: &Case, world: &Arc<World>, outside: &Outside, locked: &Locked) {
    let source = opened(case, world, outside);
    source.is_broken.store(case.fault == Fault::Source, Ordering::Release);
    let restore = begin(case, source, locked);
    let ram = restore.ram.clone();
    if case.fault == Fault::Cancel {
        // The guest has read a part when it ends.
        outside.run(move || ram.block(0).read(0, &mut [0; 8192]).unwrap());
        assert!(restore.ram.is_filling());
        return locked.on(DESTINATION_CALLER, move || drop(restore.pager));
    }
    // The thread waits until the process ends.
    outside.run(move || drop(std::thread::spawn(move || ram.block(0).read(4096, &mut [0; 4096]))));
    eventually("the end of the restore", || restore.events.given_up.load(Ordering::SeqCst) == 1);
    // The registration must stay while a thread waits.
    std::mem::forget(restore);
}

#[test]
fn lazy_restores_make_exactly_the_calls_of_the_table() {
    if is_child() {
        let world = Arc::new(World::new());
        let perform =
            |case: &Case, outside: &Outside, locked: &Locked| perform(case, &world, outside, locked);
        checked::check(&cases(), perform, |call: &Syscall| call.feature == Feature::LazyRestore);
    }
}
