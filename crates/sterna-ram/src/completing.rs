//! The wait for guest RAM that a server of this process still fills.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::block::RamBlock;
use crate::filling::Hurry;
use crate::guest::GuestRam;
use crate::page::PAGE_SHIFT;

/// Interval between two looks at the servers.
const LOOK: Duration = Duration::from_millis(5);

/// Servers that place the missing pages of a guest without a pause ([`GuestRam::complete`]).
///
/// Dropping the value restores their speed from before.
#[derive(Debug)]
pub struct Completing {
    ram: GuestRam,
    hurries: Vec<Box<dyn Hurry>>,
}

impl GuestRam {
    /// Lets servers place all missing pages without a pause. `None` if no page is missing.
    pub fn complete(&self) -> Option<Completing> {
        if !self.is_filling() {
            return None;
        }
        let hurries = self.blocks().iter().filter_map(|block| block.mapping.filled.hurry()).collect();
        Some(Completing { ram: self.clone(), hurries })
    }

    /// Bytes of the pages that a server of this process may still have to place.
    pub fn missing_bytes(&self) -> u64 {
        let owed = |block: &RamBlock| block.mapping.filled.owed(0, block.pages());
        let pages: u64 = self.blocks().iter().flat_map(owed).map(|(_, pages)| pages).sum();
        pages << PAGE_SHIFT
    }
}

impl Completing {
    /// Waits until no page is missing, at most for `limit`. Returns whether no page is missing.
    ///
    /// # Errors
    /// The reason why a page cannot be placed.
    pub fn wait(&self, limit: Duration) -> Result<bool, Arc<dyn Error + Send + Sync>> {
        let began = Instant::now();
        // A thread of the engine may wait for a condition. A filter of system calls may forbid other sleeps.
        let (lock, never) = (Mutex::new(()), Condvar::new());
        loop {
            if !self.ram.is_filling() {
                return Ok(true);
            }
            if let Some(obstacle) = self.hurries.iter().find_map(|hurry| hurry.obstacle()) {
                return Err(obstacle);
            }
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(false);
            }
            never.wait_for(&mut lock.lock(), left.min(LOOK));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;
    use crate::filling::Filling;
    use crate::mapping::Backing;

    #[derive(Debug, Default)]
    struct Server {
        hurries: Arc<AtomicUsize>,
        is_broken: Arc<AtomicBool>,
    }

    #[derive(Debug)]
    struct Speed(Arc<AtomicUsize>, Arc<AtomicBool>);

    impl Filling for Server {
        fn owed(&self, first: u64, count: u64, owed: &mut dyn FnMut(u64, u64)) {
            owed(first, count / 2);
        }
        fn given_back(&self, _: u64, _: u64) {}
        fn hurry(&self) -> Box<dyn Hurry> {
            self.hurries.fetch_add(1, Ordering::SeqCst);
            Box::new(Speed(Arc::clone(&self.hurries), Arc::clone(&self.is_broken)))
        }
    }

    impl Hurry for Speed {
        fn obstacle(&self) -> Option<Arc<dyn Error + Send + Sync>> {
            let is_broken = self.1.load(Ordering::SeqCst);
            is_broken.then(|| Arc::new(std::io::Error::other("frame 7")) as _)
        }
    }

    impl Drop for Speed {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn servers_hurry_until_the_wait_is_dropped_and_an_obstacle_or_the_last_page_ends_it() {
        let block = |name: &str| RamBlock::new(name, 1 << 20, Backing::Anonymous).unwrap();
        let ram = GuestRam::new(vec![block("a"), block("b")]).unwrap();
        assert!(ram.complete().is_none());
        assert_eq!(ram.missing_bytes(), 0);
        let server = Arc::<Server>::default();
        ram.blocks().iter().for_each(|block| block.begin_filling(server.clone()));
        assert_eq!(ram.missing_bytes(), 1 << 20);

        let completing = ram.complete().unwrap();
        assert_eq!(server.hurries.load(Ordering::SeqCst), 2);
        assert!(!completing.wait(Duration::ZERO).unwrap());
        server.is_broken.store(true, Ordering::SeqCst);
        assert_eq!(completing.wait(Duration::MAX).unwrap_err().to_string(), "frame 7");
        drop(completing);
        assert_eq!(server.hurries.load(Ordering::SeqCst), 0);

        let completing = ram.complete().unwrap();
        ram.blocks().iter().for_each(RamBlock::end_filling);
        assert!(completing.wait(Duration::ZERO).unwrap(), "complete memory has no obstacle any more");
        drop(completing);
        assert_eq!((server.hurries.load(Ordering::SeqCst), ram.missing_bytes()), (0, 0));
    }
}
