//! Order and content of the writes of a guest that rewrites half of its RAM. The boot sector and the guests
//! that are compared with it use the same.

use crate::Failure;

/// Address of the first swept byte.
pub(super) const FIRST: u64 = 1 << 20;
/// Minimum size of a PC's RAM below the hole for devices, MiB.
const MOST_LOW_MIB: u64 = 2048;
/// A factor that makes the words of consecutive passes differ in many bits.
pub(super) const FACTOR: u32 = 0x9e37_79b1;
const PAGE_BYTES: u32 = 4096;
/// Offsets of the words in a page.
pub(crate) const PLACES: [u64; 3] = [0, 2044, 4092];

/// The swept pages, and their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sweep {
    pages: u32,
    /// Distance from a page to the next, in pages. It wraps around at the end.
    step: u32,
}

impl Sweep {
    /// Half of a machine's RAM, in the order of addresses.
    pub(crate) fn in_order(memory_mib: u64) -> Self {
        Self { pages: (memory_mib.min(MOST_LOW_MIB) * 128) as u32, step: 1 }
    }

    /// The same pages, far apart. Each pass visits each page once, because the step and the number of pages
    /// have no common divisor.
    pub(crate) fn scattered(memory_mib: u64) -> Self {
        let pages = Self::in_order(memory_mib).pages;
        let is_coprime = |step: &u32| {
            let (mut a, mut b) = (pages, *step);
            while b > 0 {
                (a, b) = (b, a % b);
            }
            a == 1
        };
        // The golden ratio: consecutive pages are far apart, and the next few passes come to no page near
        // them.
        let step = (u64::from(pages) * 618 / 1000) as u32;
        Self { pages, step: (step..pages).find(is_coprime).unwrap_or(1) }
    }

    /// A ring of 64 MiB, in the order of addresses.
    pub(crate) fn ring() -> Self {
        Self { pages: 64 << 8, step: 1 }
    }

    /// Number of pages of a pass.
    pub(crate) fn pages(self) -> u32 {
        self.pages
    }

    pub(super) fn step_bytes(self) -> u32 {
        self.step * PAGE_BYTES
    }

    pub(super) fn bytes(self) -> u32 {
        self.pages * PAGE_BYTES
    }

    /// Address after the last swept byte.
    pub(crate) fn end(self) -> u64 {
        FIRST + u64::from(self.bytes())
    }

    /// Address of the page that is written in that step, and its word.
    pub(crate) fn written_in(self, step: u64) -> (u64, u32) {
        let pages = u64::from(self.pages);
        let address = FIRST + step % pages * u64::from(self.step) % pages * u64::from(PAGE_BYTES);
        (address, Self::word((step / pages) as u32 + 1, address))
    }

    fn word(pass: u32, address: u64) -> u32 {
        pass.wrapping_mul(FACTOR) ^ address as u32
    }

    /// Number of steps taken, computed from the words in memory. The first pass must be complete.
    ///
    /// # Errors
    /// Errors of `read`, which returns the word at an address.
    pub(crate) fn steps_in(self, mut read: impl FnMut(u64) -> Result<u32, Failure>) -> Result<u64, Failure> {
        let mut pass_of = |index: u32| {
            let (address, _) = self.written_in(u64::from(index));
            read(address).map(|word| Self::pass_of(address, word))
        };
        let pass = pass_of(0)?;
        // The pages that the current pass has written come first in its order.
        let (mut of_this, mut of_last) = (0, self.pages);
        while of_last - of_this > 1 {
            let middle = of_this + (of_last - of_this) / 2;
            if pass_of(middle)? == pass { of_this = middle } else { of_last = middle }
        }
        Ok(u64::from(pass.saturating_sub(1)) * u64::from(self.pages) + u64::from(of_last))
    }

    /// For each page, the pass that wrote it last within `steps` steps. Pages are in the order of addresses.
    /// The first pass must be complete.
    pub(crate) fn passes_after(self, steps: u64) -> Vec<u32> {
        let mut passes = vec![0; self.pages as usize];
        for step in steps.saturating_sub(u64::from(self.pages))..steps {
            let page = (self.written_in(step).0 - FIRST) / u64::from(PAGE_BYTES);
            passes[page as usize] = (step / u64::from(self.pages)) as u32 + 1;
        }
        passes
    }

    /// Whether a page has its state from that pass or a later one. `words` are its words at [`PLACES`].
    pub(crate) fn is_as_of(address: u64, words: [u32; 3], pass: u32) -> bool {
        const MOST_LATER: u32 = 1 << 16;
        let found = Self::pass_of(address, words[0]);
        words == [words[0]; 3] && found.wrapping_sub(pass) < MOST_LATER
    }

    fn pass_of(address: u64, word: u32) -> u32 {
        // FACTOR is odd, so it has an inverse.
        (word ^ address as u32).wrapping_mul(inverse(FACTOR))
    }
}

/// Inverse of an odd number, modulo 2³².
fn inverse(odd: u32) -> u32 {
    // Each iteration doubles the number of correct bits; 3 are correct initially.
    (0..4).fold(odd, |x, _| x.wrapping_mul(2u32.wrapping_sub(odd.wrapping_mul(x))))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn each_pass_meets_each_page_once() {
        for sweep in [Sweep::in_order(16), Sweep::scattered(16), Sweep::scattered(48), Sweep::scattered(512)]
        {
            let pages = u64::from(sweep.pages());
            let mut met: Vec<u64> = (0..pages).map(|step| sweep.written_in(pages + step).0).collect();
            met.sort_unstable();
            met.dedup();
            assert_eq!(met.len() as u64, pages, "{sweep:?}");
            assert_eq!((met[0], met[met.len() - 1] + 4096), (FIRST, sweep.end()), "{sweep:?}");
        }
    }

    #[test]
    fn steps_and_late_pages_are_read_from_memory() {
        let sweep = Sweep::scattered(16);
        let pages = u64::from(sweep.pages());
        for steps in [pages, pages + 1, 3 * pages - 1, 3 * pages, 3 * pages + pages / 3] {
            let mut memory: HashMap<u64, u32> = (0..steps).map(|step| sweep.written_in(step)).collect();
            assert_eq!(sweep.steps_in(|at| Ok(memory[&at])), Ok(steps));
            let late = |memory: &HashMap<u64, u32>| {
                let passes = sweep.passes_after(steps);
                let addresses = (FIRST..).step_by(PAGE_BYTES as usize).zip(passes);
                addresses.filter(|(at, pass)| !Sweep::is_as_of(*at, [memory[at]; 3], *pass)).count()
            };
            assert_eq!(late(&memory), 0);

            // One more step is accepted. A page of the previous pass is an error.
            memory.extend([sweep.written_in(steps)]);
            assert_eq!(late(&memory), 0);
            let (address, _) = sweep.written_in(steps - 1);
            let before = (steps - 1).checked_sub(pages).map_or(0, |step| sweep.written_in(step).1);
            memory.insert(address, before);
            assert_eq!(late(&memory), 1);
        }
    }
}
