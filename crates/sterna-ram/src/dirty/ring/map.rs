//! One vCPU's dirty ring, mapped into this process: takes entries out and has them reset.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::page::PAGE_BYTES;

/// Offset of the ring in a vCPU's descriptor, in pages.
const RING_PAGE_OFFSET: u64 = 64;
/// Set by the kernel: the entry contains a page.
const DIRTY: u32 = 1 << 0;
/// Set by this process: the entry was taken out, and the kernel may reset it.
const RESET: u32 = 1 << 1;

/// An entry of the ring, shared with the kernel: `struct kvm_dirty_gfn`.
#[repr(C)]
struct Entry {
    flags: AtomicU32,
    slot: AtomicU32,
    offset: AtomicU64,
}

const _: () = assert!(size_of::<Entry>() == 16);

/// Limit of consecutive resets that reset no entry. A signal may end one early, but this many have another
/// reason.
const IDLE_RESETS: u32 = 16;
/// Limit of attempts to take and reset the entries of a ring that keeps filling.
const ATTEMPTS: u32 = 64;

/// The entries of one vCPU's ring, and this process's position in it. Positions grow without limit and wrap
/// with the ring.
#[derive(Debug)]
pub(super) struct RingMap {
    entries: NonNull<Entry>,
    count: u32,
    /// Position of the next entry to take out.
    next: u32,
    /// Position of the next entry that [`RingMap::each_new`] has not read; never less than `next`.
    unseen: u32,
    /// Number of entries before `next` that are marked and not reset yet.
    unreset: u32,
    /// Whether the last taking found at least half a ring.
    was_heavy: bool,
    /// Whether the kernel has overrun the ring before. The positions may then differ from the kernel's.
    is_wary: bool,
    /// Number of marks that were set; shows whether entries were taken since.
    marks: u64,
    /// The value of `marks` when a vCPU exited for a full but empty ring.
    empty_at: Option<u64>,
}

/// The result of [`RingMap::reap`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Reaped {
    /// Number of entries that were taken out.
    pub(super) entries: u64,
    /// Whether the kernel overran the ring: pages were lost, or not protected again.
    pub(super) overrun: bool,
}

// SAFETY: this value owns the mapping, and the entries are accessed only by atomics, so the thread does not
// matter.
unsafe impl Send for RingMap {}

impl RingMap {
    /// Maps the ring of a vCPU; `count` is its number of entries, a power of two.
    pub(super) fn new(vcpu: BorrowedFd<'_>, count: u32) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses, so no other code uses it.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                count as usize * size_of::<Entry>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                (RING_PAGE_OFFSET * PAGE_BYTES) as libc::off_t,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let entries = NonNull::new(address.cast()).ok_or_else(|| io::Error::other("mmap gave address 0"))?;
        Ok(Self {
            entries,
            count,
            next: 0,
            unseen: 0,
            unreset: 0,
            was_heavy: false,
            is_wary: false,
            marks: 0,
            empty_at: None,
        })
    }

    /// Calls `each` for every entry that is new since the last call. The entries stay in the ring.
    ///
    /// `each` gets the slot and the page in the slot.
    pub(super) fn each_new(&mut self, mut each: impl FnMut(u32, u64)) {
        while self.unseen.wrapping_sub(self.next) < self.count && self.is_dirty(self.unseen) {
            let entry = self.entry(self.unseen);
            each(entry.slot.load(Ordering::Relaxed), entry.offset.load(Ordering::Relaxed));
            self.unseen = self.unseen.wrapping_add(1);
        }
    }

    /// Whether at least half of the ring is waiting, counting only entries that were read.
    pub(super) fn is_half_full(&self) -> bool {
        self.unseen.wrapping_sub(self.next) >= self.count / 2
    }

    /// Takes all entries out, oldest first, and has them reset.
    ///
    /// `each` gets slot and page in the slot of each entry, also of those that `each_new` has read. `reset` is the
    /// system call and returns the number of entries that it has reset. No other ring may wait for its reset meanwhile.
    /// The error is `reset`'s, or that the ring's content does not become stable.
    pub(super) fn reap(
        &mut self,
        mut each: impl FnMut(u32, u64),
        mut reset: impl FnMut() -> io::Result<u32>,
    ) -> io::Result<Reaped> {
        let mut reaped = Reaped::default();
        for _ in 0..ATTEMPTS {
            let (entries, overrun) = self.take(&mut each);
            reaped.entries += u64::from(entries);
            reaped.overrun |= overrun;
            if self.wait_for_reset(&mut reset)? {
                return Ok(reaped);
            }
            // The kernel overwrote entries that were taken out. The new entries can be taken now.
            (reaped.overrun, self.is_wary) = (true, true);
        }
        Err(io::Error::other("the ring's content does not become stable"))
    }

    /// Does the same as [`RingMap::reap`] for a vCPU that exited because its ring is full.
    pub(super) fn reap_full(
        &mut self,
        mut each: impl FnMut(u32, u64),
        mut reset: impl FnMut() -> io::Result<u32>,
    ) -> io::Result<Reaped> {
        let reaped = self.reap(&mut each, &mut reset)?;
        if reaped.entries > 0 || reaped.overrun {
            return Ok(reaped);
        }
        // Either another thread emptied the ring first, or the ring is full of positions without an entry (see
        // the module).
        if self.empty_at.replace(self.marks) != Some(self.marks) {
            return Ok(reaped);
        }
        self.is_wary = true;
        let found = self.reap(&mut each, &mut reset)?;
        if found.entries == 0 && !found.overrun {
            // The kernel reports a full ring only if at least this many positions are in use.
            self.skip(self.count / 4);
            self.wait_for_reset(&mut reset)?;
        }
        Ok(Reaped { overrun: true, ..found })
    }

    /// Takes out the present entries. Returns their number, and whether the kernel must have overrun the ring.
    fn take(&mut self, each: &mut impl FnMut(u32, u64)) -> (u32, bool) {
        let (mut taken, mut overrun) = (0, false);
        let was_heavy = self.was_heavy;
        loop {
            while taken < self.count && self.is_dirty(self.next) {
                let entry = self.entry(self.next);
                each(entry.slot.load(Ordering::Relaxed), entry.offset.load(Ordering::Relaxed));
                self.skip(1);
                taken += 1;
            }
            if taken == self.count {
                // A kernel that respects its limit never fills a ring to the last entry.
                overrun = true;
                break;
            }
            // Reading the whole ring is expensive. It is done only after an overrun, or if half of the ring was
            // taken now or last time.
            if !(self.is_wary || was_heavy || taken >= self.count / 2) {
                break;
            }
            match self.dirty_ahead() {
                None => break,
                Some(distance) => {
                    overrun |= distance > 0;
                    self.skip(distance);
                }
            }
        }
        self.was_heavy = taken >= self.count / 2;
        self.is_wary |= overrun;
        (taken, overrun)
    }

    /// Marks the next `positions` entries, whatever they contain.
    fn skip(&mut self, positions: u32) {
        for _ in 0..positions {
            // Release: the kernel may overwrite the entry as soon as it sees the mark.
            self.entry(self.next).flags.store(RESET, Ordering::Release);
            self.next = self.next.wrapping_add(1);
            self.unreset += 1;
            self.marks += 1;
        }
        if self.unseen.wrapping_sub(self.next) > self.count {
            self.unseen = self.next;
        }
    }

    /// Returns the distance of the first dirty entry after `next`, which was not dirty.
    fn dirty_ahead(&self) -> Option<u32> {
        let found = (1..self.count).find(|distance| self.is_dirty(self.next.wrapping_add(*distance)))?;
        // The kernel fills entries in order, so it may have filled `next` during the search.
        Some(if self.is_dirty(self.next) { 0 } else { found })
    }

    /// Has the marked entries reset. Returns `false` if the kernel leaves some entries unreset.
    fn wait_for_reset(&mut self, reset: &mut impl FnMut() -> io::Result<u32>) -> io::Result<bool> {
        let mut idle = 0;
        while self.unreset > 0 {
            match reset() {
                Ok(done) if done > 0 => {
                    self.unreset = self.unreset.saturating_sub(done);
                    idle = 0;
                }
                Err(error) if error.raw_os_error() != Some(libc::EINTR) => return Err(error),
                _ if idle < IDLE_RESETS => idle += 1,
                _ if self.mark_again() => idle = 0,
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Marks the entries again that wait for their reset and have lost their mark. Returns whether there were
    /// any.
    fn mark_again(&mut self) -> bool {
        let mut any = false;
        for back in 1..=self.unreset.min(self.count) {
            let flags = &self.entry(self.next.wrapping_sub(back)).flags;
            any |= flags.compare_exchange(0, RESET, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        }
        any
    }

    fn is_dirty(&self, position: u32) -> bool {
        self.entry(position).flags.load(Ordering::Acquire) & (DIRTY | RESET) == DIRTY
    }

    fn entry(&self, position: u32) -> &Entry {
        let index = (position & (self.count - 1)) as usize;
        // SAFETY: `index` is below `count`, the length of the mapping, which lives as long as `self`. All
        // fields are atomics, for which any bytes are valid and which the kernel may change at any time.
        unsafe { self.entries.add(index).as_ref() }
    }
}

impl Drop for RingMap {
    fn drop(&mut self) {
        // SAFETY: exactly what `new` mapped, and no reference to it outlives `self`.
        unsafe { libc::munmap(self.entries.as_ptr().cast(), self.count as usize * size_of::<Entry>()) };
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs::File;
    use std::os::fd::{AsFd, FromRawFd};
    use std::os::unix::fs::FileExt;

    use super::*;

    const COUNT: u32 = 256;

    /// A simulated kernel. The bytes of `file` after the offset are the ring; `pushed` and `reset` are its
    /// positions.
    struct Kernel {
        file: File,
        pushed: u32,
        reset: u32,
    }

    impl Kernel {
        fn new() -> (Self, RingMap) {
            // SAFETY: a new descriptor that no one else knows.
            let file = unsafe { File::from_raw_fd(libc::memfd_create(c"ring".as_ptr(), 0)) };
            file.set_len(RING_PAGE_OFFSET * PAGE_BYTES + u64::from(COUNT) * 16).unwrap();
            let map = RingMap::new(file.as_fd(), COUNT).unwrap();
            (Self { file, pushed: 0, reset: 0 }, map)
        }

        fn at(position: u32) -> u64 {
            RING_PAGE_OFFSET * PAGE_BYTES + u64::from(position % COUNT) * 16
        }

        /// Adds an entry like the kernel, which does not check what it overwrites.
        fn push(&mut self, offset: u64) {
            let mut bytes = [0; 16];
            bytes[0] = DIRTY as u8;
            bytes[4..8].copy_from_slice(&7u32.to_le_bytes());
            bytes[8..].copy_from_slice(&offset.to_le_bytes());
            self.file.write_all_at(&bytes, Self::at(self.pushed)).unwrap();
            self.pushed += 1;
        }

        fn is_soft_full(&self) -> bool {
            self.pushed - self.reset >= COUNT - 64
        }

        fn flags(&self, position: u32) -> u8 {
            let mut byte = [0];
            self.file.read_exact_at(&mut byte, Self::at(position)).unwrap();
            byte[0]
        }

        fn reset(&mut self) -> u32 {
            let before = self.reset;
            while self.flags(self.reset) & RESET as u8 != 0 {
                self.file.write_all_at(&[0], Self::at(self.reset)).unwrap();
                self.reset += 1;
            }
            assert!(self.reset <= self.pushed, "reset further than was pushed");
            self.reset - before
        }
    }

    fn reap(kernel: &mut Kernel, map: &mut RingMap) -> (Vec<u64>, Reaped) {
        let mut found = Vec::new();
        let reaped = map.reap(|_, offset| found.push(offset), || Ok(kernel.reset())).unwrap();
        (found, reaped)
    }

    #[test]
    fn ring_reaped_gives_each_entry_once_over_many_turns() {
        let (mut kernel, mut map) = Kernel::new();
        for turn in 0..20 {
            let count = [0, 1, 100, u64::from(COUNT) - 60][turn % 4];
            (0..count).for_each(|more| kernel.push(more + 1000));

            let (found, reaped) = reap(&mut kernel, &mut map);

            assert_eq!(found, (1000..1000 + count).collect::<Vec<_>>(), "turn {turn}");
            assert_eq!(reaped, Reaped { entries: count, overrun: false });
            assert!(reap(&mut kernel, &mut map).0.is_empty(), "not again");
            assert_eq!(kernel.pushed, kernel.reset);
        }
    }

    #[test]
    fn ring_whose_entries_are_read_is_left_alone_and_not_seen_twice() {
        let (mut kernel, mut map) = Kernel::new();
        (0..10).for_each(|offset| kernel.push(offset));
        let new = |map: &mut RingMap| {
            let mut found = Vec::new();
            map.each_new(|slot, offset| found.push((slot, offset)));
            found
        };

        assert_eq!(new(&mut map), (0..10).map(|offset| (7, offset)).collect::<Vec<_>>());
        assert_eq!(new(&mut map), []);
        assert_eq!(kernel.flags(3), DIRTY as u8);
        assert!(!map.is_half_full());
        (10..COUNT.into()).for_each(|offset| kernel.push(offset));
        assert_eq!(new(&mut map).len(), COUNT as usize - 10, "to the end of the ring, not round it");
        assert!(map.is_half_full());
        assert_eq!(reap(&mut kernel, &mut map).0.len(), COUNT as usize);
        assert_eq!(new(&mut map), []);
    }

    #[test]
    fn reset_ended_by_signals_goes_on() {
        let (mut kernel, mut map) = Kernel::new();
        (0..100).for_each(|offset| kernel.push(offset));
        let mut call = 0;

        let reaped = map.reap(
            |_, _| (),
            || {
                call += 1;
                match call {
                    1 => Err(io::Error::from_raw_os_error(libc::EINTR)),
                    2 | 3 => Ok(0),
                    _ => Ok(kernel.reset()),
                }
            },
        );

        assert_eq!(reaped.unwrap(), Reaped { entries: 100, overrun: false });
        let refused = map.reap(|_, _| (), || panic!("there is nothing to reset"));
        assert!(refused.is_ok());
    }

    /// Simulates a kernel that overruns the ring between two checks of its limits.
    ///
    /// Some kernels that emulate the guest do that. Every loss must be reported, and the ring must continue to
    /// work.
    #[test]
    fn ring_run_over_is_noticed_and_goes_on() {
        let seed = sterna_testing::seed("ring_run_over");
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut random = |below: u64| rng.u64(..below);
        let (mut kernel, mut map) = Kernel::new();
        // Pages that were written and not reported yet. No write is lost if each is found, or all pages are
        // reported.
        let (mut written, mut next, mut overruns) = (BTreeSet::new(), 0, 0);
        for turn in 0..3_000 {
            let most = [10, 100, 300, 700][random(4) as usize];
            let burst = random(most);
            let mut pushed = 0;
            while pushed < burst && (pushed > 0 || !kernel.is_soft_full()) {
                kernel.push(next);
                written.insert(next);
                (next, pushed) = (next + 1, pushed + 1);
            }
            let full = kernel.is_soft_full();
            // Sometimes the guest continues to write between the taking and the reset.
            let mut late = if random(5) == 0 { random(300) } else { 0 };
            let mut found = BTreeSet::new();
            let reset = || {
                for _ in 0..std::mem::take(&mut late) {
                    kernel.push(next);
                    written.insert(next);
                    next += 1;
                }
                Ok(kernel.reset())
            };
            let each = |_, offset| {
                found.insert(offset);
            };
            let reaped = if full { map.reap_full(each, reset) } else { map.reap(each, reset) }.unwrap();
            if reaped.overrun {
                overruns += 1;
                written.clear(); // everything counts as written
            }
            written.retain(|offset| !found.contains(offset));
            // Pages that were written between taking and reset must be found by one of the next syncs.
            if turn % 3 == 0 {
                for _ in 0..3 {
                    let (found, reaped) = reap(&mut kernel, &mut map);
                    written.retain(|offset| !found.contains(offset));
                    if reaped.overrun {
                        written.clear();
                    }
                }
                assert!(written.is_empty(), "turn {turn}, seed {seed}: {written:?} were lost in silence");
            }
        }
        assert!(overruns > 100 && overruns < 3_000, "{overruns}");
    }
}
