//! Images, pagers and guests for the tests.

#![allow(clippy::print_stderr, reason = "a test that cannot run says why")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_pager::{
    FillRate, GuestStatistics, PageSource, Pager, PagerOptions, RawMemory, SocketPlan, SourceError,
};
use sterna_uffd_peer::Peer;

pub const MIB: u64 = 1 << 20;
/// Limit of every wait.
const PATIENCE: Duration = Duration::from_secs(60);

/// A directory with a memory file and its content.
pub struct World {
    directory: tempfile::TempDir,
    pub memory: Vec<u8>,
}

impl World {
    pub fn new(bytes: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let memory = sterna_uffd_peer::memory(bytes);
        std::fs::write(directory.path().join("memory"), &memory).unwrap();
        Self { directory, memory }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn source(&self) -> Arc<RawMemory> {
        Arc::new(RawMemory::open(&self.path("memory")).unwrap())
    }

    /// A pager of one socket.
    pub fn pager(&self, fill: FillRate) -> Pager {
        self.pager_of(self.source(), PagerOptions { fill, ..PagerOptions::default() })
    }

    pub fn pager_of(&self, source: Arc<dyn PageSource>, options: PagerOptions) -> Pager {
        Pager::start(source, &[SocketPlan { path: self.path("0.sock"), guests: 1 }], options).unwrap()
    }

    pub fn sum(&self, from: u64, bytes: u64) -> u64 {
        sterna_uffd_peer::sum(&self.memory[from as usize..(from + bytes) as usize])
    }

    pub fn socket(&self) -> PathBuf {
        self.path("0.sock")
    }
}

/// A guest whose memory is mapped. `None` if this host refuses userfaultfd; the test then skips.
pub fn guest(test: &str, page_bytes: u64, regions: &[u64]) -> Option<Peer> {
    let mut peer = start();
    match peer.map(page_bytes, regions) {
        Ok(()) => Some(peer),
        Err(why) => {
            eprintln!("SKIPPED {test}: userfaultfd: {why}");
            None
        }
    }
}

pub fn start() -> Peer {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "guest_process", "--ignored", "--nocapture"]);
    Peer::start(&mut command).unwrap()
}

/// A guest that has handed its memory over.
pub fn served(test: &str, regions: &[u64], socket: &Path) -> Option<Peer> {
    let mut peer = guest(test, 4096, regions)?;
    peer.hand_over(socket, "whole").unwrap();
    Some(peer)
}

/// Waits until the pager's guests are as `is_so` says.
pub fn until(pager: &Pager, what: &str, is_so: impl Fn(&[GuestStatistics]) -> bool) -> Vec<GuestStatistics> {
    let end = Instant::now() + PATIENCE;
    loop {
        let guests = pager.guests();
        if is_so(&guests) {
            return guests;
        }
        assert!(Instant::now() < end, "{what} did not happen: {guests:#?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A source that reads only with waiting, and counts and spoils its reads.
pub struct SlowSource {
    pub inner: Arc<RawMemory>,
    pub frame_bytes: u64,
    pub reads: std::sync::atomic::AtomicUsize,
    pub delay: Duration,
    pub is_broken: std::sync::atomic::AtomicBool,
}

impl SlowSource {
    pub fn new(world: &World, frame_bytes: u64, delay: Duration) -> Arc<Self> {
        let (reads, is_broken) = Default::default();
        Arc::new(Self { inner: world.source(), frame_bytes, reads, delay, is_broken })
    }
}

impl PageSource for SlowSource {
    fn name(&self) -> &str {
        "slow"
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn frame_bytes(&self) -> u64 {
        self.frame_bytes
    }

    fn is_zero(&self, _: u64, _: u64) -> bool {
        false
    }

    fn read_now(&self, _: u64, _: &mut [u8]) -> Result<bool, SourceError> {
        Ok(false)
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), SourceError> {
        use std::sync::atomic::Ordering;
        self.reads.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(self.delay);
        if self.is_broken.load(Ordering::Relaxed) {
            return Err(SourceError::Short { name: "slow".to_owned(), offset });
        }
        self.inner.read(offset, to)
    }
}

/// A source whose reads wait until the test lets them through.
pub struct GatedSource {
    inner: Arc<RawMemory>,
    frame_bytes: u64,
    /// Reads that have begun, and reads that may still end.
    gate: Mutex<(usize, usize)>,
    changed: Condvar,
}

impl GatedSource {
    pub fn new(world: &World, frame_bytes: u64) -> Arc<Self> {
        let (gate, changed) = Default::default();
        Arc::new(Self { inner: world.source(), frame_bytes, gate, changed })
    }

    pub fn let_through(&self, reads: usize) {
        self.gate.lock().1 += reads;
        self.changed.notify_all();
    }

    pub fn reads(&self) -> usize {
        self.gate.lock().0
    }

    /// Waits until so many reads have begun.
    pub fn until(&self, what: &str, is_so: impl Fn(usize) -> bool) {
        eventually(what, || is_so(self.reads()));
    }
}

/// Lets all reads through when it is dropped, also by a failed assertion.
pub struct OpenAtEnd(pub Arc<GatedSource>);

impl Drop for OpenAtEnd {
    fn drop(&mut self) {
        self.0.gate.lock().1 = usize::MAX >> 2;
        self.0.changed.notify_all();
    }
}

/// Waits until `is_so`.
pub fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what} does not come");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl PageSource for GatedSource {
    fn name(&self) -> &str {
        "gated"
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn frame_bytes(&self) -> u64 {
        self.frame_bytes
    }

    fn is_zero(&self, _: u64, _: u64) -> bool {
        false
    }

    fn read_now(&self, _: u64, _: &mut [u8]) -> Result<bool, SourceError> {
        Ok(false)
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), SourceError> {
        let mut gate = self.gate.lock();
        gate.0 += 1;
        while gate.1 == 0 {
            self.changed.wait(&mut gate);
        }
        gate.1 -= 1;
        drop(gate);
        self.inner.read(offset, to)
    }
}
