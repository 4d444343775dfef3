//! The unit in which guest memory is registered (`specs/rdma.md §6.5`).

use crate::error::WireError;
use std::fmt;

/// A chunk size: a power of two from 1 MiB to 1 GiB.
///
/// The parameter `x-rdma-chunk-size` sets it. QEMU never transmits it. Both sides of a QEMU migration need the
/// same value, or the destination the larger one. A Sterna states it in its
/// [`Introduction`](super::Introduction).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkSize(u32);

impl ChunkSize {
    /// The smallest chunk size and QEMU's default: 1 MiB.
    pub const LEAST: Self = Self(1 << 20);
    /// The largest chunk size: 1 GiB.
    pub const MOST: Self = Self(1 << 30);
    /// With windows of this length, the fixed cost of a registration is small.
    pub(super) const WINDOW: Self = Self(256 << 20);

    /// A chunk size of `bytes` bytes.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) when it is not a power of two from 1 MiB to 1 GiB.
    pub fn new(bytes: u64) -> Result<Self, WireError> {
        Self::exact(bytes).ok_or_else(|| {
            let rule = format!("{bytes} bytes are not a power of two from 1 MiB to 1 GiB");
            WireError::local("x-rdma-chunk-size", 0, "specs/rdma.md §6.5", rule)
        })
    }

    pub(super) fn exact(bytes: u64) -> Option<Self> {
        let size = Self(u32::try_from(bytes).ok()?);
        (size.0.is_power_of_two() && (Self::LEAST..=Self::MOST).contains(&size)).then_some(size)
    }

    pub(super) fn twice(self) -> Option<Self> {
        Self::exact(self.bytes() * 2)
    }

    /// The smaller of `self` and the largest size that fits twice into `bytes`. At least 1 MiB.
    ///
    /// One of the two chunks is registered while the other one is written.
    #[must_use]
    pub fn twice_within(self, bytes: u64) -> Self {
        let most = Self::exact(1 << (bytes / 2).clamp(Self::LEAST.bytes(), Self::MOST.bytes()).ilog2());
        most.map_or(self, |most| self.min(most))
    }

    /// The size in bytes.
    pub fn bytes(self) -> u64 {
        u64::from(self.0)
    }

    /// Length of windows for a QEMU with this chunk size, at least 256 MiB.
    ///
    /// A registration call can cost as much as writing several MiB of memory. With shorter windows, the calls
    /// take more than a few percent of the time.
    #[must_use]
    pub fn window(self) -> Self {
        self.max(Self::WINDOW)
    }

    /// Number of chunks in a block of `length_bytes`. The last chunk may be shorter.
    pub fn chunks_in(self, length_bytes: u64) -> u64 {
        length_bytes.div_ceil(self.bytes())
    }
}

impl Default for ChunkSize {
    fn default() -> Self {
        Self::LEAST
    }
}

impl fmt::Display for ChunkSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 >> 20 {
            1024 => f.write_str("1 GiB"),
            mib => write!(f, "{mib} MiB"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Fault;

    #[test]
    fn powers_of_two_from_1_mib_to_1_gib_are_chunk_sizes_and_nothing_else() {
        for shift in 20..=30 {
            assert_eq!(ChunkSize::new(1 << shift).unwrap().bytes(), 1 << shift);
        }
        for wrong in
            [0, 1, 1 << 19, 3 << 20, (1 << 20) + 1, 1 << 31, 1 << 32, (1 << 32) + (1 << 20), u64::MAX]
        {
            let error = ChunkSize::new(wrong).unwrap_err();
            assert_eq!(error.fault, Fault::Local, "{error}");
            assert!(error.to_string().contains(&wrong.to_string()), "{error}");
        }
    }

    #[test]
    fn two_chunks_fit_into_a_limit_unless_it_holds_one_alone() {
        for limit_mib in [1, 2, 3, 4, 63, 64, 1500, 2048, 1 << 20] {
            for shift in 20..=30 {
                let chunk = ChunkSize::new(1 << shift).unwrap();
                let within = chunk.twice_within(limit_mib << 20);
                assert!(within <= chunk && within.bytes() <= limit_mib << 20);
                assert!(within == ChunkSize::LEAST || 2 * within.bytes() <= limit_mib << 20, "{within}");
                assert!(within == chunk || 4 * within.bytes() > limit_mib << 20, "{within} is too small");
            }
        }
    }

    #[test]
    fn chunks_in_a_block_count_a_shorter_last_one() {
        let mib = ChunkSize::LEAST;
        assert_eq!([0, 1, 1 << 20, (1 << 20) + 1].map(|bytes| mib.chunks_in(bytes)), [0, 1, 1, 2]);
        assert_eq!(ChunkSize::MOST.chunks_in(u64::MAX), 1 << 34);
        assert_eq!([mib.to_string(), ChunkSize::MOST.to_string()], ["1 MiB", "1 GiB"]);
    }
}
