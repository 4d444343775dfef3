//! Figures that one loop measures and another thread reads.

use std::sync::Arc;

use parking_lot::Mutex;

/// The last figures of a loop that measures them itself.
#[derive(Debug)]
pub struct Board<T>(Arc<Mutex<T>>);

impl<T: Clone> Board<T> {
    /// A board with these figures.
    pub fn new(figures: T) -> Self {
        Self(Arc::new(Mutex::new(figures)))
    }

    /// Replaces the figures that the next scrape shows.
    pub fn set(&self, figures: T) {
        *self.0.lock() = figures;
    }

    /// The figures that were set last.
    pub fn get(&self) -> T {
        self.0.lock().clone()
    }
}

impl<T> Clone for Board<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}
