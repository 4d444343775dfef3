//! At the receiver: the pages to which frames may refer.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::hash::PageHash;
use super::known::MOST_ANNOUNCED;
use crate::frame::PAGE_BYTES;

/// Memory of one page with its hash and its places in the tables, in bytes.
const COST: u64 = PAGE_BYTES as u64 + 256;

/// Pages that are always there, such as those of an image.
pub trait Dictionary: Send + Sync {
    /// Copies the page with this hash. False: it does not have the page, or cannot read it any more.
    fn copy(&self, page: &PageHash, to: &mut [u8; PAGE_BYTES]) -> bool;

    /// The first 8 bytes of the hashes of its pages.
    fn prefixes(&self) -> Vec<u64>;
}

/// The pages of a relay at the destination, for all its sessions.
pub struct Cache {
    kept: Mutex<Kept>,
    most: usize,
    dictionaries: Vec<Arc<dyn Dictionary>>,
}

#[derive(Default)]
struct Kept {
    /// The number under which the page came the last time, and its bytes.
    pages: HashMap<PageHash, (u64, Box<[u8]>)>,
    /// Numbers and pages from the oldest on. A page that came again has older entries, too.
    order: VecDeque<(u64, PageHash)>,
    count: u64,
}

impl Cache {
    /// A cache of at most `bytes` bytes of memory, and dictionaries.
    pub fn new(bytes: u64, dictionaries: Vec<Arc<dyn Dictionary>>) -> Self {
        // The field of the greeting has 31 bits.
        let most = (bytes / COST).min((1 << 31) - 1) as usize;
        Self { kept: Mutex::default(), most, dictionaries }
    }

    /// Pages that it keeps at most.
    pub fn most_pages(&self) -> u32 {
        self.most as u32
    }

    /// Pages that it keeps now.
    pub fn pages(&self) -> usize {
        self.kept.lock().pages.len()
    }

    /// Keeps a page. The one that came least recently goes if there are too many.
    pub fn keep(&self, hash: PageHash, page: &[u8]) {
        if self.most == 0 {
            return;
        }
        let kept = &mut *self.kept.lock();
        kept.count += 1;
        let number = kept.count;
        kept.order.push_back((number, hash));
        match kept.pages.entry(hash) {
            // A sender that forgot the page counts it as its newest one now.
            Entry::Occupied(mut entry) => entry.get_mut().0 = number,
            Entry::Vacant(entry) => drop(entry.insert((number, page.into()))),
        }
        while kept.pages.len() > self.most {
            kept.drop_oldest();
        }
        if kept.order.len() > 2 * self.most {
            let pages = &kept.pages;
            kept.order.retain(|(number, hash)| pages.get(hash).is_some_and(|(last, _)| last == number));
        }
    }

    /// Copies the page with this hash. False: it is not there.
    pub fn copy(&self, page: &PageHash, to: &mut [u8; PAGE_BYTES]) -> bool {
        if let Some(found) = self.kept.lock().pages.get(page) {
            to.copy_from_slice(&found.1);
            return true;
        }
        self.dictionaries.iter().any(|dictionary| dictionary.copy(page, to))
    }

    /// The pages by the first 8 bytes of their hashes: those that stay, and the others from the oldest on.
    pub fn announcement(&self) -> (Vec<u64>, Vec<u64>) {
        let mut lasting: Vec<u64> = self.dictionaries.iter().flat_map(|it| it.prefixes()).collect();
        lasting.truncate(MOST_ANNOUNCED);
        let kept = self.kept.lock();
        let is_last =
            |(number, hash): &&(u64, PageHash)| kept.pages.get(hash).is_some_and(|it| it.0 == *number);
        let pages = kept.order.iter().filter(is_last).map(|(_, hash)| hash.prefix()).collect();
        (lasting, pages)
    }
}

impl Kept {
    fn drop_oldest(&mut self) {
        while let Some((number, hash)) = self.order.pop_front() {
            if self.pages.get(&hash).is_some_and(|(last, _)| *last == number) {
                self.pages.remove(&hash);
                return;
            }
        }
    }
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("most", &self.most).finish_non_exhaustive()
    }
}
