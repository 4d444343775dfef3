//! Counts a process's descriptors and threads, to find those that a case leaves behind.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Tests of one binary share a process, so cases run one after the other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs a case alone, and asserts that the process has the same descriptors and threads before and afterwards.
pub fn case<T>(name: &str, run: impl FnOnce() -> T) -> T {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let before = Census::take();
    let result = run();
    let began = Instant::now();
    // A thread that is ending may need a moment.
    loop {
        let left = Census::take().beyond(&before);
        if left.is_empty() {
            return result;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{name} leaves behind: {left:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

struct Census {
    descriptors: BTreeMap<String, String>,
    threads: BTreeMap<String, String>,
}

impl Census {
    fn take() -> Self {
        let mut census = Self { descriptors: BTreeMap::new(), threads: BTreeMap::new() };
        for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
            if let Ok(target) = std::fs::read_link(entry.path()) {
                // The directory listing has a descriptor of its own while it is read.
                if !target.to_string_lossy().contains("/proc/") {
                    census.descriptors.insert(name(&entry), target.to_string_lossy().into_owned());
                }
            }
        }
        for entry in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
            let comm = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            // The test runner's threads have the names of tests, cut to 15 bytes. The engine's names are shorter.
            let comm = comm.trim();
            if !comm.contains('_') && !comm.is_empty() && comm.len() < 15 {
                census.threads.insert(name(&entry), comm.to_owned());
            }
        }
        census
    }

    fn beyond(&self, before: &Self) -> Vec<String> {
        let descriptors = extra("descriptor", &self.descriptors, &before.descriptors);
        descriptors.chain(extra("thread", &self.threads, &before.threads)).collect()
    }
}

fn extra<'a>(
    what: &'a str,
    now: &'a BTreeMap<String, String>,
    before: &'a BTreeMap<String, String>,
) -> impl Iterator<Item = String> + 'a {
    let new = now.iter().filter(|(id, _)| !before.contains_key(*id));
    new.map(move |(id, name)| format!("{what} {id} ({name})"))
}

fn name(entry: &std::fs::DirEntry) -> String {
    entry.file_name().to_string_lossy().into_owned()
}
